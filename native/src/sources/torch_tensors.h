// What of a tensor can be asked where no Python code may run.
#pragma once

#include <ATen/core/Tensor.h>

namespace otp {

// Opens the question of a tensor, whether its sizes or strides are computed in Python, to those who must not call
// there.
class PythonSizes : public c10::TensorImpl {
 public:
  static bool has(const c10::TensorImpl& tensor) {
    constexpr auto kAsk = &PythonSizes::matches_python_custom;
    return (tensor.*kAsk)(SizesStridesPolicy::CustomStrides);  // a policy for sizes is one for strides too
  }
};

// Asking an undefined, nested or symbolic tensor for its sizes would throw, and one with sizes of Python's runs that.
inline bool has_plain_sizes(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_nested()) return false;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return !impl.has_symbolic_sizes_strides() && !PythonSizes::has(impl);
}

// By its keys, as torch does: layout() calls Python for a subclass that wants that.
inline bool is_strided(const at::Tensor& tensor) {
  return !tensor.key_set().has_any(c10::sparse_ks | c10::sparse_csr_ks | c10::mkldnn_ks);
}

}  // namespace otp
