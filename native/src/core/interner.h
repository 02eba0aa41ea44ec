// Names to small numbers, by content.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "otel_torchprof/encode.h"

namespace otp {

struct InternedName {
  const char* text;  // zero-terminated; stays where it is as long as the interner
  uint32_t size;
  uint32_t id;
};

// One table per process. Id 0 is the empty name. A table that is full (names made up per call, such as "step 17")
// answers with one id for all that come later, and counts them: a label must never be a leak. Where memory is short it
// does the same for that one name.
class Interner {
 public:
  static constexpr uint32_t kMaxNames = 1u << 20;
  static constexpr uint64_t kMaxBytes = 64u << 20;

  Interner();
  InternedName intern(std::string_view name);
  bool copy(otp_names* out) const;
  uint64_t size() const;
  uint64_t refused() const;

 private:
  InternedName add(std::string_view name);

  mutable std::mutex d_mutex;
  std::deque<std::string> d_names;  // a deque never moves its elements
  std::unordered_map<std::string_view, uint32_t> d_ids;
  uint64_t d_bytes = 0;
  uint64_t d_refused = 0;
  InternedName d_overflow{};
};

}  // namespace otp
