// Modules: torch's global hooks around the call of a torch.nn.Module, as events.
//
// Torch calls one hook before a module's forward and the other after it, also when it raised an Exception. When it
// raised something else (KeyboardInterrupt), the other is not called, and the module's event would stay open, with all
// that comes later inside it. Such a one is found in two ways. What is inside a call stands deeper on the C stack, so a
// module that begins at the same height as one that is open, or above it, is not inside it; that costs a comparison.
// (Where stacks are swapped, as greenlets do, an event may so end early.) And where a module begins that has no place
// inside the innermost one, or that is open already, Python's stack is looked at.
//
// Otherwise Python code is run only for a module that is not in the table of names where it should be.
#include <cstddef>
#include <cstring>
#include <new>

#include "source.h"

namespace otp_python {

namespace {

PyObject* g_names = nullptr;    // by a module's id: the table of names in which it stands
PyObject* g_find = nullptr;     // makes a table, or finds another one
PyObject* g_running = nullptr;  // ids of the modules in whose calls the thread is, the top-level one first

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

void close_left_behind(PythonThread* thread, const char* stack) {
  while (!thread->modules.empty() && thread->modules.back().stack <= stack)
    close_innermost(thread, OTP_FLAG_UNFINISHED, nullptr, 0);
}

// One of the functions above. Null, with or without an exception set, also when they have just gone.
PyObject* call(PyObject* function, PyObject* first, PyObject* second) {
  if (function == nullptr) return nullptr;
  Py_INCREF(function);
  PyObject* result = PyObject_CallFunctionObjArgs(function, first, second, nullptr);
  Py_DECREF(function);
  return result;
}

// Where the module can be inside the innermost one, it is taken to be: it is one of its root's, and is not open.
// Otherwise the stack is looked at; the less often the more often that has been for nothing, since there are programs
// in which it always is (a forward that makes modules).
bool is_in_doubt(PythonThread* thread, const void* key, PyObject* id) {
  bool likely = PyDict_GetItemWithError(thread->modules.back().names, id) != nullptr;
  for (const OpenModule& open : thread->modules) likely = likely && open.key != key;
  if (likely) return false;
  uint32_t doubts = ++thread->modules.back().doubts;
  return (doubts & (doubts - 1)) == 0;
}

// Ends those that are not among the modules that are running, which stand there in the same order.
void close_all_but(PythonThread* thread, PyObject* running) {
  std::vector<OpenModule>& modules = thread->modules;
  Py_ssize_t at = 0, size = PyList_Size(running);
  size_t kept = 0;
  for (const OpenModule& open : modules) {
    Py_ssize_t found = at;
    while (found < size && PyLong_AsVoidPtr(PyList_GetItem(running, found)) != open.key) ++found;
    if (found == size) {
      close(thread, open, OTP_FLAG_UNFINISHED, nullptr, 0);
    } else {
      modules[kept++] = open;
      at = found + 1;
    }
  }
  modules.erase(modules.begin() + static_cast<std::ptrdiff_t>(kept), modules.end());
}

void look_at_stack(PythonThread* thread) {
  PyObject* running = call(g_running, nullptr, nullptr);
  if (running != nullptr && PyList_Check(running)) close_all_but(thread, running);
  Py_XDECREF(running);
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
  table = call(g_find, module, inside == nullptr ? Py_None : inside);
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
void open_module(PythonThread* thread, PyObject* module, PyObject* name, PyObject* table, const char* stack) {
  bool is_root = thread->modules.empty() || thread->modules.back().names != table;
  bool is_top = thread->modules.size() <= modules_around(thread);
  if (is_top) begin_root(thread, module);
  bool recorded = name != nullptr && record(module, name);
  try {
    thread->modules.push_back({module, table, handled_exception(), stack, 0, is_root, is_top, recorded});
  } catch (const std::bad_alloc&) {
    if (recorded) g_api->end(module, OTP_FLAG_UNFINISHED, nullptr, 0);
    if (is_top) end_root(thread, module, OTP_FLAG_UNFINISHED, nullptr, 0);
    Py_DECREF(table);
  }
}

OpenModule* innermost(PythonThread* thread) { return thread->modules.empty() ? nullptr : &thread->modules.back(); }

void begin_inside(PythonThread* thread, PyObject* module, PyObject* id, const char* stack) {
  OpenModule* inside = innermost(thread);
  PyObject* table = table_of(module, id, inside == nullptr ? nullptr : inside->names);
  if (table == nullptr) return;
  // Finding the table may have run any code, which may have called modules: the innermost one can have moved.
  PyObject* name = name_in(table, id, innermost(thread));
  Py_XINCREF(name);
  open_module(thread, module, name, table, stack);
  Py_XDECREF(name);
}

void begin(PyObject* module, const char* stack) {
  PythonThread* thread = g_names == nullptr ? nullptr : python_thread();
  PyObject* id = thread == nullptr ? nullptr : PyLong_FromVoidPtr(module);
  if (id == nullptr) return;
  close_left_behind(thread, stack);
  if (!thread->modules.empty() && is_in_doubt(thread, module, id)) look_at_stack(thread);
  begin_inside(thread, module, id, stack);
  Py_DECREF(id);
}

void end_with_output(PythonThread* thread, PyObject* output) {
  Leaving leaving(output, thread->modules.back().exception);
  close_innermost(thread, leaving.flags, leaving.error, leaving.error_size);
}

void end(PyObject* module, PyObject* output) {
  PythonThread* thread = python_thread();
  if (thread == nullptr || thread->modules.empty()) return;
  size_t at = thread->modules.size();
  while (at > 0 && thread->modules[at - 1].key != module) --at;
  if (at == 0) return;  // began before the hooks, or while nobody recorded modules
  while (thread->modules.size() > at) close_innermost(thread, OTP_FLAG_UNFINISHED, nullptr, 0);
  end_with_output(thread, output);
}

// module_begin(module, args): torch's forward pre-hook.
PyObject* module_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (active_sessions(OTP_EVENT_MODULE) != 0 && count > 0) {
    Unraising guard;
    begin(args[0], static_cast<const char*>(__builtin_frame_address(0)));
  }
  Py_RETURN_NONE;
}

// module_end(module, args, output): torch's forward hook. Not asked whether anybody records: what is open ends.
PyObject* module_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count > 2) {
    Unraising guard;
    end(args[0], args[2]);
  }
  Py_RETURN_NONE;
}

void replace(PyObject** place, PyObject* value) {
  PyObject* before = *place;
  Py_XINCREF(value);
  *place = value;
  Py_XDECREF(before);
}

// follow_modules(names, find, running); see _python.pyi.
PyObject* follow_modules(PyObject*, PyObject* args) {
  PyObject *names = nullptr, *find = nullptr, *running = nullptr;
  if (!PyArg_ParseTuple(args, "O!OO:follow_modules", &PyDict_Type, &names, &find, &running)) return nullptr;
  replace(&g_find, find);
  replace(&g_running, running);
  replace(&g_names, names);
  Py_RETURN_NONE;
}

// leave_modules(): from now on no module begins. Those that are open end as they would have.
PyObject* leave_modules(PyObject*, PyObject*) {
  replace(&g_names, nullptr);
  replace(&g_find, nullptr);
  replace(&g_running, nullptr);
  Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {{"module_begin", fast(module_begin), METH_FASTCALL, nullptr},
                           {"module_end", fast(module_end), METH_FASTCALL, nullptr},
                           {"follow_modules", follow_modules, METH_VARARGS, nullptr},
                           {"leave_modules", leave_modules, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool is_no_error(const char* class_name) {
  return class_name != nullptr && std::strcmp(class_name, "torch.utils.checkpoint._StopRecomputationError") == 0;
}

const void* handled_exception(PyObject** kind) {
  PyObject *type, *value, *traceback;
  PyErr_GetExcInfo(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  bool none = value == nullptr || value == Py_None;
  if (kind != nullptr && !none) {
    *kind = reinterpret_cast<PyObject*>(Py_TYPE(value));
    Py_INCREF(*kind);
  }
  Py_XDECREF(value);
  return none ? nullptr : value;
}

// An exception that was being handled before the module began, by whoever called it, is none of its.
Leaving::Leaving(PyObject* output, const void* before) {
  PyObject* kind = nullptr;
  if (output == Py_None && handled_exception(&kind) != before && kind != nullptr) {
    name_ = class_name(kind);
    Py_ssize_t size = 0;
    error = name_ == nullptr ? nullptr : utf8(name_, &size, &owner_);
    flags = OTP_FLAG_ERROR;
    error_size = error == nullptr ? 0 : static_cast<uint32_t>(size);
    if (is_no_error(error)) flags = 0, error = nullptr, error_size = 0;
  }
  Py_XDECREF(kind);
}

Leaving::~Leaving() {
  Py_XDECREF(name_);
  Py_XDECREF(owner_);
}

int add_modules(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
