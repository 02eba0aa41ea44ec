/* What devices did, as slices on tracks: laid out in time, given lanes, written as Chrome JSON.
 *
 * A slice is what lies between two marks on a stream, one at the begin and one at the end of an event. See encode.h for
 * ownership and threads: nothing is kept, any number of threads may call at once.
 */
#ifndef OTEL_TORCHPROF_DEVICE_SLICES_H_
#define OTEL_TORCHPROF_DEVICE_SLICES_H_

#include "otel_torchprof/encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes the rounding of clocks out of slices that a stream ran one after another. Slices that follow one another in a
 * line (one thread's on one stream) are moved to the end of the one before where they begin sooner, and those inside
 * another into it, behind its first ns; only what is longer than its room is cut. `outer[i]` is the slice around slice
 * i, below i, or negative. `line[i]` below `line_count` is the line of a slice that has none around it; negative for
 * one that may overlap any. Durations are not negative. Changes `start` and `duration`. Takes 24 bytes per slice for as
 * long as it runs. Returns 0, or -1 when memory is short. */
int otp_fit_device_slices(uint64_t count, const int64_t* outer, const int64_t* line, uint64_t line_count,
                          int64_t* start, int64_t* duration);

/* Gives each slice the first lane of its track on which slices lie apart or one inside the other; the lane of the slice
 * around it where that fits. `order` lists the slices by track, then start, the outer one of two first. Writes to
 * `lane`, from 0. Takes time by the number of slices and of lanes. Returns 0, or -1 when memory is short. */
int otp_device_lanes(uint64_t count, const int64_t* order, const int64_t* track, const int64_t* outer,
                     const int64_t* start, const int64_t* duration, int64_t* lane);

/* Slices as columns of `count` rows. Every index must be in range: name in names, place in the arrays of places; not
 * checked here. */
typedef struct {
  uint64_t count;
  const int64_t* start;    /* Unix ns */
  const int64_t* duration; /* ns */
  const uint64_t* event;   /* "External id": of the event that it is the device's part of */
  const uint32_t* name;
  const uint32_t* place;
  const int64_t* launch_time; /* where its arrow starts, Unix ns */
  const int64_t* launch_tid;  /* likewise; negative for no arrow */
  const int64_t* place_pid;   /* per place, that is per lane of a stream: where it is drawn */
  const int64_t* place_tid;
  const int64_t* place_device;
  const int64_t* place_stream;
  otp_names names;         /* already escaped: otp_json_escape_names */
  uint64_t first_arrow_id; /* the number of row 0's arrow; numbers rise with the rows */
  int64_t base;            /* Unix ns that "ts" counts from */
  int64_t pid;             /* of the events that the arrows start at */
} otp_chrome_device_slices;

/* As otp_chrome_encode: each row becomes a slice and, where it has one, both ends of its arrow. */
int64_t otp_chrome_encode_device_slices(const otp_chrome_device_slices* slices, uint64_t first, uint64_t limit,
                                        otp_buffer* out);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_DEVICE_SLICES_H_ */
