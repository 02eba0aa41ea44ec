// Attributes of events, compressed to the spans that have them, in one pass over the columns.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace {

// What several loops read stays in the cache. Of a loop per column the compiler keeps all in registers.
constexpr uint64_t kBlock = 2048;

template <typename Column, typename Value>
inline void add(Column& column, uint32_t span, Value value) {
  column.spans[column.count] = span;
  column.values[column.count++] = value;
}

// Whether all rows of a block are of one thread, as mostly.
bool is_of_one_thread(const otp_event_attributes& a, uint64_t begin, uint64_t end) {
  return a.row == nullptr && end <= a.row_count &&
         std::memcmp(a.thread + begin, a.thread + begin + 1, (end - begin - 1) * sizeof *a.thread) == 0;
}

template <typename Row>
bool add_threads(const otp_event_attributes& a, uint64_t begin, uint64_t end, Row row_of) {
  if (is_of_one_thread(a, begin, end)) {
    const uint32_t thread = a.thread[begin];
    if (thread >= a.thread_count) return false;
    std::fill(a.thread_id + begin, a.thread_id + end, a.id_of_thread[thread]);
    std::fill(a.thread_name + begin, a.thread_name + end, a.name_of_thread[thread]);
    return true;
  }
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t row = row_of(i);
    if (row >= a.row_count || a.thread[row] >= a.thread_count) return false;
    a.thread_id[i] = a.id_of_thread[a.thread[row]], a.thread_name[i] = a.name_of_thread[a.thread[row]];
  }
  return true;
}

template <typename Row>
void add_scopes(otp_event_attributes& a, uint64_t begin, uint64_t end, Row row_of) {
  uint64_t count = a.op_scope.count;
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t row = row_of(i);
    const uint8_t kind = a.kind[row], scope = a.scope[row];
    if (scope >= a.scope_count || kind == OTP_EVENT_MODULE || kind == OTP_EVENT_PHASE || kind == OTP_EVENT_FRAME)
      continue;
    a.op_scope.spans[count] = a.span[i], a.op_scope.values[count++] = a.name_of_scope[scope];
  }
  a.op_scope.count = count;
}

template <typename Row>
bool make(otp_event_attributes& a, uint64_t begin, uint64_t end, Row row_of) {
  if (!add_threads(a, begin, end, row_of)) return false;
  for (uint64_t i = begin; i < end; ++i)
    a.self_duration[i] = static_cast<double>(std::max<int64_t>(a.self_time[row_of(i)], 0)) / 1e9;
  add_scopes(a, begin, end, row_of);
  for (uint64_t i = begin; i < end; ++i) {
    const uint64_t row = row_of(i);
    const int64_t number = a.sequence_nr[row];
    const uint32_t thread = a.fwd_thread[row];
    if (number < 0 && thread == 0) continue;
    const bool is_phase = a.kind[row] == OTP_EVENT_PHASE, is_call = is_phase || a.kind[row] == OTP_EVENT_FRAME;
    if (number >= 0 && !is_phase) add(a.op_sequence_nr, a.span[i], number);
    if (thread != 0 && !is_call) add(a.op_forward_thread, a.span[i], static_cast<int64_t>(thread));
  }
  return true;
}

}  // namespace

extern "C" int otp_make_event_attributes(otp_event_attributes* attributes) {
  otp_event_attributes a = *attributes;  // a copy: nothing that is written can be one of its fields
  a.op_scope.count = a.op_sequence_nr.count = a.op_forward_thread.count = 0;
  for (uint64_t begin = 0; begin < a.count; begin += kBlock) {
    const uint64_t end = std::min(begin + kBlock, a.count);
    const bool is_right = a.row == nullptr
                              ? make(a, begin, end, [](uint64_t i) { return i; })
                              : make(a, begin, end, [&](uint64_t i) { return static_cast<uint64_t>(a.row[i]); });
    if (!is_right) return -1;
  }
  *attributes = a;
  return 0;
}
