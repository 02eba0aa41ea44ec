// Walks over serialized OTLP requests, which are not trusted: a length beyond its message ends what it stands in.
#include <cstring>

#include "files/json_values.h"
#include "files/otlp_spans.h"

namespace otp {
namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct Field {
  uint64_t number = 0;
  uint32_t type = 0;
  uint64_t value = 0;      // of a number
  std::string_view bytes;  // of a text, or a message
};

// The fields of a message, one after the other.
class Message {
 public:
  explicit Message(std::string_view bytes) : d_at(bytes.data()), d_end(bytes.data() + bytes.size()) {}

  // False at the end, and at what is no field.
  bool next(Field* field);
  bool is_whole() const { return !d_is_broken; }
  const char* at() const { return d_at; }

 private:
  bool fail() {
    d_is_broken = true;
    return false;
  }
  bool varint(uint64_t* value);
  bool fixed(size_t size, uint64_t* value);

  const char* d_at;
  const char* d_end;
  bool d_is_broken = false;
};

bool Message::next(Field* field) {
  if (d_at == d_end) return false;
  uint64_t tag, size;
  if (!varint(&tag) || tag >> 3 == 0) return fail();
  field->number = tag >> 3;
  field->type = tag & 7;
  switch (field->type) {
    case kVarint:
      return varint(&field->value) || fail();
    case kFixed64:
      return fixed(8, &field->value) || fail();
    case kFixed32:
      return fixed(4, &field->value) || fail();
    case kBytes:
      if (!varint(&size) || size > static_cast<uint64_t>(d_end - d_at)) return fail();
      field->bytes = {d_at, size};
      d_at += size;
      return true;
    default:
      return fail();
  }
}

bool Message::varint(uint64_t* value) {
  *value = 0;
  for (uint32_t shift = 0; shift < 70 && d_at != d_end; shift += 7) {
    const auto byte = static_cast<uint8_t>(*d_at++);
    *value |= shift < 64 ? uint64_t{byte & 0x7Fu} << shift : 0;
    if (byte < 0x80) return true;
  }
  return false;
}

bool Message::fixed(size_t size, uint64_t* value) {
  if (static_cast<size_t>(d_end - d_at) < size) return false;
  *value = 0;
  for (size_t i = 0; i < size; ++i) *value |= uint64_t{static_cast<uint8_t>(d_at[i])} << 8 * i;
  d_at += size;
  return true;
}

uint64_t id_of(std::string_view bytes) {
  uint64_t id = 0;
  for (char byte : bytes) id = id << 8 | static_cast<uint8_t>(byte);
  return id;
}

double real_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The last of the fields with a number, a message or a text; empty where there is none.
std::string_view field_of(std::string_view message, uint64_t number) {
  Message fields(message);
  std::string_view found;
  for (Field field; fields.next(&field);)
    if (field.number == number && field.type == kBytes) found = field.bytes;
  return found;
}

bool read_value(std::string_view message, OtlpValue* value) {
  Message fields(message);
  for (Field field; fields.next(&field);) {
    const bool is_number = field.type == kVarint;
    if (field.number == 1 && field.type == kBytes) *value = {OtlpValue::Kind::kText, field.bytes, 0, 0};
    if (field.number == 2 && is_number) *value = {OtlpValue::Kind::kFlag, {}, field.value != 0, 0};
    if (field.number == 3 && is_number) *value = {OtlpValue::Kind::kNumber, {}, static_cast<int64_t>(field.value), 0};
    if (field.number == 4 && field.type == kFixed64) *value = {OtlpValue::Kind::kReal, {}, 0, real_of(field.value)};
    if (field.number > 4 && field.number < 8) *value = {OtlpValue::Kind::kOther, {}, 0, 0};
  }
  return fields.is_whole();
}

void add_link(std::string_view trace_id, std::string_view span_id, OtlpSpan* span) {
  append_hexadecimal(trace_id, &span->links);
  append_hexadecimal(span_id, &(span->links += '/'));
  span->links += ' ';
}

}  // namespace

bool OtlpReader::read_attribute(std::string_view message, OtlpSpan* span) {
  Message fields(message);
  std::string_view key;
  OtlpValue value;
  for (Field field; fields.next(&field);) {
    if (field.type != kBytes) continue;
    if (field.number == 1) key = field.bytes;
    if (field.number == 2 && !read_value(field.bytes, &value)) return false;
  }
  take_attribute(key, value, span);
  return fields.is_whole();
}

bool OtlpReader::read_span(std::string_view message, OtlpSpan* span) {
  Message fields(message);
  bool has_trace = false, has_span = false;
  for (Field field; fields.next(&field);) {
    const bool is_bytes = field.type == kBytes, is_time = field.type == kFixed64;
    switch (field.number) {
      case 1:
        has_trace = is_bytes && field.bytes.size() == 16;
        span->trace_id = field.bytes;
        break;
      case 2:
        has_span = is_bytes && field.bytes.size() == 8;
        if (has_span) span->span_id = id_of(field.bytes);
        break;
      case 4:
        if (is_bytes && field.bytes.size() == 8) span->parent_id = id_of(field.bytes);
        if (!is_bytes || (field.bytes.size() != 8 && !field.bytes.empty())) span->fault = OTP_FAULT_SPAN;
        break;
      case 5:
        if (is_bytes) span->name = field.bytes;
        break;
      case 7:
        if (is_time) span->start = field.value;
        break;
      case 8:
        if (is_time) span->end = field.value;
        break;
      case 9:
        if (is_bytes && !read_attribute(field.bytes, span)) return false;
        break;
      case 13:
        if (is_bytes && d_links >= 0) add_link(field_of(field.bytes, 1), field_of(field.bytes, 2), span);
        break;
      default:
        break;
    }
  }
  span->has_ids = has_trace && has_span;
  return fields.is_whole();
}

bool OtlpReader::read_request(std::string_view request) {
  Message fields(request);
  for (Field field; fields.next(&field);) {
    if (field.number != 1 || field.type != kBytes || is_behind(fields.at())) continue;
    if (!read_resource_spans(field.bytes)) return false;
  }
  return fields.is_whole() || refuse(fields.at());
}

// The resource may follow its spans.
bool OtlpReader::read_resource_spans(std::string_view message) {
  if (!begin_resource(field_of(message, 1), message.data())) return false;
  Message fields(message);
  for (Field field; fields.next(&field);) {
    if (field.number != 2 || field.type != kBytes || is_behind(fields.at())) continue;
    if (!read_scope_spans(field.bytes)) return false;
  }
  return fields.is_whole() || refuse(fields.at());
}

bool OtlpReader::read_scope_spans(std::string_view message) {
  begin_scope(field_of(field_of(message, 1), 1));
  Message fields(message);
  const char* begin = fields.at();
  for (Field field; fields.next(&field); begin = fields.at()) {
    if (field.number != 2 || field.type != kBytes || is_behind(fields.at())) continue;
    if (!begin_span(begin)) return false;
    OtlpSpan span;
    if (read_span(field.bytes, &span)) {
      add(span, field.bytes.data());
    } else {
      refuse(field.bytes.data());
    }
  }
  return fields.is_whole() || refuse(fields.at());
}

}  // namespace otp
