#include "files/json_values.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace otp {
namespace {

constexpr size_t kMostDigits = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The digits of a number and where its point is.
struct Decimal {
  char digits[kMostDigits];
  size_t count = 0;
  int64_t point = 0;  // digits before the point; may be negative
  bool is_negative = false;

  bool read(std::string_view text);
  bool read_exponent(std::string_view text);
  bool nanoseconds(int64_t* value) const;
};

bool Decimal::read(std::string_view text) {
  size_t at = 0, any = 0;
  if (at < text.size() && (text[at] == '-' || text[at] == '+')) is_negative = text[at++] == '-';
  bool is_fraction = false;
  for (; at < text.size() && (is_digit(text[at]) || (text[at] == '.' && !is_fraction)); ++at) {
    if (text[at] == '.') {
      is_fraction = true;
      continue;
    }
    ++any;
    const bool is_leading = count == 0 && text[at] == '0';
    if (is_fraction ? is_leading : !is_leading) point += is_fraction ? -1 : 1;
    if (is_leading) continue;
    if (count < kMostDigits) digits[count++] = text[at];
  }
  if (any == 0) return false;
  return at == text.size() || read_exponent(text.substr(at));
}

bool Decimal::read_exponent(std::string_view text) {
  if (text.size() < 2 || (text[0] != 'e' && text[0] != 'E')) return false;
  size_t at = 1;
  const bool is_small = text[at] == '-';
  if (is_small || text[at] == '+') ++at;
  if (at == text.size()) return false;
  int64_t exponent = 0;
  for (; at < text.size(); ++at) {
    if (!is_digit(text[at])) return false;
    exponent = std::min<int64_t>(exponent * 10 + (text[at] - '0'), 1 << 20);
  }
  point += is_small ? -exponent : exponent;
  return true;
}

bool Decimal::nanoseconds(int64_t* value) const {
  const int64_t whole = point + 3;
  *value = 0;
  if (count == 0 || whole < 0) return true;
  if (whole > 19) return false;
  uint64_t number = 0;
  for (int64_t i = 0; i < whole; ++i) number = number * 10 + (i < static_cast<int64_t>(count) ? digits[i] - '0' : 0);
  if (whole < static_cast<int64_t>(count)) {
    const bool has_rest = std::any_of(digits + whole + 1, digits + count, [](char c) { return c != '0'; });
    const char next = digits[whole];
    number += next > '5' || (next == '5' && (has_rest || number % 2 == 1));
  }
  if (number > static_cast<uint64_t>(kLatest)) return false;
  *value = is_negative ? -static_cast<int64_t>(number) : static_cast<int64_t>(number);
  return true;
}

int hexadecimal(char c) {
  if (is_digit(c)) return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// Four digits of \u at `at`; -1 where they are none.
int32_t code_unit(std::string_view text, size_t at) {
  if (at + 4 > text.size()) return -1;
  int32_t unit = 0;
  for (size_t i = at; i < at + 4; ++i) {
    const int digit = hexadecimal(text[i]);
    if (digit < 0) return -1;
    unit = unit * 16 + digit;
  }
  return unit;
}

void append_utf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | code >> 6));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | code >> 12));
    out->push_back(static_cast<char>(0x80 | (code >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | code >> 18));
    out->push_back(static_cast<char>(0x80 | (code >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

}  // namespace

std::string_view unquoted(std::string_view token) {
  const bool is_string = token.size() >= 2 && token.front() == '"';
  return is_string ? token.substr(1, token.size() - 2) : token;
}

bool nanoseconds_of(std::string_view token, int64_t* value) {
  const std::string_view text = unquoted(token);
  // Mostly digits, a point and three more.
  uint64_t number = 0;
  size_t at = 0, behind = 0;
  for (; at < text.size() && at < 17 && is_digit(text[at]); ++at) number = number * 10 + (text[at] - '0');
  const size_t whole = at;
  if (whole != 0 && at < text.size() && text[at] == '.') {
    for (++at; at < text.size() && behind < 3 && is_digit(text[at]); ++at, ++behind)
      number = number * 10 + (text[at] - '0');
  }
  if (whole == 0 || whole > 15 || at != text.size()) {
    Decimal decimal;
    return decimal.read(text) && decimal.nanoseconds(value);
  }
  for (; behind < 3; ++behind) number *= 10;
  if (number > static_cast<uint64_t>(kLatest)) return false;
  *value = static_cast<int64_t>(number);
  return true;
}

bool integer_of(std::string_view token, int64_t* value) {
  std::string_view text = unquoted(token);
  const bool is_negative = !text.empty() && text.front() == '-';
  if (is_negative) text.remove_prefix(1);
  if (text.empty()) return false;
  uint64_t number = 0;
  for (char c : text) {
    const auto digit = static_cast<uint64_t>(c - '0');
    if (!is_digit(c) || number > (UINT64_MAX - digit) / 10) return false;
    number = number * 10 + digit;
  }
  *value = static_cast<int64_t>(is_negative ? 0 - number : number);
  return true;
}

bool hexadecimal_of(std::string_view text, uint64_t* value) {
  if (text.empty() || text.size() > 16) return false;
  *value = 0;
  for (char c : text) {
    const int digit = hexadecimal(c);
    if (digit < 0) return false;
    *value = *value << 4 | static_cast<uint64_t>(digit);
  }
  return true;
}

void append_hexadecimal(std::string_view bytes, std::string* out) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (const char byte : bytes) out->append({kDigits[static_cast<uint8_t>(byte) >> 4], kDigits[byte & 15]});
}

bool double_of(std::string_view text, double* value) {
#ifdef __cpp_lib_to_chars
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
#else
  char copy[kMostDigits];  // libraries without it: the point is then the locale's
  if (text.empty() || text.size() >= sizeof(copy)) return false;
  std::copy(text.begin(), text.end(), copy);
  copy[text.size()] = 0;
  char* end = nullptr;
  *value = std::strtod(copy, &end);
  return end == copy + text.size();
#endif
}

uint32_t escaped_character(std::string_view text, size_t* at) {
  constexpr uint32_t kReplacement = 0xFFFD;
  const int32_t unit = code_unit(text, *at);
  if (unit < 0) return kReplacement;
  *at += 4;
  if (unit < 0xD800 || unit > 0xDFFF) return static_cast<uint32_t>(unit);
  if (unit > 0xDBFF || text.substr(*at, 2) != "\\u") return kReplacement;
  const int32_t low = code_unit(text, *at + 2);
  if (low < 0xDC00 || low > 0xDFFF) return kReplacement;
  *at += 6;
  return 0x10000 + (static_cast<uint32_t>(unit - 0xD800) << 10) + static_cast<uint32_t>(low - 0xDC00);
}

void append_unescaped(std::string_view content, std::string* out) {
  for (size_t at = 0; at < content.size();) {
    const char c = content[at++];
    if (c != '\\' || at == content.size()) {
      out->push_back(c);
      continue;
    }
    const char escaped = content[at++];
    constexpr std::string_view kLetters = "bfnrt", kMeant = "\b\f\n\r\t";
    const size_t place = kLetters.find(escaped);
    if (escaped == 'u') {
      append_utf8(escaped_character(content, &at), out);
    } else {
      out->push_back(place == std::string_view::npos ? escaped : kMeant[place]);
    }
  }
}

}  // namespace otp
