#include "core/registry.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>

namespace otp {

hot::Shared g_shared;
std::atomic<const otp_context_carrier*> g_context_carrier{nullptr};
std::atomic<uint32_t> g_requests_devices{0};
std::atomic<const otp_device_source*> g_device_source{nullptr};
std::atomic<void (*)()> g_mute_hook{nullptr};
std::atomic<uint32_t> g_generation{0};

// initial-exec: the address is a constant distance from the thread pointer. The default model of a shared library calls
// __tls_get_addr for every access, twice per event. It takes 8 bytes of the static space that the C library keeps for
// libraries loaded late.
__thread ThreadBuffer* t_buffer = nullptr;

namespace {

// Static, so that a forked child without memory has one too.
alignas(Registry) unsigned char g_memory[sizeof(Registry)];
std::atomic<Registry*> g_registry{nullptr};

// GIANT COMMENT: why the destructor of a thread-local does nothing but mark.
//
// Torch, Python and the C library run code while a thread is torn down, in an order that nobody promises; some of it
// runs operators. A buffer that is freed in its destructor and made anew by such a late operator would be made while
// its destructor has already run: it is never closed, its chunk is never sealed, and the next thread that gets the same
// memory writes into it. So the buffer's life is a reference count under the registry's lock, `t_buffer` is a plain
// pointer without destructor, and once this guard has gone `t_gone` keeps the thread from ever having a buffer again.
thread_local bool t_gone __attribute__((tls_model("initial-exec"))) = false;

struct ThreadGuard {
  uint32_t generation = 0;
  ~ThreadGuard() {
    ThreadBuffer* buffer = t_buffer;
    t_buffer = nullptr;
    t_gone = true;
    if (buffer == nullptr || generation != g_generation.load(std::memory_order_relaxed)) return;
    Registry& all = registry();
    std::lock_guard<std::mutex> hold(all.mutex);
    buffer->exited = true;
    all.seal_chunk(buffer);
    all.release_reference(buffer);
  }
};
thread_local ThreadGuard t_guard;

// The child has one thread, and that thread may have been anywhere in torch when it forked. Nothing is locked, freed or
// allocated here.
void after_fork_in_child() {
  if (g_registry.load(std::memory_order_relaxed) == nullptr) return;
  for (auto& kind : g_shared.active) kind.store(0, std::memory_order_relaxed);
  g_shared.all_threads.store(0, std::memory_order_relaxed);
  g_shared.requests_inputs.store(0, std::memory_order_relaxed);
  g_shared.requests_memory.store(0, std::memory_order_relaxed);
  g_requests_devices.store(0, std::memory_order_relaxed);
  g_shared.follows.store(0, std::memory_order_relaxed);
  g_shared.muted_roots.store(0, std::memory_order_relaxed);
  g_shared.epoch.fetch_add(1, std::memory_order_relaxed);
  g_generation.fetch_add(1, std::memory_order_relaxed);
  t_buffer = nullptr;
  g_box_is_open.store(0, std::memory_order_relaxed);
  GuardedMapping::abandon_all_in_child();
  new (g_memory) Registry;
}

void fill_thread_info(otp_thread* info, uint32_t id) {
  info->ident = static_cast<uint64_t>(pthread_self());
  info->os_tid = static_cast<uint32_t>(syscall(SYS_gettid));
  info->id = id;
  pthread_getname_np(pthread_self(), info->name, sizeof info->name);
}

}  // namespace

Registry& registry() noexcept {
  Registry* current = g_registry.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static std::once_flag once;
  std::call_once(once, [] {
    g_registry.store(new (g_memory) Registry, std::memory_order_release);
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  return *g_registry.load(std::memory_order_acquire);
}

ThreadBuffer* this_thread_slowpath() {
  if (t_gone) return nullptr;
  Registry& all = registry();
  std::unique_ptr<ThreadBuffer> buffer(new (std::nothrow) ThreadBuffer);
  if (buffer == nullptr) return nullptr;
  t_guard.generation = g_generation.load(std::memory_order_relaxed);
  std::lock_guard<std::mutex> hold(all.mutex);
  try {
    all.threads.push_back(buffer.get());
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  buffer->id = ++all.last_thread_id;
  fill_thread_info(&buffer->info, buffer->id);
  return t_buffer = buffer.release();
}

ThreadBuffer* Registry::find_thread(uint32_t id, uint32_t source_tid) {
  if (id == 0 && source_tid == 0) return nullptr;
  for (ThreadBuffer* thread : threads) {
    if (id != 0 ? thread->id == id : thread->source_tid.get() == source_tid) return thread;
  }
  return nullptr;
}

void Registry::release_reference(ThreadBuffer* thread) {
  if (--thread->references > 0) return;
  threads.erase(std::find(threads.begin(), threads.end(), thread));
  delete thread;
}

void Registry::seal_chunk(ThreadBuffer* thread) {
  Chunk* chunk = thread->open_chunk;
  if (chunk == nullptr) return;
  thread->chunk = nullptr;
  thread->open_chunk = nullptr;
  thread->accepted = 0;
  chunk->sealed = true;
  chunk->sealed_ticks = ticks_now();
  if (chunk->holders == 0) pool.give_back(chunk);
}

void Registry::release(otp_session* session, Chunk* chunk) {
  session->bytes_buffered -= OTP_CHUNK_BYTES;
  --session->cursors.find(chunk->owner)->second.chunks;
  chunk->holders &= ~session->mask();
  if (chunk->holders == 0 && chunk->sealed) pool.give_back(chunk);
}

void Registry::forget_held(otp_session* session) {
  for (const Held& held : session->held) release(session, held.chunk);
  session->held.clear();
}

void Registry::forget_cursor(otp_session* session, ThreadBuffer* thread) {
  session->cursors.erase(thread);
  release_reference(thread);
}

void Registry::count_loss(uint32_t consumers, otp_loss reason, uint64_t events) {
  for (uint32_t rest = consumers; rest != 0; rest &= rest - 1)
    losses[__builtin_ctz(rest)][reason].fetch_add(events, std::memory_order_relaxed);
}

// Counts what the session loses with a chunk, and saves the ends of events that it has already, or will have: their
// begins were drained, or lie in an older chunk that is being read.
void Registry::account_eviction(otp_session* session, std::deque<Held>::iterator evicted, Cursor& cursor) {
  ThreadBuffer* owner = evicted->chunk->owner;
  auto is_owners = [owner](const Held& held) { return held.chunk->owner == owner; };
  const uint8_t* data = evicted->chunk->data() + evicted->from;
  uint32_t size = evicted->chunk->readable_after(evicted->from);
  std::vector<LateEnd> ends;
  uint64_t lost = scan_lost({data, size, evicted->next_index}, session->mask(), &ends);
  session->late_ends.reserve(session->late_ends.size() + ends.size());
  auto oldest = std::find_if(session->held.begin(), session->held.end(), is_owners);
  const std::vector<PendingEvent>& pending = cursor.decoder.pending;
  for (LateEnd& end : ends) {
    auto is_it = [&end](const PendingEvent& open) { return open.index == end.index; };
    if (end.index < oldest->next_index && std::none_of(pending.begin(), pending.end(), is_it)) continue;
    end.thread = owner->id;
    end.ended_on = owner->info;
    end.ended_on.source_tid = owner->source_tid.get();
    session->late_ends.push_back(end);
  }
  count_loss(session->mask(), OTP_LOSS_EVICTED, lost);
  if (lost == 0 && !evicted->after_loss) return;
  auto next = std::find_if(evicted + 1, session->held.end(), is_owners);
  (next == session->held.end() ? cursor.after_loss : next->after_loss) = true;
}

void Registry::forget(otp_session* session, std::deque<Held>::iterator held) {
  Chunk* chunk = held->chunk;
  ThreadBuffer* owner = chunk->owner;
  session->held.erase(held);
  release(session, chunk);
  // Or a session that nobody drains would keep every thread that ever was.
  const Cursor& cursor = session->cursors.find(owner)->second;
  if (owner->exited && cursor.chunks == 0 && cursor.decoder.pending.empty() && !session->draining)
    forget_cursor(session, owner);
}

// Throws away the oldest chunk that the session's drain does not read and nobody writes.
bool Registry::evict_oldest(otp_session* session) {
  auto it = std::find_if(session->held.begin(), session->held.end(),
                         [](const Held& held) { return held.chunk->sealed && held.reader == nullptr; });
  if (it == session->held.end()) return false;
  account_eviction(session, it, session->cursors.find(it->chunk->owner)->second);
  forget(session, it);
  return true;
}

Cursor& Registry::cursor_of(otp_session* session, ThreadBuffer* thread) {
  auto [cursor, is_new] = session->cursors.try_emplace(thread);
  if (is_new) ++thread->references;
  return cursor->second;
}

bool Registry::hold(otp_session* session, Chunk* chunk, uint32_t read_from) {
  while (session->bytes_buffered + OTP_CHUNK_BYTES > session->options.budget_bytes) {
    if (session->options.full_policy != OTP_FULL_DROP_OLDEST || !evict_oldest(session)) return false;
  }
  session->held.push_back({chunk, chunk->owner->next_index.get(), read_from, false, nullptr});
  Cursor* cursor = nullptr;
  try {
    cursor = &cursor_of(session, chunk->owner);
  } catch (const std::bad_alloc&) {
    session->held.pop_back();
    throw;
  }
  std::swap(session->held.back().after_loss, cursor->after_loss);
  ++cursor->chunks;
  if (session->options.contexts != 0) chunk->owner->context_pending |= session->mask();
  chunk->holders |= session->mask();
  session->bytes_buffered += OTP_CHUNK_BYTES;
  session->bytes_buffered_max = std::max(session->bytes_buffered_max, session->bytes_buffered);
  return true;
}

}  // namespace otp
