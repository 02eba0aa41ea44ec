// Walks over JSON that is not trusted, in a piece of a document. Each step says whether it could be made; after one
// that could not, `expected` says what was missing, 0 where the piece ends too early.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "otel_torchprof/trace_files.h"

namespace otp {

struct JsonCursor {
  const char* at;
  const char* end;
  uint32_t expected = 0;

  bool fail(uint32_t what) {
    expected = what;
    return false;
  }

  // To the next byte that is no white space.
  bool space() {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    return at != end;
  }

  // As space(), and past commas: the lists of some writers have one too many.
  bool space_and_commas() {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t' || *at == ',')) ++at;
    return at != end;
  }

  // The content of a string, at whose quote the cursor is, with its escapes.
  bool text(std::string_view* content, bool* has_escapes) {
    const char* begin = ++at;
    *has_escapes = false;
    while (to_quote_or_backslash()) {
      if (*at == '"') {
        *content = {begin, static_cast<size_t>(at - begin)};
        ++at;
        return true;
      }
      *has_escapes = true;
      if (end - at < 2) return false;
      at += 2;
    }
    return false;
  }

  bool skip_text() {
    std::string_view content;
    bool has_escapes;
    return text(&content, &has_escapes);
  }

  // The key of a member and its colon; then the cursor is at the value.
  bool key(std::string_view* content) {
    bool has_escapes;
    if (*at != '"') return fail(OTP_EXPECTED_MEMBER);
    if (!text(content, &has_escapes) || !space()) return false;
    if (*at != ':') return fail(OTP_EXPECTED_COLON);
    ++at;
    return space();
  }

  // A value of any kind and depth.
  bool skip() {
    if (*at == '"') return skip_text();
    if (*at != '{' && *at != '[') return skip_scalar();
    uint64_t depth = 0;
    for (; at != end;) {
      switch (*at) {
        case '"':
          if (!skip_text()) return false;
          continue;
        case '{':
        case '[':
          ++depth;
          break;
        case '}':
        case ']':
          ++at;
          if (--depth == 0) return true;
          continue;
        default:
          break;
      }
      ++at;
    }
    return false;
  }

  // A number or a literal; at the end of the piece there may be more of it.
  bool skip_scalar() {
    const char* begin = at;
    while (at != end && is_of_scalar(*at)) ++at;
    if (at == end) return false;
    return at != begin || fail(OTP_EXPECTED_VALUE);
  }

  static bool is_of_scalar(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '+' ||
           c == '.';
  }

 private:
  // Eight bytes at a time: whether one of them is a quote or a backslash.
  bool to_quote_or_backslash() {
    constexpr uint64_t kOnes = 0x0101010101010101u, kHighs = 0x8080808080808080u;
    while (end - at >= 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      const uint64_t quotes = word ^ (kOnes * '"'), backslashes = word ^ (kOnes * '\\');
      if (((quotes - kOnes) & ~quotes & kHighs) | ((backslashes - kOnes) & ~backslashes & kHighs)) break;
      at += 8;
    }
    while (at != end && *at != '"' && *at != '\\') ++at;
    return at != end;
  }
};

}  // namespace otp
