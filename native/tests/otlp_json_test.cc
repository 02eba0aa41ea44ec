// The OTLP/JSON encoder against text written by hand from the specification: ids as digits, 64-bit numbers as strings.
#include <limits>
#include <string>

#include "check.h"
#include "encode_support.h"
#include "otel_torchprof/encode_otlp_json.h"

namespace {

using otp::testing::bytes;
using otp::testing::Spans;

const otp_otlp_json_frame kFrame{bytes("["), bytes("]\n")};

struct Request {
  std::string text;
  int64_t next;
};

Request encode(const otp_spans& view, uint64_t first, uint64_t end, uint64_t max_bytes) {
  otp_buffer buffer{nullptr, 0, 0};
  const int64_t next = otp_encode_otlp_json(&view, &kFrame, first, end, max_bytes, &buffer);
  Request request{std::string(reinterpret_cast<char*>(buffer.data), buffer.size), next};
  otp_buffer_free(&buffer);
  return request;
}

Request encode(const Spans& spans, uint64_t first, uint64_t end, uint64_t max_bytes) {
  return encode(spans.view(), first, end, max_bytes);
}

void smallest_span() {
  Spans spans;
  spans.add("", 1, 0);
  const Request request = encode(spans, 0, 1, 4096);
  CHECK_EQ(
      request.text,
      "[{\"traceId\":\"0102030405060708090a0b0c0d0e0f10\",\"spanId\":\"0000000000000001\",\"flags\":256,\"name\":\"\","
      "\"kind\":1,\"startTimeUnixNano\":\"17\",\"endTimeUnixNano\":\"8738\",\"status\":{}}]\n");
  CHECK_EQ(request.next, 1);
}

void every_member() {
  Spans spans;
  spans.intern("");
  spans.add("a\"b\n\xFF", 0x0102030405060708, 0xFFEEDDCCBBAA9988);
  spans.end[0] = std::numeric_limits<int64_t>::max();
  spans.error[0] = 1;
  const int64_t least[] = {std::numeric_limits<int64_t>::min()};
  const double half[] = {0.5};
  const uint8_t yes[] = {1}, no[] = {0};
  const uint32_t text[] = {spans.intern("v\\")}, first[] = {0};
  spans.attributes = {
      {"i", 1, OTP_ATTRIBUTE_INT64, least, nullptr, 0}, {"absent", 6, OTP_ATTRIBUTE_DOUBLE, half, first, 0},
      {"\"d", 2, OTP_ATTRIBUTE_DOUBLE, half, first, 1}, {"b", 1, OTP_ATTRIBUTE_BOOL, yes, first, 1},
      {"n", 1, OTP_ATTRIBUTE_BOOL, no, nullptr, 0},     {"s", 1, OTP_ATTRIBUTE_NAME, text, first, 1}};
  spans.links = {{0, {0xA0, 0xA1}, 0xB001020304050607}, {0, {1}, 2}};
  spans.trace_state = {spans.intern("k=v")};
  spans.remote = {1};
  spans.dropped_attributes = {300};
  spans.dropped_links = {4294967295};
  CHECK_EQ(encode(spans, 0, 1, 4096).text,
           "[{\"traceId\":\"0102030405060708090a0b0c0d0e0f10\",\"spanId\":\"0102030405060708\",\"traceState\":\"k=v\","
           "\"parentSpanId\":\"ffeeddccbbaa9988\",\"flags\":768,\"name\":\"a\\\"b\\n\xEF\xBF\xBD\",\"kind\":1,"
           "\"startTimeUnixNano\":\"17\",\"endTimeUnixNano\":\"9223372036854775807\",\"attributes\":["
           "{\"key\":\"i\",\"value\":{\"intValue\":\"-9223372036854775808\"}},"
           "{\"key\":\"\\\"d\",\"value\":{\"doubleValue\":0.5}},"
           "{\"key\":\"b\",\"value\":{\"boolValue\":true}},{\"key\":\"n\",\"value\":{\"boolValue\":false}},"
           "{\"key\":\"s\",\"value\":{\"stringValue\":\"v\\\\\"}}],\"droppedAttributesCount\":300,\"links\":["
           "{\"traceId\":\"a0a10000000000000000000000000000\",\"spanId\":\"b001020304050607\",\"flags\":256},"
           "{\"traceId\":\"01000000000000000000000000000000\",\"spanId\":\"0000000000000002\",\"flags\":256}],"
           "\"droppedLinksCount\":4294967295,\"status\":{\"code\":2}}]\n");
  for (size_t first = 0; first <= spans.ends.size(); ++first)  // wherever the names that a table adds begin
    CHECK_EQ(encode(spans.view_with_added_names(first), 0, 1, 4096).text, encode(spans, 0, 1, 4096).text);
}

void requests_keep_the_limit() {
  Spans spans;
  for (uint64_t id = 1; id <= 4; ++id) spans.add("span", id, 0);
  const Request all = encode(spans, 0, 4, 1 << 20);
  CHECK_EQ(all.next, 4);
  for (uint64_t limit = 1; limit <= all.text.size() + 8; ++limit) {
    int64_t row = 0;
    while (row < 4) {
      const Request request = encode(spans, static_cast<uint64_t>(row), 4, limit);
      CHECK(request.next > row);
      CHECK(request.text.size() <= limit || request.next == row + 1);
      CHECK_EQ(request.text.back(), '\n');
      row = request.next;
    }
  }
}

// Where every byte of every text becomes six, and every number is as long as it can be, the room that was made is
// enough.
void the_longest_text_there_is() {
  Spans spans;
  spans.intern("");
  spans.add(std::string(5000, '\x01'), ~0ull, ~0ull);
  const double longest[] = {-2.2250738585072014e-308};
  const uint32_t text[] = {spans.intern(std::string(5000, '\x02'))};
  const std::string key(3000, '\x03');
  spans.attributes = {{key.data(), 3000, OTP_ATTRIBUTE_DOUBLE, longest, nullptr, 0},
                      {key.data(), 3000, OTP_ATTRIBUTE_NAME, text, nullptr, 0}};
  spans.trace_state = {spans.intern(std::string(5000, '\x04'))};
  for (int i = 0; i < 100; ++i) spans.links.push_back({0, {0xFF}, ~0ull});
  CHECK(encode(spans, 0, 1, 1 << 20).text.size() > 6 * 21000);
}

void rows_from_first_to_end_with_their_links() {
  Spans spans;
  for (uint64_t id = 1; id <= 3; ++id) spans.add("span", id, 0);
  spans.links = {{0, {0xAA}, 1}, {2, {0xCC}, 1}};
  const Request middle = encode(spans, 1, 2, 1000);
  CHECK_EQ(middle.next, 2);
  CHECK(middle.text.find("links") == std::string::npos);
  CHECK(encode(spans, 2, 3, 1000).text.find("\"cc00") != std::string::npos);
  CHECK_EQ(encode(spans, 2, 2, 1000).text, "");
  CHECK_EQ(encode(spans, 2, 2, 1000).next, 2);
}

}  // namespace

int main() {
  RUN(smallest_span);
  RUN(every_member);
  RUN(requests_keep_the_limit);
  RUN(the_longest_text_there_is);
  RUN(rows_from_first_to_end_with_their_links);
  return 0;
}
