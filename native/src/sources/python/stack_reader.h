// Copies the stacks of Python's threads while they run: no lock of Python's, no allocation, bounded time, any thread.
//
// The interpreter may free and reuse whatever is read here at any moment, so nothing of it is followed: all is copied
// by process_vm_readv from the own process, where a bad address is an error and no signal. What was copied is believed
// only as far as it proves itself: a stack is copied twice, and kept from its outermost call as far as both copies
// agree; the names of a call count only if its frame still runs the same code afterwards, and the code is still the
// same object. What a thread did between both copies and undid again is not seen.
//
// stack_layout.h finds out where the interpreter keeps all this. Before that, nothing here may be called.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace otp_python {

constexpr int kNone = -1;

// Where the fields are, in bytes; kNone: this version has none.
struct StackLayout {
  uintptr_t interpreter = 0, code_type = 0, text_type = 0, bytes_type = 0;
  int first_thread = kNone;                               // of the interpreter
  int thread_frame = kNone, thread_frame_holder = kNone;  // of a thread: the frame, or what points to it there
  int thread_ident = kNone, thread_tid = kNone, pthread_tid = kNone;  // the system's id: of the thread, or of pthread_t
  int frame_code = kNone, frame_caller = kNone, frame_instruction = kNone, frame_owner = kNone;
  int code_file = kNone, code_name = kNone, code_lines = kNone, code_first_line = kNone;
  int code_instructions =
      kNone;  // with it the line table is that of Python 3.11; without it, an index and that of 3.10
  int text_flags_shift = kNone, text_head = kNone;
};
extern StackLayout g_stack_layout;

// Copies memory of the own process. False, with errno: it is not there, or that is not permitted.
bool copy_memory(uintptr_t from, void* to, size_t bytes);

struct PythonThreadCopy {
  uintptr_t state;
  uintptr_t next;
  uint64_t ident;
  uint32_t os_tid;  // 0: not known
};
// The newest thread, and the one that is older than it; false where there is none, or it is gone.
bool copy_first_thread(PythonThreadCopy* out);
bool copy_next_thread(PythonThreadCopy* thread);
bool copy_thread_of(uint32_t os_tid, PythonThreadCopy* out);

struct CallCopy {
  uintptr_t frame;
  uintptr_t code;
  uintptr_t instruction;

  bool operator==(const CallCopy& other) const {
    return frame == other.frame && code == other.code && instruction == other.instruction;
  }
};

struct StackCopy {
  static constexpr uint32_t kMost = 512;
  CallCopy calls[kMost];  // the innermost first
  uint32_t count;
  bool is_whole;  // else the innermost calls changed meanwhile, and only those around them are here
  bool is_cut;    // there are more calls around these
};
// Some microseconds and 0.7 us a call; needs twice a StackCopy of the caller's own stack.
void copy_stack(const PythonThreadCopy& thread, StackCopy* out);

// In UTF-8, without control characters; of what is too long, the end.
struct TextCopy {
  static constexpr uint32_t kMost = 512;  // characters
  char data[4 * kMost];
  uint32_t size;

  std::string_view view() const { return {data, size}; }
};

struct CallText {
  TextCopy file, name;
  int line;
};
// Some 10 us. False where the call has ended meanwhile.
bool copy_text(const CallCopy& call, CallText* out);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_
