// The growing byte buffer that encoders append to.
#pragma once

#include <cstring>

#include "otel_torchprof/encode.h"

namespace otp {

// Makes room for `extra` more bytes. False when memory is short; the buffer is unchanged then.
bool buffer_reserve_slowpath(otp_buffer* buffer, uint64_t extra);

inline bool buffer_reserve(otp_buffer* buffer, uint64_t extra) {
  return buffer->capacity - buffer->size >= extra || buffer_reserve_slowpath(buffer, extra);
}

// Where the next byte goes, for encoders that write text at a cursor ...
inline char* cursor(otp_buffer* buffer) { return reinterpret_cast<char*>(buffer->data + buffer->size); }

// ... and then say how far they came.
inline void finish(otp_buffer* buffer, const char* end) {
  buffer->size = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(end) - buffer->data);
}

}  // namespace otp
