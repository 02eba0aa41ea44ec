#include "running_frame.h"

namespace otp_python {

FramePath g_frame_path = FramePath::kObject;
int g_frame_at = 0;

namespace {

constexpr int kFrameOfObject = 3;  // PyFrameObject: behind its head and its caller
constexpr int kFrameOfState = 7;   // PyThreadState of 3.12: what points to the frame
constexpr int kMostWords = 24;     // of a later one that are looked at: it has many more
constexpr uintptr_t kTags = 3;     // of a reference in a frame
constexpr long kFirst = 0x030C0000, kIndirectUpTo = 0x030D0000, kUnknownFrom = 0x030F0000;

long version() {
  PyObject* number = PySys_GetObject("hexversion");
  return number == nullptr ? 0 : PyLong_AsLong(number);
}

// A frame begins with its code.
bool runs(const void* frame, PyFrameObject* object) {
  auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(object));
  Py_DECREF(code);
  return frame != nullptr &&
         (reinterpret_cast<uintptr_t>(word_of(frame, 0)) & ~kTags) == reinterpret_cast<uintptr_t>(code);
}

}  // namespace

void find_running_frame() {
  PyFrameObject* object = PyEval_GetFrame();
  PyThreadState* thread = PyThreadState_Get();
  long known = version();
  if (object == nullptr || known < kFirst || known >= kUnknownFrom) return;
  const void* frame = word_of(object, kFrameOfObject);
  if (!runs(frame, object)) return;
  if (known < kIndirectUpTo) {
    if (word_of(word_of(thread, kFrameOfState), 0) != frame) return;
    g_frame_at = kFrameOfState;
    g_frame_path = FramePath::kIndirect;
    return;
  }
  for (int at = 0; at < kMostWords; ++at) {
    if (word_of(thread, at) != frame) continue;
    g_frame_at = at;
    g_frame_path = FramePath::kDirect;
    return;
  }
}

uintptr_t running_object(PyThreadState* thread) {
  PyFrameObject* frame = g_frame_of(thread);
  Py_XDECREF(frame);  // it stays as long as what it stands for runs
  return identity_of(frame);
}

uintptr_t identity_of_frame(PyFrameObject* frame) {
  return identity_of(g_frame_path == FramePath::kObject ? frame : word_of(frame, kFrameOfObject));
}

}  // namespace otp_python
