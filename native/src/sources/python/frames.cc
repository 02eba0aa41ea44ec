// Calls up to Python 3.11: a C profile function on every thread of the interpreter, which turns calls into events.
//
// Each thread has one object, which holds what is open there and which the interpreter passes to the function. The
// interpreter releases it when the thread ends and when the profile function is removed or displaced by another tool's;
// whichever it is, what is open in the recorder then ends.
//
// That release must not free the object. Python 3.11 reads function and object, then makes the frame's object, and only
// then calls: the allocation may start a garbage collection, whose finalizers (or another thread that gets the lock
// meanwhile) may stop the tracer. So a released object is only marked; its thread gets it again when it is next traced,
// and its memory is freed once the interpreter has no such thread any more.
//
// Python's lock is held in all of this.
#include <new>
#include <unordered_map>
#include <unordered_set>

#include "monitoring.h"
#include "profile_function.h"
#include "tracer.h"

namespace otp_python {

namespace {

enum What { kCall = 0, kReturn = 3, kFunctionCall = 4, kFunctionError = 5, kFunctionReturn = 6 };

constexpr uint32_t kNoEpoch = 0;      // the tracer never has it
constexpr size_t kFewestToReap = 64;  // objects of threads
PyObject* g_type = nullptr;           // of ThreadFrames
size_t g_reap_at = kFewestToReap;     // twice what the last reaping left: each object is looked at twice at most

struct ThreadFrames {
  PyObject_HEAD ThreadCalls calls;
};

// Every object there is, by the number of its thread's state, which no other thread of the interpreter ever gets.
// Never destroyed: the interpreter may release objects when the process ends.
std::unordered_map<uint64_t, PyObject*>& g_threads = *new std::unordered_map<uint64_t, PyObject*>;

ThreadCalls& calls_of(PyObject* object) { return reinterpret_cast<ThreadFrames*>(object)->calls; }

bool is_released(PyObject* object) { return Py_REFCNT(object) == 0; }

bool follows(PyThreadState* thread);
ThreadCalls* here();

// ---- what every call does ----

// Where sessions have started or stopped since the thread's last event, or the tracer is off: then this is the last
// one. False: the event is not to be recorded.
__attribute__((noinline)) bool look_around(PyObject* self, PyFrameObject* frame, int what) {
  if (is_released(self)) return false;
  if (g_tracer.names == nullptr) {
    // Another tool may have installed its function since the interpreter read this one.
    if (here() != nullptr) set_profile(PyThreadState_Get(), nullptr, nullptr);
    return false;
  }
  Py_INCREF(self);
  PyFrameObject* innermost = frame;
  if (what == kCall) {
    innermost = g_caller_of(frame);
  } else {
    Py_XINCREF(innermost);
  }
  follow_sessions(calls_of(self), innermost);
  // Naming, and up to Python 3.11 making a frame's object, can run anything, which may stop the tracer and start it
  // again: the next event then looks around anew. Where sessions have only started, those that were there have this
  // event.
  ThreadCalls& thread = calls_of(self);
  thread.sessions &= ~newcomers_of(thread);
  thread.last = {};
  bool is_current =
      g_tracer.names != nullptr && Py_REFCNT(self) > 1 && thread.epoch != kNoEpoch && thread.run == g_tracer.run;
  Py_DECREF(self);
  return is_current;
}

// Whether the call begins, or is left out, with nothing more: it is a usual one, or nobody requests it.
bool is_plain(const ThreadCalls& thread, const Code* code) {
  if (code == nullptr || thread.special != 0) return false;
  return code->is_usual || (!code->is_own && !code->is_suspended && (thread.sessions & ~code->not_for) == 0);
}

void enter(ThreadCalls& thread, uintptr_t key, PyFrameObject* frame) {
  if (is_begun(thread, key)) return;
  PyObject* object = code_of(frame);
  const Code* code = g_tracer.names->find(object);
  if (is_plain(thread, code)) return begin_or_leave_out(thread, key, code->name, 0, code->not_for);
  bool is_known = code != nullptr && code->is_suspended && enter_segment(thread, key, *code, frame);
  if (!is_known) enter_slowpath(thread, key, object, frame, Start::kUnknown);
}

// Whatever was not to be done at once.
__attribute__((noinline)) int trace_slowpath(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) try {
  ThreadCalls& thread = calls_of(self);
  if (thread.epoch != g_tracer.epoch && !look_around(self, frame, what)) return 0;
  auto key = reinterpret_cast<uintptr_t>(frame);
  if (what == kCall) {
    enter(thread, key, frame);
  } else if (what == kReturn) {
    leave_slowpath(thread, key, argument == nullptr ? OTP_FLAG_ERROR : 0, nullptr, 0);
  } else if (what == kFunctionCall) {
    enter_function(thread, key, nullptr, frame, argument);
  } else if (what == kFunctionReturn || what == kFunctionError) {
    leave_slowpath(thread, key | kFunction, what == kFunctionError ? OTP_FLAG_ERROR : 0, nullptr, 0);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 0;  // this call is missing in the recording
}

// Each of these calls nothing but what it ends with, so that it saves next to no registers.

__attribute__((noinline, hot)) int on_call(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
  PyObject* code = find_code(frame);
  bool done = code != nullptr && enter_usual(calls_of(self), reinterpret_cast<uintptr_t>(frame), code);
  return __builtin_expect(done, 1) ? 0 : trace_slowpath(self, frame, what, argument);
}

__attribute__((noinline, hot)) int on_return(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
  bool done = argument != nullptr && leave_usual(calls_of(self), reinterpret_cast<uintptr_t>(frame));
  return __builtin_expect(done, 1) ? 0 : trace_slowpath(self, frame, what, argument);
}

__attribute__((noinline, hot)) int on_function(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
  uint32_t name = g_tracer.names->find_function(argument);
  bool done = enter_usual_function(calls_of(self), reinterpret_cast<uintptr_t>(frame), name);
  return __builtin_expect(done, 1) ? 0 : trace_slowpath(self, frame, what, argument);
}

__attribute__((noinline, hot)) int on_function_return(PyObject* self, PyFrameObject* frame, int what,
                                                      PyObject* argument) {
  bool done = leave_usual(calls_of(self), reinterpret_cast<uintptr_t>(frame) | kFunction);
  return __builtin_expect(done, 1) ? 0 : trace_slowpath(self, frame, what, argument);
}

__attribute__((hot)) int trace(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
  if (__builtin_expect(calls_of(self).epoch == g_tracer.epoch, 1)) {
    if (what == kCall) return on_call(self, frame, what, argument);
    if (what == kReturn) return on_return(self, frame, what, argument);
    if (what == kFunctionCall) return on_function(self, frame, what, argument);
    if (what == kFunctionReturn) return on_function_return(self, frame, what, argument);
  }
  return trace_slowpath(self, frame, what, argument);
}

// ---- threads ----

PyObject* take_over();

// Nobody refers to it, but the interpreter may be about to call with it.
void thread_dealloc(PyObject* self) {
  ThreadCalls& thread = calls_of(self);
  if (forget_thread(thread) && g_tracer.sessions != 0 && g_tracer.process == getpid()) ++g_tracer.displaced;
  thread.epoch = kNoEpoch;
}

void free_thread(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  calls_of(object).~ThreadCalls();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// Frees the released objects of threads that have ended.
void reap_threads() {
  std::unordered_set<uint64_t> alive;
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread))
    alive.insert(PyThreadState_GetID(thread));
  for (auto entry = g_threads.begin(); entry != g_threads.end();) {
    bool over = is_released(entry->second) && alive.count(entry->first) == 0;
    if (over) free_thread(entry->second);
    entry = over ? g_threads.erase(entry) : std::next(entry);
  }
  g_reap_at = 2 * g_threads.size() + kFewestToReap;
}

// Called where somebody has given sys.setprofile() what sys.getprofile() gave: our function takes its place again.
PyObject* thread_call(PyObject* self, PyObject*, PyObject*) {
  ThreadCalls& thread = calls_of(self);
  if (thread.number == PyThreadState_GetID(PyThreadState_Get())) end_all(thread);
  return take_over();
}

char g_doc[] = "What sys.getprofile() gives while calls are recorded.";
PyType_Slot g_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(thread_dealloc)},
                         {Py_tp_call, reinterpret_cast<void*>(thread_call)},
                         {Py_tp_doc, g_doc},
                         {0, nullptr}};
PyType_Spec g_spec = {"otel_torchprof._native._python.Frames", sizeof(ThreadFrames), 0, Py_TPFLAGS_DEFAULT, g_slots};

// The thread's object as if it were new, with a reference; the interpreter does not use it now. Null with an exception
// set.
PyObject* thread_object(PyThreadState* state) try {
  uint64_t number = PyThreadState_GetID(state);
  if (g_threads.size() >= g_reap_at) reap_threads();
  PyObject*& object = g_threads[number];
  if (object == nullptr) {
    object = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(g_type), 0);  // runs no code
    if (object == nullptr) {
      g_threads.erase(number);
      return nullptr;
    }
    new (&calls_of(object)) ThreadCalls;
  } else {
    forget_thread(calls_of(object));
    calls_of(object) = ThreadCalls();
    Py_SET_REFCNT(object, Py_REFCNT(object) + 1);  // from 0 perhaps
  }
  calls_of(object).owner = object;
  calls_of(object).number = number;
  return object;
} catch (const std::bad_alloc&) {
  return PyErr_NoMemory();
}

// Null with an exception set, or what the thread has from now on; borrowed.
ThreadCalls* trace_thread(PyThreadState* state) {
  PyObject* thread = thread_object(state);
  if (thread == nullptr) return nullptr;
  int status = g_set_profile(state, trace, thread);
  Py_DECREF(thread);
  return status == 0 ? &calls_of(thread) : nullptr;
}

// Those that have no profile function of their own. The number of those that have one, or -1 with an exception set.
int trace_others() {
  int taken = 0;
  if (!can_see_profile_functions()) return 0;
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread)) {
    ProfileFunction function = profile_function_of(thread);
    taken += function != nullptr && function != trace;
    if (function == nullptr && trace_thread(thread) == nullptr) return -1;
  }
  return taken;
}

// Makes the calling thread a traced one in place of the Python function that is called, or one without any. An error is
// none of the program's.
PyObject* take_over() {
  Unraising guard;
  if (g_tracer.names == nullptr) {
    set_profile(PyThreadState_Get(), nullptr, nullptr);
  } else {
    trace_thread(PyThreadState_Get());
  }
  Py_RETURN_NONE;
}

// The calling thread's, or null where its profile function is not ours. The interpreter is asked each time: another
// thread can have taken it away.
ThreadCalls* here() {
  Unraising guard;
  PyObject* get = PySys_GetObject("getprofile");
  PyObject* installed = get == nullptr ? nullptr : PyObject_CallNoArgs(get);
  bool is_ours = installed != nullptr && Py_TYPE(installed) == reinterpret_cast<PyTypeObject*>(g_type);
  Py_XDECREF(installed);  // the thread has it still
  return is_ours ? &calls_of(installed) : nullptr;
}

bool start(int* passed_over) {
  if (here() == nullptr && trace_thread(PyThreadState_Get()) == nullptr) return false;
  if (!can_see_profile_functions()) find_profile_function(trace);
  *passed_over = trace_others();
  return *passed_over >= 0;
}

bool follows(PyThreadState* thread) { return can_see_profile_functions() && profile_function_of(thread) == trace; }

void look() {
  ThreadCalls* thread = here();
  if (thread == nullptr || thread->epoch == g_tracer.epoch) return;
  PyFrameObject* running = g_frame_of(PyThreadState_Get());
  look_around(thread->owner, running, kReturn);
  Py_XDECREF(running);
}

void stop() {
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread))
    if (follows(thread)) set_profile(thread, nullptr, nullptr);
}

// The profile function sees all calls, whatever the sessions request.
void adapt() {}

uintptr_t key_of_frame(PyFrameObject* frame) { return reinterpret_cast<uintptr_t>(frame); }

const Mechanism g_mechanism = {start, stop, adapt, key_of_frame, here, look, follows};

// trace_new_thread(frame, event, argument): a profile function for threading.setprofile, which makes way for ours.
PyObject* trace_new_thread(PyObject*, PyObject*) { return take_over(); }

PyMethodDef g_methods[] = {{"trace_new_thread", trace_new_thread, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_frames(PyObject* module) {
  bool known = find_interpreter_functions() && FrameNames::find_fields();
  bool monitors = known && can_monitor();
  bool possible = monitors || (known && g_set_profile != nullptr);
  if (PyModule_AddIntConstant(module, "can_trace_frames", possible) != 0) return -1;
  if (PyModule_AddIntConstant(module, "monitors_calls", monitors) != 0) return -1;
  if (!possible) return 0;
  find_code_of_frame();
  find_thread_ids();
  g_type = PyType_FromSpec(&g_spec);
  if (g_type == nullptr) return -1;
  Py_INCREF(g_type);
  if (PyModule_AddObject(module, "Frames", g_type) != 0) return -1;
  if (PyModule_AddFunctions(module, g_methods) != 0) return -1;
  return add_tracer(module, monitors ? monitoring() : &g_mechanism);
}

}  // namespace otp_python
