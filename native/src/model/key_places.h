// The places of keys: 0 for the first one, 1 for the next other one. A hash table with open addressing, whose slots
// have places.
#pragma once

#include <cstdint>
#include <vector>

namespace otp {

class KeyPlaces {
 public:
  // The place of a key, which is new if it is the number of keys before. Throws std::bad_alloc.
  uint32_t of(uint64_t key) {
    uint32_t& slot = slot_of(key);
    if (slot != kNone) return slot;
    const auto place = static_cast<uint32_t>(keys_.size());
    slot = place;
    keys_.push_back(key);
    if (2 * keys_.size() > slots_.size()) grow();
    return place;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  uint32_t& slot_of(uint64_t key) {
    const uint64_t mask = slots_.size() - 1;
    uint64_t at = (key * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[at] != kNone && keys_[slots_[at]] != key) at = (at + 1) & mask;
    return slots_[at];
  }

  void grow() {
    slots_.assign(2 * slots_.size(), kNone);
    for (uint32_t i = 0; i < keys_.size(); ++i) slot_of(keys_[i]) = i;
  }

  std::vector<uint64_t> keys_;
  std::vector<uint32_t> slots_ = std::vector<uint32_t>(1 << 10, kNone);
};

}  // namespace otp
