// The text of a range, and who made a tensor.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>

#include "ranges.h"
#include "tensors.h"

namespace otp {

// Which call made a tensor, as which of its outputs, found by the tensor's address. For any number of threads, without
// a lock: each place is one word. What is remembered is as much as fits; an older tensor may be forgotten for a newer
// one. A tensor that was freed is not known to be: a new one at its address has its producer until it is an output
// itself.
class Producers {
 public:
  struct Origin {
    uint64_t call = 0;
    int64_t output = -1;
  };

  void clear() {
    for (std::atomic<uint64_t>& place : d_places) place.store(0, std::memory_order_relaxed);
  }

  void set(const void* tensor, uint64_t call, uint64_t output) {
    uint64_t hash = hashed(tensor), word = hash >> kIndexBits << 40 | (call & 0xffffffff) << 8 | (output & 0xff);
    size_t at = hash & kMask;
    for (size_t i = 0; i < kTries; ++i) {
      uint64_t there = d_places[(hash + i) & kMask].load(std::memory_order_relaxed);
      if (there != 0 && there >> 40 != word >> 40) continue;
      at = (hash + i) & kMask;
      break;
    }
    d_places[at].store(word, std::memory_order_relaxed);
  }

  Origin find(const void* tensor) const {
    uint64_t hash = hashed(tensor);
    for (size_t i = 0; i < kTries; ++i) {
      uint64_t word = d_places[(hash + i) & kMask].load(std::memory_order_relaxed);
      if (word == 0) break;
      if (word >> 40 == hash >> kIndexBits) return {word >> 8 & 0xffffffff, static_cast<int64_t>(word & 0xff)};
    }
    return {};
  }

 private:
  static constexpr size_t kIndexBits = 16, kMask = (1u << kIndexBits) - 1, kTries = 8;

  // 40 bits of which 16 say where to look and 24, which are kept, tell apart what is found there.
  static uint64_t hashed(const void* tensor) {
    return (reinterpret_cast<uintptr_t>(tensor) >> 4) * 0x9e3779b97f4a7c15u >> 24;
  }

  std::atomic<uint64_t> d_places[kMask + 1];
};

// Builds texts in memory of its own, one after the other. What is too long ends in "...".
class RangeText {
 public:
  const char* of(const at::RecordFunction& fn, uint32_t parts, const Producers* producers) {
    d_size = 0;
    add(fn.name());
    if ((parts & OTP_RANGE_SEQ) != 0 && fn.seqNr() >= 0) {
      bool stashed = (parts & OTP_RANGE_STASHED) != 0 && fn.scope() == at::RecordScope::BACKWARD_FUNCTION;
      add(stashed ? ", stashed seq = " : ", seq = ");
      add(fn.seqNr());
    }
    if ((parts & OTP_RANGE_OP_ID) != 0 && fn.handle() != 0) {
      add(", op_id = ");
      add(static_cast<int64_t>(fn.handle()));
    }
    bool inputs = fn.needsInputs() && !fn.inputs().empty();
    if ((parts & OTP_RANGE_SIZES) != 0 && inputs) add_list(", sizes = [", fn, nullptr);
    if ((parts & OTP_RANGE_PRODUCERS) != 0 && inputs && producers != nullptr)
      add_list(", input_op_ids = [", fn, producers);
    return finished();
  }

 private:
  static constexpr size_t kMost = 65536, kEnd = 4;  // room for "..." and the zero

  // Of every input what stands for it: its producer, or its sizes where there is no table of producers.
  void add_list(const char* opening, const at::RecordFunction& fn, const Producers* producers) {
    add(opening);
    d_first = true;
    for (const c10::IValue& value : fn.inputs()) {
      if (value.isTensor()) {
        add_tensor(value.toTensor(), producers);
      } else if (!value.isList() || !add_tensors(value.toListRef(), producers)) {
        add_none(producers);
      }
    }
    add("]");
  }

  bool add_tensors(c10::ArrayRef<c10::IValue> list, const Producers* producers) {
    bool any = false;
    for (const c10::IValue& value : list) {
      if (!value.isTensor() || (producers == nullptr && !value.toTensor().defined())) continue;
      add_tensor(value.toTensor(), producers);
      any = true;
    }
    return any;
  }

  // A tensor without plain sizes has none to tell.
  void add_tensor(const at::Tensor& tensor, const Producers* producers) {
    if (!tensor.defined()) return add_none(producers);
    if (producers != nullptr) return add_origin(producers->find(tensor.unsafeGetTensorImpl()));
    if (!has_plain_sizes(tensor)) return add_none(nullptr);
    add_comma();
    const char* separator = "[";
    for (int64_t size : tensor.sizes()) {
      add(separator);
      add(size);
      separator = ", ";
    }
    add(tensor.dim() == 0 ? "[]" : "]");
  }

  void add_none(const Producers* producers) {
    if (producers != nullptr) return add_origin({});
    add_comma();
    add("[]");
  }

  void add_origin(Producers::Origin origin) {
    add_comma();
    add("(");
    add(static_cast<int64_t>(origin.call));
    add(",");
    add(origin.output);
    add(")");
  }

  void add_comma() {
    if (!d_first) add(", ");
    d_first = false;
  }

  void add(const char* text) {
    size_t size = strlen(text), room = kMost - kEnd - d_size;
    if (size > room) d_cut = true;
    if (d_cut) return;
    memcpy(d_text + d_size, text, size);
    d_size += size;
  }

  void add(int64_t number) {
    char digits[24];
    *std::to_chars(digits, digits + sizeof(digits) - 1, number).ptr = 0;
    add(digits);
  }

  const char* finished() {
    memcpy(d_text + d_size, d_cut ? "..." : "", d_cut ? 4 : 1);
    d_cut = false;
    return d_text;
  }

  size_t d_size = 0;
  bool d_first = true, d_cut = false;
  char d_text[kMost];
};

}  // namespace otp
