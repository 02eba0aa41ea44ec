#include "stack_reader.h"

#include "code_reader.h"

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

// ---- names ----

bool copy_text(const CallCopy& call, CallText* out) {
  CodeHead code{}, later{};
  if (!copy_code(call.code, &code)) return false;
  if (!copy_string(code.file, &out->file) || !copy_string(code.name, &out->name)) return false;
  out->line = line_at(code, offset_of(call));
  CallCopy now{};
  uintptr_t caller = 0;
  bool runs_python = false;
  return copy_frame(call.frame, &now, &caller, &runs_python) && runs_python && is_same(call, now) &&
         copy_code(call.code, &later) && code == later;
}

}  // namespace otp_python
