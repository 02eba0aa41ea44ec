// Where ids stand in a column, by a table of those that are looked for: one pass, up to the last that is found, and no
// sort of the column.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "otel_torchprof/model.h"

namespace otp {
namespace {

// Open addressing; equal ids are in a chain, the last of them in the slot.
class Wanted {
 public:
  Wanted(const uint64_t* ids, uint64_t count) : ids_(ids), chain_(count, kNone) {
    uint64_t size = 8;
    // Most ids of the column are not looked for: with few slots in use, few of them are compared with any.
    while (size < (count < kFew ? 16 : 2) * count) size *= 2;
    slots_.assign(size, kNone);
    for (uint64_t i = 0; i < count; ++i) {
      if (ids[i] == 0) continue;
      uint32_t& slot = slot_of(ids[i]);
      missing_ += slot == kNone;
      chain_[i] = slot;
      slot = static_cast<uint32_t>(i);
    }
  }

  // Notes where an id stands, for all that are looked for as that; again without effect.
  void note(uint64_t id, int64_t position, int64_t* positions) {
    uint32_t i = slot_of(id);
    if (i == kNone || positions[i] >= 0) return;
    --missing_;
    for (; i != kNone; i = chain_[i]) positions[i] = position;
  }

  // How many different ids are not found yet.
  uint64_t missing() const { return missing_; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint64_t kFew = 1024;  // 64 KB of slots at most

  uint32_t& slot_of(uint64_t id) {
    const uint64_t mask = slots_.size() - 1;
    // An odd multiplier (Fibonacci hashing) spreads ids that count up.
    uint64_t at = (id * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[at] != kNone && ids_[slots_[at]] != id) at = (at + 1) & mask;
    return slots_[at];
  }

  const uint64_t* ids_;
  uint64_t missing_ = 0;
  std::vector<uint32_t> slots_, chain_;
};

}  // namespace
}  // namespace otp

extern "C" int otp_positions_of(const uint64_t* ids, uint64_t count, const uint64_t* wanted, uint64_t wanted_count,
                                int64_t* positions) {
  std::fill(positions, positions + wanted_count, -1);
  try {
    otp::Wanted table(wanted, wanted_count);
    for (uint64_t i = 0; i < count && table.missing() > 0; ++i) table.note(ids[i], static_cast<int64_t>(i), positions);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}
