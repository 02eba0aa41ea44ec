/* Spans as OTLP: serialized opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest messages.
 *
 * The bytes are those that OpenTelemetry's Python SDK exporter makes of the same spans, attributes in the order of
 * `otp_spans.attributes`. Pure, as everything in encode.h.
 */
#ifndef OTEL_TORCHPROF_ENCODE_OTLP_H_
#define OTEL_TORCHPROF_ENCODE_OTLP_H_

#include "encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of somebody else; `data` may be null when `size` is 0. */
typedef struct {
  const uint8_t* data;
  uint64_t size;
} otp_bytes;

/* What all spans of a request have in common. Everything may be empty. */
typedef struct {
  otp_bytes resource; /* serialized opentelemetry.proto.resource.v1.Resource */
  otp_bytes resource_schema_url;
  otp_bytes scope; /* serialized opentelemetry.proto.common.v1.InstrumentationScope */
  otp_bytes scope_schema_url;
} otp_otlp_common;

/* Appends to `out` one message with the spans from row `first` up to row `end` (not included), as many as fit into
 * `max_bytes`; one span that is larger than that goes alone. Names that are not valid UTF-8 get U+FFFD where they are
 * not.
 *
 * Returns the row to continue with (`end` when all are done), or -1 when memory is short, with out->size as it was.
 * With first >= end nothing is appended and `end` is returned. The caller has checked that end <= spans->count, and
 * that the indices into names and traces are in range. */
int64_t otp_encode_otlp(const otp_spans* spans, const otp_otlp_common* common, uint64_t first, uint64_t end,
                        uint64_t max_bytes, otp_buffer* out);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_ENCODE_OTLP_H_ */
