#include "otel_torchprof/hang_watch.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "core/guarded_mapping.h"
#include "core/hang_report.h"
#include "core/registry.h"

namespace otp {

namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kLongestLook = kSecond;
constexpr uint64_t kPatience = 10;  // times the longest pause
constexpr uint64_t kMillisecond = 1'000'000;
constexpr uint64_t kLogging = 3 * kSecond;  // that a process which is to end has for its log record

using WriteStacks = uint32_t (*)(uint32_t os_tid, char* text, uint32_t bytes);

// Never destroyed (it has no destructor to run): its threads may wait until the process has ended.
struct Watch {
  std::mutex control;
  std::atomic<bool> watching{false};
  std::atomic<uint32_t> hanging{0};  // a thread, until somebody has waited for it
  uint64_t limit_ns = 0, long_limit_ns = 0;
  uint64_t between_ns = 0;             // two looks
  uint64_t looked_ns = 0, run_ns = 0;  // the last one; the time until then that counts
  uint64_t quiet_until_ns = 0;         // of that time
  WriteStacks write_stacks = nullptr;
  HangReport* report = nullptr;
  int exit_status = 0;
  pthread_t thread{};
  sem_t wake;    // the watching thread
  sem_t seen;    // who waits
  sem_t logged;  // who waited has done so
  char stacks[OTP_BLACKBOX_STACKS_BYTES];
  std::mutex saying;
  char line[HangReport::kLine] = "";  // of the last hang

  Watch() {
    for (sem_t* each : {&wake, &seen, &logged}) sem_init(each, 0, 0);
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

// Whether a debugger is attached to this process.
bool is_traced() {
  char text[2048];
  int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[std::max<ssize_t>(size, 0)] = 0;
  constexpr std::string_view kTracer = "TracerPid:";
  size_t at = std::string_view(text).find(kTracer);
  return at != std::string_view::npos && std::strtol(text + at + kTracer.size(), nullptr, 10) != 0;
}

// The time that counts: not that in which the process is stopped, its machine sleeps, or a debugger holds it.
uint64_t advance(Watch& watch) {
  uint64_t now = now_ns();
  if (!is_traced()) watch.run_ns += std::min(now - watch.looked_ns, 2 * watch.between_ns);
  watch.looked_ns = now;
  return watch.run_ns;
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
  if (count == 0 && !(is_main && all.box->main_has_collectives())) return 0;
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

// What the thread has done so far.
Progress progress_of(const ThreadBuffer& thread) {
  const Chunk* chunk = thread.open_chunk;
  Progress found;
  found.chunk = chunk == nullptr ? 0 : chunk->sequence;
  found.published = chunk == nullptr ? 0 : chunk->readable_bytes();
  found.depth = thread.depth.get();
  found.collectives = thread.collectives;
  return found;
}

bool is_same(const Progress& one, const Progress& other) {
  return one.chunk == other.chunk && one.published == other.published && one.depth == other.depth &&
         one.collectives == other.collectives;
}

struct Hang {
  uint32_t os_tid = 0;  // 0: none
  uint64_t idle_ns = 0;
};

// The first thread that has come to its limit. Notes it in the box.
Hang look(Watch& watch) {
  uint64_t now = advance(watch);
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box == nullptr) return {};
  GuardedMapping::guard_again();
  for (ThreadBuffer* thread : all.threads) {
    Progress& progress = thread->progress;
    Progress found = progress_of(*thread);
    if (!is_same(found, progress) || progress.since_ticks == 0) {
      found.longest_ns = progress.longest_ns;
      if (progress.in_loop) found.longest_ns = std::max(progress.longest_ns, now - progress.since_ns);
      found.since_ticks = ticks_now();
      found.since_ns = now;
      progress = found;
      continue;
    }
    uint64_t for_ns = now - progress.since_ns, limit = limit_locked(all, watch, *thread, progress);
    progress.in_loop = progress.in_loop || limit != 0;
    if (progress.reported || limit == 0 || for_ns < limit || now < watch.quiet_until_ns) continue;
    progress.reported = true;
    all.clock.calibrate();  // the image says that the process lived until now, whatever its last event was
    all.box->set_hang(thread->info.os_tid, progress.since_ticks);
    return {thread->info.os_tid, for_ns};
  }
  return {};
}

bool still_hangs(const Watch& watch, const Hang& hang) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  for (const ThreadBuffer* thread : all.threads)
    if (thread->info.os_tid == hang.os_tid && thread->progress.reported)
      return watch.watching.load() && is_same(progress_of(*thread), thread->progress);
  return false;
}

// What the thread waits for moves: it is looked at again later.
void be_quiet(Watch& watch, const Hang& hang) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  for (ThreadBuffer* thread : all.threads)
    if (thread->info.os_tid == hang.os_tid) thread->progress.reported = false;
  watch.quiet_until_ns = watch.run_ns + watch.limit_ns / 2;
}

// Without the lock: it reads what other threads are in.
void keep_stacks(Watch& watch, uint32_t hanging) {
  if (watch.write_stacks == nullptr) return;
  uint32_t size = watch.write_stacks(hanging, watch.stacks, sizeof watch.stacks);
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box != nullptr && size != 0) all.box->set_stacks({watch.stacks, size});
}

// On stderr, and for who waits; then the process ends, where it is to.
void say(Watch& watch, const Hang& hang, std::string_view found) {
  char line[HangReport::kLine + 256], end[64] = "";
  if (watch.exit_status != 0) std::snprintf(end, sizeof end, "; this process ends with status %d", watch.exit_status);
  {
    std::lock_guard<std::mutex> hold(watch.saying);
    std::snprintf(watch.line, sizeof watch.line, "%.*s", static_cast<int>(found.size()), found.data());
    int size = std::snprintf(line, sizeof line, "otel-torchprof: %s%s\n", watch.line, end);
    write_to_stderr({line, static_cast<size_t>(size)});
  }
  watch.hanging.store(hang.os_tid);
  sem_post(&watch.seen);
  if (watch.exit_status == 0) return;
  rest(&watch.logged, kLogging);
  if (still_hangs(watch, hang)) _exit(watch.exit_status);
}

void report(Watch& watch, const Hang& hang) {
  char text[256];
  int size = std::snprintf(text, sizeof text,
                           "hang: thread %u of process %d has begun and ended nothing for %.0f s; what it had begun is "
                           "in the black box, if that is in a folder: otel-torchprof autopsy",
                           hang.os_tid, static_cast<int>(getpid()), static_cast<double>(hang.idle_ns) / kSecond);
  std::string_view line(text, static_cast<size_t>(size)), found;
  HangReport::Answer answer = watch.report->ask(hang.idle_ns, watch.watching, &found);
  if (answer == HangReport::Answer::kNoHang) be_quiet(watch, hang);
  if (answer == HangReport::Answer::kHang) line = found;
  bool is_new = answer == HangReport::Answer::kHang || answer == HangReport::Answer::kNone;
  if (is_new && still_hangs(watch, hang)) say(watch, hang, line);
}

void* watch_over(void* argument) {
  auto& watch = *static_cast<Watch*>(argument);
  watch.looked_ns = now_ns();
  while (watch.watching.load()) {
    rest(&watch.wake, watch.between_ns);
    Hang hang = look(watch);
    if (hang.os_tid == 0 || !watch.watching.load()) continue;
    keep_stacks(watch, hang.os_tid);
    report(watch, hang);
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

int otp_hang_watch_start(const otp_hang_options* options) try {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, otp::after_fork_in_child); });
  otp::forget_progress();  // makes the registry too, whose handler of forks has to come first
  otp::Watch& watch = otp::g_watch;
  std::lock_guard<std::mutex> hold(watch.control);
  if (watch.watching.load()) return OTP_E_STATE;
  std::vector<std::string> command;
  for (const char* const* word = options->command; word != nullptr && *word != nullptr; ++word)
    command.emplace_back(*word);
  delete watch.report;
  watch.report = nullptr;
  watch.report = new otp::HangReport(std::move(command), options->report == nullptr ? "" : options->report);
  watch.limit_ns = options->limit_ns;
  watch.long_limit_ns = options->long_limit_ns;
  watch.between_ns = std::clamp(watch.limit_ns / 8, uint64_t{1'000'000}, otp::kLongestLook);
  watch.run_ns = watch.quiet_until_ns = 0;
  watch.exit_status = options->exit_status;
  watch.write_stacks = reinterpret_cast<otp::WriteStacks>(static_cast<uintptr_t>(options->write_stacks));
  watch.watching.store(true);
  if (otp::start_thread(watch)) return OTP_OK;
  watch.watching.store(false);
  return OTP_E_NO_MEMORY;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

uint32_t otp_hang_watch_wait(char* line, uint32_t bytes) {
  otp::Watch& watch = otp::g_watch;
  while (watch.watching.load()) {
    while (sem_wait(&watch.seen) != 0) {
    }
    uint32_t hanging = watch.hanging.exchange(0);
    if (hanging == 0) continue;
    std::lock_guard<std::mutex> hold(watch.saying);
    std::snprintf(line, bytes, "%s", watch.line);
    return hanging;
  }
  return 0;
}

void otp_hang_watch_logged(void) { sem_post(&otp::g_watch.logged); }

void otp_hang_watch_stop(void) {
  otp::Watch& watch = otp::g_watch;
  std::lock_guard<std::mutex> hold(watch.control);
  if (!watch.watching.exchange(false)) return;
  for (sem_t* each : {&watch.wake, &watch.seen, &watch.logged}) sem_post(each);
  pthread_join(watch.thread, nullptr);
}

}  // extern "C"
