#include "core/chunk_list.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

namespace otp {

namespace {
constexpr size_t kArenaBytes = 2u << 20;
constexpr uint32_t kChunksPerArena = kArenaBytes / OTP_CHUNK_BYTES;
}  // namespace

struct Arena {
  uint8_t* memory = nullptr;
  std::vector<uint8_t*> free;  // last in, first out: the chunk given back last is still warm
};

// Null when the system gives no memory. Reserves what give_back will need: that must not fail.
Arena* ChunkPool::map_arena() try {
  d_arenas.reserve(d_arenas.size() + 1);
  d_with_room.reserve(d_arenas.size() + 1);
  auto arena = std::make_unique<Arena>();
  arena->free.reserve(kChunksPerArena);
  // Twice the size, so that a 2 MB aligned piece can be cut out: only an aligned one can become a huge page.
  void* raw =
      mmap(nullptr, 2 * kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uintptr_t>(raw);
  uintptr_t aligned = (begin + kArenaBytes - 1) & ~(kArenaBytes - 1);
  if (aligned > begin) munmap(raw, aligned - begin);
  uintptr_t rest = begin + 2 * kArenaBytes - (aligned + kArenaBytes);
  if (rest > 0) munmap(reinterpret_cast<void*>(aligned + kArenaBytes), rest);
  auto* memory = reinterpret_cast<uint8_t*>(aligned);
#ifdef MADV_HUGEPAGE
  madvise(memory, kArenaBytes, MADV_HUGEPAGE);  // advice only: small pages work as well, slower
#endif
  arena->memory = memory;
  for (uint32_t i = kChunksPerArena; i-- > 0;) arena->free.push_back(memory + i * OTP_CHUNK_BYTES);
  d_arenas.push_back(arena.get());
  d_with_room.push_back(arena.get());
  ++d_empty_arenas;
  return arena.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void ChunkPool::unmap_arena(Arena* arena) {
  munmap(arena->memory, kArenaBytes);
  d_arenas.erase(std::find(d_arenas.begin(), d_arenas.end(), arena));
  d_with_room.erase(std::find(d_with_room.begin(), d_with_room.end(), arena));
  delete arena;
}

Chunk* ChunkPool::take() {
  Arena* arena = d_with_room.empty() ? map_arena() : d_with_room.back();
  if (arena == nullptr) return nullptr;
  if (arena->free.size() == kChunksPerArena) --d_empty_arenas;
  uint8_t* memory = arena->free.back();
  arena->free.pop_back();
  if (arena->free.empty()) d_with_room.erase(std::find(d_with_room.begin(), d_with_room.end(), arena));
  auto* chunk = new (memory) Chunk;
  chunk->arena = arena;
  return chunk;
}

void ChunkPool::give_back(Chunk* chunk) {
  Arena* arena = chunk->arena;
  if (arena->free.empty()) d_with_room.push_back(arena);
  arena->free.push_back(reinterpret_cast<uint8_t*>(chunk));
  if (arena->free.size() < kChunksPerArena) return;
  if (d_empty_arenas > 0) {
    unmap_arena(arena);
  } else {
    ++d_empty_arenas;
  }
}

uint64_t ChunkPool::mapped_bytes() const { return d_arenas.size() * kArenaBytes; }

}  // namespace otp
