// What one thread records with: its open chunk, its stack of open events, its cache of names.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "core/chunk_list.h"
#include "core/interner.h"

namespace otp {

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
};

// An event on a thread's stack that another thread has ended. Its index alone would not tell it from the next recorded
// one when it was dropped.
struct EndedElsewhere {
  const void* key;
  uint64_t index;
  bool recorded;

  bool is(const OpenEvent& event) const {
    return event.key.get() == key && event.index.get() == index && (event.consumers.get() != 0) == recorded;
  }
};

// Finds again what a thread has interned, without the interner's lock.
//
// By address, where the source vouches for it: an operator's name lies where it lies until the operator is
// deregistered, and the source raises its generation when that happens. The text is then not even looked at, which
// inside a real model, where caches are cold, is a tenth of a microsecond per operator. By content otherwise: the same
// address can hold another name the next time (a backward function's lies in a string on the stack), and remembering
// such addresses would only drive the operators out.
class NameCache {
 public:
  bool find(const char* address, uint32_t generation, uint32_t* id) const {
    const Address* pair = d_addresses[set_of(address)];
    const Address& entry = pair[0].address == address ? pair[0] : pair[1];
    *id = entry.id;
    return entry.address == address && entry.generation == generation && entry.id != kUnstable;
  }
  // Whether it is known that nobody vouches for the address.
  bool is_unstable(const char* address, uint32_t generation) const;
  void keep(const char* address, uint32_t generation, uint32_t id);
  void keep_unstable(const char* address, uint32_t generation) { keep(address, generation, kUnstable); }

  // Finds a name by its content.
  bool find(std::string_view name, uint32_t* id) const {
    const Text& entry = d_texts[place_of(name)];
    *id = entry.id;
    return entry.text != nullptr && std::string_view(entry.text, entry.size) == name;
  }
  // Of a name that this thread has not met.
  uint32_t ask(Interner& interner, std::string_view name, otp_name_kind kind);

 private:
  struct Address {
    const char* address = nullptr;
    uint32_t id = 0;
    uint32_t generation = 0;
  };
  struct Text {
    const char* text = nullptr;
    uint32_t size = 0;
    uint32_t id = 0;
  };
  static constexpr uint32_t kUnstable = UINT32_MAX;
  static constexpr uint32_t kSets = 256, kTexts = 512;

  // The upper bits of a product: the addresses are those of a few kinds of objects, alike in their lower bits.
  static size_t set_of(const char* address) {
    return static_cast<size_t>(reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u >> 56);
  }

  static size_t place_of(std::string_view name) { return std::hash<std::string_view>{}(name) % kTexts; }

  Address d_addresses[kSets][2];
  Text d_texts[kTexts];
};

// Fields up to `names` belong to the owning thread, except that others read those of type Shown or atomic. The rest
// belongs to the registry's lock. What every event touches comes first, in one cache line, and the stack behind it.
struct alignas(64) ThreadBuffer {
  Chunk* chunk = nullptr;
  uint32_t at = 0;                     // bytes written into the chunk
  std::atomic<uint32_t> published{0};  // of them, what readers may see; of a sealed chunk, Chunk::size
  uint64_t next_index = 0;
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
  uint32_t marked = 0;             // kMarked where the event that begins was marked on a device
  OpenEvent open[OTP_MAX_DEPTH];
  NameCache names;

  otp_thread info{};
  uint32_t references = 1;  // the thread itself, and one per cursor
  bool exited = false;
  std::vector<EndedElsewhere> ended_elsewhere;  // on the stack still, until the thread comes by
  std::vector<OpenEvent> suspended;

  static constexpr uint32_t kResolving = UINT32_MAX;  // `context_unknown` while the source is being asked

  bool fits(uint32_t bytes) const { return chunk != nullptr && at + bytes <= Chunk::kCapacity; }

  // Appends a record and publishes it. Room must be there.
  template <typename Record>
  void append(const Record& record) {
    std::memcpy(chunk->data() + at, &record, sizeof(Record));
    at += sizeof(Record);
  }
  void publish() { published.store(at, std::memory_order_release); }

  // The innermost open event with this key, or -1.
  int find_open(const void* key) const {
    for (int i = static_cast<int>(depth.get()) - 1; i >= 0; --i)
      if (open[i].key.get() == key) return i;
    return -1;
  }
  void push_open(const OpenEvent& event) {
    uint32_t at_depth = depth.get();
    open[at_depth] = event;
    depth.set(at_depth + 1);
  }
  void remove_open(int position);
  // 1 + index of the nearest recorded event on the stack: what a child at that depth has as parent; 0: none.
  uint64_t visible_parent(uint32_t of_depth) const {
    for (uint32_t i = of_depth; i-- > 0;)
      if (open[i].consumers.get() != 0) return open[i].index.get() + 1;
    return 0;
  }
};

static_assert(offsetof(ThreadBuffer, suspended_count) + sizeof(uint32_t) <= 64, "the hot fields share a cache line");

// How much of a chunk can be read. Under the registry's lock, which is also held when a thread continues to another
// chunk.
inline uint32_t readable_bytes(const Chunk& chunk) {
  return chunk.sealed ? chunk.size : chunk.owner->published.load(std::memory_order_acquire);
}

}  // namespace otp
