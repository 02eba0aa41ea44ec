#include "files/json_copy.h"

#include <charconv>
#include <cmath>
#include <cstring>

#include "encode/json_writer.h"
#include "encode/utf8_repair.h"
#include "files/json_cursor.h"
#include "files/json_values.h"

namespace otp {
namespace {

constexpr int kMostNested = 500;         // Python's reader takes nearly 1000
constexpr size_t kLongestDecimal = 300;  // digits that no double without an exponent exceeds

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Whether a number or word is one of JSON, and in the range of 64-bit integers or of doubles.
bool is_readable(std::string_view word) {
  if (word == "true" || word == "false" || word == "null") return true;
  const char *at = word.data(), *const end = at + word.size();
  const auto digits = [&at, end] {
    const char* begin = at;
    while (at != end && is_digit(*at)) ++at;
    return at != begin;
  };
  at += *at == '-';
  const char* whole = at;
  if (!digits() || (*whole == '0' && at - whole > 1)) return false;
  if (at == end) {
    int64_t number;
    return at - whole < 19 || std::from_chars(word.data(), end, number).ec == std::errc();
  }
  if (*at == '.' && (++at, !digits())) return false;
  if (at == end && word.size() < kLongestDecimal) return true;
  if (at != end) {
    if (*at != 'e' && *at != 'E') return false;
    ++at;
    at += at != end && (*at == '-' || *at == '+');
    if (!digits() || at != end) return false;
  }
  double number;
  return double_of(word, &number) && std::isfinite(number);
}

// Bytes that are right as they are, from `run` on, are copied together.
struct Copy {
  JsonCursor cursor;
  const char* run;
  char* out;

  void flush() {
    out = put_bytes(out, run, static_cast<uint64_t>(cursor.at - run));
    run = cursor.at;
  }

  // Puts a text in the place of the next bytes.
  void replace(uint64_t size, std::string_view text) {
    flush();
    out = put_bytes(out, text.data(), text.size());
    run = cursor.at += size;
  }

  bool value(int depth);
  bool members(int depth);
  bool text();
  void escape();
  bool word();
  bool to_special();
};

// Eight bytes at a time: to the next one that is a quote, a backslash, a control character or not ASCII.
bool Copy::to_special() {
  constexpr uint64_t kOnes = 0x0101010101010101u, kHighs = 0x8080808080808080u;
  while (cursor.end - cursor.at >= 8) {
    uint64_t word;
    std::memcpy(&word, cursor.at, 8);
    const uint64_t quotes = word ^ (kOnes * '"'), backslashes = word ^ (kOnes * '\\');
    if (((quotes - kOnes) | (backslashes - kOnes) | (word - kOnes * ' ') | word) & kHighs) break;
    cursor.at += 8;
  }
  while (cursor.at != cursor.end && static_cast<signed char>(*cursor.at) >= ' ' && *cursor.at != '"' &&
         *cursor.at != '\\')
    ++cursor.at;
  return cursor.at != cursor.end;
}

bool Copy::text() {
  for (++cursor.at; to_special();) {
    const auto* at = reinterpret_cast<const uint8_t*>(cursor.at);
    if (*at == '"') {
      ++cursor.at;
      return true;
    }
    if (*at == '\\') {
      escape();
    } else if (*at < ' ') {
      flush();
      out = put_escaped(out, at, 1);
      run = ++cursor.at;
    } else if (const Utf8Piece piece = utf8_piece(at, static_cast<uint64_t>(cursor.end - cursor.at));
               piece.well_formed) {
      cursor.at += piece.size;
    } else {
      replace(piece.size, "\xEF\xBF\xBD");
    }
  }
  return false;
}

void Copy::escape() {
  const std::string_view rest(cursor.at, static_cast<size_t>(cursor.end - cursor.at));
  size_t size = 2;
  if (rest.size() > 1 && rest[1] == 'u') {
    const bool is_replaced = escaped_character(rest, &size) == 0xFFFD;
    if (size == 2) {
      replace(1, "\\\\");
    } else if (is_replaced) {
      replace(size, "\\ufffd");
    } else {
      cursor.at += size;
    }
  } else if (rest.size() > 1 && std::strchr("\"\\/bfnrt", rest[1]) != nullptr && rest[1] != '\0') {
    cursor.at += size;
  } else {
    replace(1, "\\\\");
  }
}

bool Copy::word() {
  const char* begin = cursor.at;
  while (cursor.at != cursor.end && JsonCursor::is_of_scalar(*cursor.at)) ++cursor.at;
  if (cursor.at == begin) return false;
  if (is_readable({begin, static_cast<size_t>(cursor.at - begin)})) return true;
  const char* end = cursor.at;
  cursor.at = begin;
  replace(0, "\"");
  cursor.at = end;
  replace(0, "\"");
  return true;
}

bool Copy::value(int depth) {
  if (*cursor.at == '"') return text();
  if (*cursor.at == '{' || *cursor.at == '[') return depth < kMostNested && members(depth + 1);
  return word();
}

// The members of an object, or the elements of an array.
bool Copy::members(int depth) {
  const bool is_object = *cursor.at++ == '{';
  const char close = is_object ? '}' : ']';
  if (!cursor.space()) return false;
  if (*cursor.at == close) {
    ++cursor.at;
    return true;
  }
  for (;;) {
    if (is_object && !(*cursor.at == '"' && text() && cursor.space() && *cursor.at++ == ':' && cursor.space()))
      return false;
    if (!value(depth) || !cursor.space()) return false;
    const char behind = *cursor.at++;
    if (behind == close) return true;
    if (behind != ',' || !cursor.space()) return false;
  }
}

}  // namespace

bool copy_json(std::string_view value, char** out) {
  Copy copy{{value.data(), value.data() + value.size()}, value.data(), *out};
  if (value.empty() || !copy.value(0) || copy.cursor.at != copy.cursor.end) return false;
  copy.flush();
  *out = copy.out;
  return true;
}

}  // namespace otp
