// Protobuf's wire format, as far as OTLP needs it (https://protobuf.dev/programming-guides/encoding/).
//
// Every put_ function writes at `at` and returns the position after it. None checks for room: whoever calls has
// reserved an upper bound, once per span, because a check per field cost more than the fields.
#pragma once

#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fixed-width fields are copied as they lie in memory");

namespace otp {

constexpr uint64_t kMaxVarint = 10;

// One byte per 7 bits: a multiplication by 9/64 is exact for all 64 widths and needs no division.
inline uint64_t varint_size(uint64_t value) { return ((64 - __builtin_clzll(value | 1)) * 9 + 64) >> 6; }

inline uint8_t* put_varint(uint8_t* at, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<uint8_t>(value | 0x80);
  *at++ = static_cast<uint8_t>(value);
  return at;
}

inline uint8_t* put_fixed32(uint8_t* at, uint32_t value) {
  std::memcpy(at, &value, sizeof value);
  return at + sizeof value;
}

inline uint8_t* put_fixed64(uint8_t* at, uint64_t value) {
  std::memcpy(at, &value, sizeof value);
  return at + sizeof value;
}

// OTLP carries span ids as 8 bytes, most significant first.
inline uint8_t* put_big_endian64(uint8_t* at, uint64_t value) { return put_fixed64(at, __builtin_bswap64(value)); }

inline uint8_t* put_raw(uint8_t* at, const void* data, uint64_t size) {
  if (size != 0) std::memcpy(at, data, size);
  return at + size;
}

// A length-delimited field whose tag is one byte: size and bytes.
inline uint64_t field_size(uint64_t size) { return 1 + varint_size(size) + size; }

inline uint8_t* put_field(uint8_t* at, uint8_t tag, const void* data, uint64_t size) {
  *at++ = tag;
  return put_raw(put_varint(at, size), data, size);
}

}  // namespace otp
