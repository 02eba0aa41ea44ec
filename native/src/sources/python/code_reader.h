// Copies what the interpreter knows of a code while threads run: its file, its name and its lines. As stack_reader.h,
// and under the same conditions.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "stack_reader.h"

namespace otp_python {

// What tells a code from another one that comes to have its address.
struct CodeHead {
  uintptr_t file, name, lines;
  int64_t instructions;  // in bytes; -1: this version does not say
  int first_line;

  bool operator==(const CodeHead& other) const {
    return file == other.file && name == other.name && lines == other.lines && instructions == other.instructions &&
           first_line == other.first_line;
  }
};
constexpr size_t kMostOfCodeHead = 256;
// Of a code, as it has to be copied for parse_code. At most kMostOfCodeHead.
size_t code_head_bytes();
// False where what was copied is no code.
bool parse_code(const char* copied, CodeHead* out);
bool copy_code(uintptr_t code, CodeHead* out);

// In UTF-8, without control characters; of what is too long, the end.
struct TextCopy {
  static constexpr uint32_t kMost = 512;  // characters
  char data[4 * kMost];
  uint32_t size;

  std::string_view view() const { return {data, size}; }
};

// False where there is no such text any more.
bool copy_string(uintptr_t object, TextCopy* out);

// Where a call is in its code, in bytes of instructions; below 0: before the first.
int64_t offset_of(const CallCopy& call);
int line_at(const CodeHead& code, int64_t offset);

struct CallText {
  TextCopy file, name;
  int line;
};
// Some 10 us. False where the call has ended meanwhile.
bool copy_text(const CallCopy& call, CallText* out);

// Instructions up to `end` that have this line.
struct LineRange {
  int64_t end;
  int line;
};
// All of a code, in order. May throw std::bad_alloc.
std::vector<LineRange> copy_lines(const CodeHead& code);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_
