// SIGTERM under its default action: a bounded time for a flush, then the process ends as it would have.
#include "otel_torchprof/sigterm.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <new>

#include "otel_torchprof/recorder.h"

namespace {

enum State : int { kOff, kWatching, kReceived, kFlushed };

// Supervisors that signal a whole process group or cgroup (systemd, Slurm), and launchers that pass theirs on
// (torchrun), make two of one request. Who insists takes longer.
constexpr int64_t kSameRequestNs = 1'000'000'000;
constexpr timespec kLook{0, 5'000'000};

// Never destroyed: a handler may run, and the threads may wait, until the process has ended.
struct Watch {
  std::atomic<int> state{kOff};
  std::atomic<pid_t> pid{0};
  std::atomic<int64_t> received_ns{INT64_MAX};
  int64_t flush_ns = 0;
  sem_t received;
  sem_t flush;
  pthread_t watchdog{};
  std::mutex control;
  bool usable;

  Watch() : usable(sem_init(&received, 0, 0) == 0 && sem_init(&flush, 0, 0) == 0) {}
};
Watch g_watch;
static_assert(std::atomic<int64_t>::is_always_lock_free, "the handler takes no lock");

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void on_sigterm(int);

void set_action(void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigfillset(&action.sa_mask);
  sigaction(SIGTERM, &action, nullptr);
}

bool action_is(void (*handler)(int)) {
  struct sigaction action{};
  return sigaction(SIGTERM, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
         action.sa_handler == handler;
}

// Calls async-signal-safe functions only. The process is asked and not the inherited state: a child made without
// libc's fork has the handler but no watchdog.
void on_sigterm(int) {
  int saved = errno;
  int64_t now = monotonic_ns();
  int state = kWatching;
  bool is_watched = g_watch.pid.load() == getpid();
  if (is_watched && g_watch.state.compare_exchange_strong(state, kReceived)) {
    g_watch.received_ns.store(now);
    sem_post(&g_watch.received);
  } else if (!is_watched || state == kOff || now - g_watch.received_ns.load() >= kSameRequestNs) {
    set_action(SIG_DFL);
    kill(getpid(), SIGTERM);
  }
  errno = saved;
}

// Returns where the process does not end: true in the first one of a PID namespace (a container's), for which the
// kernel ignores default actions; false where the program has set a handler meanwhile, which gets the signal.
bool end_process() {
  bool is_ours = action_is(on_sigterm);
  // Not left to the kernel: it ends the process all the same where the main thread is in a handler, which blocks the
  // signal, while this thread does not.
  if (is_ours && getpid() == 1) return true;
  if (is_ours) {
    set_action(SIG_DFL);
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &term, nullptr);  // all other threads may have it blocked
  } else {
    g_watch.state.store(kOff);  // first: that handler may call the one before it, which is this one
  }
  kill(getpid(), SIGTERM);
  return is_ours;
}

void watch_again() {
  set_action(on_sigterm);
  g_watch.received_ns.store(INT64_MAX);
  g_watch.state.store(kWatching);
}

void block_signals(sigset_t* before) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, before);
}

void* watch_over(void*) {
  for (;;) {
    while (sem_wait(&g_watch.received) != 0) {
    }
    if (g_watch.state.load() == kOff) return nullptr;
    int64_t end = g_watch.received_ns.load() + g_watch.flush_ns;
    sem_post(&g_watch.flush);
    // Looks instead of waiting for a semaphore: sem_timedwait goes by the wall clock, which may be set.
    while (g_watch.state.load() == kReceived && monotonic_ns() < end) nanosleep(&kLook, nullptr);
    if (!end_process()) break;
    block_signals(nullptr);
    watch_again();
  }
  pthread_detach(pthread_self());  // nobody joins it
  sem_post(&g_watch.flush);
  return nullptr;
}

bool start_watchdog() {
  sigset_t before;
  block_signals(&before);
  bool started = pthread_create(&g_watch.watchdog, nullptr, watch_over, nullptr) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void after_fork_in_child() {
  if (action_is(on_sigterm)) set_action(SIG_DFL);
  new (&g_watch) Watch;
}

}  // namespace

extern "C" {

int otp_sigterm_watch(uint32_t flush_ms) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
  std::lock_guard<std::mutex> hold(g_watch.control);
  if (g_watch.state.load() != kOff) return OTP_E_STATE;
  if (!action_is(SIG_DFL)) return 0;
  if (!g_watch.usable) return OTP_E_NO_MEMORY;
  g_watch.pid.store(getpid());
  g_watch.flush_ns = flush_ms * int64_t{1'000'000};
  g_watch.received_ns.store(INT64_MAX);
  g_watch.state.store(kWatching);
  if (!start_watchdog()) {
    g_watch.state.store(kOff);
    return OTP_E_NO_MEMORY;
  }
  set_action(on_sigterm);
  return 1;
}

int otp_sigterm_wait(void) {
  for (;;) {
    while (sem_wait(&g_watch.flush) != 0) {
    }
    int state = g_watch.state.load();
    if (state == kOff) return 0;
    if (state == kReceived) return 1;
  }
}

void otp_sigterm_flushed(void) {
  int received = kReceived;
  g_watch.state.compare_exchange_strong(received, kFlushed);
}

int otp_sigterm_unwatch(void) {
  std::lock_guard<std::mutex> hold(g_watch.control);
  int state = kWatching;
  if (!g_watch.state.compare_exchange_strong(state, kOff)) return state == kOff ? 0 : 1;
  if (action_is(on_sigterm)) set_action(SIG_DFL);
  sem_post(&g_watch.received);
  pthread_join(g_watch.watchdog, nullptr);
  sem_post(&g_watch.flush);
  return 0;
}

}  // extern "C"
