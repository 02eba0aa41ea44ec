// SIGTERM: the process ends as it would have, after a flush or at the deadline, and whatever a program says counts
// instead. Each case runs in a child, whose end is what is checked.
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "check.h"
#include "child.h"
#include "otel_torchprof/recorder.h"
#include "otel_torchprof/sigterm.h"

namespace {

constexpr uint32_t kNever = 1'000'000'000;
constexpr uint32_t kSoon = 20;
constexpr int kOwnHandler = 8;

#if defined(__SANITIZE_THREAD__)
constexpr bool kSanitizedThreads =
    true;  // TSan runs handlers when the thread next calls into it: not in a loop or raw call
#else
constexpr bool kSanitizedThreads = false;
#endif

struct Pipe {
  int ends[2];
  Pipe() { CHECK_EQ(pipe(ends), 0); }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  void write(char what) const { CHECK_EQ(::write(ends[1], &what, 1), 1); }
  // What was written, in order, once every writer has ended.
  std::string read_all() {
    close(ends[1]);
    std::string found;
    char next;
    while (read(ends[0], &next, 1) == 1) found.push_back(next);
    return found;
  }
};

bool is_sigterm(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM; }

void terminate() { kill(getpid(), SIGTERM); }

[[noreturn]] void run_on() {
  for (;;) poll(nullptr, 0, 10);
}

void (*action())(int) {
  struct sigaction found{};
  CHECK_EQ(sigaction(SIGTERM, nullptr, &found), 0);
  return found.sa_handler;
}

void watch(uint32_t flush_ms) { CHECK_EQ(otp_sigterm_watch(flush_ms), 1); }

void own_handler(int) { _exit(kOwnHandler); }

// A flush runs on the thread that waits, and the process dies of the signal when it is done.
void the_flush_comes_before_the_end() {
  Pipe pipe;
  int status = end_of([&] {
    watch(kNever);
    std::thread([&] {
      CHECK_EQ(otp_sigterm_wait(), 1);
      pipe.write('f');
      otp_sigterm_flushed();
    }).detach();
    terminate();
    run_on();
  });
  CHECK(is_sigterm(status));
  CHECK_EQ(pipe.read_all(), "f");
}

// Where nobody flushes, or the flush hangs, the deadline ends the process; also where every thread has SIGTERM blocked.
void the_deadline_ends_the_process() {
  CHECK(is_sigterm(end_of([] {
    watch(kSoon);
    terminate();
    run_on();
  })));
  CHECK(is_sigterm(end_of([] {
    watch(kSoon);
    terminate();
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGALRM);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    run_on();
  })));
}

// Nothing that the program's threads do keeps the process.
void a_busy_thread_does_not_keep_it() {
  if (kSanitizedThreads) return;
  CHECK(is_sigterm(end_of([] {
    watch(kSoon);
    terminate();
    std::atomic<uint64_t> count{0};
    for (;;) count.fetch_add(1);
  })));
}

// One that comes at once is of the same request and leaves the flush its time; one that comes later ends the process.
void a_second_signal_insists() {
  Pipe pipe;
  int status = end_of([&] {
    watch(kNever);
    std::thread([&] {
      CHECK_EQ(otp_sigterm_wait(), 1);
      pipe.write('f');
      for (;;) {
        poll(nullptr, 0, 50);
        terminate();
      }
    }).detach();
    terminate();
    terminate();
    run_on();
  });
  CHECK(is_sigterm(status));
  CHECK_EQ(pipe.read_all(), "f");
}

// Handlers of the program are not touched: those before, those after, and ignored signals.
void the_programs_own_word_counts() {
  CHECK_EQ(WEXITSTATUS(end_of([] {
             signal(SIGTERM, own_handler);
             CHECK_EQ(otp_sigterm_watch(kSoon), 0);
             terminate();
             run_on();
           })),
           kOwnHandler);
  CHECK_EQ(end_of([] {
             signal(SIGTERM, SIG_IGN);
             CHECK_EQ(otp_sigterm_watch(kSoon), 0);
             terminate();
             CHECK(action() == SIG_IGN);
           }),
           0);
  CHECK_EQ(WEXITSTATUS(end_of([] {
             watch(kNever);
             signal(SIGTERM, own_handler);
             CHECK_EQ(otp_sigterm_unwatch(), 0);
             CHECK(action() == own_handler);
             CHECK_EQ(otp_sigterm_watch(kNever), 0);
             terminate();
             run_on();
           })),
           kOwnHandler);
}

// A handler that is set while the flush runs gets the signal when it is over.
void a_handler_set_during_the_flush_gets_the_signal() {
  int status = end_of([] {
    watch(kNever);
    std::thread([] {
      CHECK_EQ(otp_sigterm_wait(), 1);
      signal(SIGTERM, own_handler);
      otp_sigterm_flushed();
    }).detach();
    terminate();
    run_on();
  });
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), kOwnHandler);
}

void (*g_before)(int);

// A handler of the program's that calls the one before it ends the process, as the default action would.
void a_chained_handler_ends_the_process() {
  CHECK(is_sigterm(end_of([] {
    watch(kNever);
    g_before = signal(SIGTERM, [](int number) { g_before(number); });
    std::thread([] {
      CHECK_EQ(otp_sigterm_wait(), 1);
      otp_sigterm_flushed();
    }).detach();
    terminate();
    run_on();
  })));
}

// It can be switched on and off again and again; off, it leaves the default action, and wakes whoever waits.
void it_can_be_taken_back() {
  CHECK(is_sigterm(end_of([] {
    for (int i = 0; i < 100; ++i) {
      watch(kNever);
      CHECK_EQ(otp_sigterm_watch(kNever), OTP_E_STATE);
      std::thread waiter([] { CHECK_EQ(otp_sigterm_wait(), 0); });
      CHECK_EQ(otp_sigterm_unwatch(), 0);
      waiter.join();
      CHECK(action() == SIG_DFL);
      CHECK_EQ(otp_sigterm_unwatch(), 0);
    }
    terminate();
    run_on();
  })));
}

// Once the signal has come, it cannot be taken back.
void a_signal_is_not_lost_to_an_unwatch() {
  CHECK(is_sigterm(end_of([] {
    watch(kNever);
    terminate();
    CHECK_EQ(otp_sigterm_unwatch(), 1);
    otp_sigterm_flushed();
    run_on();
  })));
}

// A forked child has the default action, and can watch for itself; so has one that was made behind libc's back.
void a_child_dies_at_once() {
  CHECK_EQ(end_of([] {
             watch(kNever);
             CHECK(is_sigterm(end_of([] {
               CHECK(action() == SIG_DFL);
               terminate();
               run_on();
             })));
             if (!kSanitizedThreads) {
               CHECK(is_sigterm(end_of([] {
                 watch(kSoon);
                 terminate();
                 run_on();
               })));
               auto child = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
               if (child == 0) {
                 kill(getpid(), SIGTERM);
                 for (;;) poll(nullptr, 0, 10);
               }
               int status = 0;
               CHECK_EQ(waitpid(child, &status, 0), child);
               CHECK(is_sigterm(status));
             }
             CHECK(action() != SIG_DFL);
             CHECK_EQ(otp_sigterm_unwatch(), 0);
           }),
           0);
}

// The first process of a PID namespace, for which the kernel ignores the default action, flushes each time and
// continues.
void the_first_process_of_a_container_continues() {
  if (kSanitizedThreads) return;
  CHECK_EQ(end_of([] {
             if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) return;  // not allowed here
             CHECK_EQ(end_of([] {
                        CHECK_EQ(getpid(), 1);
                        static std::atomic<int> flushes{0};
                        watch(kNever);
                        std::thread([] {
                          while (otp_sigterm_wait() == 1) {
                            flushes.fetch_add(1);
                            otp_sigterm_flushed();
                          }
                        }).detach();
                        for (; flushes.load() < 2; poll(nullptr, 0, 1)) terminate();
                        while (otp_sigterm_unwatch() != 0) poll(nullptr, 0, 1);
                        CHECK(action() == SIG_DFL);
                      }),
                      0);
           }),
           0);
}

}  // namespace

int main() {
  RUN(the_flush_comes_before_the_end);
  RUN(the_deadline_ends_the_process);
  RUN(a_busy_thread_does_not_keep_it);
  RUN(a_second_signal_insists);
  RUN(the_programs_own_word_counts);
  RUN(a_handler_set_during_the_flush_gets_the_signal);
  RUN(a_chained_handler_ends_the_process);
  RUN(it_can_be_taken_back);
  RUN(a_signal_is_not_lost_to_an_unwatch);
  RUN(a_child_dies_at_once);
  RUN(the_first_process_of_a_container_continues);
}
