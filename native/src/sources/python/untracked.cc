// Classes of objects that Python's garbage collector neither counts nor visits.
//
// A drain of 500 steps has thousands of objects alive at once. If the collector counts them, it runs every 700 of them,
// finds all of them alive, and comes to a full collection: 170 ms in a program that had none (measured; a step of 4
// ms). A class statement cannot make such a class: from Python 3.10 on every class that it makes is counted, whatever
// it is derived from. Objects in a cycle of references are never freed.
#include "source.h"

#include <structmember.h>

namespace otp_python {
namespace {

template <int kFields>
struct Untracked {
  PyObject_HEAD PyObject* fields[kFields];
};

template <int kFields>
void untracked_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  for (PyObject* field : reinterpret_cast<Untracked<kFields>*>(self)->fields) Py_XDECREF(field);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

template <int kFields>
PyObject* untracked_of(const char* name, PyMemberDef* members) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(untracked_dealloc<kFields>)},
                         {Py_tp_members, members},
                         {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Untracked<kFields>), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

// untracked(names) -> type: names are the full name of the class and those of its attributes, which are unset at first.
// Methods are added afterwards. The names are never freed: the class points at them.
PyObject* untracked(PyObject*, PyObject* names) {
  constexpr Py_ssize_t kMost = 24;
  Py_ssize_t count = PyTuple_Size(names);
  if (count < 1 || count > kMost + 1)
    return PyErr_Format(PyExc_ValueError, "%zd names: a name, and at most %zd of attributes", count, kMost);
  const char* texts[kMost + 1];
  for (Py_ssize_t i = 0; i < count; ++i) {
    texts[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, i), nullptr);
    if (texts[i] == nullptr) return nullptr;
  }
  PyMemberDef members[kMost + 1]{};
  for (Py_ssize_t i = 1; i < count; ++i) {
    auto offset = offsetof(Untracked<kMost>, fields) + static_cast<size_t>(i - 1) * sizeof(PyObject*);
    members[i - 1] = {texts[i], T_OBJECT_EX, static_cast<Py_ssize_t>(offset), 0, nullptr};
  }
  Py_INCREF(names);
  return count <= 9    ? untracked_of<8>(texts[0], members)
         : count <= 17 ? untracked_of<16>(texts[0], members)
                       : untracked_of<kMost>(texts[0], members);
}

PyMethodDef g_methods[] = {{"untracked", untracked, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_untracked(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
