// Chunks: the memory that records lie in, and the one place that it comes from.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"
#include "otel_torchprof/recorder_hot.h"

namespace otp {

// Stands between telling readers in another process that something changes, and the change: neither the compiler nor
// the processor moves an access over it.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)  // which cannot follow fences, nor other processes
  std::atomic_signal_fence(std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

struct ThreadBuffer;
struct Arena;
class BlackBox;

// What the process knows of a chunk. Belongs to the registry's lock, but for the records, to which one thread appends
// and of which it publishes how far. Beside the memory of the records and not in it: other processes can change that of
// a black box, so that nothing may depend on what is read there.
struct Chunk {
  hot::ChunkHead* head = nullptr;  // the records are behind it
  ThreadBuffer* owner = nullptr;
  Arena* arena = nullptr;  // where its memory is from: one of the two
  BlackBox* box = nullptr;
  uint64_t sequence = 0;      // later chunks have higher ones
  uint64_t next_index = 0;    // of the first event that begins in it
  uint64_t sealed_ticks = 0;  // when its thread left it; its records are older
  uint32_t holders = 0;       // sessions that have not read it yet
  bool sealed = false;        // its thread writes to another one now

  static constexpr uint32_t kHeader = hot::kChunkHeader;
  static constexpr uint32_t kCapacity = hot::kChunkCapacity;
  // Makes it one that nobody has used.
  void renew();
  // Makes it the chunk that a thread writes to; later chunks have higher sequences.
  void begin(ThreadBuffer* thread, uint64_t of_sequence);
  uint32_t readable_bytes() const { return std::min(head->published.load(std::memory_order_acquire), kCapacity); }
  // Behind so many bytes.
  uint32_t readable_after(uint32_t from) const { return std::max(readable_bytes(), from) - from; }

  uint8_t* data() { return hot::place_of(head, 0); }
  const uint8_t* data() const { return hot::place_of(head, 0); }
};
static_assert(sizeof(hot::ChunkHead) <= Chunk::kHeader, "the records begin behind the head");

// Hands out chunks from 2 MB mappings, and gives a mapping back when all of it is free and enough free ones are kept.
// Not thread-safe: the registry's lock is held around every call.
//
// Ordinary pages on purpose. Huge pages look right (one fault per 2 MB), but the first touch of one clears 2 MB, and
// may first have to make room by moving other pages: up to 14 ms at once, on a recording thread (measured). Ordinary
// ones cost 1.5 us per 85 events, evenly, and nothing when the memory is warm.
class ChunkPool {
 public:
  ChunkPool() = default;
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  Chunk* take();  // null when the system gives no memory
  void give_back(Chunk* chunk);
  uint64_t mapped_bytes() const;  // without those of a black box

 private:
  Arena* map_arena();
  void unmap_arena(Arena* arena);

  std::vector<Arena*> d_arenas;
  std::vector<Arena*> d_with_room;
  uint32_t d_empty_arenas = 0;
};

}  // namespace otp
