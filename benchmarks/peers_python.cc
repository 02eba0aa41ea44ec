// The least that following Python's calls costs: functions that the interpreter calls for each of them, and that do
// nothing.
#include <Python.h>

namespace {

int ignore(PyObject*, PyFrameObject*, int, PyObject*) { return 0; }

// profile(on): the calling thread's profile function, or none.
PyObject* profile(PyObject*, PyObject* on) {
  PyEval_SetProfile(on == Py_True ? ignore : nullptr, nullptr);
  Py_RETURN_NONE;
}

// callback(...): for sys.monitoring.
PyObject* callback(PyObject*, PyObject* const*, Py_ssize_t) { Py_RETURN_NONE; }

PyMethodDef g_methods[] = {
    {"profile", profile, METH_O, nullptr},
    {"callback", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(callback)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef g_module = {
    PyModuleDef_HEAD_INIT, "peers_python", nullptr, -1, g_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_peers_python() { return PyModule_Create(&g_module); }
