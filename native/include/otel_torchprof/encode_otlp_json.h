/* Spans as OTLP/JSON: the JSON of opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest, with ids as
 * hexadecimal digits and enumerations as numbers. Pure, as everything in encode.h.
 */
#ifndef OTEL_TORCHPROF_ENCODE_OTLP_JSON_H_
#define OTEL_TORCHPROF_ENCODE_OTLP_JSON_H_

#include "encode_otlp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The text of a request around its spans. */
typedef struct {
  otp_bytes head; /* up to the bracket that opens the list of spans */
  otp_bytes tail; /* from the bracket that closes it, with what ends a line */
} otp_otlp_json_frame;

/* Appends to `out` one request with the spans from row `first` up to row `end` (not included), as many as fit into
 * `max_bytes`; one span that is larger than that goes alone. Names that are not valid UTF-8 get U+FFFD where they are
 * not. No line ends within it.
 *
 * Returns the row to continue with (`end` when all are done), or -1 when memory is short, with out->size as it was.
 * With first >= end nothing is appended and `end` is returned. The caller has checked that end <= spans->count, and
 * that the indices into names and traces are in range. */
int64_t otp_encode_otlp_json(const otp_spans* spans, const otp_otlp_json_frame* frame, uint64_t first, uint64_t end,
                             uint64_t max_bytes, otp_buffer* out);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_ENCODE_OTLP_JSON_H_ */
