// Requests of OTLP with faults: reading them comes to an end, and to the same end however small the arrays are.
//
// The input is a list of changes, four bytes each, to a request or a line: bytes that are replaced, left out, or
// repeated. Its first bytes say which of both, and how small the arrays are.
#include <string>

#include "fuzz.h"
#include "otlp_messages.h"
#include "trace_support.h"

namespace {

using namespace otp::testing;

const std::string kThread = number("thread.id", 8) + text("thread.name", "main");
const std::string kRequest =
    request(span("torch.step", 1, 100, 900, number("torch.step.number", 7) + kThread) +
                span("aten::mm", 2, 200, 300,
                     text("torch.op.scope", "function") + number("torch.op.sequence_nr", 9) +
                         text("torch.op.input_shapes", "[[2, 3], [[1]]]") + flag("torch.async", true) +
                         text("torch.op.input_dtypes", "['float', 'TensorList']") + kThread) +
                span("timed", 3, 360, 370,
                     text("torch.device.type", "cuda") + real("torch.device.duration", 1e-9) +
                         number("torch.memory.released", 5) + kThread),
            "otel_torchprof", "\x0a\x00") +
    request(span("app", 4, 1, 2, field(13, field(1, std::string(16, '\2')) + field(2, "12345678"))), "app");
const std::string kLine =
    "{\"resourceSpans\":[{\"resource\":{\"attributes\":[]},\"scopeSpans\":[{\"scope\":{\"name\":\"otel_torchprof\"},"
    "\"spans\":[{\"traceId\":\"01010101010101010101010101010101\",\"spanId\":\"00000000000000a1\",\"parentSpanId\":"
    "\"\","
    "\"name\":\"a\\u00e9\\\"\",\"startTimeUnixNano\":\"100\",\"endTimeUnixNano\":\"1790857026000000000\","
    "\"attributes\":["
    "{\"key\":\"thread.id\",\"value\":{\"intValue\":\"8\"}},{\"key\":\"torch.op.input_shapes\",\"value\":{"
    "\"stringValue\":"
    "\"[[2, 3], []]\"}},{\"key\":\"torch.unfinished\",\"value\":{\"boolValue\":true}}],\"links\":[{\"traceId\":\"02\","
    "\"spanId\":\"03\"},{}]},{\"name\":null}]}]}]}\n";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const bool is_json = data[0] % 2 != 0;
  const std::string bytes = otp::fuzz::changed(is_json ? kLine : kRequest, data + 2, size - 2);
  const uint64_t small_capacity = OTP_TRACE_ROWS_PER_SPAN + data[1] % 4;
  DocumentReader large(64), small(small_capacity);
  const Document whole = large.read_request(bytes, is_json), cut = small.read_request(bytes, is_json);
  REQUIRE(whole.status == OTP_TRACE_END && cut.status == OTP_TRACE_END && whole.consumed == bytes.size());
  REQUIRE(whole.rows == cut.rows && whole.members == cut.members && whole.inputs == cut.inputs);
  REQUIRE(whole.works.size() == cut.works.size() && whole.memory.size() == cut.memory.size());
  REQUIRE(whole.figures.events == cut.figures.events && whole.figures.unusable == cut.figures.unusable);
  REQUIRE(whole.figures.first_offset == cut.figures.first_offset);
  constexpr const char* kKeys =
      "torch.step.number\ntorch.op.input_shapes\ntorch.async\ntorch.device.duration\ntorch.unfinished\n"
      "link:spanID";
  DocumentReader large_sums(64, uint64_t{1} << 30, kKeys), small_sums(small_capacity, uint64_t{1} << 30, kKeys);
  const Document sums = large_sums.read_request(bytes, is_json), cut_sums = small_sums.read_request(bytes, is_json);
  REQUIRE(sums.rows == cut_sums.rows && sums.attributes == cut_sums.attributes && sums.members == cut_sums.members);
  REQUIRE(sums.figures.events == whole.figures.events && sums.figures.unusable == whole.figures.unusable);
  return 0;
}
