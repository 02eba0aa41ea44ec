// What the tracer needs of the interpreter that is no part of the stable ABI: found when the extension is loaded.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_

#include "source.h"

namespace otp_python {

using ProfileFunction = int (*)(PyObject*, PyFrameObject*, int, PyObject*);

// Null where there is none.
extern int (*g_set_profile)(PyThreadState*, ProfileFunction, PyObject*);
extern PyFrameObject* (*g_frame_of)(PyThreadState*);
extern PyFrameObject* (*g_caller_of)(PyFrameObject*);
extern int (*g_instruction_of)(PyFrameObject*);  // since Python 3.11
extern PyThreadState* (*g_next_thread)(PyThreadState*);

extern PyObject* (*g_variable_of)(PyFrameObject*, const char*);  // since Python 3.12

// False where one of them is missing that every way of tracing needs: all but the first and the last.
bool find_interpreter_functions();

// The newest thread of the interpreter, complete, and with it all that g_next_thread leads to.
PyThreadState* first_thread();

// The code that a frame runs; borrowed from it. Where a frame has it is no part of any API: it is believed to be where
// the versions that have profile functions have it, if it is found there.
enum class CodePath {
  kBehind,   // in what the frame points to (Python 3.11)
  kInFrame,  // in the frame (3.10)
  kUnknown,
};
extern CodePath g_code_path;
constexpr int kCodeAt = 4;  // in words; what the frame points to is at the word before
// Null where it is not known where that is.
inline PyObject* find_code(PyFrameObject* frame) {
  if (__builtin_expect(g_code_path == CodePath::kUnknown, 0)) return nullptr;
  const void* holder = g_code_path == CodePath::kBehind ? word_of(frame, kCodeAt - 1) : frame;
  return static_cast<PyObject*>(const_cast<void*>(word_of(holder, kCodeAt)));
}
PyObject* code_of(PyFrameObject* frame);
// The instruction at which a frame stands, in bytes.
long instruction_of(PyFrameObject* frame);
// Looks for what these need, on a thread that runs Python code.
void find_code_of_frame();

// The ids of a thread: of threading.get_ident(), and of the system (0: not known, which is so before Python 3.11).
struct ThreadIds {
  unsigned long ident;
  unsigned long system;
};
// Looks on the calling thread for where the interpreter's state of a thread has them.
void find_thread_ids();
// False where that was not found.
bool can_see_thread_ids();
ThreadIds ids_of(PyThreadState* thread);

// 0, or -1 where an audit hook of the program's forbids it; the thread's exception, if it has one, stays as it is.
int set_profile(PyThreadState* thread, ProfileFunction function, PyObject* object);

// Finds where a thread has its profile function, on the calling one, which has this one.
void find_profile_function(ProfileFunction known);
bool can_see_profile_functions();
// Of a thread, where they can be seen.
ProfileFunction profile_function_of(PyThreadState* thread);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_
