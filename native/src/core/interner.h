// Names to small numbers, by content.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "otel_torchprof/recorder.h"

namespace otp {

class BlackBox;

struct InternedName {
  const char* text;  // stays where it is as long as the interner; no zero behind it
  uint32_t size;
  uint32_t id;
};

struct NameLimit {
  uint32_t names;
  uint64_t bytes;
};
using NameLimits = std::array<NameLimit, OTP_NAME_KINDS>;

// By otp_name_kind. A name costs its bytes and some 70 more here.
constexpr NameLimits kNameLimits = {
    {{1u << 16, 4u << 20}, {1u << 17, 16u << 20}, {1u << 15, 4u << 20}, {1u << 15, 4u << 20}}};

// One table per process; id 0 is the empty name. Each kind of name has a limit of its own: labels with ids in their
// names ("request 17") never take the space of operators. What exceeds it shares one id per kind, and is counted. Where
// memory is short, that one name does the same. An id is never given to another name.
//
// The bytes of all names lie end to end in memory that is reserved once and committed as it fills. So readers need no
// copy: what they were shown stays where it is, and names are only added behind it.
class Interner {
 public:
  explicit Interner(const NameLimits& limits = kNameLimits);  // without any memory, each kind has only its shared name
  ~Interner();
  Interner(const Interner&) = delete;
  Interner& operator=(const Interner&) = delete;

  InternedName intern(std::string_view name, otp_name_kind kind);
  std::string_view text(uint32_t id) const;
  // Valid as long as the interner.
  otp_names view() const;
  // The box gets all names, those from before too, in the order of their ids; null: no longer.
  void set_box(BlackBox* box);
  // Uses of names of that kind that got the shared id.
  uint64_t refused(otp_name_kind kind) const;

 private:
  static constexpr uint32_t kOwnNames = 1 + OTP_NAME_KINDS;
  static constexpr size_t kOwnBytes = 128;

  void lay_out(void* memory);
  InternedName add(std::string_view name, otp_name_kind kind);
  // Adds it to the memory alone, where it is found by its number.
  InternedName place(std::string_view name, otp_name_kind kind);
  InternedName at(uint32_t id) const;

  mutable std::mutex d_mutex;
  NameLimits d_left;
  size_t d_reserved = 0;
  alignas(uint64_t) char d_own[kOwnNames * (sizeof(uint64_t) + 1) + kOwnBytes];  // where no memory is to be had
  uint64_t* d_ends = nullptr;
  char* d_data = nullptr;
  uint8_t* d_kinds = nullptr;
  BlackBox* d_box = nullptr;
  uint32_t d_count = 0;
  std::unordered_map<std::string_view, uint32_t> d_ids;
  uint64_t d_refused[OTP_NAME_KINDS] = {};
};

}  // namespace otp
