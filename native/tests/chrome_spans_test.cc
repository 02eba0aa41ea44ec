// Chrome JSON of spans: exact text of small ones, and what happens at the edges. Whole traces are tested from Python.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/encode_chrome.h"

namespace {

class Buffer {
 public:
  ~Buffer() { otp_buffer_free(&buffer_); }
  otp_buffer* get() { return &buffer_; }
  std::string text() const { return {reinterpret_cast<const char*>(buffer_.data), buffer_.size}; }

 private:
  otp_buffer buffer_{nullptr, 0, 0};
};

// A table of texts under construction.
struct Texts {
  std::string data;
  std::vector<uint64_t> ends;

  uint32_t add(const std::string& text) {
    data += text;
    ends.push_back(data.size());
    return static_cast<uint32_t>(ends.size() - 1);
  }
  otp_names view() const {
    return {reinterpret_cast<const uint8_t*>(data.data()), ends.data(), ends.size(), nullptr, nullptr};
  }
};

// Spans of one trace and how they are to be written; view() and encode() lend the vectors.
struct Spans {
  Texts names, keys, categories, arguments;
  std::vector<uint32_t> name, trace;
  std::vector<int64_t> start, end, tid;
  std::vector<uint8_t> trace_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xFF};
  std::vector<uint64_t> id, parent, rows, arrow_from, arrow_to;
  std::vector<uint8_t> error, instant;
  std::vector<uint32_t> category;
  std::vector<uint32_t> trace_state, dropped_attributes, dropped_links;
  std::vector<otp_attribute> attributes;
  std::vector<otp_link> links;

  Spans() {
    names.add("");
    categories.add("cpu_op");
    categories.add("user_annotation");
  }

  void add(const std::string& text, uint64_t span_id, uint64_t parent_id = 0) {
    rows.push_back(name.size());
    name.push_back(names.add(text));
    trace.push_back(0);
    start.push_back(1'234'567);
    end.push_back(1'234'568);
    tid.push_back(70);
    id.push_back(span_id);
    parent.push_back(parent_id);
    error.push_back(0);
    category.push_back(0);
  }

  void attribute(const std::string& key, otp_attribute_type type, const void* values,
                 const std::vector<uint32_t>* rows = nullptr) {
    keys.add("\"" + key + "\":");
    attributes.push_back({"", 0, static_cast<uint32_t>(type), values, rows == nullptr ? nullptr : rows->data(),
                          rows == nullptr ? 0 : rows->size()});
  }

  void link(uint64_t row, uint64_t target, uint8_t trace_byte = 0xFF) {
    otp_link made{row, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, trace_byte}, target};
    links.push_back(made);
  }

  otp_spans view() const {
    otp_spans spans{};
    spans.count = name.size();
    spans.name = name.data(), spans.start = start.data(), spans.end = end.data();
    spans.trace = trace.data(), spans.trace_ids = trace_ids.data();
    spans.span_id = id.data(), spans.parent_span_id = parent.data(), spans.error = error.data();
    if (!trace_state.empty()) spans.trace_state = trace_state.data();
    if (!dropped_attributes.empty()) spans.dropped_attributes = dropped_attributes.data();
    if (!dropped_links.empty()) spans.dropped_links = dropped_links.data();
    spans.attributes = attributes.data(), spans.attribute_count = attributes.size();
    spans.links = links.data(), spans.link_count = links.size();
    spans.names = names.view();
    return spans;
  }

  std::string encode(uint64_t piece = UINT64_MAX) const {
    const otp_spans spans = view();
    otp_chrome_layout layout{};
    layout.rows = rows.data(), layout.row_count = rows.size();
    layout.tid = tid.data(), layout.category = category.data();
    layout.categories = categories.view(), layout.keys = keys.view(), layout.names = names.view();
    layout.arrow_from = arrow_from.data(), layout.arrow_to = arrow_to.data(), layout.arrow_count = arrow_from.size();
    if (!instant.empty()) layout.instant = instant.data();
    layout.arguments = arguments.view();
    layout.first_arrow_id = 5;
    layout.pid = 7;
    const auto items = static_cast<int64_t>(rows.size() + arrow_from.size());
    std::string text;
    Buffer buffer;
    for (int64_t item = 0; item < items;) {
      buffer.get()->size = 0;
      const int64_t next = otp_encode_chrome_spans(&spans, &layout, static_cast<uint64_t>(item), piece, buffer.get());
      CHECK(next > item);
      item = next;
      text += buffer.text();
    }
    return text;
  }
};

constexpr char kOne[] =
    ",\n{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"op\",\"pid\":7,\"tid\":70,\"ts\":1234.567,\"dur\":0.001,"
    "\"args\":{\"trace_id\":\"0102030405060708090a0b0c0d0e0fff\",\"span_id\":\"00000000000000ab\"}}";

void writes_a_span() {
  Spans spans;
  spans.add("op", 0xAB);
  CHECK_EQ(spans.encode(), kOne);
}

void writes_arguments_that_are_text() {
  Spans spans;
  spans.add("GET /", 0xAB);
  spans.add("exception", 0xAB);
  spans.instant = {0, 1};
  spans.arguments.add("{\"a\":[1]}");
  spans.arguments.add("{}");
  CHECK_EQ(spans.encode(),
           ",\n{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"GET /\",\"pid\":7,\"tid\":70,\"ts\":1234.567,\"dur\":0.001,"
           "\"args\":{\"a\":[1]}},\n{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"cpu_op\",\"name\":\"exception\",\"pid\":7,"
           "\"tid\":70,"
           "\"ts\":1234.567,\"args\":{}}");
}

void writes_what_is_odd() {
  Spans spans;
  spans.add("op", 1, 0xFEDCBA9876543210);
  spans.error = {1};
  spans.category = {1};
  spans.trace_state = {spans.names.add("a=1")};
  spans.dropped_attributes = {4000000000};
  spans.dropped_links = {2};
  const std::string text = spans.encode();
  CHECK(text.find("\"cat\":\"user_annotation\"") != std::string::npos);
  CHECK(text.find("\"span_id\":\"0000000000000001\",\"parent_id\":\"fedcba9876543210\",\"trace_state\":\"a=1\","
                  "\"status\":\"ERROR\",\"dropped_attributes\":4000000000,\"dropped_links\":2}}") != std::string::npos);
}

void writes_attributes_of_every_type() {
  Spans spans;
  for (uint64_t i = 0; i < 2; ++i) spans.add("op", i + 1);
  const int64_t integers[] = {std::numeric_limits<int64_t>::min(), 0};
  const double doubles[] = {0.1, 1e300};
  const uint8_t bools[] = {2, 0};
  const uint32_t texts[] = {1};
  const std::vector<uint32_t> first = {0};
  spans.attribute("i", OTP_ATTRIBUTE_INT64, integers);
  spans.attribute("d", OTP_ATTRIBUTE_DOUBLE, doubles);
  spans.attribute("b", OTP_ATTRIBUTE_BOOL, bools);
  spans.attribute("\\\"", OTP_ATTRIBUTE_NAME, texts, &first);
  const std::string text = spans.encode();
  CHECK(text.find(",\"attributes\":{\"i\":-9223372036854775808,\"d\":0.1,\"b\":true,\"\\\"\":\"op\"}}}") !=
        std::string::npos);
  CHECK(text.find(",\"attributes\":{\"i\":0,\"d\":1e+300,\"b\":false}}}") != std::string::npos);
}

void no_attribute_no_braces() {
  Spans spans;
  spans.add("op", 0xAB);
  std::vector<uint32_t> none;
  none.reserve(1);  // null would be all rows
  spans.attribute("i", OTP_ATTRIBUTE_INT64, nullptr, &none);
  CHECK_EQ(spans.encode(), kOne);
}

void what_is_no_number_is_a_text() {
  Spans spans;
  for (uint64_t i = 0; i < 5; ++i) spans.add("op", i + 1);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double doubles[] = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity, -5e-324, -7};
  spans.attribute("d", OTP_ATTRIBUTE_DOUBLE, doubles);
  const std::string text = spans.encode();
  for (const char* value : {"\"NaN\"", "\"Infinity\"", "\"-Infinity\"", "-5e-324", "-7.0"}) {
    CHECK(text.find("\"attributes\":{\"d\":" + std::string(value) + "}") != std::string::npos);
  }
}

void writes_links() {
  Spans spans;
  for (uint64_t i = 0; i < 3; ++i) spans.add("op", i + 1);
  spans.link(1, 1);
  spans.link(1, 0x0102, 0);
  const std::string text = spans.encode();
  CHECK(text.find("\"span_id\":\"0000000000000002\",\"links\":["
                  "{\"trace_id\":\"0102030405060708090a0b0c0d0e0fff\",\"span_id\":\"0000000000000001\"},"
                  "{\"trace_id\":\"0102030405060708090a0b0c0d0e0f00\",\"span_id\":\"0000000000000102\"}]}}") !=
        std::string::npos);
  CHECK(text.find("\"links\"") == text.rfind("\"links\""));
}

void writes_arrows_after_the_spans() {
  Spans spans;
  for (uint64_t i = 0; i < 2; ++i) spans.add("op", i + 1);
  spans.start = {1000, 2000};
  spans.tid = {70, 71};
  spans.arrow_from = {0};
  spans.arrow_to = {1};
  const std::string text = spans.encode();
  const std::string arrow =
      ",\n{\"ph\":\"s\",\"id\":5,\"cat\":\"link\",\"name\":\"link\",\"pid\":7,\"tid\":70,\"ts\":1.000}"
      ",\n{\"ph\":\"f\",\"id\":5,\"cat\":\"link\",\"name\":\"link\",\"pid\":7,\"tid\":71,\"ts\":2.000,\"bp\":\"e\"}";
  CHECK_EQ(text.substr(text.size() - arrow.size()), arrow);
}

void rows_go_out_in_the_order_asked_for() {
  Spans spans;
  for (uint64_t i = 0; i < 3; ++i) spans.add(std::to_string(i), i + 1);
  spans.rows = {2, 0};
  spans.tid = {72, 70};
  const std::string text = spans.encode();
  CHECK(text.find("\"name\":\"2\",\"pid\":7,\"tid\":72") < text.find("\"name\":\"0\",\"pid\":7,\"tid\":70"));
  CHECK(text.find("\"name\":\"1\"") == std::string::npos);
}

void an_end_before_the_start_is_no_time() {
  Spans spans;
  spans.add("op", 1);
  spans.start = {std::numeric_limits<int64_t>::max()};
  CHECK(spans.encode().find("\"ts\":9223372036854775.807,\"dur\":0.000,") != std::string::npos);
}

void pieces_make_the_whole() {
  Spans spans;
  for (uint64_t i = 0; i < 50; ++i) {
    spans.add(std::string(i * 20, 'n'), i + 1);
    if (i % 3 == 0) spans.link(i, i / 2 + 1);
    if (i % 5 == 0) {
      spans.arrow_from.push_back(0);
      spans.arrow_to.push_back(i);
    }
  }
  const std::string whole = spans.encode();
  for (const uint64_t piece : {1, 100, 1000, 5000}) CHECK(spans.encode(piece) == whole);
}

void finds_what_links_point_to() {
  Spans spans;
  for (uint64_t i = 0; i < 40; ++i) spans.add("op", i % 39 + 1);  // the last has the id of the first
  for (uint64_t i = 0; i < 40; ++i) spans.link(i, i + 1);
  spans.link(39, 3, 0);  // another trace
  spans.link(39, 3);
  const otp_spans view = spans.view();
  std::vector<int64_t> found(view.link_count);
  CHECK_EQ(otp_chrome_link_targets(&view, spans.rows.data(), spans.rows.size(), found.data()), 0);
  for (int64_t i = 0; i < 39; ++i) CHECK_EQ(found[static_cast<size_t>(i)], i);
  CHECK_EQ(found[39], -1);
  CHECK_EQ(found[40], -1);
  CHECK_EQ(found[41], 2);
  const uint64_t part[] = {5, 2};
  CHECK_EQ(otp_chrome_link_targets(&view, part, 2, found.data()), 0);
  CHECK_EQ(found[2], 1);
  CHECK_EQ(found[5], 0);
  CHECK_EQ(found[0], -1);
}

}  // namespace

int main() {
  RUN(writes_a_span);
  RUN(writes_arguments_that_are_text);
  RUN(writes_what_is_odd);
  RUN(writes_attributes_of_every_type);
  RUN(no_attribute_no_braces);
  RUN(what_is_no_number_is_a_text);
  RUN(writes_links);
  RUN(writes_arrows_after_the_spans);
  RUN(rows_go_out_in_the_order_asked_for);
  RUN(an_end_before_the_start_is_no_time);
  RUN(pieces_make_the_whole);
  RUN(finds_what_links_point_to);
}
