// Spans as OTLP/JSON, one ExportTraceServiceRequest per line; see encode_otlp_json.h.
#include <algorithm>
#include <memory>
#include <new>

#include "encode/attribute_walk.h"
#include "encode/buffer.h"
#include "encode/json_writer.h"
#include "otel_torchprof/encode_otlp_json.h"

namespace otp {
namespace {

// Everything of a span but texts, attributes and links: keys and punctuation (264 bytes), ids, two times, counts,
// flags.
constexpr uint64_t kSpanFixedSize = 512;
// {"key":"","value":{"doubleValue":""}}, and a comma, with the longest number in it.
constexpr uint64_t kAttributeFixedSize = 48 + kMaxDoubleSize;
constexpr uint64_t kLinkSize = 128;  // {"traceId":"","spanId":"","flags":256}, a comma, and 24 bytes as 48 digits
constexpr uint64_t kMaxTextSize = kMaxEscapedBytesPerByte;

char* put_hex(char* out, const uint8_t* bytes, uint64_t size) {
  static constexpr char kDigits[] = "0123456789abcdef";
  for (uint64_t i = 0; i < size; ++i) {
    *out++ = kDigits[bytes[i] >> 4];
    *out++ = kDigits[bytes[i] & 15];
  }
  return out;
}

char* put_id(char* out, uint64_t id) {
  const uint64_t big_endian = __builtin_bswap64(id);
  uint8_t bytes[sizeof big_endian];
  std::memcpy(bytes, &big_endian, sizeof bytes);
  return put_hex(out, bytes, sizeof bytes);
}

// An attribute, written up to its value.
struct Attribute {
  const otp_attribute* column;
  const char* head;
  uint64_t head_size;
};

class JsonEncoder {
 public:
  JsonEncoder(const otp_spans& spans, const otp_otlp_json_frame& frame, otp_buffer* out)
      : spans_(spans), frame_(frame), out_(out) {}
  JsonEncoder(const JsonEncoder&) = delete;
  JsonEncoder& operator=(const JsonEncoder&) = delete;
  ~JsonEncoder() { otp_buffer_free(&heads_); }

  // See otp_encode_otlp_json.
  int64_t encode(uint64_t first, uint64_t end, uint64_t max_bytes);

 private:
  bool prepare(uint64_t first);
  bool append_span(uint64_t row, bool is_first);
  uint64_t span_bound(uint64_t row, uint64_t links);
  char* put_span(char* at, uint64_t row, uint64_t links);
  char* put_attributes(char* at, uint64_t row);
  char* put_value(char* at, const otp_attribute& column, uint64_t index) const;
  char* put_links(char* at, uint64_t count) const;
  char* put_name(char* at, uint32_t name) const;

  const otp_spans& spans_;
  const otp_otlp_json_frame& frame_;
  otp_buffer* out_;
  otp_buffer heads_{nullptr, 0, 0};
  std::unique_ptr<Attribute[]> attributes_;
  AttributeWalk walk_;
  uint64_t fixed_bound_ = kSpanFixedSize;
  const otp_link* link_ = nullptr;
};

char* put_value_key(char* at, uint32_t type) {
  switch (type) {
    case OTP_ATTRIBUTE_INT64:
      return put(at, "\",\"value\":{\"intValue\":\"");
    case OTP_ATTRIBUTE_DOUBLE:
      return put(at, "\",\"value\":{\"doubleValue\":");
    case OTP_ATTRIBUTE_BOOL:
      return put(at, "\",\"value\":{\"boolValue\":");
    default:
      return put(at, "\",\"value\":{\"stringValue\":\"");
  }
}

bool JsonEncoder::prepare(uint64_t first) {
  uint64_t heads = 0;
  for (uint64_t i = 0; i < spans_.attribute_count; ++i) {
    heads += kAttributeFixedSize + kMaxTextSize * spans_.attributes[i].key_size;
  }
  attributes_.reset(new (std::nothrow) Attribute[spans_.attribute_count]);
  if (attributes_ == nullptr || !walk_.begin(spans_) || !buffer_reserve(&heads_, heads + 1)) return false;
  fixed_bound_ += heads;
  char* at = cursor(&heads_);
  for (uint64_t i = 0; i < spans_.attribute_count; ++i) {
    const otp_attribute& column = spans_.attributes[i];
    const char* head = at;
    at = put_escaped(put(at, "{\"key\":\""), reinterpret_cast<const uint8_t*>(column.key), column.key_size);
    at = put_value_key(at, column.type);
    attributes_[i] = {&column, head, static_cast<uint64_t>(at - head)};
  }
  link_ = std::lower_bound(spans_.links, spans_.links + spans_.link_count, first,
                           [](const otp_link& link, uint64_t row) { return link.row < row; });
  return true;
}

char* JsonEncoder::put_name(char* at, uint32_t name) const {
  const JsonText text = text_at(spans_.names, name);
  return put_escaped(at, text.data, text.size);
}

uint64_t JsonEncoder::span_bound(uint64_t row, uint64_t links) {
  uint64_t text_bytes = text_at(spans_.names, spans_.name[row]).size;
  if (spans_.trace_state != nullptr) text_bytes += text_at(spans_.names, spans_.trace_state[spans_.trace[row]]).size;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    const otp_attribute& column = spans_.attributes[i];
    if (column.type != OTP_ATTRIBUTE_NAME) return;
    text_bytes += text_at(spans_.names, static_cast<const uint32_t*>(column.values)[index]).size;
  });
  return fixed_bound_ + kMaxTextSize * text_bytes + links * kLinkSize;
}

char* JsonEncoder::put_value(char* at, const otp_attribute& column, uint64_t index) const {
  switch (column.type) {
    case OTP_ATTRIBUTE_INT64:
      return put(put_integer(at, static_cast<const int64_t*>(column.values)[index]), "\"}}");
    case OTP_ATTRIBUTE_DOUBLE:
      return put(put_double(at, static_cast<const double*>(column.values)[index]), "}}");
    case OTP_ATTRIBUTE_BOOL:
      return static_cast<const uint8_t*>(column.values)[index] != 0 ? put(at, "true}}") : put(at, "false}}");
    default:
      return put(put_name(at, static_cast<const uint32_t*>(column.values)[index]), "\"}}");
  }
}

char* JsonEncoder::put_attributes(char* at, uint64_t row) {
  bool any = false;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    const Attribute& attribute = attributes_[i];
    at = any ? put(at, ",") : put(at, ",\"attributes\":[");
    at = put_value(put_bytes(at, attribute.head, attribute.head_size), *attribute.column, index);
    any = true;
  });
  return any ? put(at, "]") : at;
}

char* JsonEncoder::put_links(char* at, uint64_t count) const {
  if (count == 0) return at;
  at = put(at, ",\"links\":[");
  for (uint64_t i = 0; i < count; ++i) {
    if (i != 0) at = put(at, ",");
    at = put_hex(put(at, "{\"traceId\":\""), link_[i].trace_id, 16);
    at = put_id(put(at, "\",\"spanId\":\""), link_[i].span_id);
    at = put(at, "\",\"flags\":256}");  // whether its target is in another process is known, and it is not
  }
  return put(at, "]");
}

// A member with a count of a column that may be null; 0 is left out.
template <size_t N>
char* put_count(char* at, const char (&key)[N], const uint32_t* column, uint64_t row) {
  return column == nullptr || column[row] == 0 ? at : put_integer(put(at, key), column[row]);
}

char* JsonEncoder::put_span(char* at, uint64_t row, uint64_t links) {
  const uint64_t parent = spans_.parent_span_id[row];
  at = put_hex(put(at, "{\"traceId\":\""), spans_.trace_ids + 16 * static_cast<uint64_t>(spans_.trace[row]), 16);
  at = put_id(put(at, "\",\"spanId\":\""), spans_.span_id[row]);
  const uint32_t state = spans_.trace_state == nullptr ? 0 : spans_.trace_state[spans_.trace[row]];
  if (state != 0) at = put_name(put(at, "\",\"traceState\":\""), state);
  if (parent != 0) at = put_id(put(at, "\",\"parentSpanId\":\""), parent);
  const bool remote = parent != 0 && spans_.parent_is_remote != nullptr && spans_.parent_is_remote[row] != 0;
  at = remote ? put(at, "\",\"flags\":768") : put(at, "\",\"flags\":256");
  at = put_name(put(at, ",\"name\":\""), spans_.name[row]);
  at = put_integer(put(at, "\",\"kind\":1,\"startTimeUnixNano\":\""), static_cast<uint64_t>(spans_.start[row]));
  at = put_integer(put(at, "\",\"endTimeUnixNano\":\""), static_cast<uint64_t>(spans_.end[row]));
  at = put_attributes(put(at, "\""), row);
  at = put_count(at, ",\"droppedAttributesCount\":", spans_.dropped_attributes, row);
  at = put_links(at, links);
  at = put_count(at, ",\"droppedLinksCount\":", spans_.dropped_links, row);
  const bool error = spans_.error != nullptr && spans_.error[row] != 0;
  return error ? put(at, ",\"status\":{\"code\":2}}") : put(at, ",\"status\":{}}");
}

bool JsonEncoder::append_span(uint64_t row, bool is_first) {
  const otp_link* end = spans_.links + spans_.link_count;
  const otp_link* next = link_;
  while (next != end && next->row == row) ++next;
  const auto links = static_cast<uint64_t>(next - link_);
  if (!buffer_reserve(out_, span_bound(row, links))) return false;
  char* const at = cursor(out_);
  finish(out_, put_span(is_first ? at : put(at, ","), row, links));
  link_ = next;
  return true;
}

int64_t JsonEncoder::encode(uint64_t first, uint64_t end, uint64_t max_bytes) {
  const uint64_t begin = out_->size;
  bool done = prepare(first) && buffer_reserve(out_, frame_.head.size);
  if (done) finish(out_, put_bytes(cursor(out_), frame_.head.data, frame_.head.size));
  uint64_t row = first;
  for (; done && row < end; ++row) {
    const uint64_t before = out_->size;
    done = append_span(row, row == first);
    if (out_->size - begin + frame_.tail.size > max_bytes && row > first) {
      out_->size = before;
      break;
    }
  }
  if (done && buffer_reserve(out_, frame_.tail.size)) {
    finish(out_, put_bytes(cursor(out_), frame_.tail.data, frame_.tail.size));
    return static_cast<int64_t>(row);
  }
  out_->size = begin;
  return -1;
}

}  // namespace
}  // namespace otp

extern "C" int64_t otp_encode_otlp_json(const otp_spans* spans, const otp_otlp_json_frame* frame, uint64_t first,
                                        uint64_t end, uint64_t max_bytes, otp_buffer* out) {
  if (first >= end) return static_cast<int64_t>(end);
  return otp::JsonEncoder(*spans, *frame, out).encode(first, end, max_bytes);
}
