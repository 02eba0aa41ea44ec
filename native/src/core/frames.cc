// Begin and end of the calls of functions: what recorder.cc does, without what calls have no need of. Where calls are
// recorded there may be more of them than of all else, and one of them is over sooner than an operator.
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
