#include "otel_torchprof/hang_watch.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <new>
#include <string_view>

#include "core/guarded_mapping.h"
#include "core/registry.h"

namespace otp {

namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kLongestLook = kSecond;
constexpr uint64_t kPatience = 10;  // times the longest pause
constexpr uint64_t kMillisecond = 1'000'000;

using WriteStacks = uint32_t (*)(uint32_t os_tid, char* text, uint32_t bytes);

// Never destroyed (it has no destructor to run): its threads may wait until the process has ended.
struct Watch {
  std::mutex control;
  std::atomic<bool> watching{false};
  std::atomic<uint32_t> hanging{0};  // a thread, until somebody has waited for it
  uint64_t limit_ns = 0, long_limit_ns = 0;
  WriteStacks write_stacks = nullptr;
  pthread_t thread{};
  sem_t wake;  // the watching thread
  sem_t seen;  // who waits
  char stacks[OTP_BLACKBOX_STACKS_BYTES];

  Watch() {
    sem_init(&wake, 0, 0);
    sem_init(&seen, 0, 0);
  }
};
Watch g_watch;

uint64_t now_ns() { return clock_gettime_ns(CLOCK_MONOTONIC); }

// False where it was woken. By the wall clock, which may be set: a look then comes sooner or later.
bool rest(sem_t* wake, uint64_t ns) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  uint64_t sum = static_cast<uint64_t>(until.tv_nsec) + ns;
  until.tv_sec += static_cast<time_t>(sum / kSecond);
  until.tv_nsec = static_cast<long>(sum % kSecond);
  while (sem_timedwait(wake, &until) != 0)
    if (errno != EINTR) return true;
  return false;
}

// Whether the names of what is open say that it may take long.
bool takes_long(std::string_view name) {
  for (std::string_view word : {"compil", "checkpoint", "save", "setup"})
    if (name.find(word) != std::string_view::npos) return true;
  return false;
}

// How long the thread may do nothing; 0: as long as it likes.
uint64_t limit_locked(Registry& all, const Watch& watch, ThreadBuffer& thread, const Progress& progress) {
  bool is_main = thread.info.os_tid == static_cast<uint32_t>(getpid()), is_loop = is_main, is_long = false;
  uint32_t count = all.box->list_open(thread, all.box_session->mask(), Chunk::kCapacity);
  // Between two steps of a rank nothing is open; a program without ranks may have come to its end, and idle.
  if (count == 0 && !(is_main && all.box->has_collectives())) return 0;
  for (uint32_t i = 0; i < count; ++i) {
    const otp_record& head = all.box->listed(i).begin.head;
    is_loop = is_loop || head.detail >> 4 == OTP_EVENT_PHASE;
    is_long = is_long || takes_long(all.interner.text(head.value));
  }
  uint64_t timeout = all.box->pending_timeout_ms(thread.info.os_tid) * kMillisecond;
  if (!is_loop && timeout == 0) return 0;
  uint64_t limit = std::max(watch.limit_ns, std::min(kPatience * progress.longest_ns, watch.long_limit_ns));
  if (is_long) limit = std::max(limit, watch.long_limit_ns);
  return timeout == 0 ? limit : std::min(limit, timeout / 5 * 4);  // while there is something to be read yet
}

// The first thread that has come to its limit, by the system's id; 0: none. Notes it in the box.
uint32_t look(const Watch& watch) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box == nullptr) return 0;
  GuardedMapping::guard_again();
  uint64_t now = now_ns();
  for (ThreadBuffer* thread : all.threads) {
    Progress& progress = thread->progress;
    const Chunk* chunk = thread->open_chunk;
    uint64_t sequence = chunk == nullptr ? 0 : chunk->sequence;
    uint64_t published = chunk == nullptr ? 0 : chunk->readable_bytes();
    uint64_t depth = thread->depth.get();
    bool same = sequence == progress.chunk && published == progress.published && depth == progress.depth;
    if (!same || progress.since_ticks == 0) {
      if (progress.in_loop) progress.longest_ns = std::max(progress.longest_ns, now - progress.since_ns);
      progress = {sequence, published, depth, ticks_now(), now, progress.longest_ns, false, false};
      continue;
    }
    uint64_t for_ns = now - progress.since_ns, limit = limit_locked(all, watch, *thread, progress);
    progress.in_loop = progress.in_loop || limit != 0;
    if (progress.reported || limit == 0 || for_ns < limit) continue;
    progress.reported = true;
    all.clock.calibrate();  // the image says that the process lived until now, whatever its last event was
    all.box->set_hang(thread->info.os_tid, progress.since_ticks);
    return thread->info.os_tid;
  }
  return 0;
}

// Without the lock: it reads what other threads are in.
void keep_stacks(Watch& watch, uint32_t hanging) {
  if (watch.write_stacks == nullptr) return;
  uint32_t size = watch.write_stacks(hanging, watch.stacks, sizeof watch.stacks);
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box != nullptr && size != 0) all.box->set_stacks({watch.stacks, size});
}

void* watch_over(void* argument) {
  auto& watch = *static_cast<Watch*>(argument);
  uint64_t between = std::clamp(watch.limit_ns / 8, uint64_t{1'000'000}, kLongestLook);
  while (watch.watching.load()) {
    rest(&watch.wake, between);
    uint32_t hanging = look(watch);
    if (hanging == 0 || !watch.watching.load()) continue;
    keep_stacks(watch, hanging);
    watch.hanging.store(hanging);
    sem_post(&watch.seen);
  }
  return nullptr;
}

// With signals blocked: handlers of the program are for its own threads. But for SIGBUS, which the box's memory may
// raise.
bool start_thread(Watch& watch) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = pthread_create(&watch.thread, nullptr, watch_over, &watch) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void after_fork_in_child() { new (&g_watch) Watch; }

void forget_progress() {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  for (ThreadBuffer* thread : all.threads) thread->progress = {};
}

}  // namespace
}  // namespace otp

extern "C" {

int otp_hang_watch_start(uint64_t limit_ns, uint64_t long_limit_ns, uint64_t write_stacks) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, otp::after_fork_in_child); });
  otp::forget_progress();  // makes the registry too, whose handler of forks has to come first
  otp::Watch& watch = otp::g_watch;
  std::lock_guard<std::mutex> hold(watch.control);
  if (watch.watching.load()) return OTP_E_STATE;
  watch.limit_ns = limit_ns;
  watch.long_limit_ns = long_limit_ns;
  watch.write_stacks = reinterpret_cast<otp::WriteStacks>(static_cast<uintptr_t>(write_stacks));
  watch.watching.store(true);
  if (otp::start_thread(watch)) return OTP_OK;
  watch.watching.store(false);
  return OTP_E_NO_MEMORY;
}

uint32_t otp_hang_watch_wait(void) {
  otp::Watch& watch = otp::g_watch;
  while (watch.watching.load()) {
    while (sem_wait(&watch.seen) != 0) {
    }
    uint32_t hanging = watch.hanging.exchange(0);
    if (hanging != 0) return hanging;
  }
  return 0;
}

void otp_hang_watch_stop(void) {
  otp::Watch& watch = otp::g_watch;
  std::lock_guard<std::mutex> hold(watch.control);
  if (!watch.watching.exchange(false)) return;
  sem_post(&watch.wake);
  sem_post(&watch.seen);
  pthread_join(watch.thread, nullptr);
}

}  // extern "C"
