// Texts to small numbers, by content, and the bytes of a file told apart by a hash.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace otp {

// 64 bits of a text. The seed keeps a file from knowing which texts fall together.
inline uint64_t mixed(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_of(std::string_view text, uint64_t seed) {
  constexpr uint64_t kOne = 0x9E3779B97F4A7C15u, kTwo = 0xE7037ED1A0B428DBu;
  uint64_t hash = seed ^ (text.size() * kTwo), last = 0;
  const char* at = text.data();
  size_t left = text.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    hash = mixed(hash ^ word, kOne);
  }
  if (left != 0) std::memcpy(&last, at, left);
  return mixed(mixed(hash ^ last, kTwo) ^ seed, kOne);
}

// Number 0 is the empty text. Throws std::bad_alloc.
class TextTable {
 public:
  explicit TextTable(uint64_t seed) : d_seed(seed), d_ends(1, 0), d_hashes(1, 0), d_slots(1024, 0) {}

  uint32_t number_of(std::string_view text) {
    if (text.empty()) return 0;
    const uint64_t hash = hash_of(text, d_seed);
    uint64_t at = hash & (d_slots.size() - 1);
    for (; d_slots[at] != 0; at = (at + 1) & (d_slots.size() - 1)) {
      const uint32_t number = d_slots[at];
      if (d_hashes[number] == static_cast<uint32_t>(hash >> 32) && this->text(number) == text) return number;
    }
    return add(text, hash, at);
  }

  std::string_view text(uint32_t number) const {
    const uint64_t begin = number == 0 ? 0 : d_ends[number - 1];
    return {d_data.data() + begin, d_ends[number] - begin};
  }

  uint64_t size() const { return d_ends.size(); }
  uint64_t bytes() const { return d_data.capacity() + d_ends.capacity() * 12 + d_slots.capacity() * 4; }
  const char* data() const { return d_data.data(); }
  const uint64_t* ends() const { return d_ends.data(); }

 private:
  uint32_t add(std::string_view text, uint64_t hash, uint64_t at) {
    const auto number = static_cast<uint32_t>(d_ends.size());
    d_data.insert(d_data.end(), text.begin(), text.end());
    d_ends.push_back(d_data.size());
    d_hashes.push_back(static_cast<uint32_t>(hash >> 32));
    d_slots[at] = number;
    if (d_ends.size() * 2 > d_slots.size()) grow();
    return number;
  }

  void grow() {
    std::vector<uint32_t> slots(d_slots.size() * 2, 0);
    for (uint32_t number = 1; number < d_ends.size(); ++number) {
      uint64_t at = hash_of(text(number), d_seed) & (slots.size() - 1);
      while (slots[at] != 0) at = (at + 1) & (slots.size() - 1);
      slots[at] = number;
    }
    d_slots.swap(slots);
  }

  uint64_t d_seed;
  std::vector<char> d_data;
  std::vector<uint64_t> d_ends;
  std::vector<uint32_t> d_hashes, d_slots;
};

// A number per hash of 64 bits.
class HashTable {
 public:
  HashTable() : d_slots(1024) {}

  // The number of a hash; -1 where there is none yet.
  int64_t find(uint64_t hash) const {
    for (uint64_t at = hash & (d_slots.size() - 1); d_slots[at].number >= 0; at = (at + 1) & (d_slots.size() - 1))
      if (d_slots[at].hash == hash) return d_slots[at].number;
    return -1;
  }

  void add(uint64_t hash, int64_t number) {
    if (++d_count * 2 > d_slots.size()) grow();
    place(d_slots, {hash, number});
  }

  uint64_t bytes() const { return d_slots.size() * sizeof(Slot); }

 private:
  struct Slot {
    uint64_t hash = 0;
    int64_t number = -1;
  };

  static void place(std::vector<Slot>& slots, const Slot& slot) {
    uint64_t at = slot.hash & (slots.size() - 1);
    while (slots[at].number >= 0) at = (at + 1) & (slots.size() - 1);
    slots[at] = slot;
  }

  void grow() {
    std::vector<Slot> slots(d_slots.size() * 2);
    for (const Slot& slot : d_slots)
      if (slot.number >= 0) place(slots, slot);
    d_slots.swap(slots);
  }

  uint64_t d_count = 0;
  std::vector<Slot> d_slots;
};

}  // namespace otp
