// Walks over lines of OTLP/JSON, which are not trusted.
#include "files/json_cursor.h"
#include "files/json_values.h"
#include "files/otlp_spans.h"

namespace otp {
namespace {

// The members of an object, or the elements of an array, one after the other; null has none.
class Parts {
 public:
  Parts(std::string_view value, char open, char close) : d_cursor{value.data(), value.data() + value.size()} {
    d_close = close;
    d_is_over = value.empty() || value == "null";
    d_is_broken = !d_is_over && value.front() != open;
    if (!d_is_over && !d_is_broken) ++d_cursor.at;
  }

  bool next_member(std::string_view* key, std::string_view* value) {
    return begin_next() && (d_cursor.key(key) || fail()) && take(value);
  }
  bool next_element(std::string_view* value) { return begin_next() && take(value); }
  bool is_whole() const { return !d_is_broken; }
  const char* at() const { return d_cursor.at; }

 private:
  bool fail() {
    d_is_broken = true;
    return false;
  }
  bool begin_next() {
    if (d_is_over || d_is_broken) return false;
    if (!d_cursor.space_and_commas()) return fail();
    d_is_over = *d_cursor.at == d_close;
    return !d_is_over;
  }
  bool take(std::string_view* value) {
    const char* begin = d_cursor.at;
    if (!d_cursor.skip()) return fail();
    *value = {begin, static_cast<size_t>(d_cursor.at - begin)};
    return true;
  }

  JsonCursor d_cursor;
  char d_close;
  bool d_is_over;
  bool d_is_broken;
};

struct Object : Parts {
  explicit Object(std::string_view value) : Parts(value, '{', '}') {}
};

struct List : Parts {
  explicit List(std::string_view value) : Parts(value, '[', ']') {}
};

// The last member of this name; empty where there is none.
std::string_view member_of(std::string_view object, std::string_view name) {
  Object members(object);
  std::string_view key, value, found;
  while (members.next_member(&key, &value))
    if (key == name) found = value;
  return found;
}

bool is_id(std::string_view token, size_t digits, uint64_t* id) {
  const std::string_view text = unquoted(token);
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
  const size_t last = line.find_last_not_of(" \t\r\n");
  line = line.substr(0, last + 1);
  Object members(line);
  std::string_view key, value, object;
  bool has_spans = false;
  while (members.next_member(&key, &value)) {
    if (key != "resourceSpans") continue;
    has_spans = true;
    List list(value);
    while (list.next_element(&object))
      if (!is_behind(list.at()) && !read_resource_object(object)) return false;
    if (!list.is_whole()) refuse(list.at());
  }
  const bool is_line = members.is_whole() && has_spans && members.at() + 1 == line.data() + line.size();
  return is_line || refuse(members.at());
}

bool OtlpReader::read_resource_object(std::string_view object) {
  if (!begin_resource(member_of(object, "resource"), object.data())) return false;
  Object members(object);
  std::string_view key, value, scope;
  while (members.next_member(&key, &value)) {
    if (key != "scopeSpans") continue;
    List list(value);
    while (list.next_element(&scope))
      if (!is_behind(list.at()) && !read_scope_object(scope)) return false;
    if (!list.is_whole()) refuse(list.at());
  }
  return members.is_whole() || refuse(members.at());
}

bool OtlpReader::read_scope_object(std::string_view object) {
  d_unescaped.clear();
  begin_scope(text_of(member_of(member_of(object, "scope"), "name")));
  Object members(object);
  std::string_view key, value, one;
  while (members.next_member(&key, &value)) {
    if (key != "spans") continue;
    List list(value);
    while (list.next_element(&one)) {
      if (is_behind(list.at())) continue;
      if (!has_room(one.data())) return false;
      d_unescaped.clear();
      OtlpSpan span;
      if (read_span_object(one, &span)) {
        add(span, one.data());
      } else {
        ++d_tables->figures.events;
        refuse(one.data());
      }
    }
    if (!list.is_whole()) refuse(list.at());
  }
  return members.is_whole() || refuse(members.at());
}

bool OtlpReader::read_span_object(std::string_view object, OtlpSpan* span) {
  Object members(object);
  bool has_trace = false, has_span = false;
  uint64_t trace;
  std::string_view key, value;
  while (members.next_member(&key, &value)) {
    if (key == "traceId") {
      has_trace = is_id(value, 32, &trace);
    } else if (key == "spanId") {
      has_span = is_id(value, 16, &span->span_id);
    } else if (key == "parentSpanId") {
      is_id(value, 16, &span->parent_id);
    } else if (key == "name") {
      if (value.front() != '"') return false;
      span->name = text_of(value);
    } else if (key == "startTimeUnixNano") {
      span->start = time_of(value);
    } else if (key == "endTimeUnixNano") {
      span->end = time_of(value);
    } else if (key == "attributes" && !read_attributes(value, span)) {
      return false;
    }
  }
  span->has_ids = has_trace && has_span;
  return members.is_whole();
}

bool OtlpReader::read_attributes(std::string_view list, OtlpSpan* span) {
  List attributes(list);
  std::string_view attribute, name, key, value;
  while (attributes.next_element(&attribute)) {
    const std::string_view kind_and_value = member_of(attribute, "value");
    Object kinds(kind_and_value);
    OtlpValue stored;
    while (kinds.next_member(&name, &value)) {
      if (name == "stringValue" && value.front() == '"') stored = {OtlpValue::Kind::kText, text_of(value), 0, 0};
      if (name == "boolValue") stored = {OtlpValue::Kind::kFlag, {}, value == "true", 0};
      if (name == "doubleValue" && double_of(value, &stored.real)) stored.kind = OtlpValue::Kind::kReal;
      if (name == "intValue" && integer_of(value, &stored.number)) stored.kind = OtlpValue::Kind::kNumber;
    }
    if (!kinds.is_whole()) return false;
    store_attribute(text_of(member_of(attribute, "key")), stored, span);
  }
  return attributes.is_whole();
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
