#include "core/registry.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>

namespace otp {

SharedState g_shared;

// initial-exec: the address is a constant distance from the thread pointer. The default model of a shared library calls
// __tls_get_addr for every access, twice per event. It takes 8 bytes of the static space that the C library keeps for
// libraries loaded late.
thread_local ThreadBuffer* t_buffer = nullptr;

namespace {

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
    if (buffer == nullptr || generation != g_shared.generation.load(std::memory_order_relaxed)) return;
    Registry& all = registry();
    std::lock_guard<std::mutex> hold(all.mutex);
    buffer->exited = true;
    if (buffer->chunk != nullptr) {
      buffer->chunk->sealed = true;
      if (buffer->chunk->holders == 0 && buffer->chunk->pins == 0) all.pool.give_back(buffer->chunk);
      buffer->chunk = nullptr;
    }
    all.release_reference(buffer);
  }
};
thread_local ThreadGuard t_guard;

// The child has one thread, and that thread may have been anywhere in torch when it forked. Nothing is locked or freed
// here.
void after_fork_in_child() {
  if (g_registry.load(std::memory_order_relaxed) == nullptr) return;
  g_shared.active.store(0, std::memory_order_relaxed);
  g_shared.all_threads.store(0, std::memory_order_relaxed);
  g_shared.wants_inputs.store(0, std::memory_order_relaxed);
  g_shared.epoch.fetch_add(1, std::memory_order_relaxed);
  g_shared.generation.fetch_add(1, std::memory_order_relaxed);
  t_buffer = nullptr;
  g_registry.store(new Registry, std::memory_order_release);
}

void fill_thread_info(otp_thread* info, uint32_t id) {
  info->ident = static_cast<uint64_t>(pthread_self());
  info->os_tid = static_cast<uint32_t>(syscall(SYS_gettid));
  info->id = id;
  pthread_getname_np(pthread_self(), info->name, sizeof info->name);
}

}  // namespace

Registry& registry() {
  Registry* current = g_registry.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static std::once_flag once;
  std::call_once(once, [] {
    g_registry.store(new Registry, std::memory_order_release);
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  return *g_registry.load(std::memory_order_acquire);
}

ThreadBuffer* this_thread_slowpath() {
  if (t_gone) return nullptr;
  auto* buffer = new (std::nothrow) ThreadBuffer;
  if (buffer == nullptr) return nullptr;
  t_guard.generation = g_shared.generation.load(std::memory_order_relaxed);
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  buffer->id = ++all.last_thread_id;
  fill_thread_info(&buffer->info, buffer->id);
  all.threads.push_back(buffer);
  t_buffer = buffer;
  return buffer;
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

void Registry::release(otp_session* session, Chunk* chunk) {
  session->bytes_held -= OTP_CHUNK_BYTES;
  chunk->holders &= ~session->mask();
  if (chunk->holders == 0 && chunk->sealed && chunk->pins == 0) pool.give_back(chunk);
}

void Registry::forget_held(otp_session* session) {
  for (Chunk* chunk : session->held) release(session, chunk);
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

// Throws away the oldest chunk that nobody is reading or writing, and counts what the session loses with it.
bool Registry::evict_oldest(otp_session* session) {
  for (auto it = session->held.begin(); it != session->held.end(); ++it) {
    Chunk* chunk = *it;
    if (!chunk->sealed || chunk->pins != 0) continue;
    Cursor& cursor = session->cursors.at(chunk->owner);
    uint32_t from = cursor.chunk == chunk ? cursor.offset : 0;
    uint32_t size = chunk->committed.load(std::memory_order_acquire) - from;
    count_loss(session->mask(), OTP_LOSS_EVICTED, count_begins(chunk->data() + from, size, session->mask()));
    if (cursor.chunk == chunk) cursor.chunk = nullptr;
    cursor.skipped = true;
    session->held.erase(it);
    release(session, chunk);
    return true;
  }
  return false;
}

bool Registry::hold(otp_session* session, Chunk* chunk, uint32_t read_from) {
  while (session->bytes_held + OTP_CHUNK_BYTES > session->options.budget_bytes) {
    if (session->options.full_policy != OTP_FULL_DROP_OLDEST || !evict_oldest(session)) return false;
  }
  auto [cursor, is_new] = session->cursors.try_emplace(chunk->owner);
  if (is_new) ++chunk->owner->references;
  if (read_from != 0) {
    cursor->second.chunk = chunk;
    cursor->second.offset = read_from;
    cursor->second.decoder.next_index = chunk->owner->next_index;
  }
  chunk->holders |= session->mask();
  session->held.push_back(chunk);
  session->bytes_held += OTP_CHUNK_BYTES;
  session->bytes_held_max = std::max(session->bytes_held_max, session->bytes_held);
  return true;
}

}  // namespace otp
