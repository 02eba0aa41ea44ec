// Spans to serialized ExportTraceServiceRequest messages; see encode_otlp.h.
//
// Lengths come before contents in protobuf. The small ones (attributes, links) are computed first, which is a few
// additions. The length of a span and of the messages around all spans are filled in afterwards: room is left for the
// width that they nearly always have, and the contents are moved by a byte or two in the rare other case. Computing a
// span's length first would read every column twice; padding a length to a fixed width instead is legal, but then the
// bytes are no longer those of protobuf's own serializer, against which the tests hold them.
#include <algorithm>
#include <memory>
#include <new>

#include "encode/attribute_walk.h"
#include "encode/buffer.h"
#include "encode/json_writer.h"
#include "encode/proto_writer.h"
#include "encode/utf8_repair.h"
#include "otel_torchprof/encode_otlp.h"

namespace otp {
namespace {

// Field tags of opentelemetry/proto/{collector/trace,trace,common}/v1: field number << 3 | wire type.
enum Tag : uint8_t {
  kRequestResourceSpans = 0x0A,
  kResourceSpansResource = 0x0A,
  kResourceSpansScopeSpans = 0x12,
  kResourceSpansSchemaUrl = 0x1A,
  kScopeSpansScope = 0x0A,
  kScopeSpansSpan = 0x12,
  kScopeSpansSchemaUrl = 0x1A,
  kSpanTraceId = 0x0A,
  kSpanSpanId = 0x12,
  kSpanTraceState = 0x1A,
  kSpanParentSpanId = 0x22,
  kSpanName = 0x2A,
  kSpanKind = 0x30,
  kSpanStart = 0x39,
  kSpanEnd = 0x41,
  kSpanAttribute = 0x4A,
  kSpanDroppedAttributes = 0x50,
  kSpanLink = 0x6A,
  kSpanDroppedLinks = 0x70,
  kSpanStatus = 0x7A,
  kLinkTraceId = 0x0A,
  kLinkSpanId = 0x12,
  kLinkFlags = 0x35,
  kStatusCode = 0x18,
  kKeyValueKey = 0x0A,
  kKeyValueValue = 0x12,
  kAnyValueString = 0x0A,
  kAnyValueBool = 0x10,
  kAnyValueInt = 0x18,
  kAnyValueDouble = 0x21,
};
constexpr uint8_t kSpanFlags[] = {0x85, 0x01};  // field 16: the only tag of two bytes

constexpr uint8_t kKindInternal = 1;
constexpr uint8_t kStatusError = 2;
// opentelemetry.proto.trace.v1.SpanFlags: whether the parent (of a link: the target) is in another process is known; it
// is.
constexpr uint32_t kFlagsHasIsRemote = 0x100;
constexpr uint32_t kFlagsIsRemote = 0x200;

constexpr uint64_t kLinkSize = 18 + 10 + 5;
// Whole fields that are likely to come again are kept, if they are so short, and copied whatever their size.
constexpr uint64_t kKeptSize = 64;
// Everything of a span but texts, attributes and links: its tag and length, ids, kind, times, two counts, status,
// flags.
constexpr uint64_t kSpanFixedSize = (1 + kMaxVarint) + 18 + 10 + 10 + 2 + 9 + 9 + 2 * 6 + 4 + 6;
// Tags and lengths around one text, and around one attribute's key and value, at most.
constexpr uint64_t kTextOverhead = 1 + kMaxVarint;
constexpr uint64_t kAttributeOverhead = 5 * kTextOverhead + kKeptSize;

// An attribute with its key already serialized: the key field, and the tag of the value field.
struct Attribute {
  const otp_attribute* column;
  const uint8_t* head;  // readable for kHeadCopy bytes at least
  uint64_t head_size;
  // The field of the latest number or name: threads, their names and scopes are the same for long runs of spans.
  uint64_t value = 0;
  uint64_t kept_size = 0;  // 0: none is kept
  uint8_t kept[kKeptSize];

  bool keeps(uint64_t wanted) const { return kept_size != 0 && value == wanted; }
};

// The field of a span's name. Names of a model's operators are few: with these and the kept attributes a span takes 90
// ns instead of 130 (206 bytes, six attributes).
struct KeptName {
  uint32_t name = UINT32_MAX;
  uint32_t size = 0;
  uint8_t field[kKeptSize - 8];
};
constexpr uint64_t kKeptNames = 256;

// Where a span's value of an attribute is.
struct Value {
  Attribute* attribute;
  uint64_t index;
};

// A head nearly always fits into this many bytes, and copying so many whatever its size takes two vector moves: 72 ns
// per span with six attributes against 88 with a memcpy of the exact size. What is too much is overwritten by what
// follows, and lies within kAttributeOverhead.
constexpr uint64_t kHeadCopy = 32;

inline uint8_t* put_head(uint8_t* at, const Attribute& attribute) {
  if (attribute.head_size <= kHeadCopy) {
    std::memcpy(at, attribute.head, kHeadCopy);
  } else {
    std::memcpy(at, attribute.head, attribute.head_size);
  }
  return at + attribute.head_size;
}

class Encoder {
 public:
  Encoder(const otp_spans& spans, const otp_otlp_common& common, otp_buffer* out)
      : spans_(spans), common_(common), out_(out) {}
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
  ~Encoder() { otp_buffer_free(&heads_); }

  // See otp_encode_otlp.
  int64_t encode(uint64_t first, uint64_t end, uint64_t max_bytes);

 private:
  bool prepare(uint64_t first);
  Text text(uint32_t name) const;
  uint64_t text_size(uint32_t name) const;
  uint32_t trace_state(uint64_t row) const;
  uint64_t look_at(uint64_t row, uint64_t links);
  bool append_span(uint64_t row);
  uint8_t* put_span(uint8_t* at, uint64_t row, uint64_t links);
  uint8_t* put_name(uint8_t* at, uint32_t name);
  uint8_t* put_attribute(uint8_t* at, Attribute& attribute, uint64_t index) const;
  uint8_t* put_value(uint8_t* at, const Attribute& attribute, uint64_t index) const;
  uint8_t* put_links(uint8_t* at, uint64_t count) const;
  bool wrap(uint64_t begin, uint64_t room);
  uint64_t trailer_size() const;

  const otp_spans& spans_;
  const otp_otlp_common& common_;
  otp_buffer* out_;
  otp_buffer heads_{nullptr, 0, 0};
  std::unique_ptr<KeptName[]> kept_names_;  // each at its number modulo kKeptNames
  std::unique_ptr<Attribute[]> attributes_;
  std::unique_ptr<Value[]> values_;  // of the span at hand
  uint64_t value_count_ = 0;
  AttributeWalk walk_;
  uint64_t fixed_bound_ = 0;
  const otp_link* link_ = nullptr;
};

// The size of a bytes or string field that is left out when empty, as proto3 does.
uint64_t optional_field_size(uint64_t size) { return size == 0 ? 0 : field_size(size); }

uint8_t* put_optional_field(uint8_t* at, uint8_t tag, const otp_bytes& bytes) {
  return bytes.size == 0 ? at : put_field(at, tag, bytes.data, bytes.size);
}

// A text field that is left out when empty.
uint8_t* put_optional_text(uint8_t* at, uint8_t tag, const Text& text) {
  if (text.wire_size == 0) return at;
  *at++ = tag;
  return put_text(put_varint(at, text.wire_size), text);
}

// One count of a column that may be null; 0 is left out.
uint8_t* put_count(uint8_t* at, uint8_t tag, const uint32_t* column, uint64_t row) {
  if (column == nullptr || column[row] == 0) return at;
  *at++ = tag;
  return put_varint(at, column[row]);
}

bool Encoder::prepare(uint64_t first) {
  uint64_t heads = kHeadCopy;
  for (uint64_t i = 0; i < spans_.attribute_count; ++i) heads += spans_.attributes[i].key_size + 2 + kMaxVarint;
  attributes_.reset(new (std::nothrow) Attribute[spans_.attribute_count]);
  values_.reset(new (std::nothrow) Value[spans_.attribute_count]);
  kept_names_.reset(new (std::nothrow) KeptName[kKeptNames]);
  if (kept_names_ == nullptr || attributes_ == nullptr || values_ == nullptr || !walk_.begin(spans_) ||
      !buffer_reserve(&heads_, heads))
    return false;
  uint8_t* at = heads_.data;
  fixed_bound_ = kSpanFixedSize + 2 * kTextOverhead + kKeptSize;
  for (uint64_t i = 0; i < spans_.attribute_count; ++i) {
    const otp_attribute& column = spans_.attributes[i];
    uint8_t* head = at;
    if (column.key_size != 0) at = put_field(at, kKeyValueKey, column.key, column.key_size);
    *at++ = kKeyValueValue;
    attributes_[i].column = &column;
    attributes_[i].head = head;
    attributes_[i].head_size = static_cast<uint64_t>(at - head);
    fixed_bound_ += column.key_size + kAttributeOverhead;
  }
  link_ = std::lower_bound(spans_.links, spans_.links + spans_.link_count, first,
                           [](const otp_link& link, uint64_t row) { return link.row < row; });
  return true;
}

uint64_t Encoder::text_size(uint32_t name) const { return text_at(spans_.names, name).size; }

Text Encoder::text(uint32_t name) const {
  const JsonText found = text_at(spans_.names, name);
  return text_of(found.data, found.size);
}

// Index into names; 0 where there is none.
uint32_t Encoder::trace_state(uint64_t row) const {
  return spans_.trace_state == nullptr ? 0 : spans_.trace_state[spans_.trace[row]];
}

// Finds the values of a span, and an upper bound of its size: a byte of a name takes three as U+FFFD.
uint64_t Encoder::look_at(uint64_t row, uint64_t links) {
  const uint32_t state = trace_state(row);
  const uint32_t name = spans_.name[row];
  uint64_t text_bytes =
      (kept_names_[name % kKeptNames].name == name ? 0 : text_size(name)) + (state == 0 ? 0 : text_size(state));
  value_count_ = 0;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    const Attribute& attribute = attributes_[i];
    values_[value_count_++] = {&attributes_[i], index};
    if (attribute.column->type != OTP_ATTRIBUTE_NAME) return;
    const uint32_t value = static_cast<const uint32_t*>(attribute.column->values)[index];
    if (!attribute.keeps(value)) text_bytes += text_size(value);
  });
  return fixed_bound_ + 3 * text_bytes + links * field_size(kLinkSize);
}

uint8_t* Encoder::put_attribute(uint8_t* at, Attribute& attribute, uint64_t index) const {
  const otp_attribute& column = *attribute.column;
  const bool is_number = column.type == OTP_ATTRIBUTE_INT64;
  if (!is_number && column.type != OTP_ATTRIBUTE_NAME) return put_value(at, attribute, index);
  const uint64_t value = is_number ? static_cast<const uint64_t*>(column.values)[index]
                                   : static_cast<const uint32_t*>(column.values)[index];
  if (attribute.keeps(value)) {
    std::memcpy(at, attribute.kept, kKeptSize);
    return at + attribute.kept_size;
  }
  uint8_t* const end = put_value(at, attribute, index);
  const auto size = static_cast<uint64_t>(end - at);
  attribute.value = value;
  attribute.kept_size = size <= kKeptSize ? size : 0;
  if (size <= kKeptSize) std::memcpy(attribute.kept, at, kKeptSize);
  return end;
}

uint8_t* Encoder::put_value(uint8_t* at, const Attribute& attribute, uint64_t index) const {
  const otp_attribute& column = *attribute.column;
  const auto open = [&](uint64_t value_size) {
    *at++ = kSpanAttribute;
    at = put_varint(at, attribute.head_size + varint_size(value_size) + value_size);
    at = put_varint(put_head(at, attribute), value_size);
  };
  switch (column.type) {
    case OTP_ATTRIBUTE_INT64: {
      const auto value = static_cast<uint64_t>(static_cast<const int64_t*>(column.values)[index]);
      open(1 + varint_size(value));
      *at++ = kAnyValueInt;
      return put_varint(at, value);
    }
    case OTP_ATTRIBUTE_DOUBLE: {
      open(1 + sizeof(double));
      *at++ = kAnyValueDouble;
      return put_raw(at, static_cast<const double*>(column.values) + index, sizeof(double));
    }
    case OTP_ATTRIBUTE_BOOL: {
      open(2);
      *at++ = kAnyValueBool;
      *at++ = static_cast<const uint8_t*>(column.values)[index] != 0;
      return at;
    }
    default: {
      const Text value = text(static_cast<const uint32_t*>(column.values)[index]);
      open(field_size(value.wire_size));
      *at++ = kAnyValueString;
      return put_text(put_varint(at, value.wire_size), value);
    }
  }
}

uint8_t* Encoder::put_name(uint8_t* at, uint32_t name) {
  KeptName& kept = kept_names_[name % kKeptNames];
  if (kept.name == name) {
    std::memcpy(at, kept.field, sizeof kept.field);
    return at + kept.size;
  }
  uint8_t* const end = put_optional_text(at, kSpanName, text(name));
  const auto size = static_cast<uint64_t>(end - at);
  if (size <= sizeof kept.field) {
    kept.name = name;
    kept.size = static_cast<uint32_t>(size);
    std::memcpy(kept.field, at, size);
  }
  return end;
}

uint8_t* Encoder::put_links(uint8_t* at, uint64_t count) const {
  for (uint64_t i = 0; i < count; ++i) {
    *at++ = kSpanLink;
    *at++ = kLinkSize;
    at = put_field(at, kLinkTraceId, link_[i].trace_id, 16);
    *at++ = kLinkSpanId;
    *at++ = 8;
    at = put_big_endian64(at, link_[i].span_id);
    *at++ = kLinkFlags;
    at = put_fixed32(at, kFlagsHasIsRemote);
  }
  return at;
}

// The fields of one span, in the order of their numbers.
uint8_t* Encoder::put_span(uint8_t* at, uint64_t row, uint64_t links) {
  const uint64_t parent = spans_.parent_span_id[row];
  at = put_field(at, kSpanTraceId, spans_.trace_ids + 16 * static_cast<uint64_t>(spans_.trace[row]), 16);
  *at++ = kSpanSpanId;
  *at++ = 8;
  at = put_big_endian64(at, spans_.span_id[row]);
  const uint32_t state = trace_state(row);
  if (state != 0) at = put_optional_text(at, kSpanTraceState, text(state));
  if (parent != 0) {
    *at++ = kSpanParentSpanId;
    *at++ = 8;
    at = put_big_endian64(at, parent);
  }
  at = put_name(at, spans_.name[row]);
  *at++ = kSpanKind;
  *at++ = kKindInternal;
  if (spans_.start[row] != 0) {
    *at++ = kSpanStart;
    at = put_fixed64(at, static_cast<uint64_t>(spans_.start[row]));
  }
  if (spans_.end[row] != 0) {
    *at++ = kSpanEnd;
    at = put_fixed64(at, static_cast<uint64_t>(spans_.end[row]));
  }
  for (uint64_t k = 0; k < value_count_; ++k) at = put_attribute(at, *values_[k].attribute, values_[k].index);
  at = put_count(at, kSpanDroppedAttributes, spans_.dropped_attributes, row);
  at = put_links(at, links);
  at = put_count(at, kSpanDroppedLinks, spans_.dropped_links, row);
  const bool error = spans_.error != nullptr && spans_.error[row] != 0;
  const uint8_t status[] = {kSpanStatus, static_cast<uint8_t>(error ? 2 : 0), kStatusCode, kStatusError};
  at = put_raw(at, status, error ? 4 : 2);
  at = put_raw(at, kSpanFlags, sizeof kSpanFlags);
  const bool remote = parent != 0 && spans_.parent_is_remote != nullptr && spans_.parent_is_remote[row] != 0;
  return put_fixed32(at, kFlagsHasIsRemote | (remote ? kFlagsIsRemote : 0));
}

bool Encoder::append_span(uint64_t row) {
  const otp_link* end = spans_.links + spans_.link_count;
  const otp_link* next = link_;
  while (next != end && next->row == row) ++next;
  const auto links = static_cast<uint64_t>(next - link_);
  if (!buffer_reserve(out_, look_at(row, links))) return false;
  constexpr uint64_t kUsualWidth = 2;  // of the length: 128 to 16,383 bytes
  uint8_t* const field = out_->data + out_->size;
  uint8_t* const usual = field + 1 + kUsualWidth;
  const auto size = static_cast<uint64_t>(put_span(usual, row, links) - usual);
  const uint64_t width = varint_size(size);
  if (width != kUsualWidth) std::memmove(field + 1 + width, usual, size);
  *field = kScopeSpansSpan;
  put_varint(field + 1, size);
  out_->size += 1 + width + size;
  link_ = next;
  return true;
}

uint64_t Encoder::trailer_size() const {
  return optional_field_size(common_.scope_schema_url.size) + optional_field_size(common_.resource_schema_url.size);
}

// Puts what stands around the spans around them. They begin `room` bytes after `begin` and end at out->size.
bool Encoder::wrap(uint64_t begin, uint64_t room) {
  const uint64_t body = out_->size - begin - room;
  const uint64_t scope_spans =
      field_size(common_.scope.size) + body + optional_field_size(common_.scope_schema_url.size);
  const uint64_t resource_spans = field_size(common_.resource.size) + field_size(scope_spans) +
                                  optional_field_size(common_.resource_schema_url.size);
  const uint64_t total = field_size(resource_spans);
  const uint64_t header = total - body - trailer_size();
  if (!buffer_reserve(out_, trailer_size() + (header > room ? header - room : 0))) return false;
  uint8_t* at = out_->data + begin;
  if (header != room) std::memmove(at + header, at + room, body);
  *at++ = kRequestResourceSpans;
  at = put_varint(at, resource_spans);
  at = put_field(at, kResourceSpansResource, common_.resource.data, common_.resource.size);
  *at++ = kResourceSpansScopeSpans;
  at = put_varint(at, scope_spans);
  at = put_field(at, kScopeSpansScope, common_.scope.data, common_.scope.size);
  at = put_optional_field(at + body, kScopeSpansSchemaUrl, common_.scope_schema_url);
  put_optional_field(at, kResourceSpansSchemaUrl, common_.resource_schema_url);
  out_->size = begin + total;
  return true;
}

int64_t Encoder::encode(uint64_t first, uint64_t end, uint64_t max_bytes) {
  const uint64_t begin = out_->size;
  const uint64_t lengths = 2 * (1 + varint_size(max_bytes));
  const uint64_t room = lengths + field_size(common_.resource.size) + field_size(common_.scope.size);
  const uint64_t around = room + trailer_size();
  const uint64_t limit = max_bytes > around ? max_bytes - around : 0;
  bool done = prepare(first) && buffer_reserve(out_, room);
  if (done) out_->size += room;
  uint64_t row = first;
  for (; done && row < end; ++row) {
    const uint64_t before = out_->size;
    done = append_span(row);
    if (out_->size - begin - room > limit && row > first) {
      out_->size = before;
      break;
    }
  }
  if (done && wrap(begin, room)) return static_cast<int64_t>(row);
  out_->size = begin;
  return -1;
}

}  // namespace
}  // namespace otp

extern "C" int64_t otp_encode_otlp(const otp_spans* spans, const otp_otlp_common* common, uint64_t first, uint64_t end,
                                   uint64_t max_bytes, otp_buffer* out) {
  if (first >= end) return static_cast<int64_t>(end);
  return otp::Encoder(*spans, *common, out).encode(first, end, max_bytes);
}
