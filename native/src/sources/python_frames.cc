// The tracer of calls: a C profile function on every thread of the interpreter, which turns calls into events.
//
// Each thread's function comes with an object, which holds what is open there. The interpreter lets go of that object
// when the thread ends and when the profile function is taken away or displaced by another tool's; whichever it is,
// what is open in the recorder then ends.
//
// A thread can only write to its own buffer, so what is on its stack already is begun with its first event. For the
// thread that starts the tracer that is at once.
//
// Python's lock is held in all of this.
#include "python_frames.h"

#include <pthread.h>
#include <unistd.h>

#include <memory>
#include <new>

#include "python_profile_function.h"

namespace otp_python {

namespace {

enum What { kCall = 0, kReturn = 3, kFunctionCall = 4, kFunctionError = 5, kFunctionReturn = 6 };

PyObject* g_type = nullptr;  // of ThreadFrames
std::unique_ptr<FrameNames> g_names;
uint32_t g_sessions = 0;  // those that want frames
uint32_t g_epoch = 1;     // raised when one comes or goes
uint32_t g_came_in[OTP_MAX_SESSIONS];
uint32_t g_displaced = 0;  // threads that another tool took
pid_t g_process = 0;       // that the tracer belongs to

// What makes a name can run Python code (a finalizer, a metaclass), and that code, or another thread meanwhile, can
// stop the tracer. Then what the calls that are still inside of it use stays until the last of them is done.
uint32_t g_inside = 0;
std::vector<std::unique_ptr<FrameNames>> g_retired;

// What is open on a thread is in the list below as the address of its frame, and for a C function that plus 1; plus 2
// where it is left out, plus 4 where the recorder did not take it, plus 8 where all that it calls is left out too.
// Frames begin at multiples of 16.
constexpr uintptr_t kFunction = 1, kLeftOut = 2, kNotTaken = 4, kClosed = 8, kMarks = kLeftOut | kNotTaken | kClosed;

struct ThreadFrames {
  PyObject_HEAD std::vector<uintptr_t>* open;
  otp_begin_args event;
  uint32_t epoch;
  uint32_t id;  // the recorder's, of the thread
  pthread_t thread;
  size_t again;  // how many in the list are there for a second time, for sessions that came one after the other
};

ThreadFrames* as_thread(PyObject* object) { return reinterpret_cast<ThreadFrames*>(object); }

const void* key_of(uintptr_t open) { return reinterpret_cast<const void*>(open); }

void begin(ThreadFrames* thread, uintptr_t key, uint32_t name) {
  thread->event.key = key_of(key);
  thread->event.name_size = name;
  thread->open->push_back(key);
  uint32_t id = g_api->begin(&thread->event);
  if (__builtin_expect(id != 0, 1)) {
    thread->id = id;
  } else {
    thread->open->back() |= kNotTaken;
  }
}

// Ends what is not the innermost, or is open several times. What was open before the tracer came is not there.
__attribute__((noinline)) void end_inside(ThreadFrames* thread, uintptr_t key) {
  std::vector<uintptr_t>& open = *thread->open;
  bool found = false;
  for (size_t i = open.size(); i-- > 0;) {
    if ((open[i] & ~kMarks) != key) continue;
    if ((open[i] & kMarks) == 0) g_api->end(key_of(key), 0, nullptr, 0);
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    if (found) --thread->again;
    if (thread->again == 0) return;
    found = true;
  }
}

void end(ThreadFrames* thread, uintptr_t key) {
  std::vector<uintptr_t>& open = *thread->open;
  if (__builtin_expect(open.empty() || (open.back() & ~kMarks) != key || thread->again != 0, 0)) {
    end_inside(thread, key);
    return;
  }
  bool recorded = open.back() == key;
  open.pop_back();
  if (recorded) g_api->end(key_of(key), 0, nullptr, 0);
}

// Whether the innermost call is one of this package's that calls nothing of the program's.
bool is_closed(const ThreadFrames* thread) { return !thread->open->empty() && (thread->open->back() & kClosed) != 0; }

// A call that is not to be seen: of this package, or by it.
void leave_out(ThreadFrames* thread, uintptr_t key, bool closed) {
  thread->open->push_back(key | kLeftOut | (closed ? kClosed : 0));
}

// Begins what is on the thread's stack, outermost first, for sessions that have none of it. Takes the frame.
void begin_stack(ThreadFrames* thread, PyFrameObject* innermost, uint32_t newcomers, FrameNames* names) {
  std::vector<PyFrameObject*> frames;
  for (PyFrameObject* frame = innermost; frame != nullptr; frame = g_caller_of(frame)) frames.push_back(frame);
  if (!thread->open->empty()) thread->again += frames.size();
  thread->event.not_for = ~newcomers;
  bool closed = false;
  for (size_t i = frames.size(); i-- > 0;) {
    Code& code = names->code_of(frames[i]);
    auto key = reinterpret_cast<uintptr_t>(frames[i]);
    closed |= code.is_closed;
    if (code.is_own || closed) {
      leave_out(thread, key, closed);
    } else {
      begin(thread, key, names->of_running(frames[i], code));
    }
    Py_DECREF(frames[i]);
  }
  thread->event.not_for = 0;
}

// Where sessions have come or gone since the thread's last event. `innermost` was there before this event; released.
void follow_sessions(ThreadFrames* thread, PyFrameObject* innermost, FrameNames* names) {
  uint32_t newcomers = 0;
  for (uint32_t rest = g_sessions; rest != 0; rest &= rest - 1)
    if (g_came_in[__builtin_ctz(rest)] > thread->epoch) newcomers |= rest & -rest;
  thread->thread = pthread_self();
  thread->epoch = g_epoch;
  thread->event.scope_mask = g_sessions;
  if (newcomers != 0) {
    begin_stack(thread, innermost, newcomers, names);
  } else {
    Py_XDECREF(innermost);
  }
}

__attribute__((noinline)) void look_around(ThreadFrames* thread, PyFrameObject* frame, int what, FrameNames* names) {
  PyFrameObject* innermost = frame;
  if (what == kCall) {
    innermost = g_caller_of(frame);
  } else {
    Py_INCREF(innermost);
  }
  follow_sessions(thread, innermost, names);
}

void enter(ThreadFrames* thread, PyFrameObject* frame, FrameNames* names) {
  Code& code = names->code_of(frame);
  auto key = reinterpret_cast<uintptr_t>(frame);
  bool closed = is_closed(thread);
  if (__builtin_expect(code.is_own || closed, 0)) {
    leave_out(thread, key, closed || code.is_closed);
  } else {
    begin(thread, key, names->of_call(frame, code));
  }
}

// C functions that a left-out function calls are left out with it.
void enter_function(ThreadFrames* thread, PyFrameObject* frame, PyObject* function, FrameNames* names) {
  auto caller = reinterpret_cast<uintptr_t>(frame);
  uintptr_t innermost = thread->open->empty() ? 0 : thread->open->back();
  if ((innermost & kLeftOut) != 0 && (innermost & ~kMarks) == caller) return;
  if (!PyCFunction_Check(function)) return;
  uint32_t name = names->of_function(function);
  if (__builtin_expect(name != 0, 1)) begin(thread, caller | kFunction, name);
}

// One by one: what goes with them may run code that comes here too.
__attribute__((noinline)) void release_retired() {
  Unraising guard;
  while (!g_retired.empty()) {
    std::unique_ptr<FrameNames> names = std::move(g_retired.back());
    g_retired.pop_back();
  }
}

// Around what may need the thread's frames, or names.
class Inside {
 public:
  explicit Inside(ThreadFrames* thread) : d_thread(reinterpret_cast<PyObject*>(thread)) {
    Py_INCREF(d_thread);
    ++g_inside;
  }
  ~Inside() {
    if (--g_inside == 0 && __builtin_expect(!g_retired.empty(), 0)) release_retired();
    Py_DECREF(d_thread);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  PyObject* d_thread;
};

int trace(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) try {
  ThreadFrames* thread = as_thread(self);
  if (__builtin_expect(g_names == nullptr, 0)) {
    set_profile(PyThreadState_Get(), nullptr, nullptr);
    return 0;
  }
  Inside inside(thread);
  FrameNames* names = g_names.get();
  if (__builtin_expect(thread->epoch != g_epoch, 0)) look_around(thread, frame, what, names);
  switch (what) {
    case kCall:
      enter(thread, frame, names);
      break;
    case kReturn:
      end(thread, reinterpret_cast<uintptr_t>(frame));
      break;
    case kFunctionCall:
      enter_function(thread, frame, argument, names);
      break;
    case kFunctionReturn:
    case kFunctionError:
      end(thread, reinterpret_cast<uintptr_t>(frame) | kFunction);
      break;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 0;  // this call is missing in the recording
}

// ---- threads ----

PyObject* take_over();

// In a forked child the recorder is empty, and this thread's buffer another one.
void end_all(ThreadFrames* thread) {
  if (thread->open->empty() || getpid() != g_process) return;
  if (g_sessions != 0) ++g_displaced;
  bool here = pthread_equal(thread->thread, pthread_self()) != 0;
  for (size_t i = thread->open->size(); i-- > 0;) {
    uintptr_t open = (*thread->open)[i];
    if ((open & kMarks) != 0) continue;
    if (here) {
      g_api->end(key_of(open), 0, nullptr, 0);
    } else {
      g_api->end_elsewhere(key_of(open), thread->id, 0, 0, nullptr, 0);
    }
  }
  thread->open->clear();
  thread->again = 0;
}

void thread_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  ThreadFrames* thread = as_thread(self);
  end_all(thread);
  delete thread->open;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Called where somebody has given sys.setprofile() what sys.getprofile() gave: our function takes its place again.
PyObject* thread_call(PyObject* self, PyObject*, PyObject*) {
  ThreadFrames* thread = as_thread(self);
  if (pthread_equal(thread->thread, pthread_self()) != 0) end_all(thread);
  return take_over();
}

char g_doc[] = "What sys.getprofile() gives while calls are recorded.";
PyType_Slot g_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(thread_dealloc)},
                         {Py_tp_call, reinterpret_cast<void*>(thread_call)},
                         {Py_tp_doc, g_doc},
                         {0, nullptr}};
PyType_Spec g_spec = {"otel_torchprof._native._python.Frames", sizeof(ThreadFrames), 0, Py_TPFLAGS_DEFAULT, g_slots};

// Null with an exception set where there is no memory.
ThreadFrames* new_thread() {
  std::unique_ptr<std::vector<uintptr_t>> open(new (std::nothrow) std::vector<uintptr_t>);
  if (open == nullptr) {
    PyErr_NoMemory();
    return nullptr;
  }
  auto* thread = PyObject_New(ThreadFrames, reinterpret_cast<PyTypeObject*>(g_type));
  if (thread == nullptr) return nullptr;
  thread->event = {};
  thread->event.kind = OTP_EVENT_FRAME;
  thread->event.nests = 1;
  thread->event.sequence_nr = -1;
  thread->epoch = 0;
  thread->id = 0;
  thread->thread = pthread_self();
  thread->again = 0;
  thread->open = open.release();
  return thread;
}

// Of another thread, whose system's thread is not known before its first event.
int trace_thread(PyThreadState* thread) {
  ThreadFrames* frames = new_thread();
  if (frames == nullptr) return -1;
  int status = g_set_profile(thread, trace, reinterpret_cast<PyObject*>(frames));
  Py_DECREF(frames);
  return status;
}

// Those that have no profile function of their own. The number of those that have one, or -1 with an exception set.
int trace_others() {
  int taken = 0;
  if (!can_see_profile_functions()) return 0;
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread)) {
    ProfileFunction function = profile_function_of(thread);
    taken += function != nullptr && function != trace;
    if (function == nullptr && trace_thread(thread) != 0) return -1;
  }
  return taken;
}

// Makes the calling thread a traced one in place of the Python function that is called, or one without any. An error is
// none of the program's.
PyObject* take_over() {
  Unraising guard;
  if (g_names == nullptr) {
    set_profile(PyThreadState_Get(), nullptr, nullptr);
  } else {
    trace_thread(PyThreadState_Get());
  }
  Py_RETURN_NONE;
}

void leave_threads() {
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread))
    if (can_see_profile_functions() && profile_function_of(thread) == trace) set_profile(thread, nullptr, nullptr);
}

// ---- what Python calls ----

// Makes the calling thread a traced one, if it is not yet. Null with an exception set, or the thread's frames.
ThreadFrames* trace_this_thread() {
  PyThreadState* state = PyThreadState_Get();
  PyObject* get = PySys_GetObject("getprofile");
  PyObject* installed = get == nullptr ? nullptr : PyObject_CallNoArgs(get);
  bool is_ours = installed != nullptr && Py_TYPE(installed) == reinterpret_cast<PyTypeObject*>(g_type);
  Py_XDECREF(installed);  // the thread has it still
  if (is_ours) return as_thread(installed);
  ThreadFrames* thread = new_thread();
  if (thread == nullptr) return nullptr;
  int status = g_set_profile(state, trace, reinterpret_cast<PyObject*>(thread));
  Py_DECREF(thread);
  return status == 0 ? thread : nullptr;
}

void remove_session(uint32_t consumer) {
  g_sessions &= ~consumer;
  ++g_epoch;
  if (g_sessions != 0) return;
  leave_threads();
  std::unique_ptr<FrameNames> names = std::move(g_names);
  if (names != nullptr && g_inside != 0) g_retired.push_back(std::move(names));
}

// For whatever is traced from now on. The number of threads that have a profile function of their own, or -1 with an
// exception set.
int add_session(uint32_t consumer, const Naming& naming) try {
  if (g_process != getpid()) remove_session(UINT32_MAX);
  if (g_names == nullptr) {
    g_retired.reserve(g_retired.size() + 1);  // stopping must not need memory
    g_names = std::make_unique<FrameNames>(naming);
    for (PyObject* object : {naming.prefixes, naming.own, naming.open, naming.module_call}) Py_INCREF(object);
    g_process = getpid();
    g_displaced = 0;
  }
  g_sessions |= consumer;
  g_came_in[__builtin_ctz(consumer)] = ++g_epoch;
  ThreadFrames* thread = trace_this_thread();
  if (thread == nullptr) return -1;
  Inside inside(thread);
  if (!can_see_profile_functions()) find_profile_function(trace);
  int taken = trace_others();
  if (taken >= 0 && g_names != nullptr) follow_sessions(thread, g_frame_of(PyThreadState_Get()), g_names.get());
  return taken;
} catch (const std::bad_alloc&) {
  PyErr_NoMemory();
  return -1;
}

// start_frames(consumer, prefixes, own, open, module_call) -> int; see _python.pyi.
PyObject* start_frames(PyObject*, PyObject* arguments) {
  unsigned int consumer = 0;
  Naming naming;
  if (!PyArg_ParseTuple(arguments, "IO!O!O!O:start_frames", &consumer, &PyTuple_Type, &naming.prefixes, &PyUnicode_Type,
                        &naming.own, &PyTuple_Type, &naming.open, &naming.module_call))
    return nullptr;
  if (consumer == 0 || (consumer & (consumer - 1)) != 0 || consumer >= 1u << OTP_MAX_SESSIONS)
    return PyErr_Format(PyExc_ValueError, "%u is no session", consumer);
  int taken = add_session(consumer, naming);
  if (taken >= 0) return PyLong_FromLong(taken);
  Unraising failure;
  remove_session(consumer);
  return nullptr;
}

// stop_frames(consumers) -> int; see _python.pyi.
PyObject* stop_frames(PyObject*, PyObject* argument) {
  unsigned long consumers = PyLong_AsUnsignedLong(argument);
  if (PyErr_Occurred() != nullptr) return nullptr;
  uint32_t displaced = g_displaced;
  remove_session(static_cast<uint32_t>(consumers));
  return PyLong_FromUnsignedLong(displaced);
}

// trace_new_thread(frame, event, argument): a profile function for threading.setprofile, which makes way for ours.
PyObject* trace_new_thread(PyObject*, PyObject*) { return take_over(); }

PyMethodDef g_methods[] = {{"start_frames", start_frames, METH_VARARGS, nullptr},
                           {"stop_frames", stop_frames, METH_O, nullptr},
                           {"trace_new_thread", trace_new_thread, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_frames(PyObject* module) {
  bool possible = find_interpreter_functions() && FrameNames::find_fields();
  if (PyModule_AddIntConstant(module, "can_trace_frames", possible) != 0) return -1;
  if (!possible) return 0;
  g_type = PyType_FromSpec(&g_spec);
  if (g_type == nullptr) return -1;
  Py_INCREF(g_type);
  if (PyModule_AddObject(module, "Frames", g_type) != 0) return -1;
  return PyModule_AddFunctions(module, g_methods);
}

}  // namespace otp_python
