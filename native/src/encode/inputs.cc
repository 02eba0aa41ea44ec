// Inputs of events told apart, searched and thinned out.
#include "otel_torchprof/inputs.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "encode/input_reader.h"

namespace {

using otp::InputHead;
using otp::InputReader;

// The step and finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): every bit depends on every bit.
uint64_t mixed(uint64_t hash, uint64_t value) {
  uint64_t z = (hash ^ value) + 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

uint64_t with_words(InputReader* reader, uint32_t count, uint64_t hash) {
  for (uint32_t i = 0; i < count; ++i) hash = mixed(hash, reader->word());
  return hash;
}

uint64_t with_tensor(InputReader* reader, const InputHead& head, uint32_t parts, uint64_t hash) {
  if ((parts & OTP_PART_SHAPES) == 0) {
    reader->skip_rest(head);
    return hash;
  }
  hash = with_words(reader, head.n, mixed(hash, head.n));
  reader->skip_behind_sizes(head);
  return hash;
}

uint64_t with_scalar(InputReader* reader, const InputHead& head, uint64_t hash) {
  uint32_t words = head.kind == OTP_INPUT_COMPLEX ? 2 : head.kind == OTP_INPUT_INT || head.kind == OTP_INPUT_DOUBLE;
  return with_words(reader, words, mixed(hash, head.kind | uint64_t{head.n} << 32));
}

uint64_t with_input(InputReader* reader, uint32_t parts, uint64_t hash) {
  InputHead head = reader->head();
  bool values = (parts & OTP_PART_VALUES) != 0, dtypes = (parts & OTP_PART_DTYPES) != 0;
  // Kinds and flags apart from those that only strides have.
  if (dtypes || values) hash = mixed(hash, head.kind | (head.flags & OTP_INPUT_SYMBOLIC) << 16);
  if (dtypes) hash = mixed(hash, head.dtype);
  if (head.kind == OTP_INPUT_TENSOR) return with_tensor(reader, head, parts, hash);
  if ((parts & OTP_PART_SHAPES) != 0) hash = mixed(hash, 0);
  if (!values || head.kind == OTP_INPUT_TENSOR_LIST) {
    reader->skip_rest(head);
    return hash;
  }
  if (head.kind != OTP_INPUT_SCALAR_LIST) return with_scalar(reader, head, hash);
  hash = mixed(hash, head.n);
  for (uint32_t i = 0; i < head.n && reader->left() != 0; ++i) hash = with_scalar(reader, reader->head(), hash);
  return hash;
}

uint64_t hash_of(const otp_inputs& inputs, uint64_t row, uint32_t parts) {
  if (inputs.offsets[row] < 0) return 0;
  InputReader reader(inputs.words, inputs.word_count, inputs.offsets[row]);
  uint32_t count = reader.inputs();
  uint64_t hash = mixed(1, count);
  for (uint32_t i = 0; i < count; ++i) hash = with_input(&reader, parts, hash);
  return hash;
}

// Hashes to numbers, by open addressing.
class Numbers {
 public:
  Numbers() : d_slots(1024) {}

  int32_t number_of(uint64_t hash) {
    uint64_t mask = d_slots.size() - 1;
    for (uint64_t at = hash & mask;; at = (at + 1) & mask) {
      if (d_slots[at].number < 0) return add(at, hash);
      if (d_slots[at].hash == hash) return d_slots[at].number;
    }
  }
  int32_t size() const { return d_size; }

 private:
  struct Slot {
    uint64_t hash = 0;
    int32_t number = -1;
  };

  int32_t add(uint64_t at, uint64_t hash) {
    d_slots[at].hash = hash;
    d_slots[at].number = d_size++;
    if (static_cast<uint64_t>(d_size) * 2 > d_slots.size()) grow();
    return d_size - 1;
  }

  void grow() {
    std::vector<Slot> old(d_slots.size() * 2);
    old.swap(d_slots);
    uint64_t mask = d_slots.size() - 1;
    for (const Slot& slot : old) {
      if (slot.number < 0) continue;
      uint64_t at = slot.hash & mask;
      while (d_slots[at].number >= 0) at = (at + 1) & mask;
      d_slots[at] = slot;
    }
  }

  std::vector<Slot> d_slots;
  int32_t d_size = 0;
};

uint32_t text_of(const otp_inputs& inputs, uint64_t row, uint32_t kind) {
  InputReader reader(inputs.words, inputs.word_count, inputs.offsets[row]);
  if (kind != OTP_INPUT_STRING) return otp::extra_of(reader, kind);
  for (uint32_t i = reader.inputs(); i > 0; --i) {
    InputHead head = reader.head();
    if (head.kind == kind) return head.n;
    reader.skip_rest(head);
  }
  return 0;
}

bool is_kept(uint32_t kind, uint32_t kept) {
  switch (kind) {
    case OTP_INPUT_KEYWORD:
      return (kept & OTP_KEEP_INPUTS) != 0;
    case OTP_INPUT_OVERLOAD:
      return (kept & OTP_KEEP_OVERLOADS) != 0;
    case OTP_INPUT_CALL_STACK:
      return (kept & OTP_KEEP_CALL_STACKS) != 0;
    case OTP_INPUT_MODULE_HIERARCHY:
      return (kept & OTP_KEEP_MODULE_HIERARCHY) != 0;
    default:
      return false;
  }
}

uint64_t append(const int64_t* from, const int64_t* to, int64_t* out) {
  auto count = static_cast<uint64_t>(to - from);
  if (out != nullptr && count != 0) std::memcpy(out, from, count * sizeof(int64_t));
  return count;
}

// Where to write `size` words further on; nowhere when words are only counted.
int64_t* behind(int64_t* out, uint64_t size) { return out == nullptr ? nullptr : out + size; }

// Copies a tensor without its storage, which stands at its end, if it has one; returns how many words that are.
uint64_t append_unstored(const int64_t* from, const int64_t* to, int64_t* out) {
  bool is_stored = (InputHead::of(*from).flags & OTP_INPUT_STORED) != 0;
  if (is_stored) to -= std::min<ptrdiff_t>(OTP_STORAGE_WORDS, to - from - 1);
  uint64_t size = append(from, to, out);
  if (is_stored && out != nullptr) *out &= ~(int64_t{OTP_INPUT_STORED} << 16);
  return size;
}

// Passes by an input and copies it, or all of it but the storages; returns how many words that are.
uint64_t keep_input(InputReader* reader, bool with_storages, int64_t* out) {
  const int64_t* from = reader->next();
  if (reader->left() == 0) return 0;
  InputReader inside = *reader;
  InputHead head = inside.head();
  reader->skip_rest(reader->head());
  if (with_storages) return append(from, reader->next(), out);
  if (head.kind == OTP_INPUT_TENSOR) return append_unstored(from, reader->next(), out);
  if (head.kind != OTP_INPUT_TENSOR_LIST) return append(from, reader->next(), out);
  uint64_t size = append(from, inside.next(), out);
  while (inside.next() < reader->next()) {
    const int64_t* element = inside.next();
    InputHead kind = inside.head();
    if (kind.kind != OTP_INPUT_TENSOR_LIST && kind.kind != OTP_INPUT_SCALAR_LIST) inside.skip_rest(kind);
    const int64_t* end = inside.next();
    size += kind.kind == OTP_INPUT_TENSOR ? append_unstored(element, end, behind(out, size))
                                          : append(element, end, behind(out, size));
  }
  return size;
}

// Copies all inputs of a row but the storages.
uint64_t keep_inputs(InputReader* reader, int64_t* out) {
  uint64_t size = 0;
  for (uint32_t i = reader->inputs(); i > 0; --i) size += keep_input(reader, false, behind(out, size));
  return size;
}

// Writes one row's words; returns how many.
uint64_t keep_row(const otp_inputs& inputs, uint64_t row, uint32_t kept, int64_t* out) {
  InputReader reader(inputs.words, inputs.word_count, inputs.offsets[row]);
  uint64_t size = 1, extras_kept = 0, inputs_kept = 0;
  uint32_t extras = reader.extras();
  bool with_storages = (kept & OTP_KEEP_STORAGES) != 0;
  InputReader inputs_of_row = reader;
  for (uint32_t i = reader.inputs(); i > 0; --i) reader.skip_input();
  if ((kept & OTP_KEEP_INPUTS) != 0) {
    inputs_kept = reader.inputs();
    size += with_storages || !reader.has_passed_storage()
                ? append(inputs_of_row.next(), reader.next(), behind(out, size))
                : keep_inputs(&inputs_of_row, behind(out, size));
  }
  for (; extras > 0 && reader.left() > 0; --extras) {
    const int64_t* from = reader.next();
    InputHead head = reader.head();
    bool is_requested = is_kept(head.kind, kept);
    if (is_requested) size += append(from, reader.next(), behind(out, size));
    if (head.kind == OTP_INPUT_KEYWORD) {
      if (is_requested) {
        size += keep_input(&reader, with_storages, behind(out, size));
      } else {
        reader.skip_input();
      }
    }
    extras_kept += is_requested ? 1 : 0;
  }
  if ((inputs_kept | extras_kept) == 0) return 0;
  if (out != nullptr) out[0] = static_cast<int64_t>(inputs_kept | extras_kept << 32);
  return size;
}

// Writes storages to the end of a list, or counts them only.
class Storages {
 public:
  explicit Storages(otp_storage* out) : d_out(out) {}

  // Passes by an input.
  void add(InputReader* reader, int64_t row, int32_t input) {
    InputHead head = reader->head();
    if (head.kind == OTP_INPUT_TENSOR) return add_tensor(reader, head, row, input);
    if (head.kind != OTP_INPUT_TENSOR_LIST) return reader->skip_rest(head);
    for (uint32_t i = 0; i < head.n && reader->left() != 0; ++i) {
      InputHead element = reader->head();
      if (element.kind == OTP_INPUT_TENSOR) {
        add_tensor(reader, element, row, input);
      } else if (element.kind != OTP_INPUT_TENSOR_LIST && element.kind != OTP_INPUT_SCALAR_LIST) {
        reader->skip_rest(element);
      }
    }
  }
  uint64_t size() const { return d_size; }

 private:
  void add_tensor(InputReader* reader, const InputHead& head, int64_t row, int32_t input) {
    if ((head.flags & OTP_INPUT_STORED) == 0) return reader->skip_rest(head);
    reader->skip(uint64_t{head.n} * ((head.flags & OTP_INPUT_STRIDED) != 0 ? 2 : 1));
    if (reader->left() < OTP_STORAGE_WORDS) return reader->skip_storage(head);
    uint64_t address = reader->word(), rest = reader->word();
    if (d_out != nullptr)
      d_out[d_size] = {address, rest & ((uint64_t{1} << 48) - 1), row,
                       input,   static_cast<uint8_t>(rest >> 48), static_cast<uint8_t>(rest >> 56),
                       0};
    ++d_size;
  }

  otp_storage* d_out;
  uint64_t d_size = 0;
};

// In the places of otp_inputs_keep: words that no row was seen to have.
constexpr int64_t kUnknown = -2;

// Hashes of rows; those that share their words with one of the last others take a look instead of a walk.
class Hashes {
 public:
  Hashes(const otp_inputs& inputs, uint32_t parts) : d_inputs(inputs), d_parts(parts), d_known(kKnown) {}

  uint64_t of(uint64_t row) {
    const int64_t offset = d_inputs.offsets[row];
    if (offset < 0) return hash_of(d_inputs, row, d_parts);
    Known& known = d_known[static_cast<uint64_t>(offset) % kKnown];
    if (known.offset != offset) known = {offset, hash_of(d_inputs, row, d_parts)};
    return known.hash;
  }

 private:
  struct Known {
    int64_t offset = -1;
    uint64_t hash = 0;
  };
  static constexpr uint64_t kKnown = 4096;

  const otp_inputs& d_inputs;
  uint32_t d_parts;
  std::vector<Known> d_known;
};

}  // namespace

extern "C" int64_t otp_inputs_number(const otp_inputs* inputs, const uint32_t* names, uint32_t parts,
                                     int32_t* numbers) try {
  Numbers found;
  Hashes hashes(*inputs, parts);
  for (uint64_t row = 0; row < inputs->row_count; ++row) {
    const uint64_t hash = hashes.of(row);
    numbers[row] = found.number_of(names == nullptr ? hash : mixed(hash, names[row]));
  }
  return found.size();
} catch (const std::bad_alloc&) {
  return -1;
}

extern "C" void otp_inputs_texts(const otp_inputs* inputs, uint32_t kind, uint32_t* ids) {
  for (uint64_t row = 0; row < inputs->row_count; ++row)
    ids[row] = inputs->offsets[row] < 0 ? 0 : text_of(*inputs, row, kind);
}

extern "C" uint64_t otp_inputs_keep(const otp_inputs* inputs, uint32_t kept, int64_t* places, int64_t* words,
                                    int64_t* offsets) {
  uint64_t size = 0;
  for (uint64_t row = 0; row < inputs->row_count; ++row) {
    const int64_t offset = inputs->offsets[row];
    const bool has_words = offset >= 0 && static_cast<uint64_t>(offset) < inputs->word_count;
    if (has_words && places[offset] == kUnknown) {
      const uint64_t written = keep_row(*inputs, row, kept, behind(words, size));
      places[offset] = written != 0 ? static_cast<int64_t>(size) : -1;
      size += written;
    }
    if (offsets != nullptr) offsets[row] = has_words ? places[offset] : -1;
  }
  return size;
}

extern "C" uint64_t otp_inputs_storages(const otp_inputs* inputs, otp_storage* storages) {
  Storages found(storages);
  for (uint64_t row = 0; row < inputs->row_count; ++row) {
    if (inputs->offsets[row] < 0) continue;
    InputReader reader(inputs->words, inputs->word_count, inputs->offsets[row]);
    for (uint32_t i = 0; i < reader.inputs() && reader.left() != 0; ++i)
      found.add(&reader, static_cast<int64_t>(row), static_cast<int32_t>(i));
  }
  return found.size();
}
