// Pauses of Python's garbage collector, as events among the calls: a function in gc.callbacks.
//
// The interpreter collects on the thread that happens to allocate, calls the function there before and after, and lets
// no collection begin inside another, on any thread, though the finalizers that it runs may let other threads run.
//
// Python's lock is held in all of this.
#include <unistd.h>

#include <cstdio>
#include <new>

#include "tracer.h"

namespace otp_python {

namespace {

uint32_t g_sessions = 0;  // that want to know
uint32_t g_thread = 0;    // the recorder's id of the thread on which one is open; 0: none is, that was recorded
pid_t g_process = 0;      // that this is of

// The events' identity: none that a call can have (tracer.h).
alignas(16) const char g_place[16] = {};
const void* key() { return g_place + kNoCall; }

// Of whichever thread. It is only found where it is open still.
void end() {
  uint32_t thread = g_thread;
  g_thread = 0;
  if (thread == 0 || g_process != getpid()) return;  // in a forked child the recorder is empty
  if (g_api->end(key(), 0, nullptr, 0) == 0) g_api->end_elsewhere(key(), thread, 0, 0, nullptr, 0);
}

// Where this is the first that a thread has in a session, the calls that are open there begin before it: those that
// finalizers make would have them begin in it, and they end long after it.
void look_at_calls() try {
  if (g_tracer.names != nullptr && g_tracer.process == getpid()) g_tracer.mechanism->look();
} catch (const std::bad_alloc&) {
  return;  // they are missing in the recording
}

void begin(long generation) {
  look_at_calls();
  end();  // somebody may have taken the function out of the list between the calls
  char name[48];
  int size = std::snprintf(name, sizeof name, "gc.collect: generation %ld", generation);
  otp_begin_args event = {};
  event.key = key();
  event.name = name;
  event.name_size = static_cast<uint32_t>(size);
  event.kind = OTP_EVENT_FRAME;
  event.nests = 1;
  event.sequence_nr = -1;
  event.scope_mask = g_sessions;
  g_thread = g_api->begin(&event);
}

// on_collection(phase, info): for gc.callbacks. Raises nothing: the interpreter would only print it.
PyObject* on_collection(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyUnicode_Check(arguments[0])) Py_RETURN_NONE;
  if (PyUnicode_CompareWithASCIIString(arguments[0], "start") != 0) {
    end();
  } else if (g_sessions != 0 && g_process == getpid()) {
    Unraising guard;
    PyObject* generation = PyMapping_GetItemString(arguments[1], "generation");
    long number = generation == nullptr ? -1 : PyLong_AsLong(generation);
    Py_XDECREF(generation);
    if (PyErr_Occurred() == nullptr) begin(number);
  }
  Py_RETURN_NONE;
}

// follow_collections(consumer); see _python.pyi.
PyObject* follow_collections(PyObject*, PyObject* argument) {
  unsigned long consumer = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (g_process != getpid()) g_sessions = g_thread = 0;
  g_process = getpid();
  g_sessions |= static_cast<uint32_t>(consumer);
  Py_RETURN_NONE;
}

// leave_collections(consumers) -> bool; see _python.pyi.
//
// A collection that goes on is not ended here: a session may have it that was not among these yet, since one records
// before its sources have started, and finalizers of which it has calls may run for long.
PyObject* leave_collections(PyObject*, PyObject* argument) {
  unsigned long consumers = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred() != nullptr) return nullptr;
  g_sessions &= ~static_cast<uint32_t>(consumers);
  return PyBool_FromLong(g_sessions != 0 || (g_thread != 0 && g_process == getpid()));
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {{"on_collection", fast(on_collection), METH_FASTCALL, nullptr},
                           {"follow_collections", follow_collections, METH_O, nullptr},
                           {"leave_collections", leave_collections, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_collections(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
