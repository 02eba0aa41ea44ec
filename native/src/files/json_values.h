// Values of JSON as numbers and texts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace otp {

// The largest time: the sum of two fits in 64 bits.
constexpr int64_t kLatest = int64_t{1} << 61;

// A number, or a string that is one, without the string's quotes.
std::string_view unquoted(std::string_view token);

// Microseconds as nanoseconds, exactly, half of one to the even one. False: no number, or beyond kLatest.
bool nanoseconds_of(std::string_view token, int64_t* value);

// A whole number of 64 bits, with or without a sign. False: none.
bool integer_of(std::string_view token, int64_t* value);

// Up to 16 hexadecimal digits.
bool hexadecimal_of(std::string_view text, uint64_t* value);
// Two such digits for each byte.
void append_hexadecimal(std::string_view bytes, std::string* out);

// A number as torch prints it, such as "1.": false where it is none.
bool double_of(std::string_view text, double* value);

// The character of an escape \u at `at`, behind the u; moves `at` behind it. Half of a pair becomes U+FFFD, as does
// what is no escape: then `at` stays.
uint32_t escaped_character(std::string_view text, size_t* at);

// The content of a string whose escapes are written out. Throws std::bad_alloc.
void append_unescaped(std::string_view content, std::string* out);

}  // namespace otp
