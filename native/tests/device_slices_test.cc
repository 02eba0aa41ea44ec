// Slices of devices: moved apart, given lanes and written, at the edges. Whole traces are tested from Python.
#include "otel_torchprof/device_slices.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

using Column = std::vector<int64_t>;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

class Buffer {
 public:
  ~Buffer() { otp_buffer_free(&buffer_); }
  otp_buffer* get() { return &buffer_; }
  std::string text() const { return {reinterpret_cast<const char*>(buffer_.data), buffer_.size}; }

 private:
  otp_buffer buffer_{nullptr, 0, 0};
};

void fit(const Column& outer, const Column& line, Column* start, Column* duration) {
  CHECK_EQ(otp_fit_device_slices(outer.size(), outer.data(), line.data(), 2, start->data(), duration->data()), 0);
}

Column lanes(const Column& track, const Column& outer, const Column& start, const Column& duration) {
  Column order, lane(track.size());
  for (size_t i = 0; i < track.size(); ++i) order.push_back(static_cast<int64_t>(i));
  CHECK_EQ(otp_device_lanes(track.size(), order.data(), track.data(), outer.data(), start.data(), duration.data(),
                            lane.data()),
           0);
  return lane;
}

// Lines move apart one by one, what is free stays, and what is inside is led back from the end of what is around it.
void what_overlaps_is_moved() {
  Column start{10, 12, 0, 30, 5}, duration{10, 20, 4, 10, 7};
  fit({-1, -1, -1, 1, -1}, {0, 0, 1, -1, -1}, &start, &duration);
  CHECK(start == (Column{10, 20, 0, 30, 5}));
  CHECK(duration == (Column{10, 20, 4, 10, 7}));
  start = {0, 95, 96}, duration = {100, 4, 4};
  fit({-1, 0, 0}, {0, -1, -1}, &start, &duration);
  CHECK(start == (Column{0, 92, 96}));
}

// Nothing at all, and times at the end of all numbers.
void edges_of_time_are_no_undefined_behaviour() {
  Column none;
  fit({}, {}, &none, &none);
  Column start{kMost - 5, kMost, 0, kMost}, duration{kMost, kMost, 0, kMost};
  fit({-1, 0, -1, 2}, {0, -1, 0, -1}, &start, &duration);
  for (const size_t inside : {1, 3}) CHECK(duration[inside] >= 0 && start[inside] >= start[inside - 1]);
  CHECK(start[1] <= kMost - duration[1]);
  CHECK_EQ(start[3], start[2]);
}

// Whatever comes in: durations never grow, lines do not overlap, and what is inside lies inside.
void any_forest_comes_out_in_order() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto count = static_cast<size_t>(random() % 40);
    Column outer, line, start, duration;
    for (size_t i = 0; i < count; ++i) {
      outer.push_back(static_cast<int64_t>(random() % (i + 1)) - 1);
      line.push_back(static_cast<int64_t>(random() % 3) - 1);
      start.push_back(static_cast<int64_t>(random() % 1000));
      duration.push_back(static_cast<int64_t>(random() % 300));
    }
    const Column told = duration;
    fit(outer, line, &start, &duration);
    std::vector<int64_t> ends(count + 2, std::numeric_limits<int64_t>::min());  // of each outer's inside, of each line
    for (size_t i = 0; i < count; ++i) {
      CHECK(duration[i] >= 0 && duration[i] <= told[i]);
      if (outer[i] < 0 && line[i] < 0) continue;
      int64_t& end = ends[static_cast<size_t>(outer[i] >= 0 ? outer[i] : static_cast<int64_t>(count) + line[i])];
      CHECK(start[i] >= end);
      end = start[i] + duration[i];
      if (outer[i] < 0) continue;
      const auto around = static_cast<size_t>(outer[i]);
      CHECK(start[i] >= start[around] && end <= start[around] + duration[around]);
    }
  }
}

// Nested slices share a lane, others get the first with room, each track begins anew, a child goes with its parent.
void lanes_nest() {
  CHECK(lanes({0, 0, 0}, {-1, 0, -1}, {0, 2, 10}, {10, 3, 5}) == (Column{0, 0, 0}));
  CHECK(lanes({0, 0, 0, 1}, {-1, -1, 1, -1}, {0, 5, 11, 5}, {10, 10, 2, 9}) == (Column{0, 1, 1, 0}));
  CHECK(lanes({0, 0, 0}, {-1, -1, -1}, {0, 5, kMost}, {10, kMost, kMost}) == (Column{0, 1, 0}));
}

// One row per call where the limit is small; an arrow only where there is something that launched.
void rows_are_written_one_by_one() {
  const Column start{5000, 7001}, duration{1500, 0}, launch_time{4000, 0}, launch_tid{11, -1};
  const std::vector<uint64_t> event{9, std::numeric_limits<uint64_t>::max()}, ends{0, 3};
  const std::vector<uint32_t> name{1, 0}, place{0, 1};
  const Column pid{0, 1}, tid{7, 8}, device{0, 1}, stream{7, std::numeric_limits<int64_t>::min()};
  const std::string data = "a\\n";
  otp_chrome_device_slices slices{};
  slices.count = 2;
  slices.start = start.data(), slices.duration = duration.data(), slices.event = event.data();
  slices.name = name.data(), slices.place = place.data();
  slices.launch_time = launch_time.data(), slices.launch_tid = launch_tid.data();
  slices.place_pid = pid.data(), slices.place_tid = tid.data();
  slices.place_device = device.data(), slices.place_stream = stream.data();
  slices.names = {reinterpret_cast<const uint8_t*>(data.data()), ends.data(), 2, nullptr, nullptr};
  slices.first_arrow_id = 3, slices.base = 1000, slices.pid = 42;
  Buffer first, second;
  CHECK_EQ(otp_chrome_encode_device_slices(&slices, 0, 1, first.get()), 1);
  CHECK_EQ(otp_chrome_encode_device_slices(&slices, 1, 1, second.get()), 2);
  CHECK(first.text() ==
        ",\n{\"ph\":\"X\",\"cat\":\"gpu_user_annotation\",\"name\":\"a\\n\",\"pid\":0,\"tid\":7,\"ts\":4.000,\"dur\":1."
        "500,"
        "\"args\":{\"External id\":9,\"device\":0,\"stream id\":7}}"
        ",\n{\"ph\":\"s\",\"id\":3,\"cat\":\"ac2g\",\"name\":\"ac2g\",\"pid\":42,\"tid\":11,\"ts\":3.000}"
        ",\n{\"ph\":\"f\",\"id\":3,\"cat\":\"ac2g\",\"name\":\"ac2g\",\"pid\":0,\"tid\":7,\"ts\":4.000,\"bp\":\"e\"}");
  CHECK(second.text() ==
        ",\n{\"ph\":\"X\",\"cat\":\"gpu_user_annotation\",\"name\":\"\",\"pid\":1,\"tid\":8,\"ts\":6.001,\"dur\":0.000,"
        "\"args\":{\"External id\":18446744073709551615,\"device\":1,\"stream id\":-9223372036854775808}}");
}

}  // namespace

int main() {
  RUN(what_overlaps_is_moved);
  RUN(edges_of_time_are_no_undefined_behaviour);
  RUN(any_forest_comes_out_in_order);
  RUN(lanes_nest);
  RUN(rows_are_written_one_by_one);
  return 0;
}
