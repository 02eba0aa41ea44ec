// Inputs of an operator, and what else torch says about it, as words: otp_input_kind in record_format.h has the format.
//
// Never throws on purpose and allocates nothing in the usual case. What only Python could tell (sizes that a tensor
// subclass computes) is left out; but for a tensor that is not plain torch may run code of others for what is asked
// here, as for the device of one whose storage is told, and that code may record.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"
#include "tensors.h"

namespace otp {

// What fits into a chunk beside the event's other records. The longest inputs are those of an optimizer's foreach
// operators: 4,500 words for three lists of 500 matrices.
constexpr uint32_t kMaxInputWords = OTP_CHUNK_BYTES / sizeof(int64_t) - 128;

// Of which tensors sizes are written.
enum class Tensors {
  kPlain,         // those that have all in themselves; with any other the inputs do not fit
  kAny,           // of all that have some
  kWithStorages,  // of those, and where they lie
};

// Writes the words of one operator to where the caller says, at most so many and at least one. An input that does not
// fit any more is left out, and with it all that follow.
class InputWords {
 public:
  using Intern = uint32_t (*)(const char*, uint32_t, uint32_t);

  InputWords(int64_t* words, uint32_t most, Tensors tensors)
      : d_words(words), d_at(words + 1), d_end(words + most), d_tensors(tensors) {
    d_words[0] = 0;
  }

  // Writes the inputs; returns true when all fitted. Texts are kept where they are a user's own (`intern` is given).
  bool add_inputs(c10::ArrayRef<const c10::IValue> inputs, Intern intern) {
    for (const c10::IValue& value : inputs) {
      int64_t* before = d_at;
      if (!add(value, intern)) {
        d_at = before;
        return false;
      }
      ++d_words[0];
    }
    return true;
  }

  // Writes keyword inputs, behind the inputs.
  bool add_keywords(const std::unordered_map<std::string, c10::IValue>& keywords, Intern intern) {
    for (const auto& [keyword, value] : keywords) {
      int64_t* before = d_at;
      uint32_t id = intern(keyword.data(), static_cast<uint32_t>(keyword.size()), OTP_NAME_CODE);
      if (!add_header(OTP_INPUT_KEYWORD, id) || !add(value, intern)) {
        d_at = before;
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
  uint32_t size() const { return static_cast<uint32_t>(d_at - d_words); }

 private:
  static constexpr int64_t kExtra = int64_t{1} << 32;

  // Torch keeps lists of scalars up to this length.
  static constexpr size_t kMaxListSize = 30;

  bool add(const c10::IValue& value, Intern intern) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone()) return add_header(OTP_INPUT_OTHER, 0);
    return add_other(value, intern);
  }

  __attribute__((noinline)) bool add_other(const c10::IValue& value, Intern intern) {
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

  bool add_tensor(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (__builtin_expect(!PlainTensor::is(impl) || d_tensors == Tensors::kWithStorages, 0))
      return add_unusual_tensor(tensor);
    return add_sizes(impl.sizes(), impl.strides(), header_of(impl));
  }

  // Strides are told that are not those of a contiguous tensor of that shape. (Torch calls one contiguous also where
  // the stride of a dimension of one element is another.) Where no strides are given, none are told.
  bool add_sizes(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t header) {
    size_t n = sizes.size();
    if (static_cast<size_t>(d_end - d_at) < 1 + 2 * n + OTP_STORAGE_WORDS) return false;
    int64_t* head = d_at++;
    int64_t expected = 1, others = 0;
    for (size_t i = n; i-- > 0;) {
      d_at[i] = sizes[i];
      if (!strides.empty()) others |= strides[i] ^ expected;
      expected *= sizes[i] > 1 ? sizes[i] : 1;
    }
    d_at += n;
    if (__builtin_expect(others != 0, 0)) {
      header |= OTP_INPUT_STRIDED << 16;
      d_at = std::copy(strides.begin(), strides.end(), d_at);
    }
    *head = header | static_cast<int64_t>(n) << 32;
    return true;
  }

  // A tensor without plain sizes has no dimensions to tell.
  __attribute__((noinline)) bool add_unusual_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return add_header(OTP_INPUT_OTHER, 0);
    if (d_tensors == Tensors::kPlain) return false;
    if (!has_plain_sizes(tensor)) return add_header(OTP_INPUT_OTHER, 0);
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    int64_t* head = d_at;
    bool fitted = is_strided(impl) ? add_sizes(impl.sizes(), impl.strides(), header_of(impl))
                                   : add_sizes(impl.sizes(), {}, header_of(impl) | OTP_INPUT_NO_STRIDES << 16);
    if (fitted && d_tensors == Tensors::kWithStorages && storage_words(tensor, d_at)) {
      *head |= OTP_INPUT_STORED << 16;
      d_at += OTP_STORAGE_WORDS;
    }
    return fitted;
  }

  static int64_t header_of(const c10::TensorImpl& impl) {
    return OTP_INPUT_TENSOR | (static_cast<int64_t>(c10::typeMetaToScalarType(impl.dtype())) + 1) << 8;
  }

  static int64_t bits(double value) {
    int64_t found;
    std::memcpy(&found, &value, sizeof found);
    return found;
  }

  bool add_header(int64_t kind, size_t count) { return add_word(kind | static_cast<int64_t>(count) << 32); }

  bool add_word(int64_t word) {
    if (d_at >= d_end) return false;
    *d_at++ = word;
    return true;
  }

  int64_t* d_words;
  int64_t* d_at;
  int64_t* d_end;
  Tensors d_tensors;
};

}  // namespace otp
