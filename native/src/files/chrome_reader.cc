// Reads a Chrome trace piece by piece, in one pass: the document, its members, and the events in it as rows.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <string>

#include "files/chrome_event.h"
#include "files/chrome_rewriter.h"
#include "files/json_cursor.h"
#include "files/json_values.h"
#include "files/otlp_spans.h"
#include "files/trace_tables.h"
#include "otel_torchprof/record_format.h"
#include "otel_torchprof/trace_files.h"

namespace otp {
namespace {

// Passes over a value that is too large to be read, over several pieces.
struct Skipping {
  bool is_on = false;
  bool in_string = false;
  bool is_escaped = false;
  uint64_t depth = 0;

  // Moves behind the value, and is then off; or to the end of the piece.
  void pass(JsonCursor* cursor);
};

void Skipping::pass(JsonCursor* cursor) {
  while (cursor->at != cursor->end) {
    const char c = *cursor->at;
    const bool is_behind = !in_string && depth == 0 && (c == ',' || c == ']' || c == '}');  // behind a scalar
    if (!is_behind) ++cursor->at;
    if (in_string) {
      in_string = is_escaped || c != '"';
      is_escaped = !is_escaped && c == '\\';
    } else if (c == '"') {
      in_string = true;
      continue;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (!is_behind && (c == '}' || c == ']')) {
      --depth;
    }
    const bool is_end = is_behind || c == '"' || c == '}' || c == ']';
    if (!in_string && depth == 0 && is_end) {
      *this = Skipping();
      return;
    }
  }
}

// Begins the names of calls of modules that the tracer of Python recorded, as JSON text.
constexpr std::string_view kModuleCall = "\"nn.Module: ";

// The first byte of a phase; 0: it is none.
char phase_of(std::string_view token) { return token.size() == 3 && token.front() == '"' ? token[1] : '\0'; }

bool is_string(std::string_view token) { return !token.empty() && token.front() == '"'; }

// A whole number that an event may have; `none` where it has none, or anything else.
int64_t number_or(std::string_view token, int64_t none) {
  int64_t number;
  return integer_of(token, &number) ? number : none;
}

uint32_t small_number(std::string_view token) {
  const int64_t number = number_or(token, 0);
  return number < 0 || number > UINT32_MAX ? 0 : static_cast<uint32_t>(number);
}

int32_t signed_number(std::string_view token, int32_t none) {
  const int64_t number = number_or(token, none);
  return number < INT32_MIN || number > INT32_MAX ? none : static_cast<int32_t>(number);
}

// The digits of {"local": "12"}, or of an id such as 12, "12" or "0x1f".
uint64_t id_of(std::string_view local_id, std::string_view id) {
  if (const size_t colon = local_id.rfind(':'); colon != std::string_view::npos) {
    id = local_id.substr(colon + 1);
    while (!id.empty() && (id.front() == ' ' || id.front() == '\n')) id.remove_prefix(1);
    id = id.substr(0, id.find_first_of("} \n"));
  }
  uint64_t number = 0;
  const std::string_view digits = unquoted(id);
  if (digits.substr(0, 2) == "0x") return hexadecimal_of(digits.substr(2), &number) ? number : 0;
  return static_cast<uint64_t>(number_or(digits, 0));
}

// The id of a span; 0 where there is none. False: it is something else.
bool span_id_of(std::string_view token, uint64_t* id) {
  *id = 0;
  if (token.empty() || token == "null" || token == "\"\"" || token == "[]") return true;
  return is_string(token) && hexadecimal_of(unquoted(token), id);
}

// What all rows have, checked before any of it is written.
struct Extent {
  int64_t start = 0;
  int64_t duration = -1;
  uint64_t span_id = 0;
  uint64_t parent_id = 0;

  // The part of the event that cannot be used.
  uint32_t read(const ChromeEvent& event, bool has_duration);
};

uint32_t Extent::read(const ChromeEvent& event, bool has_duration) {
  if (!event.name.empty() && !is_string(event.name)) return OTP_FAULT_NAME;
  if (event.arguments.is_unusable) return OTP_FAULT_ARGS;
  if (!nanoseconds_of(event.start, &start)) return OTP_FAULT_TS;
  if (has_duration) {
    if (!event.duration.empty() && !nanoseconds_of(event.duration, &duration)) return OTP_FAULT_DUR;
    duration = std::max<int64_t>(duration, 0);
  }
  const bool is_span = is_string(event.arguments.span_id);
  if (is_span && !span_id_of(event.arguments.span_id, &span_id)) return OTP_FAULT_ID;
  if (is_span && !span_id_of(event.arguments.parent_id, &parent_id)) return OTP_FAULT_ID;
  return OTP_FAULT_NONE;
}

uint8_t flags_of(const ChromeArguments& arguments) {
  return static_cast<uint8_t>(
      (arguments.is_async ? OTP_TRACE_ASYNC : 0) | (arguments.is_unfinished ? OTP_TRACE_UNFINISHED : 0) |
      (arguments.error_type.empty() ? 0 : OTP_TRACE_ERROR) | (arguments.follows_loss ? OTP_TRACE_LOSS_BEFORE : 0) |
      (arguments.has_inputs_cut ? OTP_TRACE_INPUTS_CUT : 0));
}

}  // namespace
}  // namespace otp

using otp::ChromeArguments;
using otp::ChromeEvent;
using otp::JsonCursor;
using Output = otp::TraceOutput;

struct otp_trace_reader {
 public:
  otp_trace_reader(uint64_t limit, uint64_t seed) : tables(limit, seed), spans(&tables), d_seed(seed) {}

  int read(std::string_view data, bool is_last, const Output& out, otp_trace_step* step);

  // Begins a document that is rewritten.
  void rewrite(const otp_trace_target& target);

  otp::TraceTables tables;
  otp::OtlpReader spans;
  std::unique_ptr<otp::ChromeRewriter> rewriter;  // null: events become rows

 private:
  enum class State { kStart, kMembers, kEvents, kEnd };
  enum class Outcome { kDone, kMember, kProcess, kIncomplete };

  // The cursor is at the first byte of what comes next, which is no white space.
  Outcome advance(JsonCursor* cursor, const Output& out, otp_trace_step* step);
  Outcome begin(JsonCursor* cursor);
  Outcome member(JsonCursor* cursor, otp_trace_step* step);
  Outcome element(JsonCursor* cursor, const Output& out, otp_trace_step* step);
  Outcome rewrite_event(JsonCursor* cursor, otp_trace_step* step);
  // What to do where the piece ends too early, or is not what it must be.
  int stopped(const JsonCursor& cursor, bool is_last, otp_trace_step* step);
  // Whether what begins here is too large: it is then passed over.
  bool is_too_large(const char* end);

  void add(const ChromeEvent& event, uint64_t offset, const Output& out);
  uint32_t add_row(const ChromeEvent& event, char phase, uint64_t offset, const Output& out);
  void add_attributes(const ChromeEvent& event, uint64_t offset);
  void add_work(const ChromeArguments& arguments, const Output& out);
  void add_metadata(const ChromeEvent& event, const Output& out);
  uint32_t add_memory(const ChromeEvent& event, otp_trace_memory* memory);
  uint32_t add_samples(const ChromeEvent& event, uint64_t offset, const Output& out);
  void put_row(const ChromeEvent& event, char phase, const otp::Extent& extent, otp_trace_rows* rows);
  void put_operator(const ChromeEvent& event, uint64_t row, otp_trace_rows* rows);
  void note(uint32_t fault, uint64_t offset);

  uint32_t name_of(std::string_view token);
  std::string& unescaped(std::string_view token);
  uint32_t call_stack_of(std::string_view token);
  uint32_t track_of(const ChromeEvent& event);

  uint64_t d_seed;
  State d_state = State::kStart;
  bool d_is_list = false;     // the document is the list of events
  bool d_had_events = false;  // the member with the events has begun
  uint64_t d_offset = 0;      // of the piece in the document
  const char* d_piece = nullptr;
  const char* d_value = nullptr;  // where the value begins that is being read; null: none
  otp::Skipping d_skipping;
  uint64_t d_row = 0;            // number of the next row
  otp::FoundAttributes d_found;  // of the event that is being read
  std::string d_scratch;
};

int otp_trace_reader::read(std::string_view data, bool is_last, const Output& out, otp_trace_step* step) {
  JsonCursor cursor{data.data(), data.data() + data.size()};
  const char* begun = d_piece = cursor.at;
  *step = {};
  int status = OTP_TRACE_MORE;
  for (bool is_over = false; !is_over;) {
    begun = cursor.at;
    is_over = true;
    if (d_skipping.is_on) {
      d_skipping.pass(&cursor);
      begun = cursor.at;
      is_over = d_skipping.is_on;
      step->is_cut_off = is_over && is_last;
      status = step->is_cut_off ? OTP_TRACE_UNEXPECTED : OTP_TRACE_MORE;
    } else if (d_state == State::kEnd) {
      status = OTP_TRACE_END;
    } else if (tables.is_over_limit()) {
      status = OTP_TRACE_NO_MEMORY;
    } else if (d_state == State::kEvents && rewriter == nullptr && out.is_full()) {
      status = OTP_TRACE_FULL;
    } else {
      d_value = nullptr;
      const bool has_more = d_state == State::kStart ? cursor.space() : cursor.space_and_commas();
      begun = cursor.at;  // white space is consumed at once: there may be any amount of it
      const Outcome outcome = has_more ? advance(&cursor, out, step) : Outcome::kIncomplete;
      if (outcome == Outcome::kMember) begun = cursor.at;
      if (outcome == Outcome::kMember) status = OTP_TRACE_MEMBER;
      if (outcome == Outcome::kProcess) status = OTP_TRACE_PROCESS;
      if (outcome == Outcome::kIncomplete) status = stopped(cursor, is_last, step);
      if (outcome == Outcome::kIncomplete && d_state == State::kEvents && d_value != nullptr) begun = d_value;
      if (d_skipping.is_on) cursor.at = d_value;
      is_over = status != OTP_TRACE_MORE || (outcome == Outcome::kIncomplete && !d_skipping.is_on);
    }
  }
  step->consumed = static_cast<uint64_t>(begun - data.data());
  d_offset += step->consumed;
  return status;
}

int otp_trace_reader::stopped(const JsonCursor& cursor, bool is_last, otp_trace_step* step) {
  step->expected = cursor.expected;
  step->place = static_cast<uint64_t>(cursor.at - d_piece);
  if (cursor.expected != 0) return OTP_TRACE_UNEXPECTED;
  if (is_last) {
    const bool is_between = d_is_list && d_state == State::kEvents && d_value == nullptr;
    if (is_between) d_state = State::kEnd;  // the closing bracket may be missing
    step->is_cut_off = !is_between;
    return is_between ? OTP_TRACE_END : OTP_TRACE_UNEXPECTED;
  }
  if (!is_too_large(cursor.end)) return OTP_TRACE_MORE;
  d_skipping.is_on = true;  // an event; member() sees to members
  ++tables.figures.events;
  note(OTP_FAULT_SIZE, static_cast<uint64_t>(d_value - d_piece));
  return OTP_TRACE_MORE;
}

bool otp_trace_reader::is_too_large(const char* end) { return d_value != nullptr && end - d_value > OTP_TRACE_LARGEST; }

otp_trace_reader::Outcome otp_trace_reader::advance(JsonCursor* cursor, const Output& out, otp_trace_step* step) {
  switch (d_state) {
    case State::kStart:
      return begin(cursor);
    case State::kMembers:
      return member(cursor, step);
    default:
      return element(cursor, out, step);
  }
}

otp_trace_reader::Outcome otp_trace_reader::begin(JsonCursor* cursor) {
  d_is_list = *cursor->at == '[';
  tables.figures.is_document = *cursor->at == '{';
  if (!d_is_list && !tables.figures.is_document) {
    cursor->fail(OTP_EXPECTED_DOCUMENT);
    return Outcome::kIncomplete;
  }
  ++cursor->at;
  d_state = d_is_list ? State::kEvents : State::kMembers;
  return Outcome::kDone;
}

otp_trace_reader::Outcome otp_trace_reader::member(JsonCursor* cursor, otp_trace_step* step) {
  if (*cursor->at == '}') {
    if (!d_had_events) cursor->fail(OTP_EXPECTED_EVENTS);
    if (!d_had_events) return Outcome::kIncomplete;
    ++cursor->at;
    d_state = State::kEnd;
    return Outcome::kDone;
  }
  std::string_view name;
  if (!cursor->key(&name)) return Outcome::kIncomplete;
  if (name == "traceEvents" && !d_had_events) {
    if (*cursor->at != '[') cursor->fail(OTP_EXPECTED_EVENTS);
    if (*cursor->at != '[') return Outcome::kIncomplete;
    ++cursor->at;
    d_had_events = true;
    d_state = State::kEvents;
    return Outcome::kDone;
  }
  d_value = cursor->at;
  const bool is_complete = cursor->skip();
  if (!is_complete && (cursor->expected != 0 || !is_too_large(cursor->end))) return Outcome::kIncomplete;
  step->place = static_cast<uint64_t>(name.data() - d_piece);
  step->name_size = name.size();
  step->value = static_cast<uint64_t>(d_value - d_piece);
  step->value_size = is_complete ? static_cast<uint64_t>(cursor->at - d_value) : 0;
  d_skipping.is_on = !is_complete;
  if (!is_complete) cursor->at = d_value;
  return Outcome::kMember;
}

otp_trace_reader::Outcome otp_trace_reader::element(JsonCursor* cursor, const Output& out, otp_trace_step* step) {
  if (*cursor->at == ']') {
    ++cursor->at;
    d_state = d_is_list ? State::kEnd : State::kMembers;
    return Outcome::kDone;
  }
  d_value = cursor->at;
  const auto offset = static_cast<uint64_t>(d_value - d_piece);
  if (*cursor->at != '{') {
    if (*cursor->at == '}' || *cursor->at == ':') cursor->fail(OTP_EXPECTED_ELEMENT);
    if (cursor->expected != 0 || !cursor->skip()) return Outcome::kIncomplete;
    ++tables.figures.events;
    note(OTP_FAULT_EVENT, offset);
    return Outcome::kDone;
  }
  if (rewriter != nullptr) return rewrite_event(cursor, step);
  ChromeEvent event;
  d_found.clear();
  if (!event.read(cursor, &tables, &d_found)) return Outcome::kIncomplete;
  ++tables.figures.events;
  add(event, offset, out);
  return Outcome::kDone;
}

otp_trace_reader::Outcome otp_trace_reader::rewrite_event(JsonCursor* cursor, otp_trace_step* step) {
  if (!rewriter->read(cursor)) return Outcome::kIncomplete;
  uint32_t fault;
  if (!rewriter->write(&fault)) {
    const std::string_view process = rewriter->process();
    step->value = process.empty() ? 0 : static_cast<uint64_t>(process.data() - d_piece);
    step->value_size = process.size();
    return Outcome::kProcess;
  }
  ++tables.figures.events;
  if (fault != OTP_FAULT_NONE) note(fault, static_cast<uint64_t>(d_value - d_piece));
  return Outcome::kDone;
}

void otp_trace_reader::rewrite(const otp_trace_target& target) {
  if (rewriter == nullptr) rewriter = std::make_unique<otp::ChromeRewriter>(d_seed);
  rewriter->begin(target);
  tables.figures = {};
  d_state = State::kStart;
  d_had_events = false;
  d_offset = 0;
  d_skipping = {};
}

void otp_trace_reader::add(const ChromeEvent& event, uint64_t offset, const Output& out) {
  const char phase = otp::phase_of(event.phase);
  uint32_t fault = OTP_FAULT_NONE;
  switch (phase) {
    case 'X':
    case 'B':
    case 'E':
    case 'b':
    case 'e':
      fault = add_row(event, phase, offset, out);
      break;
    case 'M':
      add_metadata(event, out);
      break;
    case 'P':
      fault = add_samples(event, offset, out);
      break;
    default:
      if (phase == 'i' && !tables.is_for_sums() &&
          (event.name == "\"[memory]\"" || event.name == "\"[OutOfMemory]\"")) {
        fault = add_memory(event, out.memory);
      } else {
        ++tables.figures.by_phase[static_cast<uint8_t>(phase)];
      }
  }
  if (fault != OTP_FAULT_NONE) note(fault, offset);
}

namespace {

otp::SpanMemory memory_of(const otp::ChromeArguments& arguments) {
  otp::SpanMemory found;
  found.allocated = otp::number_or(arguments.allocated, 0);
  found.released = otp::number_or(arguments.released, 0);
  found.peak = otp::number_or(arguments.peak, -1);
  found.device_allocated = otp::number_or(arguments.device_allocated, 0);
  found.device_released = otp::number_or(arguments.device_released, 0);
  found.device_peak = otp::number_or(arguments.device_peak, -1);
  return found;
}

}  // namespace

uint32_t otp_trace_reader::add_row(const ChromeEvent& event, char phase, uint64_t offset, const Output& out) {
  otp::Extent extent;
  const uint32_t fault = extent.read(event, phase == 'X');
  if (fault != OTP_FAULT_NONE) return fault;
  tables.figures.without_duration += phase == 'X' && event.duration.empty();
  put_row(event, phase, extent, out.rows);
  const ChromeArguments& arguments = event.arguments;
  const bool is_work = !arguments.stream.empty() || !arguments.stream_id.empty();
  if (is_work || (!tables.is_for_sums() && !arguments.correlation.empty())) add_work(arguments, out);
  if (otp::is_string(arguments.span_id) || arguments.is_collective) add_attributes(event, offset);
  if (!tables.is_for_sums() && otp::is_string(arguments.span_id))
    memory_of(arguments).put(d_row, track_of(event), out.memory);
  ++out.rows->count;
  ++d_row;
  return OTP_FAULT_NONE;
}

void otp_trace_reader::add_attributes(const ChromeEvent& event, uint64_t offset) {
  if (!tables.keeps(d_found)) return;
  const bool is_phase = event.name.substr(0, 13) == "\"torch.phase." || !event.arguments.phase_name.empty();
  for (const auto& [key, value] : d_found) tables.add_attribute(d_row, d_offset + offset, is_phase, key, value);
}

// What only single operators have.
void otp_trace_reader::put_operator(const ChromeEvent& event, uint64_t row, otp_trace_rows* rows) {
  const ChromeArguments& arguments = event.arguments;
  const bool for_sums = tables.is_for_sums();
  rows->sequence_nr[row] = for_sums ? -1 : otp::number_or(arguments.sequence_nr, -1);
  otp::InputTexts inputs = arguments.inputs;
  inputs.call_stack = for_sums ? 0 : call_stack_of(arguments.call_stack);
  rows->inputs[row] = for_sums ? -1 : tables.inputs(inputs);
  const bool has_thread = !arguments.fwd_thread.empty();
  rows->fwd_thread[row] =
      for_sums ? 0 : otp::small_number(has_thread ? arguments.fwd_thread : arguments.python_identity);
  const bool is_call = event.category == "\"python_function\"" && arguments.error_type.empty();
  rows->text[row] = name_of(for_sums ? std::string_view() : is_call ? arguments.modules : arguments.error_type);
  rows->trace[row] = name_of(arguments.trace_id);
}

void otp_trace_reader::put_row(const ChromeEvent& event, char phase, const otp::Extent& extent, otp_trace_rows* rows) {
  const ChromeArguments& arguments = event.arguments;
  const uint64_t row = rows->count;
  const bool is_pair = phase == 'b' || phase == 'e';
  rows->start[row] = extent.start;
  rows->duration[row] = extent.duration;
  const bool has_thread_id = tables.is_for_sums() || !arguments.thread_id.empty();
  const std::string_view id = has_thread_id ? arguments.thread_id : arguments.external_id;
  rows->id[row] = is_pair ? otp::id_of(event.local_id, event.id) : otp::id_of({}, id);
  rows->span_id[row] = extent.span_id;
  rows->parent_id[row] = extent.parent_id;
  put_operator(event, row, rows);
  const bool is_phase = otp::is_string(arguments.phase_name);
  rows->name[row] = is_phase ? tables.phase_name(unescaped(arguments.phase_name)) : name_of(event.name);
  // A span of a module that is no call of Python, whose name has the prefix.
  const bool is_module = !tables.is_for_sums() && !is_phase && otp::is_string(arguments.module) &&
                         event.name.substr(0, otp::kModuleCall.size()) != otp::kModuleCall;
  rows->category[row] = is_module ? tables.name("module") : name_of(event.category);
  rows->track[row] = track_of(event);
  rows->phase[row] = static_cast<uint8_t>(phase);
  rows->flags[row] = otp::flags_of(arguments);
}

void otp_trace_reader::add_work(const ChromeArguments& arguments, const Output& out) {
  otp_trace_works* works = out.works;
  const uint64_t at = works->count++;
  works->row[at] = d_row;
  works->correlation[at] = otp::number_or(arguments.correlation, -1);
  const bool is_timed = arguments.stream.empty();
  const std::string_view stream = is_timed ? arguments.stream_id : arguments.stream;
  const bool is_work = !stream.empty() && !arguments.device.empty();
  works->stream[at] = is_work ? std::max<int64_t>(otp::number_or(stream, 0), 0) : -1;
  works->bytes[at] = otp::number_or(arguments.bytes, -1);
  works->device[at] = otp::signed_number(arguments.device, -1);
  out.rows->flags[out.rows->count] |= is_work && is_timed ? OTP_TRACE_WORK | OTP_TRACE_TIMED : OTP_TRACE_WORK;
}

// Names of processes and threads; what else there is of metadata says only how to draw.
void otp_trace_reader::add_metadata(const ChromeEvent& event, const Output& out) {
  const std::string_view name = otp::unquoted(event.name);
  const bool has_labels = name == "process_labels";
  if (!has_labels && name != "process_name" && name != "thread_name") return;
  const std::string_view text = has_labels ? event.arguments.labels : event.arguments.name;
  if (!otp::is_string(text)) return;
  ChromeEvent plain;
  plain.name = event.name;
  plain.process = event.process;
  plain.thread = event.thread;
  put_row(plain, 'M', {}, out.rows);
  out.rows->text[out.rows->count] = name_of(text);
  ++out.rows->count;
  ++d_row;
}

uint32_t otp_trace_reader::add_memory(const ChromeEvent& event, otp_trace_memory* memory) {
  const uint64_t at = memory->count;
  const ChromeArguments& arguments = event.arguments;
  if (arguments.is_unusable) return OTP_FAULT_ARGS;
  if (!otp::nanoseconds_of(event.start, &memory->time[at])) return OTP_FAULT_TS;
  memory->bytes[at] = otp::number_or(arguments.bytes, 0);
  memory->address[at] = static_cast<uint64_t>(otp::number_or(arguments.address, 0));
  memory->total_allocated[at] = otp::number_or(arguments.total_allocated, -1);
  memory->total_reserved[at] = otp::number_or(arguments.total_reserved, -1);
  memory->span[at] = UINT64_MAX;
  memory->track[at] = track_of(event);
  memory->device_type[at] = otp::signed_number(arguments.device_type, 0);
  memory->device_index[at] = otp::signed_number(arguments.device_id, -1);
  memory->flags[at] = event.name == "\"[memory]\"" ? 0 : OTP_MEMORY_OUT_OF_MEMORY;
  ++memory->count;
  return OTP_FAULT_NONE;
}

// A chunk of samples of this package is a row of its track, with its content as an attribute. The event "Profile"
// before each says only when it begins.
uint32_t otp_trace_reader::add_samples(const ChromeEvent& event, uint64_t offset, const Output& out) {
  if (event.category != "\"python_samples\"") ++tables.figures.by_phase['P'];
  if (event.category != "\"python_samples\"" || event.name != "\"ProfileChunk\"") return OTP_FAULT_NONE;
  otp::Extent extent;
  if (event.arguments.is_unusable) return OTP_FAULT_ARGS;
  if (!otp::nanoseconds_of(event.start, &extent.start)) return OTP_FAULT_TS;
  ChromeEvent plain;
  plain.process = event.process;
  plain.thread = event.thread;
  put_row(plain, 'P', extent, out.rows);
  const std::string_view data = event.arguments.data;
  tables.add_attribute(d_row, d_offset + offset, false, tables.name("ProfileChunk"), data.empty() ? "null" : data);
  ++out.rows->count;
  ++d_row;
  return OTP_FAULT_NONE;
}

void otp_trace_reader::note(uint32_t fault, uint64_t offset) { tables.note(fault, d_offset + offset); }

// The number of a string's content; 0 where it is none.
uint32_t otp_trace_reader::name_of(std::string_view token) {
  if (!otp::is_string(token)) return 0;
  const std::string_view content = otp::unquoted(token);
  return tables.name(content.find('\\') == std::string_view::npos ? content : unescaped(token));
}

// The content of a string, until the next one.
std::string& otp_trace_reader::unescaped(std::string_view token) {
  d_scratch.clear();
  otp::append_unescaped(otp::unquoted(token), &d_scratch);
  return d_scratch;
}

// The entries of a call stack, each with a semicolon behind it in the file, by line.
uint32_t otp_trace_reader::call_stack_of(std::string_view token) {
  if (!otp::is_string(token)) return 0;
  std::string& entries = unescaped(token);
  while (!entries.empty() && entries.back() == ';') entries.pop_back();
  std::replace(entries.begin(), entries.end(), ';', '\n');
  return tables.name(entries);
}

uint32_t otp_trace_reader::track_of(const ChromeEvent& event) {
  const uint32_t process = tables.name(event.process);
  return tables.track(process, tables.name(event.thread));
}

// ---- the C boundary: nothing is thrown across it ----

extern "C" otp_trace_reader* otp_trace_open(uint64_t limit) {
  try {
    const auto now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    const int here = 0;
    const auto place = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&here));
    return new otp_trace_reader(limit, otp::mixed(now, place | 1));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" int otp_trace_read_for_sums(otp_trace_reader* reader, const char* keys) {
  try {
    reader->tables.read_for_sums(keys);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

extern "C" int otp_trace_rewrite(otp_trace_reader* reader, const otp_trace_target* target) {
  try {
    reader->rewrite(*target);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

extern "C" int otp_trace_add_process(otp_trace_reader* reader, const uint8_t* process, uint64_t size, int64_t pid,
                                     const uint8_t* events, uint64_t events_size) {
  try {
    const std::string_view text(reinterpret_cast<const char*>(events), events_size);
    reader->rewriter->add_process({reinterpret_cast<const char*>(process), size}, pid, text);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

extern "C" otp_buffer* otp_trace_output(otp_trace_reader* reader) { return &reader->rewriter->output; }

extern "C" void otp_trace_close(otp_trace_reader* reader) { delete reader; }

extern "C" int otp_trace_read(otp_trace_reader* reader, const uint8_t* data, uint64_t size, int is_last,
                              otp_trace_rows* rows, otp_trace_works* works, otp_trace_memory* memory,
                              otp_trace_step* step) {
  try {
    return reader->read({reinterpret_cast<const char*>(data), size}, is_last != 0, {rows, works, memory}, step);
  } catch (const std::bad_alloc&) {
    *step = {};
    return OTP_TRACE_NO_MEMORY;
  }
}

extern "C" int otp_trace_read_request(otp_trace_reader* reader, const uint8_t* request, uint64_t size, int is_json,
                                      uint64_t offset, otp_trace_rows* rows, otp_trace_works* works,
                                      otp_trace_memory* memory, otp_trace_step* step) {
  try {
    const std::string_view bytes(reinterpret_cast<const char*>(request), size);
    return reader->spans.read(bytes, is_json != 0, offset, {rows, works, memory}, step);
  } catch (const std::bad_alloc&) {
    *step = {};
    return OTP_TRACE_NO_MEMORY;
  }
}

extern "C" const otp_trace_figures* otp_trace_get_figures(const otp_trace_reader* reader) {
  return &reader->tables.figures;
}

extern "C" otp_names otp_trace_names(const otp_trace_reader* reader) {
  const otp::TextTable& names = reader->tables.names();
  return {reinterpret_cast<const uint8_t*>(names.data()), names.ends(), names.size(), nullptr, nullptr};
}

extern "C" const uint32_t* otp_trace_tracks(const otp_trace_reader* reader, uint64_t* count) {
  *count = reader->tables.tracks().size() / 2;
  return reader->tables.tracks().data();
}

extern "C" const otp_trace_attribute* otp_trace_attributes(const otp_trace_reader* reader, uint64_t* count) {
  *count = reader->tables.attributes().size();
  return reader->tables.attributes().data();
}

extern "C" const int64_t* otp_trace_inputs(const otp_trace_reader* reader, uint64_t* count) {
  *count = reader->tables.input_words().size();
  return reader->tables.input_words().data();
}
