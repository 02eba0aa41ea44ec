// Fork: in the child the recorder is off, empty and usable, whatever the parent's threads were doing; the parent
// continues.
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "child.h"
#include "core_support.h"

namespace {

// TSan refuses new threads in a child of a process that had several (die_after_fork).
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadsInChild = false;
#else
constexpr bool kThreadsInChild = true;
#endif

void record_something() {
  Session session;
  begin("outer");
  leaf("inner");
  end("outer");
  if (kThreadsInChild) std::thread([] { leaf("on a thread of the child"); }).join();
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, kThreadsInChild ? 3u : 2u);
  CHECK_EQ(batch.parent_name("inner"), "outer");
  CHECK_EQ(batch->flags[batch.row("outer")], 0);
}

// The child is off and empty, refuses the parent's sessions, ignores its open events, and can record anew,
// grandchildren too; the parent loses nothing.
void a_child_starts_empty() {
  Session session;
  Session stopped;
  begin("open at the fork");
  begin("suspended at the fork");
  CHECK_EQ(api().suspend("suspended at the fork"), 1);
  stopped.stop();
  uint32_t here = begin("also open");
  uint32_t forks = recorder_stats().forks;
  in_child([&] {
    CHECK_EQ(*api().active | *api().requests_inputs, 0u);
    otp_recorder_stats stats = recorder_stats();
    CHECK_EQ(stats.forks, forks + 1);
    CHECK_EQ(stats.sessions + stats.threads, 0u);
    CHECK_EQ(stats.chunk_bytes, 0u);
    CHECK_EQ(begin("off"), 0u);
    CHECK_EQ(end("also open"), 0);
    CHECK_EQ(api().resume("suspended at the fork"), 0);
    CHECK_EQ(api().end_elsewhere("open at the fork", here, 0, 0, nullptr, 0), 0);
    otp_batch* batch = nullptr;
    otp_session_stats session_stats;
    for (otp_session* parents : {static_cast<otp_session*>(session), static_cast<otp_session*>(stopped)}) {
      CHECK_EQ(otp_session_start(parents), OTP_E_FORKED);
      CHECK_EQ(otp_session_stop(parents), OTP_E_FORKED);
      CHECK_EQ(otp_session_drain(parents, 0, &batch), OTP_E_FORKED);
      CHECK_EQ(otp_session_get_stats(parents, &session_stats), OTP_E_FORKED);
      CHECK_EQ(otp_session_consumer(parents), 0u);
      otp_session_free(parents);
    }
    record_something();
    CHECK_EQ(end("open at the fork"), 0);
    in_child(record_something);
    record_something();
  });
  CHECK_EQ(recorder_stats().forks, forks);
  leaf("after the fork");
  CHECK_EQ(end("also open"), 1);
  CHECK_EQ(end("suspended at the fork"), 1);
  CHECK_EQ(end("open at the fork"), 1);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 4u);
  for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->flags[i], 0);
  CHECK_EQ(batch.parent_name("after the fork"), "also open");
  CHECK_EQ(Batch(stopped.drain())->rows, 2u);
}

// A child that is forked while other threads are inside the registry's lock, the table of names' and the allocator's
// works all the same, and the parent's recording is whole.
//
// Not under sanitizers: unlike the C library's, their allocators' locks stay as they were at the fork, and a child
// whose parent was just allocating on another thread waits for ever (seen with gcc 12's ASan: SizeClassAllocator64).
void forks_amid_busy_threads() {
  if (OTP_SANITIZED) return;
  constexpr int kForks = 200;
  Session session(options(8 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  std::atomic<bool> done{false};
  std::atomic<uint64_t> produced{0};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&, i] {
      char name[32];
      for (uint64_t k = 0; !done.load(); ++k) {
        std::snprintf(name, sizeof name, "name %d of %d", static_cast<int>(k % 1000), i);
        begin(name, name);
        CHECK_EQ(api().suspend(name), 1);  // takes the registry's lock, as the next line does
        CHECK_EQ(api().resume(name), 1);
        end(name);
        produced.fetch_add(1);
        if (i == 0 && k % 100 == 0) Session(options(OTP_CHUNK_BYTES)).stop();
      }
    });
  }
  uint64_t rows = 0, dropped = 0;
  for (int i = 0; i < kForks; ++i) {
    in_child(record_something);
    if (i % 10 != 0) continue;
    Batch batch(session.drain());
    rows += batch->rows;
    dropped += batch.dropped();
  }
  done.store(true);
  for (std::thread& thread : busy) thread.join();
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(rows + dropped + batch->rows + batch.dropped(), produced.load());
}

// A child of a process that has never used the recorder can use it.
void a_fork_before_the_first_use() { in_child(record_something); }

// Where a child gets no memory at all it is off, and what calls the recorder there continues.
void a_child_without_memory_continues() {
  Session session;
  begin("open at the fork");
  in_child([] {
    rlimit none{1, 1};
    CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
      begin("off");
      api().intern("a name", 6, OTP_NAME_LABEL);
      api().end_elsewhere("open at the fork", 1, 0, 0, "Error", 5);
      _exit(recorder_stats().sessions == 0 ? 7 : 1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  });
  end("open at the fork");
}

}  // namespace

int main() {
  RUN(a_fork_before_the_first_use);
  if (!OTP_SANITIZED) RUN_CLEAN(a_child_without_memory_continues);  // which need memory themselves
  RUN_CLEAN(a_child_starts_empty);
  RUN_CLEAN(forks_amid_busy_threads);
}
