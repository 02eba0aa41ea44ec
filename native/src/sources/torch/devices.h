/* How long devices take for what they are given: pairs of timing events around operators, labels and modules, recorded
 * through torch's device guard interface. The third part of the boundary of the torch library (see ops.h).
 *
 * Control calls only; any thread. They may wait for the device, never longer than they are told to.
 */
#ifndef OTEL_TORCHPROF_TORCH_DEVICES_H_
#define OTEL_TORCHPROF_TORCH_DEVICES_H_

#include "otel_torchprof/recorder.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is timed. */
enum otp_device_events {
  OTP_DEVICE_EVENTS_OPS = 1,    /* labels, modules, and operators that launch something themselves */
  OTP_DEVICE_EVENTS_ALL = 2,    /* labels, modules, and all operators but the view-like ones */
  OTP_DEVICE_EVENTS_LABELS = 3, /* labels and modules */
};

typedef struct {
  uint64_t count;
  uint64_t* event; /* the columns of DEVICE_COLUMNS in _columns/schema.py */
  int64_t* start;
  int64_t* duration;
  int64_t* stream;
  int32_t* device_type;
  int32_t* device_index;
} otp_device_times;

/* Counts since the session's start. */
typedef struct {
  uint64_t timed;    /* pairs whose time is known, taken or not */
  uint64_t waiting;  /* pairs that the device has not come to */
  uint64_t late;     /* pairs that were given up at the stop */
  uint64_t captured; /* events left out since their stream was being captured */
  uint64_t lost;     /* times that there was no room for */
  uint64_t failed;   /* pairs that the device's library refused */
} otp_device_counts;

typedef struct {
  uint64_t events_alive; /* events of the device's library that exist, those of calibrations among them */
  uint64_t events_made;
  uint64_t waiting; /* pairs that wait for the device, and open events */
  uint64_t calibrations;
  int64_t
      uncertainty_ns; /* of the last calibration: its clock reading lies within this much of the device's; -1: none */
} otp_device_stats;

/* Gives this part the recorder, which otp_torch_attach has accepted. Once. */
void otp_torch_attach_devices(const otp_api* api);

/* Times a running session's events on devices of a type ("cuda"); `which`: otp_device_events; at most `most` times wait
 * to be taken. 0 and a token above 0, or -1 with the reason in `why` (zero-terminated, cut to `size`) and the token
 * left as it is. */
int otp_torch_devices_start(uint32_t consumer, const char* type, int which, uint64_t most, int64_t* token, char* why,
                            uint32_t size);

/* While paused, nothing of that session is timed. Microseconds. */
void otp_torch_devices_pause(int64_t token, int paused);

/* How many streams are being captured at the moment, by whatever threads. While any is, nothing is timed and no device
 * is asked anything. */
void otp_torch_devices_hold(int captures);

/* Reads back what devices have come to, waiting up to `wait_ns` for what had ended before the call. Returns how many
 * pairs of that still wait. */
uint64_t otp_torch_devices_collect(int64_t wait_ns);

/* Gives the times that are known to the caller, who frees them. 0, or a negative otp_status. */
int otp_torch_devices_take(int64_t token, otp_device_times* out);
void otp_torch_devices_free(otp_device_times* times);

/* Ends it: waits up to `wait_ns` for what is under way, gives up the rest, and takes what there is. The last one to
 * stop frees all events of the devices. Both are left as they are where the token is none, or no more. */
int otp_torch_devices_stop(int64_t token, int64_t wait_ns, otp_device_times* times, otp_device_counts* counts);

void otp_torch_devices_counts(int64_t token, otp_device_counts* out);
void otp_torch_devices_stats(otp_device_stats* out);

/* Why nothing is timed any more, or the empty string; cut to `size`. */
void otp_torch_devices_failure(char* why, uint32_t size);

/* The process ends: nothing is asked of a device from now on. */
void otp_torch_devices_exit(void);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_DEVICES_H_ */
