// Averages of what is left out of steps: sums, order, what no longer fits, names that are cut.
#include "otel_torchprof/encode_averages.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

struct Spans {
  std::vector<int32_t> group;
  std::vector<uint32_t> name;
  std::vector<int64_t> start, self_time, calls, wait_start, wait_end, most_bytes;
  std::string names;
  std::vector<uint64_t> ends;
  uint64_t longest_name = 200;

  uint32_t intern(const std::string& text) {
    names += text;
    ends.push_back(names.size());
    return static_cast<uint32_t>(ends.size() - 1);
  }

  void add(int32_t of_group, uint32_t of_name, int64_t begin, int64_t time) {
    group.push_back(of_group), name.push_back(of_name), start.push_back(begin), self_time.push_back(time);
  }

  // The text of each group.
  std::vector<std::string> texts() const {
    otp_averages averages{};
    averages.count = group.size();
    averages.group = group.data(), averages.name = name.data();
    averages.start = start.data(), averages.self_time = self_time.data();
    averages.calls = calls.empty() ? nullptr : calls.data();
    averages.wait_start = wait_start.data(), averages.wait_end = wait_end.data();
    averages.wait_count = wait_start.size();
    averages.group_count = most_bytes.size();
    averages.most_bytes = most_bytes.data();
    averages.longest_name = longest_name;
    averages.names = {reinterpret_cast<const uint8_t*>(names.data()), ends.data(), ends.size(), nullptr, nullptr};
    otp_buffer out{nullptr, 0, 0};
    std::vector<uint64_t> cuts(most_bytes.size());
    CHECK_EQ(otp_encode_averages(&averages, &out, cuts.data()), 0);
    std::vector<std::string> found;
    uint64_t begin = 0;
    for (const uint64_t end : cuts) {
      found.emplace_back(reinterpret_cast<const char*>(out.data) + begin, end - begin);
      begin = end;
    }
    otp_buffer_free(&out);
    return found;
  }
};

void sums_are_by_name_the_longest_first() {
  Spans spans;
  const uint32_t a = spans.intern("a"), b = spans.intern("b");
  spans.most_bytes = {1000, 1000, 1000};
  spans.add(2, a, 0, 1'234'567), spans.add(0, b, 0, 5), spans.add(0, a, 0, 2), spans.add(-1, a, 0, 99);
  spans.add(0, a, 0, 3), spans.add(2, b, 0, 2'000'000'000);
  const auto texts = spans.texts();
  CHECK_EQ(texts[0], R"([{"name":"a","count":2,"self":0.000000005},{"name":"b","count":1,"self":0.000000005}])");
  CHECK_EQ(texts[1], "[]");
  CHECK_EQ(texts[2], R"([{"name":"b","count":1,"self":2.0},{"name":"a","count":1,"self":0.001235}])");
}

void times_have_four_digits() {
  Spans spans;
  const uint32_t a = spans.intern("a");
  std::mt19937_64 random(5);
  std::vector<int64_t> times{0, 1, 9'999, 99'995, 123'449, 123'451, 1'234'500, 12'345'000'000, INT64_MAX, -1};
  for (int i = 0; i < 3000; ++i) times.push_back(static_cast<int64_t>(random() >> (1 + random() % 63)));
  for (const int64_t digits : {1000, 1234, 1235, 5001, 9999})
    for (int64_t unit = 10; unit < 1'000'000'000'000'000; unit *= 10)
      for (const int64_t beside : {-1, 0, 1}) times.push_back(digits * unit + unit / 2 + beside);
  for (size_t i = 0; i < times.size(); ++i) spans.add(static_cast<int32_t>(i), a, 0, times[i]);
  spans.most_bytes.assign(times.size(), 1000);
  const auto texts = spans.texts();
  const std::string before = R"([{"name":"a","count":1,"self":)";
  for (size_t i = 0; i < times.size(); ++i) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", static_cast<double>(times[i]) / 1e9);
    CHECK_EQ(texts[i].substr(0, before.size()), before);
    CHECK_EQ(std::stod(texts[i].substr(before.size())), std::stod(text));
  }
}

void waits_are_apart() {
  Spans spans;
  const uint32_t a = spans.intern("a");
  spans.most_bytes = {1000};
  spans.wait_start = {10, 30}, spans.wait_end = {20, 35};
  for (const int64_t start : {9, 10, 19, 20, 29, 30, 34, 35, 9}) spans.add(0, a, start, 1'000'000);
  CHECK_EQ(spans.texts()[0],
           R"([{"name":"a","count":5,"self":0.005},{"name":"a","count":4,"self":0.004,"phase":"data"}])");
}

void what_no_longer_fits_is_left_out() {
  Spans spans;
  for (int64_t i = 0; i < 2000; ++i) spans.add(0, spans.intern("n" + std::to_string(i)), 0, 2000 - i);
  spans.calls.assign(2000, 7);
  std::string longest;
  for (int64_t most = 0; most < 400; ++most) {
    spans.most_bytes = {most};
    const std::string text = spans.texts()[0];
    CHECK(text == "[]" || static_cast<int64_t>(text.size()) <= most);
    CHECK(text.size() >= longest.size());
    longest = text;
  }
  CHECK_EQ(longest.substr(0, 45), R"([{"name":"n0","count":7,"self":0.000002},{"na)");
}

void names_are_cut_between_characters() {
  Spans spans;
  spans.most_bytes = {10'000};
  spans.longest_name = 3;
  spans.add(0, spans.intern("\xC3\xA4\xC3\xB6\xC3\xBC\xC3\x9F"), 0, 3);  // four of two bytes
  spans.add(0, spans.intern("\"\n\xFF"), 0, 2);
  spans.add(0, spans.intern(""), 0, 1);
  spans.add(0, spans.intern("\xED\xA0\x80\xED\xA0\x80" + std::string(3000, '\x80')), 0, 0);  // none of it is UTF-8
  const std::string text = spans.texts()[0];
  CHECK(text.find("\"\xC3\xA4\xC3\xB6\xC3\xBC\"") != std::string::npos);
  CHECK(text.find("\"\\\"\\n\xEF\xBF\xBD\"") != std::string::npos);
  CHECK(text.find("\"\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\"") != std::string::npos);
}

// Any spans: the sums are those of a map.
void sums_are_complete() {
  std::mt19937 random(7);
  Spans spans;
  for (int i = 0; i < 3000; ++i) spans.intern("x" + std::to_string(i));
  spans.most_bytes.assign(5, 1'000'000);
  std::map<std::pair<int32_t, uint32_t>, std::pair<int64_t, int64_t>> sums;
  for (int i = 0; i < 20'000; ++i) {
    const auto group = static_cast<int32_t>(random() % 6) - 1;
    const uint32_t name = static_cast<uint32_t>(random() % 3000);
    spans.add(group, name, 0, 1'000'000);
    spans.calls.push_back(static_cast<int64_t>(random() % 9));
    auto& [calls, time] = sums[{group, name}];
    calls += spans.calls.back(), time += 1;
  }
  const auto texts = spans.texts();
  for (const auto& [key, sum] : sums) {
    if (key.first < 0) continue;
    const std::string entry =
        "{\"name\":\"x" + std::to_string(key.second) + "\",\"count\":" + std::to_string(sum.first) + ",";
    CHECK(texts[static_cast<size_t>(key.first)].find(entry) != std::string::npos);
  }
}

void nothing_is_empty() {
  Spans spans;
  CHECK(spans.texts().empty());
  spans.most_bytes = {100, 0};
  CHECK(spans.texts() == (std::vector<std::string>{"[]", "[]"}));
}

}  // namespace

int main() {
  RUN(sums_are_by_name_the_longest_first);
  RUN(times_have_four_digits);
  RUN(waits_are_apart);
  RUN(what_no_longer_fits_is_left_out);
  RUN(names_are_cut_between_characters);
  RUN(sums_are_complete);
  RUN(nothing_is_empty);
}
