// Reads the words of one row; never beyond their end, whatever they say.
#pragma once

#include <algorithm>
#include <cstdint>

#include "otel_torchprof/record_format.h"

namespace otp {

struct InputHead {
  uint32_t kind = OTP_INPUT_OTHER;
  uint32_t dtype = 0;
  uint32_t flags = 0;
  uint32_t n = 0;

  static InputHead of(int64_t word) {
    auto header = static_cast<uint64_t>(word);
    return {static_cast<uint32_t>(header & 0xFF), static_cast<uint32_t>(header >> 8 & 0xFF),
            static_cast<uint32_t>(header >> 16 & 0xFFFF), static_cast<uint32_t>(header >> 32)};
  }
};

class InputReader {
 public:
  InputReader(const int64_t* words, uint64_t count, int64_t offset) : d_next(words), d_left(count) {
    uint64_t skipped = offset < 0 ? count : std::min(static_cast<uint64_t>(offset), count);
    d_next += skipped;
    d_left -= skipped;
    uint64_t counts = word();
    d_inputs = static_cast<uint32_t>(std::min(counts & UINT32_MAX, d_left));
    d_extras = static_cast<uint32_t>(std::min(counts >> 32, d_left));
  }

  uint32_t inputs() const { return d_inputs; }
  uint32_t extras() const { return d_extras; }
  uint64_t left() const { return d_left; }
  const int64_t* next() const { return d_next; }
  // Whether a tensor that was skipped has its storage.
  bool has_passed_storage() const { return d_passed_storage; }

  uint64_t word() {
    if (d_left == 0) return 0;
    --d_left;
    return static_cast<uint64_t>(*d_next++);
  }

  // A header; the number of what follows is at most what there can be.
  InputHead head() {
    InputHead found = InputHead::of(static_cast<int64_t>(word()));
    if (found.kind == OTP_INPUT_TENSOR || found.kind == OTP_INPUT_TENSOR_LIST || found.kind == OTP_INPUT_SCALAR_LIST)
      found.n = static_cast<uint32_t>(std::min<uint64_t>(found.n, d_left));
    return found;
  }

  void skip(uint64_t words) {
    uint64_t skipped = std::min(words, d_left);
    d_next += skipped;
    d_left -= skipped;
  }

  // Passes by a tensor's storage, and its strides before that.
  void skip_storage(const InputHead& head) {
    bool is_stored = (head.flags & OTP_INPUT_STORED) != 0;
    skip(is_stored ? OTP_STORAGE_WORDS : 0);
    d_passed_storage |= is_stored;
  }
  void skip_behind_sizes(const InputHead& head) {
    skip((head.flags & OTP_INPUT_STRIDED) != 0 ? head.n : 0);
    skip_storage(head);
  }

  // Passes by what an input's header announces.
  void skip_rest(const InputHead& head) {
    switch (head.kind) {
      case OTP_INPUT_TENSOR:
        skip(head.n);
        return skip_behind_sizes(head);
      case OTP_INPUT_INT:
      case OTP_INPUT_DOUBLE:
        return skip(1);
      case OTP_INPUT_COMPLEX:
        return skip(2);
      case OTP_INPUT_TENSOR_LIST:
      case OTP_INPUT_SCALAR_LIST:
        for (uint32_t i = 0; i < head.n && d_left != 0; ++i) skip_element();
        return;
      default:
        return;
    }
  }
  void skip_input() { skip_rest(head()); }

 private:
  // What stands in a list; a list in a list, which nobody writes, has no elements.
  void skip_element() {
    InputHead element = head();
    if (element.kind != OTP_INPUT_TENSOR_LIST && element.kind != OTP_INPUT_SCALAR_LIST) skip_rest(element);
  }

  const int64_t* d_next;
  uint64_t d_left;
  uint32_t d_inputs = 0;
  uint32_t d_extras = 0;
  bool d_passed_storage = false;
};

// The id in the first extra of a kind; 0 where there is none.
inline uint32_t extra_of(InputReader reader, uint32_t kind) {
  if (reader.extras() == 0) return 0;
  for (uint32_t i = reader.inputs(); i > 0; --i) reader.skip_input();
  for (uint32_t i = reader.extras(); i > 0 && reader.left() != 0; --i) {
    InputHead head = reader.head();
    if (head.kind == kind) return head.n;
    if (head.kind == OTP_INPUT_KEYWORD) reader.skip_input();
  }
  return 0;
}

}  // namespace otp
