#include "methods.h"

#include <dlfcn.h>

#include <cstring>

namespace otp_python {

int g_method_class_at = 0, g_method_definition_at = 0;
PyTypeObject* g_bound_method = nullptr;
PyObject* (*g_function_of)(PyObject*) = nullptr;
PyObject* (*g_object_of)(PyObject*) = nullptr;

namespace {

constexpr int kHead = 2, kWords = 6;  // of it: behind the head of an object; it has as many at least

PyObject* nothing(PyObject*, PyObject*) { Py_RETURN_NONE; }

PyMethodDef g_probe = {"probe", nothing, METH_NOARGS, nullptr};

}  // namespace

bool find_method_fields() {
  Unraising guard;
  PyObject* method = PyDescr_NewMethod(&PyList_Type, &g_probe);
  for (int at = kHead; method != nullptr && at < kWords; ++at) {
    if (word_of(method, at) == &PyList_Type) g_method_class_at = at;
    if (word_of(method, at) == &g_probe) g_method_definition_at = at;
  }
  Py_XDECREF(method);
  g_bound_method = static_cast<PyTypeObject*>(dlsym(RTLD_DEFAULT, "PyMethod_Type"));
  void* function = dlsym(RTLD_DEFAULT, "PyMethod_Function");
  void* object = dlsym(RTLD_DEFAULT, "PyMethod_Self");
  std::memcpy(&g_function_of, &function, sizeof function);
  std::memcpy(&g_object_of, &object, sizeof object);
  bool can_unbind = g_bound_method != nullptr && function != nullptr && object != nullptr;
  return can_unbind && g_method_class_at != 0 && g_method_definition_at != 0;
}

PyObject* bound_method(PyObject* method, PyObject* object) {
  static const auto bind = reinterpret_cast<descrgetfunc>(PyType_GetSlot(&PyMethodDescr_Type, Py_tp_descr_get));
  return bind(method, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
}

}  // namespace otp_python
