#include "stack_reader.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace otp_python {

StackLayout g_stack_layout;

bool copy_memory(uintptr_t from, void* to, size_t bytes) {
  iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes);
}

namespace {

constexpr int kWord = sizeof(uintptr_t);
constexpr uintptr_t kTags = 3;        // of a reference in a frame, since Python 3.14
constexpr int kNoPythonFrom = 3;      // owners of frames that run no Python
constexpr size_t kFrameBytes = 128;   // of which a layout has the fields
constexpr size_t kThreadBytes = 512;  // and of these
constexpr size_t kCodeBytes = 256;
constexpr uint32_t kMostThreads = 1u << 16;
constexpr int kAttempts = 4;

template <typename T>
T field(const void* copied, int at) {
  T value;
  std::memcpy(&value, static_cast<const char*>(copied) + at, sizeof value);
  return value;
}

template <typename T>
bool copy_value(uintptr_t from, T* out) {
  return copy_memory(from, out, sizeof *out);
}

// ---- threads ----

bool copy_thread(uintptr_t state, PythonThreadCopy* out) {
  const StackLayout& layout = g_stack_layout;
  char copied[kThreadBytes];
  size_t size = static_cast<size_t>(std::max(layout.thread_ident, layout.thread_tid) + kWord);
  if (state == 0 || !copy_memory(state, copied, size)) return false;
  if (field<uintptr_t>(copied, 2 * kWord) != layout.interpreter) return false;
  *out = {state, field<uintptr_t>(copied, kWord), field<uint64_t>(copied, layout.thread_ident), 0};
  if (layout.thread_tid != kNone) {
    out->os_tid = static_cast<uint32_t>(field<uint64_t>(copied, layout.thread_tid));
  } else if (!copy_value(static_cast<uintptr_t>(out->ident) + static_cast<uintptr_t>(layout.pthread_tid),
                         &out->os_tid)) {
    out->os_tid = 0;
  }
  return true;
}

}  // namespace

bool copy_first_thread(PythonThreadCopy* out) {
  uintptr_t state = 0;
  uintptr_t at = g_stack_layout.interpreter + static_cast<uintptr_t>(g_stack_layout.first_thread);
  return copy_value(at, &state) && copy_thread(state, out);
}

bool copy_next_thread(PythonThreadCopy* thread) {
  PythonThreadCopy next{};
  if (!copy_thread(thread->next, &next)) return false;
  *thread = next;
  return true;
}

bool copy_thread_of(uint32_t os_tid, PythonThreadCopy* out) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {  // a thread that begins or ends tears the list for a moment
    bool found = copy_first_thread(out);
    for (uint32_t i = 0; found && i < kMostThreads; ++i, found = copy_next_thread(out))
      if (out->os_tid == os_tid) return true;
  }
  return false;
}

// ---- calls ----

namespace {

// False where what was copied is no frame.
bool copy_frame(uintptr_t frame, CallCopy* out, uintptr_t* caller, bool* runs_python) {
  const StackLayout& layout = g_stack_layout;
  char copied[kFrameBytes];
  int words = std::max({layout.frame_code, layout.frame_caller, layout.frame_instruction}) + kWord;
  if (!copy_memory(frame, copied, static_cast<size_t>(std::max(words, layout.frame_owner + 1)))) return false;
  uintptr_t code = field<uintptr_t>(copied, layout.frame_code) & ~kTags;
  bool is_index = layout.code_instructions == kNone;
  uintptr_t instruction =
      is_index ? field<uint32_t>(copied, layout.frame_instruction) : field<uintptr_t>(copied, layout.frame_instruction);
  *out = {frame, code, instruction};
  *caller = field<uintptr_t>(copied, layout.frame_caller);
  *runs_python = layout.frame_owner == kNone || field<uint8_t>(copied, layout.frame_owner) < kNoPythonFrom;
  return true;
}

bool copy_innermost(uintptr_t thread, uintptr_t* frame) {
  const StackLayout& layout = g_stack_layout;
  if (!copy_value(thread + static_cast<uintptr_t>(layout.thread_frame), frame)) return false;
  if (layout.thread_frame_holder == kNone || *frame == 0) return true;
  return copy_value(*frame + static_cast<uintptr_t>(layout.thread_frame_holder), frame);
}

void copy_once(uintptr_t thread, StackCopy* out) {
  out->count = 0;
  out->is_whole = out->is_cut = false;
  uintptr_t frame = 0, caller = 0;
  if (!copy_innermost(thread, &frame)) return;
  // Frames that run no Python count too, so that a ring of them comes to its end.
  for (uint32_t i = 0; frame != 0 && i < 2 * StackCopy::kMost && out->count < StackCopy::kMost; ++i, frame = caller) {
    bool runs_python = false;
    if (!copy_frame(frame, &out->calls[out->count], &caller, &runs_python)) return;
    out->count += runs_python ? 1 : 0;
  }
  out->is_whole = true;
  out->is_cut = frame != 0;
}

bool is_same(const CallCopy& one, const CallCopy& other) { return one.frame == other.frame && one.code == other.code; }

// Leaves what agrees; what a thread is in stays where it is while the calls in it come and go.
void keep_agreed(const StackCopy& before, StackCopy* now) {
  bool same = before.count == now->count && before.is_cut == now->is_cut;
  bool comparable = before.is_whole && now->is_whole && !before.is_cut && !now->is_cut;
  uint32_t agreed = 0, most = std::min(before.count, now->count);
  while (agreed < most && is_same(before.calls[before.count - 1 - agreed], now->calls[now->count - 1 - agreed]))
    ++agreed;
  now->is_whole = before.is_whole && now->is_whole && same && agreed == now->count;
  if (now->is_whole) return;
  if (!comparable) agreed = 0;  // they do not end with the same call
  std::copy(now->calls + now->count - agreed, now->calls + now->count, now->calls);
  now->count = agreed;
  now->is_cut = false;
}

}  // namespace

void copy_stack(const PythonThreadCopy& thread, StackCopy* out) {
  StackCopy before;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    copy_once(thread.state, &before);
    copy_once(thread.state, out);
    keep_agreed(before, out);
    if (out->is_whole) return;
  }
}

// ---- names and lines ----

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

// Python 3.10: pairs of how many bytes of instructions, and how many lines further; -128: these have no line.
int line_in_pairs(Bytes& table, int line, int64_t instruction) {
  constexpr int8_t kNoLine = -128;
  int64_t end = 0;
  for (uint8_t bytes = 0, lines = 0; table.next(&bytes) && table.next(&lines);) {
    auto delta = static_cast<int8_t>(lines);
    if (delta != kNoLine) line += delta;
    end += bytes;
    if (instruction < end) break;
  }
  return line;
}

// Since Python 3.11: entries whose first byte alone has the highest bit, with the kind and the number of instructions.
int line_in_entries(Bytes& table, int line, int64_t instruction) {
  constexpr int kOneLine = 10, kNoColumns = 13, kLong = 14, kNoLine = 15;
  int64_t end = 0;
  for (uint8_t head = 0; table.next(&head) && (head & 128) != 0;) {
    int kind = head >> 3 & 15;
    if (kind == kNoColumns || kind == kLong) line += table.signed_number();
    if (kind >= kOneLine && kind < kNoColumns) line += kind - kOneLine;
    end += 2 * ((head & 7) + 1);
    if (instruction < end && kind != kNoLine) break;
    for (uint8_t rest = 0; table.peek(&rest) && (rest & 128) == 0;) table.next(&rest);
  }
  return line;
}

int line_of(const CallCopy& call, const char* code) {
  const StackLayout& layout = g_stack_layout;
  int first = field<int>(code, layout.code_first_line);
  Bytes table(field<uintptr_t>(code, layout.code_lines));
  if (layout.code_instructions == kNone) {
    int64_t instruction = int64_t{2} * static_cast<int32_t>(call.instruction);
    return instruction < 0 ? first : line_in_pairs(table, first, instruction);
  }
  uintptr_t begin = call.code + static_cast<uintptr_t>(layout.code_instructions);
  auto instruction = static_cast<int64_t>(call.instruction - begin);
  return instruction < 0 ? first : line_in_entries(table, first, instruction);
}

bool copy_code(uintptr_t code, char* out) {
  const StackLayout& layout = g_stack_layout;
  auto size = static_cast<size_t>(std::max({layout.code_file, layout.code_name, layout.code_lines}) + kWord);
  return copy_memory(code, out, size) && field<uintptr_t>(out, kTypeAt) == layout.code_type;
}

bool is_still(const char* before, const char* now) {
  const StackLayout& layout = g_stack_layout;
  for (int at : {layout.code_file, layout.code_name, layout.code_lines})
    if (field<uintptr_t>(before, at) != field<uintptr_t>(now, at)) return false;
  return field<int>(before, layout.code_first_line) == field<int>(now, layout.code_first_line);
}

}  // namespace

bool copy_text(const CallCopy& call, CallText* out) {
  const StackLayout& layout = g_stack_layout;
  char code[kCodeBytes], later[kCodeBytes];
  if (!copy_code(call.code, code)) return false;
  if (!copy_string(field<uintptr_t>(code, layout.code_file), &out->file)) return false;
  if (!copy_string(field<uintptr_t>(code, layout.code_name), &out->name)) return false;
  out->line = line_of(call, code);
  CallCopy now{};
  uintptr_t caller = 0;
  bool runs_python = false;
  return copy_frame(call.frame, &now, &caller, &runs_python) && runs_python && is_same(call, now) &&
         copy_code(call.code, later) && is_still(code, later);
}

}  // namespace otp_python
