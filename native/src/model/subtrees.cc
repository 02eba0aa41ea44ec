#include "otel_torchprof/model.h"

#include <algorithm>

#include "otel_torchprof/record_format.h"
#include "roots.h"

// From the last to the first: when a value is added to its parent, everything below it is in it already.
extern "C" void otp_add_to_parents(uint64_t count, const int32_t* parent, int64_t* values) {
  for (uint64_t i = count; i-- > 0;)
    if (parent[i] >= 0) values[parent[i]] += values[i];
}

extern "C" void otp_max_to_parents(uint64_t count, const int32_t* parent, int64_t* values) {
  for (uint64_t i = count; i-- > 0;)
    if (parent[i] >= 0 && values[parent[i]] < values[i]) values[parent[i]] = values[i];
}

extern "C" void otp_subtract_from_parents(uint64_t count, const int32_t* parent, const int64_t* values,
                                          int64_t* totals) {
  for (uint64_t i = 0; i < count; ++i)
    if (parent[i] >= 0) totals[parent[i]] -= values[i];
}

extern "C" void otp_self_times(uint64_t count, const int32_t* parent, const int64_t* start, const int64_t* end,
                               int64_t* self) {
  for (uint64_t i = 0; i < count; ++i) {
    self[i] = end[i] - start[i];
    if (parent[i] >= 0) self[parent[i]] -= self[i];
  }
}

// Parents come first: whether one stays is known before what is below it.
extern "C" uint64_t otp_leave_out(const otp_left_out* events) {
  const otp_left_out& e = *events;
  uint64_t linked = 0;
  for (uint64_t i = 0; i < e.count; ++i) {
    const int32_t group = e.group[i];
    e.left_group[i] = -1, e.is_left[i] = 0;
    if (group < 0) continue;
    ++e.recorded[group];
    if (e.span_id[i] == e.root[i]) continue;
    const int32_t above = e.parent[i];
    const bool is_below_what_stays = e.is_root[i] != 0 || (above >= 0 && e.group[above] >= 0 && e.is_left[above] == 0);
    if (is_below_what_stays && e.is_phase != nullptr && e.is_phase[e.name[i]] != 0) continue;
    e.left_group[i] = group, e.is_left[i] = 1;
    if (e.sequence_nr[i] >= 0 && e.kind[i] != OTP_EVENT_PHASE) e.linked[linked++] = static_cast<uint32_t>(i);
  }
  return linked;
}

// An odd key, then the finaliser of SplitMix64: bijections that map 0 to 0.
extern "C" void otp_event_span_ids(uint64_t count, const uint64_t* ids, uint64_t key, uint64_t* span_ids) {
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t z = ids[i] * (key | 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    span_ids[i] = z ^ (z >> 31);
  }
}

extern "C" void otp_top_level(uint64_t count, const int32_t* parent, const uint8_t* flags, int32_t* top_level) {
  for (uint64_t i = 0; i < count; ++i) {
    int32_t above = parent[i] < 0 ? -1 : top_level[parent[i]];
    top_level[i] = above < 0 && flags[i] != 0 ? static_cast<int32_t>(i) : above;
  }
}

extern "C" void otp_roots(uint64_t count, const int64_t* parent, int64_t* roots) {
  otp::fill_roots(count, parent, roots);
}

// Sums wrap around, as numpy's do.
extern "C" void otp_add_to_groups(uint64_t count, const uint32_t* group, int64_t begin, int64_t* first, int64_t* counts,
                                  uint64_t column_count, const int64_t* const* columns, int64_t* const* sums) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t own = group[i];
    if (first[own] < 0) first[own] = begin + static_cast<int64_t>(i);
    ++counts[own];
    for (uint64_t c = 0; c < column_count; ++c)
      sums[c][own] = static_cast<int64_t>(static_cast<uint64_t>(sums[c][own]) + static_cast<uint64_t>(columns[c][i]));
  }
}
