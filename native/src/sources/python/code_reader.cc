#include "code_reader.h"

#include <algorithm>

namespace otp_python {

namespace {

constexpr int kTypeAt = kWord, kLengthAt = 2 * kWord, kTextFlagsAt = 4 * kWord;
constexpr int kBytesAt = 4 * kWord;               // the first of a bytes object
constexpr int64_t kLongestTable = 1 << 20;        // of lines
constexpr uint32_t kOneByte = 1, kFourBytes = 4;  // kinds of text
constexpr uint32_t kKindMask = 7, kCompact = 8, kAscii = 16;

// Control characters and what no UTF-8 has become question marks.
char* put_character(char* to, uint32_t character) {
  bool is_none =
      character < 0x20 || character == 0x7F || (character >= 0xD800 && character < 0xE000) || character > 0x10FFFF;
  if (is_none) character = '?';
  if (character < 0x80) {
    *to++ = static_cast<char>(character);
  } else if (character < 0x800) {
    *to++ = static_cast<char>(0xC0 | character >> 6);
    *to++ = static_cast<char>(0x80 | (character & 63));
  } else if (character < 0x10000) {
    *to++ = static_cast<char>(0xE0 | character >> 12);
    *to++ = static_cast<char>(0x80 | (character >> 6 & 63));
    *to++ = static_cast<char>(0x80 | (character & 63));
  } else {
    *to++ = static_cast<char>(0xF0 | character >> 18);
    *to++ = static_cast<char>(0x80 | (character >> 12 & 63));
    *to++ = static_cast<char>(0x80 | (character >> 6 & 63));
    *to++ = static_cast<char>(0x80 | (character & 63));
  }
  return to;
}

// The bytes of a bytes object, one after another.
class Bytes {
 public:
  explicit Bytes(uintptr_t object) {
    char head[kBytesAt];
    if (!copy_memory(object, head, sizeof head) || field<uintptr_t>(head, kTypeAt) != g_stack_layout.bytes_type) return;
    d_left = std::min(field<int64_t>(head, kLengthAt), kLongestTable);
    d_from = object + kBytesAt;
  }

  // False at the end.
  bool peek(uint8_t* out) {
    if (d_at == d_size && !refill()) return false;
    *out = d_copied[d_at];
    return true;
  }
  bool next(uint8_t* out) {
    bool found = peek(out);
    d_at += found ? 1 : 0;
    return found;
  }
  // A number of six bits in each byte, as the line table has them.
  uint32_t number() {
    uint32_t value = 0;
    uint8_t byte = 0;
    for (int shift = 0; shift < 32 && next(&byte); shift += 6) {
      value |= static_cast<uint32_t>(byte & 63) << shift;
      if ((byte & 64) == 0) break;
    }
    return value;
  }
  int signed_number() {
    uint32_t value = number();
    auto magnitude = static_cast<int>(value >> 1);
    return (value & 1) != 0 ? -magnitude : magnitude;
  }

 private:
  bool refill() {
    d_size = static_cast<uint32_t>(std::clamp<int64_t>(d_left, 0, sizeof d_copied));
    d_at = 0;
    if (d_size == 0 || !copy_memory(d_from, d_copied, d_size)) return (d_size = 0) != 0;
    d_from += d_size;
    d_left -= d_size;
    return true;
  }

  uintptr_t d_from = 0;
  int64_t d_left = 0;
  uint32_t d_at = 0, d_size = 0;
  uint8_t d_copied[512];
};

// Calls visit(end, line) for each piece of a line table: the instructions up to `end` have that line. Until it returns
// false.

// Python 3.10: pairs of how many bytes of instructions, and how many lines further; -128: these have no line.
template <typename Visit>
void visit_pairs(Bytes& table, int line, Visit visit) {
  constexpr int8_t kNoLine = -128;
  int64_t end = 0;
  for (uint8_t bytes = 0, lines = 0; table.next(&bytes) && table.next(&lines);) {
    auto delta = static_cast<int8_t>(lines);
    if (delta != kNoLine) line += delta;
    end += bytes;
    if (!visit(end, line)) return;
  }
}

// Since Python 3.11: entries whose first byte alone has the highest bit, with the kind and the number of instructions.
template <typename Visit>
void visit_entries(Bytes& table, int line, Visit visit) {
  constexpr int kOneLine = 10, kNoColumns = 13, kLong = 14;
  int64_t end = 0;
  for (uint8_t head = 0; table.next(&head) && (head & 128) != 0;) {
    int kind = head >> 3 & 15;
    if (kind == kNoColumns || kind == kLong) line += table.signed_number();
    if (kind >= kOneLine && kind < kNoColumns) line += kind - kOneLine;
    end += 2 * ((head & 7) + 1);
    if (!visit(end, line)) return;
    for (uint8_t rest = 0; table.peek(&rest) && (rest & 128) == 0;) table.next(&rest);
  }
}

template <typename Visit>
void visit_lines(const CodeHead& code, Visit visit) {
  Bytes table(code.lines);
  if (g_stack_layout.code_instructions == kNone) return visit_pairs(table, code.first_line, visit);
  visit_entries(table, code.first_line, visit);
}

}  // namespace

size_t code_head_bytes() {
  const StackLayout& layout = g_stack_layout;
  return static_cast<size_t>(std::max({layout.code_file, layout.code_name, layout.code_lines, layout.code_first_line}) +
                             kWord);
}

bool parse_code(const char* copied, CodeHead* out) {
  const StackLayout& layout = g_stack_layout;
  if (field<uintptr_t>(copied, kTypeAt) != layout.code_type) return false;
  bool has_size = layout.code_instructions != kNone;  // a code is as long as its instructions
  *out = {field<uintptr_t>(copied, layout.code_file), field<uintptr_t>(copied, layout.code_name),
          field<uintptr_t>(copied, layout.code_lines), has_size ? 2 * field<int64_t>(copied, kLengthAt) : -1,
          field<int>(copied, layout.code_first_line)};
  return true;
}

bool copy_code(uintptr_t code, CodeHead* out) {
  char copied[kMostOfCodeHead];
  return copy_memory(code, copied, code_head_bytes()) && parse_code(copied, out);
}

bool copy_string(uintptr_t object, TextCopy* out) {
  const StackLayout& layout = g_stack_layout;
  char head[kTextFlagsAt + sizeof(uint32_t)];
  if (!copy_memory(object, head, sizeof head) || field<uintptr_t>(head, kTypeAt) != layout.text_type) return false;
  int64_t length = field<int64_t>(head, kLengthAt);
  uint32_t flags = field<uint32_t>(head, kTextFlagsAt) >> layout.text_flags_shift, kind = flags & kKindMask;
  bool is_known = kind == kOneByte || kind == 2 || kind == kFourBytes;
  if (length < 0 || !is_known || (flags & kCompact) == 0) return false;
  // Behind the head of text that is not ASCII: its UTF-8 and the length of that, and where the head has one more word
  // (up to Python 3.11) one more length.
  int more = (flags & kAscii) != 0 ? 0 : layout.text_head - kTextFlagsAt + kWord;
  auto kept = static_cast<uint32_t>(std::min<int64_t>(length, TextCopy::kMost));
  uintptr_t from =
      object + static_cast<uintptr_t>(layout.text_head + more) + static_cast<uintptr_t>(length - kept) * kind;
  char raw[kFourBytes * TextCopy::kMost];
  if (!copy_memory(from, raw, size_t{kept} * kind)) return false;
  char* to = out->data;
  for (uint32_t i = 0; i < kept; ++i) {
    uint32_t character = 0;
    std::memcpy(&character, raw + size_t{i} * kind, kind);
    to = put_character(to, character);
  }
  out->size = static_cast<uint32_t>(to - out->data);
  return true;
}

int64_t offset_of(const CallCopy& call) {
  const StackLayout& layout = g_stack_layout;
  if (layout.code_instructions == kNone) return int64_t{2} * static_cast<int32_t>(call.instruction);
  return static_cast<int64_t>(call.instruction - call.code) - layout.code_instructions;
}

int line_at(const CodeHead& code, int64_t offset) {
  int found = code.first_line;
  if (offset < 0) return found;
  visit_lines(code, [&found, offset](int64_t end, int line) {
    found = line;
    return offset >= end;
  });
  return found;
}

bool copy_text(const CallCopy& call, CallText* out) {
  CodeHead code{}, later{};
  if (!copy_code(call.code, &code)) return false;
  if (!copy_string(code.file, &out->file) || !copy_string(code.name, &out->name)) return false;
  out->line = line_at(code, offset_of(call));
  return is_there(call) && copy_code(call.code, &later) && code == later;
}

std::vector<LineRange> copy_lines(const CodeHead& code) {
  std::vector<LineRange> ranges;
  visit_lines(code, [&ranges](int64_t end, int line) {
    if (!ranges.empty() && ranges.back().line == line) {
      ranges.back().end = end;
    } else {
      ranges.push_back({end, line});
    }
    return true;
  });
  return ranges;
}

}  // namespace otp_python
