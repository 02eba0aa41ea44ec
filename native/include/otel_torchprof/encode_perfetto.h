/* Spans as packets of Perfetto's trace format (perfetto.protos.Trace). Pure, as everything in encode.h. */
#ifndef OTEL_TORCHPROF_ENCODE_PERFETTO_H_
#define OTEL_TORCHPROF_ENCODE_PERFETTO_H_

#include "encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How spans are written: which, where, and what interned data an earlier packet of the sequence has. Not checked here:
 * every row must be below spans->count, those of a track must follow each other and nest, the outer first. */
typedef struct {
  const uint64_t* rows; /* the spans to write, in this order */
  uint64_t row_count;
  const uint64_t* track;    /* per entry of `rows`: the track's uuid */
  const uint32_t* category; /* likewise: its iid */
  /* Arrows, by the entry of `rows` at which one starts or ends, rising. */
  const uint64_t* flow_place;
  const uint64_t* flow_id;
  const uint8_t* flow_ends; /* 1: it ends there */
  uint64_t flow_count;
  const uint32_t* key_iids; /* of each attribute's key; those of what every span has are the OTP_PERFETTO_KEYs */
  uint32_t sequence;
  /* Name i has iid i + 1, among event names and string values; the digits of trace i are the string value
   * first_trace_iid
   * + i. */
  uint64_t first_trace_iid;
  uint64_t* open;      /* room for row_count entries of `rows`: those that are open ... */
  uint64_t open_count; /* ... so many now; kept from call to call, 0 before the first */
} otp_perfetto_layout;

/* The iids of the names of arguments that every span may have. */
enum otp_perfetto_key {
  OTP_PERFETTO_TRACE_ID = 1,
  OTP_PERFETTO_SPAN_ID = 2,
  OTP_PERFETTO_PARENT_ID = 3,
  OTP_PERFETTO_ATTRIBUTES = 4,
  OTP_PERFETTO_STATUS = 5,
  OTP_PERFETTO_KEYS = 6, /* the first that is free */
};

/* Appends the spans from entry `first` of `rows` on to `out`, until `out` holds `limit` bytes or more: the begin of
 * each one, and the ends of those that are open before it; behind the last one, all ends. Returns the next entry
 * (row_count when all are written), or -1 when memory is short; `out` is then to be thrown away. */
int64_t otp_encode_perfetto(const otp_spans* spans, otp_perfetto_layout* layout, uint64_t first, uint64_t limit,
                            otp_buffer* out);

/* One quantity over time, as `count` samples, each of which holds until the next. */
typedef struct {
  uint64_t count;
  const int64_t* time; /* Unix ns */
  const int64_t* value;
  uint64_t track; /* its uuid */
  uint32_t sequence;
} otp_perfetto_counter;

/* As otp_encode_perfetto. */
int64_t otp_encode_perfetto_counter(const otp_perfetto_counter* counter, uint64_t first, uint64_t limit,
                                    otp_buffer* out);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_ENCODE_PERFETTO_H_ */
