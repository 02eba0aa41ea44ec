// Begins and ends that are events of their own, and the event in which each one begins.
#include <algorithm>
#include <new>
#include <vector>

#include "otel_torchprof/trace_files.h"

namespace {

constexpr uint64_t kNone = UINT64_MAX;

// Ends the row: false where it has no begin.
bool end_row(const otp_trace_rows& rows, uint64_t begin, uint64_t end) {
  if (begin == kNone) return false;
  rows.duration[begin] = std::max<int64_t>(rows.start[end] - rows.start[begin], 0);
  return true;
}

// Phases B and E: an end is that of the last begin on its track.
int64_t pair_by_track(const otp_trace_rows& rows) {
  int64_t unmatched = 0;
  uint64_t tracks = 0;
  for (uint64_t i = 0; i < rows.count; ++i) tracks = std::max<uint64_t>(tracks, uint64_t{rows.track[i]} + 1);
  std::vector<std::vector<uint64_t>> open(tracks);
  for (uint64_t i = 0; i < rows.count; ++i) {
    std::vector<uint64_t>& begun = open[rows.track[i]];
    if (rows.phase[i] == 'B') begun.push_back(i);
    if (rows.phase[i] != 'E') continue;
    unmatched += !end_row(rows, begun.empty() ? kNone : begun.back(), i);
    if (!begun.empty()) begun.pop_back();
  }
  return unmatched;
}

// Phases b and e: an end is that of the last begin with its id.
int64_t pair_by_id(const otp_trace_rows& rows) {
  std::vector<uint64_t> ends;
  for (uint64_t i = 0; i < rows.count; ++i)
    if (rows.phase[i] == 'b' || rows.phase[i] == 'e') ends.push_back(i);
  std::stable_sort(ends.begin(), ends.end(), [&](uint64_t a, uint64_t b) { return rows.id[a] < rows.id[b]; });
  int64_t unmatched = 0;
  uint64_t begun = kNone;
  for (uint64_t i = 0; i < ends.size(); ++i) {
    const uint64_t row = ends[i];
    if (i != 0 && rows.id[row] != rows.id[ends[i - 1]]) begun = kNone;
    if (rows.phase[row] == 'e') unmatched += !end_row(rows, begun, row);
    begun = rows.phase[row] == 'b' ? row : kNone;
  }
  return unmatched;
}

}  // namespace

extern "C" int64_t otp_trace_pair(const otp_trace_rows* rows) {
  try {
    return pair_by_track(*rows) + pair_by_id(*rows);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// The parents of a row are a stack of those that are open.
extern "C" void otp_trace_nest(uint64_t count, const uint32_t* track, const int64_t* start, const int64_t* end,
                               const uint8_t* apart, int whole, int32_t* parent) {
  int32_t open = -1;
  for (uint64_t i = 0; i < count; ++i) {
    if (i != 0 && track[i] != track[i - 1]) open = -1;
    parent[i] = -1;
    if (apart[i] != 0) continue;
    while (open >= 0 && (end[open] <= start[i] || (whole != 0 && end[open] < end[i]))) open = parent[open];
    parent[i] = open;
    open = static_cast<int32_t>(i);
  }
}
