// Reading back what devices have come to, on a thread of this library; and keeping their clocks beside ours.
#pragma once

#include <pthread.h>
#include <signal.h>

#include "device_state.h"

namespace otp::devices {

inline DeviceClock& clock_of(State& s, c10::DeviceIndex index) {
  auto at = static_cast<size_t>(index);
  if (at >= s.clocks.size()) s.clocks.resize(at + 1);
  if (s.clocks[at] == nullptr)
    s.clocks[at] = std::make_unique<DeviceClock>(*s.guard, c10::Device(s.type, index), *g_devices_api);
  return *s.clocks[at];
}

inline bool calibrate(State& s, c10::DeviceIndex index, int64_t wait_ns) {
  DeviceClock& clock = clock_of(s, index);
  bool done = clock.calibrate(wait_ns, &s.made);
  if (static_cast<size_t>(index) < std::size(s.moments))
    s.moments[index].store(clock.moments(), std::memory_order_relaxed);
  return done;
}

inline void calibrate_all(State& s) {
  for (size_t index = 0; index < s.clocks.size(); ++index)
    if (s.clocks[index] != nullptr) calibrate(s, static_cast<c10::DeviceIndex>(index), kCalibrateWait);
  s.calibrated_at = steady_ns();
}

inline void note_time(State& s, const Pair& pair, double begin_ms, double duration_ms) {
  for (auto& session : s.sessions) {
    if (!session->requests(pair)) continue;
    if (session->times.size() >= session->most) {
      ++session->counts.lost;
      continue;
    }
    session->times.push_back({pair.id, pair.stream.id(), begin_ms, duration_ms, pair.moment,
                              static_cast<int32_t>(pair.stream.device_index())});
    ++session->counts.timed;
  }
}

// Whether times of the device can be told. A device that is too busy to answer is asked again, ten times a second.
inline bool has_clock(State& s, c10::DeviceIndex index) {
  if (clock_of(s, index).moments() != 0) return true;
  int64_t now = steady_ns();
  if (now - s.tried_at < kRetryPeriod) return false;
  s.tried_at = now;
  return calibrate(s, index, kCalibrateWait);
}

inline void find_time(State& s, const Pair& pair) {
  DeviceClock& clock = clock_of(s, pair.stream.device_index());
  std::optional<double> begin = clock.since(pair.moment, pair.begin);
  if (begin.has_value()) return note_time(s, pair, *begin, std::max(0.0, clock.elapsed(pair.begin, pair.end)));
  for (auto& session : s.sessions) session->counts.late += session->requests(pair) ? 1 : 0;
}

inline void give_back(State& s, const Pair& pair) {
  std::lock_guard<std::mutex> hold(s.spares_mutex);
  give_spare(s.spares, pair.stream.device_index(), pair.begin);
  give_spare(s.spares, pair.stream.device_index(), pair.end);
}

inline void give_back_ended(State& s, std::vector<Pair>& ended) {
  for (const Pair& pair : ended) give_back(s, pair);
  ended.clear();
}

inline void resolve(State& s, const Pair& pair) {
  try {
    find_time(s, pair);
  } catch (...) {
    count_refused(s, pair.consumers);
    give_back(s, pair);
    throw;
  }
  give_back(s, pair);
}

// What threads have ended; a thread that stands in the device's library for longer than that is left for the next time.
inline void gather(State& s, std::chrono::milliseconds patience) {
  std::vector<Pair> pairs;
  {
    std::lock_guard<std::mutex> hold(s.threads_mutex);
    pairs.swap(s.orphans);
    for (ThreadMarks* marks : s.threads) {
      std::unique_lock<std::timed_mutex> own(marks->mutex, patience);
      if (!own.owns_lock()) continue;
      pairs.insert(pairs.end(), marks->ended.begin(), marks->ended.end());
      marks->ended.clear();
    }
  }
  for (const Pair& pair : pairs) s.waiting.add(pair);
}

// Where a thread cannot be exempt from the rules of a capture, it asks nothing while one may be under way.
inline bool may_break_capture(const State& s) {
  constexpr int64_t kAfterCapture = 50'000'000;
  if (RelaxedCapture::is_possible()) return false;
  return steady_ns() - s.capture_seen_ns.load(std::memory_order_relaxed) < kAfterCapture;
}

// Under `control`. Never waits for the device.
inline void collect(State& s, std::chrono::milliseconds patience = {}) noexcept try {
  gather(s, patience);
  if (is_off(s) || s.guard == nullptr || may_break_capture(s)) return;
  RelaxedCapture relaxed;
  auto is_done = [&](const Pair& pair) {
    return has_clock(s, pair.stream.device_index()) && s.guard->queryEvent(pair.end);
  };
  s.waiting.take_done(is_done, [&](const Pair& pair) { resolve(s, pair); });
} catch (...) {
  fail(s, 0);
}

// The thread of ours asks from a device that the program uses. Device 0, which is current on a new thread, may be one
// that it does not, and the library of the device would begin to use it when its own calls set the current one back.
inline void stay_on_used_device(State& s) {
  std::optional<c10::DeviceIndex> used = s.waiting.device();
  for (size_t index = 0; index < s.clocks.size() && !used.has_value(); ++index)
    if (s.clocks[index] != nullptr) used = static_cast<c10::DeviceIndex>(index);
  if (used.has_value()) s.guard->setDevice(c10::Device(s.type, *used));
}

// Under `control`, on the thread of ours: what it does every two milliseconds.
inline void look(State& s) noexcept try {
  gather(s, {});
  if (is_off(s) || may_break_capture(s)) return;
  stay_on_used_device(s);
  collect(s);
  if (steady_ns() - s.calibrated_at > kCalibratePeriod) calibrate_all(s);
} catch (...) {
  fail(s, 0);
}

inline void collect_forever(State* s, const Collector* own) {
  std::unique_lock<std::mutex> sleeping(s->wake_mutex);
  while (!own->ending) {
    s->wake.wait_for(sleeping, kPeriod);
    if (own->ending) return;
    sleeping.unlock();
    {
      std::lock_guard<std::mutex> hold(s->control);
      look(*s);
    }
    sleeping.lock();
  }
}

// No signal is for a thread that is made meanwhile: one that it took would interrupt nothing that the program waits in.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &d_before);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &d_before, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t d_before;
};

// Throws where the system has no thread left.
inline void start_collector(State& s) {
  std::lock_guard<std::mutex> hold(s.wake_mutex);
  if (s.collector != nullptr) return;
  auto made = std::make_unique<Collector>();
  NoSignals blocked;
  made->thread = std::thread(collect_forever, &s, made.get());
  pthread_setname_np(made->thread.native_handle(), "otp-devices");
  s.collector = made.release();
}

// Without `control`, which it may be waiting for. Somebody may start the next one before this has ended.
inline void end_collector(State& s) {
  std::unique_ptr<Collector> ended;
  {
    std::lock_guard<std::mutex> hold(s.wake_mutex);
    ended.reset(s.collector);
    s.collector = nullptr;
    if (ended == nullptr) return;
    ended->ending = true;
  }
  s.wake.notify_all();
  ended->thread.join();
}

}  // namespace otp::devices
