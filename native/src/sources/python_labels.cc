// Labels: begin and end as C functions of Python that keep the interpreter's lock.
//
// cffi gives the lock up around every call, which hands it to any busy thread twice per label (measured: 0.12 us alone,
// 177 us beside one busy Python thread). These functions take nanoseconds and never wait, so they keep it.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace {

const otp_api* g_api = nullptr;
constexpr uint8_t kUserScope = 7;  // at::RecordScope::USER_SCOPE

PyObject* wrong_count(const char* function, const char* expected, Py_ssize_t given) {
  return PyErr_Format(PyExc_TypeError, "%s() takes %s, %zd given", function, expected, given);
}

// UTF-8 of a str. A str with lone surrogates has none: it is encoded as Python's "surrogatepass" does, into *owner.
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

// begin(key, name) -> int: the thread's id in the recorder, 0 when nothing records it.
PyObject* begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return wrong_count("begin", "a key and a name", count);
  if (g_api == nullptr || *g_api->active == 0) return PyLong_FromLong(0);
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* name = utf8(args[1], &size, &owner);
  if (name == nullptr) return nullptr;
  otp_begin_args event = {};
  event.key = args[0];
  event.name = name;
  event.name_size = static_cast<uint32_t>(size);
  event.scope = kUserScope;
  event.kind = OTP_EVENT_LABEL;
  event.nests = 1;
  event.sequence_nr = -1;
  uint32_t thread = g_api->begin(&event);
  Py_XDECREF(owner);
  return PyLong_FromUnsignedLong(thread);
}

// end(key, thread, error) -> None: `thread` as begin returned it, 0 when it can have begun on this thread only; `error`
// the name of an exception's class or None.
PyObject* end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return wrong_count("end", "a key, a thread and an error", count);
  const char* error = nullptr;
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  if (args[2] != Py_None && (error = utf8(args[2], &size, &owner)) == nullptr) return nullptr;
  uint8_t flags = error == nullptr ? 0 : OTP_FLAG_ERROR;
  auto error_size = static_cast<uint32_t>(size);
  unsigned long thread = PyLong_AsUnsignedLong(args[1]);
  if (g_api != nullptr && !PyErr_Occurred() && g_api->end(args[0], flags, error, error_size) == 0 && thread != 0)
    g_api->end_elsewhere(args[0], static_cast<uint32_t>(thread), 0, flags, error, error_size);
  Py_XDECREF(owner);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* suspend(PyObject*, PyObject* key) { return PyBool_FromLong(g_api != nullptr && g_api->suspend(key)); }

PyObject* resume(PyObject*, PyObject* key) { return PyBool_FromLong(g_api != nullptr && g_api->resume(key)); }

// attach(address): of the recorder's otp_api. Raises ImportError when the two were built from different sources.
PyObject* attach(PyObject*, PyObject* address) {
  auto* api = static_cast<const otp_api*>(PyLong_AsVoidPtr(address));
  if (api == nullptr) return nullptr;
  if (api->abi_version != OTP_ABI_VERSION || api->record_format_version != OTP_RECORD_FORMAT_VERSION)
    return PyErr_Format(PyExc_ImportError,
                        "the label module was built for recorder ABI %d, the recorder has %u: reinstall otel-torchprof",
                        OTP_ABI_VERSION, api->abi_version);
  g_api = api;
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {
    {"begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(begin)), METH_FASTCALL, nullptr},
    {"end", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(end)), METH_FASTCALL, nullptr},
    {"suspend", suspend, METH_O, nullptr},
    {"resume", resume, METH_O, nullptr},
    {"attach", attach, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT, "_labels", nullptr, -1, g_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__labels() { return PyModule_Create(&g_module); }
