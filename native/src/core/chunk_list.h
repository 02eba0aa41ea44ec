// Chunks: the memory that records lie in, and the one place that it comes from.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace otp {

struct ThreadBuffer;
struct Arena;

// One writer appends and publishes by `committed`; readers see what lies before it. All other fields belong to the
// registry's lock.
struct Chunk {
  ThreadBuffer* owner = nullptr;
  Arena* arena = nullptr;
  std::atomic<uint32_t> committed{0};  // bytes
  uint32_t holders = 0;                // sessions that have not read it yet
  uint32_t pins = 0;                   // decodes at work on it
  bool sealed = false;                 // its thread has gone on to another

  static constexpr uint32_t kHeader = 64;
  static constexpr uint32_t kCapacity = OTP_CHUNK_BYTES - kHeader;
  uint8_t* data() { return reinterpret_cast<uint8_t*>(this) + kHeader; }
  const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(this) + kHeader; }
};
static_assert(sizeof(Chunk) <= Chunk::kHeader, "the header has its own cache line, the records begin on the next");

// Hands out chunks from 2 MB mappings: a fault per 4 KB page would cost 8 ns per event, one per huge page costs under
// 3; measured on the target machine. Gives a mapping back when all of it is free and another free one is kept. Not
// thread-safe: the registry's lock is held around every call.
class ChunkPool {
 public:
  ChunkPool() = default;
  ChunkPool(const ChunkPool&) = delete;
  ChunkPool& operator=(const ChunkPool&) = delete;

  Chunk* take();  // null when the system gives no memory
  void give_back(Chunk* chunk);
  uint64_t mapped_bytes() const;

 private:
  Arena* map_arena();
  void unmap_arena(Arena* arena);

  std::vector<Arena*> d_arenas;
  std::vector<Arena*> d_with_room;
  uint32_t d_empty_arenas = 0;
};

}  // namespace otp
