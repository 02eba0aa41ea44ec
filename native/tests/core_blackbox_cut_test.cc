// The file of a black box is cut while its process records: the process continues, and only signals that are about the
// file are kept from it.
#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "child.h"
#include "core_blackbox_support.h"
#include "otel_torchprof/hang_watch.h"

namespace {

using Handler = void (*)(int);

void default_sigbus() { signal(SIGBUS, SIG_DFL); }  // a sanitizer has its own

Handler handler_of_sigbus() {
  struct sigaction now;
  CHECK_EQ(sigaction(SIGBUS, nullptr, &now), 0);
  return now.sa_handler;
}

void cut(const BoxFile& file, uint64_t to = 0) { CHECK_EQ(ftruncate(file.fd(), static_cast<off_t>(to)), 0); }

void record(int count) {
  for (int i = 0; i < count; ++i) leaf("leaf");
}

// A page of a file that is shorter than its mapping.
volatile char* missing_page() {
  BoxFile file;
  void* memory = mmap(nullptr, kBoxBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
  CHECK(memory != MAP_FAILED);
  cut(file);
  return static_cast<volatile char*>(memory);
}

bool died_of_sigbus(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS; }

// Whatever of the file is missing, the box says that it is lost, and another session has what comes afterwards.
void recording_continues() {
  for (uint64_t to : {uint64_t{0}, kBoxBytes / 2}) {
    default_sigbus();
    BoxFile file;
    OpenBox box(file);
    Session session;
    record(5000);
    CHECK_EQ(otp_blackbox_is_lost(), 0u);
    cut(file, to);
    record(5000);
    begin("spans the end");
    record(60000);
    end("spans the end");
    CHECK_EQ(otp_blackbox_is_lost(), 1u);
    session.stop();
    Batch batch(session.drain());
    batch.check_sound();
    CHECK(batch->rows > 50000u && batch->rows <= 70001u);
  }
  CHECK_EQ(otp_blackbox_is_lost(), 0u);
}

// One cut and grown again has zeros where its process had written; no signal tells that.
void zeros_are_survived() {
  default_sigbus();
  BoxFile file;
  {
    OpenBox box(file);
    Session session;
    begin("spans it");
    record(3000);
    cut(file);
    CHECK_EQ(posix_fallocate(file.fd(), 0, kBoxBytes), 0);
    record(60000);
    end("spans it");
    session.stop();
    Batch batch(session.drain());
    batch.check_sound();
    CHECK(batch->rows > 50000u);
  }
  record(10);
}

void many_threads_find_it_at_once() {
  default_sigbus();
  BoxFile file;
  OpenBox box(file);
  std::atomic<int> running{0};
  std::atomic<bool> is_cut{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      record(10);
      ++running;
      while (!is_cut) std::this_thread::yield();
      record(20000);
    });
  while (running < 4) std::this_thread::yield();
  cut(file);
  is_cut = true;
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(otp_blackbox_is_lost(), 1u);
}

// What is not about the file ends the process as it would have.
void other_faults_are_deadly() {
  int fault = end_of([] {
    default_sigbus();
    BoxFile file;
    OpenBox box(file);
    volatile char* missing = missing_page();
    *missing = 1;
  });
  CHECK(died_of_sigbus(fault));
  int raised = end_of([] {
    default_sigbus();
    BoxFile file;
    OpenBox box(file);
    raise(SIGBUS);
  });
  CHECK(died_of_sigbus(raised));
  int ignored = end_of([] {
    signal(SIGBUS, SIG_IGN);
    BoxFile file;
    OpenBox box(file);
    raise(SIGBUS);
    cut(file);
    record(5000);
    _exit(7);
  });
  CHECK(WIFEXITED(ignored) && WEXITSTATUS(ignored) == 7);
}

sigjmp_buf out_of_fault;
std::atomic<int> own_calls{0};

void own_handler(int) {
  ++own_calls;
  siglongjmp(out_of_fault, 1);
}

// Touches a page that is missing, and is brought back by `own_handler`.
void fault_and_return() {
  volatile char* missing = missing_page();
  if (sigsetjmp(out_of_fault, 1) == 0) *missing = 1;
}

// A handler of the program's, set before the box or after it, gets its own faults and none of the box's.
void a_handler_of_the_program_is_called() {
  for (bool is_before : {true, false}) {
    default_sigbus();
    own_calls = 0;
    if (is_before) signal(SIGBUS, own_handler);
    {
      BoxFile file;
      OpenBox box(file);
      if (!is_before) signal(SIGBUS, own_handler);
      record(5000);  // over some chunks
      fault_and_return();
      fault_and_return();
      CHECK_EQ(own_calls.load(), 2);
      cut(file);
      record(5000);
      CHECK_EQ(otp_blackbox_is_lost(), 1u);
      CHECK_EQ(own_calls.load(), 2);
    }
    CHECK(handler_of_sigbus() == own_handler);
  }
  default_sigbus();
}

struct sigaction before_calling;
std::atomic<int> calling_calls{0};

// Puts back what was there before it and raises the signal, as faulthandler does.
void handler_that_steps_back(int) {
  ++calling_calls;
  sigaction(SIGBUS, &before_calling, nullptr);
  raise(SIGBUS);
}

void install_one_that_steps_back() {
  struct sigaction action{};
  action.sa_handler = handler_that_steps_back;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGBUS, &action, &before_calling);
}

// A handler that passes a signal on ends in no circle; and where it comes first, the file's fault is still survived.
void a_handler_that_steps_back_is_no_circle() {
  for (bool is_before : {true, false}) {
    int status = end_of([is_before] {
      default_sigbus();
      if (is_before) install_one_that_steps_back();
      BoxFile file;
      OpenBox box(file);
      if (!is_before) install_one_that_steps_back();
      record(5000);
      fault_and_return();
    });
    CHECK(died_of_sigbus(status));
  }
  int survived = end_of([] {
    default_sigbus();
    BoxFile file;
    OpenBox box(file);
    record(10);
    install_one_that_steps_back();
    cut(file);
    record(5000);  // in the chunk at hand: nothing has put our handler on top again
    _exit(calling_calls == 1 && otp_blackbox_is_lost() == 1 ? 7 : 1);
  });
  CHECK(WIFEXITED(survived) && WEXITSTATUS(survived) == 7);
}

// Lets the instruction that faulted be repeated for ever, as the handlers of Python's signal module do.
void handler_that_returns(int) {}

// A drain, and a look of the hang watch, put our handler on top of one that was set since the last chunk was taken.
void a_handler_that_returns_is_no_endless_loop() {
  for (bool is_drain : {true, false}) {
    int status = end_of([is_drain] {
      default_sigbus();
      BoxFile file;
      OpenBox box(file);
      Session session;
      record(10);
      signal(SIGBUS, handler_that_returns);
      if (is_drain) Batch(session.drain());
      otp_hang_options options{8'000'000, 8'000'000, 0, nullptr, nullptr, 0, 0};
      if (!is_drain) CHECK_EQ(otp_hang_watch_start(&options), OTP_OK);
      while (handler_of_sigbus() == handler_that_returns) std::this_thread::yield();
      otp_hang_watch_stop();
      cut(file);
      record(10);
      _exit(otp_blackbox_is_lost() == 1 ? 7 : 1);
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
}

// When the box has ended, and in a forked child, the action is the one of before.
void the_action_of_before_comes_back() {
  default_sigbus();
  BoxFile file;
  {
    OpenBox box(file);
    CHECK(handler_of_sigbus() != SIG_DFL);
    int status = end_of([] { _exit(handler_of_sigbus() == SIG_DFL ? 7 : 1); });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
  CHECK(handler_of_sigbus() == SIG_DFL);
  {
    OpenBox box(file);
    signal(SIGBUS, own_handler);
  }
  CHECK(handler_of_sigbus() == own_handler);
  default_sigbus();
}

}  // namespace

int main() {
  RUN_CLEAN(recording_continues);
  RUN_CLEAN(zeros_are_survived);
  RUN_CLEAN(many_threads_find_it_at_once);
  RUN_CLEAN(other_faults_are_deadly);
  RUN_CLEAN(a_handler_of_the_program_is_called);
  RUN_CLEAN(a_handler_that_steps_back_is_no_circle);
  RUN_CLEAN(a_handler_that_returns_is_no_endless_loop);
  RUN_CLEAN(the_action_of_before_comes_back);
}
