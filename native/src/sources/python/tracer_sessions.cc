// The tracer on and off: what Python calls.
//
// Python's lock is held in all of this.
#include <new>
#include <utility>

#include "profile_function.h"
#include "tracer.h"

namespace otp_python {

namespace {

void remove_sessions(uint32_t consumers) {
  for (uint32_t* mask :
       {&g_tracer.sessions, &g_tracer.no_functions, &g_tracer.filtered, &g_tracer.limited, &g_tracer.following})
    *mask &= ~consumers;
  ++g_tracer.epoch;
  if (g_tracer.names == nullptr) return;
  if (g_tracer.sessions != 0) return g_tracer.mechanism->adapt();
  g_tracer.mechanism->stop();
  g_tracer.looked_around.clear();
  FrameNames* names = std::exchange(g_tracer.names, nullptr);
  if (names != nullptr && g_tracer.inside != 0) {
    g_tracer.retired.push_back(names);
  } else {
    delete names;
  }
}

// What a session requests of calls.
struct Wish {
  PyObject* decide = Py_None;
  unsigned int max_depth = 0;  // 0: any
  int functions = 1;
  int modules_only = 0;
  int follows = 0;
};

void take_in(uint32_t consumer, const Wish& wish) {
  int bit = __builtin_ctz(consumer);
  auto set = [consumer](uint32_t* mask, bool value) { *mask = value ? *mask | consumer : *mask & ~consumer; };
  FrameNames& names = *g_tracer.names;
  bool decides = wish.decide != Py_None;
  PyObject* before = names.decide[bit];
  names.decide[bit] = decides ? wish.decide : nullptr;
  Py_XINCREF(names.decide[bit]);
  Py_XDECREF(before);
  set(&names.modules_only, wish.modules_only != 0);
  set(&g_tracer.filtered, decides || wish.modules_only != 0);
  set(&g_tracer.no_functions, wish.functions == 0 || wish.modules_only != 0);
  set(&g_tracer.limited, wish.max_depth != 0);
  set(&g_tracer.following, wish.follows != 0);
  g_tracer.max_depth[bit] = wish.max_depth;
  g_tracer.started[bit] = g_api->ticks();
  uint64_t& last = g_tracer.last_thread[bit] = 0;
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread))
    last = PyThreadState_GetID(thread) > last ? PyThreadState_GetID(thread) : last;
  names.decide_again(consumer);  // first: it runs code of the program, which must not find the session undecided
  g_tracer.sessions |= consumer;
  g_tracer.came_in[bit] = ++g_tracer.epoch;
}

// For whatever is traced from now on. The number of threads that have a profile function of their own, or -1 with an
// exception set.
int add_session(uint32_t consumer, const Naming& naming, const Wish& wish) try {
  if (g_tracer.process != getpid()) remove_sessions(UINT32_MAX);
  if (g_tracer.names == nullptr) {
    g_tracer.retired.reserve(g_tracer.retired.size() + 1);  // stopping must not need memory
    g_tracer.names = new FrameNames(naming);
    g_tracer.process = getpid();
    g_tracer.displaced = 0;
    ++g_tracer.run;
  }
  ThreadCalls outside;  // keeps the names, whatever runs meanwhile
  Inside inside(outside);
  take_in(consumer, wish);
  int passed_over = 0;
  bool started = g_tracer.names != nullptr && g_tracer.mechanism->start(&passed_over);
  return started ? passed_over : -1;
} catch (const std::bad_alloc&) {
  PyErr_NoMemory();
  return -1;
}

// start_frames(consumer, prefixes, own, open, module_call, step, quiet, book, return_generator, decide, max_depth,
// functions, modules_only, follows) -> int; see _python.pyi.
PyObject* start_frames(PyObject*, PyObject* arguments) {
  unsigned int consumer = 0;
  Naming naming;
  Wish wish;
  if (!PyArg_ParseTuple(arguments, "IO!O!O!OOO!OiOIppp:start_frames", &consumer, &PyTuple_Type, &naming.prefixes,
                        &PyUnicode_Type, &naming.own, &PyTuple_Type, &naming.open, &naming.module_call, &naming.step,
                        &PyTuple_Type, &naming.quiet, &naming.book, &naming.return_generator, &wish.decide,
                        &wish.max_depth, &wish.functions, &wish.modules_only, &wish.follows))
    return nullptr;
  if (consumer == 0 || (consumer & (consumer - 1)) != 0 || consumer >= 1u << OTP_MAX_SESSIONS)
    return PyErr_Format(PyExc_ValueError, "%u is no session", consumer);
  int passed_over = add_session(consumer, naming, wish);
  if (passed_over >= 0) return PyLong_FromLong(passed_over);
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, "it was stopped while it began");
  Unraising failure;
  remove_sessions(consumer);
  return nullptr;
}

// stop_frames(consumers) -> int; see _python.pyi.
PyObject* stop_frames(PyObject*, PyObject* argument) {
  unsigned long consumers = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred() != nullptr) return nullptr;
  uint32_t displaced = g_tracer.displaced;
  remove_sessions(static_cast<uint32_t>(consumers));
  return PyLong_FromUnsignedLong(displaced);
}

void set_paused(bool paused) {
  ThreadCalls* thread = g_tracer.mechanism->here();
  if (thread != nullptr) thread->special = paused ? thread->special | kPaused : thread->special & ~kPaused;
}

// pause_frames(); see _python.pyi.
PyObject* pause_frames(PyObject*, PyObject*) {
  ++t_pauses;
  set_paused(true);
  Py_RETURN_NONE;
}

// resume_frames(); see _python.pyi.
PyObject* resume_frames(PyObject*, PyObject*) {
  if (t_pauses > 0 && --t_pauses == 0) set_paused(false);
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {
    {"start_frames", start_frames, METH_VARARGS, nullptr},  {"stop_frames", stop_frames, METH_O, nullptr},
    {"waiting_stacks", waiting_stacks, METH_O, nullptr},    {"pause_frames", pause_frames, METH_NOARGS, nullptr},
    {"resume_frames", resume_frames, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_tracer(PyObject* module, const Mechanism* mechanism) {
  g_tracer.mechanism = mechanism;
  return PyModule_AddFunctions(module, g_methods);
}

}  // namespace otp_python
