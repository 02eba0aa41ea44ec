#include "otel_torchprof/display.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "model/key_places.h"
#include "otel_torchprof/record_format.h"

namespace otp {
namespace {

constexpr uint8_t kUserScope = 7;  // at::RecordScope::USER_SCOPE

int64_t plus(int64_t one, int64_t other) {  // wraps around, as numpy's sums do
  return static_cast<int64_t>(static_cast<uint64_t>(one) + static_cast<uint64_t>(other));
}

int64_t minus(int64_t one, int64_t other) {
  return static_cast<int64_t>(static_cast<uint64_t>(one) - static_cast<uint64_t>(other));
}

bool is_async(const otp_events& events, uint64_t row) { return (events.flags[row] & OTP_FLAG_ASYNC) != 0; }

bool is_hidden(const otp_events& events, uint64_t row) { return events.hidden != nullptr && events.hidden[row] != 0; }

// Whether torch gives it no children.
bool is_unfit(const otp_events& events, uint64_t row) { return is_async(events, row) || is_hidden(events, row); }

int64_t duration_of(const otp_events& events, uint64_t row) { return minus(events.end[row], events.start[row]); }

// Where what is found of events is written, by row.
struct Found {
  int32_t* parent;     // on display
  uint8_t* left_out;   // whether it is
  uint8_t* children;   // room to work in
  int64_t* self_time;  // of those that are not left out; null: not asked for

  void add(uint64_t row, int64_t time) const {
    if (self_time != nullptr) self_time[row] = plus(self_time[row], time);
  }
  void subtract(int32_t row, int64_t time) const {
    if (row >= 0) add(static_cast<uint64_t>(row), minus(0, time));
  }
};

// Makes the parent of each event its nearest ancestor that does not end before it and is not unfit; of unfit events,
// that is not unfit: otherwise a child that ends before them could miss a parent. Counts the children on display as so
// many bits: 0, 1, or more. Takes all but unfit events as displayed for self times. Returns the events that may be left
// out.
//
// The search continues at the new parent of a candidate: the ancestors that the candidate skipped are unfit, or end
// before it and so before the event.
std::vector<uint32_t> contain(const otp_events events, const Found found) {
  std::vector<uint32_t> suspects;
  int32_t* const parent = found.parent;
  for (uint32_t i = 0; i < events.count; ++i) {
    const bool is_odd = is_unfit(events, i);
    const int64_t end = is_odd ? INT64_MIN : events.end[i];
    int32_t above = parent[i];
    while (above >= 0 && (events.end[above] < end || is_unfit(events, static_cast<uint32_t>(above))))
      above = parent[above];
    parent[i] = above;
    if (!is_odd) {
      const int64_t duration = duration_of(events, i);
      found.add(i, duration);
      found.subtract(above, duration);
      if (above >= 0) found.children[above] = static_cast<uint8_t>(found.children[above] << 1 | 1);
    }
    const bool is_namesake = above >= 0 && events.name[above] == events.name[i];
    if (is_odd || is_namesake || events.kind[i] == OTP_EVENT_PHASE) suspects.push_back(i);
  }
  return suspects;
}

// Whether it is the only event in one of the same name.
bool is_only_namesake(const otp_events& events, uint64_t row, int32_t above, const uint8_t* children) {
  if (above < 0 || events.name[above] != events.name[row] || children[above] != 1) return false;
  return events.reduced == nullptr || ((events.reduced[row] & 1) == 0 && events.reduced[above] == 0);
}

// Whether a phase is in one of the same name, whatever labels are between them.
bool is_repeated(const otp_events& events, const int32_t* parent, uint32_t row) {
  if (events.kind[row] != OTP_EVENT_PHASE) return false;
  int32_t above = parent[row];
  while (above >= 0 && events.kind[above] != OTP_EVENT_PHASE) above = parent[above];
  return above >= 0 && events.name[above] == events.name[row];
}

// Writes what is found; returns whether anything is left out.
//
// Torch removes only children of the name of their parent one after another until there are none
// (`_remove_dup_nodes`). One pass finds the same: the children of a removed event move to its parent, which has the
// same name, so whether one of them is removed does not depend on whether the event is.
bool display(const otp_events events, const Found found) {
  int32_t* const parent = found.parent;
  uint8_t* const left_out = found.left_out;
  std::copy(events.parent, events.parent + events.count, parent);
  std::fill(left_out, left_out + events.count, uint8_t{0});
  std::fill(found.children, found.children + events.count, uint8_t{0});
  if (found.self_time != nullptr) std::fill(found.self_time, found.self_time + events.count, 0);
  bool is_any = false;
  for (const uint32_t i : contain(events, found)) {
    if (is_async(events, i)) parent[i] = -1;
    left_out[i] = is_hidden(events, i) || is_only_namesake(events, i, parent[i], found.children) ||
                  is_repeated(events, parent, i);
    if (left_out[i] == 0) continue;
    is_any = true;
    if (!is_unfit(events, i)) found.subtract(parent[i], minus(0, duration_of(events, i)));
  }
  for (uint64_t i = 0; is_any && i < events.count; ++i) {
    int32_t above = parent[i];
    if (above < 0 || left_out[above] == 0) continue;
    while (above >= 0 && left_out[above] != 0) above = parent[above];
    parent[i] = above;
    if (left_out[i] == 0 && !is_unfit(events, i)) found.subtract(above, duration_of(events, i));
  }
  return is_any;
}

// Subtracts times of children that are no rows from the self time of the nearest ancestor on display; what is left of
// any event is no less than 0.
void subtract_child_times(const otp_display_sums& sums, const Found& found) {
  for (uint64_t i = 0; i < sums.child_count; ++i) {
    auto row = static_cast<int32_t>(sums.child_row[i]);
    while (row >= 0 && found.left_out[row] != 0) row = sums.events.parent[row];
    found.subtract(row, sums.child_time[i]);
  }
}

struct Sum {
  int64_t row, start, end;  // of the first on display
  int64_t calls, total, self_time;
};

// The sums by name.
class Sums {
 public:
  explicit Sums(const otp_display_sums& sums) : d_columns(sums.columns, sums.columns + sums.column_count) {
    const otp_events events = sums.events;
    auto* bytes = reinterpret_cast<uint8_t*>(sums.room + events.count);
    const Found found{reinterpret_cast<int32_t*>(bytes), bytes + 4 * events.count, bytes + 5 * events.count, sums.room};
    display(events, found);
    subtract_child_times(sums, found);
    const int64_t least = sums.child_count == 0 ? INT64_MIN : 0;
    for (uint64_t i = 0; i < events.count; ++i) {
      if (found.left_out[i] != 0 || (sums.counted != nullptr && sums.counted[i] == 0)) continue;
      const uint64_t key = uint64_t{events.name[i]} << 1 | (sums.scope[i] == kUserScope);
      const uint32_t at = position(key, static_cast<int64_t>(i), events);
      Sum& sum = d_sums[at];
      if (events.start[i] < sum.start || (events.start[i] == sum.start && events.end[i] > sum.end))
        sum.row = static_cast<int64_t>(i), sum.start = events.start[i], sum.end = events.end[i];
      ++sum.calls;
      sum.total = plus(sum.total, duration_of(events, i));
      sum.self_time = plus(sum.self_time, std::max(found.self_time[i], least));
      int64_t* more = d_more.data() + at * d_columns.size();
      for (const int64_t* column : d_columns) *more = plus(*more, column[i]), ++more;
    }
  }

  int64_t write(uint64_t room, int64_t* out) const {
    std::vector<uint32_t> order(d_sums.size());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
      const Sum &one = d_sums[a], &other = d_sums[b];
      if (one.start != other.start) return one.start < other.start;
      return one.end != other.end ? one.end > other.end : one.row < other.row;
    });
    const uint64_t count = std::min<uint64_t>(order.size(), room);
    for (uint64_t i = 0; i < count; ++i) {
      const Sum& sum = d_sums[order[i]];
      out[i] = sum.row, out[room + i] = sum.calls;
      out[2 * room + i] = sum.total, out[3 * room + i] = sum.self_time;
      for (uint64_t c = 0; c < d_columns.size(); ++c) out[(4 + c) * room + i] = d_more[order[i] * d_columns.size() + c];
    }
    return static_cast<int64_t>(count);
  }

 private:
  // The place of a key among the sums, from its first event on.
  uint32_t position(uint64_t key, int64_t row, const otp_events& events) {
    const uint32_t at = d_places.of(key);
    if (at == d_sums.size()) {
      d_sums.push_back({row, events.start[row], events.end[row], 0, 0, 0});
      d_more.resize(d_more.size() + d_columns.size());
    }
    return at;
  }

  std::vector<const int64_t*> d_columns;
  KeyPlaces d_places;
  std::vector<Sum> d_sums;
  std::vector<int64_t> d_more;  // the columns' sums, of one name after another
};

}  // namespace
}  // namespace otp

extern "C" int otp_display_parents(const otp_events* events, int32_t* parent, uint8_t* left_out) {
  try {
    std::vector<uint8_t> children(events->count);
    const bool is_any = otp::display(*events, {parent, left_out, children.data(), nullptr});
    return is_any || !std::equal(parent, parent + events->count, events->parent) ? 1 : 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Two passes over what is on display, since a parent may stand behind its child where both began at one time.
extern "C" void otp_display_tree(const otp_display* display) {
  const otp_display& d = *display;
  if (d.rows != nullptr) std::fill(d.position, d.position + d.row_count, -1);
  for (uint64_t i = 0; i < d.count; ++i) {
    const uint64_t row = d.rows == nullptr ? i : static_cast<uint64_t>(d.rows[i]);
    if (d.rows != nullptr) d.position[row] = static_cast<int32_t>(i);
    d.self_time[i] = d.duration[i] = d.end[row] - d.start[row];
    d.children[i] = 0;
  }
  for (uint64_t i = 0; i < d.count; ++i) {
    int32_t above = d.parent[d.rows == nullptr ? i : static_cast<uint64_t>(d.rows[i])];
    if (d.rows != nullptr) d.display_parent[i] = above = above < 0 ? -1 : d.position[above];
    if (above < 0) continue;
    d.self_time[above] -= d.duration[i];
    ++d.children[above];
  }
}

extern "C" int64_t otp_display_sums_by_name(const otp_display_sums* events, uint64_t room, int64_t* sums) {
  try {
    return otp::Sums(*events).write(room, sums);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
