// A chunk to write to: who holds it, who has no room for another.
#include "core/recording.h"

namespace otp {

namespace {

// Takes in that sessions have started or space has come free. What the thread remembers of losses may be those of an
// earlier session that had the same bit.
void adopt_epoch_locked(Registry& all, ThreadBuffer& thread) {
  for (otp_session* session : all.sessions) {
    if (session != nullptr && static_cast<int32_t>(session->start_epoch - thread.epoch) > 0)
      thread.loss_pending &= ~session->mask();
  }
  thread.refused = 0;
  thread.epoch = g_shared.epoch.load(std::memory_order_relaxed);
}

struct Room {
  uint32_t sessions;   // that the next record can be for
  uint32_t no_memory;  // that the system gave no memory for
};

// Adds sessions to those that hold the chunk, as far as they have room; returns those that had no memory.
uint32_t hold_locked(Registry& all, ThreadBuffer& thread, Chunk* chunk, uint32_t requested, uint32_t read_from) {
  uint32_t no_memory = 0;
  for (uint32_t rest = requested & ~chunk->holders; rest != 0; rest &= rest - 1) {
    otp_session* session = all.sessions[__builtin_ctz(rest)];
    if (session == nullptr || session->state != otp_session::State::kRunning) continue;
    try {
      if (!all.hold(session, chunk, read_from)) thread.refused |= session->mask();
    } catch (const std::bad_alloc&) {
      no_memory |= session->mask();
    }
  }
  return no_memory;
}

// Adds the sessions in `requested` to those that hold the thread's chunk, as far as they have room; a new chunk where
// `bytes` more do not fit, and where the chunk is none of the black box that wants the record.
//
// The full chunk is sealed first, and stays so when nobody has room for another: a session that keeps the newest can
// then let go of it, and a drain can free it. Left open, it would be held, read and full for ever.
Room make_room_locked(Registry& all, ThreadBuffer& thread, uint32_t requested, uint32_t bytes) {
  uint32_t boxed = all.box == nullptr ? 0 : all.box_session->mask();
  bool leaves = (requested & boxed) != 0 && thread.chunk != nullptr && thread.open_chunk->box != all.box;
  if (thread.fits(bytes) && !leaves) {
    uint32_t no_memory = hold_locked(all, thread, thread.open_chunk, requested, thread.at);
    thread.accepted = thread.open_chunk->holders;
    return {requested & thread.accepted, no_memory};
  }
  uint32_t open_count = boxed == 0 ? 0 : all.box->list_open(thread, boxed, Chunk::kCapacity - bytes);
  all.seal_chunk(&thread);
  Chunk* chunk = all.take_chunk();
  if (chunk == nullptr) return {0, requested};
  chunk->begin(&thread, ++all.last_chunk);
  // The box holds every chunk of its own, also those taken for others: each later chunk lists what is open in this one.
  uint32_t holders = chunk->box == nullptr ? requested & ~boxed : requested | boxed;
  thread.refused = chunk->box == nullptr ? thread.refused | boxed : thread.refused & ~boxed;
  uint32_t no_memory = hold_locked(all, thread, chunk, holders, 0);
  if (chunk->holders == 0) {
    all.pool.give_back(chunk);
    return {0, no_memory};
  }
  thread.chunk = chunk->head;
  thread.open_chunk = chunk;
  thread.at = 0;
  thread.accepted = chunk->holders;
  if ((chunk->holders & boxed) != 0) all.box->append_open(thread, open_count);
  return {requested & thread.accepted, no_memory};
}

}  // namespace

uint32_t make_room_slowpath(ThreadBuffer& thread, uint32_t requested, uint32_t bytes, bool counted) {
  Registry& all = registry();
  thread.not_ready = UINT32_MAX;  // whatever changes here, the next begin looks at it
  bool current = thread.epoch == g_shared.epoch.load(std::memory_order_acquire);
  uint32_t possible = current ? requested & ~thread.refused : requested;
  Room room{0, 0};
  if (current && (possible & ~thread.accepted) == 0 && thread.fits(bytes)) {
    room.sessions = possible;  // at its budget, a session costs the thread no lock per event
  } else if (possible != 0) {
    std::lock_guard<std::mutex> hold(all.mutex);
    if (thread.epoch != g_shared.epoch.load(std::memory_order_relaxed)) adopt_epoch_locked(all, thread);
    room = make_room_locked(all, thread, requested & ~thread.refused, bytes);
  }
  uint32_t full = requested & ~room.sessions & thread.refused;
  if (counted && (full | room.no_memory) != 0) {
    all.count_loss(full, OTP_LOSS_BUDGET);
    all.count_loss(room.no_memory, OTP_LOSS_NO_MEMORY);
    thread.loss_pending |= full | room.no_memory;
  }
  return room.sessions;
}

void count_too_deep(ThreadBuffer& thread, uint32_t consumers, const otp_begin_args& args) {
  if (args.nests == 0 && thread.too_deep == args.key) return;
  thread.too_deep = args.key;
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (thread.epoch != g_shared.epoch.load(std::memory_order_relaxed)) adopt_epoch_locked(all, thread);
  all.count_loss(consumers, OTP_LOSS_DEPTH);
  thread.loss_pending |= consumers;
  thread.not_ready |= consumers;
}

}  // namespace otp
