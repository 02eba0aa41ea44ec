// The OTLP encoder against bytes computed by hand from the .proto files of opentelemetry-proto 1.x.
#include <cstdint>
#include <cstring>
#include <string>

#include "check.h"
#include "encode/utf8_repair.h"
#include "encode_support.h"
#include "otel_torchprof/encode_otlp.h"

namespace {

using otp::testing::bytes;
using otp::testing::literal;
using otp::testing::Spans;

struct Message {
  std::string bytes;
  int64_t next;
};

Message encode_rows(const otp_spans& view, const otp_otlp_common& common, uint64_t first, uint64_t end,
                    uint64_t max_bytes) {
  otp_buffer buffer{nullptr, 0, 0};
  const int64_t next = otp_encode_otlp(&view, &common, first, end, max_bytes, &buffer);
  Message message{std::string(reinterpret_cast<char*>(buffer.data), buffer.size), next};
  otp_buffer_free(&buffer);
  return message;
}

Message encode(const Spans& spans, const otp_otlp_common& common, uint64_t first, uint64_t max_bytes) {
  return encode_rows(spans.view(), common, first, spans.name.size(), max_bytes);
}

void smallest_message() {
  Spans spans;
  spans.add("", 1, 0);
  spans.start[0] = spans.end[0] = 0;
  const std::string span = literal(
      "\x0A\x10\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0A\x0B\x0C\x0D\x0E\x0F\x10"  // trace_id
      "\x12\x08\x00\x00\x00\x00\x00\x00\x00\x01"                                  // span_id
      "\x30\x01"                                                                  // kind INTERNAL
      "\x7A\x00"                                                                  // status, unset
      "\x85\x01\x00\x01\x00\x00");                                                // flags
  const std::string scope_spans = literal("\x0A\x00\x12\x26") + span;
  const std::string resource_spans = literal("\x0A\x00\x12\x2A") + scope_spans;
  const Message message = encode(spans, {}, 0, 4096);
  CHECK_EQ(message.bytes, literal("\x0A\x2E") + resource_spans);
  CHECK_EQ(message.next, 1);
}

void every_field() {
  Spans spans;
  spans.add("ab\xFF", 0x0102030405060708, 0x1112131415161718);
  spans.error[0] = 1;
  const int64_t minus_one[] = {-1};
  const double half[] = {0.5};
  const uint8_t yes[] = {1};
  const uint32_t text[] = {spans.intern("v")}, first[] = {0};
  spans.attributes = {{"i", 1, OTP_ATTRIBUTE_INT64, minus_one, nullptr, 0},
                      {"d", 1, OTP_ATTRIBUTE_DOUBLE, half, first, 1},
                      {"absent", 6, OTP_ATTRIBUTE_DOUBLE, half, first, 0},
                      {"b", 1, OTP_ATTRIBUTE_BOOL, yes, first, 1},
                      {"s", 1, OTP_ATTRIBUTE_NAME, text, first, 1}};
  spans.links = {{0, {0xA0, 0xA1}, 0xB001020304050607}};
  spans.trace_state = {spans.intern("k=v")};
  spans.remote = {1};
  spans.dropped_attributes = {300};
  spans.dropped_links = {7};
  const otp_otlp_common common{bytes("R"), bytes("ru"), bytes("S"), bytes("su")};
  const std::string span = literal(
      "\x0A\x10\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0A\x0B\x0C\x0D\x0E\x0F\x10"
      "\x12\x08\x01\x02\x03\x04\x05\x06\x07\x08"
      "\x1A\x03k=v"                               // trace_state
      "\x22\x08\x11\x12\x13\x14\x15\x16\x17\x18"  // parent_span_id
      "\x2A\x05"
      "ab\xEF\xBF\xBD"  // name, repaired
      "\x30\x01"
      "\x39\x11\x00\x00\x00\x00\x00\x00\x00"                                   // start
      "\x41\x22\x22\x00\x00\x00\x00\x00\x00"                                   // end
      "\x4A\x10\x0A\x01i\x12\x0B\x18\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"  // int
      "\x4A\x0E\x0A\x01"
      "d\x12\x09\x21\x00\x00\x00\x00\x00\x00\xE0\x3F"  // double
      "\x4A\x07\x0A\x01"
      "b\x12\x02\x10\x01"                                                                 // bool
      "\x4A\x08\x0A\x01s\x12\x03\x0A\x01v"                                                // string
      "\x50\xAC\x02"                                                                      // dropped_attributes_count
      "\x6A\x21\x0A\x10\xA0\xA1\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"  // link: trace_id
      "\x12\x08\xB0\x01\x02\x03\x04\x05\x06\x07"                                          // link: span_id
      "\x35\x00\x01\x00\x00"                                                              // link: flags
      "\x70\x07"                                                                          // dropped_links_count
      "\x7A\x02\x18\x02"                                                                  // status ERROR
      "\x85\x01\x00\x03\x00\x00");                                                        // flags: parent is remote
  CHECK_EQ(span.size(), 173u);
  const std::string scope_spans = literal("\x0A\x01S\x12\xAD\x01") + span + literal("\x1A\x02su");
  const std::string resource_spans = literal("\x0A\x01R\x12\xB7\x01") + scope_spans + literal("\x1A\x02ru");
  CHECK_EQ(encode(spans, common, 0, 4096).bytes, literal("\x0A\xC1\x01") + resource_spans);
  for (size_t first = 0; first <= spans.ends.size(); ++first)  // wherever the names that a table adds begin
    CHECK_EQ(encode_rows(spans.view_with_added_names(first), common, 0, 1, 4096).bytes,
             literal("\x0A\xC1\x01") + resource_spans);
}

void messages_keep_the_limit() {
  Spans spans;
  for (uint64_t id = 1; id <= 5; ++id) spans.add("span", id, 0);
  const std::string all = encode(spans, {}, 0, 1 << 20).bytes;
  CHECK_EQ(encode(spans, {}, 0, 1 << 20).next, 5);
  for (uint64_t limit = 1; limit <= all.size() + 8; ++limit) {
    int64_t row = 0;
    while (row < 5) {
      const Message message = encode(spans, {}, static_cast<uint64_t>(row), limit);
      CHECK(message.next > row);
      CHECK(message.bytes.size() <= limit || message.next == row + 1);
      row = message.next;
    }
    CHECK_EQ(row, 5);
  }
}

// What a message without resource and scope has inside: the fields of its spans.
std::string spans_of(const std::string& message) {
  size_t at = 0;
  for (int around = 0; around < 2; ++around) {
    ++at;
    while ((message[at++] & 0x80) != 0) continue;
    at += 2;
  }
  return message.substr(at);
}

// Names and values that come again are kept: none may come where another belongs.
void a_span_is_the_same_alone_and_after_others() {
  Spans spans;
  uint64_t seed = 1;
  const auto below = [&](uint64_t limit) {
    seed = seed * 6364136223846793005u + 1;
    return (seed >> 33) % limit;
  };
  std::vector<uint32_t> names;
  for (uint64_t i = 0; i < 600; ++i)  // some share an entry, and some are too long, or no UTF-8
    names.push_back(spans.intern(std::string(below(70), static_cast<char>('a' + i % 26)) + (i % 9 == 0 ? "\xFF" : "")));
  std::vector<int64_t> numbers;
  std::vector<uint32_t> texts;
  std::vector<double> times;
  for (uint64_t id = 1; id <= 3'000; ++id) {
    spans.add("", id, id / 2);
    spans.name.back() = names[id % 3 == 0 ? below(600) : 256 * below(2) + id / 10 % 4];
    numbers.push_back(below(3) == 0 ? static_cast<int64_t>(below(4)) - 2 : 7);
    texts.push_back(names[below(4) == 0 ? below(600) : 3]);
    times.push_back(static_cast<double>(id));
  }
  spans.attributes = {{"number", 6, OTP_ATTRIBUTE_INT64, numbers.data(), nullptr, 0},
                      {"text", 4, OTP_ATTRIBUTE_NAME, texts.data(), nullptr, 0},
                      {"time", 4, OTP_ATTRIBUTE_DOUBLE, times.data(), nullptr, 0}};
  std::string alone;
  for (uint64_t row = 0; row < 3'000; ++row) alone += spans_of(encode_rows(spans.view(), {}, row, row + 1, 1).bytes);
  CHECK(spans_of(encode(spans, {}, 0, 1 << 30).bytes) == alone);
}

void a_span_larger_than_the_limit_goes_alone() {
  Spans spans;
  spans.add("small", 1, 0);
  spans.add(std::string(40000, 'x'), 2, 0);
  spans.add("small", 3, 0);
  CHECK_EQ(encode(spans, {}, 0, 1000).next, 1);
  const Message large = encode(spans, {}, 1, 1000);
  CHECK_EQ(large.next, 2);
  CHECK(large.bytes.size() > 40000);
  CHECK_EQ(encode(spans, {}, 2, 1000).next, 3);
}

void nothing_left_appends_nothing() {
  Spans spans;
  spans.add("span", 1, 0);
  const Message message = encode(spans, {}, 1, 1000);
  CHECK_EQ(message.bytes, "");
  CHECK_EQ(message.next, 1);
}

void a_message_is_appended_after_what_the_buffer_holds() {
  Spans spans;
  spans.add("span", 1, 0);
  const std::string alone = encode(spans, {}, 0, 1000).bytes;
  otp_buffer buffer{nullptr, 0, 0};
  const otp_spans view = spans.view();
  const otp_otlp_common common{};
  CHECK_EQ(otp_encode_otlp(&view, &common, 0, 1, 1000, &buffer), 1);
  CHECK_EQ(otp_encode_otlp(&view, &common, 0, 1, 1000, &buffer), 1);
  CHECK_EQ(std::string(reinterpret_cast<char*>(buffer.data), buffer.size), alone + alone);
  otp_buffer_free(&buffer);
}

void links_are_found_from_any_first_row() {
  Spans spans;
  for (uint64_t id = 1; id <= 3; ++id) spans.add("span", id, 0);
  spans.links = {{0, {0}, 0x6100000000000000}, {2, {0}, 0x6200000000000000}, {2, {0}, 0x6300000000000000}};
  const std::string last = encode(spans, {}, 2, 1000).bytes;
  CHECK(last.find("\x12\x08"
                  "a") == std::string::npos);
  CHECK(last.find("\x12\x08"
                  "b") < last.find("\x12\x08"
                                   "c"));
  CHECK(last.find("\x12\x08"
                  "c") != std::string::npos);
}

void each_span_has_the_state_and_parent_of_its_own_trace() {
  Spans spans;
  spans.intern("");
  for (uint64_t id = 1; id <= 4; ++id) spans.add("span", id, id == 4 ? 0 : 9);
  spans.trace_ids.resize(3 * 16);
  spans.trace = {2, 0, 1, 1};
  spans.trace_state = {spans.intern("a=1"), 0, spans.intern("b=2")};
  spans.remote = {0, 1, 0, 1};
  spans.dropped_attributes = spans.dropped_links = {0, 0, 0, 0};
  const auto alone = [&](uint64_t row) { return encode_rows(spans.view(), {}, row, row + 1, 1000).bytes; };
  const std::string remote = literal("\x85\x01\x00\x03\x00\x00"), local = literal("\x85\x01\x00\x01\x00\x00");
  CHECK(alone(0).find("\x1A\x03"
                      "b=2") != std::string::npos);
  CHECK(alone(0).find(local) != std::string::npos);
  CHECK(alone(1).find("\x1A\x03"
                      "a=1") != std::string::npos);
  CHECK(alone(1).find(remote) != std::string::npos);
  CHECK(alone(2).find("=") == std::string::npos);
  CHECK(alone(3).find(local) != std::string::npos);  // without a parent nothing is remote
}

void rows_from_first_to_end_are_encoded() {
  Spans spans;
  for (uint64_t id = 1; id <= 4; ++id) spans.add("span", id, 0);
  spans.links = {{1, {0}, 0x6100000000000000}, {3, {0}, 0x6200000000000000}};
  const Message middle = encode_rows(spans.view(), {}, 1, 3, 1000);
  CHECK_EQ(middle.next, 3);
  Spans two = spans;
  two.name.resize(3);
  CHECK_EQ(middle.bytes, encode(two, {}, 1, 1000).bytes);
  CHECK(middle.bytes != encode(spans, {}, 1, 1000).bytes);
  CHECK_EQ(encode_rows(spans.view(), {}, 2, 2, 1000).bytes, "");
  CHECK_EQ(encode_rows(spans.view(), {}, 2, 2, 1000).next, 2);
}

std::string repaired(const std::string& text) {
  const otp::Text found = otp::text_of(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  std::string out(found.wire_size, '\0');
  auto* begin = reinterpret_cast<uint8_t*>(out.data());
  CHECK_EQ(otp::put_text(begin, found), begin + found.wire_size);
  return out;
}

void ill_formed_utf8_is_replaced() {
  const std::string r = "\xEF\xBF\xBD";
  CHECK_EQ(repaired("plain ASCII, 8 bytes and more"), "plain ASCII, 8 bytes and more");
  CHECK_EQ(repaired("\xC3\xA4 \xE2\x82\xAC \xF0\x9F\x94\xA5"), "\xC3\xA4 \xE2\x82\xAC \xF0\x9F\x94\xA5");
  CHECK_EQ(repaired("\x80"), r);
  CHECK_EQ(repaired("\xC0\xAF"), r + r);                  // overlong
  CHECK_EQ(repaired("\xED\xA0\x80"), r + r + r);          // surrogate
  CHECK_EQ(repaired("\xF4\x90\x80\x80"), r + r + r + r);  // beyond U+10FFFF
  CHECK_EQ(repaired("\xF0\x9F\x94"), r);                  // cut at the end: one piece
  CHECK_EQ(repaired("\xF0\x9F\x94z\xE2\x82"), r + "z" + r);
}

}  // namespace

int main() {
  RUN(smallest_message);
  RUN(every_field);
  RUN(messages_keep_the_limit);
  RUN(a_span_is_the_same_alone_and_after_others);
  RUN(a_span_larger_than_the_limit_goes_alone);
  RUN(nothing_left_appends_nothing);
  RUN(a_message_is_appended_after_what_the_buffer_holds);
  RUN(links_are_found_from_any_first_row);
  RUN(each_span_has_the_state_and_parent_of_its_own_trace);
  RUN(rows_from_first_to_end_are_encoded);
  RUN(ill_formed_utf8_is_replaced);
  return 0;
}
