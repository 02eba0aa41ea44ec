#include "core/session.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/guarded_mapping.h"
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
  g_shared.requests_inputs.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.requests_memory.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_requests_devices.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.follows.fetch_and(~session->mask(), std::memory_order_relaxed);
  g_shared.muted_roots.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (ThreadBuffer* thread : all.threads) thread->local.fetch_and(~session->mask(), std::memory_order_relaxed);
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i) session->losses[i] = all.losses[session->bit][i].load();
  if (session == all.box_session) close_box_locked(all);
}

// Up to when a drain of so many bytes goes: as many of the chunks that ended first as fit, and one at least. Of the
// others, one per thread, it reads a part. A heap, since this runs under the lock: 50 us for a full 512 MB.
uint64_t cut_of(const std::deque<Held>& held, uint64_t max_bytes) {
  std::vector<std::pair<uint64_t, uint64_t>> sealed;  // when, unread bytes
  uint64_t total = 0;
  for (const Held& each : held) {
    uint64_t size = each.chunk->readable_after(each.from);
    total += size;
    if (each.chunk->sealed) sealed.emplace_back(each.chunk->sealed_ticks, size);
  }
  if (max_bytes == 0 || total <= max_bytes || sealed.empty()) return UINT64_MAX;
  std::make_heap(sealed.begin(), sealed.end(), std::greater<>());
  uint64_t cut = sealed.front().first, bytes = 0;
  while (!sealed.empty() && (bytes += sealed.front().second) <= max_bytes) {
    cut = sealed.front().first;
    std::pop_heap(sealed.begin(), sealed.end(), std::greater<>());
    sealed.pop_back();
  }
  return cut;
}

void give_back_bit_locked(Registry& all, otp_session* session) {
  if (!session->given_back || session->bit_reserved) return;
  if (all.sessions[session->bit] == session) all.sessions[session->bit] = nullptr;
}

// Gives back all that the session has of the registry, its bit too.
void release_all_locked(Registry& all, otp_session* session) {
  all.forget_held(session);
  while (!session->cursors.empty()) all.forget_cursor(session, session->cursors.begin()->first);
  session->given_back = true;
  give_back_bit_locked(all, session);
}

// Of a stopped session: what is in its chunks, and what was open when it was last drained.
uint64_t undrained_events(const otp_session* session) {
  uint64_t found = 0;
  std::vector<LateEnd> ends;
  for (const Held& held : session->held) {
    uint32_t size = held.chunk->readable_after(held.from);
    found += scan_lost({held.chunk->data() + held.from, size, held.next_index}, session->mask(), &ends);
    ends.clear();
  }
  for (const auto& [thread, cursor] : session->cursors) found += cursor.decoder.pending.size();
  return found;
}

// One drain, from the list of what there is to the finished batch. Until that is there nothing of the session's
// changes, so that where memory is short a later drain can have it all.
class Drain {
 public:
  Drain(otp_session* session, uint64_t max_bytes) : d_session(session), d_max_bytes(max_bytes) {}

  int run(otp_batch** out) {
    otp_batch* batch = nullptr;
    registry().clock.calibrate();
    GuardedMapping::guard_again();  // threads may stay in their chunks for long
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
    Chunk* chunk;  // belongs to the registry's lock where it is one of a black box
    bool in_box;
    uint32_t from, size;  // bytes
    uint64_t next_index;  // behind what was read
    uint32_t read;        // bytes
    bool sealed;          // nothing will be added
    bool after_loss;
    bool reached;  // by the decoder
  };
  struct Thread {
    ThreadBuffer* buffer;
    Cursor* cursor;
    otp_thread info;
    ThreadDecoder decoder;
    uint32_t behind;  // chunks that end behind the cut
    std::vector<size_t> pieces;
  };

  void list_chunks();
  void list_chunk(const Held& held, Thread& thread);
  const uint8_t* bytes_of(const Piece& piece);
  bool is_too_late(const Held& held, Thread& thread) const;
  void decode_thread(Thread& thread, ThreadDecode& decode);
  otp_batch* decode();
  void apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder);
  void give_back(otp_batch* batch);
  void take_from_held(bool decoded);
  void take_from_cursors(Registry& all);
  void count_dropped(Registry& all, otp_batch* batch);

  otp_session* d_session;
  uint64_t d_max_bytes;
  bool d_final = false;  // nothing of the session will be left
  uint64_t d_bytes = 0;
  DecodeLimits d_limits{};
  std::vector<Thread> d_threads;  // by the recorder's own id: the order of rows must not depend on addresses
  std::vector<Piece> d_pieces;    // in the order of the session's held chunks
  std::vector<uint8_t> d_copy;    // of the piece that is decoded, where it is one of a black box
  std::vector<LateEnd> d_late_ends, d_unmatched;
};

void Drain::list_chunks() {
  std::lock_guard<std::mutex> hold(registry().mutex);
  uint64_t cut = cut_of(d_session->held, d_max_bytes);
  d_final = d_session->state == State::kStopped && cut == UINT64_MAX;
  d_limits = {d_session->start_ticks, d_session->stop_ticks, cut, d_session->mask()};
  for (auto& [buffer, cursor] : d_session->cursors) {
    otp_thread info = buffer->info;
    info.source_tid = buffer->source_tid.get();
    d_threads.push_back({buffer, &cursor, info, cursor.decoder, 0, {}});
  }
  std::sort(d_threads.begin(), d_threads.end(), [](const Thread& a, const Thread& b) { return a.info.id < b.info.id; });
  std::unordered_map<ThreadBuffer*, Thread*> of;
  for (Thread& thread : d_threads) of[thread.buffer] = &thread;
  d_pieces.reserve(d_session->held.size());
  std::vector<Held*> listed;
  listed.reserve(d_session->held.size());
  for (Held& held : d_session->held) {
    Thread& thread = *of.at(held.chunk->owner);
    if (is_too_late(held, thread)) continue;
    list_chunk(held, thread);
    listed.push_back(&held);
  }
  d_late_ends = d_session->late_ends;
  for (size_t i = 0; i < listed.size(); ++i)
    listed[i]->reader = &d_pieces[i].chunk;  // last: nothing throws from here on
}

// Of what ends behind the cut two chunks of each thread are looked into: the first record of the second can be a little
// older than the seal of the first.
bool Drain::is_too_late(const Held& held, Thread& thread) const {
  bool is_behind = !held.chunk->sealed || held.chunk->sealed_ticks > d_limits.cut_ticks;
  return d_limits.cut_ticks != UINT64_MAX && is_behind && ++thread.behind > 2;
}

void Drain::list_chunk(const Held& held, Thread& thread) {
  uint32_t size = held.chunk->readable_after(held.from);
  bool in_box = held.chunk->box != nullptr;
  thread.pieces.push_back(d_pieces.size());
  d_pieces.push_back(
      {held.chunk, in_box, held.from, size, held.next_index, 0, held.chunk->sealed, held.after_loss, false});
  d_bytes += size;
  if (in_box) d_copy.resize(Chunk::kCapacity);
}

// A chunk of a black box may have to make room while the drain is at work: what is decoded is a copy, of 64 KiB under
// the lock, 5 us. To keep chunks where they are until the drain is over looks cheaper, but then the box throws away
// later ones instead, or has no room at all.
const uint8_t* Drain::bytes_of(const Piece& piece) {
  if (!piece.in_box) return piece.chunk->data() + piece.from;
  std::lock_guard<std::mutex> hold(registry().mutex);
  std::memcpy(d_copy.data(), piece.chunk->data() + piece.from, piece.size);
  return d_copy.data();
}

void Drain::apply_late_ends(std::vector<ThreadDecode>& decodes, BatchBuilder& builder) {
  for (const LateEnd& end : d_late_ends) {
    auto thread = std::lower_bound(d_threads.begin(), d_threads.end(), end.thread,
                                   [](const Thread& a, uint32_t id) { return a.info.id < id; });
    if (thread == d_threads.end() || thread->info.id != end.thread) continue;
    ThreadDecode& decode = decodes[static_cast<size_t>(thread - d_threads.begin())];
    bool is_done = end.ticks <= d_limits.cut_ticks && decode.late_end(end, builder.thread_index(end.ended_on));
    if (!is_done && !d_final) d_unmatched.push_back(end);
  }
}

void Drain::decode_thread(Thread& thread, ThreadDecode& decode) {
  for (size_t at : thread.pieces) {
    Piece& piece = d_pieces[at];
    if (piece.after_loss) decode.after_loss();
    piece.reached = true;
    piece.read = decode.chunk({bytes_of(piece), piece.size, piece.next_index});
    piece.next_index = thread.decoder.next_index;
    if (piece.read < piece.size) return;
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
                        d_bytes / sizeof(otp_record_memory), d_threads.size() + d_late_ends.size(),
                        d_session->options.inputs != 0, d_session->options.contexts != 0,
                        d_session->options.memory != 0});
  if (!builder.ok()) return nullptr;
  ClockReader clock(registry().clock);
  std::vector<ThreadDecode> decodes;
  decodes.reserve(d_threads.size());
  for (Thread& thread : d_threads) {
    decodes.emplace_back(builder, thread.decoder, clock, d_limits, thread.info);
    decode_thread(thread, decodes.back());
  }
  apply_late_ends(decodes, builder);
  std::vector<uint64_t> open_rows;
  for (ThreadDecode& decode : decodes) {
    if (d_final) decode.finish_all(d_limits.stop_ticks);
    decode.keep_open(&open_rows);
  }
  std::sort(open_rows.begin(), open_rows.end());
  builder.remove_rows(open_rows);
  otp_batch* batch = builder.finish();
  batch->watermark = d_limits.cut_ticks == UINT64_MAX ? INT64_MAX : clock.unix_ns(d_limits.cut_ticks);
  return batch;
}

// Chunks that have come since have no reader; those that have one were not evicted, so they are in the old order.
void Drain::take_from_held(bool decoded) {
  Registry& all = registry();
  std::deque<Held>& held = d_session->held;
  auto kept = held.begin();
  size_t piece = 0;
  for (Held& entry : held) {
    Held next = entry;
    bool done = false;
    if (entry.reader != nullptr) {
      const Piece& read = d_pieces[piece++];
      next.reader = nullptr;
      if (decoded && read.reached) {
        next.from += read.read;
        next.next_index = read.next_index;
        next.after_loss = false;
        done = read.sealed && read.read == read.size;
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
                           std::memory_order_release);  // there is room: threads may ask again
}

void mute_roots_locked(otp_session* session, bool muted) {
  session->roots_muted = muted;
  if (session->state != State::kRunning || session->options.contexts == 0) return;
  if (muted) {
    g_shared.muted_roots.fetch_or(session->mask(), std::memory_order_relaxed);
  } else {
    g_shared.muted_roots.fetch_and(~session->mask(), std::memory_order_relaxed);
  }
}

// Without the registry's lock: a source asks torch for one of its own.
void tell_source() {
  auto* hook = g_mute_hook.load(std::memory_order_acquire);
  if (hook != nullptr) hook();
}

}  // namespace

void mute_roots(uint32_t bit, int muted) {
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    if (otp_session* session = all.sessions[bit]) mute_roots_locked(session, muted != 0);
  }
  tell_source();
}

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
  if (session->state != State::kNew || (session->box != nullptr && all.box != nullptr)) return OTP_E_STATE;
  if (!otp::take_bit(all, session)) return OTP_E_TOO_MANY_SESSIONS;
  for (auto& loss : all.losses[session->bit]) loss.store(0, std::memory_order_relaxed);
  session->state = State::kRunning;
  uint32_t mask = session->mask();
  if (session->options.inputs != 0) g_shared.requests_inputs.fetch_or(mask, std::memory_order_relaxed);
  if (session->options.devices != 0) otp::g_requests_devices.fetch_or(mask, std::memory_order_relaxed);
  if (session->options.all_threads != 0) {
    g_shared.all_threads.fetch_or(mask, std::memory_order_relaxed);
  } else {
    thread->local.fetch_or(mask, std::memory_order_relaxed);
  }
  otp::enter_contexts_locked(session);
  if (session->box != nullptr) otp::open_box_locked(all, session);
  session->start_epoch = g_shared.epoch.fetch_add(1, std::memory_order_release) + 1;
  session->start_ticks = otp::ticks_now();
  for (uint32_t kind = 0; kind < OTP_EVENT_KINDS; ++kind) {
    bool requested = kind == 0 || session->options.kinds == 0 || (session->options.kinds >> kind & 1) != 0;
    if (requested) g_shared.active[kind].fetch_or(mask, std::memory_order_release);
  }
  if (session->options.memory != 0) g_shared.requests_memory.fetch_or(mask, std::memory_order_release);
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
  {
    std::lock_guard<std::mutex> hold(registry().mutex);
    otp::mute_roots_locked(session, muted != 0);
  }
  otp::tell_source();
  return OTP_OK;
}

// A thread that comes while another one tells it tells it, too: it must not continue before the source has heard.
void otp_expect_contexts(void) {
  constexpr uint32_t kTold = 2;
  if (g_shared.has_contexts.load(std::memory_order_acquire) == kTold) return;
  g_shared.has_contexts.store(1, std::memory_order_relaxed);
  otp::tell_source();
  g_shared.has_contexts.store(kTold, std::memory_order_release);
}

int otp_session_reserve(otp_session* session, int reserved) {
  if (otp::forked(session)) return OTP_E_FORKED;
  std::lock_guard<std::mutex> hold(registry().mutex);
  session->bit_reserved = reserved != 0;
  otp::give_back_bit_locked(registry(), session);
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
    session->bit_reserved = false;
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
  out->bytes_buffered = session->bytes_buffered;
  out->bytes_buffered_max = session->bytes_buffered_max;
  if (session->state == State::kNew) return OTP_OK;
  out->start_ns = all.clock.unix_ns(session->start_ticks);
  bool stopped = session->state == State::kStopped;
  if (stopped) out->stop_ns = all.clock.unix_ns(session->stop_ticks);
  for (uint32_t i = 0; i < OTP_LOSS_REASONS; ++i)
    out->dropped[i] = stopped ? session->losses[i] : all.losses[session->bit][i].load(std::memory_order_relaxed);
  return OTP_OK;
}

int otp_session_drain(otp_session* session, uint64_t max_bytes, otp_batch** out) {
  if (otp::forked(session)) return OTP_E_FORKED;
  {
    std::lock_guard<std::mutex> hold(registry().mutex);
    if (session->state == State::kNew || session->draining) return OTP_E_STATE;
    session->draining = true;
  }
  return otp::Drain(session, max_bytes).run(out);
}

int otp_session_discard(otp_session* session) try {
  if (otp::forked(session)) return OTP_E_FORKED;
  std::lock_guard<std::mutex> hold(registry().mutex);
  if (session->state != State::kStopped || session->draining) return OTP_E_STATE;
  session->losses[OTP_LOSS_DEADLINE] += otp::undrained_events(session);
  otp::release_all_locked(registry(), session);
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

}  // extern "C"
