// Begin and end of the calls of functions: what recorder.cc does, without what calls have no need of. Where calls are
// recorded there may be more of them than of all else, and one of them is over sooner than an operator.
#include <vector>

#include "core/drain.h"
#include "core/recording.h"

namespace otp {

namespace {

OTP_COLD uint32_t begin_frame_slowpath(const void* key, uint32_t name, uint32_t identity, uint32_t consumers) {
  otp_begin_args args = {};
  args.key = key;
  args.name_size = name;
  args.kind = OTP_EVENT_FRAME;
  args.nests = 1;
  args.sequence_nr = -1;
  args.fwd_thread = identity;
  args.scope_mask = consumers;
  args.not_for = ~consumers;
  return begin(&args);
}

}  // namespace

OTP_HOT uint32_t begin_frame(const void* key, uint32_t name, uint32_t identity, uint32_t consumers) {
  ThreadBuffer* thread = t_buffer;
  hot::Call call{key, name, identity, g_clock_is_tsc};
  bool begun = thread != nullptr && hot::begin_call(*thread, g_shared, call, consumers);
  return __builtin_expect(begun, 1) ? thread->id : begin_frame_slowpath(key, name, identity, consumers);
}

OTP_HOT int end_frame(const void* key, uint8_t flags) {
  ThreadBuffer* thread = t_buffer;
  if (__builtin_expect(thread == nullptr || flags != 0 || thread->depth.get() == 0, 0))
    return end(key, flags, nullptr, 0);
  uint64_t ticks = ticks_now();
  if (__builtin_expect(hot::end_call(*thread, g_shared, key, ticks), 1)) return 1;
  return end_slowpath(*thread, key, ticks, 0, nullptr, 0);
}

namespace {

bool is_marked(const OpenEvent& event, uint64_t mark) {
  bool is_call = event.what.get() == hot::what_is(0, OTP_EVENT_FRAME);
  return is_call && (reinterpret_cast<uintptr_t>(event.key.get()) & mark) != 0;
}

}  // namespace

OTP_COLD uint32_t unmark_frames(uint64_t mark, uint32_t most, uintptr_t* keys) {
  ThreadBuffer* thread = t_buffer;
  if (thread == nullptr) return 0;
  repair_stack(*thread);
  uint32_t depth = thread->depth.get(), from = depth, found = 0;
  while (from > 0 && found < most) found += is_marked(thread->open[--from], mark);
  uint32_t count = 0;
  for (; from < depth; ++from) {
    OpenEvent& event = thread->open[from];
    if (!is_marked(event, mark)) continue;
    keys[count] = reinterpret_cast<uintptr_t>(event.key.get()) & ~mark;
    event.key.set(reinterpret_cast<const void*>(keys[count++]));
  }
  return count;
}

OTP_COLD uint32_t end_marked_frames(uint64_t mark, uint32_t thread_id) try {
  std::vector<const void*> keys;  // not on the stack, of which a thread may have little
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> hold(all.mutex);
    const ThreadBuffer* thread = all.find_thread(thread_id, 0);
    for (uint32_t i = thread == nullptr ? 0 : thread->depth.get(); i-- > 0;)
      if (is_marked(thread->open[i], mark)) keys.push_back(thread->open[i].key.get());
  }
  uint32_t ended = 0;
  for (const void* key : keys) ended += static_cast<uint32_t>(end_elsewhere(key, thread_id, 0, 0, nullptr, 0));
  return ended;
} catch (const std::bad_alloc&) {
  return 0;  // then they end with their sessions
}

OTP_COLD uint64_t after_all(const ThreadBuffer& thread, uint64_t ticks) {
  if (thread.next_index.get() == 0) return ticks;
  if (thread.at == 0) return ticks_now();  // the last one is in another chunk
  for (uint32_t at = 0, size = 0; at < thread.at; at += size) {
    otp_record record;
    std::memcpy(&record, hot::place_of(thread.chunk, at), sizeof record);
    bool has_time =
        record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_LOSS && record.kind != OTP_RECORD_CONTEXT;
    if (has_time && record.ticks > ticks) ticks = record.ticks;
    size = record_size(record, thread.at - at);
    if (size == 0) return ticks_now();  // no record of ours: a thread must not hang on it
  }
  return ticks;
}

}  // namespace otp
