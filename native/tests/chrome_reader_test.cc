// The reader of Chrome traces: what events say, however the file is cut into pieces, and what it does with other bytes.
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/record_format.h"
#include "trace_support.h"

namespace {

using otp::testing::Document;
using otp::testing::DocumentReader;
using otp::testing::read_document;
using otp::testing::Row;

const std::string kTrace =
    "{\"schemaVersion\": 1, \"a\\\"b\": [{}, \"]\"],\n\"traceEvents\": [\n"
    "{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": 7, \"tid\": 8, \"args\": {\"name\": \"main\"}},"
    "{\"ph\": \"X\", \"cat\": \"cpu_op\", \"name\": \"aten::mm\", \"pid\": 7, \"tid\": 8, \"ts\": 1700000000123456.789,"
    " \"dur\": 0.5, \"args\": {\"External id\": 4, \"Sequence number\": 9, \"Fwd thread id\": 1, \"async\": true,"
    " \"Input type\": [\"float\", \"Scalar\"], \"Input Dims\": [[2, 3], []], \"Concrete Inputs\": [\"\", \"1\"]}},"
    "{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"caf\\u00e9 \\ud83d\\ude00\", \"pid\": 0, \"tid\": \"stream 7\", "
    "\"ts\": \"2e3\","
    " \"dur\": 1, \"args\": {\"device\": 0, \"stream\": 7, \"correlation\": 12, \"External id\": 4, \"bytes\": 64}},"
    "{\"ph\": \"s\", \"id\": 1, \"pid\": 7, \"tid\": 8, \"ts\": 1, \"cat\": \"ac2g\", \"name\": \"ac2g\"},"
    "{\"ph\": \"i\", \"name\": \"[memory]\", \"pid\": 7, \"tid\": 8, \"ts\": 3, \"args\": {\"Total Reserved\": 0,"
    " \"Total Allocated\": 96, \"Bytes\": -32, \"Device Id\": -1, \"Device Type\": 0, \"Addr\": 18446744073709551615}},"
    "{\"ph\": \"b\", \"id2\": {\"local\": \"5\"}, \"name\": \"x\", \"pid\": 7, \"tid\": 8, \"ts\": 4}"
    "],\n\"displayTimeUnit\": \"ms\"}\n";

void every_fact() {
  const Document read = read_document(kTrace);
  CHECK_EQ(read.status, OTP_TRACE_END);
  CHECK_EQ(read.rows.size(), 4u);
  CHECK(read.rows[0] == (Row{0, -1, -1, -1, 0, 0, 0, "thread_name", "", "main", "7", "8", 0, 'M', 0}));
  CHECK(read.rows[1] ==
        (Row{1700000000123456789, 500, 9, 0, 4, 0, 0, "aten::mm", "cpu_op", "", "7", "8", 1, 'X', OTP_TRACE_ASYNC}));
  CHECK(read.rows[2] == (Row{2000000, 1000, -1, -1, 4, 0, 0, "caf\xC3\xA9 \xF0\x9F\x98\x80", "kernel", "", "0",
                             "\"stream 7\"", 0, 'X', OTP_TRACE_WORK}));
  CHECK(read.rows[3] == (Row{4000, -1, -1, -1, 5, 0, 0, "x", "", "", "7", "8", 0, 'b', 0}));
  CHECK_EQ(read.works.size(), 1u);
  CHECK(read.works[0].row == 2 && read.works[0].correlation == 12 && read.works[0].stream == 7);
  CHECK(read.works[0].bytes == 64 && read.works[0].device == 0);
  CHECK_EQ(read.memory.size(), 1u);
  CHECK(read.memory[0].time == 3000 && read.memory[0].bytes == -32 && read.memory[0].address == UINT64_MAX);
  CHECK(read.memory[0].total_allocated == 96 && read.memory[0].total_reserved == 0);
  CHECK(read.memory[0].device_type == 0 && read.memory[0].device_index == -1 && read.memory[0].flags == 0);
  CHECK_EQ(read.figures.events, 6u);
  CHECK_EQ(read.figures.by_phase['s'], 1u);
  CHECK_EQ(read.figures.unusable, 0u);
  const std::vector<std::pair<std::string, std::string>> members = {
      {"schemaVersion", "1"}, {"a\\\"b", "[{}, \"]\"]"}, {"displayTimeUnit", "\"ms\""}};
  CHECK(read.members == members);
  const int64_t tensor = OTP_INPUT_TENSOR | 7 << 8 | OTP_INPUT_NO_STRIDES << 16 | int64_t{2} << 32;
  CHECK(read.inputs == (std::vector<int64_t>{2, tensor, 2, 3, OTP_INPUT_INT, 1}));
}

void any_pieces_are_the_same() {
  const Document whole = read_document(kTrace);
  for (size_t size = 1; size < 40; ++size) {
    for (uint64_t capacity : {OTP_TRACE_ROWS_PER_SPAN, OTP_TRACE_ROWS_PER_SPAN + 1, 64}) {
      const Document read = read_document(kTrace, {size}, capacity);
      CHECK_EQ(read.status, whole.status);
      CHECK(read.rows == whole.rows);
      CHECK(read.members == whole.members);
      CHECK(read.inputs == whole.inputs);
      CHECK_EQ(read.works.size(), whole.works.size());
      CHECK_EQ(read.memory.size(), whole.memory.size());
    }
  }
}

int64_t start_of(const std::string& number) {
  const Document read = read_document("[{\"ph\":\"X\",\"ts\":" + number + ",\"dur\":0}]");
  return read.rows.empty() ? -1 : read.rows[0].start;
}

void times_are_exact() {
  CHECK_EQ(start_of("1790857026123456.789"), 1790857026123456789);
  CHECK_EQ(start_of("0.0005"), 0);  // half of a nanosecond: to the even one
  CHECK_EQ(start_of("0.0015"), 2);
  CHECK_EQ(start_of("0.00150000000000000001"), 2);
  CHECK_EQ(start_of("0.00050000000000000001"), 1);
  CHECK_EQ(start_of("1.7908570261234567e15"), 1790857026123456700);
  CHECK_EQ(start_of("12E-1"), 1200);
  CHECK_EQ(start_of("-2.5"), -2500);
  CHECK_EQ(start_of("\"7.25\""), 7250);
  CHECK_EQ(start_of("000000000000000000000000000001"), 1000);
  CHECK_EQ(start_of("2305843009213693.951"), 2305843009213693951);
  for (const char* bad : {"1e16", "NaN", "null", "\"\"", "\".\"", "1.2.3", "1e", "true", "[]", "99999999999999999999"})
    CHECK_EQ(start_of(bad), -1);
}

void unusable_events_are_counted() {
  const Document read = read_document(
      "[{\"ph\":\"X\",\"ts\":1},5,{\"ph\":\"X\",\"ts\":\"x\"},{\"ph\":\"X\",\"ts\":1,\"dur\":[]},"
      "{\"ph\":\"X\",\"ts\":1,\"name\":3},{\"ph\":\"X\",\"ts\":1,\"args\":3},"
      "{\"ph\":\"X\",\"ts\":1,\"args\":{\"span_id\":\"g\"}},{\"ph\":\"X\",\"ts\":1,\"args\":null},{}]");
  CHECK_EQ(read.status, OTP_TRACE_END);
  CHECK_EQ(read.rows.size(), 2u);
  CHECK_EQ(read.figures.without_duration, 2u);
  CHECK_EQ(read.figures.unusable, 6u);
  CHECK_EQ(read.figures.first_event, 2u);
  CHECK_EQ(read.figures.first_offset, 19u);
  CHECK_EQ(read.figures.first_fault, OTP_FAULT_EVENT);
  CHECK_EQ(read.figures.by_phase[0], 1u);
}

void large_values_are_passed_over() {
  const std::string large(2 * OTP_TRACE_LARGEST, '"'), open = "[{\"ph\":\"X\",\"ts\":1},";
  std::string text;
  for (size_t i = 0; i < large.size() / 2; ++i) text += "\\\"";
  const std::string events = open + "{\"ph\":\"X\",\"ts\":2,\"name\":\"" + text + "\"}," +
                             std::string(large.size(), '7') + ",{\"ph\":\"X\",\"ts\":3}]";
  const Document read = read_document(events, {65536});
  CHECK_EQ(read.status, OTP_TRACE_END);
  CHECK_EQ(read.rows.size(), 2u);
  CHECK_EQ(read.rows[1].start, 3000);
  CHECK_EQ(read.figures.events, 4u);
  CHECK_EQ(read.figures.unusable, 2u);
  CHECK_EQ(read.figures.first_fault, OTP_FAULT_SIZE);
  const Document member = read_document("{\"a\":\"" + text + "\",\"traceEvents\":[{\"ph\":\"X\",\"ts\":1}]}", {65536});
  CHECK_EQ(member.status, OTP_TRACE_END);
  CHECK_EQ(member.rows.size(), 1u);
  CHECK(member.members == (std::vector<std::pair<std::string, std::string>>{{"a", ""}}));
}

void wrong_bytes_have_a_place() {
  struct Case {
    const char* text;
    uint32_t expected;
    uint64_t place;
    bool is_cut_off;
  };
  for (const Case& each : {
           Case{"x", OTP_EXPECTED_DOCUMENT, 0, false},
           Case{"{\"a\":1}", OTP_EXPECTED_EVENTS, 6, false},
           Case{"{\"traceEvents\":1}", OTP_EXPECTED_EVENTS, 15, false},
           Case{"{a:1}", OTP_EXPECTED_MEMBER, 1, false},
           Case{"{\"a\" 1}", OTP_EXPECTED_COLON, 5, false},
           Case{"{\"a\":}", OTP_EXPECTED_VALUE, 5, false},
           Case{"[}", OTP_EXPECTED_ELEMENT, 1, false},
           Case{"[{\"ph\":}]", OTP_EXPECTED_VALUE, 7, false},
           Case{"[{\"ph\":\"X\"", 0, 10, true},
           Case{"{\"traceEvents\":[", 0, 16, true},
           Case{"[{\"args\":{\"a\":[", 0, 15, true},
           Case{"[{\"a", 0, 4, true},
           Case{"", 0, 0, true},
       }) {
    for (size_t size : {1, 1000}) {
      const Document read = read_document(each.text, {size});
      CHECK_EQ(read.status, OTP_TRACE_UNEXPECTED);
      CHECK_EQ(read.expected, each.expected);
      CHECK_EQ(read.place, each.place);
      CHECK_EQ(read.is_cut_off, each.is_cut_off);
    }
  }
  CHECK_EQ(read_document("[{\"ph\":\"X\",\"ts\":1},").status, OTP_TRACE_END);  // a list may be open at the end
  CHECK_EQ(read_document("[] rest").consumed, 2u);
}

void names_stay_below_the_limit() {
  std::string text = "[";
  for (int i = 0; i < 20000; ++i) text += "{\"ph\":\"X\",\"ts\":1,\"name\":\"name " + std::to_string(i) + "\"},";
  DocumentReader reader(1000, 300000);
  const Document read = reader.read(text + "{}]", {4096});
  CHECK_EQ(read.status, OTP_TRACE_NO_MEMORY);
  CHECK(read.rows.size() > 1000 && read.rows.size() < 20000);
}

void inputs_of_every_kind() {
  const Document read = read_document(
      "[{\"ph\":\"X\",\"ts\":1,\"args\":{\"Input "
      "type\":[\"TensorList\",\"ScalarList\",\"Scalar\",\"Scalar\",\"Scalar\","
      "\"long int\",\"\",\"Unknown\"],\"Input Dims\":[[[2],[]],[],[],[],[],[4,2],[],[1]],\"Input "
      "Strides\":[[[1],[]],[],[],[],"
      "[],[1,4],[],[1]],\"Concrete Inputs\":[\"\",\"[1, 2.5]\",\"True\",\"1.+2.j\",\"?\",\"\",\"\",\"\"]}}]");
  const auto head = [](int64_t kind, int64_t dtype, int64_t flags, int64_t n) {
    return kind | dtype << 8 | flags << 16 | n << 32;
  };
  const auto bits = [](double value) {
    int64_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  };
  const std::vector<int64_t> words = {8,
                                      head(OTP_INPUT_TENSOR_LIST, 0, 0, 2),
                                      head(OTP_INPUT_TENSOR, 0, 0, 1),
                                      2,
                                      head(OTP_INPUT_TENSOR, 0, 0, 0),
                                      head(OTP_INPUT_SCALAR_LIST, 0, 0, 2),
                                      head(OTP_INPUT_INT, 0, 0, 0),
                                      1,
                                      head(OTP_INPUT_DOUBLE, 0, 0, 0),
                                      bits(2.5),
                                      head(OTP_INPUT_BOOL, 0, 0, 1),
                                      head(OTP_INPUT_COMPLEX, 0, 0, 0),
                                      bits(1),
                                      bits(2),
                                      head(OTP_INPUT_OTHER, 0, OTP_INPUT_SYMBOLIC, 0),
                                      head(OTP_INPUT_TENSOR, 5, OTP_INPUT_STRIDED, 2),
                                      4,
                                      2,
                                      1,
                                      4,
                                      head(OTP_INPUT_OTHER, 0, 0, 0),
                                      head(OTP_INPUT_TENSOR, 0, 0, 1),
                                      1};
  CHECK(read.inputs == words);
}

void call_stacks_are_extras() {
  const Document read = read_document(
      "[{\"ph\":\"X\",\"ts\":1,\"args\":{\"Call stack\":\"inner;outer;\",\"Input Dims\":[[]],\"Input type\":[\"\"]}},"
      "{\"ph\":\"X\",\"ts\":1,\"name\":\"inner\\nouter\",\"args\":{\"Call stack\":\"\"}}]");
  const uint32_t stack = 1;  // the first name of the file, and that of the second event
  CHECK_EQ(read.rows[1].inputs, -1);
  CHECK_EQ(read.rows[1].name, "inner\nouter");
  CHECK(read.inputs ==
        (std::vector<int64_t>{1 | int64_t{1} << 32, OTP_INPUT_OTHER, OTP_INPUT_CALL_STACK | int64_t{stack} << 32}));
}

void spans_have_attributes() {
  const std::string_view text =
      "[{\"ph\":\"X\",\"ts\":1,\"name\":\"generate\",\"args\":{\"span_id\":\"a1\",\"parent_id\":\"00000000000000ff\","
      "\"attributes\":{\"torch.phase.name\":\"forward\",\"torch.op.sequence_nr\":7,\"torch.async\":true,\"name\":{"
      "\"a\":1},"
      "\"torch.op.input_dtypes\":\"['float', 'Scalar', 'it, [']\",\"torch.op.input_shapes\":\"[[2], [], []]\","
      "\"torch.op.concrete_inputs\":\"[None, False, None]\"}}},"
      "{\"ph\":\"X\",\"ts\":1,\"args\":{\"span_id\":\"2\",\"attributes\":{\"torch.collapsed.count\":2}}}]";
  const Document read = read_document(text);
  CHECK_EQ(read.rows.size(), 2u);
  const Row& row = read.rows[0];
  CHECK(row.name == "torch.phase.forward" && row.span_id == 0xa1 && row.parent_id == 0xff && row.sequence_nr == 7);
  CHECK_EQ(row.flags, OTP_TRACE_ASYNC);
  const uint64_t second = text.find("{\"ph\":\"X\"", 1 + text.find("{\"ph\":\"X\""));
  CHECK_EQ(read.attributes.size(), 1u);
  CHECK(read.attributes[0] == std::make_tuple(uint64_t{1}, uint64_t{2}, second, "torch.collapsed.count", "2"));
  const int64_t tensor = OTP_INPUT_TENSOR | 7 << 8 | OTP_INPUT_NO_STRIDES << 16 | int64_t{1} << 32;
  CHECK(read.inputs == (std::vector<int64_t>{3, tensor, 2, OTP_INPUT_BOOL, OTP_INPUT_OTHER}));
}

void sums_have_attributes_and_no_inputs() {
  const std::string_view text =
      "[{\"ph\":\"M\",\"name\":\"x\"},{\"ph\":\"X\",\"ts\":1,\"name\":\"a\",\"args\":{\"span_id\":\"1\",\"trace_id\":"
      "\"t\","
      "\"External id\":4,\"Sequence number\":5,\"attributes\":{\"thread.id\":9,\"torch.step.number\":3,\"other\":1,"
      "\"torch.op.input_shapes\":\"[[2]]\",\"torch.self_duration\":1}}},"
      "{\"ph\":\"X\",\"ts\":1,\"name\":\"torch.phase.gc\",\"args\":{\"span_id\":\"2\",\"attributes\":{"
      "\"torch.self_duration\":0.5}}},{\"ph\":\"i\",\"name\":\"[memory]\",\"ts\":3},"
      "{\"ph\":\"X\",\"ts\":1,\"args\":{\"span_id\":\"3\",\"attributes\":[]}}]";
  for (const size_t piece : {size_t{1}, SIZE_MAX}) {
    DocumentReader reader(64, uint64_t{1} << 30, "attributes\ntorch.self_duration\ntorch.step.number");
    const Document read = reader.read(text, {piece});
    CHECK_EQ(read.rows.size(), 3u);
    CHECK(read.rows[0].id == 9 && read.rows[0].sequence_nr == -1 && read.rows[0].inputs == -1);
    CHECK(read.rows[0].trace == "t" && read.inputs.empty() && read.memory.empty());
    CHECK_EQ(read.figures.by_phase['i'], 1u);
    CHECK_EQ(read.attributes.size(), 3u);
    const uint64_t second = text.find("{\"ph\":\"X\"");
    CHECK(read.attributes[0] == std::make_tuple(uint64_t{0}, uint64_t{2}, second, "torch.step.number", "3"));
    CHECK(std::get<0>(read.attributes[1]) == 1 && std::get<4>(read.attributes[1]) == "0.5");
    CHECK(std::get<3>(read.attributes[2]) == "attributes" && std::get<4>(read.attributes[2]) == "[]");
  }
}

void samples_are_chunks() {
  const std::string head = "{\"ph\":\"P\",\"cat\":\"python_samples\",\"pid\":1,\"tid\":2,\"ts\":";
  const std::string chunk = head + "3,\"args\":{\"data\":{\"a\":[1]}},\"name\":\"ProfileChunk\"}";
  const std::string text = "[" + head + "1,\"name\":\"Profile\"}," + chunk + "," + head +
                           "{},\"name\":\"ProfileChunk\"}," + head +
                           "4,\"name\":\"ProfileChunk\"},{\"ph\":\"P\",\"ts\":1,\"name\":\"ProfileChunk\"}]";
  for (const char* keys : {static_cast<const char*>(nullptr), "torch.step.number"}) {
    const Document read = DocumentReader(64, uint64_t{1} << 30, keys).read(text, {SIZE_MAX});
    CHECK_EQ(read.rows.size(), 2u);
    CHECK(read.rows[0].phase == 'P' && read.rows[0].start == 3000 && read.rows[0].thread == "2");
    CHECK_EQ(read.attributes.size(), 2u);
    CHECK(read.attributes[0] ==
          std::make_tuple(uint64_t{0}, uint64_t{2}, uint64_t{text.find(chunk)}, "ProfileChunk", "{\"a\":[1]}"));
    CHECK(std::get<4>(read.attributes[1]) == "null");
    CHECK(read.figures.unusable == 1 && read.figures.first_fault == OTP_FAULT_TS && read.figures.by_phase['P'] == 1);
  }
}

void ends_find_their_begins() {
  const Document read = read_document(
      "[{\"ph\":\"B\",\"ts\":1,\"tid\":1},{\"ph\":\"B\",\"ts\":2,\"tid\":1},{\"ph\":\"E\",\"ts\":5,\"tid\":1},"
      "{\"ph\":\"E\",\"ts\":4,\"tid\":2},{\"ph\":\"b\",\"ts\":1,\"id\":3},{\"ph\":\"b\",\"ts\":2,\"id\":\"0x4\"},"
      "{\"ph\":\"e\",\"ts\":9,\"id2\":{\"local\":\"3\"}},{\"ph\":\"e\",\"ts\":3,\"id\":5}]");
  std::vector<int64_t> start, duration;
  std::vector<uint64_t> id;
  std::vector<uint8_t> phase;
  std::vector<uint32_t> track = {0, 0, 0, 1, 0, 0, 0, 0};
  for (const Row& row : read.rows) {
    start.push_back(row.start);
    duration.push_back(row.duration);
    id.push_back(row.id);
    phase.push_back(static_cast<uint8_t>(row.phase));
  }
  otp_trace_rows rows{};
  rows.count = start.size();
  rows.start = start.data();
  rows.duration = duration.data();
  rows.id = id.data();
  rows.phase = phase.data();
  rows.track = track.data();
  CHECK_EQ(otp_trace_pair(&rows), 2);
  CHECK(duration == (std::vector<int64_t>{-1, 3000, -1, -1, 8000, -1, -1, -1}));
}

void events_begin_in_the_open_ones() {
  const std::vector<uint32_t> track = {0, 0, 0, 0, 0, 0, 1};
  const std::vector<int64_t> start = {0, 0, 2, 3, 6, 10, 4}, end = {10, 5, 3, 7, 8, 12, 5};
  const std::vector<uint8_t> apart = {0, 0, 0, 0, 1, 0, 0};
  std::vector<int32_t> parent(track.size());
  otp_trace_nest(track.size(), track.data(), start.data(), end.data(), apart.data(), 0, parent.data());
  CHECK(parent == (std::vector<int32_t>{-1, 0, 1, 1, -1, -1, -1}));
  otp_trace_nest(track.size(), track.data(), start.data(), end.data(), apart.data(), 1, parent.data());
  CHECK(parent == (std::vector<int32_t>{-1, 0, 1, 0, -1, -1, -1}));
}

}  // namespace

int main() {
  RUN(every_fact);
  RUN(any_pieces_are_the_same);
  RUN(times_are_exact);
  RUN(unusable_events_are_counted);
  RUN(large_values_are_passed_over);
  RUN(wrong_bytes_have_a_place);
  RUN(names_stay_below_the_limit);
  RUN(inputs_of_every_kind);
  RUN(call_stacks_are_extras);
  RUN(spans_have_attributes);
  RUN(sums_have_attributes_and_no_inputs);
  RUN(samples_are_chunks);
  RUN(ends_find_their_begins);
  RUN(events_begin_in_the_open_ones);
}
