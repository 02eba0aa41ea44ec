/* The memory that recorder_hot.h reads and writes: a thread's buffer, its stack of open events, and what all threads
 * share. C++, compiled into the core and into the libraries that record inline.
 */
#ifndef OTEL_TORCHPROF_RECORDER_LAYOUT_H_
#define OTEL_TORCHPROF_RECORDER_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

// Left to itself, the compiler takes what is here for too much to be repeated, and calls it.
#define OTP_INLINE inline __attribute__((always_inline))

namespace otp {

namespace hot {

// What a chunk says of itself, in its own cache line: everything that a reader of a black box needs, without the
// process. All but `published` is written before the chunk's first record.
struct alignas(64) ChunkHead {
  std::atomic<uint64_t> sequence{0};   // later chunks have higher ones; 0: it has no records, or is being changed
  std::atomic<uint32_t> published{0};  // bytes of records that readers may see
  uint32_t thread = 0;                 // the recorder's id
  uint64_t next_index = 0;             // of the first event that begins in it
  uint64_t taken_ticks = 0;            // its own records are not older
  uint64_t check = 0;                  // checksum() of all but `published`
  uint32_t os_tid = 0;                 // as in otp_thread, from here on
  uint32_t source_tid = 0;
  char name[16] = {};

  uint64_t checksum(uint64_t of_sequence) const {
    uint64_t sum = of_sequence;
    uint64_t words[] = {thread, next_index, taken_ticks, os_tid | uint64_t{source_tid} << 32, 0, 0};
    std::memcpy(words + 4, name, sizeof name);
    for (uint64_t word : words) sum = ((sum ^ word) + 1) * 0x9E3779B97F4A7C15u;
    return sum ^ sum >> 32;
  }
};
static_assert(sizeof(ChunkHead) == 64, "one cache line");

constexpr uint32_t kChunkHeader = 128;
constexpr uint32_t kChunkCapacity = OTP_CHUNK_BYTES - kChunkHeader;
// Of records, which lie kChunkHeader behind the head's address.
OTP_INLINE uint8_t* place_of(ChunkHead* chunk, uint32_t at) {
  return reinterpret_cast<uint8_t*>(chunk) + kChunkHeader + at;
}

// What a begin needs beside its inputs, and a block of memory: a loss mark and a context may come before it.
constexpr uint32_t kBeginBytes = sizeof(otp_record_begin) + 2 * sizeof(otp_record);
constexpr uint32_t kMemoryBytes = sizeof(otp_record_memory) + 2 * sizeof(otp_record);

// Relaxed access to a value that one thread writes and others look at: a plain move, made legal.
template <typename T>
class Shown {
 public:
  Shown() = default;
  Shown(const Shown& other) : d_value(other.get()) {}
  Shown& operator=(const Shown& other) {
    set(other.get());
    return *this;
  }
  T get() const { return d_value.load(std::memory_order_relaxed); }
  void set(T value) { d_value.store(value, std::memory_order_relaxed); }

 private:
  std::atomic<T> d_value{};
};

// Beside the bits of the sessions an event is for: the device source wants to hear of its end. No running session has
// this bit, so the end goes the slow way without being asked.
constexpr uint32_t kMarked = 1u << 31;

// An event that has begun and not ended. Written by its own thread only; looked at by a thread that ends it from
// elsewhere.
struct OpenEvent {
  Shown<const void*> key;
  Shown<uint64_t> index;      // of this event on its thread; meaningless when no session took it
  Shown<uint32_t> consumers;  // sessions that have its BEGIN; 0: it was dropped, and only keeps its place on the stack;
                              // and kMarked
  Shown<uint16_t> what;       // at::RecordScope | otp_event_kind << 8
  Shown<uint16_t> place;      // where its BEGIN lies in its chunk, in units of kPlaceUnit
};
constexpr uint32_t kPlaceUnit = 8;
static_assert(kChunkCapacity / kPlaceUnit <= UINT16_MAX && sizeof(OpenEvent) == 24, "a place takes what was padding");

// Finds names again by the address of their text, where the source vouches for it: an operator's name lies where it
// lies until the operator is deregistered, and the source raises its generation when that happens. The text is then not
// even looked at, which inside a real model, where caches are cold, is a tenth of a microsecond per operator.
class NamesByAddress {
 public:
  bool find(const char* address, uint32_t generation, uint32_t* id) const {
    const Entry* pair = d_entries[set_of(address)];
    const Entry& entry = pair[0].address == address ? pair[0] : pair[1];
    *id = entry.id;
    return entry.address == address && entry.generation == generation && entry.id != kUnstable;
  }
  // Whether it is known that nobody vouches for the address.
  bool is_unstable(const char* address, uint32_t generation) const {
    for (const Entry& entry : d_entries[set_of(address)])
      if (entry.address == address && entry.generation == generation) return entry.id == kUnstable;
    return false;
  }
  // The newer of the two stays beside the new one; what an address meant before goes.
  void keep(const char* address, uint32_t generation, uint32_t id) {
    Entry* pair = d_entries[set_of(address)];
    if (pair[0].address != address) pair[1] = pair[0];
    pair[0] = {address, id, generation};
  }
  void keep_unstable(const char* address, uint32_t generation) { keep(address, generation, kUnstable); }

 private:
  struct Entry {
    const char* address = nullptr;
    uint32_t id = 0;
    uint32_t generation = 0;
  };
  static constexpr uint32_t kUnstable = UINT32_MAX;

  // The upper bits of a product: the addresses are those of a few kinds of objects, alike in their lower bits.
  static size_t set_of(const char* address) {
    return static_cast<size_t>(reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u >> 56);
  }

  Entry d_entries[256][2];
};

// What every begin reads: its own cache line, written only when a session starts or stops or space comes free.
struct alignas(64) Shared {
  // Running sessions: [0] all, [kind] those that request that kind of event. A session enters [0] first, so that an
  // event that it has finds it there at its end.
  std::atomic<uint32_t> active[OTP_EVENT_KINDS] = {};
  std::atomic<uint32_t> all_threads{0};      // those of them that request every thread
  std::atomic<uint32_t> requests_inputs{0};  // those of them that request inputs
  std::atomic<uint32_t> requests_memory{0};  // those of them that request memory
  std::atomic<uint32_t> epoch{1};            // raised whenever a thread must ask again which sessions hold its chunk
  std::atomic<uint32_t> follows{0};          // of the running sessions, those that follow contexts
  std::atomic<uint32_t> muted_roots{0};      // those of them that leave out what begins outside of any context
  std::atomic<uint32_t> follow_epoch{1};     // raised whenever a thread must ask for its context anew
  std::atomic<uint32_t> has_contexts{0};     // not 0: a thread of this process may be in a context
  std::atomic<const otp_context_source*> context_source{nullptr};

  uint32_t running() const { return active[0].load(std::memory_order_relaxed); }
};
static_assert(sizeof(Shared) == 64, "one cache line");

// What begin and end need of a thread. All of it belongs to that thread, except that others read what is Shown or
// atomic, and `chunk` and `id`, which are written under the registry's lock. What every event touches comes first, in
// one cache line.
struct alignas(64) Thread {
  ChunkHead* chunk = nullptr;
  Shown<uint64_t> next_index;
  uint32_t at = 0;                  // bytes written into the chunk
  uint32_t not_ready = UINT32_MAX;  // sessions that a begin or an end has to ask for: all but those that hold the
                                    // chunk, know this thread as theirs, and have no mark to get
  uint32_t epoch = 0;               // of the registry, when `accepted` and `refused` were true
  Shown<uint32_t> depth;
  std::atomic<uint32_t> ended_elsewhere_flag{0};
  Shown<uint32_t> source_tid;
  uint32_t id = 0;
  uint32_t accepted = 0;                     // sessions that hold the chunk
  uint32_t refused = 0;                      // sessions that were full when last asked
  uint32_t loss_pending = 0;                 // sessions that lost events since the last event that they got
  std::atomic<uint32_t> suspended_count{0};  // the cache line ends here
  std::atomic<uint32_t> local{0};            // sessions that were started on this thread and follow it
  // In which context the next event begins, where sessions follow contexts: what the source said at that version, or
  // where it said 0, what the carrier brought.
  uint32_t context = 0;
  uint64_t context_version = 0;
  uint32_t own_context = 0;        // the source's
  uint32_t context_epoch = 0;      // of following sessions, when it was asked
  uint32_t context_unknown = 0;    // following sessions that are younger than what is known
  uint32_t context_pending = 0;    // following sessions that have not been told `context` in this chunk
  const void* too_deep = nullptr;  // the last event that had too many around it, until it ends
  OpenEvent open[OTP_MAX_DEPTH];
  NamesByAddress addresses;

  // So many bytes of the chunk are written, and readers may see them. The position is in the chunk, so that in a black
  // box the records before it are there whenever the process dies.
  void publish(uint32_t bytes) {
    at = bytes;
    chunk->published.store(bytes, std::memory_order_release);
  }
  // 1 + index of the nearest recorded event on the stack: what a child at that depth has as parent; 0: none.
  uint64_t visible_parent(uint32_t of_depth) const {
    for (const OpenEvent* event = open + of_depth; event-- != open;)
      if (__builtin_expect(event->consumers.get() != 0, 1)) return event->index.get() + 1;
    return 0;
  }
};
static_assert(offsetof(Thread, suspended_count) + sizeof(uint32_t) <= 64, "the hot fields share a cache line");

// A number for where all of it lies, for otp_hot::layout.
constexpr uint64_t layout_of(std::initializer_list<size_t> places) {
  uint64_t sum = 14695981039346656037u;
  for (size_t place : places) sum = (sum ^ place) * 1099511628211u;
  return sum;
}
constexpr uint64_t kLayout = layout_of({offsetof(Shared, all_threads),
                                        offsetof(Shared, requests_memory),
                                        offsetof(Shared, epoch),
                                        offsetof(Shared, follows),
                                        offsetof(Shared, muted_roots),
                                        offsetof(Shared, follow_epoch),
                                        offsetof(Shared, has_contexts),
                                        offsetof(Shared, context_source),
                                        offsetof(ChunkHead, published),
                                        offsetof(Thread, next_index),
                                        offsetof(Thread, at),
                                        offsetof(Thread, not_ready),
                                        offsetof(Thread, epoch),
                                        offsetof(Thread, depth),
                                        offsetof(Thread, ended_elsewhere_flag),
                                        offsetof(Thread, source_tid),
                                        offsetof(Thread, accepted),
                                        offsetof(Thread, loss_pending),
                                        offsetof(Thread, context),
                                        offsetof(Thread, context_version),
                                        offsetof(Thread, own_context),
                                        offsetof(Thread, context_epoch),
                                        offsetof(Thread, context_unknown),
                                        offsetof(Thread, open),
                                        offsetof(OpenEvent, index),
                                        offsetof(OpenEvent, consumers),
                                        offsetof(OpenEvent, what),
                                        offsetof(OpenEvent, place),
                                        offsetof(Thread, addresses),
                                        sizeof(OpenEvent),
                                        sizeof(NamesByAddress),
                                        sizeof(Thread),
                                        kChunkHeader,
                                        kChunkCapacity,
                                        kBeginBytes,
                                        kMemoryBytes});

}  // namespace hot
}  // namespace otp

#endif /* OTEL_TORCHPROF_RECORDER_LAYOUT_H_ */
