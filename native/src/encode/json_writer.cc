#include "encode/json_writer.h"

#include <cmath>
#include <cstdio>

#include "encode/utf8_repair.h"

namespace otp {
namespace {

char* put_escaped_ascii(char* out, uint8_t byte) {
  static constexpr char kHex[] = "0123456789abcdef";
  *out++ = '\\';
  switch (byte) {
    case '"':
    case '\\':
      *out++ = static_cast<char>(byte);
      return out;
    case '\n':
      *out++ = 'n';
      return out;
    case '\t':
      *out++ = 't';
      return out;
    default:
      out = put(out, "u00");
      *out++ = kHex[byte >> 4];
      *out++ = kHex[byte & 15];
      return out;
  }
}

// U+2028 and U+2029 are allowed in JSON but end a line in JavaScript before ES2019.
bool is_line_separator(const uint8_t* text, uint64_t size) {
  return size == 3 && text[0] == 0xE2 && text[1] == 0x80 && (text[2] == 0xA8 || text[2] == 0xA9);
}

}  // namespace

namespace {

// Seconds that were nanoseconds once, as most of our doubles: k / 1e9 for a whole k. The division rounds as reading the
// decimal k * 1e-9 does, so that decimal reads back as the same double. A fifth of the time of the shortest digits.
char* put_whole_billionths(char* out, double value) {
  if (!(std::fabs(value) < 1e6)) return nullptr;
  const double billionths = std::nearbyint(value * 1e9);
  if (billionths / 1e9 != value || billionths == 0) return nullptr;  // zero may have a sign
  if (value < 0) *out++ = '-';
  const auto whole = static_cast<uint64_t>(std::fabs(billionths));
  out = put_integer(out, whole / 1'000'000'000);
  *out++ = '.';
  auto rest = static_cast<uint32_t>(whole % 1'000'000'000);
  for (int digit = 8; digit >= 0; --digit, rest /= 10) out[digit] = static_cast<char>('0' + rest % 10);
  for (out += 9; out[-1] == '0' && out[-2] != '.'; --out) {
  }
  return out;
}

}  // namespace

char* put_double(char* out, double value) {
  if (std::isnan(value)) return put(out, "\"NaN\"");
  if (std::isinf(value)) return value > 0 ? put(out, "\"Infinity\"") : put(out, "\"-Infinity\"");
  if (char* const end = put_whole_billionths(out, value)) return end;
#ifdef __cpp_lib_to_chars
  char* const end = std::to_chars(out, out + kMaxDoubleSize, value).ptr;
#else
  char text[kMaxDoubleSize + 1];  // libraries without it: 17 digits read back too, but the point is the locale's
  const int size = std::snprintf(text, sizeof(text), "%.17g", value);
  for (int i = 0; i < size; ++i) out[i] = text[i] == ',' ? '.' : text[i];
  char* const end = out + size;
#endif
  for (const char* at = out; at != end; ++at) {
    if (*at == '.' || *at == 'e') return end;
  }
  return put(end, ".0");  // or readers take it for an integer
}

char* put_escaped(char* out, const uint8_t* text, uint64_t size) {
  const uint8_t* end = text + size;
  while (text != end) {
    const uint8_t byte = *text;
    if (byte < 0x80) {
      ++text;
      if (byte < 0x20 || byte == '"' || byte == '\\') {
        out = put_escaped_ascii(out, byte);
      } else {
        *out++ = static_cast<char>(byte);
      }
      continue;
    }
    const Utf8Piece piece = utf8_piece(text, static_cast<uint64_t>(end - text));
    if (!piece.well_formed) {
      out = put(out, "\xEF\xBF\xBD");
    } else if (is_line_separator(text, piece.size)) {
      out = put(out, "\\u202");
      *out++ = text[2] == 0xA8 ? '8' : '9';
    } else {
      out = put_bytes(out, text, piece.size);
    }
    text += piece.size;
  }
  return out;
}

}  // namespace otp
