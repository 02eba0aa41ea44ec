// Attributes of events, compressed to the spans that have them, in one pass over the columns.
#include <algorithm>
#include <cstdint>

#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace {

template <typename Column, typename Value>
inline void add(Column& column, uint32_t span, Value value) {
  column.spans[column.count] = span;
  column.values[column.count++] = value;
}

}  // namespace

extern "C" int otp_make_event_attributes(otp_event_attributes* attributes) {
  otp_event_attributes a = *attributes;  // a copy: nothing that is written can be one of its fields
  a.thread_id.count = a.thread_name.count = a.op_scope.count = a.op_sequence_nr.count = a.op_forward_thread.count = 0;
  for (uint64_t i = 0; i < a.count; ++i) {
    if (a.row[i] < 0) continue;
    const auto span = static_cast<uint32_t>(i);
    const auto row = static_cast<uint64_t>(a.row[i]);
    if (row >= a.row_count || a.thread[row] >= a.thread_count) return -1;
    const uint8_t kind = a.kind[row], scope = a.scope[row];
    const bool is_phase = kind == OTP_EVENT_PHASE, is_call = is_phase || kind == OTP_EVENT_FRAME;
    const uint32_t thread_name = a.name_of_thread[a.thread[row]];
    a.self_duration[a.thread_id.count] = static_cast<double>(std::max<int64_t>(a.self_time[row], 0)) / 1e9;
    add(a.thread_id, span, a.id_of_thread[a.thread[row]]);
    if (thread_name != 0) add(a.thread_name, span, thread_name);
    if (a.sequence_nr[row] >= 0 && !is_phase) add(a.op_sequence_nr, span, a.sequence_nr[row]);
    if (is_call) continue;
    if (scope < a.scope_count && kind != OTP_EVENT_MODULE) add(a.op_scope, span, a.name_of_scope[scope]);
    if (a.fwd_thread[row] != 0) add(a.op_forward_thread, span, static_cast<int64_t>(a.fwd_thread[row]));
  }
  *attributes = a;
  return 0;
}
