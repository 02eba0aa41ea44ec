#include "files/input_texts.h"

#include <algorithm>
#include <cstring>

#include "encode/dtype_names.h"
#include "files/json_cursor.h"
#include "files/json_values.h"
#include "otel_torchprof/record_format.h"

namespace otp {
namespace {

constexpr uint32_t kMostDtypes = 128;

// Past a text in single quotes, as Python writes it.
bool skip_quoted(JsonCursor* cursor) {
  const void* end = std::memchr(cursor->at + 1, '\'', static_cast<size_t>(cursor->end - cursor->at - 1));
  if (end != nullptr) cursor->at = static_cast<const char*>(end) + 1;
  return end != nullptr;
}

// The elements of a list as they are written; none where it is no list.
void split(std::string_view list, std::vector<std::string_view>* elements) {
  elements->clear();
  if (list.empty() || list.front() != '[') return;
  JsonCursor cursor{list.data() + 1, list.data() + list.size()};
  while (cursor.space_and_commas() && *cursor.at != ']') {
    const char* begin = cursor.at;
    if (!(*begin == '\'' ? skip_quoted(&cursor) : cursor.skip())) return;
    elements->emplace_back(begin, static_cast<size_t>(cursor.at - begin));
  }
}

// The whole numbers of a list; false where it has anything else.
bool numbers_of(std::string_view list, std::vector<int64_t>* numbers) {
  numbers->clear();
  if (list.empty() || list.front() != '[') return false;
  size_t at = 1;
  while (at < list.size() && list[at] != ']') {
    if (list[at] == ' ' || list[at] == ',' || list[at] == '\n' || list[at] == '\t' || list[at] == '\r') {
      ++at;
      continue;
    }
    const size_t begin = at;
    while (at < list.size() && JsonCursor::is_of_scalar(list[at])) ++at;
    int64_t number;
    if (at == begin || !integer_of(list.substr(begin, at - begin), &number)) return false;
    numbers->push_back(number);
  }
  return true;
}

bool is_contiguous(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  uint64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (static_cast<uint64_t>(strides[i]) != step) return false;
    step *= static_cast<uint64_t>(std::max<int64_t>(sizes[i], 1));
  }
  return true;
}

// c10::ScalarType + 1 of what torch calls a type; 0: unknown.
uint32_t dtype_of(std::string_view name) {
  for (uint32_t dtype = 1; dtype <= kMostDtypes && !name.empty(); ++dtype)
    if (name == type_name({OTP_INPUT_TENSOR, dtype, 0, 0})) return dtype;
  return 0;
}

// The text in an element, in either quotes; what is none has none.
std::string_view text_in(std::string_view element) {
  const bool is_quoted = element.size() >= 2 && element.front() == '\'';
  return element == "None" ? std::string_view() : is_quoted ? element.substr(1, element.size() - 2) : unquoted(element);
}

std::string_view entry(const std::vector<std::string_view>& entries, size_t i) {
  return i < entries.size() ? entries[i] : std::string_view();
}

}  // namespace

int64_t InputWordTable::place_of(const InputTexts& texts) {
  uint64_t hash = mixed(d_seed ^ texts.call_stack, 0x9E3779B97F4A7C15u);
  for (std::string_view text : {texts.types, texts.dims, texts.strides, texts.values}) hash = hash_of(text, hash);
  int64_t place = d_places.find(hash);
  if (place < 0) {
    place = static_cast<int64_t>(d_words.size());
    append(texts);
    d_places.add(hash, place);
  }
  return place;
}

void InputWordTable::append(const InputTexts& texts) {
  split(unquoted(texts.types), &d_types);
  split(unquoted(texts.dims), &d_dims);
  split(unquoted(texts.strides), &d_strides);
  split(unquoted(texts.values), &d_values);
  const size_t count = std::max(d_types.size(), d_dims.size());
  const uint64_t extras = texts.call_stack != 0;
  d_words.push_back(static_cast<int64_t>(count | extras << 32));
  for (size_t i = 0; i < count; ++i)
    append_input(text_in(entry(d_types, i)), entry(d_dims, i), entry(d_strides, i), text_in(entry(d_values, i)));
  if (extras != 0) append_header(OTP_INPUT_CALL_STACK, 0, 0, texts.call_stack);
}

void InputWordTable::append_input(std::string_view type, std::string_view dims, std::string_view strides,
                                  std::string_view value) {
  if (type == "TensorList") return append_tensors(dims, strides);
  if (type == "ScalarList") return append_scalars(value);
  if (type == "Scalar") return append_scalar(value);
  const uint32_t dtype = dtype_of(type);
  if (dtype != 0 || dims.find_first_of("0123456789") != std::string_view::npos)
    return append_tensor(dtype, dims, strides);
  append_header(OTP_INPUT_OTHER, 0, 0, 0);
}

void InputWordTable::append_tensor(uint32_t dtype, std::string_view dims, std::string_view strides) {
  if (!numbers_of(dims, &d_sizes)) d_sizes.clear();
  const bool is_strided = numbers_of(strides, &d_steps) && d_steps.size() == d_sizes.size();
  const bool is_plain = is_strided && is_contiguous(d_sizes, d_steps);
  const uint32_t flags = is_plain ? 0 : is_strided ? OTP_INPUT_STRIDED : OTP_INPUT_NO_STRIDES;
  append_header(OTP_INPUT_TENSOR, dtype, flags, d_sizes.size());
  d_words.insert(d_words.end(), d_sizes.begin(), d_sizes.end());
  if (flags == OTP_INPUT_STRIDED) d_words.insert(d_words.end(), d_steps.begin(), d_steps.end());
}

void InputWordTable::append_tensors(std::string_view dims, std::string_view strides) {
  split(dims, &d_elements);
  split(strides, &d_element_strides);
  append_header(OTP_INPUT_TENSOR_LIST, 0, 0, d_elements.size());
  for (size_t i = 0; i < d_elements.size(); ++i) append_tensor(0, d_elements[i], entry(d_element_strides, i));
}

// "[1, 2]"
void InputWordTable::append_scalars(std::string_view value) {
  const size_t header = d_words.size();
  uint64_t count = 0;
  append_header(OTP_INPUT_SCALAR_LIST, 0, 0, 0);
  if (value.size() < 2 || value.front() != '[' || value.back() != ']') return;
  for (value = value.substr(1, value.size() - 2); !value.empty(); ++count) {
    const size_t comma = std::min(value.find(','), value.size());
    append_scalar(value.substr(0, comma));
    value.remove_prefix(std::min(comma + 1, value.size()));
  }
  d_words[header] |= static_cast<int64_t>(count << 32);
}

void InputWordTable::append_scalar(std::string_view value) {
  while (!value.empty() && value.front() == ' ') value.remove_prefix(1);
  int64_t whole;
  double number;
  if (value == "True" || value == "False") return append_header(OTP_INPUT_BOOL, 0, 0, value == "True");
  if (integer_of(value, &whole)) {
    append_header(OTP_INPUT_INT, 0, 0, 0);
    d_words.push_back(whole);
  } else if (double_of(value, &number)) {
    append_header(OTP_INPUT_DOUBLE, 0, 0, 0);
    std::memcpy(&whole, &number, sizeof whole);
    d_words.push_back(whole);
  } else if (!append_complex(value)) {
    append_header(OTP_INPUT_OTHER, 0, OTP_INPUT_SYMBOLIC, 0);
  }
}

// "1.+2.j"
bool InputWordTable::append_complex(std::string_view value) {
  if (value.empty() || value.back() != 'j') return false;
  value.remove_suffix(1);
  for (size_t sign = 1; sign < value.size(); ++sign) {
    if (value[sign] != '+' && value[sign] != '-') continue;
    double parts[2];
    const size_t second = sign + (value[sign] == '+');
    if (!double_of(value.substr(0, sign), &parts[0]) || !double_of(value.substr(second), &parts[1])) continue;
    append_header(OTP_INPUT_COMPLEX, 0, 0, 0);
    for (double part : parts) {
      int64_t bits;
      std::memcpy(&bits, &part, sizeof bits);
      d_words.push_back(bits);
    }
    return true;
  }
  return false;
}

void InputWordTable::append_header(uint32_t kind, uint32_t dtype, uint32_t flags, uint64_t n) {
  d_words.push_back(static_cast<int64_t>(uint64_t{kind} | uint64_t{dtype} << 8 | uint64_t{flags} << 16 | n << 32));
}

}  // namespace otp
