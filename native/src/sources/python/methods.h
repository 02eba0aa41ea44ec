// Methods of classes that are written in C, as `list.append`: what is called is the class's method with an object of
// it, where a profile function sees the function that is bound to the object.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_METHODS_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_METHODS_H_

#include "source.h"

namespace otp_python {

// In words, of a method_descriptor: no part of the stable ABI, so they are looked for.
extern int g_method_class_at, g_method_definition_at;

// types.MethodType, and what one of them binds to what: borrowed. No part of the stable ABI either.
extern PyTypeObject* g_bound_method;
extern PyObject* (*g_function_of)(PyObject* bound_method);
extern PyObject* (*g_object_of)(PyObject* bound_method);

// Finds these. False, without an exception, where that fails.
bool find_method_fields();

// What the function that is bound to an object has too.
inline const void* definition_of_method(PyObject* method) { return word_of(method, g_method_definition_at); }

// Whether it can be called with that object.
inline bool is_method_of(PyObject* method, PyObject* object) {
  const void* owner = word_of(method, g_method_class_at);
  PyTypeObject* type = Py_TYPE(object);
  return type == owner || PyType_IsSubtype(type, static_cast<PyTypeObject*>(const_cast<void*>(owner))) != 0;
}

// The function that is bound to an object of the class; a new reference, or null with an exception set.
PyObject* bound_method(PyObject* method, PyObject* object);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_METHODS_H_
