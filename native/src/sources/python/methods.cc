#include "methods.h"

namespace otp_python {

int g_method_class_at = 0, g_method_definition_at = 0;

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
  return g_method_class_at != 0 && g_method_definition_at != 0;
}

PyObject* bound_method(PyObject* method, PyObject* object) {
  static const auto bind = reinterpret_cast<descrgetfunc>(PyType_GetSlot(&PyMethodDescr_Type, Py_tp_descr_get));
  return bind(method, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
}

}  // namespace otp_python
