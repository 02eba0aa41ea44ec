// Memory on its way out: sums over trees, and the lines of Chrome JSON at the edges. Whole traces are tested from
// Python.
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/encode_chrome.h"
#include "otel_torchprof/model.h"

namespace {

// Each value ends up with everything below it, over several levels and roots, and nothing at all is no error.
void sums_reach_every_parent() {
  const std::vector<int32_t> parent = {-1, 0, 1, 0, -1, 4};
  std::vector<int64_t> values = {1, 10, 100, 1000, -5, 7};
  otp_add_to_parents(values.size(), parent.data(), values.data());
  CHECK(values == (std::vector<int64_t>{1111, 110, 100, 1000, 2, 7}));
  otp_add_to_parents(0, nullptr, nullptr);
}

// Each value ends up as the largest of its own and everything below it, negative ones too.
void peaks_reach_every_parent() {
  const std::vector<int32_t> parent = {-1, 0, 1, 0, -1, 4, 4};
  std::vector<int64_t> values = {-1, 10, 100, 20, -5, -7, -1};
  otp_max_to_parents(values.size(), parent.data(), values.data());
  CHECK(values == (std::vector<int64_t>{100, 100, 100, 20, -1, -7, -1}));
  otp_max_to_parents(0, nullptr, nullptr);
}

// Self times and differences reach the right parents, over several levels and roots.
void children_count_for_their_parents() {
  const std::vector<int32_t> parent = {-1, 0, 1, 0, -1, 4};
  const std::vector<int64_t> start = {0, 10, 20, 50, 100, 110}, end = {100, 40, 25, 60, 200, 150};
  std::vector<int64_t> self(parent.size());
  otp_self_times(parent.size(), parent.data(), start.data(), end.data(), self.data());
  CHECK(self == (std::vector<int64_t>{60, 25, 5, 10, 60, 40}));
  std::vector<int64_t> totals = {1, 2, 3, 4, 5, 6};
  otp_subtract_from_parents(parent.size(), parent.data(), end.data(), totals.data());
  CHECK(totals == (std::vector<int64_t>{1 - 40 - 60, 2 - 25, 3, 4, 5 - 150, 6}));
}

// The longest sample there can be fits into what is reserved for one, whatever the name of its track.
void the_longest_sample_fits() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> least(3, kLeast);
  const std::string name(5000, 'n');
  otp_chrome_counter counter{};
  counter.count = 3;
  counter.time = counter.bytes = least.data();
  counter.name = name.data();
  counter.name_size = name.size();
  counter.base = std::numeric_limits<int64_t>::max();
  counter.pid = kLeast;
  otp_buffer buffer{nullptr, 0, 0};
  CHECK_EQ(otp_chrome_encode_counter(&counter, 0, 1, &buffer), 1);
  CHECK_EQ(otp_chrome_encode_counter(&counter, 1, 1u << 20, &buffer), 3);
  const std::string text(reinterpret_cast<const char*>(buffer.data), buffer.size);
  CHECK(text.find("\"ph\":\"C\",\"name\":\"" + name + "\",\"pid\":-9223372036854775808,\"tid\":0,\"ts\":-") == 3);
  CHECK_EQ(otp_chrome_encode_counter(&counter, 3, 1u << 20, &buffer), 3);
  otp_buffer_free(&buffer);
}

// The longest line there can be fits into what is reserved for one.
void the_longest_line_fits() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> least(3, kLeast);
  const std::vector<uint64_t> most(3, std::numeric_limits<uint64_t>::max());
  const std::vector<uint32_t> thread(3, 0);
  const std::vector<int32_t> device(3, std::numeric_limits<int32_t>::min());
  const std::vector<uint8_t> flags = {0, 1, 0};
  otp_chrome_memory memory{};
  memory.count = 3;
  memory.time = memory.bytes = memory.total_allocated = memory.total_reserved = memory.thread_tids = least.data();
  memory.address = most.data();
  memory.thread = thread.data();
  memory.device_type = memory.device_index = device.data();
  memory.flags = flags.data();
  memory.first_index = 1ull << 62;
  memory.base = std::numeric_limits<int64_t>::max();
  memory.pid = kLeast;
  otp_buffer buffer{nullptr, 0, 0};
  CHECK_EQ(otp_chrome_encode_memory(&memory, 0, 1, &buffer), 1);
  CHECK_EQ(otp_chrome_encode_memory(&memory, 1, 1u << 20, &buffer), 3);
  const std::string text(reinterpret_cast<const char*>(buffer.data), buffer.size);
  CHECK(text.find("\"name\":\"[OutOfMemory]\"") != std::string::npos);
  CHECK(text.find("\"Addr\":18446744073709551615,\"finished\":false") != std::string::npos);
  CHECK_EQ(otp_chrome_encode_memory(&memory, 3, 1u << 20, &buffer), 3);
  otp_buffer_free(&buffer);
}

}  // namespace

int main() {
  RUN(sums_reach_every_parent);
  RUN(peaks_reach_every_parent);
  RUN(children_count_for_their_parents);
  RUN(the_longest_sample_fits);
  RUN(the_longest_line_fits);
}
