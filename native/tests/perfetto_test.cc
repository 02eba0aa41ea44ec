// Perfetto's format: exact bytes of small traces, and what happens at the edges. Whole traces are tested from Python.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "encode_support.h"
#include "otel_torchprof/encode_perfetto.h"
#include "otlp_messages.h"

namespace {

using otp::testing::field;
using otp::testing::fixed_field;
using otp::testing::number_field;
using otp::testing::varint;

constexpr uint32_t kSequence = 1;

// A message whose size has four bytes.
std::string padded(uint32_t number, const std::string& bytes) {
  std::string size;
  for (int i = 0; i < 4; ++i) size.push_back(static_cast<char>((bytes.size() >> 7 * i & 0x7F) | (i < 3 ? 0x80 : 0)));
  return varint(number << 3 | 2) + size + bytes;
}

std::string packet(uint64_t time, const std::string& event) {
  return padded(1, number_field(8, time) + number_field(10, kSequence) + number_field(13, 2) + padded(11, event));
}

std::string event(uint64_t type, uint64_t track) { return number_field(9, type) + number_field(11, track); }

std::string end(uint64_t time, uint64_t track) { return packet(time, event(2, track)); }

std::string text(uint64_t key, const std::string& value) { return padded(4, number_field(1, key) + value); }

// The begin of a span without attributes, whose trace is the one with iid 100.
std::string begin(uint64_t time, uint64_t track, uint64_t name, const std::string& id, const std::string& rest = "",
                  const std::string& flows = "") {
  return packet(time, event(1, track) + number_field(10, name) + number_field(3, 1) + flows +
                          text(OTP_PERFETTO_TRACE_ID, number_field(17, 100)) +
                          text(OTP_PERFETTO_SPAN_ID, field(6, id)) + rest);
}

std::string parent(const std::string& id) { return text(OTP_PERFETTO_PARENT_ID, field(6, id)); }

struct Trace {
  otp::testing::Spans spans;
  std::vector<uint64_t> rows, track, flow_place, flow_id;
  std::vector<uint8_t> flow_ends;
  std::vector<uint32_t> keys;

  void add(const std::string& name, uint64_t id, uint64_t parent_id, int64_t from, int64_t until, uint64_t on) {
    rows.push_back(spans.name.size());
    spans.add(name, id, parent_id);
    spans.start.back() = from, spans.end.back() = until;
    track.push_back(on);
  }

  void flow(uint64_t place, uint64_t id, bool ends) {
    flow_place.push_back(place), flow_id.push_back(id), flow_ends.push_back(ends ? 1 : 0);
  }

  // In pieces of at least so many bytes.
  std::string encode(uint64_t limit = UINT64_MAX) {
    const otp_spans view = spans.view();
    std::vector<uint32_t> category(rows.size(), 1);
    std::vector<uint64_t> open(rows.size());
    otp_perfetto_layout layout{};
    layout.rows = rows.data(), layout.row_count = rows.size(), layout.track = track.data();
    layout.category = category.data(), layout.key_iids = keys.data();
    layout.flow_place = flow_place.data(), layout.flow_id = flow_id.data(), layout.flow_ends = flow_ends.data();
    layout.flow_count = flow_place.size();
    layout.sequence = kSequence, layout.first_trace_iid = 100, layout.open = open.data();
    std::string bytes;
    otp_buffer out{nullptr, 0, 0};
    for (int64_t place = 0; place < static_cast<int64_t>(rows.size());) {
      out.size = 0;
      const int64_t next = otp_encode_perfetto(&view, &layout, static_cast<uint64_t>(place), limit, &out);
      CHECK(next > place);
      place = next;
      bytes.append(reinterpret_cast<const char*>(out.data), out.size);
    }
    CHECK_EQ(layout.open_count, uint64_t{0});
    otp_buffer_free(&out);
    return bytes;
  }
};

void nested_spans_end_before_the_next_begins() {
  Trace trace;
  trace.add("outer", 0xAB, 0, 1000, 9000, 2);
  trace.add("inner", 0xCD, 0xAB, 2000, 3000, 2);
  trace.add("at once", 0xEF, 0xAB, 3000, 3000, 2);
  trace.add("last", 1, 0xAB, 3000, 9000, 2);
  trace.add("other", 2, 0, 500, 600, 3);
  const std::string expected = begin(1000, 2, 1, "00000000000000ab") +
                               begin(2000, 2, 2, "00000000000000cd", parent("00000000000000ab")) + end(3000, 2) +
                               begin(3000, 2, 3, "00000000000000ef", parent("00000000000000ab")) + end(3000, 2) +
                               begin(3000, 2, 4, "0000000000000001", parent("00000000000000ab")) + end(9000, 2) +
                               end(9000, 2) + begin(500, 3, 5, "0000000000000002") + end(600, 3);
  CHECK_EQ(trace.encode(), expected);
  CHECK_EQ(trace.encode(1), expected);
}

void attributes_are_a_dictionary() {
  Trace trace;
  trace.add("op", 0xAB, 0, 1, 2, 2);
  trace.spans.error[0] = 1;
  const int64_t whole = -3;
  const double real = 0.5;
  const uint8_t yes = 1;
  const uint32_t name = 0;
  trace.spans.attributes = {{"a", 1, OTP_ATTRIBUTE_INT64, &whole, nullptr, 0},
                            {"b", 1, OTP_ATTRIBUTE_DOUBLE, &real, nullptr, 0},
                            {"c", 1, OTP_ATTRIBUTE_BOOL, &yes, nullptr, 0},
                            {"d", 1, OTP_ATTRIBUTE_NAME, &name, nullptr, 0}};
  trace.keys = {6, 7, 8, 9};
  const std::string values = padded(11, number_field(1, 6) + number_field(4, static_cast<uint64_t>(whole))) +
                             padded(11, number_field(1, 7) + fixed_field(5, 0x3FE0000000000000)) +
                             padded(11, number_field(1, 8) + number_field(2, 1)) +
                             padded(11, number_field(1, 9) + number_field(17, 1));
  const std::string arguments = text(OTP_PERFETTO_STATUS, field(6, "ERROR")) + text(OTP_PERFETTO_ATTRIBUTES, values);
  CHECK_EQ(trace.encode(), begin(1, 2, 1, "00000000000000ab", arguments) + end(2, 2));
}

void arrows_are_at_their_ends() {
  Trace trace;
  trace.add("from", 1, 0, 1, 2, 2);
  trace.add("to", 2, 0, 3, 4, 2);
  trace.flow(0, 7, false);
  trace.flow(0, 8, false);
  trace.flow(1, 7, true);
  const std::string expected = begin(1, 2, 1, "0000000000000001", "", fixed_field(47, 7) + fixed_field(47, 8)) +
                               end(2, 2) + begin(3, 2, 2, "0000000000000002", "", fixed_field(48, 7)) + end(4, 2);
  CHECK_EQ(trace.encode(), expected);
  CHECK_EQ(trace.encode(1), expected);
}

void what_cannot_nest_is_written_all_the_same() {
  Trace trace;
  trace.add("crosses", 1, 0, 1, 5, 2);
  trace.add("crossed", 2, 0, 3, 9, 2);
  trace.add("backwards", 3, 0, -5, -9, 3);
  CHECK_EQ(trace.encode(), begin(1, 2, 1, "0000000000000001") + begin(3, 2, 2, "0000000000000002") + end(9, 2) +
                               end(5, 2) + begin(0, 3, 3, "0000000000000003") + end(0, 3));
}

void counters_have_a_value_from_each_time_on() {
  const std::vector<int64_t> time = {5, 6}, value = {1024, -1};
  otp_perfetto_counter counter{2, time.data(), value.data(), 9, kSequence};
  otp_buffer out{nullptr, 0, 0};
  CHECK_EQ(otp_encode_perfetto_counter(&counter, 0, 1, &out), int64_t{1});
  CHECK_EQ(otp_encode_perfetto_counter(&counter, 1, UINT64_MAX, &out), int64_t{2});
  const auto sample = [](uint64_t at, uint64_t is) { return packet(at, event(4, 9) + number_field(30, is)); };
  CHECK_EQ(std::string(reinterpret_cast<const char*>(out.data), out.size), sample(5, 1024) + sample(6, UINT64_MAX));
  otp_buffer_free(&out);
}

}  // namespace

int main() {
  nested_spans_end_before_the_next_begins();
  attributes_are_a_dictionary();
  arrows_are_at_their_ends();
  what_cannot_nest_is_written_all_the_same();
  counters_have_a_value_from_each_time_on();
}
