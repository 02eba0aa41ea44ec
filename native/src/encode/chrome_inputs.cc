// Inputs as arguments, in the form that Kineto gives them: a list per fact, with an entry per input.
#include "encode/chrome_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "encode/buffer.h"
#include "encode/dtype_names.h"

namespace otp {
namespace {

// More than one number, with what stands around it.
constexpr uint64_t kMaxScalarSize = 2 * kMaxDoubleSize + 8;

// Kineto leaves out what lists of more tensors hold.
constexpr uint32_t kMaxListSize = 30;

bool append(otp_buffer* out, const char* text, uint64_t size) {
  if (!buffer_reserve(out, size)) return false;
  finish(out, put_bytes(cursor(out), text, size));
  return true;
}

template <size_t N>
bool append(otp_buffer* out, const char (&literal)[N]) {
  return append(out, literal, N - 1);
}

JsonText text_of(const otp_names& names, uint32_t id) {
  return id < names.count ? text_at(names, id) : JsonText{nullptr, 0};
}

bool append_quoted(otp_buffer* out, const JsonText& text) {
  if (!buffer_reserve(out, text.size + 2)) return false;
  char* at = put_text(put(cursor(out), "\""), text);
  finish(out, put(at, "\""));
  return true;
}

// --- sizes and strides ---

bool append_words(InputReader* reader, uint32_t count, otp_buffer* out) {
  if (!buffer_reserve(out, 2 + count * (kMaxIntegerSize + 1))) return false;
  char* at = put(cursor(out), "[");
  for (uint32_t i = 0; i < count; ++i) {
    if (i != 0) *at++ = ',';
    at = put_integer(at, static_cast<int64_t>(reader->word()));
  }
  finish(out, put(at, "]"));
  return true;
}

// The strides of a contiguous tensor: each dimension's is the number of elements of those behind it.
bool append_plain_strides(InputReader* reader, uint32_t count, otp_buffer* out) {
  if (!buffer_reserve(out, 2 + count * (kMaxIntegerSize + 1))) return false;
  char* at = put(cursor(out), "[");
  for (uint32_t i = 1; i <= count; ++i) {
    InputReader rest = *reader;
    rest.skip(i);
    uint64_t stride = 1;
    for (uint32_t j = i; j < count; ++j) stride *= std::max<uint64_t>(rest.word(), 1);
    at = put_integer(at, static_cast<int64_t>(stride));
    *at++ = ',';
  }
  if (count != 0) --at;
  reader->skip(count);
  finish(out, put(at, "]"));
  return true;
}

bool append_dims(InputReader* reader, const InputHead& head, otp_buffer* out) {
  if (head.kind != OTP_INPUT_TENSOR) {
    reader->skip_rest(head);
    return append(out, "[]");
  }
  if (!append_words(reader, head.n, out)) return false;
  reader->skip_behind_sizes(head);
  return true;
}

bool append_strides(InputReader* reader, const InputHead& head, otp_buffer* out) {
  if (head.kind != OTP_INPUT_TENSOR || (head.flags & OTP_INPUT_NO_STRIDES) != 0) {
    reader->skip_rest(head);
    return append(out, "[]");
  }
  bool is_strided = (head.flags & OTP_INPUT_STRIDED) != 0;
  if (is_strided) reader->skip(head.n);
  if (!(is_strided ? append_words(reader, head.n, out) : append_plain_strides(reader, head.n, out))) return false;
  reader->skip_storage(head);
  return true;
}

using AppendInput = bool (*)(InputReader*, const InputHead&, otp_buffer*);

// One input, or for a list of tensors a list.
template <AppendInput append_tensor>
bool append_nested(InputReader* reader, const InputHead& head, otp_buffer* out) {
  if (head.kind != OTP_INPUT_TENSOR_LIST || head.n > kMaxListSize) {
    if (head.kind == OTP_INPUT_TENSOR) return append_tensor(reader, head, out);
    reader->skip_rest(head);
    return append(out, "[]");
  }
  if (!append(out, "[")) return false;
  for (uint32_t i = 0; i < head.n; ++i) {
    if (i != 0 && !append(out, ",")) return false;
    InputHead element = reader->head();
    bool is_tensor = element.kind == OTP_INPUT_TENSOR;
    if (!(is_tensor ? append_tensor(reader, element, out) : append(out, "[]"))) return false;
  }
  return append(out, "]");
}

// --- types and values ---

bool append_type(InputReader* reader, const InputHead& head, otp_buffer* out) {
  reader->skip_rest(head);
  const char* name = type_name(head);
  if (!buffer_reserve(out, kMaxTypeNameSize + 2)) return false;
  char* at = put(cursor(out), "\"");
  for (; *name != 0; ++name) *at++ = *name;
  finish(out, put(at, "\""));
  return true;
}

// As torch prints a double: whole numbers with a point behind them, others with 17 digits.
char* put_printed(char* out, double value) {
  if (std::fabs(value) < 0x1p63 && std::trunc(value) == value) {
    out = put_integer(out, static_cast<int64_t>(value));
    *out++ = '.';
    return out;
  }
  if (std::isnan(value)) return put(out, "nan");
  if (std::isinf(value)) return value > 0 ? put(out, "inf") : put(out, "-inf");
#ifdef __cpp_lib_to_chars
  return std::to_chars(out, out + kMaxDoubleSize, value, std::chars_format::general, 17).ptr;
#else
  char text[kMaxDoubleSize + 8];  // libraries without it: the point is then the locale's
  int size = std::snprintf(text, sizeof(text), "%.17g", value);
  for (int i = 0; i < size; ++i) out[i] = text[i] == ',' ? '.' : text[i];
  return out + size;
#endif
}

double double_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

char* put_complex(char* out, InputReader* reader) {
  double real = double_of(reader->word()), imaginary = double_of(reader->word());
  out = put_printed(out, real);
  if (!(imaginary < 0)) *out++ = '+';
  out = put_printed(out, imaginary);
  *out++ = 'j';
  return out;
}

// kMaxScalarSize bytes.
char* put_scalar(char* out, InputReader* reader, const InputHead& head) {
  switch (head.kind) {
    case OTP_INPUT_INT:
      return put_integer(out, static_cast<int64_t>(reader->word()));
    case OTP_INPUT_DOUBLE:
      return put_printed(out, double_of(reader->word()));
    case OTP_INPUT_BOOL:
      return head.n != 0 ? put(out, "True") : put(out, "False");
    case OTP_INPUT_COMPLEX:
      return put_complex(out, reader);
    default:
      return out;
  }
}

bool append_value(InputReader* reader, const InputHead& head, otp_buffer* out) {
  bool is_list = head.kind == OTP_INPUT_SCALAR_LIST;
  if (!buffer_reserve(out, 4 + kMaxScalarSize * (is_list ? head.n : 1))) return false;
  char* at = put(cursor(out), "\"");
  if (is_list) {
    *at++ = '[';
    for (uint32_t i = 0; i < head.n; ++i) {
      if (i != 0) at = put(at, ", ");
      InputHead element = reader->head();
      at = put_scalar(at, reader, element);
    }
    *at++ = ']';
  } else if (head.kind == OTP_INPUT_TENSOR || head.kind == OTP_INPUT_TENSOR_LIST) {
    reader->skip_rest(head);
  } else {
    at = put_scalar(at, reader, head);
  }
  finish(out, put(at, "\""));
  return true;
}

// "key":[..],  with an entry for each input; leaves the reader behind the inputs.
template <AppendInput append_one, size_t N>
bool append_list(InputReader* reader, const char (&key)[N], otp_buffer* out) {
  if (!append(out, key)) return false;
  for (uint32_t i = 0; i < reader->inputs(); ++i) {
    if (i != 0 && !append(out, ",")) return false;
    if (!append_one(reader, reader->head(), out)) return false;
  }
  return append(out, "],");
}

// --- extras ---

char* put_json_scalar(char* out, InputReader* reader, const InputHead& head) {
  if (head.kind == OTP_INPUT_BOOL) return head.n != 0 ? put(out, "true") : put(out, "false");
  if (head.kind == OTP_INPUT_INT) return put_scalar(out, reader, head);
  if (head.kind == OTP_INPUT_DOUBLE) return put_double(out, double_of(reader->word()));
  if (head.kind != OTP_INPUT_COMPLEX) return put(out, "null");
  *out++ = '"';
  out = put_scalar(out, reader, head);
  *out++ = '"';
  return out;
}

bool append_json_scalar(InputReader* reader, const InputHead& head, const otp_names& names, otp_buffer* out) {
  if (head.kind == OTP_INPUT_STRING) return append_quoted(out, text_of(names, head.n));
  if (!buffer_reserve(out, kMaxScalarSize)) return false;
  finish(out, put_json_scalar(cursor(out), reader, head));
  return true;
}

bool append_json(InputReader* reader, const InputHead& head, const otp_names& names, otp_buffer* out) {
  if (head.kind != OTP_INPUT_SCALAR_LIST) return append_json_scalar(reader, head, names, out);
  if (!append(out, "[")) return false;
  for (uint32_t i = 0; i < head.n; ++i) {
    if (i != 0 && !append(out, ",")) return false;
    if (!append_json_scalar(reader, reader->head(), names, out)) return false;
  }
  return append(out, "]");
}

bool has_value(const InputHead& head) {
  return head.kind != OTP_INPUT_OTHER && head.kind != OTP_INPUT_TENSOR && head.kind != OTP_INPUT_TENSOR_LIST;
}

// "k":3,  -- a keyword input is an argument of its own; of tensors nothing is told, as by Kineto.
bool append_keyword(InputReader* reader, uint32_t keyword, const otp_names& names, otp_buffer* out) {
  InputHead head = reader->head();
  if (!has_value(head)) {
    reader->skip_rest(head);
    return true;
  }
  return append_quoted(out, text_of(names, keyword)) && append(out, ":") && append_json(reader, head, names, out) &&
         append(out, ",");
}

// A text that holds one entry by line, each entry with the separator behind it; the text is escaped already.
bool append_entries(const JsonText& text, char separator, otp_buffer* out) {
  if (!buffer_reserve(out, text.size + 4)) return false;
  char* at = put(cursor(out), "\"");
  for (uint64_t i = 0; i < text.size; ++i) {
    if (text.data[i] != '\\' || i + 1 == text.size) {
      *at++ = static_cast<char>(text.data[i]);
    } else if (text.data[++i] == 'n') {
      *at++ = separator;
    } else {
      *at++ = '\\';
      *at++ = static_cast<char>(text.data[i]);
    }
  }
  *at++ = separator;
  finish(out, put(at, "\","));
  return true;
}

bool append_extra(InputReader* reader, const otp_names& names, otp_buffer* out) {
  InputHead head = reader->head();
  switch (head.kind) {
    case OTP_INPUT_KEYWORD:
      return append_keyword(reader, head.n, names, out);
    case OTP_INPUT_CALL_STACK:
      return append(out, "\"Call stack\":") && append_entries(text_of(names, head.n), ';', out);
    case OTP_INPUT_MODULE_HIERARCHY:
      return append(out, "\"Module Hierarchy\":") && append_entries(text_of(names, head.n), '.', out);
    default:
      return true;
  }
}

// What a label was given beside its name, which Kineto does not tell.
bool append_label(InputReader reader, const otp_names& names, otp_buffer* out) {
  InputHead head = reader.head();
  if (head.kind != OTP_INPUT_STRING) return true;
  return append(out, "\"label args\":") && append_quoted(out, text_of(names, head.n)) && append(out, ",");
}

// Leaves the reader behind the inputs and extras.
bool append_formatted(InputReader* moving, const otp_names& names, otp_buffer* out) {
  InputReader& end = *moving;
  const InputReader reader = end;
  if (reader.inputs() != 0) {
    InputReader types = reader, values = reader, strides = reader;
    bool ok = append_list<append_value>(&values, "\"Concrete Inputs\":[", out) &&
              append_list<append_type>(&types, "\"Input type\":[", out) &&
              append_list<append_nested<append_strides>>(&strides, "\"Input Strides\":[", out) &&
              append_list<append_nested<append_dims>>(&end, "\"Input Dims\":[", out) &&
              append_label(reader, names, out);
    if (!ok) return false;
  }
  for (uint32_t i = reader.extras(); i > 0 && end.left() != 0; --i)
    if (!append_extra(&end, names, out)) return false;
  return true;
}

// Where to look first. Of the words that every row has: the counts and one for each input, of which the first two tell
// the type and the first size of a tensor. What is alike in these takes the slots behind.
uint64_t slot_of(const int64_t* words, uint64_t count) {
  const uint64_t own = std::min<uint64_t>({1 + (static_cast<uint64_t>(words[0]) & UINT32_MAX), count, 8});
  uint64_t hash = 0;
  for (uint64_t i = 0; i < own; ++i) hash = (hash ^ static_cast<uint64_t>(words[i])) * 0x9E3779B97F4A7C15u;
  return hash >> 32;
}

}  // namespace

WrittenInputs::Text WrittenInputs::find(const int64_t* words, uint64_t count) const {
  uint64_t at = slot_of(words, count);
  for (uint64_t i = 0; i < kProbes; ++i, ++at) {
    const Slot& slot = d_slots[at % kSlots];
    if (slot.words == nullptr) break;
    // The words say themselves how many they are, so as many that are equal are all.
    if (slot.count <= count && std::memcmp(slot.words, words, slot.count * sizeof *words) == 0) return slot.text;
  }
  return {0, 0};
}

void WrittenInputs::add(const int64_t* words, const int64_t* end, uint64_t text_at, uint64_t text_size) {
  const auto count = static_cast<uint64_t>(end - words);
  uint64_t at = slot_of(words, count);
  for (uint64_t i = 0; i < kProbes; ++i, ++at) {
    Slot& slot = d_slots[at % kSlots];
    if (slot.words != nullptr) continue;
    slot = {words, count, {text_at, text_size}};
    return;
  }
}

bool append_input_arguments(const int64_t* words, uint64_t count, const otp_names& names, WrittenInputs* written,
                            otp_buffer* out) {
  InputReader reader(words, count, 0);
  if (count == 0) return append_formatted(&reader, names, out);
  const auto [at, size] = written->find(words, count);
  if (size != 0) {
    if (!buffer_reserve(out, size + 1)) return false;
    finish(out, put(put_bytes(cursor(out), out->data + at, size), ","));
    return true;
  }
  const uint64_t before = out->size;
  if (!append_formatted(&reader, names, out)) return false;
  // What ends with the last word may have been cut short there, and mean more elsewhere.
  if (reader.left() != 0 && out->size != before) written->add(words, reader.next(), before, out->size - before - 1);
  return true;
}

}  // namespace otp
