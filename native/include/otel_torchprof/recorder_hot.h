/* Begin and end, and events of allocators, where nothing is in the way, inline: the core has them behind otp_api, and
 * the library of operators and the Python extension have them in themselves. C++, for sources that are compiled with
 * the headers of the core that they run with.
 *
 * Why a library writes into the recorder's memory: the way to the core and back (an argument struct, two calls through
 * a table, the stubs of a shared library) cost more than the record at its end. By the functions an operator is 297
 * instructions more than torch's empty callback, inline 186; with the inputs of two matrices 844, and 493 where they
 * are written straight behind the begin (measured, callgrind).
 *
 * There is one implementation. Whatever is unusual is left to the functions of otp_api, which find it as it was: these
 * here change nothing before they know that they can finish. Unusual is: the first event of a thread, a full chunk, a
 * name that the thread does not know by its address, a session that has started, stopped or lost something, another
 * context than before, a device to mark, an end that is not that of the innermost event, an error, OTP_MAX_DEPTH.
 *
 * What may change under a begin or an end that is under way:
 *
 * - Sessions start and stop, on other threads. Both read the sessions once, and write for those. A record for a session
 *   that has just stopped is later than its stop, where its drain ends; its bit is given out again only after all
 *   others. Who sees a new session's bit (acquire) sees the epoch that came with it, and is then not `ready`.
 * - Drains read the chunk up to its `published`, and evictions free sealed chunks. A thread's open chunk is sealed by
 *   itself only, in a function, so that it is neither freed nor moved here. A drain that frees room, and a session that
 *   comes to its budget, tell by the epoch and on this thread's next way through a function.
 * - Another thread ends an event of this one. It writes nothing here but the flag `ended_elsewhere_flag`; who does not
 *   see it yet writes a record whose parent has ended a moment ago.
 * - Nothing is reset under a thread's feet: its buffer is freed after it has ended, and what other threads write of it
 *   is atomic. Nothing here, the source's `version` and the caller's functions included, may record, wait or fork.
 * - So a fork happens on this thread before or after, or on another one, whose child does not have this thread. The
 *   child finds no running session and no buffer.
 *
 * That a source and the core mean the same by all this is compared when they meet (otp_hot::layout), and the file of
 * the library of operators is named after the text of these headers.
 */
#ifndef OTEL_TORCHPROF_RECORDER_HOT_H_
#define OTEL_TORCHPROF_RECORDER_HOT_H_

#include <time.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"
#include "otel_torchprof/recorder_layout.h"

namespace otp {
namespace hot {

inline __attribute__((noinline, cold)) uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// TSC where it is invariant, else the monotonic clock. Not serialising on purpose: a fence costs more than the few
// nanoseconds by which the processor may move the read.
OTP_INLINE uint64_t ticks([[maybe_unused]] bool is_tsc) {
#if defined(__x86_64__)
  if (__builtin_expect(is_tsc, 1)) return __rdtsc();
#endif
  return monotonic_ns();
}

// The calling thread's buffer, null where it has none yet. Its pointer has a constant distance from the thread pointer
// in the core, which was compiled for that (initial-exec), and another library can use that where it knows how to read
// the thread pointer. Elsewhere it asks.
OTP_INLINE Thread* this_thread(const otp_hot& core) {
#if defined(__x86_64__) && defined(__ELF__)
  Thread* thread;
  __asm__ volatile("movq %%fs:(%1), %0" : "=r"(thread) : "r"(core.buffer_at));
  return thread;
#else
  return static_cast<Thread*>(core.buffer());
#endif
}

// What stands behind the ticks, in one store.
OTP_INLINE void write_head(otp_record* record, uint32_t kind, uint32_t detail, uint32_t consumers, uint32_t value) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the fields of a head are put together by shifting");
  uint64_t word = kind | detail << 8 | consumers << 16 | static_cast<uint64_t>(value) << 32;
  std::memcpy(&record->kind, &word, sizeof word);
}

OTP_INLINE uint32_t distance_to(uint64_t from, uint64_t to) {
  uint64_t distance = from - to;
  return distance < UINT32_MAX ? static_cast<uint32_t>(distance) : UINT32_MAX;
}

// Whether a record of that size can be written with nothing else to do first, where none of the sessions that it is for
// are in the way.
OTP_INLINE bool is_ready(const Thread& thread, const Shared& shared, uint32_t in_the_way, uint32_t bytes) {
  uint32_t changed = (thread.epoch ^ shared.epoch.load(std::memory_order_relaxed)) |
                     thread.ended_elsewhere_flag.load(std::memory_order_relaxed);
  return (in_the_way | changed) == 0 && thread.at + bytes <= kChunkCapacity;
}

constexpr uint16_t what_is(uint8_t scope, uint8_t kind) { return static_cast<uint16_t>(scope | kind << 8); }

// As the result of inputs(): they do not fit.
constexpr uint32_t kNoRoom = UINT32_MAX;

// What begins is told by its source: an object of a type of its own, each of whose members is called only where its
// answer is written. (What is asked before is kept on the stack: the compiler moves nothing over an atomic access.)
//
//   key(), scope(), kind(), nests(), sequence_nr(), fwd_thread(), source_tid()    as in otp_begin_args
//   bool name(Thread& thread, uint32_t* id)    false where the name is not known
//   uint32_t inputs(uint8_t* place, uint32_t room, uint32_t consumers)    writes a whole INPUTS record, returns its
//                                                                         bytes: 0 where there are none, or kNoRoom
//   uint64_t now()    the time

// Torch calls once per registered callback; whichever comes first has written the event.
template <typename Event>
OTP_INLINE bool is_second_call(const Thread& thread, const Event& event, uint32_t depth) {
  return !event.nests() && depth > 0 && thread.open[depth - 1].key.get() == event.key();
}

// Puts the thread's next event on the stack, whose record is at that place.
template <typename Event>
OTP_INLINE void open(Thread& thread, const Event& event, uint32_t depth, uint64_t index, uint32_t consumers,
                     uint32_t at) {
  OpenEvent& open = thread.open[depth];
  open.key.set(event.key());
  open.index.set(index);
  open.consumers.set(consumers);
  open.what.set(what_is(event.scope(), event.kind()));
  open.place.set(static_cast<uint16_t>(at / kPlaceUnit));
  thread.depth.set(depth + 1);
  if (__builtin_expect(thread.source_tid.get() == 0, 0)) {
    uint32_t source_tid = event.source_tid();  // calls have none, and this is then known when it is compiled
    if (source_tid != 0) thread.source_tid.set(source_tid);
  }
}

// Writes the record of an event, but for its time. `visible`: see visible_parent.
//
// Field by field into the chunk. Made on the stack and copied, its small stores would be read back in 16-byte pieces
// before they have left the store buffer, and the processor waits for that (measured: 10 ns per event).
template <typename Event>
OTP_INLINE void write_begin(otp_record_begin* record, const Event& event, uint64_t index, uint32_t consumers,
                            uint32_t name, uint64_t visible) {
  write_head(&record->head, OTP_RECORD_BEGIN, event.scope() | event.kind() << 4, consumers, name);
  record->parent = visible == 0 ? 0 : distance_to(index + 1, visible);
  record->fwd_thread = event.fwd_thread();
  record->sequence_nr = event.sequence_nr();
}

enum class Begun { kRecorded, kNothing, kUnusual };

// Begins an event for those sessions; `in_the_way` are those that not all is known of. `input_bytes`: as many as the
// inputs will have, as far as that is known.
template <typename Event>
OTP_INLINE Begun begin(Thread& thread, const Shared& shared, const Event& event, uint32_t sessions, uint32_t in_the_way,
                       uint32_t input_bytes = 0) {
  uint32_t depth = thread.depth.get();
  bool ready = is_ready(thread, shared, sessions & in_the_way, kBeginBytes + input_bytes) && depth < OTP_MAX_DEPTH;
  if (__builtin_expect(!ready, 0)) return Begun::kUnusual;
  if (__builtin_expect(is_second_call(thread, event, depth), 0)) return Begun::kNothing;
  uint32_t name;
  if (__builtin_expect(!event.name(thread, &name), 0)) return Begun::kUnusual;
  uint64_t index = thread.next_index.get();
  uint32_t at = thread.at;
  auto* record = reinterpret_cast<otp_record_begin*>(place_of(thread.chunk, at));
  uint32_t written = event.inputs(reinterpret_cast<uint8_t*>(record + 1), kChunkCapacity - kBeginBytes - at, sessions);
  if (__builtin_expect(written == kNoRoom, 0)) return Begun::kUnusual;
  write_begin(record, event, index, sessions, name, thread.visible_parent(depth));
  open(thread, event, depth, index, sessions, at);
  thread.next_index.set(index + 1);
  record->head.ticks = event.now();  // last: what recording costs is outside of the event as far as can be
  thread.publish(at + static_cast<uint32_t>(sizeof *record) + written);
  return Begun::kRecorded;
}

// Ends the innermost event, if it is that with this key, for sessions that all run and hold the chunk.
OTP_INLINE bool end(Thread& thread, const Shared& shared, const void* key, uint8_t flags, uint32_t in_the_way,
                    uint64_t now) {
  uint32_t depth = thread.depth.get();
  if (__builtin_expect(depth == 0, 0)) return false;
  const OpenEvent& top = thread.open[depth - 1];
  uint32_t consumers = top.consumers.get(), at = thread.at;
  bool plain = top.key.get() == key && consumers != 0 && at <= kChunkCapacity - sizeof(otp_record);
  if (__builtin_expect(!plain, 0)) return false;
  uint64_t distance = thread.next_index.get() - top.index.get();
  uint64_t unusual = (consumers & (in_the_way | ~shared.running())) | distance >> 32 |
                     thread.ended_elsewhere_flag.load(std::memory_order_relaxed);
  if (__builtin_expect(unusual != 0, 0)) return false;
  auto* record = reinterpret_cast<otp_record*>(place_of(thread.chunk, at));
  record->ticks = now;
  write_head(record, OTP_RECORD_END, flags, consumers, static_cast<uint32_t>(distance));
  thread.publish(at + static_cast<uint32_t>(sizeof *record));
  thread.depth.set(depth - 1);
  return true;
}

// Writes the record of a block of memory, where there is room. As in begin: nothing is read back, the time comes last.
OTP_INLINE void write_memory(Thread& thread, const otp_memory_args& args, uint32_t consumers, bool clock_is_tsc) {
  uint64_t visible = thread.visible_parent(thread.depth.get());
  uint32_t at = thread.at;
  auto* record = reinterpret_cast<otp_record_memory*>(place_of(thread.chunk, at));
  write_head(&record->head, OTP_RECORD_MEMORY, args.flags, consumers,
             visible == 0 ? 0 : distance_to(thread.next_index.get() + 1, visible));
  record->bytes = args.bytes;
  record->address = args.address;
  record->total_allocated = args.total_allocated;
  record->total_reserved = args.total_reserved;
  record->device_type = args.device_type;
  record->device_index = args.device_index;
  record->head.ticks = ticks(clock_is_tsc);
  thread.publish(at + static_cast<uint32_t>(sizeof *record));
}

// ---- contexts ----

// Whether no Python of the service runs directly inside the event. Operators proper, forwards and backwards: others
// that torch reports hold whatever a program does inside a label, or stay open while their thread does other work
// (TorchScript functions that wait, communication).
inline bool keeps_context(uint16_t what) {
  constexpr uint16_t kFunction = 0, kBackwardFunction = 1;  // at::RecordScope
  return what == (kFunction | OTP_EVENT_OPERATOR << 8) || what == (kBackwardFunction | OTP_EVENT_OPERATOR << 8);
}

// Whether the source has to be looked at for what begins: not for an operator directly inside another.
inline bool may_have_other_context(const Thread& thread, uint16_t what) {
  uint32_t depth = thread.depth.get();
  return depth == 0 || !keeps_context(thread.open[depth - 1].what.get()) || !keeps_context(what);
}

// The sessions that get what begins in the context that the thread is known to be in.
inline uint32_t in_known_context(const Thread& thread, const Shared& shared, uint16_t what, uint32_t active) {
  uint32_t muted = thread.context_unknown;
  bool is_phase = what >> 8 == OTP_EVENT_PHASE;  // by which it is known when the next step begins
  if (thread.context == 0 && !is_phase) muted |= shared.muted_roots.load(std::memory_order_relaxed);
  if (thread.context == OTP_CONTEXT_MUTED) muted = UINT32_MAX;
  return active & ~(muted & shared.follows.load(std::memory_order_relaxed));
}

inline __attribute__((noinline, hot)) bool in_same_context(const Thread& thread, const Shared& shared, uint16_t what,
                                                           uint32_t* sessions) {
  if (thread.ended_elsewhere_flag.load(std::memory_order_relaxed) != 0) return false;
  if (may_have_other_context(thread, what)) {
    const otp_context_source* source = shared.context_source.load(std::memory_order_acquire);
    uint64_t version = source == nullptr ? 0 : source->version();
    bool is_unknown = version == 0 && (thread.context_unknown | thread.own_context) != 0;
    if (version != thread.context_version || is_unknown) return false;
    // What torch carries may be another context each time, and to look is a third of what an operator costs.
    if (thread.own_context == 0 && shared.has_contexts.load(std::memory_order_relaxed) != 0) return false;
  }
  if (shared.follow_epoch.load(std::memory_order_acquire) != thread.context_epoch) return false;
  *sessions = in_known_context(thread, shared, what, *sessions);
  return true;
}

// Leaves of the sessions that request what begins those that get it; all where none follows contexts. False: the source
// has to be asked.
OTP_INLINE bool in_context(const Thread& thread, const Shared& shared, uint16_t what, uint32_t* sessions) {
  uint32_t found = *sessions;
  if (__builtin_expect((found & shared.follows.load(std::memory_order_relaxed)) == 0, 1)) return true;
  bool known = in_same_context(thread, shared, what, &found);
  *sessions = found;
  return known;
}

// ---- calls of functions ----

// A call (OTP_EVENT_FRAME), whose name is known by its id.
struct Call {
  const void* d_key;
  uint32_t d_name, d_identity;
  bool d_is_tsc;

  const void* key() const { return d_key; }
  uint8_t scope() const { return 0; }
  uint8_t kind() const { return OTP_EVENT_FRAME; }
  bool nests() const { return true; }
  int64_t sequence_nr() const { return -1; }
  uint32_t fwd_thread() const { return d_identity; }
  uint32_t source_tid() const { return 0; }
  bool name(Thread&, uint32_t* id) const {
    *id = d_name;
    return true;
  }
  uint32_t inputs(uint8_t*, uint32_t, uint32_t) const { return 0; }
  uint64_t now() const { return ticks(d_is_tsc); }
};

// Begins a call for those sessions, none of which may follow contexts. Whether the recorder knows the thread as theirs
// does not matter here, so on every thread it costs the same.
OTP_INLINE bool begin_call(Thread& thread, const Shared& shared, const Call& call, uint32_t consumers) {
  uint32_t active = shared.active[OTP_EVENT_FRAME].load(std::memory_order_acquire);
  if (__builtin_expect((consumers & (~active | shared.follows.load(std::memory_order_relaxed))) != 0, 0)) return false;
  return begin(thread, shared, call, consumers, ~thread.accepted | thread.loss_pending) == Begun::kRecorded;
}

OTP_INLINE bool end_call(Thread& thread, const Shared& shared, const void* key, uint64_t now) {
  return end(thread, shared, key, 0, ~thread.accepted, now);
}

// ---- for another library than the core ----

// Does what otp_api's begin does. False: something is unusual, nothing has happened, and that has to be called.
template <typename Event>
OTP_INLINE bool begin_here(const otp_hot& core, const Event& event) {
  Thread* thread = this_thread(core);
  const Shared& shared = *static_cast<const Shared*>(core.shared);
  uint32_t sessions = shared.active[event.kind()].load(std::memory_order_acquire);
  if (__builtin_expect(sessions == 0 || thread == nullptr, 0)) return false;
  if (__builtin_expect(!in_context(*thread, shared, what_is(event.scope(), event.kind()), &sessions), 0)) return false;
  return sessions == 0 || begin(*thread, shared, event, sessions, thread->not_ready) != Begun::kUnusual;
}

// Does what otp_api's end does; false: see begin_here.
OTP_INLINE bool end_here(const otp_hot& core, const void* key, uint8_t flags) {
  uint64_t now = ticks(core.clock_is_tsc != 0);
  Thread* thread = this_thread(core);
  return thread != nullptr &&
         end(*thread, *static_cast<const Shared*>(core.shared), key, flags, thread->not_ready, now);
}

// Does what otp_api's memory does, and needs neither `source_tid` nor `scope_mask`; false: see begin_here.
OTP_INLINE bool memory_here(const otp_hot& core, const otp_memory_args& args) {
  Thread* thread = this_thread(core);
  const Shared& shared = *static_cast<const Shared*>(core.shared);
  uint32_t sessions = shared.requests_memory.load(std::memory_order_acquire);
  if (__builtin_expect(sessions == 0 || thread == nullptr || thread->source_tid.get() == 0, 0)) return false;
  if (__builtin_expect(!is_ready(*thread, shared, sessions & thread->not_ready, kMemoryBytes), 0)) return false;
  write_memory(*thread, args, sessions, core.clock_is_tsc != 0);
  return true;
}

// Does what otp_api's begin_frame does, for more than no session. The thread; null where something is unusual, nothing
// has happened, and that has to be called: there the clock is, where it is none of the processor's. (A call that might
// be made in between would cost each begin the saving of six registers.)
OTP_INLINE const Thread* begin_call_here(const otp_hot& core, const void* key, uint32_t name, uint32_t identity,
                                         uint32_t consumers) {
  Thread* thread = this_thread(core);
  if (__builtin_expect(thread == nullptr || core.clock_is_tsc == 0, 0)) return nullptr;
  Call call{key, name, identity, true};
  return begin_call(*thread, *static_cast<const Shared*>(core.shared), call, consumers) ? thread : nullptr;
}

// Does what otp_api's end_frame does, without flags; false: see begin_call_here.
OTP_INLINE bool end_call_here(const otp_hot& core, const void* key) {
  Thread* thread = this_thread(core);
  if (__builtin_expect(thread == nullptr || core.clock_is_tsc == 0, 0)) return false;
  return end_call(*thread, *static_cast<const Shared*>(core.shared), key, ticks(true));
}

}  // namespace hot
}  // namespace otp

#endif /* OTEL_TORCHPROF_RECORDER_HOT_H_ */
