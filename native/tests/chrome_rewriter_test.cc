// The rewriter of Chrome traces: what changes in events, what stays, and what becomes of bytes that are no JSON.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "trace_support.h"

namespace {

using otp::testing::Document;
using otp::testing::DocumentReader;

// Its process, 7, is the rank's, and has the id 3.
constexpr otp_trace_target kTarget = {0, 0, nullptr, 0, 2 * int64_t{OTP_TRACE_IDS}, 3};

Document rewritten(const std::string& events, const otp_trace_target& target = kTarget) {
  return DocumentReader(OTP_TRACE_ROWS_PER_SPAN).rewrite("[" + events + "]", target, {SIZE_MAX});
}

void check_event(const std::string& event, const std::string& expected) {
  const Document document = rewritten(event);
  CHECK(document.status == OTP_TRACE_END && document.figures.unusable == 0);
  CHECK_EQ(document.output, ",\n" + expected);
}

void times_are_on_the_clock_to_the_nanosecond() {
  const otp_clock_line lines[] = {{1000, 0, 0}, {-5, 2000, 0.5}};
  const otp_trace_target target = {10000, 4000, lines, 2, 0, 3};
  // 10,500 + 10,000 - 1,000 = 19,500; less -5 and half of 17,500: 10,755; the end is 2,000 ns later, by that clock
  // 1,000.
  const Document moved = rewritten("{\"ph\":\"X\",\"pid\":7,\"ts\":10.5,\"dur\":\"2\"}", target);
  CHECK_EQ(moved.output, ",\n{\"ph\":\"X\",\"pid\":3,\"ts\":6.755,\"dur\":1.000}");
  check_event("{\"dur\":-1,\"ts\":-1.5,\"ph\":\"X\",\"pid\":7}",
              "{\"dur\":0.000,\"ts\":-1.500,\"ph\":\"X\",\"pid\":3}");
  check_event("{\"args\":0,\"ph\":\"P\",\"name\":\"Profile\",\"ts\":2.5,\"pid\":7}",
              "{\"args\":{\"data\":{\"startTime\":2}},\"ph\":\"P\",\"name\":\"Profile\",\"ts\":2.500,\"pid\":3}");
  check_event("{\"dur\":null,\"ts\":1,\"ph\":\"i\",\"pid\":7}", "{\"ts\":1.000,\"ph\":\"i\",\"pid\":3}");
}

void ids_are_those_of_the_rank() {
  const std::string at = "\"pid\":7,\"ts\":1,", to = "\"pid\":3,\"ts\":1.000,";
  check_event("{\"ph\":\"s\"," + at + "\"id\":5,\"bind_id\":0}",
              "{\"ph\":\"s\"," + to + "\"id\":2199023255557,\"bind_id\":2199023255552}");
  check_event("{\"ph\":\"X\"," + at + "\"id\":5}", "{\"ph\":\"X\"," + to + "\"id\":5}");
  check_event("{\"ph\":\"b\"," + at + "\"id2\":{\"local\":5,\"global\":6}}",
              "{\"ph\":\"b\"," + to + "\"id2\":{\"local\":5,\"global\":2199023255558}}");
  const std::string large = "{\"ph\":\"t\"," + at + "\"id\":\"0x5\"}";
  const Document first = rewritten(large), second = rewritten(large);
  const uint64_t id = std::stoull(first.output.substr(first.output.rfind(':') + 1));
  CHECK(first.output == second.output && id >= 2 * uint64_t{OTP_TRACE_IDS} && id < 3 * uint64_t{OTP_TRACE_IDS});
}

void processes_are_added_and_tracks_named_once() {
  const std::string track =
      "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":7,\"tid\":1,\"ts\":0,\"args\":{\"name\":\"a\"}}";
  const std::string process = "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":7}";
  const std::string labels = "{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":";
  const std::string events = process + "," + track + "," + track + "," + labels + "7}," + labels + "8}," +
                             "{\"ph\":\"i\",\"ts\":1,\"pid\":\"GPU\"},{\"ph\":\"i\",\"ts\":1}";
  DocumentReader reader(OTP_TRACE_ROWS_PER_SPAN);
  const Document first = reader.rewrite("[" + events + "]", kTarget, {SIZE_MAX});
  CHECK_EQ(first.output,
           ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":3,\"tid\":1,\"args\":{\"name\":\"a\"}}"
           ",\n{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":3}"
           ",\n{\"M\":1000},\n{\"ph\":\"i\",\"ts\":1.000,\"pid\":1000}"
           ",\n{\"M\":1001},\n{\"ph\":\"i\",\"ts\":1.000,\"pid\":1001}");
  CHECK_EQ(reader.rewrite("[" + track + "]", kTarget, {1}).output, "");
}

void what_viewers_cannot_read_is_made_readable() {
  const std::string head = "{\"ph\":\"C\",\"pid\":7,\"ts\":1,\"args\":",
                    same = "{\"ph\":\"C\",\"pid\":3,\"ts\":1.000,\"args\":";
  const auto check = [&](const std::string& value, const std::string& expected) {
    check_event(head + value + "}", same + expected + "}");
  };
  check("[NaN,-Infinity,1e400,01,9223372036854775808,+1]",
        "[\"NaN\",\"-Infinity\",\"1e400\",\"01\",\"9223372036854775808\",\"+1\"]");
  check("[-9223372036854775808,1e308,-0.5E-3,true,null]", "[-9223372036854775808,1e308,-0.5E-3,true,null]");
  check("\"a\xFF\x01\\x\\ud800\\ud83d\\ude00\xC3\xA9\"", "\"a\xEF\xBF\xBD\\u0001\\\\x\\ufffd\\ud83d\\ude00\xC3\xA9\"");
  check("{ \"a\" : [ ] }", "{ \"a\" : [ ] }");
}

void events_that_are_none_are_counted() {
  const std::string good = "{\"ph\":\"i\",\"ts\":1,\"pid\":7}";
  const std::string head = "{\"ph\":\"i\",\"ts\":1,\"pid\":7,\"args\":";
  const struct {
    std::string event;
    uint32_t fault;
  } cases[] = {{"{\"ts\":1}", OTP_FAULT_PHASE},
               {"{\"ph\":7,\"ts\":1}", OTP_FAULT_PHASE},
               {"{\"ph\":\"M\",\"name\":{}}", OTP_FAULT_NAME},
               {"{\"ph\":\"i\",\"ts\":1e300}", OTP_FAULT_TS},
               {"{\"ph\":\"X\",\"ts\":1,\"dur\":\"soon\"}", OTP_FAULT_DUR},
               {"{\"ph\":\"f\",\"ts\":1}", OTP_FAULT_NO_ID},
               {head + "[1 2]}", OTP_FAULT_JSON},
               {head + "{\"a\" 1}}", OTP_FAULT_JSON},
               {head + std::string(1000, '[') + std::string(1000, ']') + "}", OTP_FAULT_JSON},
               {"5", OTP_FAULT_EVENT}};
  for (const auto& [event, fault] : cases) {
    const Document document = rewritten(good + "," + event + "," + good);
    CHECK_EQ(document.output, ",\n{\"ph\":\"i\",\"ts\":1.000,\"pid\":3},\n{\"ph\":\"i\",\"ts\":1.000,\"pid\":3}");
    CHECK(document.figures.unusable == 1 && document.figures.first_event == 2 && document.figures.first_fault == fault);
    CHECK_EQ(document.figures.first_offset, good.size() + 2);
  }
}

}  // namespace

int main() {
  RUN(times_are_on_the_clock_to_the_nanosecond);
  RUN(ids_are_those_of_the_rank);
  RUN(processes_are_added_and_tracks_named_once);
  RUN(what_viewers_cannot_read_is_made_readable);
  RUN(events_that_are_none_are_counted);
}
