// Calls of modules: torch's function for them is called by its vectorcall, and while somebody follows it, that is ours.
//
// So nothing is added to a module, a class or torch's tables of hooks: the function, its code and its place are as they
// were, torch takes its path for modules without hooks, and compiled code has nothing to guard.
#include <dlfcn.h>

#include "source.h"

namespace otp_python {

namespace {

using Vectorcall = PyObject* (*)(PyObject* function, PyObject* const* args, size_t flags, PyObject* keywords);

constexpr size_t kMayWriteBefore = size_t{1} << (8 * sizeof(size_t) - 1);  // PY_VECTORCALL_ARGUMENTS_OFFSET

PyObject* g_function = nullptr;   // the one that is followed; owned
Vectorcall g_original = nullptr;  // what it was called by; stays, for whoever took ours for its own

enum Followed : uint8_t { kNothing, kModule, kRoot };

Followed begin(PyObject* module) {
  PythonThread* thread = python_thread();
  if (thread == nullptr) return kNothing;
  Unraising guard;
  if (active_sessions(OTP_EVENT_MODULE) != 0 && begin_module(thread, module)) return kModule;
  return begin_root(thread, module) ? kRoot : kNothing;
}

// Not asked whether anybody records: what is open ends.
void end(PyObject* module, Followed followed) {
  PythonThread* thread = python_thread();
  if (thread == nullptr) return;
  PyObject* type = PyErr_Occurred();
  Py_XINCREF(type);
  {
    Unraising guard;
    Leaving leaving(type);
    if (followed == kModule) end_module(thread, module, leaving);
    if (followed == kRoot) end_root(thread, module, leaving.flags, leaving.error, leaving.error_size);
  }
  Py_XDECREF(type);
  show_error();
}

PyObject* call(PyObject* function, PyObject* const* args, size_t flags, PyObject* keywords) {
  Followed followed = kNothing;
  bool is_recorded = active_sessions(OTP_EVENT_MODULE) != 0 || active_sessions(OTP_EVENT_PHASE) != 0;
  if (is_recorded && (flags & ~kMayWriteBefore) != 0) followed = begin(args[0]);
  PyObject* result = g_original(function, args, flags, keywords);
  if (followed != kNothing) end(args[0], followed);
  return result;
}

template <typename Function>
Function of_interpreter(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Since Python 3.12 there are functions for that. Before, it is the word of the function that all functions of Python's
// have alike, or ours; null where this interpreter's have none.
void** word_of_vectorcall(PyObject* function) {
  auto usual = of_interpreter<void*>("_PyFunction_Vectorcall");
  PyObject* size = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(function)), "__basicsize__");
  size_t words = size == nullptr || usual == nullptr ? 0 : PyLong_AsSize_t(size) / sizeof(void*);
  Py_XDECREF(size);
  auto** word = reinterpret_cast<void**>(function);
  for (size_t at = 0; at < words; ++at)
    if (word[at] == usual || word[at] == reinterpret_cast<void*>(call)) return &word[at];
  return nullptr;
}

// Has a function called by `now` where it is called by `before`, null for whatever it is; what it was called by until
// then, null where nothing was changed.
Vectorcall exchange(PyObject* function, Vectorcall before, Vectorcall now) {
  auto set = of_interpreter<void (*)(PyObject*, Vectorcall)>("PyFunction_SetVectorcall");
  auto get = of_interpreter<Vectorcall (*)(PyObject*)>("PyVectorcall_Function");
  void** word = set == nullptr ? word_of_vectorcall(function) : nullptr;
  if (set == nullptr && word == nullptr) return nullptr;
  auto found = word == nullptr ? get(function) : reinterpret_cast<Vectorcall>(*word);
  if (before != nullptr && found != before) return nullptr;
  if (word == nullptr) {
    set(function, now);
  } else {
    *word = reinterpret_cast<void*>(now);
  }
  return found;
}

// Where somebody else has put something in its place, which calls ours for good, it is followed for good.
void leave() {
  PyObject* function = g_function;
  if (function == nullptr || exchange(function, call, g_original) == nullptr) return;
  g_function = nullptr;
  Py_DECREF(function);
}

// follow_calls(function); see _python.pyi.
PyObject* follow_calls(PyObject*, PyObject* function) {
  if (function == g_function) Py_RETURN_TRUE;
  leave();
  if (function == Py_None) Py_RETURN_TRUE;
  if (g_function != nullptr) Py_RETURN_FALSE;
  Vectorcall before = exchange(function, nullptr, call);
  if (before == nullptr) Py_RETURN_FALSE;
  g_original = before;
  Py_INCREF(function);
  g_function = function;
  Py_RETURN_TRUE;
}

PyMethodDef g_methods[] = {{"follow_calls", follow_calls, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_module_calls(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
