// Which chunks the black box has: while one is open every thread writes to chunks of it, and it holds all of them, the
// latest. Who else holds a chunk that has to make room for a later one gets a copy of it.
#include <algorithm>
#include <cstring>

#include "core/registry.h"

namespace otp {

// For the others: a slow reader may keep chunks for as long as it likes, and the box is to have the latest all the
// same.
bool Registry::move_out_of_box(Chunk* chunk) {
  Chunk* copy = pool.take();
  if (copy == nullptr) return false;
  copy->owner = chunk->owner;
  copy->holders = chunk->holders & ~box_session->mask();
  copy->sealed = true;
  copy->sealed_ticks = chunk->sealed_ticks;
  uint32_t size = chunk->readable_bytes();
  std::memcpy(copy->data(), chunk->data(), size);
  copy->published.store(size, std::memory_order_relaxed);
  for (uint32_t rest = copy->holders; rest != 0; rest &= rest - 1) {
    std::deque<Held>& held = sessions[__builtin_ctz(rest)]->held;
    auto found = std::find_if(held.rbegin(), held.rend(), [chunk](const Held& each) { return each.chunk == chunk; });
    found->chunk = copy;
  }
  chunk->holders = box_session->mask();
  return true;
}

bool Registry::evict_from_box() {
  std::deque<Held>& held = box_session->held;
  for (auto it = held.begin(); it != held.end(); ++it) {
    Chunk* chunk = it->chunk;
    if (!chunk->sealed || chunk->pins != 0) continue;
    if (chunk->holders != box_session->mask() && !move_out_of_box(chunk)) continue;
    forget(box_session, it);
    return true;
  }
  return false;
}

Chunk* Registry::take_chunk() {
  if (box != nullptr) clock.calibrate();  // the box may be read when nobody has asked for the time in a while
  Chunk* chunk = box == nullptr ? nullptr : box->take();
  while (chunk == nullptr && box != nullptr && evict_from_box()) chunk = box->take();
  return chunk == nullptr ? pool.take() : chunk;
}

}  // namespace otp
