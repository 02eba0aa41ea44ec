// What a thread that records does: a timing event at the begin of what is requested, and another at its end.
#pragma once

#include <c10/core/impl/GPUTrace.h>

#include "device_collect.h"
#include "device_inputs.h"

namespace otp::devices {

// Sessions that request this event timed.
inline uint32_t requested(State& s, const otp_begin_args& event, uint32_t consumers) {
  const Wishes& wishes = s.wishes;
  if (event.kind != OTP_EVENT_OPERATOR || event.scope == static_cast<uint8_t>(at::RecordScope::USER_SCOPE))
    return consumers & wishes.labels.load(std::memory_order_acquire);
  consumers &= wishes.ops.load(std::memory_order_acquire);
  if (consumers == 0 || launches(s.launches, event, s.type)) return consumers;
  consumers &= wishes.all.load(std::memory_order_relaxed);
  return consumers == 0 || event.name == nullptr || is_view_like(event.name) ? 0 : consumers;
}

// Whether any of them has not stopped.
inline bool is_requested_by(const State& s, uint32_t consumers) {
  const Wishes& wishes = s.wishes;
  uint32_t all = wishes.ops.load(std::memory_order_relaxed) | wishes.labels.load(std::memory_order_relaxed);
  return (consumers & all) != 0;
}

inline void forget_oldest(ThreadMarks& marks) {
  give_spare(marks.spares, marks.open.front().stream.device_index(), marks.open.front().begin);
  marks.open.erase(marks.open.begin());
}

inline void count_captured(State& s, uint32_t consumers) {
  s.capture_seen_ns.store(steady_ns(), std::memory_order_relaxed);
  for (uint32_t rest = consumers; rest != 0; rest &= rest - 1)
    s.captured[__builtin_ctz(rest)].fetch_add(1, std::memory_order_relaxed);
}

// A label around work of the CPU is no reason to be the first who uses a device.
inline bool is_in_use(State& s, c10::DeviceIndex index) {
  auto at = static_cast<size_t>(index);
  bool cached = at < std::size(s.in_use);
  if (cached && s.in_use[at].load(std::memory_order_relaxed)) return true;
  bool found = has_context(at::globalContext(), s.type, index);
  if (cached) s.in_use[at].store(found, std::memory_order_relaxed);
  return found;
}

// Of an operator the device of its inputs, of all else the current one. Nothing where there is nothing to time.
inline std::optional<c10::DeviceIndex> index_of(State& s, const otp_begin_args& event) {
  // Which one is current is a question that takes time, and where there is one device it has one answer.
  c10::DeviceIndex current = s.guard->deviceCount() == 1 ? 0 : s.guard->getDevice().index();
  if (event.kind == OTP_EVENT_OPERATOR)
    return device_index_of(*static_cast<const at::RecordFunction*>(event.key), s.type, current);
  return is_in_use(s, current) ? std::optional(current) : std::nullopt;
}

inline int mark_begin(State& s, uint64_t id, const otp_begin_args& event, uint32_t consumers) {
  consumers = requested(s, event, consumers);
  if (consumers == 0) return 0;
  if (is_off(s)) {
    if (s.wishes.held.load(std::memory_order_relaxed) != 0) count_captured(s, consumers);
    return 0;
  }
  // It would be called for every timing event, under Python's lock, which whoever waits for this thread's marks may
  // hold.
  TORCH_CHECK(!c10::impl::GPUTrace::haveState, "torch's tracing of GPU work (torch.cuda._sanitizer) is on");
  std::optional<c10::DeviceIndex> index = index_of(s, event);
  if (!index.has_value()) return 0;
  ThreadMarks& marks = own_marks(s);
  std::lock_guard<std::timed_mutex> hold(marks.mutex);
  if (!is_requested_by(s, consumers)) return 0;  // what was found at the end of everything is not added to
  c10::Stream stream = s.guard->getStream(c10::Device(s.type, *index));
  if (is_capturing(*s.guard, stream)) {
    count_captured(s, consumers);
    return 0;
  }
  if (marks.open.size() >= kMostOpen) forget_oldest(marks);
  auto clock = static_cast<size_t>(*index);
  uint32_t moment = clock < std::size(s.moments) ? s.moments[clock].load(std::memory_order_relaxed) : 0;
  marks.open.push_back({id, consumers, moment, stream, take_event(s, marks, *index), nullptr, &marks,
                        s.last_token.load(std::memory_order_relaxed)});
  try {
    record(*s.guard, &marks.open.back().begin, stream);
  } catch (...) {
    marks.open.pop_back();  // the event too: after an error it may be one that is no more
    throw;
  }
  return 1;
}

// Under the thread's lock. How many pairs of it are not gathered yet.
inline size_t end_pair(State& s, ThreadMarks& marks, uint64_t id) {
  auto found = std::find_if(marks.open.rbegin(), marks.open.rend(), [&](const Pair& pair) { return pair.id == id; });
  if (found == marks.open.rend()) return 0;
  Pair pair = *found;
  marks.open.erase(std::next(found).base());
  c10::DeviceIndex index = pair.stream.device_index();
  bool held = s.wishes.held.load(std::memory_order_relaxed) != 0, off = is_off(s);
  try {
    if (held || (!off && is_capturing(*s.guard, pair.stream))) {
      count_captured(s, pair.consumers);
      off = true;
    }
    if (off) {
      give_spare(marks.spares, index, pair.begin);
      return 0;
    }
    pair.end = take_event(s, marks, index);
    record(*s.guard, &pair.end, pair.stream);
  } catch (...) {
    give_spare(marks.spares, index, pair.begin);
    throw;
  }
  marks.ended.push_back(pair);
  return marks.ended.size();
}

// Asking for an event that is not done clears the calling thread's last error, which the program may not have read yet.
inline bool has_unread_error() {
  using Peek = int (*)();
  static const auto peek = [] {
    void* function = dlsym(RTLD_DEFAULT, "cudaPeekAtLastError");
    if (function == nullptr) function = dlsym(RTLD_DEFAULT, "hipPeekAtLastError");
    return reinterpret_cast<Peek>(function);
  }();
  return peek != nullptr && peek() != 0;
}

inline void mark_end(State& s, uint64_t id) {
  ThreadMarks& marks = own_marks(s);
  size_t ended;
  {
    std::lock_guard<std::timed_mutex> hold(marks.mutex);
    ended = end_pair(s, marks, id);
  }
  if (ended == 0 || ended % kTooMany != 0 || has_unread_error() || !s.control.try_lock()) return;
  collect(s);
  s.control.unlock();
}

inline int on_device_begin(uint64_t id, const otp_begin_args* event, uint32_t consumers) {
  State& s = state();
  try {
    return mark_begin(s, id, *event, consumers);
  } catch (...) {
    fail(s, consumers);
    return 0;
  }
}

inline void on_device_end(uint64_t id) {
  State& s = state();
  try {
    mark_end(s, id);
  } catch (...) {
    fail(s, s.wishes.ops.load(std::memory_order_relaxed) | s.wishes.labels.load(std::memory_order_relaxed));
  }
}

inline constexpr otp_device_source kDeviceSource = {on_device_begin, on_device_end};

}  // namespace otp::devices
