// Which frame a thread is in, without an object for it: what a callback of sys.monitoring is not told.
//
// The interpreter's own frames are no part of any API. Where its state of a thread points to the innermost one is
// looked for when the extension is loaded, and believed only where it leads to the code that is known to run there. On
// an interpreter where it is not found the objects of frames stand for them, which are as good and cost more.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_FRAME_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_FRAME_H_

#include "methods.h"
#include "profile_function.h"

namespace otp_python {

enum class FramePath {
  kObject,    // by the object of the frame
  kDirect,    // the thread's state points to it (since Python 3.13)
  kIndirect,  // to what points to it (Python 3.12)
};
extern FramePath g_frame_path;
extern int g_frame_at;  // in the thread's state, in words

// Looks where that is, on a thread that runs Python code.
void find_running_frame();

// The identity of a frame as long as it is there; of a generator, as long as that is there. A multiple of 16: all are
// at multiples of 8, and below 2^62.
inline uintptr_t identity_of(const void* frame) { return reinterpret_cast<uintptr_t>(frame) << 1; }

uintptr_t running_object(PyThreadState* thread);

inline uintptr_t running_frame(PyThreadState* thread) {
  if (__builtin_expect(g_frame_path == FramePath::kObject, 0)) return running_object(thread);
  const void* found = word_of(thread, g_frame_at);
  return identity_of(g_frame_path == FramePath::kDirect ? found : word_of(found, 0));
}

// The same of a frame that is known by its object.
uintptr_t identity_of_frame(PyFrameObject* frame);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_FRAME_H_
