// Python code that is run for the recorder while compiled code of the program's runs: dynamo would compile it too, and
// what it calls of other packages, and count that.
#include "source.h"

namespace otp_python {

namespace {

PyObject* g_set_callback = nullptr;  // dynamo's: sets what looks at the thread's functions, returns what did; owned

// Around an exception that is on its way.
PyObject* set_callback(PyObject* callback) {
  Unraising guard;
  PyObject* before = PyObject_CallFunctionObjArgs(g_set_callback, callback, nullptr);
  if (before == nullptr) forget_error();
  return before;
}

// follow_compiler(set_callback); see _python.pyi.
PyObject* follow_compiler(PyObject*, PyObject* function) {
  PyObject* before = g_set_callback;
  Py_INCREF(function);
  g_set_callback = function;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {{"follow_compiler", follow_compiler, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* call_uncompiled(PyObject* function, PyObject* first, PyObject* second) {
  if (function == nullptr) return nullptr;
  Py_INCREF(function);  // it may be replaced meanwhile
  PyObject* before = g_set_callback == nullptr ? nullptr : set_callback(Py_None);
  PyObject* result = PyObject_CallFunctionObjArgs(function, first, second, nullptr);
  if (before != nullptr && before != Py_None) Py_XDECREF(set_callback(before));
  Py_XDECREF(before);
  Py_DECREF(function);
  return result;
}

int add_uncompiled(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
