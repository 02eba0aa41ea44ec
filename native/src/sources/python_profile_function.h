// What the tracer needs of the interpreter that is no part of the stable ABI: found when the extension is loaded.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_

#include "python_source.h"

namespace otp_python {

using ProfileFunction = int (*)(PyObject*, PyFrameObject*, int, PyObject*);

// Null where there is none.
extern int (*g_set_profile)(PyThreadState*, ProfileFunction, PyObject*);
extern PyFrameObject* (*g_frame_of)(PyThreadState*);
extern PyFrameObject* (*g_caller_of)(PyFrameObject*);
extern PyThreadState* (*g_first_thread)(PyInterpreterState*);
extern PyThreadState* (*g_next_thread)(PyThreadState*);

// False where one of them is missing.
bool find_interpreter_functions();

inline PyThreadState* first_thread() { return g_first_thread(PyInterpreterState_Get()); }

// 0, or -1 where an audit hook of the program's forbids it; the thread's exception, if it has one, stays as it is.
int set_profile(PyThreadState* thread, ProfileFunction function, PyObject* object);

// Finds where a thread has its profile function, on the calling one, which has this one.
void find_profile_function(ProfileFunction known);
bool can_see_profile_functions();
// Of a thread, where they can be seen.
ProfileFunction profile_function_of(PyThreadState* thread);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_PROFILE_FUNCTION_H_
