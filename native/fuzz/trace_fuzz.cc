// Chrome traces with faults: reading and rewriting them comes to an end, and to the same end however the bytes are cut
// into pieces; what is written is JSON.
//
// The input is a list of changes, four bytes each, to a trace: bytes that are replaced, left out, or repeated, and
// pieces of JSON that are put in. Its first bytes are sizes of pieces and of the arrays.
#include <string>
#include <string_view>
#include <vector>

#include "files/json_copy.h"
#include "fuzz.h"
#include "trace_support.h"

namespace {

using otp::testing::Document;
using otp::testing::DocumentReader;
using otp::testing::read_document;

const std::string kTrace =
    "{\"baseTimeNanoseconds\": 1790857026000000000, \"traceEvents\": [\n"
    "{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":7,\"tid\":0,\"args\":{\"labels\":\"GPU 0\"}},\n"
    "{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"a\\\"\\u00e9\",\"pid\":7,\"tid\":8,\"ts\":123456.789,\"dur\":0.5,"
    "\"args\":{\"External id\":4,\"Input type\":[\"float\",\"TensorList\",\"ScalarList\",\"Scalar\"],"
    "\"Input Dims\":[[2,3],[[1],[2]],[],[]],\"Input Strides\":[[3,1],[[1],[1]],[],[]],"
    "\"Concrete Inputs\":[\"\",\"\",\"[1, 2.5]\",\"1.-2.j\"]}},\n"
    "{\"ph\":\"b\",\"id2\":{\"local\":\"5\"},\"name\":\"x\",\"ts\":\"4e2\"},{\"ph\":\"e\",\"id\":\"0x5\",\"ts\":9},\n"
    "{\"ph\":\"X\",\"cat\":\"kernel\",\"ts\":1,\"args\":{\"device\":0,\"stream\":7,\"correlation\":12}},\n"
    "{\"ph\":\"X\",\"ts\":1,\"args\":{\"span_id\":\"00000000000000a1\",\"parent_id\":\"\",\"attributes\":{"
    "\"torch.phase.name\":\"f\",\"torch.op.input_dtypes\":\"['float', '']\",\"torch.op.input_shapes\":\"[[2], "
    "[]]\"}}},\n"
    "{\"ph\":\"i\",\"name\":\"[memory]\",\"ts\":3,\"args\":{\"Bytes\":-32,\"Addr\":18446744073709551615}}\n"
    "],\"otherData\":{\"a\":[null,true,1e400]}}";
const std::vector<std::string_view> kPieces = {
    "{",    "}",    "[", "]",          "\"",      "\\", ",",    ":",        "\\u",         "\\ud800",
    "1e99", "null", "-", "\"args\":{", "\"ts\":", "\0", "\xFF", "[[[[[[[[", "traceEvents", "9999999999"};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const std::string text = otp::fuzz::changed(kTrace, data + 4, size - 4, kPieces);
  const Document whole = read_document(text);
  const std::vector<size_t> sizes = {data[0] + size_t{1}, data[1] + size_t{1}, data[2] % 64 + size_t{1}};
  const Document cut = read_document(text, sizes, OTP_TRACE_ROWS_PER_SPAN + data[3] % 8);
  REQUIRE(whole.status != OTP_TRACE_MORE && whole.status != OTP_TRACE_FULL && whole.status == cut.status);
  REQUIRE(whole.rows == cut.rows && whole.members == cut.members && whole.inputs == cut.inputs);
  REQUIRE(whole.works.size() == cut.works.size() && whole.memory.size() == cut.memory.size());
  REQUIRE(whole.consumed == cut.consumed && whole.place == cut.place && whole.expected == cut.expected);
  REQUIRE(whole.figures.events == cut.figures.events && whole.figures.unusable == cut.figures.unusable);
  REQUIRE(whole.figures.first_offset == cut.figures.first_offset && whole.consumed <= text.size());
  constexpr const char* kKeys = "attributes\ntorch.op.input_dtypes\ntorch.self_duration";
  const Document sums = DocumentReader(64, uint64_t{1} << 30, kKeys).read(text, {SIZE_MAX});
  const Document cut_sums =
      DocumentReader(OTP_TRACE_ROWS_PER_SPAN + data[3] % 8, uint64_t{1} << 30, kKeys).read(text, sizes);
  REQUIRE(sums.status == cut_sums.status && sums.rows == cut_sums.rows && sums.attributes == cut_sums.attributes);
  const otp_clock_line lines[] = {{1000, 5, 0.5}};
  const otp_trace_target target = {data[0], data[1], lines, 1, int64_t{OTP_TRACE_IDS}, 3};
  const Document written = DocumentReader(OTP_TRACE_ROWS_PER_SPAN).rewrite(text, target, {SIZE_MAX});
  const Document cut_written = DocumentReader(OTP_TRACE_ROWS_PER_SPAN).rewrite(text, target, sizes);
  REQUIRE(written.status == cut_written.status && written.output == cut_written.output);
  REQUIRE(written.figures.unusable == cut_written.figures.unusable && written.consumed == cut_written.consumed);
  // What is JSON is copied as it is: an event begins with a comma, of which a list begins with none.
  const std::string events = written.output.empty() ? "[]" : "[" + written.output.substr(1) + "]";
  std::string copy(otp::kMostCopied * events.size(), '\0');
  char* end = copy.data();
  REQUIRE(otp::copy_json(events, &end));
  REQUIRE(std::string_view(copy.data(), static_cast<size_t>(end - copy.data())) == events);
  return 0;
}
