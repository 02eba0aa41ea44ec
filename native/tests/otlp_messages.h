// Messages of protobuf, written by hand.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace otp::testing {

inline std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  return bytes + static_cast<char>(value);
}

inline std::string number_field(uint32_t number, uint64_t value) { return varint(number << 3) + varint(value); }

inline std::string fixed_field(uint32_t number, uint64_t value) {
  std::string bytes = varint(number << 3 | 1);
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> 8 * i));
  return bytes;
}

inline std::string field(uint32_t number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}

inline std::string attribute(const std::string& key, const std::string& value) {
  return field(9, field(1, key) + field(2, value));
}
inline std::string text(const std::string& key, const std::string& value) { return attribute(key, field(1, value)); }
inline std::string flag(const std::string& key, bool value) { return attribute(key, number_field(2, value)); }
inline std::string number(const std::string& key, int64_t value) {
  return attribute(key, number_field(3, static_cast<uint64_t>(value)));
}
inline std::string real(const std::string& key, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return attribute(key, fixed_field(4, bits));
}

// A span of trace 0101..., whose id is a number.
inline std::string span(const std::string& name, uint64_t id, uint64_t start, uint64_t end,
                        const std::string& others = "") {
  std::string span_id;
  for (int i = 7; i >= 0; --i) span_id.push_back(static_cast<char>(id >> 8 * i));
  const std::string ids = field(1, std::string(16, '\1')) + field(2, span_id);
  return field(2, ids + field(5, name) + fixed_field(7, start) + fixed_field(8, end) + others);
}

// A request with spans of one resource and one scope.
inline std::string request(const std::string& spans, const std::string& scope = "otel_torchprof",
                           const std::string& resource = "") {
  return field(1, field(1, resource) + field(2, field(1, field(1, scope)) + spans));
}

}  // namespace otp::testing
