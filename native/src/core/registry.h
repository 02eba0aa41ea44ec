// All threads, all sessions, and the lock that the slow paths take.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "core/blackbox.h"
#include "core/chunk_list.h"
#include "core/clock.h"
#include "core/interner.h"
#include "core/session.h"
#include "core/thread_buffer.h"

namespace otp {

extern hot::Shared g_shared;
extern std::atomic<const otp_context_carrier*> g_context_carrier;

// Not among what every begin reads: the threads of these sessions are never `ready`, and go the slow way.
extern std::atomic<uint32_t> g_requests_devices;
extern std::atomic<const otp_device_source*> g_device_source;
extern std::atomic<void (*)()> g_mute_hook;  // as in otp_api

extern std::atomic<uint32_t> g_box_is_open;

extern std::atomic<uint32_t> g_generation;  // raised in a forked child

// Lives as long as the process. A forked child gets a new, empty one in the old one's place, whose lock may be held by
// a thread that the child does not have; what the old one owned stays where it is, unwritten and hence unshared.
struct Registry {
  std::mutex mutex;
  ChunkPool pool;
  Interner interner;
  Clock clock;
  std::vector<ThreadBuffer*> threads;
  otp_session* sessions[OTP_MAX_SESSIONS] = {};
  uint32_t last_bit = OTP_MAX_SESSIONS - 1;
  uint32_t last_thread_id = 0;
  uint64_t last_chunk = 0;             // sequence of the last that was begun
  uint64_t last_collective = 0;        // ticket, over all black boxes
  BlackBox* box = nullptr;             // the one that is open, ...
  otp_session* box_session = nullptr;  // ... and its consumer
  std::atomic<uint64_t> unmatched_ends{0};
  // By session bit. Added to without the lock; zeroed when a session gets the bit.
  std::atomic<uint64_t> losses[OTP_MAX_SESSIONS][OTP_LOSS_REASONS] = {};

  void count_loss(uint32_t consumers, otp_loss reason, uint64_t events = 1);

  // The rest is for callers that hold the lock.
  ThreadBuffer* find_thread(uint32_t id, uint32_t source_tid);
  void release_reference(ThreadBuffer* thread);
  // On the chunk's own thread. Charges the chunk to the session, making room where its policy allows. False: it is
  // full. std::bad_alloc leaves all as it was, but for what was thrown away to make room.
  bool hold(otp_session* session, Chunk* chunk, uint32_t read_from);
  void release(otp_session* session, Chunk* chunk);
  // The thread continues to another chunk, or ends.
  void seal_chunk(ThreadBuffer* thread);
  // For a thread to write to: one of the black box where it is open and can make room; null where there is no memory.
  Chunk* take_chunk();
  // Writes into the image how many events the black box has lost.
  void note_box_losses();
  void forget_held(otp_session* session);
  void forget_cursor(otp_session* session, ThreadBuffer* thread);

  // Throws away what the session holds of a chunk.
  void forget(otp_session* session, std::deque<Held>::iterator held);

 private:
  bool evict_from_box();
  bool move_out_of_box(Chunk* chunk);
  Cursor& cursor_of(otp_session* session, ThreadBuffer* thread);
  bool evict_oldest(otp_session* session);
  void account_eviction(otp_session* session, std::deque<Held>::iterator evicted, Cursor& cursor);
};

// The session's black box is the one that is open; until the session ends. Its threads may still write to chunks of it
// then, for others: they come back one by one.
void open_box_locked(Registry& all, otp_session* session);
void close_box_locked(Registry& all);

// As otp_api has them.
uint64_t collective_enqueued(const otp_blackbox_call* call);
void collective_completed(uint64_t ticket, int failed);

// Needs no memory that may not be had, also not for the first use or in a forked child.
Registry& registry() noexcept;

// The calling thread's buffer, made on first use; null while the thread is being torn down or memory is short.
ThreadBuffer* this_thread_slowpath();
// __thread, since a thread_local of another file is asked first whether it wants to be initialised.
extern __thread ThreadBuffer* t_buffer __attribute__((tls_model("initial-exec")));

}  // namespace otp
