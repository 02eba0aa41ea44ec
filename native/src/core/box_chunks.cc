// The chunks of the black box: while it is open every thread writes to them, and it holds the latest. Where a chunk has
// to make room for a later one, other sessions that hold it get a copy, and so does a drain that reads it.
#include <algorithm>
#include <cstring>

#include "core/registry.h"

namespace otp {

// Gives the other holders a copy, so that a slow reader does not keep the box from having the latest.
bool Registry::move_out_of_box(Chunk* chunk) {
  Chunk* copy = pool.take();
  if (copy == nullptr) return false;
  copy->owner = chunk->owner;
  copy->holders = chunk->holders & ~box_session->mask();
  copy->sealed = true;
  copy->sealed_ticks = chunk->sealed_ticks;
  uint32_t size = chunk->readable_bytes();
  std::memcpy(copy->data(), chunk->data(), size);
  copy->head->published.store(size, std::memory_order_relaxed);
  for (uint32_t rest = copy->holders; rest != 0; rest &= rest - 1) {
    std::deque<Held>& held = sessions[__builtin_ctz(rest)]->held;
    auto found = std::find_if(held.rbegin(), held.rend(), [chunk](const Held& each) { return each.chunk == chunk; });
    found->chunk = copy;
    if (found->reader != nullptr) *found->reader = copy;
  }
  chunk->holders = box_session->mask();
  return true;
}

void Registry::note_box_losses() {
  const auto& counts = losses[box_session->bit];
  box->set_dropped(counts[OTP_LOSS_BUDGET].load() + counts[OTP_LOSS_NO_MEMORY].load());
}

// Of what ended first, not of what began first: the chunk that a slow thread has just left would be the first to go,
// with the latest that the thread did. Chunks are held in the order of their begins, so that it is among the first few.
bool Registry::evict_from_box() {
  constexpr int kCandidates = 64;
  std::deque<Held>& held = box_session->held;
  auto oldest = held.end();
  int candidates = 0;
  for (auto it = held.begin(); it != held.end() && candidates < kCandidates; ++it) {
    Chunk* chunk = it->chunk;
    if (!chunk->sealed) continue;
    ++candidates;
    if (oldest == held.end() || chunk->sealed_ticks < oldest->chunk->sealed_ticks) oldest = it;
  }
  if (oldest == held.end()) return false;
  if (oldest->chunk->holders != box_session->mask() && !move_out_of_box(oldest->chunk)) return false;
  forget(box_session, oldest);
  return true;
}

Chunk* Registry::take_chunk() {
  if (box != nullptr) {
    clock.calibrate();  // the box may be read when nobody has asked for the time in a while
    GuardedMapping::guard_again();
  }
  Chunk* chunk = box == nullptr ? nullptr : box->take();
  while (chunk == nullptr && box != nullptr && evict_from_box()) chunk = box->take();
  if (chunk != nullptr) return chunk;
  if (box != nullptr) note_box_losses();
  return pool.take();
}

}  // namespace otp
