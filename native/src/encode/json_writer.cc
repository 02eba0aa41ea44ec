#include "encode/json_writer.h"

namespace otp {
namespace {

struct Sequence {
  uint64_t size;  // bytes to take, 1 to 4
  bool valid;     // or to replace by one U+FFFD
};

// The UTF-8 sequence that begins with the non-ASCII byte *text (Unicode 15, table 3-7). An invalid one is as long as
// its maximal subpart, the bytes that could still have become a character.
Sequence next_sequence(const uint8_t* text, uint64_t available) {
  const uint8_t lead = text[0];
  if (lead < 0xC2 || lead > 0xF4) return {1, false};
  const uint64_t wanted = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Only the second byte has a range of its own: it keeps out overlong forms, surrogates and what lies beyond U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (uint64_t i = 1; i < wanted; ++i) {
    if (i == available || text[i] < low || text[i] > high) return {i, false};
    low = 0x80;
    high = 0xBF;
  }
  return {wanted, true};
}

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
    const Sequence sequence = next_sequence(text, static_cast<uint64_t>(end - text));
    if (!sequence.valid) {
      out = put(out, "\xEF\xBF\xBD");
    } else if (is_line_separator(text, sequence.size)) {
      out = put(out, "\\u202");
      *out++ = text[2] == 0xA8 ? '8' : '9';
    } else {
      out = put_bytes(out, text, sequence.size);
    }
    text += sequence.size;
  }
  return out;
}

}  // namespace otp
