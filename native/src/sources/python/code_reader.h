// Copies what the interpreter knows of a code while threads run: its file, its name and its lines. As stack_reader.h,
// and under the same conditions.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_

#include <cstddef>
#include <cstdint>
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

// False where there is no such text any more.
bool copy_string(uintptr_t object, TextCopy* out);

// Where a call is in its code, in bytes of instructions; below 0: before the first.
int64_t offset_of(const CallCopy& call);
int line_at(const CodeHead& code, int64_t offset);

// Instructions up to `end` that have this line.
struct LineRange {
  int64_t end;
  int line;
};
// All of a code, in order. May throw std::bad_alloc.
std::vector<LineRange> copy_lines(const CodeHead& code);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_CODE_READER_H_
