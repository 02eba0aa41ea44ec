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

// What begin does where nothing is in the way, and no more. Whether the recorder knows the thread as theirs does not
// matter here, so on every thread it costs the same.
OTP_HOT uint32_t begin_frame(const void* key, uint32_t name, uint32_t identity, uint32_t consumers) {
  ThreadBuffer* thread = t_buffer;
  uint32_t active = g_shared.active[OTP_EVENT_FRAME].load(std::memory_order_acquire);
  bool ready = thread != nullptr && (consumers & ~active) == 0 &&
               (consumers & (~thread->accepted | thread->loss_pending)) == 0 &&
               (consumers & g_shared.follows.load(std::memory_order_relaxed)) == 0 && is_current(*thread) &&
               thread->at + kBeginBytes <= Chunk::kCapacity && thread->depth.get() < OTP_MAX_DEPTH &&
               thread->ended_elsewhere_flag.load(std::memory_order_relaxed) == 0;
  if (__builtin_expect(!ready, 0)) return begin_frame_slowpath(key, name, identity, consumers);
  uint32_t depth = thread->depth.get();
  uint64_t visible = thread->visible_parent(depth);
  OpenEvent& open = thread->open[depth];
  open.key.set(key);
  open.index.set(thread->next_index);
  open.consumers.set(consumers);
  open.what.set(OTP_EVENT_FRAME << 8);
  auto* record = reinterpret_cast<otp_record_begin*>(thread->chunk->data() + thread->at);
  write_head(&record->head, OTP_RECORD_BEGIN, OTP_EVENT_FRAME << 4, consumers, name);
  record->parent = visible == 0 ? 0 : distance_to(thread->next_index + 1, visible);
  record->fwd_thread = identity;
  record->sequence_nr = -1;
  record->head.ticks = ticks_now();
  thread->at += sizeof *record;
  ++thread->next_index;
  thread->publish();
  thread->depth.set(depth + 1);
  return thread->id;
}

OTP_HOT int end_frame(const void* key, uint8_t flags) {
  ThreadBuffer* thread = t_buffer;
  uint32_t depth = thread == nullptr ? 0 : thread->depth.get();
  if (__builtin_expect(depth == 0, 0)) return end(key, flags, nullptr, 0);
  uint64_t ticks = ticks_now();
  const OpenEvent& top = thread->open[depth - 1];
  uint64_t distance = thread->next_index - top.index.get();
  uint32_t consumers = top.consumers.get();
  bool usual = top.key.get() == key && consumers != 0 && (consumers & (~thread->accepted | ~g_shared.running())) == 0 &&
               thread->at + sizeof(otp_record) <= Chunk::kCapacity && distance <= UINT32_MAX &&
               thread->ended_elsewhere_flag.load(std::memory_order_relaxed) == 0;
  if (__builtin_expect(!usual, 0)) return end_slowpath(*thread, key, ticks, flags, nullptr, 0);
  auto* record = reinterpret_cast<otp_record*>(thread->chunk->data() + thread->at);
  record->ticks = ticks;
  write_head(record, OTP_RECORD_END, flags, consumers, static_cast<uint32_t>(distance));
  thread->at += sizeof *record;
  thread->publish();
  thread->depth.set(depth - 1);
  return 1;
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
