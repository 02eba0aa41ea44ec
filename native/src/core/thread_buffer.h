// What one thread records with: its open chunk, its stack of open events, its cache of names.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

#include "core/chunk_list.h"
#include "core/interner.h"
#include "otel_torchprof/recorder_hot.h"

namespace otp {

using hot::kMarked;
using hot::OpenEvent;
using hot::Shown;

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

// Finds again what a thread has interned, without the interner's lock, by content: the same address can hold another
// name the next time (a backward function's lies in a string on the stack), and remembering such addresses would only
// drive the operators out (hot::NamesByAddress).
class NamesByText {
 public:
  bool find(std::string_view name, uint32_t* id) const {
    const Entry& entry = d_entries[place_of(name)];
    *id = entry.id;
    return entry.text != nullptr && std::string_view(entry.text, entry.size) == name;
  }
  // Of a name that this thread has not met.
  uint32_t ask(Interner& interner, std::string_view name, otp_name_kind kind);

 private:
  struct Entry {
    const char* text = nullptr;
    uint32_t size = 0;
    uint32_t id = 0;
  };
  static constexpr uint32_t kEntries = 512;

  static size_t place_of(std::string_view name) { return std::hash<std::string_view>{}(name) % kEntries; }

  Entry d_entries[kEntries];
};

// What a thread had done when the hang watch last saw it do anything.
struct Progress {
  uint64_t chunk = 0, published = 0, depth = 0;
  uint64_t collectives = 0;  // that it has enqueued: a loop may have nothing else
  uint64_t since_ticks = 0;  // 0: it was not looked at yet
  uint64_t since_ns = 0, longest_ns = 0;
  bool in_loop = false;  // it was in the loop meanwhile: the time that imports and builds take says nothing of the loop
  bool reported = false;
};

// `names` belongs to the owning thread; the rest, beyond what begin and end need, to the registry's lock.
struct ThreadBuffer : hot::Thread {
  NamesByText names;

  otp_thread info{};
  Chunk* open_chunk = nullptr;  // that `chunk` is the head of
  uint64_t collectives = 0;     // enqueued with a box open
  uint32_t references = 1;      // the thread itself, and one per cursor
  bool exited = false;
  std::vector<EndedElsewhere> ended_elsewhere;  // on the stack still, until the thread comes by
  std::vector<OpenEvent> suspended;
  Progress progress;

  static constexpr uint32_t kResolving = UINT32_MAX;  // `context_unknown` while the source is being asked

  bool fits(uint32_t bytes) const { return chunk != nullptr && at + bytes <= Chunk::kCapacity; }

  // Appends a record, to be published. Room must be there.
  template <typename Record>
  void append(const Record& record) {
    std::memcpy(hot::place_of(chunk, at), &record, sizeof(Record));
    at += sizeof(Record);
  }

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
};

}  // namespace otp
