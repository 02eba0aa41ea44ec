#include "stack_reader.h"

#include <unistd.h>

#include <algorithm>

namespace otp_python {

StackLayout g_stack_layout;

bool copy_memory(uintptr_t from, void* to, size_t bytes) {
  iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes);
}

uint32_t Pieces::copy() {
  ssize_t copied = process_vm_readv(getpid(), d_here, d_count, d_there, d_count, 0);
  size_t left = copied < 0 ? 0 : static_cast<size_t>(copied);
  uint32_t done = 0;
  for (; done < d_count && left >= d_there[done].iov_len; ++done) left -= d_there[done].iov_len;
  return done;
}

namespace {

constexpr uintptr_t kTags = 3;    // of a reference in a frame, since Python 3.14
constexpr int kStacked = 0;       // owner of a frame that lies in a chunk
constexpr int kNoPythonFrom = 3;  // owners of frames that run no Python
constexpr int kAttempts = 3;
constexpr uint32_t kOddReadings =
    4;  // a loop that asks a generator looked twice in a row as if the generator had no caller
constexpr uintptr_t kMostOfFrame = 1 << 14;
constexpr uint32_t kKeptOfCut = 64;

size_t frame_bytes() {
  const StackLayout& layout = g_stack_layout;
  int words = std::max({layout.frame_code, layout.frame_caller, layout.frame_instruction}) + kWord;
  return static_cast<size_t>(std::max(words, layout.frame_owner + 1));
}

bool has_chunks() { return g_stack_layout.frame_owner != kNone; }

void remember(uintptr_t frame, StackHints* apart) {
  if (apart->count < StackHints::kMost) apart->apart[apart->count++] = frame;
}

uintptr_t code_of(uintptr_t reference) { return reference & ~kTags; }

}  // namespace

bool is_there(const CallCopy& call) {
  uintptr_t code = 0;
  return copy_value(call.frame + static_cast<uintptr_t>(g_stack_layout.frame_code), &code) &&
         code_of(code) == call.code;
}

bool StackReader::copy_top(uintptr_t state, uint64_t ident, const StackHints& hints, Top* out) {
  const StackLayout& layout = g_stack_layout;
  char copied[kThreadBytes];
  Pieces pieces;
  auto size = static_cast<size_t>(std::max({layout.thread_ident, layout.thread_frame, 2 * kWord}) + kWord);
  pieces.add(state, copied, size);
  uint32_t count = 1;
  bool has_holder = layout.thread_frame_holder != kNone && hints.holder != 0;
  uintptr_t frame = 0;
  if (has_holder) pieces.add(hints.holder, &frame, sizeof frame), ++count;
  d_window = hints.low;
  if (hints.low != 0) pieces.add(hints.low, d_pages, hints.high - hints.low), ++count;
  for (uint32_t i = 0; i < hints.count; ++i) pieces.add(d_at[i] = hints.apart[i], d_frames[i], frame_bytes());
  uint32_t done = pieces.copy();
  d_next = 0;
  d_count = done > count ? done - count : 0;
  d_low = hints.low;
  d_high = done >= count ? hints.high : hints.low;
  if (done == 0 || field<uintptr_t>(copied, 2 * kWord) != layout.interpreter) return false;
  if (field<uint64_t>(copied, layout.thread_ident) != ident) return false;
  *out = {0, field<uintptr_t>(copied, layout.thread_frame)};
  if (layout.thread_frame_holder == kNone || out->frame == 0) return true;
  out->holder = out->frame + static_cast<uintptr_t>(layout.thread_frame_holder);
  out->frame = frame;
  return (has_holder && done > 1 && hints.holder == out->holder) || copy_value(out->holder, &out->frame);
}

bool StackReader::is_still(uintptr_t state, const Top& top) {
  uintptr_t at = state + static_cast<uintptr_t>(g_stack_layout.thread_frame), frame = 0;
  return copy_value(top.holder == 0 ? at : top.holder, &frame) && frame == top.frame;
}

void StackReader::copy_pages(uintptr_t frame) {
  Pieces pieces;
  uintptr_t page = frame & ~(kPage - 1);
  d_window = page - (kPages - 1) * kPage;
  d_low = d_high = frame + frame_bytes();
  for (uint32_t i = 0; i < kPages; ++i, page -= kPage)
    pieces.add(page, d_pages + (page - d_window), i == 0 ? d_high - page : kPage);
  uint32_t done = pieces.copy();
  if (done != 0) d_low = (frame & ~(kPage - 1)) - (done - 1) * kPage;
}

const char* StackReader::frame_at(uintptr_t frame) {
  size_t bytes = frame_bytes();
  // What a torn copy names for a frame may be any number: none near the largest comes out as a small one here.
  if (frame >= d_low && frame < d_high && bytes <= d_high - frame) return d_pages + (frame - d_window);
  for (uint32_t i = d_next; i < d_count; ++i) {
    if (d_at[i] != frame) continue;
    d_next = i + 1;
    return d_frames[i];
  }
  char* alone = d_frames[StackHints::kMost];
  if (!copy_memory(frame, alone, bytes)) return nullptr;
  bool is_stacked = has_chunks() && field<uint8_t>(alone, g_stack_layout.frame_owner) == kStacked;
  if (is_stacked) copy_pages(frame);  // of the chunk where the stack continues
  return alone;
}

bool StackReader::walk(uintptr_t frame, StackCopy* out) {
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
      out->calls[out->count] = {frame, code_of(field<uintptr_t>(copied, layout.frame_code)),
                                is_index ? field<uint32_t>(copied, layout.frame_instruction)
                                         : field<uintptr_t>(copied, layout.frame_instruction)};
      d_is_stacked[out->count++] = owner == kStacked;
      d_apart.root = frame;
      d_is_odd = owner > kStacked;
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
void StackReader::learn_sizes(const StackCopy& stack) {
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
uint32_t StackReader::first_sound(const StackCopy& stack) const {
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

// The innermost call from which on, outwards, the stack is as it was in the latest copy; makes this the latest.
uint32_t StackReader::first_agreed(const StackCopy& stack) {
  uint32_t agreed = 0, most = std::min(stack.count, d_former.count);
  auto is_same = [](const CallCopy& one, const CallCopy& other) {
    return one.frame == other.frame && one.code == other.code;
  };
  while (agreed < most && is_same(stack.calls[stack.count - 1 - agreed], d_former.calls[d_former.count - 1 - agreed]))
    ++agreed;
  bool is_comparable = agreed == stack.count || !stack.is_cut;  // else they may end with different calls
  d_former = stack;
  return is_comparable ? stack.count - agreed : stack.count;
}

bool StackReader::is_sound_root(const StackHints& hints, uintptr_t before, int attempt) const {
  uintptr_t root = d_apart.root;
  if (root == hints.root) return true;
  if (!d_is_odd) return attempt > 1 && root == before;
  return attempt == kAttempts && root == hints.odd_root && hints.odd_readings >= kOddReadings;
}

void StackReader::keep_hints(const Top& top, const StackCopy& stack, StackHints* hints) const {
  uintptr_t low = 0, high = 0;
  for (uint32_t i = stack.count; i-- > 0;) {
    if (!d_is_stacked[i]) continue;
    uintptr_t frame = stack.calls[i].frame;
    if (low == 0 || frame < low || frame > low + (uintptr_t{1} << 18)) low = frame;  // in another chunk
    high = frame;
  }
  low &= ~(kPage - 1);
  high = low == 0 ? 0 : (high | (kPage - 1)) + 1;
  // A stack that was deeper may be so again.
  if (hints->high > high && hints->high - low <= kPages * kPage && d_high == hints->high) high = hints->high;
  if (high - low > kPages * kPage) low = high - kPages * kPage;
  *hints = d_apart;
  hints->holder = top.holder;
  hints->low = low;
  hints->high = high;
}

StackReader::Found StackReader::read(uintptr_t state, uint64_t ident, StackHints* hints, StackCopy* out) {
  uintptr_t before = 0;
  d_former.count = 0;
  out->is_whole = false;
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    Top top{};
    if (!copy_top(state, ident, *hints, &top) || top.frame == 0) return Found::kNoPython;
    bool is_walked = walk(top.frame, out), is_same = is_still(state, top);
    if (!is_walked) continue;
    bool is_sound = is_sound_root(*hints, before, attempt);
    before = d_apart.root;
    if (is_sound && is_same) learn_sizes(*out);
    uint32_t stale = !has_chunks() ? first_agreed(*out) : is_same ? 0 : first_sound(*out);
    if (!is_sound || stale == out->count || (stale != 0 && attempt != kAttempts)) continue;
    out->is_whole = is_same && stale == 0;
    keep_hints(top, *out, hints);
    std::copy(out->calls + stale, out->calls + out->count, out->calls);
    out->count -= stale;
    return Found::kStack;
  }
  uintptr_t odd_root = d_is_odd ? before : 0;
  hints->odd_readings = odd_root == hints->odd_root ? hints->odd_readings + 1 : 1;
  hints->odd_root = odd_root;
  return Found::kTorn;
}

}  // namespace otp_python
