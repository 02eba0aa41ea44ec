// The hang watch: which threads it takes for hanging, and what the black box has of it.
#include "otel_torchprof/hang_watch.h"

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "child.h"
#include "core_blackbox_support.h"

namespace {

constexpr uint64_t kLimit = 50'000'000 * kSlowdown, kLong = 900'000'000'000;

class Watching {
 public:
  explicit Watching(uint64_t write_stacks = 0, uint64_t limit = kLimit) {
    CHECK_EQ(otp_hang_watch_start(limit, kLong, write_stacks), OTP_OK);
  }
  ~Watching() { otp_hang_watch_stop(); }
};

void begin_phase(const char* name) {
  otp_begin_args phase = event(name, name);
  phase.kind = OTP_EVENT_PHASE;
  api().begin(&phase);
}

void a_phase_in_which_nothing_happens_is_a_hang_and_its_stacks_are_kept() {
  BoxFile file;
  OpenBox box(file);
  auto write = [](uint32_t os_tid, char* text, uint32_t bytes) {
    return static_cast<uint32_t>(std::snprintf(text, bytes, "Thread %u (most recent call first):\n", os_tid));
  };
  uint32_t (*function)(uint32_t, char*, uint32_t) = write;
  Watching watching(reinterpret_cast<uint64_t>(function));
  std::atomic<uint32_t> os_tid{0};
  std::atomic<bool> may_end{false};
  std::thread loop([&] {
    os_tid = static_cast<uint32_t>(gettid());
    begin_phase("torch.phase.data");
    while (!may_end) std::this_thread::yield();
    end("torch.phase.data");
  });
  uint32_t hanging = otp_hang_watch_wait();
  CHECK_EQ(hanging, os_tid);
  std::string stacks = "Thread " + std::to_string(hanging) + " (most recent call first):\n";
  Contents contents(file);
  CHECK_EQ(contents->hang_os_tid, hanging);
  CHECK(std::string(contents->stacks, contents->stacks_size) == stacks);
  int64_t begun = contents.batch()->start[contents.batch().row("torch.phase.data")];
  CHECK(contents->hang_since >= begun - 2'000'000 && contents->hang_since < begun + static_cast<int64_t>(kLimit));
  may_end = true;
  loop.join();
}

// Nothing tells the thread that it was looked at: TSan would see what of it both touch and neither is atomic.
void a_thread_that_was_looked_at_begins_again() {
  BoxFile file;
  OpenBox box(file);
  Watching watching;
  std::atomic<bool> was_seen{false};
  std::thread loop([&] {
    begin_phase("torch.phase.data");
    leaf("decode");  // from here on the name is known
    while (!was_seen.load(std::memory_order_relaxed)) std::this_thread::yield();
    leaf("decode");
    end("torch.phase.data");
  });
  CHECK(otp_hang_watch_wait() != 0);
  was_seen.store(true, std::memory_order_relaxed);
  loop.join();
}

void an_own_thread_that_waits_inside_a_label_is_none() {
  BoxFile file;
  OpenBox box(file);
  Watching watching;
  std::atomic<bool> may_end{false};
  std::thread server([&] {
    begin("waits for work");
    while (!may_end) std::this_thread::yield();
    end("waits for work");
  });
  std::thread loop([] {  // hangs later than the server began to wait
    begin_phase("torch.phase.forward");
    CHECK_EQ(otp_hang_watch_wait(), static_cast<uint32_t>(gettid()));
    end("torch.phase.forward");
  });
  loop.join();
  may_end = true;
  server.join();
}

void what_may_take_long_is_waited_for() {
  BoxFile file;
  OpenBox box(file);
  Watching watching;
  std::thread saving([] {
    begin_phase("torch.phase.checkpoint");
    std::thread other([] {
      begin_phase("torch.phase.backward");
      CHECK_EQ(otp_hang_watch_wait(), static_cast<uint32_t>(gettid()));
      end("torch.phase.backward");
    });
    other.join();
    end("torch.phase.checkpoint");
  });
  saving.join();
}

void the_main_thread_of_a_rank_hangs_with_nothing_open_too() {
  BoxFile file;
  OpenBox box(file);
  leaf("before");
  Watching watching;
  uint32_t group = api().intern("default", 7, OTP_NAME_CODE);
  otp_blackbox_call call{0, 1, 4, 4, group, group, 0, group, 0, 0, 2, 0, -1, -1, -1, 0, 0, 0, ""};
  api().collective_completed(api().collective_enqueued(&call), 0);
  CHECK_EQ(otp_hang_watch_wait(), static_cast<uint32_t>(getpid()));
}

void a_collective_is_told_before_it_times_out() {
  BoxFile file;
  OpenBox box(file);
  Watching watching(0, 6000 * kLimit);
  begin_phase("torch.phase.backward");
  uint32_t group = api().intern("default", 7, OTP_NAME_CODE);
  uint64_t begun = static_cast<uint64_t>(otp_now_ns());
  otp_blackbox_call call{0, 1, 4, 4, group, group, 0, group, 0, 0, 2, 0, -1, -1, -1, 0, 5 * kLimit / 1'000'000, 0, ""};
  api().collective_enqueued(&call);
  CHECK_EQ(otp_hang_watch_wait(), static_cast<uint32_t>(getpid()));
  uint64_t took = static_cast<uint64_t>(otp_now_ns()) - begun;
  CHECK(took >= 4 * kLimit && took < 3000 * kLimit);
  end("torch.phase.backward");
}

void a_pause_before_the_loop_says_nothing_of_pauses_in_it() {
  BoxFile file;
  OpenBox box(file);
  leaf("before");
  Watching watching;
  uint64_t begun = static_cast<uint64_t>(otp_now_ns());
  while (static_cast<uint64_t>(otp_now_ns()) - begun < 6 * kLimit) std::this_thread::yield();
  begin_phase("torch.phase.data");
  begun = static_cast<uint64_t>(otp_now_ns());
  CHECK_EQ(otp_hang_watch_wait(), static_cast<uint32_t>(getpid()));
  CHECK(static_cast<uint64_t>(otp_now_ns()) - begun < 30 * kLimit);  // half of ten times that pause
  end("torch.phase.data");
}

void it_ends_for_those_who_wait_and_in_a_forked_child() {
  BoxFile file;
  OpenBox box(file);
  CHECK_EQ(otp_hang_watch_start(kLimit, kLong, 0), OTP_OK);
  CHECK_EQ(otp_hang_watch_start(kLimit, kLong, 0), OTP_E_STATE);
  std::thread waiting([] { CHECK_EQ(otp_hang_watch_wait(), 0u); });
  in_child([] {
    CHECK_EQ(otp_hang_watch_wait(), 0u);
    otp_hang_watch_stop();
  });
  otp_hang_watch_stop();
  waiting.join();
  otp_hang_watch_stop();
}

}  // namespace

int main() {
  RUN_CLEAN(a_phase_in_which_nothing_happens_is_a_hang_and_its_stacks_are_kept);
  RUN_CLEAN(a_thread_that_was_looked_at_begins_again);
  RUN_CLEAN(an_own_thread_that_waits_inside_a_label_is_none);
  RUN_CLEAN(what_may_take_long_is_waited_for);
  RUN_CLEAN(the_main_thread_of_a_rank_hangs_with_nothing_open_too);
  RUN_CLEAN(a_collective_is_told_before_it_times_out);
  RUN_CLEAN(a_pause_before_the_loop_says_nothing_of_pauses_in_it);
  RUN_CLEAN(it_ends_for_those_who_wait_and_in_a_forked_child);
}
