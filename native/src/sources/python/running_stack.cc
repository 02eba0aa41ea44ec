#include "running_stack.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace otp_python {

namespace {

constexpr int kWord = sizeof(uintptr_t);
constexpr uintptr_t kTags = 3;    // of a reference in a frame, since Python 3.14
constexpr int kStacked = 0;       // owner of a frame that lies in a chunk
constexpr int kNoPythonFrom = 3;  // owners of frames that run no Python
constexpr int kAttempts = 3;
constexpr uintptr_t kMostOfFrame = 1 << 14;
constexpr uint32_t kKeptOfCut = 64;

template <typename T>
T field(const void* copied, int at) {
  T value;
  std::memcpy(&value, static_cast<const char*>(copied) + at, sizeof value);
  return value;
}

size_t frame_bytes() {
  const StackLayout& layout = g_stack_layout;
  int words = std::max({layout.frame_code, layout.frame_caller, layout.frame_instruction}) + kWord;
  return static_cast<size_t>(std::max(words, layout.frame_owner + 1));
}

bool has_chunks() { return g_stack_layout.frame_owner != kNone; }

void remember(uintptr_t frame, StackHints* apart) {
  if (apart->count < StackHints::kMost) apart->apart[apart->count++] = frame;
}

}  // namespace

bool RunningStackReader::copy_top(uintptr_t state, uint64_t ident, Top* out) {
  const StackLayout& layout = g_stack_layout;
  char copied[kThreadBytes];
  auto size = static_cast<size_t>(std::max({layout.thread_ident, layout.thread_frame, 2 * kWord}) + kWord);
  if (!copy_memory(state, copied, size)) return false;
  if (field<uintptr_t>(copied, 2 * kWord) != layout.interpreter) return false;
  if (field<uint64_t>(copied, layout.thread_ident) != ident) return false;
  uintptr_t frame = field<uintptr_t>(copied, layout.thread_frame);
  *out = {0, frame};
  if (layout.thread_frame_holder == kNone || frame == 0) return true;
  out->holder = frame + static_cast<uintptr_t>(layout.thread_frame_holder);
  return copy_memory(out->holder, &out->frame, sizeof out->frame);
}

bool RunningStackReader::is_still(uintptr_t state, const Top& top) {
  uintptr_t at = state + static_cast<uintptr_t>(g_stack_layout.thread_frame), frame = 0;
  return copy_memory(top.holder == 0 ? at : top.holder, &frame, sizeof frame) && frame == top.frame;
}

void RunningStackReader::copy_pages(uintptr_t frame, const StackHints* hints) {
  iovec here[kPages + StackHints::kMost + 1], there[kPages + StackHints::kMost + 1];
  size_t bytes = frame_bytes();
  unsigned long count = 0;
  auto add = [&](uintptr_t from, char* to, size_t size) {
    here[count] = {to, size};
    there[count++] = {reinterpret_cast<void*>(from), size};
  };
  uintptr_t page = frame & ~(kPage - 1);
  unsigned long pages = has_chunks() ? kPages : 0;
  d_window = page - (kPages - 1) * kPage;
  for (unsigned long i = 0; i < pages; ++i, page -= kPage)
    add(page, d_pages + (page - d_window), i == 0 ? frame - page + bytes : kPage);
  d_high = frame + bytes;
  d_low = d_high;
  if (hints != nullptr) {
    d_count = d_next = 0;
    if (!has_chunks()) d_at[d_count++] = frame;
    for (uint32_t i = 0; i < hints->count; ++i)
      if (hints->apart[i] != frame || has_chunks()) d_at[d_count++] = hints->apart[i];
    for (uint32_t i = 0; i < d_count; ++i) add(d_at[i], d_frames[i], bytes);
  }
  ssize_t copied = process_vm_readv(getpid(), here, count, there, count, 0);
  size_t left = copied < 0 ? 0 : static_cast<size_t>(copied);
  unsigned long done = 0;
  for (; done < count && left >= there[done].iov_len; ++done) left -= there[done].iov_len;
  if (done != 0 && pages != 0) d_low = reinterpret_cast<uintptr_t>(there[std::min(done, pages) - 1].iov_base);
  if (hints != nullptr) d_count = static_cast<uint32_t>(done > pages ? done - pages : 0);
}

const char* RunningStackReader::frame_at(uintptr_t frame) {
  size_t bytes = frame_bytes();
  if (frame >= d_low && frame + bytes <= d_high) return d_pages + (frame - d_window);
  for (uint32_t i = d_next; i < d_count; ++i) {
    if (d_at[i] != frame) continue;
    d_next = i + 1;
    return d_frames[i];
  }
  char* alone = d_frames[StackHints::kMost];
  if (!copy_memory(frame, alone, bytes)) return nullptr;
  bool is_stacked = has_chunks() && field<uint8_t>(alone, g_stack_layout.frame_owner) == kStacked;
  if (is_stacked) copy_pages(frame, nullptr);  // of the chunk where the stack continues
  return alone;
}

bool RunningStackReader::walk(uintptr_t frame, StackCopy* out) {
  const StackLayout& layout = g_stack_layout;
  out->count = 0;
  d_apart.count = 0;
  d_apart.root = 0;
  // Frames that run no Python count too, so that a ring of them comes to its end.
  for (uint32_t i = 0; frame != 0 && i < 2 * StackCopy::kMost && out->count < StackCopy::kMost; ++i) {
    const char* copied = frame_at(frame);
    if (copied == nullptr) return false;
    int owner = layout.frame_owner == kNone ? kNone : field<uint8_t>(copied, layout.frame_owner);
    if (owner < kNoPythonFrom) {
      bool is_index = layout.code_instructions == kNone;
      out->calls[out->count] = {frame, field<uintptr_t>(copied, layout.frame_code) & ~kTags,
                                is_index ? field<uint32_t>(copied, layout.frame_instruction)
                                         : field<uintptr_t>(copied, layout.frame_instruction)};
      d_is_stacked[out->count++] = owner == kStacked;
      d_apart.root = frame;
    }
    if (owner != kStacked) remember(frame, &d_apart);
    frame = field<uintptr_t>(copied, layout.frame_caller);
  }
  out->is_cut = frame != 0;
  if (out->is_cut) {
    out->count = std::min(out->count, kKeptOfCut);
    d_apart.root = 0;
  }
  return out->count != 0;
}

// How long a code's frames are shows where one lies right below the next.
void RunningStackReader::learn_sizes(const StackCopy& stack) {
  for (uint32_t i = stack.count, caller = stack.count; i-- > 0;) {
    if (!d_is_stacked[i]) continue;
    uintptr_t bytes = caller == stack.count ? 0 : stack.calls[i].frame - stack.calls[caller].frame;
    if (bytes != 0 && bytes < kMostOfFrame) {
      uintptr_t code = stack.calls[caller].code;
      d_sizes[(code >> 4) % kSizes] = {code, bytes};
    }
    caller = i;
  }
}

// The innermost call from which on, outwards, each frame lies where its caller's says.
uint32_t RunningStackReader::first_sound(const StackCopy& stack) const {
  for (uint32_t i = stack.count, caller = stack.count; i-- > 0;) {
    if (!d_is_stacked[i]) continue;
    if (caller != stack.count) {
      uintptr_t code = stack.calls[caller].code, bytes = stack.calls[i].frame - stack.calls[caller].frame;
      const FrameSize& known = d_sizes[(code >> 4) % kSizes];
      if (bytes < kMostOfFrame && known.code == code && known.bytes != bytes) return caller;
    }
    caller = i;
  }
  return 0;
}

RunningStackReader::Found RunningStackReader::read(uintptr_t state, uint64_t ident, StackHints* hints, StackCopy* out) {
  uintptr_t root = hints->root;
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    Top top{};
    if (!copy_top(state, ident, &top) || top.frame == 0) return Found::kNoPython;
    copy_pages(top.frame, hints);
    bool is_walked = walk(top.frame, out), is_same = is_still(state, top);
    if (!is_walked) continue;
    if (is_same) learn_sizes(*out);
    uint32_t stale = is_same ? 0 : first_sound(*out);
    bool is_sound = is_same || d_apart.root == root;
    root = d_apart.root;
    if (!is_sound || (stale != 0 && attempt != kAttempts)) continue;
    std::copy(out->calls + stale, out->calls + out->count, out->calls);
    out->count -= stale;
    *hints = d_apart;
    return Found::kStack;
  }
  return Found::kTorn;
}

}  // namespace otp_python
