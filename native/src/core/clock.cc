#include "core/clock.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace otp {

namespace {

// Invariant TSC (constant rate in all power states): CPUID 0x80000007, EDX bit 8.
bool tsc_is_invariant() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0x80000007u, &eax, &ebx, &ecx, &edx) != 0 && (edx & (1u << 8)) != 0;
#else
  return false;
#endif
}

struct Sample {
  ClockPoint point;
  uint64_t monotonic_ns;
};

// The wall clock read between two ticks, so that the error is at most half of what the reading took; the tightest of
// several tries, since an interrupt may fall between.
Sample take_sample() {
  Sample best{};
  uint64_t best_width = UINT64_MAX;
  for (int attempt = 0; attempt < 8; ++attempt) {
    uint64_t before = ticks_now();
    uint64_t wall = clock_gettime_ns(CLOCK_REALTIME);
    uint64_t after = ticks_now();
    if (after - before >= best_width) continue;
    best_width = after - before;
    best.point = {before + (after - before) / 2, static_cast<int64_t>(wall)};
    best.monotonic_ns = clock_gettime_ns(CLOCK_MONOTONIC);
  }
  return best;
}

// More than what slewing or the reading itself explains.
constexpr int64_t kStepNs = 1000000;

// Two points nearer than this say more about the reading of the clock than about its rate.
constexpr uint64_t kMinSegmentNs = 20000;

// A process that drains every few seconds for weeks must not collect points for ever; what is this old is decoded.
constexpr size_t kMaxPoints = 4096;

}  // namespace

bool g_clock_is_tsc = tsc_is_invariant();

Clock::Clock() { calibrate(); }

void Clock::calibrate() {
  Sample sample = take_sample();
  add_point(sample.point, sample.monotonic_ns);
}

void Clock::add_point(ClockPoint point, uint64_t monotonic_ns) {
  std::lock_guard<std::mutex> hold(d_mutex);
  if (d_points.empty()) {
    d_points.push_back(point);
    d_last_monotonic = monotonic_ns;
    return;
  }
  ClockPoint last = d_points.back();
  if (d_points.size() >= kMaxPoints) d_points.erase(d_points.begin(), d_points.begin() + kMaxPoints / 2);
  auto monotonic_passed = static_cast<int64_t>(monotonic_ns - d_last_monotonic);
  if (point.ticks <= last.ticks || monotonic_passed < static_cast<int64_t>(kMinSegmentNs)) return;
  int64_t wall_passed = point.unix_ns - last.unix_ns;
  int64_t jump = wall_passed - monotonic_passed;
  d_last_monotonic = monotonic_ns;
  if (jump > kStepNs || jump < -kStepNs) {
    ++d_steps;
    // What happened before the jump was seen keeps the old line ...
    d_points.push_back({point.ticks, last.unix_ns + monotonic_passed});
    // ... and only a jump forward moves what comes after it.
    if (jump > 0) d_points.push_back({point.ticks + 1, point.unix_ns});
    return;
  }
  d_points.push_back({point.ticks, std::max(point.unix_ns, last.unix_ns + 1)});
}

int64_t Clock::unix_ns(uint64_t ticks) const { return ClockReader(*this).unix_ns(ticks); }

uint64_t Clock::steps() const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return d_steps;
}

ClockReader::ClockReader(const Clock& clock) {
  std::lock_guard<std::mutex> hold(clock.d_mutex);
  d_points = clock.d_points;
}

void ClockReader::select(uint64_t ticks) {
  auto after = std::upper_bound(d_points.begin(), d_points.end(), ticks,
                                [](uint64_t value, const ClockPoint& point) { return value < point.ticks; });
  size_t index = after == d_points.begin() ? 0 : static_cast<size_t>(after - d_points.begin()) - 1;
  if (index + 1 == d_points.size() && index > 0) --index;  // past the last point: go on at the last known rate
  d_segment = index;
  bool last = index + 2 >= d_points.size();
  d_from = index == 0 ? 0 : d_points[index].ticks;
  d_to = last ? UINT64_MAX : d_points[index + 1].ticks;
  d_ns_per_tick = 1.0;
  if (index + 1 < d_points.size()) {
    const ClockPoint &a = d_points[index], &b = d_points[index + 1];
    d_ns_per_tick = static_cast<double>(b.unix_ns - a.unix_ns) / static_cast<double>(b.ticks - a.ticks);
  }
}

int64_t ClockReader::unix_ns(uint64_t ticks) {
  if (ticks < d_from || ticks >= d_to) select(ticks);
  const ClockPoint& from = d_points[d_segment];
  // A segment lasts from one calibration to the next; a double is exact to the nanosecond for three months of ticks.
  double passed = static_cast<double>(static_cast<int64_t>(ticks - from.ticks)) * d_ns_per_tick;
  return from.unix_ns + static_cast<int64_t>(passed);
}

}  // namespace otp
