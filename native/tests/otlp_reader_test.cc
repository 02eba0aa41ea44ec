// The reader of OTLP: what spans say, as protobuf and as JSON, however small the arrays are, and other bytes.
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/record_format.h"
#include "otlp_messages.h"
#include "trace_support.h"

namespace {

using namespace otp::testing;

const std::string kThread = number("thread.id", 140000000000000) + text("thread.name", "Main \"1\"");
const std::string kSpans =
    span("torch.step", 1, 100, 900, number("torch.step.number", 7) + kThread) +
    span("aten::mm", 2, 200, 300,
         field(4, std::string(7, '\0') + "\1") + text("torch.op.scope", "function") +
             number("torch.op.sequence_nr", 9) + number("torch.op.forward_thread", 3) + text("error.type", "E") +
             text("torch.op.input_shapes", "[[2, 3], []]") + text("torch.op.input_dtypes", "['float', 'Scalar']") +
             text("torch.op.concrete_inputs", "[None, 1]") + number("torch.op.flops", 24) + flag("torch.async", true) +
             kThread) +
    span("label", 3, 250, 260, text("torch.op.scope", "user_scope") + number("torch.memory.allocated", 64) + kThread) +
    span("nn.Module: B_0", 4, 300, 310, text("code.function.name", "f") + text("torch.module", "a.b") + kThread) +
    span("0", 5, 320, 330, text("torch.module", "a.0") + kThread) +
    span("chat", 6, 340, 350,
         text("torch.phase.name", "forward") + number("torch.aggregated.count", 3) + number("torch.op.flops", 5) +
             kThread) +
    span("timed", 7, 360, 370,
         text("torch.op.scope", "function") + text("torch.device.type", "cuda") + number("torch.device.stream", 5) +
             real("torch.device.duration", 25e-9) + kThread);

// The same as a line of JSON.
std::string pair(const char* key, const char* kind, const char* value) {
  return std::string("{\"key\":\"") + key + "\",\"value\":{\"" + kind + "\":" + value + "}},";
}
const std::string kJsonThread =
    pair("thread.id", "intValue", "\"140000000000000\"") + pair("thread.name", "stringValue", "\"Main \\\"1\\\"\"");
std::string json_span(const char* name, int id, int start, int end, const std::string& attributes,
                      const char* others = "") {
  return "{\"attributes\":[" + attributes + kJsonThread + "],\"name\":\"" + name + "\"," + others +
         "\"traceId\":\"01010101010101010101010101010101\",\"spanId\":\"000000000000000" + std::to_string(id) +
         "\",\"startTimeUnixNano\":\"" + std::to_string(start) + "\",\"endTimeUnixNano\":" + std::to_string(end) + "},";
}
const std::string kLine =
    "{\"resourceSpans\":[{\"scopeSpans\":[{\"spans\":[" +
    json_span("torch.step", 1, 100, 900, pair("torch.step.number", "intValue", "7")) +
    json_span("aten::mm", 2, 200, 300,
              pair("torch.op.scope", "stringValue", "\"function\"") +
                  pair("torch.op.sequence_nr", "intValue", "\"9\"") + pair("torch.op.forward_thread", "intValue", "3") +
                  pair("error.type", "stringValue", "\"E\"") +
                  pair("torch.op.input_shapes", "stringValue", "\"[[2, 3], []]\"") +
                  pair("torch.op.input_dtypes", "stringValue", "\"['float', 'Scalar']\"") +
                  pair("torch.op.concrete_inputs", "stringValue", "\"[None, 1]\"") +
                  pair("torch.op.flops", "intValue", "\"24\"") + pair("torch.async", "boolValue", "true"),
              "\"parentSpanId\":\"0000000000000001\",") +
    json_span("label", 3, 250, 260,
              pair("torch.op.scope", "stringValue", "\"user_scope\"") +
                  pair("torch.memory.allocated", "intValue", "\"64\"")) +
    json_span("nn.Module: B_0", 4, 300, 310,
              pair("code.function.name", "stringValue", "\"f\"") + pair("torch.module", "stringValue", "\"a.b\"")) +
    json_span("0", 5, 320, 330, pair("torch.module", "stringValue", "\"a.0\"")) +
    json_span("chat", 6, 340, 350,
              pair("torch.phase.name", "stringValue", "\"forward\"") +
                  pair("torch.aggregated.count", "intValue", "\"3\"") + pair("torch.op.flops", "intValue", "\"5\"")) +
    json_span("timed", 7, 360, 370,
              pair("torch.op.scope", "stringValue", "\"function\"") +
                  pair("torch.device.type", "stringValue", "\"cuda\"") + pair("torch.device.stream", "intValue", "5") +
                  pair("torch.device.duration", "doubleValue", "2.5e-8")) +
    "],\"scope\":{\"name\":\"otel_torchprof\"}}],\"resource\":{}}]}\n";

void every_attribute() {
  DocumentReader reader(64);
  const Document read = reader.read_request(request(kSpans), false);
  const char* process = "resource 0";
  const char* thread = "140000000000000";
  const std::vector<Row> expected = {
      {0, -1, -1, -1, 0, 0, 0, "thread_name", "", "Main \"1\"", process, thread, 0, 'M', 0},
      {100, 800, -1, -1, 0, 1, 0, "ProfilerStep#7", "user_annotation", "", process, thread, 0, 'X', OTP_TRACE_APART},
      {200, 100, 9, 0, 0, 2, 1, "aten::mm", "cpu_op", "E", process, thread, 3, 'X', OTP_TRACE_ASYNC | OTP_TRACE_ERROR},
      {250, 10, -1, -1, 0, 3, 0, "label", "user_annotation", "", process, thread, 0, 'X', 0},
      {300, 10, -1, -1, 0, 4, 0, "nn.Module: B_0", "python_function", "a.b", process, thread, 0, 'X', 0},
      {320, 10, -1, -1, 0, 5, 0, "a.0", "module", "", process, thread, 0, 'X', 0},
      {340, 10, -1, -1, 0, 6, 0, "torch.phase.forward", "user_annotation", "", process, thread, 0, 'X', 0},
      {360, 10, -1, -1, 7, 7, 0, "timed", "cpu_op", "", process, thread, 0, 'X', 0},
      {360, 25, -1, -1, 7, 0, 0, "timed", "gpu_user_annotation", "", process, thread, 0, 'X',
       OTP_TRACE_WORK | OTP_TRACE_TIMED}};
  CHECK_EQ(read.status, OTP_TRACE_END);
  CHECK(read.rows == expected);
  CHECK(read.works.size() == 1 && read.works[0].row == 8 && read.works[0].stream == 5 && read.works[0].device == 0);
  CHECK(read.memory.size() == 1 && read.memory[0].span == 3 && read.memory[0].bytes == 64);
  const int64_t tensor = OTP_INPUT_TENSOR | 7 << 8 | OTP_INPUT_NO_STRIDES << 16 | int64_t{2} << 32;
  CHECK(read.inputs == (std::vector<int64_t>{2, tensor, 2, 3, OTP_INPUT_INT, 1}));
  CHECK(read.figures.events == 7 && read.figures.unusable == 0);
  CHECK(read.attributes.size() == 2 && std::get<0>(read.attributes[0]) == 6 && std::get<0>(read.attributes[1]) == 6);
  CHECK(std::get<3>(read.attributes[0]) == "torch.aggregated.count" && std::get<4>(read.attributes[0]) == "3");
  CHECK(std::get<3>(read.attributes[1]) == "torch.op.flops" && std::get<4>(read.attributes[1]) == "5");
}

void lines_say_the_same_as_messages() {
  DocumentReader messages(64), lines(64);
  const Document of_messages = messages.read_request(request(kSpans), false);
  const Document of_lines = lines.read_request(kLine, true);
  CHECK_EQ(of_lines.status, OTP_TRACE_END);
  CHECK(of_lines.rows == of_messages.rows && of_lines.inputs == of_messages.inputs);
  CHECK(of_lines.rows[2].trace.size() == 32 && of_lines.rows[2].trace == of_messages.rows[2].trace);
  CHECK(of_lines.works.size() == 1 && of_lines.memory.size() == 1);
}

void small_arrays_are_the_same() {
  for (const bool is_json : {false, true}) {
    const std::string bytes = is_json ? kLine : request(kSpans) + request(kSpans, "app", "\x0a\x00");
    DocumentReader large(64), small(OTP_TRACE_ROWS_PER_SPAN);
    const Document whole = large.read_request(bytes, is_json), cut = small.read_request(bytes, is_json);
    CHECK(whole.rows == cut.rows && whole.members == cut.members && whole.inputs == cut.inputs);
    CHECK(whole.works.size() == cut.works.size() && whole.memory.size() == cut.memory.size());
    CHECK_EQ(whole.figures.events, cut.figures.events);
  }
}

// Resources are processes, wherever they stand; spans of other scopes, or of none, are labels.
void resources_and_scopes() {
  DocumentReader reader(64);
  const std::string spans = span("x", 1, 1, 2);
  const std::string late = field(1, field(2, spans) + field(1, "\x10\x01"));
  const Document read =
      reader.read_request(request(spans, "app", "\x10\x01") + late + request(spans, "b", "\x10\x02"), false);
  CHECK_EQ(read.rows.size(), 3u);
  CHECK(read.members.size() == 2 && read.members[0].second == "\x10\x01" && read.members[1].second == "\x10\x02");
  CHECK(read.rows[0].process == "resource 0" && read.rows[1].process == "resource 0");
  CHECK(read.rows[2].process == "resource 1" && read.rows[0].thread.empty());
  for (const Row& row : read.rows) CHECK_EQ(row.category, "user_annotation");
}

struct Fault {
  std::string bytes;
  bool is_json;
  uint32_t fault;
  size_t rows;
};

void what_is_no_span_is_counted() {
  const std::string good = span("x", 1, 1, 2);
  const std::string cut = request(good + good);
  const std::string line = "{\"resourceSpans\":[{\"scopeSpans\":[{\"spans\":[";
  const Fault faults[] = {
      {request(field(2, field(5, "no ids")) + good), false, OTP_FAULT_SPAN, 1},
      {request(span("zero", 0, 1, 2) + good), false, OTP_FAULT_SPAN, 1},
      {request(span("late", 1, 1, uint64_t{1} << 62) + good), false, OTP_FAULT_TIME, 1},
      {request(field(2, "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f") + good), false, OTP_FAULT_MESSAGE, 1},
      {request(field(2, "\x0b") + good), false, OTP_FAULT_MESSAGE, 1},
      {cut.substr(0, cut.size() - 3), false, OTP_FAULT_MESSAGE, 0},
      {"\x01\x02\x03", false, OTP_FAULT_MESSAGE, 0},
      {request(span("parent", 1, 1, 2, field(4, "\1")) + good), false, OTP_FAULT_SPAN, 1},
      {line + "{\"name\":5}," + json_span("x", 1, 1, 2, "") + "]}]}]}", true, OTP_FAULT_NAME, 1},
      {line + json_span("x", 1, 1, 2, "", "\"parentSpanId\":\"1\",") + "]}]}]}", true, OTP_FAULT_ID, 0},
      {line + "{\"attributes\":[{\"value\":5}]}," + json_span("x", 1, 1, 2, "") + "]}]}]}", true, OTP_FAULT_MESSAGE, 1},
      {line + "7," + json_span("x", 1, 1, 2, "") + "]}]}]}", true, OTP_FAULT_MESSAGE, 1},
      {line + "{\"spanId\":\"12\"}," + json_span("x", 1, 1, 2, "") + "]}]}]}", true, OTP_FAULT_SPAN, 1},
      {line + json_span("x", 1, -5, 2, "") + "]}]}]}", true, OTP_FAULT_TIME, 0},
      {line + json_span("x", 1, 1, 2, ""), true, OTP_FAULT_MESSAGE, 1},
      {"{\"resourceSpans\":[]} x", true, OTP_FAULT_MESSAGE, 0},
      {"{\"resourceMetrics\":[]}", true, OTP_FAULT_MESSAGE, 0},
      {"", true, OTP_FAULT_MESSAGE, 0},
  };
  for (const Fault& fault : faults) {
    DocumentReader reader(64);
    const Document read = reader.read_request(fault.bytes, fault.is_json, 1000);
    CHECK_EQ(read.status, OTP_TRACE_END);
    size_t slices = 0;
    for (const Row& row : read.rows) slices += row.phase == 'X';
    CHECK_EQ(slices, fault.rows);
    CHECK(read.figures.unusable >= 1 && read.figures.first_offset >= 1000);
    CHECK_EQ(read.figures.first_fault, fault.fault);
  }
}

// Each span is a row with its ids, also steps and windows; values are JSON, and self times are those of phases.
void sums_have_ids_and_attributes() {
  constexpr const char* kKeys =
      "torch.step.number\ntorch.self_duration\ntorch.step.kind\ntorch.unfinished\ntorch.part\ntorch.averages";
  const int64_t large = int64_t{1} << 60 | 1;
  const std::string spans = span("torch.step", 1, 1, 5, number("torch.step.number", large) + number("thread.id", 9)) +
                            span("chat", 2, 2, 3,
                                 field(4, std::string(7, '\0') + "\1") + text("torch.phase.name", "generate") +
                                     real("torch.self_duration", 1e-9) + flag("torch.unfinished", true)) +
                            span("op", 3, 2, 3,
                                 real("torch.self_duration", 0.1) + text("torch.step.kind", "a\"\n") +
                                     field(9, field(1, "torch.part") + field(2, "")) +
                                     field(9, field(1, "torch.averages") + field(2, field(5, ""))));
  const std::string process = "resource 0", trace = "01010101010101010101010101010101";
  const std::vector<Row> expected = {{1, 4, -1, -1, 0, 1, 0, "torch.step", "", "", process, "9", 0, 'X', 0},
                                     {2, 1, -1, -1, 0, 2, 1, "torch.phase.generate", "", "", process, "", 0, 'X', 0},
                                     {2, 1, -1, -1, 0, 3, 0, "op", "", "", process, "", 0, 'X', 0}};
  const std::string line =
      "{\"resourceSpans\":[{\"scopeSpans\":[{\"spans\":[{\"name\":\"torch.step\",\"traceId\":\"" + trace +
      "\",\"spanId\":\"0000000000000001\",\"startTimeUnixNano\":1,\"endTimeUnixNano\":5,\"attributes\":[" +
      pair("thread.id", "intValue", "9") + pair("torch.step.number", "intValue", "\"1152921504606846977\"") +
      "{\"key\":\"torch.part\",\"value\":{}},{\"key\":\"torch.unfinished\"}]}]}],\"resource\":{}}]}";
  using Values = std::vector<std::tuple<uint64_t, uint64_t, std::string, std::string>>;
  for (const bool is_json : {false, true}) {
    const std::string bytes = is_json ? line : request(spans, "otel_torchprof");
    for (const uint64_t capacity : {64, OTP_TRACE_ROWS_PER_SPAN}) {
      const Document read = DocumentReader(capacity, uint64_t{1} << 30, kKeys).read_request(bytes, is_json, 100);
      CHECK(read.rows == (is_json ? std::vector<Row>{expected[0]} : expected));
      for (const Row& row : read.rows) CHECK(row.trace == trace);
      Values values;
      for (const auto& [row, event, offset, key, value] : read.attributes) {
        CHECK(event == row + 1 && offset > 100 && offset < 100 + bytes.size());
        values.emplace_back(row, event, key, value);
      }
      const Values of_lines = {{0, 1, "torch.step.number", "\"1152921504606846977\""},
                               {0, 1, "torch.part", "0"},
                               {0, 1, "torch.unfinished", "null"}};
      const Values of_messages = {{0, 1, "torch.step.number", "1152921504606846977"},
                                  {1, 2, "torch.self_duration", "0.000000001"},
                                  {1, 2, "torch.unfinished", "true"},
                                  {2, 3, "torch.step.kind", "\"a\\\"\\n\""},
                                  {2, 3, "torch.part", "0"},
                                  {2, 3, "torch.averages", "{}"}};
      CHECK(values == (is_json ? of_lines : of_messages));
      CHECK(read.memory.empty() && read.works.empty());
    }
  }
}

void resources_have_a_limit() {
  std::string requests;
  for (int i = 0; i < 5000; ++i) requests += request(span("x", 1, 1, 2), "app", "\x10" + varint(1000 + i));
  const Document read = DocumentReader(64).read_request(requests, false);
  CHECK_EQ(read.rows.size(), 5000u);
  CHECK(read.members.size() == 4097 && read.members.back().second.empty());
  CHECK(read.rows[4095].process == "resource 4095" && read.rows[4999].process == "resource 4096");
}

void names_stay_below_the_limit() {
  DocumentReader reader(64, 100);
  CHECK_EQ(reader.read_request(request(kSpans), false).status, OTP_TRACE_NO_MEMORY);
}

}  // namespace

int main() {
  every_attribute();
  lines_say_the_same_as_messages();
  small_arrays_are_the_same();
  resources_and_scopes();
  what_is_no_span_is_counted();
  sums_have_ids_and_attributes();
  resources_have_a_limit();
  names_stay_below_the_limit();
  return 0;
}
