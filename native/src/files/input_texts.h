// The inputs of an operator, from the lists in which Kineto writes them, as words (otp_input_kind).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "files/text_table.h"

namespace otp {

// Lists as JSON text, or as a JSON string with a list of Python in it, each with an entry per input; empty: the event
// has no such list.
struct InputTexts {
  std::string_view types;
  std::string_view dims;
  std::string_view strides;
  std::string_view values;
  uint32_t call_stack = 0;  // id of its entries by line, the innermost first; 0: none

  bool any() const { return !types.empty() || !dims.empty() || call_stack != 0; }
};

// Words of all inputs; those that are alike are in it once. Throws std::bad_alloc.
class InputWordTable {
 public:
  explicit InputWordTable(uint64_t seed) : d_seed(seed) {}

  // Where the words of these inputs begin.
  int64_t place_of(const InputTexts& texts);

  uint64_t bytes() const { return d_words.capacity() * sizeof(int64_t) + d_places.bytes(); }
  const std::vector<int64_t>& words() const { return d_words; }

 private:
  using Entries = std::vector<std::string_view>;

  void append(const InputTexts& texts);
  void append_input(std::string_view type, std::string_view dims, std::string_view strides, std::string_view value);
  void append_tensor(uint32_t dtype, std::string_view dims, std::string_view strides);
  void append_tensors(std::string_view dims, std::string_view strides);
  void append_scalars(std::string_view value);
  void append_scalar(std::string_view value);
  bool append_complex(std::string_view value);
  void append_header(uint32_t kind, uint32_t dtype, uint32_t flags, uint64_t n);

  uint64_t d_seed;
  std::vector<int64_t> d_words;
  HashTable d_places;
  Entries d_types, d_dims, d_strides, d_values, d_elements, d_element_strides;
  std::vector<int64_t> d_sizes, d_steps;
};

}  // namespace otp
