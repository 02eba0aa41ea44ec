#include "core/chunk_list.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

#include "core/blackbox.h"
#include "core/thread_buffer.h"

namespace otp {

void Chunk::renew() {
  new (head) hot::ChunkHead;
  owner = nullptr;
  holders = 0;
  sealed = false;
}

// The head's sequence is 0 meanwhile: readers in other processes leave the chunk out.
void Chunk::begin(ThreadBuffer* thread, uint64_t of_sequence) {
  owner = thread;
  sequence = of_sequence;
  next_index = thread->next_index.get();
  head->sequence.store(0, std::memory_order_relaxed);
  full_fence();
  head->published.store(0, std::memory_order_relaxed);
  const otp_thread& info = thread->info;
  head->thread = thread->id;
  head->next_index = next_index;
  head->taken_ticks = ticks_now();
  head->os_tid = info.os_tid;
  head->source_tid = thread->source_tid.get();
  bool is_hidden = box != nullptr && box->hides_threads();
  std::memcpy(head->name, is_hidden ? otp_thread{}.name : info.name, sizeof head->name);
  head->check = head->checksum(of_sequence);
  head->sequence.store(of_sequence, std::memory_order_release);
}

namespace {
constexpr size_t kArenaBytes = 2u << 20;
constexpr uint32_t kChunksPerArena = kArenaBytes / OTP_CHUNK_BYTES;

// Free mappings that are kept: 8 MB, so that a profile that starts and stops again finds warm memory.
constexpr uint32_t kSpareArenas = 4;
}  // namespace

struct Arena {
  uint8_t* memory = nullptr;
  Chunk chunks[kChunksPerArena];
  std::vector<Chunk*> free;  // last in, first out: the chunk freed last is still warm
};

// Null when the system gives no memory. Reserves what give_back will need: that must not fail.
Arena* ChunkPool::map_arena() try {
  d_arenas.reserve(d_arenas.size() + 1);
  d_with_room.reserve(d_arenas.size() + 1);
  auto arena = std::make_unique<Arena>();
  arena->free.reserve(kChunksPerArena);
  void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  arena->memory = static_cast<uint8_t*>(memory);
  for (uint32_t i = kChunksPerArena; i-- > 0;) {
    arena->chunks[i].head = reinterpret_cast<hot::ChunkHead*>(arena->memory + i * OTP_CHUNK_BYTES);
    arena->chunks[i].arena = arena.get();
    arena->free.push_back(&arena->chunks[i]);
  }
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
  Chunk* chunk = arena->free.back();
  arena->free.pop_back();
  if (arena->free.empty()) d_with_room.erase(std::find(d_with_room.begin(), d_with_room.end(), arena));
  chunk->renew();
  return chunk;
}

void ChunkPool::give_back(Chunk* chunk) {
  Arena* arena = chunk->arena;
  if (arena == nullptr) {
    BlackBox* box = chunk->box;
    box->give_back(chunk);
    if (box->can_go()) delete box;
    return;
  }
  if (arena->free.empty()) d_with_room.push_back(arena);
  arena->free.push_back(chunk);
  if (arena->free.size() < kChunksPerArena) return;
  if (d_empty_arenas >= kSpareArenas) {
    unmap_arena(arena);
  } else {
    ++d_empty_arenas;
  }
}

uint64_t ChunkPool::mapped_bytes() const { return d_arenas.size() * kArenaBytes; }

}  // namespace otp
