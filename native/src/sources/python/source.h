// What the parts of the Python extension share: the recorder's table, names as UTF-8, what is kept of a thread, and how
// Python code is called from a recording thread.
//
// Everything here needs Python's lock, except where it is said.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_SOURCE_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_SOURCE_H_

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"
#include "otel_torchprof/recorder_hot.h"

namespace otp_python {

// Set once, by attach(), before any other function of the extension is there.
extern const otp_api* g_api;
extern otp_hot g_hot;  // of it

// The sessions that request a kind of event, or (0) that run: they come and go without Python's lock.
inline uint32_t active_sessions(int kind) { return __atomic_load_n(&g_api->active[kind], __ATOMIC_RELAXED); }

// at::RecordScope::USER_SCOPE: what torch gives to whatever is not an operator of its own. Labels and modules have it.
constexpr uint8_t kUserScope = 7;

// UTF-8 of a str. A str with lone surrogates has none: it is encoded as Python's "surrogatepass" does, into *owner,
// which the caller releases. Null with an exception set on failure.
const char* utf8(PyObject* text, Py_ssize_t* size, PyObject** owner);

// A class's name as OpenTelemetry's error.type has it: qualified, but for builtins. Null with an exception set on
// failure.
PyObject* class_name(PyObject* type);

// A word of an object of the interpreter's that is no part of any API: what is read like this was looked for first.
inline const void* word_of(const void* object, int at) {
  const void* value;
  std::memcpy(&value, static_cast<const char*>(object) + static_cast<size_t>(at) * sizeof value, sizeof value);
  return value;
}

// Torch leaves a part of a model that it runs a second time as soon as it has what it needs: by an exception, but not
// because of an error.
bool is_no_error(const char* class_name);

// Counts and forgets an exception that code has raised which was run for the recorder. That somebody wants to interrupt
// the program is not forgotten: it is, as soon as it continues.
void forget_error();

// Where an exception leaves an event that may say that there is no memory: calls the function of show_errors with it.
// The exception continues as it was.
void show_error();
void show_error(PyObject* type, PyObject* error, PyObject* traceback);  // that is being handled

// Lets the program have an exception that is its own, but came up in what was run for the recorder: it is raised in the
// main thread, which runs handlers of signals, as soon as that continues.
void give_back_error();

// Around Python code that is run for the recorder: an exception that is on its way stays untouched, and one that the
// code raises is counted and forgotten, since nobody there could do anything about it.
class Unraising {
 public:
  Unraising() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~Unraising();
  Unraising(const Unraising&) = delete;
  Unraising& operator=(const Unraising&) = delete;

 private:
  PyObject *type_, *value_, *traceback_;
};

// A call of a module that is open on a thread.
struct OpenModule {
  const void* key;  // its address, which is also the event's identity
  PyObject* names;  // where the modules inside it are looked up; owned
  bool is_root;     // it is no part of the module that it was called in
  bool is_top;      // its call is a phase
  bool recorded;
};

constexpr uint32_t kParts = 32;  // more than there are of otp_phase

// Calls of root modules inside a call of generate.
inline bool is_of_generation(uint32_t part) { return part == OTP_PHASE_PREFILL || part == OTP_PHASE_DECODE; }

// The call of a root module, or the step of an optimizer, whose end torch does not tell where an exception leaves it.
struct OpenPhase {
  PyObject* object;  // the module or optimizer; compared only
  uint32_t part;
  bool recorded;
};

// A call of transformers' generate that is open on a thread.
struct OpenGeneration {
  const void* model;       // compared only
  uint64_t event;          // id of its event; 0: it has none
  uint64_t begin;          // ticks, those of its event
  uint64_t first_token;    // when it was there, ticks; 0: it is not yet
  uint32_t prefills;       // calls of the model that are still to come before its first token
  size_t modules, phases;  // that were open around it
};

// What data loaders have returned to a thread so far.
struct Loaded {
  int64_t tokens, samples;
};

// What the sources keep of a thread. Lives as long as Python's state of that thread, and goes with Python's lock held.
struct PythonThread {
  PyObject* variables = nullptr;  // see context.cc; owned
  std::vector<OpenModule> modules;
  std::vector<OpenPhase> phases;
  std::vector<OpenGeneration> generations;
  uint32_t compilations = 0;  // phases inside of them are torch's own
  bool trains = false;        // it has run a backward pass or an optimizer
  uintptr_t state = 0;        // Python's, of the thread
  uint32_t loops_run = 0;     // the value of g_loops_run when a loop was last seen on it
  // What can end a step has come since the latest phase that was asked for its usage: 1: a backward pass; 2: more.
  uint8_t may_begin_step = 0;
  Loaded loaded{};
  // What the system has said of it, see thread_usage.cc.
  int64_t usage_of = 0, switches = 0, asked_at = 0, runnable = -1, running = 0, of_process = 0;
};

// Adds what the iterator of a loader has returned, as far as its shapes say: see batches.cc.
void count_batch(PythonThread* thread, PyObject* iterator, PyObject* batch);

// The calling thread's, made where there is none. Null when there is no memory.
PythonThread* python_thread();

// How a call was left, from the class of the exception that it raised; null where it returned. Its names live as long
// as this.
class Leaving {
 public:
  explicit Leaving(PyObject* type);
  ~Leaving();
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

  uint8_t flags = 0;
  const char* error = nullptr;
  uint32_t error_size = 0;

 private:
  PyObject *name_ = nullptr, *owner_ = nullptr;
};

// The event of a module's call; begin_module says whether there is something to end. Nothing where nobody has set
// names.
bool begin_module(PythonThread* thread, PyObject* module);
void end_module(PythonThread* thread, PyObject* module, const Leaving& leaving);

// The phase of a root module, around its event where modules are events; begin_root says whether there is something to
// end: not inside of another root, and not where no session has phases.
bool begin_root(PythonThread* thread, PyObject* module);
void end_root(PythonThread* thread, PyObject* module, uint8_t flags, const char* error, uint32_t error_size);

// Calls of generate on the calling thread, see generations.cc; what was open around the innermost one is around
// whatever begins in it, and 0 where there is none. `prefills`: calls of the model up to its first token.
// end_generation says how many phases were open around it; false where the model has no such call.
void begin_generation(PythonThread* thread, PyObject* model, uint64_t begin, uint32_t prefills, bool recorded);
bool end_generation(PythonThread* thread, PyObject* model, size_t* phases);
uint32_t part_in_generation(PythonThread* thread, PyObject* module, uint32_t part);
inline size_t phases_around(const PythonThread* thread) {
  return thread->generations.empty() ? 0 : thread->generations.back().phases;
}
inline size_t modules_around(const PythonThread* thread) {
  return thread->generations.empty() ? 0 : thread->generations.back().modules;
}

// Calls Python code for the recorder, in the middle of the program's: dynamo, which may be about to compile that, looks
// at nothing that runs here meanwhile. Null ends the arguments. A new reference; null with an exception set on failure,
// and without one where the function is null.
PyObject* call_uncompiled(PyObject* function, PyObject* first = nullptr, PyObject* second = nullptr);

// Asks the system about the calling thread, for the phase that has just begun on it.
void note_usage(PythonThread* thread);

// A phase that is recorded has begun, or ended, on the calling thread: see foresight.cc.
void foresee_begin(uint32_t part, int64_t object);
void foresee_end(uint32_t part, int64_t object);

// The thread runs a loop, whose stacks are sampled where somebody wants that: see stack_sampler.cc. Again once
// g_loops_run has changed.
extern uint32_t g_loops_run;
void note_loop_slowpath(PythonThread* thread);
inline void note_loop(PythonThread* thread) {
  if (thread != nullptr && __builtin_expect(thread->loops_run != g_loops_run, 0)) note_loop_slowpath(thread);
}
// It ends.
void forget_loop(PythonThread* thread);

// Each adds its functions and classes to the extension module. 0, or -1 with an exception set.
int add_labels(PyObject* module);
int add_modules(PyObject* module);
int add_uncompiled(PyObject* module);
int add_module_calls(PyObject* module);
int add_phases(PyObject* module);
int add_generations(PyObject* module);
int add_usage(PyObject* module);
int add_foresight(PyObject* module);
int add_context(PyObject* module);
int add_frames(PyObject* module);
int add_collections(PyObject* module);
int add_untracked(PyObject* module);
int add_stacks(PyObject* module);
int add_samples(PyObject* module);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_SOURCE_H_
