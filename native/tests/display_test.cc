// Events as torch displays them, and their sums by name: against sums that are made event by event.
#include "otel_torchprof/display.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "check.h"
#include "otel_torchprof/record_format.h"

namespace {

constexpr uint8_t kLabel = 7;  // its scope

struct Events {
  std::vector<uint32_t> name;
  std::vector<int32_t> parent;
  std::vector<int64_t> start, end, child_time, amount;
  std::vector<uint8_t> kind, flags, hidden, scope, counted;
  std::vector<uint8_t> reduced;  // left empty: null

  void add(uint32_t of_name, int32_t above, int64_t begin, int64_t finish, uint8_t of_scope = 0) {
    name.push_back(of_name), parent.push_back(above), start.push_back(begin), end.push_back(finish);
    kind.push_back(OTP_EVENT_OPERATOR), flags.push_back(0), hidden.push_back(0), scope.push_back(of_scope);
    counted.push_back(1), child_time.push_back(0), amount.push_back(0);
  }

  otp_events columns() const {
    return {name.size(),  name.data(),   parent.data(),
            start.data(), end.data(),    kind.data(),
            flags.data(), hidden.data(), reduced.empty() ? nullptr : reduced.data()};
  }

  // The sums of each name as row, calls, total, self time, amount.
  std::vector<std::vector<int64_t>> sums(uint64_t room) const {
    const int64_t* const amounts[] = {amount.data()};
    std::vector<int64_t> rows(name.size()), work(2 * name.size());
    std::iota(rows.begin(), rows.end(), 0);
    const otp_display_sums given{
        columns(), scope.data(), counted.data(), rows.size(), rows.data(), child_time.data(), work.data(), 1, amounts};
    std::vector<int64_t> out(5 * room);
    const int64_t count = otp_display_sums_by_name(&given, room, out.data());
    CHECK(count >= 0 && count <= static_cast<int64_t>(room));
    std::vector<std::vector<int64_t>> found;
    for (int64_t i = 0; i < count; ++i) {
      found.emplace_back();
      for (uint64_t column = 0; column < 5; ++column)
        found.back().push_back(out[column * room + static_cast<uint64_t>(i)]);
    }
    return found;
  }

  // The rows on display; their parents.
  std::vector<int32_t> parents(int expected, std::vector<uint8_t>* left_out) const {
    std::vector<int32_t> above(name.size());
    left_out->resize(name.size());
    const otp_events events = columns();
    CHECK_EQ(otp_display_parents(&events, above.data(), left_out->data()), expected);
    return above;
  }
};

using Sums = std::vector<std::vector<int64_t>>;

void nothing_differs() {
  Events events;
  events.add(1, -1, 0, 10), events.add(2, 0, 1, 4), events.add(2, 0, 5, 6);
  std::vector<uint8_t> left_out;
  CHECK(events.parents(0, &left_out) == events.parent);
  CHECK(left_out == std::vector<uint8_t>(3));
  CHECK(events.sums(2) == (Sums{{0, 1, 10, 6, 0}, {1, 2, 4, 4, 0}}));
  CHECK_EQ(events.sums(1).size(), 1u);
  CHECK(Events().sums(0).empty());
}

void what_torch_does_not_display() {
  Events events;
  events.add(1, -1, 0, 100), events.add(2, 0, 10, 90), events.add(2, 1, 20, 80);  // merged
  events.add(3, 2, 30, 70), events.add(4, 3, 40, 50),
      events.add(5, 3, 60, 95);  // hidden, and one that outlives its parents
  events.add(6, 0, 96, 99);
  events.hidden[3] = 1, events.flags[6] = OTP_FLAG_ASYNC;
  std::vector<uint8_t> left_out;
  CHECK(events.parents(1, &left_out) == (std::vector<int32_t>{-1, 0, 1, 1, 1, 0, -1}));
  CHECK(left_out == (std::vector<uint8_t>{0, 0, 1, 1, 0, 0, 0}));
  events.child_time = {5, 1, 2, 4, 100, 0, 0};
  CHECK(events.sums(10) ==
        (Sums{{0, 1, 100, 0, 0}, {1, 1, 80, 63, 0}, {4, 1, 10, 0, 0}, {5, 1, 35, 35, 0}, {6, 1, 3, 0, 0}}));
}

// Whether a call was the only one in its parent is not known where one of them stands for several, or others were
// collapsed into the parent.
void what_stands_for_several_is_not_merged() {
  Events events;
  for (int pair = 0; pair < 4; ++pair) events.add(1, -1, 0, 9), events.add(1, 2 * pair, 1, 8);
  std::vector<uint8_t> left_out;
  events.reduced = {0, 2, 1, 0, 0, 1, 2, 0};  // the first is known
  CHECK(events.parents(1, &left_out) == events.parent);
  CHECK(left_out == (std::vector<uint8_t>{0, 1, 0, 0, 0, 0, 0, 0}));
}

void phases_in_themselves() {
  Events events;
  events.add(1, -1, 0, 100), events.add(2, 0, 10, 90), events.add(1, 1, 20, 80), events.add(3, 2, 30, 40);
  events.kind[0] = events.kind[2] = OTP_EVENT_PHASE;
  std::vector<uint8_t> left_out;
  CHECK(events.parents(1, &left_out) == (std::vector<int32_t>{-1, 0, 1, 1}));
  CHECK(left_out == (std::vector<uint8_t>{0, 0, 1, 0}));
}

// What is on display has its parents, times and children there, in an order of its own or as it stands.
void rows_on_display_have_parents_and_times() {
  const std::vector<int32_t> parent = {-1, 0, 1, 0}, rows = {3, 2, 0};
  const std::vector<int64_t> start = {0, 10, 20, 50}, end = {100, 40, 25, 60};
  std::vector<int32_t> position(4), above(4, 9), children(4, 9);
  std::vector<int64_t> duration(4, 9), self(4, 9);
  otp_display display{4,
                      3,
                      rows.data(),
                      parent.data(),
                      start.data(),
                      end.data(),
                      position.data(),
                      above.data(),
                      duration.data(),
                      self.data(),
                      children.data()};
  otp_display_tree(&display);
  CHECK(above == (std::vector<int32_t>{2, -1, -1, 9}));
  CHECK(duration == (std::vector<int64_t>{10, 5, 100, 9}));
  CHECK(self == (std::vector<int64_t>{10, 5, 90, 9}));
  CHECK(children == (std::vector<int32_t>{0, 0, 1, 9}));
  display.rows = display.position = display.display_parent = nullptr;
  display.count = 4;
  otp_display_tree(&display);
  CHECK(self == (std::vector<int64_t>{60, 25, 5, 10}));
  CHECK(children == (std::vector<int32_t>{2, 1, 0, 0}));
}

// By start, with equal starts the longer first; a label and an operator of one name apart; some rows are not counted.
void names_are_in_order() {
  Events events;
  events.add(1, -1, 50, 60), events.add(2, -1, 50, 70), events.add(3, -1, 0, 10), events.add(1, -1, 50, 60, kLabel);
  events.add(4, -1, 0, 99), events.add(2, -1, 40, 41), events.add(5, -1, 1, 2);
  events.amount = {1, 2, 4, 8, 16, 32, 64}, events.counted[6] = 0;
  CHECK(events.sums(9) ==
        (Sums{{4, 1, 99, 99, 16}, {2, 1, 10, 10, 4}, {5, 2, 21, 21, 34}, {0, 1, 10, 10, 1}, {3, 1, 10, 10, 8}}));
}

// Any events, of many names: what a map sums of the parents on display.
void sums_are_complete() {
  std::mt19937 random(3);
  Events events;
  const int rows = 20'000;
  for (int i = 0; i < rows; ++i) {
    const auto above = static_cast<int32_t>(
        random() % 4 == 0 || i == 0 ? -1 : i - 1 - static_cast<int>(random() % 1000) % std::min(i, 5));
    const auto begin = static_cast<int64_t>(random() % 1000);
    events.add(random() % 3000, above, begin, begin + static_cast<int64_t>(random() % 1000),
               random() % 9 == 0 ? kLabel : 0);
    events.hidden[i] = random() % 10 == 0, events.flags[i] = random() % 20 == 0 ? OTP_FLAG_ASYNC : 0;
    events.kind[i] = random() % 50 == 0 ? OTP_EVENT_PHASE : OTP_EVENT_OPERATOR;
  }
  std::vector<uint8_t> left_out;
  const std::vector<int32_t> parent = events.parents(1, &left_out);
  std::vector<int64_t> self_time(rows);
  for (int i = 0; i < rows; ++i) {
    if (left_out[i] != 0) continue;
    CHECK(parent[i] < 0 || (left_out[parent[i]] == 0 && events.end[parent[i]] >= events.end[i]));
    if (events.flags[i] == 0) self_time[i] += events.end[i] - events.start[i];
    if (parent[i] >= 0) self_time[parent[i]] -= events.end[i] - events.start[i];
  }
  std::map<std::pair<uint32_t, uint8_t>, std::tuple<int64_t, int64_t, int64_t>> expected;
  for (int i = 0; i < rows; ++i) {
    if (left_out[i] != 0) continue;
    auto& [calls, total, own] = expected[{events.name[i], events.scope[i]}];
    ++calls, total += events.end[i] - events.start[i], own += std::max<int64_t>(self_time[i], 0);
  }
  const Sums found = events.sums(6000);
  CHECK_EQ(found.size(), expected.size());
  for (const auto& sum : found) {
    const auto row = static_cast<size_t>(sum[0]);
    CHECK(std::make_tuple(sum[1], sum[2], sum[3]) == (expected[{events.name[row], events.scope[row]}]));
  }
}

}  // namespace

int main() {
  RUN(nothing_differs);
  RUN(what_torch_does_not_display);
  RUN(what_stands_for_several_is_not_merged);
  RUN(phases_in_themselves);
  RUN(rows_on_display_have_parents_and_times);
  RUN(names_are_in_order);
  RUN(sums_are_complete);
}
