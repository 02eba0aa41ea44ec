#include "files/otlp_spans.h"

#include <algorithm>
#include <limits>

#include "encode/json_writer.h"
#include "files/json_values.h"

namespace otp {
namespace {

struct Text {
  std::string_view key;
  std::string_view OtlpSpan::* place;
};

constexpr Text kTexts[] = {
    {"torch.op.scope", &OtlpSpan::scope},          {"code.function.name", &OtlpSpan::function},
    {"torch.module", &OtlpSpan::module},           {"torch.phase.name", &OtlpSpan::phase},
    {"torch.step.kind", &OtlpSpan::step_kind},     {"thread.name", &OtlpSpan::thread_name},
    {"error.type", &OtlpSpan::error_type},         {"torch.op.input_shapes", &OtlpSpan::shapes},
    {"torch.op.input_dtypes", &OtlpSpan::dtypes},  {"torch.op.concrete_inputs", &OtlpSpan::values},
    {"torch.device.type", &OtlpSpan::device_type},
};

struct Number {
  std::string_view key;
  int64_t OtlpSpan::* place;
};

constexpr Number kNumbers[] = {
    {"thread.id", &OtlpSpan::thread_id},
    {"torch.step.number", &OtlpSpan::step},
    {"torch.op.sequence_nr", &OtlpSpan::sequence_nr},
    {"torch.op.forward_thread", &OtlpSpan::forward_thread},
    {"torch.op.flops", &OtlpSpan::flops},
    {"torch.dropped_events", &OtlpSpan::dropped},
    {"torch.memory.allocated", &OtlpSpan::allocated},
    {"torch.memory.released", &OtlpSpan::released},
    {"torch.memory.peak", &OtlpSpan::peak},
    {"torch.device.memory.allocated", &OtlpSpan::device_allocated},
    {"torch.device.memory.released", &OtlpSpan::device_released},
    {"torch.device.memory.peak", &OtlpSpan::device_peak},
    {"torch.device.stream", &OtlpSpan::stream},
    {"torch.device.index", &OtlpSpan::device},
};

struct Mark {
  std::string_view key;
  bool OtlpSpan::* place;
};

constexpr Mark kMarks[] = {
    {"torch.async", &OtlpSpan::is_async},
    {"torch.unfinished", &OtlpSpan::is_unfinished},
    {"torch.dropped_before", &OtlpSpan::follows_loss},
};

template <class Entry, size_t N, class Value>
void store(const Entry (&all)[N], std::string_view key, const Value& value, OtlpSpan* span) {
  for (const Entry& entry : all)
    if (entry.key == key) span->*entry.place = value;
}

constexpr std::string_view kPhase = "torch.phase.", kOwnScope = "otel_torchprof", kStep = "torch.step",
                           kWindow = "torch.profile";
constexpr std::string_view kModuleCall = "nn.Module: ";
// TraceQL's word for them, which is no attribute's name.
constexpr std::string_view kLinks = "link:spanID";
// Different resources; later ones share one without attributes, since each is a process and is given to the caller.
constexpr int64_t kMostResources = 4096;
// Bytes of a text that is read for sums: of those that are used, none is as long.
constexpr size_t kLongestText = 1 << 16;

// A call of a module that the tracer of Python recorded, and a module that is no such call.
bool is_module_call(const OtlpSpan& span) { return span.name.substr(0, kModuleCall.size()) == kModuleCall; }

bool is_module(const OtlpSpan& span) { return span.scope.empty() && !span.module.empty() && !is_module_call(span); }

// A step of profile.step(), which is no event of its recording: those of streams have a kind.
bool is_step_apart(const OtlpSpan& span) { return span.name == kStep && span.step >= 0 && span.step_kind.empty(); }

// Keeps the value if the attribute is one of those above.
void store_attribute(std::string_view key, const OtlpValue& value, OtlpSpan* span) {
  switch (value.kind) {
    case OtlpValue::Kind::kText:
      return store(kTexts, key, value.text, span);
    case OtlpValue::Kind::kNumber:
      return store(kNumbers, key, value.number, span);
    case OtlpValue::Kind::kFlag:
      return store(kMarks, key, value.number != 0, span);
    case OtlpValue::Kind::kReal:
      if (key == "torch.device.duration") span->device_duration = value.real;
      return;
    default:
      return;
  }
}

}  // namespace

int OtlpReader::read(std::string_view request, bool is_json, uint64_t offset, const TraceOutput& out,
                     otp_trace_step* step) {
  d_out = out;
  d_step = step;
  d_data = request.data();
  d_begin = d_data + std::min<uint64_t>(step->consumed, request.size());
  d_offset = offset;
  d_status = OTP_TRACE_END;
  d_links = d_tables->is_for_sums() ? d_tables->wanted(kLinks) : -1;
  *step = {};
  step->consumed = request.size();
  if (is_json) {
    read_line(request);
  } else {
    read_request(request);
  }
  return d_status;
}

bool OtlpReader::begin_resource(std::string_view resource, const char* here) {
  const uint64_t hash = hash_of(resource, 0x9E3779B97F4A7C15u);
  int64_t number = d_resources.find(hash);
  const bool is_too_many = number < 0 && d_resource_count >= kMostResources;
  const bool is_new = number < 0 && d_resource_count <= kMostResources;
  if (is_too_many) {
    resource = {};
    number = kMostResources;
    d_resource_count = kMostResources + 1;
  } else if (is_new) {
    d_resources.add(hash, number = d_resource_count++);
  }
  d_process = d_tables->name(d_scratch = "resource " + std::to_string(number));
  if (!is_new) return true;
  d_status = OTP_TRACE_MEMBER;
  d_step->value = resource.empty() ? 0 : static_cast<uint64_t>(resource.data() - d_data);
  d_step->value_size = resource.size();
  d_step->consumed = static_cast<uint64_t>(std::max(here, d_begin) - d_data);
  return false;
}

void OtlpReader::begin_scope(std::string_view name) { d_is_own = name == kOwnScope; }

// A span may need further rows: the name of its thread, its time on a device, and what it allocated and released.
bool OtlpReader::begin_span(const char* here) {
  d_found.clear();
  d_unescaped.clear();
  const bool is_over = d_tables->is_over_limit();
  const bool has_rows = d_out.rows->capacity - d_out.rows->count >= OTP_TRACE_ROWS_PER_SPAN &&
                        d_out.memory->capacity - d_out.memory->count >= OTP_TRACE_ROWS_PER_SPAN;
  if (!is_over && has_rows && d_out.works->count < d_out.works->capacity) return true;
  d_status = is_over ? OTP_TRACE_NO_MEMORY : OTP_TRACE_FULL;
  d_step->consumed = static_cast<uint64_t>(here - d_data);
  return false;
}

bool OtlpReader::refuse(const char* here) {
  if (here < d_begin) return true;  // an earlier call has counted it
  ++d_tables->figures.events;
  d_tables->note(OTP_FAULT_MESSAGE, d_offset + static_cast<uint64_t>(here - d_data));
  return true;
}

// Of what is read for sums, the thread and the phase are columns.
void OtlpReader::take_attribute(std::string_view key, const OtlpValue& value, OtlpSpan* span) {
  if (const int64_t name = d_tables->wanted(key); name >= 0) d_found.emplace_back(static_cast<uint32_t>(name), value);
  if (!d_tables->is_for_sums()) return store_attribute(key, value, span);
  if (value.kind == OtlpValue::Kind::kNumber && key == "thread.id") span->thread_id = value.number;
  if (value.kind == OtlpValue::Kind::kText && key == "torch.phase.name") span->phase = value.text;
}

void OtlpReader::add(const OtlpSpan& span, const char* here) {
  ++d_tables->figures.events;
  const uint64_t offset = d_offset + static_cast<uint64_t>(here - d_data);
  if (span.fault != OTP_FAULT_NONE) {
    d_tables->note(span.fault, offset);
  } else if (!span.has_ids || span.span_id == 0) {
    d_tables->note(OTP_FAULT_SPAN, offset);
  } else if (std::max(span.start, span.end) > static_cast<uint64_t>(kLatest)) {
    d_tables->note(OTP_FAULT_TIME, offset);
  } else {
    put_row(span, offset);
  }
}

void OtlpReader::put_row(const OtlpSpan& span, uint64_t offset) {
  const uint32_t track = track_of(span);
  otp_trace_rows* rows = d_out.rows;
  const uint64_t row = rows->count;
  put_plain_row('X', name_of(span), track);
  rows->start[row] = static_cast<int64_t>(span.start);
  rows->duration[row] = static_cast<int64_t>(std::max(span.start, span.end) - span.start);
  rows->span_id[row] = span.span_id;
  rows->parent_id[row] = span.parent_id;
  put_attributes(span, offset);
  rows->trace[row] = trace_of(span);
  if (!d_tables->is_for_sums()) put_operator(span, row);
}

void OtlpReader::put_attributes(const OtlpSpan& span, uint64_t offset) {
  if (!span.links.empty())
    d_found.emplace_back(static_cast<uint32_t>(d_links), OtlpValue{OtlpValue::Kind::kText, span.links, 0, 0});
  if (!d_tables->keeps(d_found)) return;
  const bool is_phase = !span.phase.empty() || span.name.substr(0, kPhase.size()) == kPhase;
  for (const auto& [key, value] : d_found) d_tables->add_attribute(d_row - 1, offset, is_phase, key, json_of(value));
}

// The value as JSON text, until the next one.
std::string_view OtlpReader::json_of(const OtlpValue& value) {
  if (!value.token.empty()) return value.token;
  const std::string_view text = value.text.substr(0, kLongestText);
  d_scratch.resize(text.size() * kMaxEscapedBytesPerByte + kMaxDoubleSize + 2);
  char* const begin = d_scratch.data();
  char* end = begin;
  switch (value.kind) {
    case OtlpValue::Kind::kText:
      *end++ = '"';
      end = put_escaped(end, reinterpret_cast<const uint8_t*>(text.data()), text.size());
      *end++ = '"';
      break;
    case OtlpValue::Kind::kFlag:
      return value.number != 0 ? "true" : "false";
    case OtlpValue::Kind::kReal:
      end = put_double(end, value.real);
      break;
    case OtlpValue::Kind::kOther:
      return "{}";
    default:
      end = put_integer(end, value.number);
  }
  return {begin, static_cast<size_t>(end - begin)};
}

// What only the columns of operators have.
void OtlpReader::put_operator(const OtlpSpan& span, uint64_t row) {
  otp_trace_rows* rows = d_out.rows;
  const uint32_t track = rows->track[row];
  const bool is_timed = !span.device_type.empty();
  const bool is_apart = d_is_own && (is_step_apart(span) || span.name == kWindow);
  rows->id[row] = is_timed ? span.span_id : 0;
  rows->sequence_nr[row] = span.sequence_nr;
  InputTexts inputs;
  inputs.types = span.dtypes;
  inputs.dims = span.shapes;
  inputs.values = span.values;
  rows->inputs[row] = d_tables->inputs(inputs);
  rows->category[row] = category_of(span);
  const bool is_number = span.forward_thread >= 0 && span.forward_thread <= std::numeric_limits<uint32_t>::max();
  rows->fwd_thread[row] = is_number ? static_cast<uint32_t>(span.forward_thread) : 0;
  rows->text[row] = d_tables->name(span.error_type.empty() && is_module_call(span) ? span.module : span.error_type);
  rows->flags[row] =
      static_cast<uint8_t>((span.is_async ? OTP_TRACE_ASYNC : 0) | (span.is_unfinished ? OTP_TRACE_UNFINISHED : 0) |
                           (span.error_type.empty() ? 0 : OTP_TRACE_ERROR) |
                           (span.follows_loss ? OTP_TRACE_LOSS_BEFORE : 0) | (is_apart ? OTP_TRACE_APART : 0));
  span.put(d_row - 1, track, d_out.memory);
  if (is_timed) put_device_time(span, track);
  d_tables->figures.dropped += static_cast<uint64_t>(std::max<int64_t>(span.dropped, 0));
  d_tables->figures.has_flops |= span.flops >= 0;
  d_tables->figures.is_live |= d_is_own && !span.step_kind.empty();
}

void OtlpReader::put_plain_row(uint8_t phase, uint32_t name, uint32_t track) {
  otp_trace_rows* rows = d_out.rows;
  const uint64_t row = rows->count++;
  ++d_row;
  rows->start[row] = 0;
  rows->duration[row] = rows->sequence_nr[row] = rows->inputs[row] = -1;
  rows->id[row] = rows->span_id[row] = rows->parent_id[row] = 0;
  rows->name[row] = name;
  rows->category[row] = rows->fwd_thread[row] = rows->text[row] = rows->trace[row] = 0;
  rows->track[row] = track;
  rows->phase[row] = phase;
  rows->flags[row] = 0;
}

// The time between the timing events of a span, as a row that is not the span's; when it began on the device is not
// said.
void OtlpReader::put_device_time(const OtlpSpan& span, uint32_t track) {
  constexpr double kNsPerSecond = 1e9;
  const double duration = span.device_duration * kNsPerSecond;
  const uint64_t row = d_out.rows->count;
  otp_trace_works* works = d_out.works;
  const uint64_t at = works->count++;
  works->row[at] = d_row;
  works->correlation[at] = works->bytes[at] = -1;
  works->stream[at] = std::max<int64_t>(span.stream, 0);
  works->device[at] = static_cast<int32_t>(std::clamp<int64_t>(span.device, 0, std::numeric_limits<int32_t>::max()));
  put_plain_row('X', d_tables->name(span.name), track);
  d_out.rows->start[row] = static_cast<int64_t>(span.start);
  d_out.rows->duration[row] =
      duration > 0 && duration < static_cast<double>(kLatest) ? static_cast<int64_t>(duration + 0.5) : 0;
  d_out.rows->id[row] = span.span_id;
  d_out.rows->category[row] = d_tables->name("gpu_user_annotation");
  d_out.rows->flags[row] = OTP_TRACE_WORK | OTP_TRACE_TIMED;
}

// Torch's categories, as this package writes them into Chrome traces: spans of other scopes are the program's labels.
uint32_t OtlpReader::category_of(const OtlpSpan& span) {
  if (!d_is_own) return d_tables->name("user_annotation");
  const bool is_step = span.name == kStep && span.step >= 0;
  const bool is_synthetic = span.thread_id < 0;
  if (span.name == kWindow) return d_tables->name("Trace");
  if (!span.scope.empty() && span.scope != "user_scope") return d_tables->name("cpu_op");
  if (!span.scope.empty() || !span.phase.empty() || is_step || is_synthetic) return d_tables->name("user_annotation");
  return d_tables->name(is_module(span) ? "module" : "python_function");
}

// Names of events: a step has torch's, a module its full one.
uint32_t OtlpReader::name_of(const OtlpSpan& span) {
  if (!span.phase.empty()) return d_tables->phase_name(span.phase);
  if (!d_is_own || d_tables->is_for_sums()) return d_tables->name(span.name);
  if (span.name == kStep && span.step >= 0)
    return d_tables->name(d_scratch = "ProfilerStep#" + std::to_string(span.step));
  if (span.name == kWindow) return d_tables->name("PyTorch Profiler (0)");
  return d_tables->name(is_module(span) ? span.module : span.name);
}

uint32_t OtlpReader::track_of(const OtlpSpan& span) {
  if (span.thread_id == d_last_thread && d_process == d_last_process) return d_last_track;
  d_scratch = span.thread_id < 0 ? std::string() : std::to_string(span.thread_id);
  const size_t before = d_tables->tracks().size();
  const uint32_t track = d_tables->track(d_process, d_tables->name(d_scratch));
  if (d_tables->tracks().size() != before && !span.thread_name.empty()) {
    put_plain_row('M', d_tables->name("thread_name"), track);
    d_out.rows->text[d_out.rows->count - 1] = d_tables->name(span.thread_name);
  }
  d_last_thread = span.thread_id;
  d_last_process = d_process;
  return d_last_track = track;
}

uint32_t OtlpReader::trace_of(const OtlpSpan& span) {
  if (span.trace_id == d_last_trace_id) return d_last_trace;
  constexpr size_t kBytes = 16;
  d_last_trace_id = d_scratch = span.trace_id;
  if (span.trace_id.size() == kBytes) {
    d_scratch.clear();
    append_hexadecimal(span.trace_id, &d_scratch);
  }
  return d_last_trace = d_tables->name(d_scratch);
}

}  // namespace otp
