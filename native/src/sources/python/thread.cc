// What is kept of a thread is kept in Python's dictionary of that thread: it holds Python objects, and that dictionary
// is emptied when the thread ends, with Python's lock held. A thread_local of C++ would be destroyed without the lock.
#include <new>

#include "source.h"

namespace otp_python {

namespace {

constexpr char kKey[] = "otel_torchprof._native._python.thread";

// The way around the dictionary. Of one thread of the system, which may get several of Python's one after the other
// (a thread of torch's that calls into Python now and then).
thread_local PythonThread* t_thread = nullptr;

void free_thread(PyObject* capsule) {
  auto* thread = static_cast<PythonThread*>(PyCapsule_GetPointer(capsule, kKey));
  if (t_thread == thread) t_thread = nullptr;
  forget_loop(thread);
  Py_XDECREF(thread->variables);
  for (const OpenModule& open : thread->modules) Py_DECREF(open.names);
  delete thread;
}

}  // namespace

PythonThread* python_thread() {
  if (__builtin_expect(t_thread != nullptr, 1)) return t_thread;
  PyObject* dictionary = PyThreadState_GetDict();
  auto* thread = dictionary == nullptr ? nullptr : new (std::nothrow) PythonThread;
  if (thread == nullptr) return nullptr;
  PyObject* capsule = PyCapsule_New(thread, kKey, free_thread);
  if (capsule == nullptr) {
    delete thread;
    return nullptr;
  }
  thread->state = reinterpret_cast<uintptr_t>(PyThreadState_Get());
  t_thread = thread;
  int status = PyDict_SetItemString(dictionary, kKey, capsule);
  Py_DECREF(capsule);  // frees the thread where the dictionary did not take it
  return status == 0 ? thread : nullptr;
}

}  // namespace otp_python
