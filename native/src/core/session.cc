#include "core/session.h"

#include <algorithm>
#include <new>

#include "core/registry.h"

using otp::Chunk;
using otp::Cursor;
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

bool forked(const otp_session* session) {
  return session->generation != g_shared.generation.load(std::memory_order_relaxed);
}

void stop_locked(Registry& all, otp_session* session) {
  session->stop_ticks = ticks_now();
  session->state = State::kStopped;
  g_shared.active.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.all_threads.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.wants_inputs.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (ThreadBuffer* thread : all.threads) thread->local.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i) session->losses[i] = all.losses[session->bit][i].load();
}

// Gives back all that the session has of the registry, its bit too.
void release_all_locked(Registry& all, otp_session* session) {
  all.forget_held(session);
  while (!session->cursors.empty()) all.forget_cursor(session, session->cursors.begin()->first);
  if (all.sessions[session->bit] == session) all.sessions[session->bit] = nullptr;
}

// One drain, from the list of what there is to the finished batch.
class Drain {
 public:
  explicit Drain(otp_session* session) : d_session(session) {}

  int run(otp_batch** out) {
    list_chunks();
    int status = decode(out);
    give_back(status == OTP_OK ? *out : nullptr);
    return status;
  }

 private:
  struct Piece {
    Chunk* chunk;
    ChunkView view;
    bool whole;  // sealed: nothing will be added
  };
  struct Thread {
    ThreadBuffer* buffer;
    Cursor* cursor;
    otp_thread info;
    bool skipped;
    std::vector<Piece> pieces;
  };

  void list_chunks();
  int decode(otp_batch** out);
  void apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder);
  void give_back(otp_batch* batch);

  otp_session* d_session;
  bool d_final = false;
  uint64_t d_bytes = 0;
  std::vector<Thread> d_threads;
  std::vector<LateEnd> d_late_ends, d_unmatched;
};

void Drain::list_chunks() {
  Registry& all = registry();
  all.clock.calibrate();
  std::lock_guard<std::mutex> hold(all.mutex);
  d_final = d_session->state == State::kStopped;
  std::unordered_map<ThreadBuffer*, size_t> position;
  for (auto& [buffer, cursor] : d_session->cursors) {
    position[buffer] = d_threads.size();
    otp_thread info = buffer->info;
    info.source_tid = buffer->source_tid.get();
    d_threads.push_back({buffer, &cursor, info, cursor.skipped, {}});
    cursor.skipped = false;
  }
  for (Chunk* chunk : d_session->held) {
    Thread& thread = d_threads[position.at(chunk->owner)];
    bool resumed = thread.cursor->chunk == chunk;
    uint32_t from = resumed ? thread.cursor->offset : 0;
    uint32_t to = chunk->committed.load(std::memory_order_acquire);
    ++chunk->pins;
    thread.pieces.push_back({chunk, {chunk->data() + from, to - from, chunk->base_index, !resumed}, chunk->sealed});
    d_bytes += to - from;
  }
  d_late_ends.swap(d_session->late_ends);
  // By the recorder's own id: rows of a batch are grouped by thread, and the order must not depend on addresses.
  std::sort(d_threads.begin(), d_threads.end(), [](const Thread& a, const Thread& b) { return a.info.id < b.info.id; });
}

void Drain::apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder) {
  for (const LateEnd& end : d_late_ends) {
    for (size_t i = 0; i < d_threads.size(); ++i) {
      if (d_threads[i].info.id != end.thread) continue;
      if (!decodes[i].late_end(end, builder.thread_index(end.ended_on)) && !d_final) d_unmatched.push_back(end);
    }
  }
}

int Drain::decode(otp_batch** out) {
  uint64_t pending = 0, pending_words = 0;
  for (Thread& thread : d_threads) {
    pending += thread.cursor->decoder.pending.size();
    for (const PendingEvent& event : thread.cursor->decoder.pending) pending_words += event.inputs.size();
  }
  BatchBuilder builder(d_bytes / sizeof(otp_record_begin) + pending, d_bytes / 8 + pending_words,
                       d_session->options.inputs != 0);
  if (!builder.ok()) return OTP_E_NO_MEMORY;
  ClockReader clock(registry().clock);
  DecodeLimits limits{d_session->start_ticks, d_session->stop_ticks, d_session->mask()};
  std::vector<ThreadDecode> decodes;
  decodes.reserve(d_threads.size());
  for (Thread& thread : d_threads) {
    decodes.emplace_back(builder, thread.cursor->decoder, clock, limits, thread.info);
    if (thread.skipped) decodes.back().skipped_before();
    for (const Piece& piece : thread.pieces) decodes.back().chunk(piece.view);
  }
  apply_late_ends(decodes, builder);
  std::vector<uint64_t> open_rows;
  for (ThreadDecode& decode : decodes) {
    if (d_final) decode.finish_all(d_session->stop_ticks);
    decode.keep_open(&open_rows);
  }
  std::sort(open_rows.begin(), open_rows.end());
  builder.remove_rows(open_rows);
  *out = builder.finish();
  return *out == nullptr ? OTP_E_NO_MEMORY : OTP_OK;
}

// Without a batch (memory was short) the chunks stay held, so that a later drain can have them.
void Drain::give_back(otp_batch* batch) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  const std::vector<LateEnd>& kept = batch == nullptr ? d_late_ends : d_unmatched;
  d_session->late_ends.insert(d_session->late_ends.begin(), kept.begin(), kept.end());
  std::vector<Chunk*> done;
  for (Thread& thread : d_threads) {
    for (const Piece& piece : thread.pieces) {
      --piece.chunk->pins;
      if (batch == nullptr) continue;
      thread.cursor->chunk = piece.whole ? nullptr : piece.chunk;
      thread.cursor->offset = static_cast<uint32_t>(piece.view.data + piece.view.size - piece.chunk->data());
      if (piece.whole) done.push_back(piece.chunk);
    }
  }
  std::sort(done.begin(), done.end());
  auto& held = d_session->held;
  held.erase(std::remove_if(held.begin(), held.end(),
                            [&](Chunk* chunk) { return std::binary_search(done.begin(), done.end(), chunk); }),
             held.end());
  for (Chunk* chunk : done) all.release(d_session, chunk);
  if (!done.empty()) g_shared.epoch.fetch_add(1, std::memory_order_release);  // full threads may ask again
  if (batch != nullptr) {
    d_session->recorded += batch->rows;
    for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i) {
      uint64_t total = d_final ? d_session->losses[i] : all.losses[d_session->bit][i].load(std::memory_order_relaxed);
      batch->dropped[i] = total - d_session->losses_reported[i];
      d_session->losses_reported[i] = total;
    }
    for (Thread& thread : d_threads) {
      bool has_chunks = std::any_of(held.begin(), held.end(), [&](Chunk* c) { return c->owner == thread.buffer; });
      if (thread.buffer->exited && !has_chunks && thread.cursor->decoder.pending.empty())
        all.forget_cursor(d_session, thread.buffer);
    }
    if (d_final) release_all_locked(all, d_session);
  }
  d_session->draining = false;
}

}  // namespace
}  // namespace otp

extern "C" {

int otp_session_new(const otp_session_options* options, otp_session** out) {
  if (options->budget_bytes < OTP_CHUNK_BYTES) return OTP_E_BUDGET_TOO_SMALL;
  registry();  // made before the first fork handler could be needed
  auto* session = new (std::nothrow) otp_session;
  if (session == nullptr) return OTP_E_NO_MEMORY;
  session->options = *options;
  session->generation = g_shared.generation.load(std::memory_order_relaxed);
  *out = session;
  return OTP_OK;
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
  if (session->options.all_threads != 0) {
    g_shared.all_threads.fetch_or(mask, std::memory_order_relaxed);
  } else {
    thread->local.fetch_or(mask, std::memory_order_relaxed);
  }
  g_shared.epoch.fetch_add(1, std::memory_order_release);
  session->start_ticks = otp::ticks_now();
  g_shared.active.fetch_or(mask, std::memory_order_release);
  return OTP_OK;
}

int otp_session_stop(otp_session* session) {
  if (otp::forked(session)) return OTP_E_FORKED;
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    if (session->state != State::kRunning) return OTP_E_STATE;
    otp::stop_locked(all, session);
  }
  all.clock.calibrate();
  return OTP_OK;
}

uint32_t otp_session_consumer(const otp_session* session) {
  return session->state == State::kNew ? 0 : session->mask();
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
