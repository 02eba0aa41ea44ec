#include "core/session.h"

#include <algorithm>
#include <new>

#include "core/registry.h"

using otp::Chunk;
using otp::Cursor;
using otp::g_generation;
using otp::g_shared;
using otp::Registry;
using otp::registry;
using otp::ThreadBuffer;
using State = otp_session::State;

namespace otp {

namespace {

// Bits are given out in turn, not lowest first: a thread that was interrupted between reading the mask and writing its
// record may still write for the session that had the bit before, and must not find it in use again at once.
bool take_bit(Registry& all, otp_session* session) {
  for (uint32_t i = 1; i <= OTP_MAX_SESSIONS; ++i) {
    uint32_t bit = (all.last_bit + i) % OTP_MAX_SESSIONS;
    if (all.sessions[bit] != nullptr) continue;
    all.sessions[bit] = session;
    all.last_bit = session->bit = bit;
    return true;
  }
  return false;
}

bool forked(const otp_session* session) { return session->generation != g_generation.load(std::memory_order_relaxed); }

// Before its bit in `active`: who sees that one sees these.
void enter_contexts_locked(otp_session* session) {
  if (session->options.contexts == 0) return;
  g_shared.follows.fetch_or(session->mask(), std::memory_order_relaxed);
  if (session->roots_muted) g_shared.muted_roots.fetch_or(session->mask(), std::memory_order_relaxed);
  session->follow_epoch = g_shared.follow_epoch.fetch_add(1, std::memory_order_relaxed) + 1;
}

void stop_locked(Registry& all, otp_session* session) {
  session->stop_ticks = ticks_now();
  session->state = State::kStopped;
  for (auto& kind : g_shared.active) kind.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.all_threads.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.wants_inputs.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.wants_memory.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_wants_devices.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.follows.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.muted_roots.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (ThreadBuffer* thread : all.threads) thread->local.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i) session->losses[i] = all.losses[session->bit][i].load();
}

// Gives back all that the session has of the registry, its bit too.
void release_all_locked(Registry& all, otp_session* session) {
  all.forget_held(session);
  while (!session->cursors.empty()) all.forget_cursor(session, session->cursors.begin()->first);
  if (all.sessions[session->bit] == session) all.sessions[session->bit] = nullptr;
}

// One drain, from the list of what there is to the finished batch. Until that is there nothing of the session's
// changes, so that where memory is short a later drain can have it all.
class Drain {
 public:
  explicit Drain(otp_session* session) : d_session(session) {}

  int run(otp_batch** out) {
    otp_batch* batch = nullptr;
    registry().clock.calibrate();
    try {
      list_chunks();
      batch = decode();
    } catch (const std::bad_alloc&) {
    }
    give_back(batch);
    if (batch == nullptr) return OTP_E_NO_MEMORY;
    *out = batch;
    return OTP_OK;
  }

 private:
  struct Piece {
    ChunkView view;
    uint64_t next_index;  // behind it
    bool whole;           // sealed: nothing will be added
    bool after_loss;
  };
  struct Thread {
    ThreadBuffer* buffer;
    Cursor* cursor;
    otp_thread info;
    ThreadDecoder decoder;
    bool after_loss;
    std::vector<size_t> pieces;
  };

  void list_chunks();
  otp_batch* decode();
  void apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder);
  void give_back(otp_batch* batch);
  void take_from_held(bool decoded);
  void take_from_cursors(Registry& all);
  void count_dropped(Registry& all, otp_batch* batch);

  otp_session* d_session;
  bool d_final = false;
  uint64_t d_bytes = 0;
  DecodeLimits d_limits{};
  std::vector<Thread> d_threads;  // by the recorder's own id: the order of rows must not depend on addresses
  std::vector<Piece> d_pieces;    // in the order of the session's held chunks
  std::vector<LateEnd> d_late_ends, d_unmatched;
};

void Drain::list_chunks() {
  std::lock_guard<std::mutex> hold(registry().mutex);
  d_final = d_session->state == State::kStopped;
  d_limits = {d_session->start_ticks, d_session->stop_ticks, d_session->mask()};
  for (auto& [buffer, cursor] : d_session->cursors) {
    otp_thread info = buffer->info;
    info.source_tid = buffer->source_tid.get();
    d_threads.push_back({buffer, &cursor, info, cursor.decoder, false, {}});
  }
  std::sort(d_threads.begin(), d_threads.end(), [](const Thread& a, const Thread& b) { return a.info.id < b.info.id; });
  std::unordered_map<ThreadBuffer*, Thread*> of;
  for (Thread& thread : d_threads) of[thread.buffer] = &thread;
  d_pieces.reserve(d_session->held.size());
  for (const Held& held : d_session->held) {
    uint32_t size = readable_bytes(*held.chunk) - held.from;
    of.at(held.chunk->owner)->pieces.push_back(d_pieces.size());
    d_pieces.push_back(
        {{held.chunk->data() + held.from, size, held.next_index}, 0, held.chunk->sealed, held.after_loss});
    d_bytes += size;
  }
  d_late_ends = d_session->late_ends;
  for (Held& held : d_session->held) {  // last: nothing throws from here on
    held.reading = true;
    ++held.chunk->pins;
  }
}

void Drain::apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder) {
  for (const LateEnd& end : d_late_ends) {
    auto thread = std::lower_bound(d_threads.begin(), d_threads.end(), end.thread,
                                   [](const Thread& a, uint32_t id) { return a.info.id < id; });
    if (thread == d_threads.end() || thread->info.id != end.thread) continue;
    ThreadDecode& decode = decodes[static_cast<size_t>(thread - d_threads.begin())];
    if (!decode.late_end(end, builder.thread_index(end.ended_on)) && !d_final) d_unmatched.push_back(end);
  }
}

// Null when memory is short.
otp_batch* Drain::decode() {
  uint64_t pending = 0, pending_words = 0;
  for (Thread& thread : d_threads) {
    pending += thread.decoder.pending.size();
    for (const PendingEvent& event : thread.decoder.pending) pending_words += event.inputs.size();
  }
  BatchBuilder builder({d_bytes / sizeof(otp_record_begin) + pending, d_bytes / 8 + pending_words,
                        d_bytes / sizeof(otp_record_memory), d_session->options.inputs != 0,
                        d_session->options.contexts != 0, d_session->options.memory != 0});
  if (!builder.ok()) return nullptr;
  ClockReader clock(registry().clock);
  std::vector<ThreadDecode> decodes;
  decodes.reserve(d_threads.size());
  for (Thread& thread : d_threads) {
    decodes.emplace_back(builder, thread.decoder, clock, d_limits, thread.info);
    for (size_t piece : thread.pieces) {
      if (d_pieces[piece].after_loss) decodes.back().after_loss();
      decodes.back().chunk(d_pieces[piece].view);
      d_pieces[piece].next_index = thread.decoder.next_index;
    }
  }
  apply_late_ends(decodes, builder);
  std::vector<uint64_t> open_rows;
  for (ThreadDecode& decode : decodes) {
    if (d_final) decode.finish_all(d_limits.stop_ticks);
    decode.keep_open(&open_rows);
  }
  std::sort(open_rows.begin(), open_rows.end());
  builder.remove_rows(open_rows);
  return builder.finish();
}

// Chunks that have come since are not `reading`; those that are have not been evicted, so they are in the old order.
void Drain::take_from_held(bool decoded) {
  Registry& all = registry();
  std::deque<Held>& held = d_session->held;
  auto kept = held.begin();
  size_t piece = 0;
  for (Held& entry : held) {
    Held next = entry;
    bool done = false;
    if (entry.reading) {
      const Piece& read = d_pieces[piece++];
      --entry.chunk->pins;
      next.reading = false;
      if (decoded) {
        next.from = static_cast<uint32_t>(read.view.data + read.view.size - entry.chunk->data());
        next.next_index = read.next_index;
        next.after_loss = false;
        done = read.whole;
      }
    }
    if (done) {
      all.release(d_session, entry.chunk);
    } else {
      *kept++ = next;
    }
  }
  held.erase(kept, held.end());
}

void Drain::take_from_cursors(Registry& all) {
  for (Thread& thread : d_threads) {
    thread.cursor->decoder = std::move(thread.decoder);
    if (thread.buffer->exited && thread.cursor->chunks == 0 && thread.cursor->decoder.pending.empty())
      all.forget_cursor(d_session, thread.buffer);
  }
  auto left_over = std::copy(d_unmatched.begin(), d_unmatched.end(), d_session->late_ends.begin());
  d_session->late_ends.erase(left_over, d_session->late_ends.begin() + static_cast<std::ptrdiff_t>(d_late_ends.size()));
}

void Drain::count_dropped(Registry& all, otp_batch* batch) {
  // A thread that was interrupted may still count into the registry's after the stop; those are not the session's.
  bool stopped = d_session->state == State::kStopped;
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i) {
    uint64_t total = stopped ? d_session->losses[i] : all.losses[d_session->bit][i].load(std::memory_order_relaxed);
    batch->dropped[i] = total - d_session->losses_reported[i];
    d_session->losses_reported[i] = total;
  }
}

void Drain::give_back(otp_batch* batch) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  take_from_held(batch != nullptr);
  if (batch != nullptr) {
    take_from_cursors(all);
    d_session->recorded += batch->rows + batch->memory_count;
    count_dropped(all, batch);
    if (d_final) release_all_locked(all, d_session);
  }
  d_session->draining = false;
  g_shared.epoch.fetch_add(1,
                           std::memory_order_release);  // there is room, and nothing is pinned: threads may ask again
}

}  // namespace
}  // namespace otp

extern "C" {

int otp_session_new(const otp_session_options* options, otp_session** out) try {
  if (options->budget_bytes < OTP_CHUNK_BYTES) return OTP_E_BUDGET_TOO_SMALL;
  registry();  // made before the first fork handler could be needed
  auto* session = new otp_session;
  session->options = *options;
  session->generation = g_generation.load(std::memory_order_relaxed);
  *out = session;
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

int otp_session_start(otp_session* session) {
  if (otp::forked(session)) return OTP_E_FORKED;
  ThreadBuffer* thread = otp::t_buffer != nullptr ? otp::t_buffer : otp::this_thread_slowpath();
  if (thread == nullptr) return OTP_E_NO_MEMORY;
  Registry& all = registry();
  all.clock.calibrate();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (session->state != State::kNew) return OTP_E_STATE;
  if (!otp::take_bit(all, session)) return OTP_E_TOO_MANY_SESSIONS;
  for (auto& loss : all.losses[session->bit]) loss.store(0, std::memory_order_relaxed);
  session->state = State::kRunning;
  uint32_t mask = session->mask();
  if (session->options.inputs != 0) g_shared.wants_inputs.fetch_or(mask, std::memory_order_relaxed);
  if (session->options.devices != 0) otp::g_wants_devices.fetch_or(mask, std::memory_order_relaxed);
  bool memory = session->options.memory != 0 && session->options.contexts == 0;
  if (session->options.all_threads != 0) {
    g_shared.all_threads.fetch_or(mask, std::memory_order_relaxed);
  } else {
    thread->local.fetch_or(mask, std::memory_order_relaxed);
  }
  otp::enter_contexts_locked(session);
  session->start_epoch = g_shared.epoch.fetch_add(1, std::memory_order_release) + 1;
  session->start_ticks = otp::ticks_now();
  for (uint32_t kind = 0; kind < OTP_EVENT_KINDS; ++kind) {
    bool wanted = kind == 0 || session->options.kinds == 0 || (session->options.kinds >> kind & 1) != 0;
    if (wanted) g_shared.active[kind].fetch_or(mask, std::memory_order_release);
  }
  if (memory) g_shared.wants_memory.fetch_or(mask, std::memory_order_release);
  return OTP_OK;
}

int otp_session_stop(otp_session* session) {
  if (otp::forked(session)) return OTP_E_FORKED;
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    if (session->state != State::kRunning) return OTP_OK;
    otp::stop_locked(all, session);
  }
  all.clock.calibrate();
  return OTP_OK;
}

int otp_session_mute_roots(otp_session* session, int muted) {
  if (otp::forked(session)) return OTP_E_FORKED;
  std::lock_guard<std::mutex> hold(registry().mutex);
  session->roots_muted = muted != 0;
  if (session->state != State::kRunning || session->options.contexts == 0) return OTP_OK;
  if (session->roots_muted) {
    g_shared.muted_roots.fetch_or(session->mask(), std::memory_order_relaxed);
  } else {
    g_shared.muted_roots.fetch_and(~session->mask(), std::memory_order_relaxed);
  }
  return OTP_OK;
}

uint32_t otp_session_consumer(const otp_session* session) {
  return session->state == State::kNew || otp::forked(session) ? 0 : session->mask();
}

void otp_session_free(otp_session* session) {
  if (session == nullptr || otp::forked(session)) return;
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    if (session->state == State::kRunning) otp::stop_locked(all, session);
    otp::release_all_locked(all, session);
  }
  delete session;
}

int otp_session_get_stats(otp_session* session, otp_session_stats* out) {
  if (otp::forked(session)) return OTP_E_FORKED;
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  *out = otp_session_stats{};
  out->recorded = session->recorded;
  out->bytes_held = session->bytes_held;
  out->bytes_held_max = session->bytes_held_max;
  if (session->state == State::kNew) return OTP_OK;
  out->start_ns = all.clock.unix_ns(session->start_ticks);
  bool stopped = session->state == State::kStopped;
  if (stopped) out->stop_ns = all.clock.unix_ns(session->stop_ticks);
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i)
    out->dropped[i] = stopped ? session->losses[i] : all.losses[session->bit][i].load(std::memory_order_relaxed);
  return OTP_OK;
}

int otp_session_drain(otp_session* session, otp_batch** out) {
  if (otp::forked(session)) return OTP_E_FORKED;
  {
    std::lock_guard<std::mutex> hold(registry().mutex);
    if (session->state == State::kNew || session->draining) return OTP_E_STATE;
    session->draining = true;
  }
  return otp::Drain(session).run(out);
}

}  // extern "C"
