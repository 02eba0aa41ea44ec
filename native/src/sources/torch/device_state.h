// What is timed and for whom, the marks of every thread, and the events that nobody needs at the moment.
//
// Locks: `control` for whoever collects, starts or stops; `threads_mutex` for the list of threads; each thread's own;
// `spares_mutex` for the events that are nobody's. Taken in this order. Under its own a thread records, so that who
// takes the second one may wait for that.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device_clock.h"
#include "device_launches.h"
#include "device_pairs.h"
#include "devices.h"
#include "otel_torchprof/record_format.h"

namespace otp::devices {

inline const otp_api* g_devices_api = nullptr;

// For waits and periods: the recorder's clock follows the wall clock where that is set forward.
inline int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline constexpr size_t kTooMany = 4096;   // pairs of one thread that nobody has collected
inline constexpr size_t kMostOpen = 2048;  // on one thread; those that never end are forgotten from the oldest on
inline constexpr size_t kSparesAtOnce = 32;
inline constexpr auto kPeriod = std::chrono::milliseconds(2), kPatience = std::chrono::milliseconds(100);
inline constexpr int64_t kCalibratePeriod = 1'000'000'000, kCalibrateWait = 2'000'000, kRetryPeriod = 100'000'000,
                         kFirstWait = 100'000'000;

struct Time {
  uint64_t id;
  c10::StreamId stream;
  double begin_ms, duration_ms;  // the first from the moment
  uint32_t moment;
  int32_t device_index;
};

// A session that has its events timed. By a token: its bit may be another's before this is stopped.
struct Timed {
  int64_t token;
  uint32_t consumer;
  int which;
  uint64_t most;
  bool paused = false;
  std::vector<Time> times;
  otp_device_counts counts{};  // `captured` and `failed` at the start: what all had that had the bit
  int64_t until = INT64_MAX;   // the token of who has the bit now

  // Not what the bit's last owner left open, nor what its next one began.
  bool requests(const Pair& pair) const {
    return (consumer & pair.consumers) != 0 && token <= pair.era && pair.era < until;
  }
};

struct Collector {
  std::thread thread;
  bool ending = false;
};

// What every begin reads.
struct Wishes {
  // Sessions, by what they request timed; `all` is part of `ops`.
  std::atomic<uint32_t> ops{0}, all{0}, labels{0};
  std::atomic<int> held{0};
  std::atomic<bool> failed{false};
};

// Made anew in a forked child, where the old one's locks and threads mean nothing: in the same memory, since more may
// not be had there.
struct State {
  const uint64_t generation;  // from 1
  std::mutex control;
  Wishes wishes;
  LaunchesByName launches;  // of `type`
  const Guard* guard = nullptr;
  c10::DeviceType type = c10::DeviceType::CPU;
  std::atomic<bool> in_use[64] = {};                 // devices, once that is known
  std::vector<std::unique_ptr<DeviceClock>> clocks;  // by device index
  std::atomic<uint32_t> moments[64] = {};            // of each clock, for those who record
  int64_t calibrated_at = 0, tried_at = 0;           // steady_ns()
  Waiting waiting;
  std::vector<std::unique_ptr<Timed>> sessions;
  std::atomic<int64_t> last_token{0};
  std::atomic<uint64_t> captured[OTP_MAX_SESSIONS] = {};
  std::atomic<uint64_t> refused[OTP_MAX_SESSIONS] = {};
  std::atomic<uint64_t> made{0}, destroyed{0};
  std::atomic<int64_t> capture_seen_ns{0};  // steady_ns() when a thread last found its stream being captured
  std::mutex failure_mutex;
  char failure[512] = "";

  std::mutex threads_mutex;
  std::vector<ThreadMarks*> threads;
  std::vector<Pair> orphans;  // of threads that have ended
  std::mutex spares_mutex;
  Spares spares;

  std::mutex wake_mutex;
  std::condition_variable wake;
  Collector* collector = nullptr;

  explicit State(uint64_t of_generation) : generation(of_generation) {}
};

inline std::atomic<State*> g_state{nullptr};
inline std::atomic<bool> g_exiting{false};

inline State& state() { return *g_state.load(std::memory_order_acquire); }

// The marks of the calling thread. They are the state's: a thread that ends leaves them there.
struct OwnMarks {
  ThreadMarks* marks = nullptr;
  uint64_t of = 0;  // the state's generation
  ~OwnMarks();
};
inline thread_local OwnMarks t_own;

inline ThreadMarks& own_marks(State& s) {
  if (t_own.of != s.generation) {  // the first mark of this thread, or of a forked child
    auto marks = std::make_unique<ThreadMarks>();
    std::lock_guard<std::mutex> hold(s.threads_mutex);
    s.threads.push_back(marks.get());
    t_own.marks = marks.release();
    t_own.of = s.generation;
  }
  return *t_own.marks;
}

inline void give_back_all(State& s, ThreadMarks& marks) {
  std::lock_guard<std::mutex> hold(s.spares_mutex);
  for (const Pair& pair : marks.open) give_spare(s.spares, pair.stream.device_index(), pair.begin);
  for (size_t index = 0; index < marks.spares.size(); ++index)
    for (void* event : marks.spares[index]) give_spare(s.spares, static_cast<c10::DeviceIndex>(index), event);
  marks.open.clear();
  marks.spares.clear();
}

inline OwnMarks::~OwnMarks() {
  State* s = g_state.load(std::memory_order_acquire);
  if (marks == nullptr || of != s->generation || g_exiting.load(std::memory_order_relaxed)) return;
  try {
    std::lock_guard<std::mutex> hold(s->threads_mutex);
    std::lock_guard<std::timed_mutex> own(marks->mutex);
    s->orphans.insert(s->orphans.end(), marks->ended.begin(), marks->ended.end());
    give_back_all(*s, *marks);
    s->threads.erase(std::find(s->threads.begin(), s->threads.end(), marks));
  } catch (...) {  // no memory: what is left is found at the end
    return;
  }
  delete marks;
}

inline void count_refused(State& s, uint32_t consumers) {
  for (uint32_t rest = consumers; rest != 0; rest &= rest - 1)
    s.refused[__builtin_ctz(rest)].fetch_add(1, std::memory_order_relaxed);
}

// Whatever a device's library says once, nothing is asked of it again: what failed was none of the program's.
inline void fail(State& s, uint32_t consumers) noexcept {
  count_refused(s, consumers);
  std::lock_guard<std::mutex> hold(s.failure_mutex);
  if (s.wishes.failed.load(std::memory_order_relaxed)) return;
  try {
    throw;
  } catch (const c10::Error& error) {
    std::snprintf(s.failure, sizeof s.failure, "%s", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::snprintf(s.failure, sizeof s.failure, "%s", error.what());
  } catch (...) {
    std::snprintf(s.failure, sizeof s.failure, "an unknown exception");
  }
  s.wishes.failed.store(true, std::memory_order_release);
}

inline bool is_off(const State& s) {
  return s.wishes.failed.load(std::memory_order_acquire) || s.wishes.held.load(std::memory_order_relaxed) != 0 ||
         g_exiting.load(std::memory_order_relaxed);
}

inline void* take_event(State& s, ThreadMarks& marks, c10::DeviceIndex index) {
  void* event = take_spare(marks.spares, index);
  if (event != nullptr) return event;
  {
    std::lock_guard<std::mutex> hold(s.spares_mutex);
    for (size_t taken = 0; taken < kSparesAtOnce; ++taken) {  // the thread has none of this device
      void* spare = take_spare(s.spares, index);
      if (spare == nullptr) break;
      give_spare(marks.spares, index, spare);
    }
  }
  event = take_spare(marks.spares, index);
  if (event == nullptr) s.made.fetch_add(1, std::memory_order_relaxed);
  return event;
}

}  // namespace otp::devices
