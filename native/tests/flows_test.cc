// Pairs of backward functions and forward operators, against a search through all events.
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace {

struct Events {
  std::vector<int64_t> row, number, made_on, start;
  std::vector<uint8_t> is_backward;

  explicit Events(size_t count) : row(count), number(count), made_on(count), start(count), is_backward(count) {}
  otp_numbered_events native() {
    return {row.size(), row.data(), number.data(), made_on.data(), start.data(), is_backward.data()};
  }
};

// The position of the forward operator of a backward function; -1 for none.
int64_t forward_of(const Events& events, size_t backward) {
  int64_t found = -1;
  for (size_t i = 0; i < events.row.size(); ++i) {
    const bool can_be = events.is_backward[i] == 0 && events.number[i] == events.number[backward] &&
                        events.made_on[i] == events.made_on[backward] && events.start[i] <= events.start[backward];
    if (can_be && (found < 0 || events.start[i] >= events.start[static_cast<size_t>(found)]))
      found = static_cast<int64_t>(i);
  }
  return found;
}

void pairs_are_those_of_a_search() {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Events events(random() % 60);
    for (size_t i = 0; i < events.row.size(); ++i) {
      events.number[i] = static_cast<int64_t>(random() % 6), events.made_on[i] = 1 + static_cast<int64_t>(random() % 2);
      events.start[i] = round % 2 == 0 ? static_cast<int64_t>(i / 3) : static_cast<int64_t>(random() % 20);
      events.is_backward[i] = random() % 3 == 0;
    }
    std::vector<int64_t> forward(events.row.size()), backward(events.row.size());
    const auto native = events.native();
    const int64_t pairs = otp_pair_events(&native, forward.data(), backward.data());
    int64_t at = 0;
    for (size_t i = 0; i < events.row.size(); ++i) {
      const int64_t expected = events.is_backward[i] != 0 ? forward_of(events, i) : -1;
      if (expected < 0) continue;
      CHECK(at < pairs);
      CHECK_EQ(backward[static_cast<size_t>(at)], static_cast<int64_t>(i));
      CHECK_EQ(forward[static_cast<size_t>(at++)], expected);
    }
    CHECK_EQ(at, pairs);
  }
}

void numbers_of_known_threads_count() {
  const std::vector<int64_t> sequence_nr{5, -1, 6, 7, 8}, start{1, 2, 3, 4, 5}, torch_tid{3, 0};
  const std::vector<uint8_t> kind{OTP_EVENT_OPERATOR, OTP_EVENT_OPERATOR, OTP_EVENT_PHASE, OTP_EVENT_OPERATOR,
                                  OTP_EVENT_OPERATOR};
  const std::vector<uint8_t> scope{0, 0, 0, 1, 0};
  const std::vector<uint32_t> thread{0, 0, 0, 1, 1}, fwd_thread{0, 0, 0, 4, 0};
  otp_flow_columns columns{sequence_nr.size(), sequence_nr.data(), start.data(),     kind.data(),     scope.data(),
                           thread.data(),      fwd_thread.data(),  torch_tid.data(), torch_tid.size()};
  Events events(4);
  auto native = events.native();
  CHECK_EQ(otp_number_events(&columns, &native), 0);
  CHECK_EQ(native.count, 2u);
  CHECK((std::vector<int64_t>{events.row[0], events.row[1]}) == (std::vector<int64_t>{0, 3}));
  CHECK((std::vector<int64_t>{events.made_on[0], events.made_on[1]}) == (std::vector<int64_t>{3, 4}));
  CHECK_EQ(int{events.is_backward[1]}, 1);
  columns.thread_count = 1;
  CHECK_EQ(otp_number_events(&columns, &native), -1);
}

}  // namespace

int main() {
  RUN(pairs_are_those_of_a_search);
  RUN(numbers_of_known_threads_count);
}
