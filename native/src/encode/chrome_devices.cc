// Chrome JSON of what devices did: a slice each on the track of its stream, and an arrow to it from what launched it.
#include "encode/buffer.h"
#include "encode/chrome_writer.h"
#include "otel_torchprof/device_slices.h"

namespace {

using otp::put;
using otp::put_integer;

// More than the literals and numbers of all lines of one row without its name.
constexpr uint64_t kMaxFixedSize = 1024;

otp::ChromeTrack track_of(const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  return {slices.place_pid[place], slices.place_tid[place], slices.base};
}

char* put_slice(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
  const uint32_t place = slices.place[row];
  out = put(out, ",\n{\"ph\":\"X\",\"cat\":\"gpu_user_annotation\",\"name\":\"");
  out = put(otp::put_text(out, otp::text_at(slices.names, slices.name[row])), "\"");
  out = otp::put_extent(out, track_of(slices, row), slices.start[row], slices.start[row] + slices.duration[row]);
  out = put_integer(put(out, ",\"args\":{\"External id\":"), slices.event[row]);
  out = put_integer(put(out, ",\"device\":"), slices.place_device[place]);
  out = put_integer(put(out, ",\"stream id\":"), slices.place_stream[place]);
  return put(out, "}}");
}

char* put_arrow(char* out, const otp_chrome_device_slices& slices, uint64_t row) {
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
    char* at = put_slice(otp::cursor(out), *slices, row);
    if (slices->launch_tid[row] >= 0) at = put_arrow(at, *slices, row);
    otp::finish(out, at);
  }
  return static_cast<int64_t>(row);
}
