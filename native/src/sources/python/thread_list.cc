#include "thread_list.h"

#include <algorithm>

#include "stack_layout.h"
#include "stack_reader.h"

namespace otp_python {

namespace {

constexpr size_t kThreadBytes = 512;  // of which a layout has the fields
constexpr int kAttempts = 4;

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

}  // namespace otp_python
