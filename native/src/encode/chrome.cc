// Chrome JSON of events. One row becomes a line "X", or a pair of lines "b" and "e", and a line for each arrow that
// starts or finishes at it. Texts are short and known, so a row is a run of small constant copies at a cursor, with
// room for all of it reserved once and not per field.
#include "otel_torchprof/encode_chrome.h"

#include <algorithm>
#include <new>
#include <vector>

#include "encode/buffer.h"
#include "encode/chrome_inputs.h"
#include "encode/chrome_writer.h"
#include "otel_torchprof/device_slices.h"
#include "otel_torchprof/record_format.h"

namespace {

using otp::cursor;
using otp::finish;
using otp::put;
using otp::put_integer;
using otp::put_text;
using otp::text_at;

constexpr uint8_t kUserScope = 7;  // at::RecordScope::USER_SCOPE

// More than the literals and numbers of all lines of one row without names, inputs and arrows.
constexpr uint64_t kMaxFixedSize = 1024;

otp::ChromeTrack track_of(const otp_chrome_events& events, uint32_t thread) {
  return {events.pid, events.thread_tids[thread], events.base};
}

bool has_inputs(const otp_chrome_events& events, uint64_t row) {
  return events.inputs != nullptr && events.inputs[row] >= 0;
}

otp::InputReader inputs_of(const otp_chrome_events& events, uint64_t row) {
  return {events.input_words, events.input_word_count, events.inputs[row]};
}

// The name of the operator's overload, where it was recorded: Kineto writes it behind the operator's.
otp::JsonText overload_of(const otp_chrome_events& events, uint64_t row) {
  const uint32_t id = has_inputs(events, row) ? otp::extra_of(inputs_of(events, row), OTP_INPUT_OVERLOAD) : 0;
  return id != 0 && id < events.names.count ? text_at(events.names, id) : otp::JsonText{nullptr, 0};
}

// "cat":..,"name":..  -- by which viewers pair "b" with "e", so both take it from here.
char* put_title(char* out, const otp_chrome_events& events, uint64_t row) {
  if (events.kind[row] == OTP_EVENT_MODULE) {
    out = put(out, "\"cat\":\"module\",\"name\":\"");
  } else if (events.kind[row] == OTP_EVENT_LABEL || events.scope[row] == kUserScope) {
    out = put(out, "\"cat\":\"user_annotation\",\"name\":\"");
  } else if (events.kind[row] == OTP_EVENT_FRAME) {
    out = put(out, "\"cat\":\"python_function\",\"name\":\"");
  } else {
    out = put(out, "\"cat\":\"cpu_op\",\"name\":\"");
  }
  out = put_text(out, text_at(events.names, events.name[row]));
  const otp::JsonText overload = overload_of(events, row);
  if (overload.size != 0) *out++ = '.';
  out = put_text(out, overload);
  *out++ = '"';
  return out;
}

// The numbers of a call among calls, of its thread among threads, and of what ran: a generator's segments have one.
char* put_python_ids(char* out, const otp_chrome_events& events, uint64_t row) {
  if (events.python_threads != nullptr) {
    out = put(out, "\"Python thread\":");
    out = put_integer(out, events.python_threads[events.thread[row]]);
    *out++ = ',';
  }
  out = put(out, "\"Python id\":");
  out = put_integer(out, events.python_id[row]);
  out = put(out, ",\"Python parent id\":");
  out = events.python_parent_id[row] < 0 ? put(out, "null") : put_integer(out, events.python_parent_id[row]);
  if (events.python_module_id[row] >= 0) {
    out = put(out, ",\"Python module id\":");
    out = put_integer(out, events.python_module_id[row]);
  }
  if (events.fwd_thread[row] != 0) {
    out = put(out, ",\"Python identity\":");
    out = put_integer(out, events.fwd_thread[row]);
  }
  return put(out, ",");
}

// The modules around an operator or a label; a module says it by its name. 0: none.
uint32_t hierarchy_of(const otp_chrome_events& events, uint64_t row) {
  return events.hierarchy == nullptr || events.kind[row] == OTP_EVENT_MODULE ? 0 : events.hierarchy[row];
}

// The calls around an event, innermost first.
bool append_stack(const otp_chrome_events& events, uint64_t row, otp_buffer* out) {
  if (events.stack == nullptr || events.stack[row] == 0) return true;
  uint64_t size = 0;
  for (int64_t at = events.stack[row]; at != 0; at = events.stack_outer[at])
    size += text_at(events.names, static_cast<uint64_t>(events.stack_name[at])).size + 1;
  if (!otp::buffer_reserve(out, kMaxFixedSize + size)) return false;
  char* to = put(cursor(out), "\"Call stack\":\"");
  for (int64_t at = events.stack[row]; at != 0; at = events.stack_outer[at]) {
    to = put_text(to, text_at(events.names, static_cast<uint64_t>(events.stack_name[at])));
    *to++ = ';';
  }
  finish(out, put(to, "\","));
  return true;
}

bool append_inputs(const otp_chrome_events& events, uint64_t row, otp::WrittenInputs* written, otp_buffer* out) {
  const uint64_t first = std::min(static_cast<uint64_t>(events.inputs[row]), events.input_word_count);
  return otp::append_input_arguments(events.input_words + first, events.input_word_count - first, events.names, written,
                                     out);
}

// "args":{..}  with a comma after each argument, the last one of which becomes the closing brace.
bool append_args(const otp_chrome_events& events, uint64_t row, otp::WrittenInputs* written, otp_buffer* out) {
  char* at = put(cursor(out), ",\"args\":{");
  if (events.kind[row] == OTP_EVENT_FRAME) {
    if (events.python_id != nullptr) at = put_python_ids(at, events, row);
  } else if (events.id[row] != 0) {
    at = put(at, "\"External id\":");
    at = put_integer(at, events.id[row]);
    *at++ = ',';
  }
  if (events.sequence_nr[row] >= 0 && events.kind[row] != OTP_EVENT_PHASE) {
    at = put(at, "\"Sequence number\":");
    at = put_integer(at, events.sequence_nr[row]);
    at = put(at, ",\"Fwd thread id\":");
    at = put_integer(at, events.fwd_thread[row]);
    *at++ = ',';
  }
  const uint8_t flags = events.flags[row];
  if (flags != 0) {
    if (flags & OTP_FLAG_UNFINISHED) at = put(at, "\"unfinished\":true,");
    if (flags & OTP_FLAG_ASYNC) at = put(at, "\"async\":true,");
    if (flags & OTP_FLAG_LOSS_BEFORE) at = put(at, "\"lost before\":true,");
    if (flags & OTP_FLAG_INPUTS_CUT) at = put(at, "\"inputs cut\":true,");
  }
  if (events.error_type[row] != 0) {
    at = put(at, "\"error.type\":\"");
    at = put_text(at, text_at(events.names, events.error_type[row]));
    at = put(at, "\",");
  } else if (flags & OTP_FLAG_ERROR) {
    at = put(at, "\"error.type\":\"_OTHER\",");
  }
  const uint32_t hierarchy = hierarchy_of(events, row);
  if (hierarchy != 0) {
    at = put(at, "\"Module Hierarchy\":\"");
    at = put_text(at, text_at(events.hierarchies, hierarchy));
    at = put(at, "\",");
  }
  if (events.id[row] != 0) {
    at = put(at, "\"Ev Idx\":");
    at = put_integer(at, row);
    *at++ = ',';
  }
  finish(out, at);
  if (!append_stack(events, row, out)) return false;
  if (has_inputs(events, row) && !append_inputs(events, row, written, out)) return false;
  if (!otp::buffer_reserve(out, kMaxFixedSize)) return false;
  at = cursor(out);
  if (at[-1] == ',') --at;
  finish(out, put(at, "}}"));
  return true;
}

// With an "id2" that is local, viewers place the pair within the process; a plain "id" belongs to no process.
char* put_async_title(char* out, const otp_chrome_events& events, uint64_t row) {
  out = put(out, "\"id2\":{\"local\":\"");
  out = put_integer(out, events.id[row] != 0 ? events.id[row] : row);
  out = put(out, "\"},");
  return put_title(out, events, row);
}

// Both ends of an async event; `size` bytes of names are in it.
bool append_async(const otp_chrome_events& events, uint64_t row, uint64_t size, otp::WrittenInputs* written,
                  otp_buffer* out) {
  char* at = put(cursor(out), ",\n{\"ph\":\"b\",");
  at = put_async_title(at, events, row);
  finish(out, otp::put_place(at, track_of(events, events.thread[row]), events.start[row]));
  if (!append_args(events, row, written, out) || !otp::buffer_reserve(out, kMaxFixedSize + size)) return false;
  at = put(cursor(out), ",\n{\"ph\":\"e\",");
  at = put_async_title(at, events, row);
  at = otp::put_place(at, track_of(events, events.end_thread[row]), std::max(events.start[row], events.end[row]));
  finish(out, put(at, "}"));
  return true;
}

bool append_row(const otp_chrome_events& events, uint64_t row, otp::WrittenInputs* written, otp_buffer* out) {
  uint64_t size = text_at(events.names, events.name[row]).size + overload_of(events, row).size +
                  text_at(events.names, events.error_type[row]).size;
  if (const uint32_t hierarchy = hierarchy_of(events, row)) size += text_at(events.hierarchies, hierarchy).size;
  if (!otp::buffer_reserve(out, kMaxFixedSize + size)) return false;
  if (events.detached[row]) return append_async(events, row, size, written, out);
  char* at = put(cursor(out), ",\n{\"ph\":\"X\",");
  at = put_title(at, events, row);
  finish(out, otp::put_extent(at, track_of(events, events.thread[row]), events.start[row], events.end[row]));
  return append_args(events, row, written, out);
}

// An end of an arrow lies at the start of its event. "bp":"e" binds the finish to the slice around it instead of the
// next one.
bool append_flow(const otp_chrome_events& events, uint64_t flow, otp_buffer* out) {
  if (!otp::buffer_reserve(out, otp::kMaxEventSize)) return false;
  const uint64_t row = events.flow_row[flow];
  const auto phase = static_cast<char>(events.flow_phase[flow]);
  const otp::ChromeTrack track = track_of(events, events.thread[row]);
  finish(out, otp::put_arrow_end(cursor(out), phase, events.flow_id[flow], "fwdbwd", track, events.start[row]));
  return true;
}

void detach_overlapping(uint64_t count, const int64_t* order, const int64_t* track, const int64_t* start,
                        const int64_t* end, uint8_t* detached) {
  std::vector<int64_t> open_ends;  // of the current event's ancestors, the top-level one first: they only fall
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t row = order[i];
    if (i != 0 && track[row] != track[order[i - 1]]) open_ends.clear();
    if (detached[row]) continue;
    while (!open_ends.empty() && open_ends.back() <= start[row]) open_ends.pop_back();
    if (!open_ends.empty() && end[row] > open_ends.back()) {
      detached[row] = 1;
    } else {
      open_ends.push_back(end[row]);
    }
  }
}

}  // namespace

extern "C" int otp_json_escape_names(const otp_names* names, otp_buffer* out, uint64_t* ends) {
  const uint64_t origin = out->size;
  for (uint64_t i = 0; i < names->count; ++i) {
    const uint64_t begin = i == 0 ? 0 : names->ends[i - 1];
    const uint64_t size = names->ends[i] - begin;
    if (!otp::buffer_reserve(out, size * otp::kMaxEscapedBytesPerByte + 1)) return -1;
    finish(out, otp::put_escaped(cursor(out), names->data + begin, size));
    ends[i] = out->size - origin;
  }
  return 0;
}

extern "C" int otp_chrome_detach_overlapping(uint64_t count, const int64_t* order, const int64_t* track,
                                             const int64_t* start, const int64_t* end, uint8_t* detached) {
  try {
    detach_overlapping(count, order, track, start, end, detached);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

extern "C" int64_t otp_chrome_encode(const otp_chrome_events* events, uint64_t first, uint64_t limit, otp_buffer* out) {
  const uint64_t* flows = events->flow_row;
  uint64_t flow = static_cast<uint64_t>(std::lower_bound(flows, flows + events->flow_count, first) - flows);
  otp::WrittenInputs written;
  uint64_t row = first;
  for (; row < events->count && out->size < limit; ++row) {
    if (!append_row(*events, row, &written, out)) return -1;
    for (; flow < events->flow_count && flows[flow] == row; ++flow) {
      if (!append_flow(*events, flow, out)) return -1;
    }
  }
  return static_cast<int64_t>(row);
}

// ---- what devices did: a slice each on the track of its stream, and an arrow to it from what launched it ----

namespace {

otp::ChromeTrack track_of(const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  return {slices.place_pid[place], slices.place_tid[place], slices.base};
}

char* put_device_slice(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  out = put(out, ",\n{\"ph\":\"X\",\"cat\":\"gpu_user_annotation\",\"name\":\"");
  out = put(otp::put_text(out, otp::text_at(slices.names, slices.name[row])), "\"");
  out = otp::put_extent(out, track_of(slices, row), slices.start[row], slices.start[row] + slices.duration[row]);
  out = put_integer(put(out, ",\"args\":{\"External id\":"), slices.event[row]);
  out = put_integer(put(out, ",\"device\":"), slices.place_device[place]);
  out = put_integer(put(out, ",\"stream id\":"), slices.place_stream[place]);
  return put(out, "}}");
}

char* put_launch_arrow(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
  const uint64_t id = slices.first_arrow_id + row;
  const otp::ChromeTrack launch{slices.pid, slices.launch_tid[row], slices.base};
  out = otp::put_arrow_end(out, 's', id, "ac2g", launch, slices.launch_time[row]);
  return otp::put_arrow_end(out, 'f', id, "ac2g", track_of(slices, row), slices.start[row]);
}

}  // namespace

extern "C" int64_t otp_chrome_encode_device_slices(const otp_chrome_device_slices* slices, uint64_t first,
                                                   uint64_t limit, otp_buffer* out) {
  uint64_t row = first;
  for (; row < slices->count && out->size < limit; ++row) {
    const uint64_t size = otp::text_at(slices->names, slices->name[row]).size;
    if (!otp::buffer_reserve(out, kMaxFixedSize + size)) return -1;
    char* at = put_device_slice(otp::cursor(out), *slices, row);
    if (slices->launch_tid[row] >= 0) at = put_launch_arrow(at, *slices, row);
    otp::finish(out, at);
  }
  return static_cast<int64_t>(row);
}

// ---- memory: an instant for each allocation and release; totals over time are counters ----

namespace {

char* put_amounts(char* out, const otp_chrome_memory& memory, uint64_t row) {
  out = put(out, ",\"args\":{\"Total Reserved\":");
  out = put_integer(out, memory.total_reserved[row]);
  out = put(out, ",\"Total Allocated\":");
  out = put_integer(out, memory.total_allocated[row]);
  out = put(out, ",\"Bytes\":");
  return put_integer(out, memory.bytes[row]);
}

char* put_memory(char* out, const otp_chrome_memory& memory, uint64_t row) {
  const bool is_failure = (memory.flags[row] & OTP_MEMORY_OUT_OF_MEMORY) != 0;
  out = put(out, ",\n{\"ph\":\"i\",\"cat\":\"cpu_instant_event\",\"s\":\"t\",\"name\":\"");
  out = is_failure ? put(out, "[OutOfMemory]") : put(out, "[memory]");
  const otp::ChromeTrack track{memory.pid, memory.thread_tids[memory.thread[row]], memory.base};
  out = otp::put_place(put(out, "\""), track, memory.time[row]);
  out = put_amounts(out, memory, row);
  out = put(out, ",\"Device Id\":");
  out = put_integer(out, memory.device_index[row]);
  out = put(out, ",\"Device Type\":");
  out = put_integer(out, memory.device_type[row]);
  if (!is_failure) {
    out = put(out, ",\"Addr\":");
    out = put_integer(out, memory.address[row]);
  }
  out = put(out, ",\"finished\":false,\"Ev Idx\":");
  out = put_integer(out, memory.first_index + row);
  return put(out, "}}");
}

char* put_sample(char* out, const otp_chrome_counter& counter, uint64_t row) {
  out = put(out, ",\n{\"ph\":\"C\",\"name\":\"");
  out = otp::put_bytes(out, counter.name, counter.name_size);
  out = otp::put_place(put(out, "\""), {counter.pid, 0, counter.base}, counter.time[row]);
  out = put(out, ",\"args\":{\"bytes\":");
  out = put_integer(out, counter.bytes[row]);
  return put(out, "}}");
}

}  // namespace

extern "C" int64_t otp_chrome_encode_memory(const otp_chrome_memory* memory, uint64_t first, uint64_t limit,
                                            otp_buffer* out) {
  uint64_t row = first;
  for (; row < memory->count && out->size < limit; ++row) {
    if (!otp::buffer_reserve(out, kMaxFixedSize)) return -1;
    otp::finish(out, put_memory(otp::cursor(out), *memory, row));
  }
  return static_cast<int64_t>(row);
}

extern "C" int64_t otp_chrome_encode_counter(const otp_chrome_counter* counter, uint64_t first, uint64_t limit,
                                             otp_buffer* out) {
  uint64_t row = first;
  for (; row < counter->count && out->size < limit; ++row) {
    if (!otp::buffer_reserve(out, kMaxFixedSize + counter->name_size)) return -1;
    otp::finish(out, put_sample(otp::cursor(out), *counter, row));
  }
  return static_cast<int64_t>(row);
}
