// Pieces of JSON text, written at a cursor. Nothing here checks for room: the caller reserves what the comments state.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>

#include "otel_torchprof/encode.h"

namespace otp {

constexpr uint64_t kMaxIntegerSize = 20;           // "-9223372036854775808"
constexpr uint64_t kMaxMicrosecondsSize = 1 + 21;  // sign, 17 digits, point, 3 digits
constexpr uint64_t kMaxEscapedBytesPerByte = 6;    // "\u0001"
constexpr uint64_t kMaxDoubleSize = 24 + 2;        // "-2.2250738585072014e-308", or ".0" after digits

// A literal; its size is known when compiling, so the copy is a few stores.
template <size_t N>
inline char* put(char* out, const char (&literal)[N]) {
  std::memcpy(out, literal, N - 1);
  return out + N - 1;
}

inline char* put_bytes(char* out, const void* data, uint64_t size) {
  if (size != 0) std::memcpy(out, data, size);  // memcpy's pointers must not be null, even for nothing
  return out + size;
}

// A text that is escaped already.
struct JsonText {
  const uint8_t* data;
  uint64_t size;
};

inline JsonText text_at(const otp_names& names, uint64_t index) {
  const bool is_added = index >= names.count;
  const uint8_t* data = is_added ? names.more_data : names.data;
  const uint64_t* ends = is_added ? names.more_ends : names.ends;
  if (is_added) index -= names.count;
  const uint64_t begin = index == 0 ? 0 : ends[index - 1];
  return {data + begin, ends[index] - begin};
}

inline char* put_text(char* out, const JsonText& text) { return put_bytes(out, text.data, text.size); }

// kMaxIntegerSize bytes.
template <typename Integer>
inline char* put_integer(char* out, Integer value) {
  return std::to_chars(out, out + kMaxIntegerSize, value).ptr;
}

// Nanoseconds as microseconds with three decimals, kMaxMicrosecondsSize bytes. Integers only: a double loses the
// nanoseconds of a Unix time.
inline char* put_microseconds(char* out, uint64_t nanoseconds) {
  out = put_integer(out, nanoseconds / 1000);
  const auto rest = static_cast<uint32_t>(nanoseconds % 1000);
  out[0] = '.';
  out[1] = static_cast<char>('0' + rest / 100);
  out[2] = static_cast<char>('0' + rest / 10 % 10);
  out[3] = static_cast<char>('0' + rest % 10);
  return out + 4;
}

// `to` - `from` as microseconds, for any two times: the difference of two int64 always fits in an uint64 and a sign.
inline char* put_microseconds_between(char* out, int64_t from, int64_t to) {
  if (to >= from) return put_microseconds(out, static_cast<uint64_t>(to) - static_cast<uint64_t>(from));
  *out++ = '-';
  return put_microseconds(out, static_cast<uint64_t>(from) - static_cast<uint64_t>(to));
}

// A number that reads back as the same double, kMaxDoubleSize bytes; what JSON has no number for as the text
// that protobuf's JSON has for it.
char* put_double(char* out, double value);

// Text as the inside of a JSON string, kMaxEscapedBytesPerByte * size bytes. Invalid UTF-8 becomes U+FFFD.
char* put_escaped(char* out, const uint8_t* text, uint64_t size);

}  // namespace otp
