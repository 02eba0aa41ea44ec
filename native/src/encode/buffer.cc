#include "encode/buffer.h"

#include <algorithm>
#include <cstdlib>

namespace otp {

bool buffer_reserve_slowpath(otp_buffer* buffer, uint64_t extra) {
  uint64_t needed = std::max<uint64_t>({buffer->size + extra, buffer->capacity * 2, 4096});
  auto* grown = static_cast<uint8_t*>(std::realloc(buffer->data, needed));
  if (grown == nullptr) return false;
  buffer->data = grown;
  buffer->capacity = needed;
  return true;
}

}  // namespace otp

extern "C" void otp_buffer_free(otp_buffer* buffer) {
  std::free(buffer->data);
  *buffer = otp_buffer{nullptr, 0, 0};
}
