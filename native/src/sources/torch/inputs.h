// Inputs of an operator, and what else torch tells of it, as words: otp_input_kind in record_format.h has the format.
//
// Never throws on purpose, allocates nothing in the usual case, and never calls into Python: what only Python could
// tell (sizes that a tensor subclass computes) is left out.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"
#include "tensors.h"

namespace otp {

// Collects the words of one operator in memory of the thread. An input that does not fit any more is left out, and with
// it all that follow.
class InputWords {
 public:
  // What fits into a chunk beside the event's other records. The longest inputs are those of an optimizer's foreach
  // operators: 4,500 words for three lists of 500 matrices.
  static constexpr uint32_t kMax = OTP_CHUNK_BYTES / sizeof(int64_t) - 128;

  using Intern = uint32_t (*)(const char*, uint32_t, uint32_t);

  // `with_storages`: of tensors is told where they lie, too.
  void clear(bool with_storages) {
    d_words[0] = 0;
    d_size = 1;
    d_with_storages = with_storages;
  }

  // Writes the inputs; returns true when all fitted. Texts are kept where they are a user's own (`intern` is given).
  bool add_inputs(c10::ArrayRef<const c10::IValue> inputs, Intern intern) {
    for (const c10::IValue& value : inputs) {
      uint32_t before = d_size;
      if (!add(value, intern)) {
        d_size = before;
        return false;
      }
      ++d_words[0];
    }
    return true;
  }

  // Writes keyword inputs, behind the inputs.
  bool add_keywords(const std::unordered_map<std::string, c10::IValue>& keywords, Intern intern) {
    for (const auto& [keyword, value] : keywords) {
      uint32_t before = d_size;
      uint32_t id = intern(keyword.data(), static_cast<uint32_t>(keyword.size()), OTP_NAME_CODE);
      if (!add_header(OTP_INPUT_KEYWORD, id) || !add(value, intern)) {
        d_size = before;
        return false;
      }
      d_words[0] += kExtra;
    }
    return true;
  }

  // Writes what is one text, behind the inputs; the empty text, whose id is 0, is not worth a word.
  bool add_text(otp_input_kind kind, uint32_t id) {
    if (id == 0) return true;
    if (!add_header(kind, id)) return false;
    d_words[0] += kExtra;
    return true;
  }

  bool empty() const { return d_words[0] == 0; }
  const int64_t* data() const { return d_words; }
  uint32_t size() const { return d_size; }

 private:
  static constexpr int64_t kExtra = int64_t{1} << 32;

  // Torch keeps lists of scalars up to this length.
  static constexpr size_t kMaxListSize = 30;

  bool add(const c10::IValue& value, Intern intern) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isScalar()) return add_scalar(value);
    if (value.isTensorList()) return add_tensors(value.toListRef());
    if (value.isList()) return add_list(value.toListRef(), intern);
    if (intern != nullptr && value.isString()) return add_string(value.toStringRef(), intern);
    return add_header(OTP_INPUT_OTHER, 0);
  }

  bool add_tensors(c10::ArrayRef<c10::IValue> list) {
    if (!add_header(OTP_INPUT_TENSOR_LIST, list.size())) return false;
    for (const c10::IValue& element : list)
      if (!add_tensor(element.toTensor())) return false;
    return true;
  }

  // What is a list of scalars is told by its first element.
  bool add_list(c10::ArrayRef<c10::IValue> list, Intern intern) {
    bool kept = list.empty() ||
                (list.size() <= kMaxListSize && (list[0].isScalar() || (intern != nullptr && list[0].isString())));
    if (!kept) return add_header(OTP_INPUT_OTHER, 0);
    if (!add_header(OTP_INPUT_SCALAR_LIST, list.size())) return false;
    for (const c10::IValue& element : list)
      if (!(element.isString() ? add_string(element.toStringRef(), intern) : add_scalar(element))) return false;
    return true;
  }

  bool add_string(const std::string& text, Intern intern) {
    uint32_t id = intern == nullptr ? 0 : intern(text.data(), static_cast<uint32_t>(text.size()), OTP_NAME_TEXT);
    return add_header(OTP_INPUT_STRING, id);
  }

  bool add_scalar(const c10::IValue& value) {
    if (value.isInt()) return add_header(OTP_INPUT_INT, 0) && add_word(value.toInt());
    if (value.isDouble()) return add_header(OTP_INPUT_DOUBLE, 0) && add_word(bits(value.toDouble()));
    if (value.isBool()) return add_header(OTP_INPUT_BOOL, value.toBool() ? 1 : 0);
    if (!value.isComplexDouble()) return add_header(OTP_INPUT_OTHER | OTP_INPUT_SYMBOLIC << 16, 0);
    c10::complex<double> number = value.toComplexDouble();
    return add_header(OTP_INPUT_COMPLEX, 0) && add_word(bits(number.real())) && add_word(bits(number.imag()));
  }

  // A tensor without plain sizes has no dimensions to tell.
  bool add_tensor(const at::Tensor& tensor) {
    if (!has_plain_sizes(tensor)) return add_header(OTP_INPUT_OTHER, 0);
    int64_t header = OTP_INPUT_TENSOR | (static_cast<int64_t>(tensor.scalar_type()) + 1) << 8;
    c10::IntArrayRef sizes = tensor.sizes();
    if (d_size + 1 + 2 * sizes.size() + OTP_STORAGE_WORDS > kMax) return false;
    int64_t* head = d_words + d_size++;
    for (int64_t size : sizes) d_words[d_size++] = size;
    if (!is_strided(tensor)) {
      header |= OTP_INPUT_NO_STRIDES << 16;
    } else if (add_strides(sizes, tensor.strides())) {
      header |= OTP_INPUT_STRIDED << 16;
    }
    if (__builtin_expect(d_with_storages, 0) && storage_words(tensor, d_words + d_size)) {
      header |= OTP_INPUT_STORED << 16;
      d_size += OTP_STORAGE_WORDS;
    }
    *head = header | static_cast<int64_t>(sizes.size()) << 32;
    return true;
  }

  // Writes strides that are not those of a contiguous tensor of that shape. (Torch calls one contiguous also where the
  // stride of a dimension of one element is another.)
  bool add_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    int64_t expected = 1;
    bool is_plain = true;
    for (size_t i = sizes.size(); i-- > 0;) {
      is_plain &= strides[i] == expected;
      expected *= sizes[i] > 1 ? sizes[i] : 1;
    }
    if (__builtin_expect(is_plain, 1)) return false;
    for (int64_t stride : strides) d_words[d_size++] = stride;
    return true;
  }

  static int64_t bits(double value) {
    int64_t found;
    std::memcpy(&found, &value, sizeof found);
    return found;
  }

  bool add_header(int64_t kind, size_t count) { return add_word(kind | static_cast<int64_t>(count) << 32); }

  bool add_word(int64_t word) {
    if (d_size >= kMax) return false;
    d_words[d_size++] = word;
    return true;
  }

  uint32_t d_size = 0;
  bool d_with_storages = false;
  int64_t d_words[kMax];
};

}  // namespace otp
