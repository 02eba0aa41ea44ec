// Events that end on another thread than they began on, or later than their session had room, and coroutines that wait.
#include <new>
#include <vector>

#include "core/recording.h"

namespace otp {

// Events of this thread that others have ended go from the stack of parents.
void remove_ended_elsewhere(ThreadBuffer& thread) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  for (const EndedElsewhere& ended : thread.ended_elsewhere) {
    for (int i = static_cast<int>(thread.depth.get()) - 1; i >= 0; --i) {
      if (!ended.is(thread.open[i])) continue;
      thread.remove_open(i);
      break;
    }
  }
  thread.ended_elsewhere.clear();
  thread.ended_elsewhere_flag.store(0, std::memory_order_relaxed);
}

// Where memory is short the event stays open, and is marked unfinished at the stop.
static void add_late_end(Registry& all, uint32_t consumers, const LateEnd& end) try {
  for (uint32_t rest = consumers; rest != 0; rest &= rest - 1) {
    otp_session* session = all.sessions[__builtin_ctz(rest)];
    if (session == nullptr || session->state != otp_session::State::kRunning) continue;
    if (session == all.box_session) {
      all.box->add_late_end(end);
    } else {
      session->late_ends.push_back(end);
    }
  }
} catch (const std::bad_alloc&) {
}

uint32_t intern_error(const char* error_type, uint32_t size) {
  return error_type == nullptr ? 0 : registry().interner.intern({error_type, size}, OTP_NAME_CODE).id;
}

// The end of an event whose sessions have no chunk of this thread any more (they are at their budget): kept apart, so
// that what began inside the budget also ends. At most as many as events were open when the last chunk was full.
void end_late_slowpath(ThreadBuffer& thread, uint32_t consumers, uint64_t index, uint64_t ticks, uint8_t flags,
                       uint32_t error) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  otp_thread here = thread.info;
  here.source_tid = thread.source_tid.get();
  add_late_end(all, consumers, {thread.id, index, ticks, error, flags, here});
}

bool take_open(ThreadBuffer& thread, const void* key, OpenEvent* out) {
  int position = thread.find_open(key);
  if (position < 0) return false;
  *out = thread.open[position];
  thread.remove_open(position);
  return true;
}

bool take_suspended(ThreadBuffer& thread, const void* key, OpenEvent* out) {
  if (thread.suspended_count.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard<std::mutex> hold(registry().mutex);
  for (size_t i = thread.suspended.size(); i-- > 0;) {
    if (thread.suspended[i].key.get() != key) continue;
    *out = thread.suspended[i];
    thread.suspended.erase(thread.suspended.begin() + static_cast<std::ptrdiff_t>(i));
    thread.suspended_count.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  return false;
}

static bool has_ended_elsewhere(const ThreadBuffer& thread, const OpenEvent& event) {
  for (const EndedElsewhere& ended : thread.ended_elsewhere)
    if (ended.is(event)) return true;
  return false;
}

// Reads an open event of another thread, which may be pushing and popping meanwhile: the event that we look for stays
// open, but may move down by one when one below it is removed; then its key is found at the next try.
static bool find_in_other(const ThreadBuffer& other, const void* key, OpenEvent* out) {
  for (int attempt = 0; attempt < 16; ++attempt) {
    for (int i = static_cast<int>(other.depth.get()) - 1; i >= 0; --i) {
      const OpenEvent& event = other.open[i];
      if (event.key.get() != key) continue;
      out->key.set(key);
      out->index = event.index;
      out->consumers = event.consumers;
      if (event.key.get() != key || event.index.get() != out->index.get()) continue;
      if (!has_ended_elsewhere(other, *out)) return true;
    }
  }
  return false;
}

static bool take_from_other(ThreadBuffer& other, const void* key, OpenEvent* out) try {
  for (size_t i = other.suspended.size(); i-- > 0;) {
    if (other.suspended[i].key.get() != key) continue;
    *out = other.suspended[i];
    other.suspended.erase(other.suspended.begin() + static_cast<std::ptrdiff_t>(i));
    other.suspended_count.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  if (!find_in_other(other, key, out)) return false;
  other.ended_elsewhere.push_back({key, out->index.get(), out->consumers.get() != 0});
  other.ended_elsewhere_flag.store(1, std::memory_order_relaxed);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

int end_elsewhere(const void* key, uint32_t thread_id, uint32_t source_tid, uint8_t flags, const char* error_type,
                  uint32_t error_type_size) {
  uint64_t ticks = ticks_now();
  ThreadBuffer* here = this_thread();
  uint32_t error = intern_error(error_type, error_type_size);
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  ThreadBuffer* other = all.find_thread(thread_id, source_tid);
  OpenEvent event;
  if (here == nullptr || other == nullptr || !take_from_other(*other, key, &event)) {
    all.unmatched_ends.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }
  otp_thread ended_on = here->info;
  ended_on.source_tid = here->source_tid.get();
  uint32_t consumers = event.consumers.get() & g_shared.running();
  auto late_flags = static_cast<uint8_t>(flags | OTP_FLAG_ASYNC);
  add_late_end(all, consumers, {other->id, event.index.get(), ticks, error, late_flags, ended_on});
  return 1;
}

// The calls that end_frames ends, the innermost first.
static std::vector<const void*> open_calls(uint32_t thread_id, uintptr_t without) {
  std::vector<const void*> keys;  // not on the stack, of which a thread may have little
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  const ThreadBuffer* thread = all.find_thread(thread_id, 0);
  for (uint32_t i = thread == nullptr ? 0 : thread->depth.get(); i-- > 0;) {
    const OpenEvent& event = thread->open[i];
    bool is_call = event.what.get() == hot::what_is(0, OTP_EVENT_FRAME) && !has_ended_elsewhere(*thread, event);
    const void* key = event.key.get();
    if (is_call && (reinterpret_cast<uintptr_t>(key) & without) == 0) keys.push_back(key);
  }
  return keys;
}

uint32_t end_frames(uint32_t thread_id, uintptr_t without) try {
  bool here = t_buffer != nullptr && t_buffer->id == thread_id;
  uint32_t ended = 0;
  for (const void* key : open_calls(thread_id, without)) {
    int status = here ? end(key, 0, nullptr, 0) : end_elsewhere(key, thread_id, 0, 0, nullptr, 0);
    ended += static_cast<uint32_t>(status);
  }
  return ended;
} catch (const std::bad_alloc&) {
  return 0;  // then they end with their sessions
}

int suspend(const void* key) try {
  ThreadBuffer* thread = t_buffer;
  if (thread == nullptr) return 0;
  repair_stack(*thread);
  std::lock_guard<std::mutex> hold(registry().mutex);
  thread->suspended.emplace_back();  // first, since it may fail
  if (!take_open(*thread, key, &thread->suspended.back())) {
    thread->suspended.pop_back();
    return 0;
  }
  thread->suspended_count.fetch_add(1, std::memory_order_relaxed);
  return 1;
} catch (const std::bad_alloc&) {
  return 0;
}

int resume(const void* key) {
  ThreadBuffer* thread = t_buffer;
  OpenEvent event;
  if (thread == nullptr || thread->depth.get() >= OTP_MAX_DEPTH || !take_suspended(*thread, key, &event)) return 0;
  thread->push_open(event);
  return 1;
}

}  // namespace otp
