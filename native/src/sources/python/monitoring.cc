// Callbacks of sys.monitoring. They are told the code, and no frame: which one it is says the interpreter's state of
// the thread (running_frame.h). Events are of the whole interpreter: threads that come later are traced without
// more.
//
// Where no session requests a code's calls, the callback answers that it is not to be called back from there again.
//
// Python's lock is held in all of this.
#include "monitoring.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <string>

#include "monitoring_tool.h"
#include "running_frame.h"

namespace otp_python {

namespace {

constexpr char kKey[] = "otel_torchprof._native._python.calls";

struct MonitoredThread : ThreadCalls {
  PyThreadState* state = nullptr;
  uintptr_t failed = 0;  // the C function that has raised: with what, the next event says
};

PyTypeObject* g_python_function = nullptr;  // types.FunctionType

thread_local MonitoredThread* t_thread __attribute__((tls_model("initial-exec"))) = nullptr;
// The state of Python's, of this thread of the system, whose calls are over: what goes with it may run code still.
thread_local uint64_t t_gone = 0;

// ---- threads ----

// Kept in Python's dictionary of the thread, and so for as long as that is there.
void free_thread(PyObject* capsule) {
  auto* thread = static_cast<MonitoredThread*>(PyCapsule_GetPointer(capsule, kKey));
  forget_thread(*thread);
  if (t_thread == thread) {
    t_thread = nullptr;
    t_gone = PyThreadState_GetID(thread->state);
  }
  delete thread;
}

bool is_gone() { return t_thread == nullptr && t_gone == PyThreadState_GetID(PyThreadState_Get()); }

// Null with an exception set where there is no memory.
MonitoredThread* this_thread() {
  if (t_thread != nullptr) return t_thread;
  PyObject* dictionary = PyThreadState_GetDict();
  auto* thread = dictionary == nullptr ? nullptr : new (std::nothrow) MonitoredThread;
  PyObject* capsule = thread == nullptr ? nullptr : PyCapsule_New(thread, kKey, free_thread);
  if (capsule == nullptr) {
    delete thread;
    PyErr_NoMemory();
    return nullptr;
  }
  thread->state = PyThreadState_Get();
  thread->owner = capsule;
  t_thread = thread;
  int status = PyDict_SetItemString(dictionary, kKey, capsule);
  Py_DECREF(capsule);  // frees the thread where the dictionary did not take it
  return status == 0 ? thread : nullptr;
}

// ---- errors ----

// The name of an exception's class, as long as the next one is of the same.
struct ErrorName {
  PyObject* type = nullptr;  // owned
  std::string text;
};
ErrorName g_error;

std::string error_name(PyObject* exception) {
  Unraising guard;
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(exception));
  if (g_error.type == type) return g_error.text;
  PyObject* name = class_name(type);
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* data = name == nullptr ? nullptr : utf8(name, &size, &owner);
  std::string text = data == nullptr ? std::string("_OTHER") : std::string(data, static_cast<size_t>(size));
  Py_XDECREF(owner);
  Py_XDECREF(name);
  PyObject* before = g_error.type;
  Py_INCREF(type);
  g_error = {type, text};
  Py_XDECREF(before);  // may run code that comes here too
  return text;
}

void leave_with(MonitoredThread& thread, uintptr_t key, PyObject* exception) {
  std::string error = error_name(exception);
  leave_slowpath(thread, key, OTP_FLAG_ERROR, error.data(), static_cast<uint32_t>(error.size()));
}

// A C function has raised, and the next event was not the one that says what.
void settle(MonitoredThread& thread) {
  uintptr_t key = thread.failed;
  thread.failed = 0;
  if (key != 0 && thread.run == g_tracer.run) leave_slowpath(thread, key, OTP_FLAG_ERROR, nullptr, 0);
}

// ---- sessions ----

bool modules_alone() { return (g_tracer.sessions & ~g_tracer.names->modules_only) == 0; }

bool functions_requested() { return (g_tracer.sessions & ~g_tracer.no_functions) != 0; }

inline bool is_unrequested(const Code* code) {
  return code != nullptr && !code->is_own && (g_tracer.sessions & ~code->not_for) == 0;
}

// Whether the end of a call of the code is reported.
bool is_reported(const Code* code) {
  if (code == nullptr) return false;
  return modules_alone() ? code->is_module_call || code->is_step : !is_unrequested(code);
}

// The keys of what is on the thread's stack whose end is reported.
std::vector<uintptr_t> reported_calls(const MonitoredThread& thread) {
  std::vector<uintptr_t> keys;
  PyFrameObject* frame = g_frame_of(thread.state);
  while (frame != nullptr) {
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    if (is_reported(g_tracer.names->find(code))) {
      keys.push_back(identity_of_frame(frame));
      if (functions_requested()) keys.push_back(keys.back() | kFunction);
    }
    Py_DECREF(code);
    PyFrameObject* caller = g_caller_of(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

// Where codes are left out, the end of what is open may not be reported any more: then it ends now.
void end_unreported(MonitoredThread& thread) {
  std::vector<uintptr_t> reported = reported_calls(thread);
  for (uintptr_t key : open_calls(thread))
    if (!std::binary_search(reported.begin(), reported.end(), key)) leave_slowpath(thread, key, 0, nullptr, 0);
}

// ---- callbacks ----

// Where the tracer was off, or sessions have started or stopped, since the thread's last event. Null where it is off.
__attribute__((noinline)) MonitoredThread* look_around(bool enters) {
  Unraising guard;
  MonitoredThread* thread = g_tracer.names == nullptr || is_gone() ? nullptr : this_thread();
  if (thread == nullptr) return nullptr;
  bool changed = thread->epoch != g_tracer.epoch;
  settle(*thread);
  if (thread->epoch != g_tracer.epoch) {
    PyFrameObject* innermost = g_frame_of(thread->state);
    if (enters && innermost != nullptr) {
      PyFrameObject* caller = g_caller_of(innermost);
      Py_DECREF(innermost);
      innermost = caller;
    }
    follow_sessions(*thread, innermost);
  }
  if (changed && g_tracer.filtered != 0 && g_tracer.names != nullptr) end_unreported(*thread);
  return g_tracer.names == nullptr ? nullptr : thread;
}

// While the tracer is off no thread has its epoch.
inline MonitoredThread* thread_here(bool enters) {
  MonitoredThread* thread = t_thread;
  bool usual = thread != nullptr && thread->epoch == g_tracer.epoch && thread->failed == 0;
  return __builtin_expect(usual, 1) ? thread : look_around(enters);
}

// Whether nobody requests calls by the code.
inline bool is_excluded(PyObject* object) {
  return __builtin_expect(g_tracer.filtered != 0, 0) && g_tracer.names != nullptr &&
         is_unrequested(g_tracer.names->find(object));
}

// Each answers whether it is not to be called back from that place.

// A segment of a generator or coroutine, which has the line where it begins or continues.
__attribute__((noinline)) void enter_segment(MonitoredThread& thread, PyObject* const* arguments, Start start) {
  FrameNames& names = *g_tracer.names;
  const Code* code = names.find(arguments[0]);
  long instruction = PyLong_AsLong(arguments[1]);
  if (__builtin_expect(instruction < 0, 0)) PyErr_Clear();  // the program has called us
  bool known = code != nullptr && code->is_suspended && !code->is_own && thread.special == 0;
  uint32_t name = known ? names.find_place(*code, instruction) : 0;
  uintptr_t key = running_frame(thread.state);
  if (__builtin_expect(is_begun(thread, key), 0)) return;
  if (__builtin_expect(name != 0, 1)) {
    begin_call(thread, key, name, names.of_generator(key_of(key), start == Start::kFresh), code->not_for);
    return;
  }
  Inside inside(thread);
  enter_slowpath(thread, key, arguments[0], nullptr, start);
  // Unrequested, as is known only now: not listed. A call inside of it, of the same code, would answer that its end
  // need not be told of, and this one's would not be either.
  if (is_excluded(arguments[0])) leave_slowpath(thread, key, 0, nullptr, 0);
  PyFrameObject* frame = known ? g_frame_of(thread.state) : nullptr;
  if (frame != nullptr) names.keep_place(*code, instruction, frame);
  Py_XDECREF(frame);
}

bool on_start(MonitoredThread& thread, PyObject* const* arguments) {
  const Code* code = g_tracer.names->find(arguments[0]);
  if (__builtin_expect(is_unrequested(code), 0)) return true;
  if (__builtin_expect(code != nullptr && code->is_usual && thread.special == 0, 1)) {
    uintptr_t key = running_frame(thread.state);
    if (__builtin_expect(!is_begun(thread, key), 1)) begin_call(thread, key, code->name, 0, code->not_for);
  } else {
    enter_segment(thread, arguments, Start::kFresh);
  }
  return false;
}

bool on_resume(MonitoredThread& thread, PyObject* const* arguments) {
  if (is_excluded(arguments[0])) return true;
  enter_segment(thread, arguments, Start::kResumed);
  return false;
}

// As that, but it must always be called back.
bool on_throw(MonitoredThread& thread, PyObject* const* arguments) {
  on_resume(thread, arguments);
  return false;
}

// The end of what the frame has called may be missing, where the callback of another tool has raised.
void leave_called(MonitoredThread& thread, uintptr_t key) {
  leave_slowpath(thread, key | kFunction, OTP_FLAG_ERROR, nullptr, 0);
}

bool on_leave(MonitoredThread& thread, PyObject* const* arguments) {
  uintptr_t key = running_frame(thread.state);
  if (__builtin_expect(!leave_usual(thread, key), 0)) {
    leave_called(thread, key);
    leave_slowpath(thread, key, 0, nullptr, 0);
  }
  return is_excluded(arguments[0]);
}

bool on_unwind(MonitoredThread& thread, PyObject* const* arguments) {
  uintptr_t key = running_frame(thread.state);
  leave_called(thread, key);
  leave_with(thread, key, arguments[2]);
  return false;
}

// The callable is a method of a class, which is called with an object of it: the function that is bound to the object
// stands for it. With anything else it would not be called.
void enter_method(MonitoredThread& thread, PyObject* code, PyObject* method, PyObject* object) {
  if (!is_method_of(method, object)) return;
  uintptr_t key = running_frame(thread.state);
  uint32_t name = g_tracer.names->find_definition(definition_of_method(method));
  if (__builtin_expect(enter_usual_function(thread, key, name), 1)) return;
  Unraising guard;
  PyObject* function = name == 0 ? bound_method(method, object) : nullptr;
  if (name != 0 || function != nullptr) enter_function_slowpath(thread, key, code, nullptr, function, name);
  Py_XDECREF(function);
}

bool on_call(MonitoredThread& thread, PyObject* const* arguments) {
  if (is_excluded(arguments[0])) return true;
  PyObject* callable = arguments[2];
  PyObject* object = arguments[3];
  if (Py_TYPE(callable) == g_bound_method) {
    // Up to 3.13: what is called, and returns, is its function, with its object.
    object = g_object_of(callable);
    callable = g_function_of(callable);
  }
  if (Py_TYPE(callable) == &PyMethodDescr_Type) {
    enter_method(thread, arguments[0], callable, object);
  } else if (PyCFunction_CheckExact(callable) || PyCFunction_Check(callable)) {
    enter_function(thread, running_frame(thread.state), arguments[0], nullptr, callable);
  }
  return false;
}

bool on_function_return(MonitoredThread& thread, PyObject* const*) {
  uintptr_t key = running_frame(thread.state) | kFunction;
  if (__builtin_expect(!leave_usual(thread, key), 0)) leave_slowpath(thread, key, 0, nullptr, 0);
  return false;
}

// The exception is not among the arguments. It is among those of the event that comes next.
bool on_function_error(MonitoredThread& thread, PyObject* const*) {
  uintptr_t key = running_frame(thread.state) | kFunction;
  if (is_function_open(key)) thread.failed = key;
  return false;
}

using Handler = bool (*)(MonitoredThread&, PyObject* const*);
constexpr size_t kMark = size_t{1} << (8 * sizeof(size_t) - 1);  // PY_VECTORCALL_ARGUMENTS_OFFSET

// An error here is none of the program's, which would have it raised.
template <Handler handle, size_t arguments_at_least, bool enters>
PyObject* callback(PyObject*, PyObject* const* arguments, size_t count, PyObject*) {
  bool disable = false;
  try {
    MonitoredThread* thread = thread_here(enters);
    if (__builtin_expect(thread != nullptr && (count & ~kMark) >= arguments_at_least, 1))
      disable = handle(*thread, arguments);
  } catch (const std::bad_alloc&) {
    disable = false;  // this call is missing in the recording
  }
  return __builtin_expect(disable, 0) ? disabled() : Py_NewRef(Py_None);
}

// An exception is on its way through a frame.
PyObject* on_raise(PyObject*, PyObject* const* arguments, size_t count, PyObject*) {
  MonitoredThread* thread = t_thread;
  if (__builtin_expect(thread == nullptr || thread->failed == 0, 1) || (count & ~kMark) < 3) Py_RETURN_NONE;
  uintptr_t key = thread->failed;
  thread->failed = 0;
  try {
    if (g_tracer.names != nullptr && thread->epoch == g_tracer.epoch) leave_with(*thread, key, arguments[2]);
  } catch (const std::bad_alloc&) {
    Py_RETURN_NONE;
  }
  Py_RETURN_NONE;
}

// Most calls are of Python functions and of classes, of which nothing is to be known.
PyObject* on_any_call(PyObject* self, PyObject* const* arguments, size_t count, PyObject* names) {
  PyTypeObject* type = (count & ~kMark) < 4 ? nullptr : Py_TYPE(arguments[2]);
  if ((type == g_python_function || type == &PyType_Type) && g_tracer.filtered == 0) return Py_NewRef(Py_None);
  return callback<on_call, 4, false>(self, arguments, count, names);
}

const EventCallback g_callbacks[] = {
    {"PY_START", callback<on_start, 2, true>},
    {"PY_RESUME", callback<on_resume, 2, true>},
    {"PY_THROW", callback<on_throw, 2, true>},
    {"PY_RETURN", callback<on_leave, 2, false>},
    {"PY_YIELD", callback<on_leave, 2, false>},
    {"PY_UNWIND", callback<on_unwind, 3, false>},
    {"CALL", on_any_call},
    {"C_RETURN", callback<on_function_return, 2, false>},
    {"C_RAISE", callback<on_function_error, 2, false>},
    {"RAISE", on_raise},
};

// ---- the mechanism ----

// What the sessions that run want to be told.
int ask() {
  if (g_tracer.names == nullptr) return -1;  // an audit hook has let somebody stop it
  const Naming& naming = g_tracer.names->naming();
  return ask_for_events(!modules_alone(), functions_requested(), {naming.module_call, naming.step});
}

bool start(int*) {
  return take_tool(g_callbacks, sizeof g_callbacks / sizeof *g_callbacks) && ask() == 0 && restart_disabled() == 0;
}

void stop() {
  Unraising guard;
  leave_tool({g_tracer.names->naming().module_call, g_tracer.names->naming().step});
  PyObject* type = g_error.type;
  g_error.type = nullptr;
  Py_XDECREF(type);
}

void adapt() {
  Unraising guard;
  ask();
}

bool follows(PyThreadState*) { return true; }

ThreadCalls* here() { return t_thread; }

void look() { thread_here(false); }

constexpr Mechanism kMonitoring = {start, stop, adapt, identity_of_frame, here, look, follows};

}  // namespace

bool can_monitor() {
  bool possible = PySys_GetObject("monitoring") != nullptr && find_method_fields();
  if (!possible) return false;
  find_running_frame();
  g_python_function = static_cast<PyTypeObject*>(dlsym(RTLD_DEFAULT, "PyFunction_Type"));
  return true;
}

const Mechanism* monitoring() { return &kMonitoring; }

}  // namespace otp_python
