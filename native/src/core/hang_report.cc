#include "core/hang_report.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/clock.h"

namespace otp {

namespace {

constexpr unsigned kProgramSeconds = 40;           // then the kernel ends it
constexpr uint64_t kLongestWait = 45'000'000'000;  // of the processes that wait for it
constexpr timespec kPause{0, 20'000'000};
constexpr int kStderrMs = 1000;
constexpr unsigned kMostDescriptors = 65536;
constexpr size_t kStack = 32768;
constexpr std::string_view kHangLine = "hang: ";
#if defined(__SANITIZE_THREAD__)
constexpr int kShared = 0;  // TSan takes each new process for a fork, after which its own memory is that of the child
#else
constexpr int kShared = CLONE_VM | CLONE_VFORK;
#endif

int64_t unix_ns(const timespec& time) { return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec; }

int64_t unix_now() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return unix_ns(now);
}

void close_all_from(unsigned first) {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
#endif
  for (unsigned number = first; number < kMostDescriptors; ++number) close(static_cast<int>(number));
}

// The kernel is to end this process before it ends one of the program's for lack of memory.
void offer_to_the_kernel() {
  int file = open("/proc/self/oom_score_adj", O_WRONLY);
  if (file < 0) return;
  (void)!write(file, "1000", 4);
  close(file);
}

// Without what _exit() does under TSan, which writes out what the program had printed.
[[noreturn]] void leave(int status) {
  for (;;) syscall(SYS_exit_group, status);
}

struct Start {
  char* const* arguments;
  int file;
  char* inner_stack;
};

// In the memory of the process that hangs, on a stack of its own, until the program begins: calls async-signal-safe
// functions only. All signals but the one that ends it are blocked: no handler of the program runs in it.
int become_program(void* argument) {
  auto& start = *static_cast<Start*>(argument);
  offer_to_the_kernel();
  int file = fcntl(start.file, F_DUPFD, 3), null = open("/dev/null", O_RDWR);
  for (int number = 0; number < 3; ++number) dup2(number == 1 ? file : null, number);
  close_all_from(3);
  sigset_t blocked;
  sigfillset(&blocked);
  sigdelset(&blocked, SIGALRM);
  alarm(kProgramSeconds);
  sigprocmask(SIG_SETMASK, &blocked, nullptr);
  execv(start.arguments[0], start.arguments);
  leave(127);
}

int start_program(void* argument) {
  auto& start = *static_cast<Start*>(argument);
  int pid = clone(become_program, start.inner_stack + kStack, kShared | SIGCHLD, argument);
  leave(pid < 0 ? 1 : 0);
}

}  // namespace

HangReport::HangReport(std::vector<std::string> command, std::string path)
    : d_command(std::move(command)), d_path(std::move(path)), d_line(kLine) {
  for (std::string& argument : d_command) d_arguments.push_back(argument.data());
  d_arguments.push_back(nullptr);
}

HangReport::Answer HangReport::ask(uint64_t idle_ns, const std::atomic<bool>& may_wait, std::string_view* line) {
  int64_t since = unix_now() - static_cast<int64_t>(idle_ns);
  uint64_t deadline = clock_gettime_ns(CLOCK_MONOTONIC) + kLongestWait;
  bool has_started = false;
  while (!d_command.empty() && may_wait.load() && clock_gettime_ns(CLOCK_MONOTONIC) < deadline) {
    int file = open(d_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (file < 0) break;
    if (flock(file, LOCK_EX | LOCK_NB) == 0) {
      struct stat found{};
      fstat(file, &found);
      int64_t written = found.st_size == 0 ? 0 : unix_ns(found.st_mtim);
      bool is_of_this_hang = written >= since, is_known = written == d_read;
      if (is_of_this_hang && (!is_known || d_was_hang)) {
        Answer answer = is_known ? Answer::kSaid : read(file, written);
        *line = {d_line.data(), d_size};
        close(file);
        return answer;
      }
      bool fails = has_started || ftruncate(file, 0) != 0 || !start(file);
      has_started = true;
      if (fails) deadline = 0;
    }
    close(file);  // the program has the lock now, if it was started
    nanosleep(&kPause, nullptr);
  }
  return Answer::kNone;
}

HangReport::Answer HangReport::read(int file, int64_t written) {
  ssize_t size = std::max<ssize_t>(pread(file, d_line.data(), d_line.size(), 0), 0);
  std::string_view text(d_line.data(), static_cast<size_t>(size));
  text = text.substr(0, text.find('\n'));
  d_read = written;
  d_size = static_cast<uint32_t>(text.size());
  d_was_hang = text.substr(0, kHangLine.size()) == kHangLine;
  return d_was_hang ? Answer::kHang : Answer::kNoHang;
}

// Through a process between, which ends at once and gives no SIGCHLD: the program is no child that the one that hangs
// could wait for. No copy of memory is made, and no handler of forks runs.
bool HangReport::start(int file) {
  static char g_stacks[2][kStack] __attribute__((aligned(16)));
  Start start{d_arguments.data(), file, g_stacks[0]};
  int pid = clone(start_program, g_stacks[1] + kStack, kShared, &start);
  if (pid < 0) return false;
  int status = 0;
  while (waitpid(pid, &status, __WALL) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void write_to_stderr(std::string_view line) {
  pollfd ready{STDERR_FILENO, POLLOUT, 0};
  if (poll(&ready, 1, kStderrMs) == 1 && (ready.revents & POLLOUT) != 0)
    (void)!write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace otp
