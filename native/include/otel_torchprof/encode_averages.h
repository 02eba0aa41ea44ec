/* Averages of what is left out of a step, as the text of one attribute. See encode.h for threads and memory.
 */
#ifndef OTEL_TORCHPROF_ENCODE_AVERAGES_H_
#define OTEL_TORCHPROF_ENCODE_AVERAGES_H_

#include "encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Spans that are left out, and the groups that they are of. */
typedef struct {
  uint64_t count;
  const int32_t* group; /* of each span; negative: of none, which is not counted */
  const uint32_t* name; /* within `names` */
  const int64_t* start;
  const int64_t* self_time;  /* ns */
  const int64_t* calls;      /* how many each span stands for; null: 1 each */
  const int64_t* wait_start; /* waits for data, in order: spans that began in one are summed apart */
  const int64_t* wait_end;
  uint64_t wait_count;
  uint64_t group_count;
  const int64_t* most_bytes; /* of the text of each group */
  uint64_t longest_name;     /* characters; the rest of a name is cut off */
  otp_names names;
} otp_averages;

/* Appends the text of each group: a JSON list of {"name", "count", "self"}, `self` in seconds with four digits, the
 * longest first, equal ones by name; of what is in data with "phase": "data". What no longer fits, and all after it, is
 * left out. ends[i]: where the text of a group ends in the buffer. Some 5 ns a span, and 200 ns an entry. Returns 0, or
 * -1 when memory is short. */
int otp_encode_averages(const otp_averages* averages, otp_buffer* out, uint64_t* ends);

#ifdef __cplusplus
}
#endif

#endif
