// The hang watch: which threads it takes for hanging, and what the black box has of it.
#include "otel_torchprof/hang_watch.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "child.h"
#include "core/hang_report.h"
#include "core_blackbox_support.h"

namespace {

constexpr uint64_t kLimit = 50'000'000 * kSlowdown, kLong = 900'000'000'000;

otp_hang_options limits(uint64_t limit = kLimit, uint64_t write_stacks = 0, int exit_status = 0) {
  return {limit, kLong, write_stacks, nullptr, nullptr, exit_status, 0};
}

uint32_t next_hang(std::string* said = nullptr) {
  char line[1024] = "";
  uint32_t hanging = otp_hang_watch_wait(line, sizeof line);
  if (said != nullptr) *said = line;
  return hanging;
}

class Watching {
 public:
  explicit Watching(uint64_t write_stacks = 0, uint64_t limit = kLimit) {
    otp_hang_options options = limits(limit, write_stacks);
    CHECK_EQ(otp_hang_watch_start(&options), OTP_OK);
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
  std::string said;
  uint32_t hanging = next_hang(&said);
  int64_t noticed = otp_now_ns();
  CHECK_EQ(hanging, os_tid);
  CHECK(said.find("hang: thread " + std::to_string(hanging) + " of process") == 0);
  std::string stacks = "Thread " + std::to_string(hanging) + " (most recent call first):\n";
  Contents contents(file);
  CHECK_EQ(contents->hang_os_tid, hanging);
  CHECK(std::string(contents->stacks, contents->stacks_size) == stacks);
  int64_t begun = contents.batch()->start[contents.batch().row("torch.phase.data")];
  CHECK(contents->hang_since >= begun - 2'000'000);
  CHECK(contents->hang_since <= noticed - static_cast<int64_t>(kLimit) + 2'000'000);
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
  CHECK(next_hang() != 0);
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
    CHECK_EQ(next_hang(), static_cast<uint32_t>(gettid()));
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
      CHECK_EQ(next_hang(), static_cast<uint32_t>(gettid()));
      end("torch.phase.backward");
    });
    other.join();
    end("torch.phase.checkpoint");
  });
  saving.join();
}

otp_blackbox_call collective(uint32_t timeout_ms = 0) {
  uint32_t group = api().intern("default", 7, OTP_NAME_CODE);
  return {0, 1, 4, 4, group, group, 0, group, 0, 0, 2, 0, -1, -1, -1, 0, timeout_ms, 0, ""};
}

void the_main_thread_of_a_rank_hangs_with_nothing_open_too() {
  BoxFile file;
  OpenBox box(file);
  leaf("before");
  Watching watching;
  otp_blackbox_call call = collective();
  api().collective_completed(api().collective_enqueued(&call), 0);
  CHECK_EQ(next_hang(), static_cast<uint32_t>(getpid()));
}

void a_rank_that_enqueues_collectives_and_nothing_else_moves() {
  BoxFile file;
  OpenBox box(file);
  leaf("before");
  int64_t begun = otp_now_ns(), last = begun, paused = 0;  // where the machine held this thread up for long
  Watching watching;
  otp_blackbox_call call = collective();
  while (last - begun < 6 * static_cast<int64_t>(kLimit)) {
    api().collective_completed(api().collective_enqueued(&call), 0);
    int64_t now = otp_now_ns();
    if (paused == 0 && now - last >= static_cast<int64_t>(kLimit / 2)) paused = last;
    last = now;
  }
  CHECK_EQ(next_hang(), static_cast<uint32_t>(getpid()));
  CHECK(Contents(file)->hang_since >= (paused == 0 ? last : paused) - 2'000'000);
}

void a_collective_is_told_before_it_times_out() {
  BoxFile file;
  OpenBox box(file);
  Watching watching(0, 6000 * kLimit);
  begin_phase("torch.phase.backward");
  uint64_t begun = static_cast<uint64_t>(otp_now_ns());
  otp_blackbox_call call = collective(static_cast<uint32_t>(5 * kLimit / 1'000'000));
  api().collective_enqueued(&call);
  CHECK_EQ(next_hang(), static_cast<uint32_t>(getpid()));
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
  CHECK_EQ(next_hang(), static_cast<uint32_t>(getpid()));
  CHECK(static_cast<uint64_t>(otp_now_ns()) - begun < 30 * kLimit);  // half of ten times that pause
  end("torch.phase.data");
}

void it_ends_for_those_who_wait_and_in_a_forked_child() {
  BoxFile file;
  OpenBox box(file);
  otp_hang_options options = limits();
  CHECK_EQ(otp_hang_watch_start(&options), OTP_OK);
  CHECK_EQ(otp_hang_watch_start(&options), OTP_E_STATE);
  std::thread waiting([] { CHECK_EQ(next_hang(), 0u); });
  in_child([] {
    CHECK_EQ(next_hang(), 0u);
    otp_hang_watch_stop();
  });
  otp_hang_watch_stop();
  waiting.join();
  otp_hang_watch_stop();
}

void a_process_that_hangs_ends_once_that_was_logged() {
  int status = end_of([] {
    BoxFile file;
    OpenBox box(file);
    otp_hang_options options = limits(kLimit, 0, 75);
    CHECK_EQ(otp_hang_watch_start(&options), OTP_OK);
    begin_phase("torch.phase.backward");
    next_hang();
    otp_hang_watch_logged();
    for (;;) pause();
  });
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 75);
}

// A report that a shell makes, and what it appends to a file each time.
struct SharedReport {
  std::string folder = "/tmp/otp-hang-" + std::string(6, 'X'), path, runs;

  SharedReport() {
    CHECK(mkdtemp(folder.data()) != nullptr);
    path = folder + "/report";
    runs = folder + "/runs";
  }
  ~SharedReport() {
    std::remove(path.c_str());
    std::remove(runs.c_str());
    std::remove(folder.c_str());
  }
  SharedReport(const SharedReport&) = delete;
  SharedReport& operator=(const SharedReport&) = delete;

  otp::HangReport by(const std::string& script) const { return otp::HangReport({"/bin/sh", "-c", script, runs}, path); }
  size_t run_count() const {
    std::ifstream file(runs);
    return static_cast<size_t>(std::count(std::istreambuf_iterator<char>(file), {}, '\n'));
  }
};

constexpr uint64_t kIdle = 900'000'000'000;
constexpr char kSaysHang[] = "echo once >> $0; echo 'hang: rank 1 is in load'; echo more";
constexpr char kSaysNone[] = "echo once >> $0; echo 'no hang: rank 1 may still run'";
using Answer = otp::HangReport::Answer;
const std::atomic<bool> g_may_wait{true};

void those_who_hang_together_make_one_report() {
  SharedReport shared;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&] {
      otp::HangReport report = shared.by(kSaysHang);
      std::string_view line;
      CHECK(report.ask(kIdle, g_may_wait, &line) == Answer::kHang);
      CHECK(line == "hang: rank 1 is in load");
      CHECK(report.ask(kIdle, g_may_wait, &line) == Answer::kSaid);
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK_EQ(shared.run_count(), 1u);
  struct stat found{};
  CHECK(stat(shared.path.c_str(), &found) == 0 && (found.st_mode & 0777) == 0600);
}

void a_later_hang_and_one_that_was_none_are_asked_about_again() {
  SharedReport shared;
  otp::HangReport report = shared.by(kSaysNone);
  std::string_view line;
  CHECK(report.ask(kIdle, g_may_wait, &line) == Answer::kNoHang);
  CHECK(report.ask(kIdle, g_may_wait, &line) == Answer::kNoHang);
  CHECK_EQ(shared.run_count(), 2u);
  report = shared.by(kSaysHang);
  while (report.ask(0, g_may_wait, &line) != Answer::kHang) {  // the clock of files is some milliseconds late
  }
  CHECK(shared.run_count() >= 3u);
}

void without_a_report_there_is_an_end() {
  SharedReport shared;
  std::string_view line;
  CHECK(shared.by("exit 1").ask(kIdle, g_may_wait, &line) == Answer::kNone);
  CHECK(otp::HangReport({"/no/program"}, shared.path).ask(kIdle, g_may_wait, &line) == Answer::kNone);
  CHECK(otp::HangReport({"/bin/true"}, "/no/folder/report").ask(kIdle, g_may_wait, &line) == Answer::kNone);
  std::atomic<bool> may_wait{false};
  CHECK(shared.by(kSaysHang).ask(kIdle, may_wait, &line) == Answer::kNone);
}

// Neither as a child nor with its descriptors or memory.
void the_program_is_a_stranger_to_the_process() {
  SharedReport shared;
  int ends[2];
  CHECK(pipe(ends) == 0);
  std::string_view line;
  otp::HangReport report = shared.by("test -e /proc/self/fd/" + std::to_string(ends[1]) + " || echo 'hang: yes'");
  CHECK(report.ask(kIdle, g_may_wait, &line) == Answer::kHang);
  CHECK(waitpid(-1, nullptr, WNOHANG) == -1);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace

int main() {
  RUN_CLEAN(a_phase_in_which_nothing_happens_is_a_hang_and_its_stacks_are_kept);
  RUN_CLEAN(a_thread_that_was_looked_at_begins_again);
  RUN_CLEAN(an_own_thread_that_waits_inside_a_label_is_none);
  RUN_CLEAN(what_may_take_long_is_waited_for);
  RUN_CLEAN(the_main_thread_of_a_rank_hangs_with_nothing_open_too);
  RUN_CLEAN(a_rank_that_enqueues_collectives_and_nothing_else_moves);
  RUN_CLEAN(a_collective_is_told_before_it_times_out);
  RUN_CLEAN(a_pause_before_the_loop_says_nothing_of_pauses_in_it);
  RUN_CLEAN(it_ends_for_those_who_wait_and_in_a_forked_child);
  RUN_CLEAN(a_process_that_hangs_ends_once_that_was_logged);
  RUN_CLEAN(those_who_hang_together_make_one_report);
  RUN_CLEAN(a_later_hang_and_one_that_was_none_are_asked_about_again);
  RUN_CLEAN(without_a_report_there_is_an_end);
  RUN_CLEAN(the_program_is_a_stranger_to_the_process);
}
