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

}  // namespace otp
