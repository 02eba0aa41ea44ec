// The parts that every event of a Chrome trace is made of (Google's "Trace Event Format").
//
// Writers do not check for room: callers reserve kMaxEventSize and the sizes of the texts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "encode/json_writer.h"

namespace otp {

// Of the parts below that an event may have together, without its texts and arguments.
constexpr uint64_t kMaxEventSize = 256;

// Where an event is drawn; `base` is the time that "ts" counts from, in ns.
struct ChromeTrack {
  int64_t pid, tid, base;
};

inline char* put_place(char* out, const ChromeTrack& track, int64_t time) {
  out = put_integer(put(out, ",\"pid\":"), track.pid);
  out = put_integer(put(out, ",\"tid\":"), track.tid);
  return put_microseconds_between(put(out, ",\"ts\":"), track.base, time);
}

// The place of a slice and how long it is; one that ends before it begins has no length.
inline char* put_extent(char* out, const ChromeTrack& track, int64_t start, int64_t end) {
  out = put(put_place(out, track, start), ",\"dur\":");
  return put_microseconds_between(out, start, std::max(start, end));
}

// One end of an arrow: phase 's' at its start, 'f' at its head, which binds to the slice that encloses it.
template <size_t N>
inline char* put_arrow_end(char* out, char phase, uint64_t id, const char (&category)[N], const ChromeTrack& track,
                           int64_t time) {
  out = put(out, ",\n{\"ph\":\"");
  *out++ = phase;
  out = put(put_integer(put(out, "\",\"id\":"), id), ",\"cat\":\"");
  out = put(put(put(out, category), "\",\"name\":\""), category);
  *out++ = '"';
  out = put_place(out, track, time);
  return phase == 'f' ? put(out, ",\"bp\":\"e\"}") : put(out, "}");
}

}  // namespace otp
