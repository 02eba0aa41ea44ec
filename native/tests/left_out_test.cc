// What is left out of trace groups: all but their roots, and phases below what stays.
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace {

constexpr uint64_t kStep = 99;  // id of a root that is no event

struct Events {
  std::vector<int32_t> group, parent, left_group;
  std::vector<uint64_t> span_id, root;
  std::vector<uint8_t> is_root, kind, is_left, is_phase{0, 1};
  std::vector<int64_t> sequence_nr, recorded;
  std::vector<uint32_t> name, linked;

  // The id of an event is its row plus 1.
  void add(int32_t of_group, int32_t above, uint64_t root_id, uint32_t of_name) {
    group.push_back(of_group), parent.push_back(above), root.push_back(root_id), name.push_back(of_name);
    span_id.push_back(span_id.size() + 1), is_root.push_back(above < 0);
    kind.push_back(OTP_EVENT_OPERATOR), sequence_nr.push_back(-1);
  }

  void leave_out(size_t groups) {
    left_group.assign(group.size(), 7), is_left.assign(group.size(), 7), linked.assign(group.size(), 7);
    recorded.assign(groups, 0);
    otp_left_out events{};
    events.count = group.size();
    events.group = group.data(), events.parent = parent.data();
    events.span_id = span_id.data(), events.root = root.data(), events.is_root = is_root.data();
    events.kind = kind.data(), events.sequence_nr = sequence_nr.data();
    events.name = name.data(), events.is_phase = is_phase.empty() ? nullptr : is_phase.data();
    events.left_group = left_group.data(), events.is_left = is_left.data();
    events.recorded = recorded.data(), events.linked = linked.data();
    linked.resize(otp_leave_out(&events));
  }
};

void phases_stay_below_what_stays() {
  Events events;
  events.add(0, -1, kStep, 1);  // a phase of the step
  events.add(0, 0, kStep, 1);   // in a phase
  events.add(0, 0, kStep, 0);
  events.add(0, 2, kStep, 1);   // in an operator
  events.add(-1, 0, kStep, 0);  // of no group
  events.add(0, 4, kStep, 1);   // below that
  events.add(1, -1, 7, 0);      // the root of its group
  events.add(1, 6, 7, 1);
  events.leave_out(2);
  CHECK(events.is_left == (std::vector<uint8_t>{0, 0, 1, 1, 0, 1, 0, 0}));
  CHECK(events.left_group == (std::vector<int32_t>{-1, -1, 0, 0, -1, 0, -1, -1}));
  CHECK(events.recorded == (std::vector<int64_t>{5, 2}));
}

void without_phases_only_roots_stay() {
  Events events;
  events.is_phase.clear();
  events.add(0, -1, 1, 1);
  events.add(0, 0, 1, 1);
  events.add(1, -1, kStep, 1);
  events.leave_out(2);
  CHECK(events.is_left == (std::vector<uint8_t>{0, 1, 1}));
}

void numbers_of_autograd_may_be_linked() {
  Events events;
  for (int32_t row = 0; row < 4; ++row) events.add(row == 2 ? -1 : 0, -1, kStep, 0);
  events.sequence_nr = {0, 5, 5, 5};
  events.kind[3] = OTP_EVENT_PHASE;  // has another number there
  events.leave_out(1);
  CHECK(events.linked == (std::vector<uint32_t>{0, 1}));
}

void each_event_is_counted_once() {
  std::mt19937 random(3);
  Events events;
  for (int32_t row = 0; row < 1000; ++row) {
    const auto above = row == 0 ? -1 : static_cast<int32_t>(random() % static_cast<uint32_t>(row + 1)) - 1;
    events.add(static_cast<int32_t>(random() % 4) - 1, above, random() % 1000, random() % 2);
  }
  events.leave_out(3);
  std::vector<int64_t> counts(3);
  for (size_t row = 0; row < events.group.size(); ++row) {
    if (events.group[row] >= 0) ++counts[static_cast<size_t>(events.group[row])];
    CHECK_EQ(events.left_group[row], events.is_left[row] != 0 ? events.group[row] : -1);
  }
  CHECK(events.recorded == counts);
}

void nothing_is_empty() {
  Events events;
  events.leave_out(1);
  CHECK(events.linked.empty());
  CHECK_EQ(events.recorded[0], 0);
}

}  // namespace

int main() {
  RUN(phases_stay_below_what_stays);
  RUN(without_phases_only_roots_stay);
  RUN(numbers_of_autograd_may_be_linked);
  RUN(each_event_is_counted_once);
  RUN(nothing_is_empty);
}
