// Chrome JSON: bytes in, bytes out, and what happens at the edges. Whole traces are tested from Python.
#include "otel_torchprof/encode_chrome.h"
#include "otel_torchprof/record_format.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace {

// The numbers of schema.py.
constexpr uint8_t kBackwardScope = 1;
constexpr uint8_t kLabelKind = 2;
constexpr uint8_t kUnfinished = 2;

class Buffer {
 public:
  ~Buffer() { otp_buffer_free(&buffer_); }
  otp_buffer* get() { return &buffer_; }
  std::string text() const { return {reinterpret_cast<const char*>(buffer_.data), buffer_.size}; }

 private:
  otp_buffer buffer_{nullptr, 0, 0};
};

// A table of names that keeps what it points to.
class Names {
 public:
  explicit Names(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      data_ += name;
      ends_.push_back(data_.size());
    }
  }
  otp_names get() const {
    return {reinterpret_cast<const uint8_t*>(data_.data()), ends_.data(), ends_.size(), nullptr, nullptr};
  }

 private:
  std::string data_;
  std::vector<uint64_t> ends_;
};

std::string escape(const std::string& name) {
  const Names table({name});
  const otp_names names = table.get();
  Buffer buffer;
  uint64_t end = 0;
  CHECK_EQ(otp_json_escape_names(&names, buffer.get(), &end), 0);
  CHECK_EQ(end, buffer.text().size());
  return buffer.text();
}

// Rows with neutral values; a test sets what it is about.
struct Rows {
  explicit Rows(size_t n)
      : id(n),
        start(n),
        end(n),
        sequence_nr(n, -1),
        name(n),
        thread(n),
        fwd_thread(n),
        error_type(n),
        kind(n, 1),
        scope(n),
        flags(n),
        detached(n) {
    for (size_t i = 0; i < n; ++i) id[i] = i + 1;
  }

  otp_chrome_events events() const {
    otp_chrome_events e{};
    e.count = id.size();
    e.id = id.data(), e.start = start.data(), e.end = end.data(), e.sequence_nr = sequence_nr.data();
    e.name = name.data(), e.thread = thread.data(), e.end_thread = thread.data(), e.fwd_thread = fwd_thread.data();
    e.error_type = error_type.data(), e.kind = kind.data(), e.scope = scope.data(), e.flags = flags.data();
    e.detached = detached.data();
    if (!inputs.empty()) e.inputs = inputs.data();
    e.input_words = input_words.data(), e.input_word_count = input_words.size();
    e.flow_row = flow_row.data(), e.flow_id = flow_id.data(), e.flow_phase = flow_phase.data();
    e.flow_count = flow_row.size();
    if (!python_id.empty()) {
      e.python_id = python_id.data(), e.python_parent_id = python_id.data(), e.python_module_id = python_id.data();
    }
    if (!stack.empty()) {
      e.python_threads = python_threads.data();
      e.stack = stack.data(), e.stack_outer = stack_outer.data(), e.stack_name = stack_name.data();
    }
    e.thread_tids = tids.data();
    e.names = names.get();
    e.pid = 7;
    return e;
  }

  std::string encode(uint64_t piece = UINT64_MAX) const {
    const otp_chrome_events e = events();
    std::string text;
    Buffer buffer;
    for (int64_t row = 0; row < static_cast<int64_t>(e.count);) {
      buffer.get()->size = 0;
      const int64_t next = otp_chrome_encode(&e, static_cast<uint64_t>(row), piece, buffer.get());
      CHECK(next > row);
      row = next;
      text += buffer.text();
    }
    return text;
  }

  std::vector<uint64_t> id;
  std::vector<int64_t> start, end, sequence_nr;
  std::vector<uint32_t> name, thread, fwd_thread, error_type;
  std::vector<uint8_t> kind, scope, flags, detached;
  std::vector<int64_t> inputs, input_words;
  std::vector<uint64_t> flow_row, flow_id;
  std::vector<uint8_t> flow_phase;
  std::vector<int64_t> python_id, python_threads, stack, stack_outer, stack_name;
  std::vector<int64_t> tids{70, 71};
  Names names{{"", "op", "Error"}};
};

// A stack is written entry by entry, so room has to be made for all of it: here far more than for all else of a row.
void writes_stacks_of_any_size() {
  constexpr int64_t kDepth = 1000;
  Rows rows(2);
  const std::string name(5000, 'n');
  rows.names = Names({"", name});
  rows.kind = {4, 1};
  rows.thread = {1, 0};
  rows.fwd_thread = {9, 9};
  rows.flags = {4, 0};
  rows.python_id = {-1, -1};
  rows.python_threads = {0, 3};
  rows.stack = {0, kDepth};
  for (int64_t i = 0; i <= kDepth; ++i) {
    rows.stack_outer.push_back(i == 0 ? 0 : i - 1);
    rows.stack_name.push_back(i == 0 ? 0 : 1);
  }
  const std::string text = rows.encode(1);
  const std::string call = text.substr(0, text.find("\n{", 3));
  CHECK(call.find("\"Python thread\":3,") != std::string::npos);
  CHECK(call.find("\"Python identity\":9,") != std::string::npos);
  CHECK(call.find("\"error.type\":\"_OTHER\"") != std::string::npos);
  CHECK(call.find("Call stack") == std::string::npos);
  std::string stack;
  for (int64_t i = 0; i < kDepth; ++i) stack += name + ";";
  CHECK(text.find("\"Call stack\":\"" + stack + "\"}}") != std::string::npos);
  CHECK(text.find("Python identity", call.size()) == std::string::npos);
}

void escapes_what_json_forbids() {
  CHECK_EQ(escape("plain /"), "plain /");
  CHECK_EQ(escape("a\"b\\c"), "a\\\"b\\\\c");
  CHECK_EQ(escape(std::string("\0\x01\x1f\x7f\n\t\r", 7)), "\\u0000\\u0001\\u001f\x7f\\n\\t\\u000d");
  CHECK_EQ(escape("\xe2\x80\xa7\xe2\x80\xa8\xe2\x80\xa9"), "\xe2\x80\xa7\\u2028\\u2029");
}

void replaces_each_maximal_subpart_of_invalid_utf8() {
  const std::string r = "\xEF\xBF\xBD";
  CHECK_EQ(escape("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  CHECK_EQ(escape("\x80x\xff"), r + "x" + r);
  CHECK_EQ(escape("\xc0\xaf"), r + r);                  // overlong: no byte of it could begin a character
  CHECK_EQ(escape("\xe0\x80\x80"), r + r + r);          // overlong: E0 cannot be followed by 80
  CHECK_EQ(escape("\xed\xa0\x80"), r + r + r);          // a surrogate
  CHECK_EQ(escape("\xf4\x90\x80\x80"), r + r + r + r);  // beyond U+10FFFF
  CHECK_EQ(escape("\xf0\x9f\x98"), r);                  // cut short: one character was lost
  CHECK_EQ(escape("\xe2\x82x\xe2\x82"), r + "x" + r);
}

void writes_an_operator() {
  Rows rows(1);
  rows.name = {1};
  rows.start = {1'234'567};
  rows.end = {1'234'568};
  CHECK_EQ(rows.encode(),
           ",\n{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"op\",\"pid\":7,\"tid\":70,\"ts\":1234.567,\"dur\":0.001,"
           "\"args\":{\"External id\":1,\"Ev Idx\":0}}");
}

void writes_an_async_pair() {
  Rows rows(1);
  rows.kind = {kLabelKind};
  rows.flags = {kUnfinished};
  rows.error_type = {2};
  rows.detached = {1};
  rows.end = {2000};
  CHECK_EQ(rows.encode(),
           ",\n{\"ph\":\"b\",\"id2\":{\"local\":\"1\"},\"cat\":\"user_annotation\",\"name\":\"\",\"pid\":7,\"tid\":70,"
           "\"ts\":0.000,\"args\":{\"External id\":1,\"unfinished\":true,\"error.type\":\"Error\",\"Ev Idx\":0}}"
           ",\n{\"ph\":\"e\",\"id2\":{\"local\":\"1\"},\"cat\":\"user_annotation\",\"name\":\"\",\"pid\":7,\"tid\":70,"
           "\"ts\":2.000}");
}

void a_row_without_id_has_no_arguments() {
  Rows rows(1);
  rows.id = {0};
  CHECK(rows.encode().find("\"args\":{}}") != std::string::npos);
}

void writes_times_of_any_size() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Rows rows(3);
  rows.start = {kLeast, kMost, 5};
  rows.end = {kMost, kMost, 3};  // the last one breaks the contract: its duration is nothing
  const std::string text = rows.encode();
  CHECK(text.find("\"ts\":-9223372036854775.808,\"dur\":18446744073709551.615,") != std::string::npos);
  CHECK(text.find("\"ts\":9223372036854775.807,\"dur\":0.000,") != std::string::npos);
  CHECK(text.find("\"ts\":0.005,\"dur\":0.000,") != std::string::npos);
}

constexpr int64_t kTensor = OTP_INPUT_TENSOR, kFloat = 7 << 8, kOne = 1LL << 32;

int64_t bits(double value) {
  int64_t found;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

void writes_inputs() {
  constexpr int64_t kList = OTP_INPUT_TENSOR_LIST, kStrided = OTP_INPUT_STRIDED << 16;
  constexpr int64_t kNoStrides = OTP_INPUT_NO_STRIDES << 16;
  Rows rows(2);
  rows.inputs = {-1, 0};
  rows.input_words = {5,
                      kTensor | kFloat | 3 * kOne,
                      2,
                      0,
                      5,
                      kTensor | kFloat | kStrided | 2 * kOne,
                      2,
                      3,
                      1,
                      -2,
                      kList | 2 * kOne,
                      kTensor | kOne,
                      4,
                      kTensor,
                      kTensor | kFloat | kNoStrides | kOne,
                      7,
                      OTP_INPUT_OTHER};
  const std::string text = rows.encode();
  CHECK(text.find("\"Input Dims\":[[2,0,5],[2,3],[[4],[]],[7],[]]}}") != std::string::npos);
  CHECK(text.find("\"Input Strides\":[[5,5,1],[1,-2],[[1],[]],[],[]],") != std::string::npos);
  CHECK(text.find("\"Input type\":[\"float\",\"float\",\"TensorList\",\"float\",\"\"],") != std::string::npos);
  CHECK(text.find("\"Concrete Inputs\":[\"\",\"\",\"\",\"\",\"\"],") != std::string::npos);
}

void storages_of_inputs_are_passed_by() {
  constexpr int64_t kStored = OTP_INPUT_STORED << 16, kStrided = OTP_INPUT_STRIDED << 16;
  Rows rows(1);
  rows.inputs = {0};
  rows.input_words = {3,
                      kTensor | kFloat | kStored | kOne,
                      2,
                      0x1000,
                      8,
                      OTP_INPUT_TENSOR_LIST | kOne,
                      kTensor | kStored | kStrided | kOne,
                      3,
                      5,
                      0x2000,
                      9,
                      kTensor | kFloat | kOne,
                      4};
  const std::string text = rows.encode();
  CHECK(text.find("\"Input Dims\":[[2],[[3]],[4]]}}") != std::string::npos);
  CHECK(text.find("\"Input Strides\":[[1],[[5]],[1]],") != std::string::npos);
  CHECK(text.find("\"Input type\":[\"float\",\"TensorList\",\"float\"],") != std::string::npos);
}

void writes_values() {
  constexpr int64_t kList = OTP_INPUT_SCALAR_LIST, kDouble = OTP_INPUT_DOUBLE;
  Rows rows(1);
  rows.inputs = {0};
  rows.input_words = {11,
                      OTP_INPUT_INT,
                      -3,
                      kDouble,
                      bits(0.1),
                      kDouble,
                      bits(-0.0),
                      kDouble,
                      bits(1e17),
                      kDouble,
                      bits(1e19),
                      OTP_INPUT_BOOL | kOne,
                      OTP_INPUT_COMPLEX,
                      bits(1.5),
                      bits(-2),
                      kList | 2 * kOne,
                      OTP_INPUT_INT,
                      1,
                      OTP_INPUT_BOOL,
                      kList,
                      kDouble,
                      bits(std::numeric_limits<double>::quiet_NaN()),
                      kDouble,
                      bits(-std::numeric_limits<double>::infinity())};
  const std::string text = rows.encode();
  CHECK(
      text.find("\"Concrete Inputs\":[\"-3\",\"0.10000000000000001\",\"0.\",\"100000000000000000.\",\"1e+19\",\"True\","
                "\"1.5-2.j\",\"[1, False]\",\"[]\",\"nan\",\"-inf\"],") != std::string::npos);
}

void writes_extras() {
  Rows rows(1);
  rows.names = Names({"", "aten::mul", "Tensor", "k", escape("a\n\"b"), escape("f(1): g\nf(2): h"), "TOP.m"});
  rows.name = {1};
  rows.inputs = {0};
  rows.input_words = {1 | 7 * kOne,
                      OTP_INPUT_OTHER,
                      OTP_INPUT_KEYWORD | 3 * kOne,
                      OTP_INPUT_STRING | 4 * kOne,
                      OTP_INPUT_KEYWORD | 3 * kOne,
                      OTP_INPUT_SCALAR_LIST | 2 * kOne,
                      OTP_INPUT_INT,
                      1,
                      OTP_INPUT_BOOL | kOne,
                      OTP_INPUT_KEYWORD | 3 * kOne,
                      kTensor,
                      OTP_INPUT_OVERLOAD | 2 * kOne,
                      OTP_INPUT_CALL_STACK | 5 * kOne,
                      OTP_INPUT_MODULE_HIERARCHY | 6 * kOne,
                      OTP_INPUT_OVERLOAD | 99 * kOne};
  const std::string text = rows.encode();
  CHECK(text.find("\"name\":\"aten::mul.Tensor\"") != std::string::npos);
  CHECK(text.find("\"k\":\"a\\n\\\"b\",\"k\":[1,true],\"Call stack\":\"f(1): g;f(2): h;\","
                  "\"Module Hierarchy\":\"TOP.m.\"}}") != std::string::npos);
}

void never_reads_beyond_the_input_words() {
  for (const std::vector<int64_t>& words : std::vector<std::vector<int64_t>>{{},
                                                                             {-1},
                                                                             {5},
                                                                             {1, -1},
                                                                             {1, 1 | 100LL << 32, 2},
                                                                             {2, 2 | 100LL << 32, 1 | 9LL << 32},
                                                                             {7LL << 32, 9, 10 | 77LL << 32}}) {
    Rows rows(3);
    rows.inputs = {0, 1, std::numeric_limits<int64_t>::max()};
    rows.input_words = words;
    CHECK(rows.encode().find("\"args\":{") != std::string::npos);  // the sanitizers look for the rest
  }
}

// Inputs that were written before are copied, and no others: of sets that begin alike, that are prefixes of one
// another, and of more than are noted. A piece of one row has nothing to copy from.
void repeated_inputs_are_as_if_written_alone() {
  constexpr size_t kRows = 4000;
  Rows rows(kRows);
  uint64_t random = 1;
  for (size_t i = 0; i < kRows; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const auto drawn = static_cast<int64_t>(random >> 33);
    const int64_t dimensions = drawn % 3, last = i < kRows / 2 ? drawn / 4 % 8 : drawn;
    rows.inputs.push_back(static_cast<int64_t>(rows.input_words.size()));
    rows.input_words.insert(rows.input_words.end(), {2, kTensor | kFloat | dimensions * kOne});
    rows.input_words.insert(rows.input_words.end(), static_cast<size_t>(dimensions), last);
    rows.input_words.insert(rows.input_words.end(), {OTP_INPUT_INT, last});
  }
  CHECK(rows.encode() == rows.encode(1));
  rows.input_words.resize(rows.input_words.size() - 1);  // the last row's value is cut short
  CHECK(rows.encode() == rows.encode(1));
}

void pieces_make_the_whole() {
  Rows rows(50);
  for (size_t i = 0; i < 50; ++i) {
    rows.start[i] = static_cast<int64_t>(10 * i);
    rows.end[i] = rows.start[i] + 5;
    rows.name[i] = 1;
    rows.sequence_nr[i] = static_cast<int64_t>(i);
    rows.scope[i] = i < 25 ? 0 : kBackwardScope;
    rows.detached[i] = i % 7 == 0;
    for (uint64_t end = 0; end < 2; ++end) {  // two ends at one row
      rows.flow_row.push_back(i);
      rows.flow_id.push_back(2 * (i % 25) + end);
      rows.flow_phase.push_back(i < 25 ? 's' : 'f');
    }
  }
  const std::string whole = rows.encode();
  CHECK(whole.find("{\"ph\":\"f\",\"id\":49,\"cat\":\"fwdbwd\",\"name\":\"fwdbwd\",\"pid\":7,\"tid\":70,\"ts\":0.490,"
                   "\"bp\":\"e\"}") != std::string::npos);
  for (const uint64_t piece : {1, 100, 1000, 5000}) CHECK(rows.encode(piece) == whole);
}

std::string detached(const std::vector<int64_t>& track, const std::vector<int64_t>& start,
                     const std::vector<int64_t>& end, std::string flags) {
  std::vector<int64_t> order(track.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::vector<uint8_t> out;
  for (const char flag : flags) out.push_back(flag == '1');
  CHECK_EQ(
      otp_chrome_detach_overlapping(track.size(), order.data(), track.data(), start.data(), end.data(), out.data()), 0);
  for (size_t i = 0; i < out.size(); ++i) flags[i] = out[i] ? '1' : '0';
  return flags;
}

void detaches_what_sticks_out() {
  CHECK_EQ(detached({}, {}, {}, ""), "");
  CHECK_EQ(detached({1, 1, 1}, {0, 2, 8}, {10, 8, 10}, "000"), "000");  // inside, and touching
  CHECK_EQ(detached({1, 1, 1}, {0, 5, 6}, {10, 20, 18}, "000"), "011");
  CHECK_EQ(detached({1, 1, 1}, {0, 5, 6}, {10, 20, 18}, "100"), "100");  // who has left stands in nobody's way
  CHECK_EQ(detached({1, 2, 2}, {0, 5, 10}, {10, 20, 21}, "000"), "001");
  CHECK_EQ(detached({1, 1, 1}, {5, 5, 5}, {5, 9, 5}, "000"), "000");  // of no length
}

}  // namespace

int main() {
  RUN(escapes_what_json_forbids);
  RUN(replaces_each_maximal_subpart_of_invalid_utf8);
  RUN(writes_an_operator);
  RUN(writes_an_async_pair);
  RUN(a_row_without_id_has_no_arguments);
  RUN(writes_times_of_any_size);
  RUN(writes_inputs);
  RUN(storages_of_inputs_are_passed_by);
  RUN(repeated_inputs_are_as_if_written_alone);
  RUN(writes_values);
  RUN(writes_extras);
  RUN(never_reads_beyond_the_input_words);
  RUN(pieces_make_the_whole);
  RUN(detaches_what_sticks_out);
  RUN(writes_stacks_of_any_size);
}
