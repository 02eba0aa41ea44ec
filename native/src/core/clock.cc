#include "core/clock.h"

#include <algorithm>

#include "core/blackbox.h"

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
    uint64_t monotonic = clock_gettime_ns(CLOCK_MONOTONIC);  // inside: an interrupt before it would look like a jump
    uint64_t after = ticks_now();
    if (after - before >= best_width) continue;
    best_width = after - before;
    best.point = {before + (after - before) / 2, static_cast<int64_t>(wall)};
    best.monotonic_ns = monotonic;
  }
  return best;
}

// More than what slewing or the reading itself explains.
constexpr int64_t kStepNs = 1000000;

// Two points nearer than this say more about the reading of the clock than about its rate.
constexpr uint64_t kMinSegmentNs = 20000;

// A process that drains every few seconds for weeks must not collect points for ever; what is this old is decoded.

// A longer segment would not make the rate better: what is read of the clock is off by some 50 ns.
constexpr int64_t kRateSpanNs = 1000000000;

// The rate up to a point: over a segment that is long enough for the readings' error not to matter, but not over a jump
// (two points one tick apart).
double rate_before(ClockPoints points, size_t last) {
  size_t first = last;
  while (first > 0 && points[first].ticks - points[first - 1].ticks > 1 &&
         points[last].unix_ns - points[first].unix_ns < kRateSpanNs)
    --first;
  if (first == last) return last == 0 ? 1.0 : rate_before(points, last - 1);  // just after a jump
  return static_cast<double>(points[last].unix_ns - points[first].unix_ns) /
         static_cast<double>(points[last].ticks - points[first].ticks);
}

ClockSegment segment_of(ClockPoints points, uint64_t ticks) {
  auto after = std::upper_bound(points.begin(), points.end(), ticks,
                                [](uint64_t value, const ClockPoint& point) { return value < point.ticks; });
  if (after == points.end())
    return {points.back().ticks, UINT64_MAX, points.back(), rate_before(points, points.count - 1)};
  auto to = after == points.begin() ? after + 1 : after;
  auto from = to - 1;
  double ns_per_tick = 1.0;
  if (to != points.end())
    ns_per_tick = static_cast<double>(to->unix_ns - from->unix_ns) / static_cast<double>(to->ticks - from->ticks);
  return {from == points.begin() ? 0 : from->ticks, to == points.end() ? UINT64_MAX : to->ticks, *from, ns_per_tick};
}

}  // namespace

bool g_clock_is_tsc = tsc_is_invariant();

Clock::Clock() {
  calibrate();
  uint64_t begin = clock_gettime_ns(CLOCK_MONOTONIC);
  while (clock_gettime_ns(CLOCK_MONOTONIC) - begin < 5 * kMinSegmentNs) continue;
  calibrate();
}

void Clock::calibrate() {
  Sample sample = take_sample();
  add_point(sample.point, sample.monotonic_ns);
}

void Clock::keep(ClockPoint point) {
  d_points[d_count++] = point;
  if (d_box != nullptr) d_box->add_point(point);
}

void Clock::set_box(BlackBox* box) {
  std::lock_guard<std::mutex> hold(d_mutex);
  d_box = box;
  if (box == nullptr) return;
  for (size_t i = d_count - std::min<size_t>(d_count, OTP_BLACKBOX_POINTS); i < d_count; ++i)
    box->add_point(d_points[i]);
}

void Clock::add_point(ClockPoint point, uint64_t monotonic_ns) {
  std::lock_guard<std::mutex> hold(d_mutex);
  auto passed = static_cast<int64_t>(monotonic_ns - d_last_monotonic);
  bool first = d_count == 0;
  if (!first && (point.ticks <= points().back().ticks + 1 || passed < static_cast<int64_t>(kMinSegmentNs))) return;
  int64_t jump = first ? 0 : point.unix_ns - d_last_wall - passed;
  d_last_monotonic = monotonic_ns;
  d_last_wall = point.unix_ns;
  if (d_count >= kMaxPoints) {
    std::copy(d_points + kMaxPoints / 2, d_points + d_count, d_points);
    d_count -= kMaxPoints / 2;
  }
  if (jump <= kStepNs && jump >= -kStepNs) {
    int64_t lowest = first ? point.unix_ns : points().back().unix_ns + 1;
    keep({point.ticks, std::max(point.unix_ns + d_ahead, lowest)});
    return;
  }
  ++d_steps;
  // What happened before the jump was seen keeps the old line ...
  int64_t continued = points().back().unix_ns + passed;
  keep({point.ticks, continued});
  // ... and only a jump forward, to where no event has been yet, moves what comes after it.
  d_ahead = std::max<int64_t>(d_ahead - jump, 0);
  int64_t now = point.unix_ns + d_ahead;
  if (now > continued + kStepNs) keep({point.ticks + 1, now});
}

int64_t Clock::unix_ns(uint64_t ticks) const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return segment_of(points(), ticks).unix_ns(ticks);
}

uint64_t Clock::steps() const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return d_steps;
}

ClockReader::ClockReader(const Clock& clock) {
  std::lock_guard<std::mutex> hold(clock.d_mutex);
  d_points.assign(clock.points().begin(), clock.points().end());
}

void ClockReader::select(uint64_t ticks) { d_segment = segment_of({d_points.data(), d_points.size()}, ticks); }

}  // namespace otp
