// Processes that die at random moments, under 1 to 8 threads: what the black box has of each thread is what the thread
// had done, but for the one event in flight.
//
//   core_blackbox_deaths_test [DEATHS]    300 by default
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <thread>

#include "child.h"
#include "core_blackbox_support.h"

namespace {

constexpr int kMostThreads = 8;

// What the process counts of itself, in a page that outlives it too.
struct Counted {
  std::atomic<uint32_t> running;
  std::atomic<uint32_t> os_tid[kMostThreads];
  std::atomic<uint64_t> ended[kMostThreads];
};

struct Random {
  uint64_t state;
  uint32_t below(uint32_t limit) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33) % limit;
  }
};

enum class Death { kKill, kSegv, kBus, kExit, kAbort, kCount };

void die(Death death) {
  signal(SIGSEGV, SIG_DFL);  // a sanitizer has its own
  signal(SIGBUS, SIG_DFL);
  signal(SIGABRT, SIG_DFL);
  switch (death) {
    case Death::kSegv:
      kill(getpid(), SIGSEGV);
      break;
    case Death::kBus:
      kill(getpid(), SIGBUS);
      break;
    case Death::kExit:
      _exit(7);
    case Death::kAbort:
      std::abort();
    default:
      kill(getpid(), SIGKILL);
  }
  for (;;) pause();
}

// Events inside of one that never ends; every hundredth has another in it.
void record_for_ever(Counted& counted, int thread) {
  counted.os_tid[thread] = static_cast<uint32_t>(gettid());
  begin("for ever");
  ++counted.running;
  for (uint64_t done = 0;; ++done) {
    begin("one");
    end("one");
    counted.ended[thread].store(done + 1, std::memory_order_relaxed);
  }
}

void run_until_death(const BoxFile& file, Counted& counted, int threads, Death death, uint32_t after_us) {
  OpenBox box(file);
  for (int i = 0; i < threads; ++i) std::thread([&counted, i] { record_for_ever(counted, i); }).detach();
  while (counted.running < static_cast<uint32_t>(threads)) std::this_thread::yield();
  timespec rest{0, static_cast<long>(after_us) * 1000};
  nanosleep(&rest, nullptr);
  die(death);
}

struct Seen {
  uint64_t first = UINT64_MAX, last = 0, ended = 0, open = 0, events = 0;
};

// A thread that was put aside at the beginning of a chunk, while others wrote enough to evict all that it had before.
int at_a_beginning = 0;

void check_thread(const Seen& seen, uint64_t ended) {
  // The event with index 0 is the one around all others, so the n-th to end has index n.
  CHECK(seen.open <= 1);
  if (seen.ended == 0) {
    ++at_a_beginning;
    CHECK(seen.events == seen.open && (seen.open == 0 || seen.last == ended + 1));
    return;
  }
  CHECK_EQ(seen.events, seen.last - seen.first + 1);  // none is missing in between
  CHECK(seen.ended >= ended && seen.ended <= ended + 1);
  CHECK(seen.last <= ended + 2);
}

void check_image(const BoxFile& file, const Counted& counted, int threads) {
  Contents contents(file);
  CHECK_EQ(contents->chunks_damaged, 0u);
  CHECK_EQ(contents->is_closed, 0u);
  const Batch& batch = contents.batch();
  std::map<uint32_t, Seen> by_thread;
  std::map<uint32_t, int> around;
  for (uint64_t row = 0; row < batch->rows; ++row) {
    uint32_t os_tid = batch->threads[batch->thread[row]].os_tid;
    bool is_open = (batch->flags[row] & OTP_FLAG_UNFINISHED) != 0;
    if (batch.name(row) == "for ever") {
      CHECK(is_open && batch->parent[row] == -1);
      ++around[os_tid];
      continue;
    }
    CHECK_EQ(batch.name(row), "one");
    CHECK(batch->parent[row] >= 0);
    Seen& seen = by_thread[os_tid];
    uint64_t index = (batch->id[row] & ((uint64_t{1} << OTP_INDEX_BITS) - 1)) - 1;
    seen.first = std::min(seen.first, index);
    seen.last = std::max(seen.last, index);
    seen.open += is_open;
    if (!is_open) seen.ended = std::max(seen.ended, index);
    ++seen.events;
  }
  for (int i = 0; i < threads; ++i) {
    uint64_t ended = counted.ended[i];
    CHECK_EQ(around[counted.os_tid[i]], 1);
    if (ended > 1) check_thread(by_thread[counted.os_tid[i]], ended);
  }
}

void die_once(Random& random) {
  BoxFile file;
  void* page = mmap(nullptr, sizeof(Counted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  auto& counted = *new (page) Counted{};
  int threads = 1 + static_cast<int>(random.below(kMostThreads));
  auto death = static_cast<Death>(random.below(static_cast<uint32_t>(Death::kCount)));
  uint32_t after_us = random.below(8000);
  int status = end_of([&] { run_until_death(file, counted, threads, death, after_us); });
  CHECK(death == Death::kExit ? WIFEXITED(status) && WEXITSTATUS(status) == 7 : WIFSIGNALED(status));
  CHECK_EQ(counted.running, static_cast<uint32_t>(threads));
  check_image(file, counted, threads);
  munmap(page, sizeof(Counted));
}

}  // namespace

int main(int argc, char** argv) {
  int deaths = argc > 1 ? std::atoi(argv[1]) : 300 / kSlowdown;
  Random random{20261126};
  for (int i = 0; i < deaths; ++i) die_once(random);
  CHECK(at_a_beginning <= deaths);  // a few of a hundred threads
  std::printf("passed %d deaths; %d threads stood at the beginning of a chunk\n", deaths, at_a_beginning);
}
