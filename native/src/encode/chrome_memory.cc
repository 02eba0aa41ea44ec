// Chrome JSON of what was allocated and freed: an instant each; and of the totals over time: counters.
#include "encode/buffer.h"
#include "encode/chrome_writer.h"
#include "otel_torchprof/encode_chrome.h"

namespace {

using otp::put;
using otp::put_integer;

// More than all literals and numbers of one line.
constexpr uint64_t kMaxSize = 640;
constexpr uint8_t kOutOfMemory = 1;  // schema.py: MemoryFlag

char* put_amounts(char* out, const otp_chrome_memory& memory, uint64_t row) {
  out = put(out, ",\"args\":{\"Total Reserved\":");
  out = put_integer(out, memory.total_reserved[row]);
  out = put(out, ",\"Total Allocated\":");
  out = put_integer(out, memory.total_allocated[row]);
  out = put(out, ",\"Bytes\":");
  return put_integer(out, memory.bytes[row]);
}

char* put_row(char* out, const otp_chrome_memory& memory, uint64_t row) {
  const bool is_failure = (memory.flags[row] & kOutOfMemory) != 0;
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
    if (!otp::buffer_reserve(out, kMaxSize)) return -1;
    otp::finish(out, put_row(otp::cursor(out), *memory, row));
  }
  return static_cast<int64_t>(row);
}

extern "C" int64_t otp_chrome_encode_counter(const otp_chrome_counter* counter, uint64_t first, uint64_t limit,
                                             otp_buffer* out) {
  uint64_t row = first;
  for (; row < counter->count && out->size < limit; ++row) {
    if (!otp::buffer_reserve(out, kMaxSize + counter->name_size)) return -1;
    otp::finish(out, put_sample(otp::cursor(out), *counter, row));
  }
  return static_cast<int64_t>(row);
}
