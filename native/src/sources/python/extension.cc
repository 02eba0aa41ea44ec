// The extension module: what of the recorder's sources needs Python.h. Its parts are in the other python_*.cc.
//
// In C for its cost, and with Python's API because of the interpreter's lock: cffi gives it up around every call, which
// hands it to any busy thread twice per event (measured for a label: 0.12 us alone, 177 us beside one busy Python
// thread). These functions take nanoseconds and never wait, so they keep it.
#include "source.h"

#include <memory>
#include <new>
#include <utility>

namespace otp_python {

const otp_api* g_api = nullptr;
otp_hot g_hot{};

const char* utf8(PyObject* text, Py_ssize_t* size, PyObject** owner) {
  *owner = nullptr;
  const char* data = PyUnicode_AsUTF8AndSize(text, size);
  if (data != nullptr) return data;
  PyErr_Clear();
  *owner = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
  if (*owner == nullptr) return nullptr;
  char* bytes = nullptr;
  if (PyBytes_AsStringAndSize(*owner, &bytes, size) != 0) return nullptr;
  return bytes;
}

PyObject* class_name(PyObject* type) {
  PyObject* module = PyObject_GetAttrString(type, "__module__");
  PyObject* name = module == nullptr ? nullptr : PyObject_GetAttrString(type, "__qualname__");
  PyObject* full = nullptr;
  if (name != nullptr) {
    bool builtin = PyUnicode_Check(module) && PyUnicode_CompareWithASCIIString(module, "builtins") == 0;
    full = builtin ? PyUnicode_FromFormat("%S", name) : PyUnicode_FromFormat("%S.%S", module, name);
  }
  Py_XDECREF(module);
  Py_XDECREF(name);
  return full;
}

namespace {

uint64_t g_errors = 0;

}  // namespace

void forget_error() {
  if (PyErr_Occurred() == nullptr) return;
  bool interrupt = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0;
  ++g_errors;
  PyErr_Clear();
  if (interrupt) PyErr_SetInterrupt();
}

namespace {

struct Raised {
  PyObject *type, *value, *traceback;
};

int raise_again(void* argument) {
  std::unique_ptr<Raised> raised(static_cast<Raised*>(argument));
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  return -1;
}

}  // namespace

void give_back_error() {
  if (PyErr_Occurred() == nullptr) return;
  // Of the depth that this thread has reached, or of its memory: the main thread is to hear nothing of these.
  if (PyErr_ExceptionMatches(PyExc_RecursionError) || PyErr_ExceptionMatches(PyExc_MemoryError)) return forget_error();
  auto* raised = new (std::nothrow) Raised;
  if (raised == nullptr) return forget_error();
  PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
  if (Py_AddPendingCall(raise_again, raised) == 0) return;
  raise_again(raised);  // too many wait already
  forget_error();
}

Unraising::~Unraising() {
  forget_error();
  PyErr_Restore(type_, value_, traceback_);
}

namespace {

PyObject* g_on_error = nullptr;  // owned

bool may_be_of_memory(PyObject* type) {
  if (PyErr_GivenExceptionMatches(type, PyExc_MemoryError) != 0) return true;
  return PyErr_GivenExceptionMatches(type, PyExc_RuntimeError) != 0 &&
         PyErr_GivenExceptionMatches(type, PyExc_RecursionError) == 0;
}

// show_errors(function); see _python.pyi.
PyObject* show_errors(PyObject*, PyObject* function) {
  PyObject* before = g_on_error;
  g_on_error = function == Py_None ? nullptr : function;
  Py_XINCREF(g_on_error);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

}  // namespace

void show_error() {
  PyObject *type = g_on_error == nullptr ? nullptr : PyErr_Occurred(), *value = nullptr, *traceback = nullptr;
  if (type == nullptr || !may_be_of_memory(type)) return;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  show_error(type, value, traceback == nullptr ? Py_None : traceback);
  PyErr_Restore(type, value, traceback);
}

void show_error(PyObject* type, PyObject* error, PyObject* traceback) {
  if (g_on_error == nullptr || !may_be_of_memory(type)) return;
  Py_XDECREF(call_uncompiled(g_on_error, error, traceback));
  forget_error();
}

namespace {

// errors() -> int: exceptions that Python code raised which was run for the recorder.
PyObject* errors(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(g_errors); }

// ---- native memory that an object owns ----

void free_owned(PyObject* capsule) {
  void* memory = PyCapsule_GetPointer(capsule, nullptr);
  auto* owned = static_cast<std::pair<void (*)(void*), PyObject*>*>(PyCapsule_GetContext(capsule));
  Py_BEGIN_ALLOW_THREADS;
  owned->first(memory);
  Py_END_ALLOW_THREADS;
  Py_XDECREF(owned->second);
  delete owned;
}

// owner(memory, free, kept): the addresses of memory and of the function that frees it, which is called when the last
// reference to the result goes. `kept` lives until then.
PyObject* owner(PyObject*, PyObject* arguments) {
  unsigned long long memory = 0, free = 0;
  PyObject* kept = nullptr;
  if (PyArg_ParseTuple(arguments, "KKO", &memory, &free, &kept) == 0) return nullptr;
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(memory), nullptr, nullptr);
  if (capsule == nullptr) return nullptr;
  auto* owned = new (std::nothrow) std::pair<void (*)(void*), PyObject*>(reinterpret_cast<void (*)(void*)>(free), kept);
  if (owned == nullptr || PyCapsule_SetContext(capsule, owned) != 0 ||
      PyCapsule_SetDestructor(capsule, free_owned) != 0) {
    delete owned;
    Py_DECREF(capsule);
    return PyErr_NoMemory();
  }
  Py_INCREF(kept);
  return capsule;
}

// attach(address): of the recorder's otp_api. Raises ImportError when the two were built from different sources. Before
// it there is nothing else here: what records appears now, so that none of it can be without a recorder.
PyObject* attach(PyObject* module, PyObject* address) {
  auto* api = static_cast<const otp_api*>(PyLong_AsVoidPtr(address));
  if (api == nullptr) return nullptr;
  if (api->abi_version != OTP_ABI_VERSION || api->record_format_version != OTP_RECORD_FORMAT_VERSION)
    return PyErr_Format(
        PyExc_ImportError,
        "the Python sources were built for recorder ABI %d, the recorder has %u: reinstall otel-torchprof",
        OTP_ABI_VERSION, api->abi_version);
  if (api->hot.layout != otp::hot::kLayout) {
    PyErr_SetString(PyExc_ImportError,
                    "the Python sources and the recorder were built from different headers: reinstall otel-torchprof");
    return nullptr;
  }
  bool again = g_api != nullptr;
  g_api = api;
  g_hot = api->hot;
  if (again) Py_RETURN_NONE;  // dynamo knows the functions by their addresses, so they are made once
  if (add_labels(module) != 0 || add_modules(module) != 0 || add_module_calls(module) != 0 || add_phases(module) != 0 ||
      add_generations(module) != 0 || add_usage(module) != 0 || add_foresight(module) != 0 ||
      add_context(module) != 0 || add_frames(module) != 0 || add_collections(module) != 0 ||
      add_untracked(module) != 0 || add_stacks(module) != 0 || add_samples(module) != 0 || add_uncompiled(module) != 0)
    return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {{"attach", attach, METH_O, nullptr},
                           {"show_errors", show_errors, METH_O, nullptr},
                           {"errors", errors, METH_NOARGS, nullptr},
                           {"owner", owner, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

// What is static here and in the recorder is of the whole process, and so are torch's observers. Asked whenever an
// interpreter imports the module, which is why its initialisation has two phases: a module of one phase would be copied
// from the interpreter that had it first.
int refuse_subinterpreters(PyObject*) {
  int64_t number = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (number <= 0) return number == 0 ? 0 : -1;
  PyErr_Format(
      PyExc_ImportError,
      "otel_torchprof was imported in sub-interpreter %lld, and records in the main interpreter only, since one "
      "recorder serves the whole process: import it there (under mod_wsgi: WSGIApplicationGroup %%{GLOBAL})",
      static_cast<long long>(number));
  return -1;
}

// Py_mod_multiple_interpreters and Py_MOD_PER_INTERPRETER_GIL_SUPPORTED of Python 3.12. Without it an interpreter with
// a lock of its own refuses the module before it is asked, and says less. Older ones do not know it.
PyModuleDef_Slot g_slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(refuse_subinterpreters)}, {3, reinterpret_cast<void*>(2)}, {0, nullptr}};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "_python", nullptr, 0, g_methods, g_slots, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace otp_python

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__python() {
  PyObject* version = PySys_GetObject("hexversion");
  if (version == nullptr || PyLong_AsLong(version) < 0x030C0000) otp_python::g_slots[1] = {0, nullptr};
  return PyModuleDef_Init(&otp_python::g_module);
}
