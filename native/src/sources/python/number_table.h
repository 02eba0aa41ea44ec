// A table for look-ups that take a nanosecond or two.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_NUMBER_TABLE_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_NUMBER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace otp_python {

// From numbers other than 0 (addresses, mostly) to values. Nothing is ever removed; a value may be written over.
template <typename Value>
class NumberTable {
 public:
  // Null where it is not there. Good until another one is put.
  const Value* find(uint64_t key) const {
    for (size_t at = slot_of(key);; at = (at + 1) & d_mask) {
      const Slot& slot = d_slots[at];
      if (slot.key == key) return &slot.value;
      if (slot.key == 0) return nullptr;
    }
  }
  const Value* find(const void* address) const { return find(reinterpret_cast<uintptr_t>(address)); }
  void put(uint64_t key, Value value) {
    if (2 * (d_size + 1) > d_slots.size()) grow();
    Slot& slot = place_of(key);
    d_size += slot.key == 0;
    slot = {key, value};
  }
  void put(const void* address, Value value) { put(reinterpret_cast<uintptr_t>(address), value); }

 private:
  struct Slot {
    uint64_t key = 0;
    Value value{};
  };

  // The upper bits of a product: addresses are alike in their lower ones.
  size_t slot_of(uint64_t key) const { return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> 32) & d_mask; }
  Slot& place_of(uint64_t key) {
    size_t at = slot_of(key);
    while (d_slots[at].key != 0 && d_slots[at].key != key) at = (at + 1) & d_mask;
    return d_slots[at];
  }
  void grow() {
    std::vector<Slot> before(2 * d_slots.size());
    before.swap(d_slots);
    d_mask = d_slots.size() - 1;
    for (const Slot& slot : before)
      if (slot.key != 0) place_of(slot.key) = slot;
  }

  std::vector<Slot> d_slots = std::vector<Slot>(256);
  size_t d_mask = 255;
  size_t d_size = 0;
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_NUMBER_TABLE_H_
