// Walks over lines of OTLP/JSON, which are not trusted, in one pass: only what stands before the spans that need it is
// looked for ahead. A span that is not what it must be is passed over; anything else ends the line.
#include "files/json_cursor.h"
#include "files/json_values.h"
#include "files/otlp_spans.h"

namespace otp {
namespace {

// The members of an object, or the elements of an array, one after the other; null has none. The cursor is at the
// value, then at each part, which the caller passes over, and then behind the value.
class Parts {
 public:
  Parts(JsonCursor* cursor, char open, char close) : d_cursor(cursor), d_close(close) {
    const char* begin = cursor->at;
    if (*begin == open) {
      ++cursor->at;
      return;
    }
    d_is_over = cursor->skip() && std::string_view(begin, static_cast<size_t>(cursor->at - begin)) == "null";
    d_is_broken = !d_is_over;
  }

  bool next_member(std::string_view* key) { return next_element() && (d_cursor->key(key) || fail()); }
  bool next_element() {
    if (d_is_over || d_is_broken) return false;
    if (!d_cursor->space_and_commas()) return fail();
    d_is_over = *d_cursor->at == d_close;
    d_cursor->at += d_is_over;
    return !d_is_over;
  }
  bool is_whole() const { return !d_is_broken; }

 private:
  bool fail() {
    d_is_broken = true;
    return false;
  }

  JsonCursor* d_cursor;
  char d_close;
  bool d_is_over = false;
  bool d_is_broken = false;
};

struct Object : Parts {
  explicit Object(JsonCursor* cursor) : Parts(cursor, '{', '}') {}
};

// Reads each element of an array.
template <class Read>
bool read_list(JsonCursor* cursor, Read read) {
  Parts list(cursor, '[', ']');
  while (list.next_element())
    if (!read()) return false;
  return list.is_whole();
}

bool take(JsonCursor* cursor, std::string_view* value) {
  const char* begin = cursor->at;
  if (!cursor->skip()) return false;
  *value = {begin, static_cast<size_t>(cursor->at - begin)};
  return true;
}

// The first member of this name of an object, at which a text begins; empty where there is none.
std::string_view member_of(std::string_view object, std::string_view name) {
  if (object.empty()) return {};
  JsonCursor cursor{object.data(), object.data() + object.size()};
  Object members(&cursor);
  std::string_view key, value;
  while (members.next_member(&key) && take(&cursor, &value))
    if (key == name) return value;
  return {};
}

std::string_view rest_of(const JsonCursor& cursor) { return {cursor.at, static_cast<size_t>(cursor.end - cursor.at)}; }

bool is_id(std::string_view text, size_t digits, uint64_t* id) {
  uint64_t first = 0;
  return text.size() == digits && hexadecimal_of(text.substr(digits - 16), id) &&
         (digits == 16 || hexadecimal_of(text.substr(0, digits - 16), &first));
}

uint64_t time_of(std::string_view token) {
  int64_t time;
  return integer_of(token, &time) ? static_cast<uint64_t>(time) : UINT64_MAX;
}

}  // namespace

bool OtlpReader::read_line(std::string_view line) {
  line = line.substr(0, line.find_last_not_of(" \t\r\n") + 1);
  if (line.empty()) return refuse(line.data());
  JsonCursor cursor{line.data(), line.data() + line.size()};
  Object members(&cursor);
  std::string_view key;
  bool has_spans = false, is_whole = true;
  while (is_whole && members.next_member(&key)) {
    const bool is_spans = key == "resourceSpans";
    has_spans |= is_spans;
    is_whole = is_spans ? read_list(&cursor, [&] { return read_resource_object(&cursor); }) : cursor.skip();
  }
  if (d_status != OTP_TRACE_END) return false;
  return (is_whole && members.is_whole() && has_spans && cursor.at == cursor.end) || refuse(cursor.at);
}

bool OtlpReader::read_resource_object(JsonCursor* cursor) {
  if (!begin_resource(member_of(rest_of(*cursor), "resource"), cursor->at)) return false;
  Object members(cursor);
  std::string_view key;
  while (members.next_member(&key)) {
    const bool is_scopes = key == "scopeSpans";
    if (!(is_scopes ? read_list(cursor, [&] { return read_scope_object(cursor); }) : cursor->skip())) return false;
  }
  return members.is_whole();
}

bool OtlpReader::read_scope_object(JsonCursor* cursor) {
  d_unescaped.clear();
  begin_scope(text_of(member_of(member_of(rest_of(*cursor), "scope"), "name")));
  Object members(cursor);
  std::string_view key;
  while (members.next_member(&key)) {
    const bool is_spans = key == "spans";
    if (!(is_spans ? read_list(cursor, [&] { return add_span_object(cursor); }) : cursor->skip())) return false;
  }
  return members.is_whole();
}

bool OtlpReader::add_span_object(JsonCursor* cursor) {
  const char* begin = cursor->at;
  if (begin < d_begin) return cursor->skip();
  if (!begin_span(begin)) return false;
  OtlpSpan span;
  if (read_span_object(cursor, &span)) {
    add(span, begin);
    return true;
  }
  cursor->at = begin;
  const bool has_end = cursor->skip();
  if (!has_end) cursor->at = begin;
  return has_end && refuse(begin);
}

bool OtlpReader::read_span_object(JsonCursor* cursor, OtlpSpan* span) {
  Object members(cursor);
  bool has_trace = false, has_span = false;
  uint64_t trace;
  std::string_view key, token;
  while (members.next_member(&key)) {
    if (key == "attributes") {
      if (!read_list(cursor, [&] { return read_attribute_object(cursor, span); })) return false;
      continue;
    }
    if (!take(cursor, &token)) return false;
    if (key == "links" && d_links >= 0) {  // a span is one without them too, whatever they are
      JsonCursor links{token.data(), token.data() + token.size()};
      if (!read_list(&links, [&] { return read_link_object(&links, span); })) span->links.clear();
      continue;
    }
    const std::string_view text = unquoted(token);
    if (key == "traceId") {
      span->trace_id = text;
      has_trace = (!text.empty() && text == d_last_trace_id) || is_id(text, 32, &trace);
    } else if (key == "spanId") {
      has_span = is_id(text, 16, &span->span_id);
    } else if (key == "parentSpanId") {
      if (!text.empty() && token != "null" && !is_id(text, 16, &span->parent_id)) span->fault = OTP_FAULT_ID;
    } else if (key == "name") {
      if (token.front() != '"') span->fault = OTP_FAULT_NAME;
      span->name = text_of(token);
    } else if (key == "startTimeUnixNano") {
      span->start = time_of(token);
    } else if (key == "endTimeUnixNano") {
      span->end = time_of(token);
    }
  }
  span->has_ids = has_trace && has_span;
  return members.is_whole();
}

bool OtlpReader::read_link_object(JsonCursor* cursor, OtlpSpan* span) {
  Object members(cursor);
  std::string_view key, token, trace_id, span_id;
  while (members.next_member(&key)) {
    if (!take(cursor, &token)) return false;
    if (key == "traceId") trace_id = unquoted(token);
    if (key == "spanId") span_id = unquoted(token);
  }
  span->links.append(trace_id).append("/").append(span_id).append(" ");
  return members.is_whole();
}

bool OtlpReader::read_attribute_object(JsonCursor* cursor, OtlpSpan* span) {
  Object members(cursor);
  OtlpValue value;
  value.token = "null";
  std::string_view key, name, token;
  while (members.next_member(&key)) {
    if (key == "value") {
      if (!read_value_object(cursor, &value)) return false;
    } else if (!take(cursor, &token)) {
      return false;
    } else if (key == "key") {
      name = text_of(token);
    }
  }
  take_attribute(name, value, span);
  return members.is_whole();
}

// The first member of a value is the value.
bool OtlpReader::read_value_object(JsonCursor* cursor, OtlpValue* value) {
  Object members(cursor);
  std::string_view kind, token;
  *value = {};
  while (members.next_member(&kind)) {
    if (!take(cursor, &token)) return false;
    if (!value->token.empty()) continue;
    value->token = token;
    value->kind = OtlpValue::Kind::kOther;
    if (kind == "stringValue" && token.front() == '"') {
      value->kind = OtlpValue::Kind::kText;
      value->text = text_of(token);
    } else if (kind == "boolValue") {
      value->kind = OtlpValue::Kind::kFlag;
      value->number = token == "true";
    } else if (kind == "doubleValue" && double_of(token, &value->real)) {
      value->kind = OtlpValue::Kind::kReal;
    } else if (kind == "intValue" && integer_of(token, &value->number)) {
      value->kind = OtlpValue::Kind::kNumber;
    }
  }
  return members.is_whole();
}

// The content of a string; of anything else nothing. Those with escapes live as long as the span.
std::string_view OtlpReader::text_of(std::string_view token) {
  if (token.size() < 2 || token.front() != '"') return {};
  const std::string_view content = unquoted(token);
  if (content.find('\\') == std::string_view::npos) return content;
  d_unescaped.emplace_back();
  append_unescaped(content, &d_unescaped.back());
  return d_unescaped.back();
}

}  // namespace otp
