// Inputs of an operator as words: see Batch.inputs in otel_torchprof/_columns/batch.py for the format.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace otp {

// Collects the words of one operator in memory of the thread. An input that does not fit any more is left out, and with
// it all that follow.
class InputWords {
 public:
  // What fits into a chunk beside the event's other records. The longest inputs are those of an optimizer's foreach
  // operators: 4,500 words for three lists of 500 matrices.
  static constexpr uint32_t kMax = OTP_CHUNK_BYTES / sizeof(int64_t) - 128;

  // Writes the inputs; returns true when all fitted.
  bool collect(c10::ArrayRef<const c10::IValue> inputs) {
    d_words[0] = 0;
    d_size = 1;
    for (const c10::IValue& value : inputs) {
      uint32_t before = d_size;
      if (!add(value)) {
        d_size = before;
        return false;
      }
      ++d_words[0];
    }
    return true;
  }
  const int64_t* data() const { return d_words; }
  uint32_t size() const { return d_size; }

 private:
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (!value.isTensorList()) return add_word(OTP_INPUT_OTHER, 0, 0);
    c10::ArrayRef<c10::IValue> list = value.toListRef();
    if (!add_word(OTP_INPUT_TENSOR_LIST, 0, list.size())) return false;
    for (const c10::IValue& element : list)
      if (!add_tensor(element.toTensor())) return false;
    return true;
  }

  // A tensor without plain sizes (undefined, nested, symbolic) has no dimensions to tell: asking would throw.
  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
      return add_word(OTP_INPUT_OTHER, 0, 0);
    c10::IntArrayRef sizes = tensor.sizes();
    if (!add_word(OTP_INPUT_TENSOR, static_cast<int64_t>(tensor.scalar_type()) + 1, sizes.size())) return false;
    if (d_size + sizes.size() > kMax) return false;
    for (int64_t size : sizes) d_words[d_size++] = size;
    return true;
  }

  bool add_word(int64_t kind, int64_t dtype, size_t count) {
    if (d_size >= kMax) return false;
    d_words[d_size++] = kind | dtype << 8 | static_cast<int64_t>(count) << 32;
    return true;
  }

  uint32_t d_size = 0;
  int64_t d_words[kMax];
};

}  // namespace otp
