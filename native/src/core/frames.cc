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

// For recorder_hot.h.
struct Frame {
  const void* d_key;
  uint32_t d_name, d_identity;

  const void* key() const { return d_key; }
  uint8_t scope() const { return 0; }
  uint8_t kind() const { return OTP_EVENT_FRAME; }
  bool nests() const { return true; }
  int64_t sequence_nr() const { return -1; }
  uint32_t fwd_thread() const { return d_identity; }
  uint32_t source_tid() const { return 0; }
  bool name(hot::Thread&, uint32_t* id) const {
    *id = d_name;
    return true;
  }
  uint32_t inputs(uint8_t*, uint32_t, uint32_t) const { return 0; }
  uint64_t now() const { return ticks_now(); }
};

}  // namespace

// What begin does where nothing is in the way, and no more. Whether the recorder knows the thread as theirs does not
// matter here, so on every thread it costs the same.
OTP_HOT uint32_t begin_frame(const void* key, uint32_t name, uint32_t identity, uint32_t consumers) {
  ThreadBuffer* thread = t_buffer;
  uint32_t active = g_shared.active[OTP_EVENT_FRAME].load(std::memory_order_acquire);
  bool usual = thread != nullptr && (consumers & (~active | g_shared.follows.load(std::memory_order_relaxed))) == 0;
  if (__builtin_expect(!usual, 0)) return begin_frame_slowpath(key, name, identity, consumers);
  hot::Begun begun =
      hot::begin(*thread, g_shared, Frame{key, name, identity}, consumers, ~thread->accepted | thread->loss_pending);
  if (__builtin_expect(begun == hot::Begun::kUnusual, 0)) return begin_frame_slowpath(key, name, identity, consumers);
  return thread->id;
}

OTP_HOT int end_frame(const void* key, uint8_t flags) {
  ThreadBuffer* thread = t_buffer;
  if (__builtin_expect(thread == nullptr || thread->depth.get() == 0, 0)) return end(key, flags, nullptr, 0);
  uint64_t ticks = ticks_now();
  if (__builtin_expect(hot::end(*thread, g_shared, key, flags, ~thread->accepted, ticks), 1)) return 1;
  return end_slowpath(*thread, key, ticks, flags, nullptr, 0);
}

OTP_COLD uint64_t after_all(const ThreadBuffer& thread, uint64_t ticks) {
  if (thread.next_index == 0) return ticks;
  if (thread.at == 0) return ticks_now();  // the last one is in another chunk
  for (uint32_t at = 0, size = 0; at < thread.at; at += size) {
    otp_record record;
    std::memcpy(&record, thread.chunk->data() + at, sizeof record);
    bool has_time =
        record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_LOSS && record.kind != OTP_RECORD_CONTEXT;
    if (has_time && record.ticks > ticks) ticks = record.ticks;
    size = record_size(record, thread.at - at);
    if (size == 0) return ticks_now();  // no record of ours: a thread must not hang on it
  }
  return ticks;
}

}  // namespace otp
