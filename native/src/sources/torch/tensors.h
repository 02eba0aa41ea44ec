// What of a tensor can be asked where no Python code may run.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "otel_torchprof/record_format.h"

namespace otp {

// By its keys, as torch does: layout() calls Python for a subclass that requests that.
inline bool is_strided(const c10::TensorImpl& tensor) {
  return !tensor.key_set().has_any(c10::sparse_ks | c10::sparse_csr_ks | c10::mkldnn_ks);
}

// Opens the question of a tensor, whether its sizes or strides are computed in Python, to those who must not call
// there.
class PythonSizes : public c10::TensorImpl {
 public:
  static bool has(const c10::TensorImpl& tensor) {
    constexpr auto kAsk = &PythonSizes::matches_python_custom;
    return (tensor.*kAsk)(SizesStridesPolicy::CustomStrides);  // a policy for sizes is one for strides too
  }
};

// Whether a tensor has its sizes and strides in itself, and so has none of what the questions below ask for: undefined,
// nested and symbolic tensors, those of Python's and those of other layouts have a policy. A subclass may say that it
// is of another layout and have none, but then its keys say so too.
class PlainTensor : public c10::TensorImpl {
 public:
  static bool is(const c10::TensorImpl& tensor) {
    constexpr auto kAsk = &PlainTensor::matches_policy;
    return !(tensor.*kAsk)(SizesStridesPolicy::CustomStrides) && is_strided(tensor);
  }
};

// Asking an undefined, nested or symbolic tensor for its sizes would throw, and one with sizes of Python's runs that.
inline bool has_plain_sizes(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_nested()) return false;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return !impl.has_symbolic_sizes_strides() && !PythonSizes::has(impl);
}

// Writes OTP_STORAGE_WORDS words, as record_format.h has them; false where there is no storage, or one that is only
// there for its shape and answers by throwing.
__attribute__((noinline)) inline bool storage_words(const at::Tensor& tensor, int64_t* words) try {
  constexpr int64_t kMaxBytes = (int64_t{1} << 48) - 1;
  if (!tensor.has_storage()) return false;
  const c10::Storage& storage = tensor.storage();
  const void* address = storage.data();
  c10::SymInt size = storage.sym_nbytes();
  int64_t bytes = size.is_heap_allocated() ? 0 : size.as_int_unchecked();
  c10::Device device = tensor.device();
  words[0] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
  words[1] = static_cast<int64_t>(static_cast<uint64_t>(std::clamp<int64_t>(bytes, 0, kMaxBytes)) |
                                  static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 48 |
                                  static_cast<uint64_t>(device.has_index() ? device.index() : 0) << 56);
  return true;
} catch (...) {
  return false;
}

}  // namespace otp
