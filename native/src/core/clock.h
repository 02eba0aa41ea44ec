// The recorder's clock: raw ticks on the hot path, Unix nanoseconds when decoded.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "otel_torchprof/recorder_hot.h"

namespace otp {

class BlackBox;

// Set once, before the first tick is read.
extern bool g_clock_is_tsc;

inline uint64_t clock_gettime_ns(clockid_t id) {
  timespec now;
  clock_gettime(id, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

inline uint64_t ticks_now() { return hot::ticks(g_clock_is_tsc); }

// A moment seen on both clocks.
struct ClockPoint {
  uint64_t ticks;
  int64_t unix_ns;
};

// Points in the order of their ticks.
struct ClockPoints {
  const ClockPoint* first;
  size_t count;

  const ClockPoint* begin() const { return first; }
  const ClockPoint* end() const { return first + count; }
  const ClockPoint& operator[](size_t i) const { return first[i]; }
  const ClockPoint& back() const { return first[count - 1]; }
};

// Ticks to Unix time, piecewise linear through points that were measured as the process went on.
//
// Never decreasing: a wall clock that jumps back (or a sample that says so) does not take the events back with it, they
// continue that much ahead of it; a jump forward uses that up first, and what is left is taken over at the point where
// it was seen. Either is counted as a step.
class Clock {
 public:
  // Takes 100 us, to know the rate from the start.
  Clock();

  // Measures a new point. Thread-safe; about 1 us.
  void calibrate();
  // For tests: takes a point as measured.
  void add_point(ClockPoint point, uint64_t monotonic_ns);

  // The box gets the latest points, and each one that comes; null: no longer.
  void set_box(BlackBox* box);

  int64_t unix_ns(uint64_t ticks) const;
  uint64_t steps() const;

 private:
  static constexpr size_t kMaxPoints = 4096;

  void keep(ClockPoint point);
  ClockPoints points() const { return {d_points, d_count}; }
  friend class ClockReader;
  mutable std::mutex d_mutex;
  ClockPoint d_points[kMaxPoints + 2];  // no vector: calibration must not fail for want of memory
  size_t d_count = 0;
  BlackBox* d_box = nullptr;
  uint64_t d_last_monotonic = 0;
  int64_t d_last_wall = 0;
  int64_t d_ahead = 0;  // of the wall clock, since it jumped back
  uint64_t d_steps = 0;
};

// A segment of ticks that one line maps.
struct ClockSegment {
  uint64_t from = 1, to = 0;  // ticks; empty
  ClockPoint base{};
  double ns_per_tick = 1.0;

  bool covers(uint64_t ticks) const { return ticks >= from && ticks < to; }
  // A segment lasts from one calibration to the next; a double is exact to the nanosecond for three months of ticks.
  int64_t unix_ns(uint64_t ticks) const {
    double passed = static_cast<double>(static_cast<int64_t>(ticks - base.ticks)) * ns_per_tick;
    // No time is further away than a century; what says so is no tick, and must not overflow.
    constexpr double kFar = 3.2e18;
    return base.unix_ns + static_cast<int64_t>(std::min(std::max(passed, -kFar), kFar));
  }
};

// A copy of the points for one decode: no lock per event, and all events of a batch on one mapping.
class ClockReader {
 public:
  explicit ClockReader(const Clock& clock);
  explicit ClockReader(std::vector<ClockPoint> points) : d_points(std::move(points)) {}  // one at least, in order
  int64_t unix_ns(uint64_t ticks) {
    if (__builtin_expect(!d_segment.covers(ticks), 0)) select(ticks);
    return d_segment.unix_ns(ticks);
  }

 private:
  void select(uint64_t ticks);

  std::vector<ClockPoint> d_points;
  ClockSegment d_segment;  // empty, so that the first call selects one
};

}  // namespace otp
