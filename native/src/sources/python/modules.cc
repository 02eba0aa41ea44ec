// Modules: calls of torch.nn.Module, as events; module_calls.cc says of each when it begins and ends.
//
// Python code is run only for a module that is not in the table of names where it should be.
#include <cstddef>
#include <cstring>
#include <new>

#include "source.h"

namespace otp_python {

namespace {

PyObject* g_names = nullptr;  // by a module's id: the table of names in which it stands
PyObject* g_find = nullptr;   // makes a table, or finds another one

// Ends a module that is off its thread already, and the phase that began with it.
void close(PythonThread* thread, const OpenModule& open, uint8_t flags, const char* error, uint32_t error_size) {
  if (open.is_root) flags |= OTP_FLAG_ROOT;
  if (open.recorded) g_api->end(open.key, flags, error, error_size);
  if (open.is_top) end_root(thread, static_cast<PyObject*>(const_cast<void*>(open.key)), flags, error, error_size);
  Py_DECREF(open.names);
}

void close_innermost(PythonThread* thread, uint8_t flags, const char* error, uint32_t error_size) {
  OpenModule open = thread->modules.back();
  thread->modules.pop_back();
  close(thread, open, flags, error, error_size);
}

// The table with the module's name: the one that `inside` is in, where the module is called inside another one. A new
// reference; null, with or without an exception set, when there is none.
PyObject* table_of(PyObject* module, PyObject* id, PyObject* inside) {
  if (g_names == nullptr) return nullptr;
  PyObject* table = inside;
  if (inside == nullptr) table = PyDict_GetItemWithError(g_names, id);
  if (table != nullptr && (inside == nullptr || PyDict_GetItemWithError(inside, id) != nullptr)) {
    Py_INCREF(table);
    return table;
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  table = call_uncompiled(g_find, module, inside == nullptr ? Py_None : inside);
  if (table == nullptr || PyDict_Check(table)) return table;
  Py_DECREF(table);
  PyErr_SetString(PyExc_TypeError, "a table of names is a dict");
  return nullptr;
}

// What a table holds for a module is its name, or a tuple: its name and the id of the wrapper that is called in its
// place. Called by that, it is no event of its own. Borrowed; null where there is none.
PyObject* name_in(PyObject* table, PyObject* id, const OpenModule* inside) {
  PyObject* entry = PyDict_GetItemWithError(table, id);
  if (entry == nullptr || !PyTuple_Check(entry)) return entry;
  PyObject* wrapper = PyTuple_GetItem(entry, 1);
  bool by_wrapper = wrapper != nullptr && inside != nullptr && PyLong_AsVoidPtr(wrapper) == inside->key;
  return by_wrapper ? nullptr : PyTuple_GetItem(entry, 0);
}

bool record(PyObject* module, PyObject* text) {
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* name = utf8(text, &size, &owner);
  if (name == nullptr) return false;
  otp_begin_args event = {};
  event.key = module;
  event.name = name;
  event.name_size = static_cast<uint32_t>(size);
  event.scope = kUserScope;
  event.kind = OTP_EVENT_MODULE;
  event.nests = 1;
  event.sequence_nr = -1;
  bool recorded = g_api->begin(&event) != 0;
  Py_XDECREF(owner);
  return recorded;
}

// Takes the table over, whatever happens.
bool open_module(PythonThread* thread, PyObject* module, PyObject* name, PyObject* table) {
  bool is_root = thread->modules.empty() || thread->modules.back().names != table;
  bool is_top = thread->modules.size() <= modules_around(thread) && begin_root(thread, module);
  bool recorded = name != nullptr && record(module, name);
  try {
    thread->modules.push_back({module, table, is_root, is_top, recorded});
  } catch (const std::bad_alloc&) {
    if (recorded) g_api->end(module, OTP_FLAG_UNFINISHED, nullptr, 0);
    if (is_top) end_root(thread, module, OTP_FLAG_UNFINISHED, nullptr, 0);
    Py_DECREF(table);
    return false;
  }
  return true;
}

OpenModule* innermost(PythonThread* thread) { return thread->modules.empty() ? nullptr : &thread->modules.back(); }

bool begin_inside(PythonThread* thread, PyObject* module, PyObject* id) {
  OpenModule* inside = innermost(thread);
  PyObject* table = table_of(module, id, inside == nullptr ? nullptr : inside->names);
  if (table == nullptr) return false;
  // Finding the table may have run any code, which may have called modules: the innermost one can have moved.
  PyObject* name = name_in(table, id, innermost(thread));
  Py_XINCREF(name);
  bool opened = open_module(thread, module, name, table);
  Py_XDECREF(name);
  return opened;
}

void replace(PyObject** place, PyObject* value) {
  PyObject* before = *place;
  Py_XINCREF(value);
  *place = value;
  Py_XDECREF(before);
}

// follow_modules(names, find); see _python.pyi.
PyObject* follow_modules(PyObject*, PyObject* args) {
  PyObject *names = nullptr, *find = nullptr;
  if (!PyArg_ParseTuple(args, "O!O:follow_modules", &PyDict_Type, &names, &find)) return nullptr;
  replace(&g_find, find);
  replace(&g_names, names);
  Py_RETURN_NONE;
}

// leave_modules(): from now on no module begins. Those that are open end as they would have.
PyObject* leave_modules(PyObject*, PyObject*) {
  replace(&g_names, nullptr);
  replace(&g_find, nullptr);
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {{"follow_modules", follow_modules, METH_VARARGS, nullptr},
                           {"leave_modules", leave_modules, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool begin_module(PythonThread* thread, PyObject* module) {
  PyObject* id = g_names == nullptr ? nullptr : PyLong_FromVoidPtr(module);
  if (id == nullptr) return false;
  bool opened = begin_inside(thread, module, id);
  Py_DECREF(id);
  return opened;
}

void end_module(PythonThread* thread, PyObject* module, const Leaving& leaving) {
  size_t at = thread->modules.size();
  while (at > 0 && thread->modules[at - 1].key != module) --at;
  if (at == 0) return;  // where stacks are swapped, as greenlets do, one around it has ended before it
  while (thread->modules.size() > at) close_innermost(thread, OTP_FLAG_UNFINISHED, nullptr, 0);
  close_innermost(thread, leaving.flags, leaving.error, leaving.error_size);
}

bool is_no_error(const char* class_name) {
  return class_name != nullptr && std::strcmp(class_name, "torch.utils.checkpoint._StopRecomputationError") == 0;
}

// What is none of Exception's, as an interrupt, is no error of the module's.
Leaving::Leaving(PyObject* type) {
  if (type == nullptr) return;
  if (PyErr_GivenExceptionMatches(type, PyExc_Exception) == 0) {
    flags = OTP_FLAG_UNFINISHED;
    return;
  }
  name_ = class_name(type);
  Py_ssize_t size = 0;
  error = name_ == nullptr ? nullptr : utf8(name_, &size, &owner_);
  flags = OTP_FLAG_ERROR;
  error_size = error == nullptr ? 0 : static_cast<uint32_t>(size);
  if (is_no_error(error)) flags = 0, error = nullptr, error_size = 0;
}

Leaving::~Leaving() {
  Py_XDECREF(name_);
  Py_XDECREF(owner_);
}

int add_modules(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
