// Where slices of devices lie: in time, one after another as their stream ran them, and on lanes.
#include "otel_torchprof/device_slices.h"

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

namespace {

constexpr int64_t kNone = -1;
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

// A time, and so much (not negative) after it.
int64_t after(int64_t time, int64_t duration) { return time > kForever - duration ? kForever : time + duration; }

// Slices that follow one another, as a list through `next` and `before`.
struct Run {
  int64_t first = kNone;
  int64_t last = kNone;
};

class Fitting {
 public:
  Fitting(uint64_t count, uint64_t line_count, int64_t* start, int64_t* duration)
      : start_(start),
        duration_(duration),
        next_(count, kNone),
        before_(count, kNone),
        inside_(count),
        of_line_(line_count) {}

  void add(int64_t slice, int64_t outer, int64_t line) {
    if (outer < 0 && line < 0) return;
    Run& run = outer >= 0 ? inside_[outer] : of_line_[line];
    if (run.first < 0) {
      run.first = slice;
    } else {
      next_[run.last] = slice;
      before_[slice] = run.last;
    }
    run.last = slice;
  }

  void fit() {
    for (const Run& run : of_line_) {
      if (run.first >= 0) push(run, std::numeric_limits<int64_t>::min());
    }
    // What is around stands before what is inside, so it lies where it stays.
    for (size_t slice = 0; slice < inside_.size(); ++slice) {
      if (inside_[slice].first < 0) continue;
      const int64_t until = after(start_[slice], duration_[slice]);
      fit_inside(inside_[slice], std::min(after(start_[slice], 1), until), until);
    }
  }

 private:
  void push(const Run& run, int64_t from) {
    for (int64_t slice = run.first; slice >= 0; slice = next_[slice]) {
      start_[slice] = std::max(start_[slice], from);
      from = after(start_[slice], duration_[slice]);
    }
  }

  // Later, then sooner where the end of what is around is in the way, then shorter where that is not enough.
  void fit_inside(const Run& run, int64_t from, int64_t until) {
    push(run, from);
    int64_t limit = until;
    for (int64_t slice = run.last; slice >= 0 && after(start_[slice], duration_[slice]) > limit;
         slice = before_[slice]) {
      start_[slice] = std::max(from, limit - std::min(duration_[slice], limit - from));
      limit = start_[slice];
    }
    for (int64_t slice = run.first; slice >= 0; slice = next_[slice]) {
      start_[slice] = std::max(start_[slice], from);
      duration_[slice] = std::min(duration_[slice], until - start_[slice]);
      from = start_[slice] + duration_[slice];
    }
  }

  int64_t* start_;
  int64_t* duration_;
  std::vector<int64_t> next_;
  std::vector<int64_t> before_;
  std::vector<Run> inside_;
  std::vector<Run> of_line_;
};

// The ends of what is open on a lane, the top-level one first: they only fall.
class Lane {
 public:
  bool take(int64_t start, int64_t end) {
    while (!ends_.empty() && ends_.back() <= start) ends_.pop_back();
    if (!ends_.empty() && end > ends_.back()) return false;
    ends_.push_back(end);
    return true;
  }

 private:
  std::vector<int64_t> ends_;
};

int64_t lane_for(std::vector<Lane>& lanes, int64_t likely, int64_t start, int64_t end) {
  if (likely >= 0 && lanes[likely].take(start, end)) return likely;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    if (lanes[lane].take(start, end)) return static_cast<int64_t>(lane);
  }
  lanes.emplace_back();
  lanes.back().take(start, end);
  return static_cast<int64_t>(lanes.size() - 1);
}

}  // namespace

extern "C" int otp_fit_device_slices(uint64_t count, const int64_t* outer, const int64_t* line, uint64_t line_count,
                                     int64_t* start, int64_t* duration) {
  try {
    Fitting fitting(count, line_count, start, duration);
    for (uint64_t slice = 0; slice < count; ++slice)
      fitting.add(static_cast<int64_t>(slice), outer[slice], line[slice]);
    fitting.fit();
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

extern "C" int otp_device_lanes(uint64_t count, const int64_t* order, const int64_t* track, const int64_t* outer,
                                const int64_t* start, const int64_t* duration, int64_t* lane) {
  try {
    std::vector<Lane> lanes;
    for (uint64_t i = 0; i < count; ++i) {
      const int64_t slice = order[i];
      if (i != 0 && track[slice] != track[order[i - 1]]) lanes.clear();
      const int64_t likely = outer[slice] >= 0 ? lane[outer[slice]] : kNone;
      lane[slice] = lane_for(lanes, likely, start[slice], after(start[slice], duration[slice]));
    }
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}
