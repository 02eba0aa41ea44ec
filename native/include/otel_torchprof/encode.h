/* Columns in, bytes out: the encoders' half of the C boundary.
 *
 * Every function here is pure: it reads the arrays it is given, writes into memory that it allocates, does no I/O,
 * takes no lock and keeps nothing. All arrays are the caller's, must stay unchanged during the call and are not
 * referred to after it. May be called from any thread, several at a time.
 */
#ifndef OTEL_TORCHPROF_ENCODE_H_
#define OTEL_TORCHPROF_ENCODE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Names end to end; name i is data[ends[i-1] .. ends[i]) with ends[-1] = 0. Not necessarily valid UTF-8. Names from
 * `count` on lie in the same way in more_data and more_ends: those that a table adds to the recorder's, of which it
 * makes no copy. */
typedef struct {
  const uint8_t* data;
  const uint64_t* ends;
  uint64_t count;
  const uint8_t* more_data; /* or null: none */
  const uint64_t* more_ends;
} otp_names;

/* A growing buffer that the caller owns. Zero-initialise it; otp_buffer_free when done (safe on a zeroed one). Encoders
 * append at `size`, so one buffer can be used for many calls by setting size to 0. */
typedef struct {
  uint8_t* data;
  uint64_t size;
  uint64_t capacity;
} otp_buffer;

void otp_buffer_free(otp_buffer* buffer);

/* How the values of an attribute are read. */
enum otp_attribute_type {
  OTP_ATTRIBUTE_INT64 = 1,  /* const int64_t*            -> intValue */
  OTP_ATTRIBUTE_DOUBLE = 2, /* const double*            -> doubleValue */
  OTP_ATTRIBUTE_BOOL = 3,   /* const uint8_t*             -> boolValue */
  OTP_ATTRIBUTE_NAME = 4,   /* const uint32_t*, into names -> stringValue */
};

/* One attribute of spans: a key, and a value for each of the spans that have it: those of some rows, rising, or (null)
 * of all. */
typedef struct {
  const char* key;
  uint32_t key_size;
  uint32_t type;
  const void* values;
  const uint32_t* rows;
  uint64_t row_count;
} otp_attribute;

/* A link from one span (row) to another; sorted by row. */
typedef struct {
  uint64_t row;
  uint8_t trace_id[16];
  uint64_t span_id; /* big-endian on the wire */
} otp_link;

/* Spans as columns. `names` serves span names, string attributes, error types and trace states alike. */
typedef struct {
  uint64_t count;
  const uint32_t* name;
  const int64_t* start;            /* Unix ns */
  const int64_t* end;              /* Unix ns */
  const uint32_t* trace;           /* index into trace_ids and trace_state */
  const uint8_t* trace_ids;        /* 16 bytes each */
  const uint32_t* trace_state;     /* W3C tracestate of the spans of each: index into names, 0: none; or null: none */
  const uint64_t* span_id;         /* big-endian on the wire */
  const uint64_t* parent_span_id;  /* 0: a root */
  const uint8_t* parent_is_remote; /* 1: the parent is in another process; or null: none is */
  const uint8_t* error;            /* 1: status ERROR; or null */
  const otp_attribute* attributes;
  uint64_t attribute_count;
  const uint32_t* dropped_attributes; /* how many more the span would have; or null: none */
  const otp_link* links;
  uint64_t link_count;
  const uint32_t* dropped_links; /* likewise */
  otp_names names;
} otp_spans;

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_ENCODE_H_ */
