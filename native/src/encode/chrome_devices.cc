// Chrome JSON of what devices did: a slice each on the track of its stream, and an arrow to it from what launched it.
#include "encode/buffer.h"
#include "encode/json_writer.h"
#include "otel_torchprof/device_slices.h"

namespace {

using otp::put;
using otp::put_integer;

// More than the literals and numbers of all lines of one row without its name.
constexpr uint64_t kMaxFixedSize = 1024;

char* put_place(char* out, int64_t pid, int64_t tid, int64_t base, int64_t time) {
  out = put(out, ",\"pid\":");
  out = put_integer(out, pid);
  out = put(out, ",\"tid\":");
  out = put_integer(out, tid);
  out = put(out, ",\"ts\":");
  return otp::put_microseconds_between(out, base, time);
}

char* put_slice(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  out = put(out, ",\n{\"ph\":\"X\",\"cat\":\"gpu_user_annotation\",\"name\":\"");
  out = otp::put_text(out, otp::text_at(slices.names, slices.name[row]));
  *out++ = '"';
  out = put_place(out, slices.place_pid[place], slices.place_tid[place], slices.base, slices.start[row]);
  out = put(out, ",\"dur\":");
  out = otp::put_microseconds(out, static_cast<uint64_t>(slices.duration[row]));
  out = put(out, ",\"args\":{\"External id\":");
  out = put_integer(out, slices.event[row]);
  out = put(out, ",\"device\":");
  out = put_integer(out, slices.place_device[place]);
  out = put(out, ",\"stream id\":");
  out = put_integer(out, slices.place_stream[place]);
  return put(out, "}}");
}

// "bp":"e" binds the finish to the slice around it instead of the next one.
char* put_arrow(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  out = put(out, ",\n{\"ph\":\"s\",\"id\":");
  out = put_integer(out, slices.first_arrow_id + row);
  out = put(out, ",\"cat\":\"ac2g\",\"name\":\"ac2g\"");
  out = put_place(out, slices.pid, slices.launch_tid[row], slices.base, slices.launch_time[row]);
  out = put(out, "},\n{\"ph\":\"f\",\"id\":");
  out = put_integer(out, slices.first_arrow_id + row);
  out = put(out, ",\"cat\":\"ac2g\",\"name\":\"ac2g\"");
  out = put_place(out, slices.place_pid[place], slices.place_tid[place], slices.base, slices.start[row]);
  return put(out, ",\"bp\":\"e\"}");
}

}  // namespace

extern "C" int64_t otp_chrome_encode_device_slices(const otp_chrome_device_slices* slices, uint64_t first,
                                                   uint64_t limit, otp_buffer* out) {
  uint64_t row = first;
  for (; row < slices->count && out->size < limit; ++row) {
    const uint64_t size = otp::text_at(slices->names, slices->name[row]).size;
    if (!otp::buffer_reserve(out, kMaxFixedSize + size)) return -1;
    char* at = put_slice(otp::cursor(out), *slices, row);
    if (slices->launch_tid[row] >= 0) at = put_arrow(at, *slices, row);
    otp::finish(out, at);
  }
  return static_cast<int64_t>(row);
}
