// Phases of a training loop, as events: what wraps a function of torch's begins and ends them by phase_begin and
// phase_end, module_calls.cc those of roots, and torch's hooks the steps of optimizers.
//
// Torch does not call the second of an optimizer's hooks where an exception leaves its step. So roots and steps are
// kept on a stack, and where a phase begins while a step is open, Python's stack is looked at: steps that are not on it
// any more end.
//
// Python's lock is held in all of this.
#include <cstddef>
#include <new>

#include "source.h"

namespace otp_python {

namespace {

PyObject* g_names = nullptr;            // by part
PyObject* g_is_grad_enabled = nullptr;  // torch's
PyObject* g_graph_task = nullptr;       // torch's: number of the backward pass that this thread runs, -1 for none
PyObject* g_running = nullptr;          // ids of the optimizers in whose steps the thread is, innermost first
PyObject* g_found = nullptr;            // called with each root that was none before
PyObject* g_roots = nullptr;            // weak references to the modules that were roots, by their ids
PyObject* g_trained = nullptr;          // ids of those that were with gradients
char g_keys[kParts];                    // identities of phases that are of no object

bool is_root(uint32_t part) {
  return part == OTP_PHASE_FORWARD || part == OTP_PHASE_INFERENCE || part == OTP_PHASE_EVALUATION ||
         is_of_generation(part);
}

bool is_generate(uint32_t part) { return part == OTP_PHASE_GENERATE || part == OTP_PHASE_EVALUATING_GENERATE; }

// The event's identity. Objects are aligned to 16 bytes, so that only parts below that have one of their own. Roots
// have one in common, since their end does not know which part it was, and calls of generate have that of a part of
// roots.
const void* key_of(uint32_t part, PyObject* object) {
  if (object == nullptr || object == Py_None) return &g_keys[part];
  uint32_t of_part = is_root(part) ? OTP_PHASE_FORWARD : is_generate(part) ? OTP_PHASE_INFERENCE : part;
  return reinterpret_cast<const char*>(object) + of_part;
}

int64_t number_of(PyObject* object) {
  return object == nullptr || object == Py_None ? 0 : static_cast<int64_t>(reinterpret_cast<uintptr_t>(object));
}

// `ticks`: when it began; 0: now.
bool record(uint32_t part, PyObject* object, uint64_t ticks = 0) {
  PyObject* text = g_names == nullptr ? nullptr : PyTuple_GetItem(g_names, part);
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* name = text == nullptr ? nullptr : utf8(text, &size, &owner);
  if (name == nullptr) return false;
  otp_begin_args event = {};
  event.key = key_of(part, object);
  event.name = name;
  event.name_size = static_cast<uint32_t>(size);
  event.scope = kUserScope;
  event.kind = OTP_EVENT_PHASE;
  event.nests = 1;
  event.fwd_thread = part;
  event.sequence_nr = number_of(object);
  event.ticks = ticks;
  bool recorded = g_api->begin(&event) != 0;
  Py_XDECREF(owner);
  if (recorded) {
    foresee_begin(part, event.sequence_nr);
    note_loop(python_thread());
  }
  return recorded;
}

void close(const OpenPhase& open, uint8_t flags, const char* error, uint32_t error_size) {
  if (!open.recorded) return;
  g_api->end(key_of(open.part, open.object), flags, error, error_size);
  foresee_end(open.part, number_of(open.object));
}

bool is_step_open(const PythonThread* thread) {
  for (const OpenPhase& open : thread->phases)
    if (open.part == OTP_PHASE_STEP) return true;
  return false;
}

// Ends the steps that are not on Python's stack, where they stand in the same order. `begins`: what is innermost there
// begins only now.
void close_left_behind(PythonThread* thread, bool begins) {
  if (g_running == nullptr || !is_step_open(thread)) return;
  PyObject* running = call_uncompiled(g_running);
  if (running != nullptr && PyList_Check(running)) {
    std::vector<OpenPhase>& phases = thread->phases;
    Py_ssize_t at = begins ? 1 : 0, size = PyList_Size(running);
    size_t kept = phases.size();
    for (size_t i = phases.size(); i-- > 0;) {
      Py_ssize_t found = at;
      if (phases[i].part == OTP_PHASE_STEP)
        while (found < size && PyLong_AsVoidPtr(PyList_GetItem(running, found)) != phases[i].object) ++found;
      if (phases[i].part != OTP_PHASE_STEP) {
        phases[--kept] = phases[i];
      } else if (found < size) {
        at = found + 1;
        phases[--kept] = phases[i];
      } else {
        close(phases[i], OTP_FLAG_UNFINISHED, nullptr, 0);
      }
    }
    phases.erase(phases.begin(), phases.begin() + static_cast<std::ptrdiff_t>(kept));
  }
  Py_XDECREF(running);
}

// The thread, where phases are recorded there now.
PythonThread* recording_thread() {
  if (active_sessions(OTP_EVENT_PHASE) == 0 || g_names == nullptr) return nullptr;
  PythonThread* thread = python_thread();
  return thread == nullptr || thread->compilations != 0 ? nullptr : thread;
}

// A phase has begun with which a step of training may begin: an optimizer, or a backward pass, where nothing of the
// step has come before it. After zeroing a batch may come, with which the step begins then.
void step_may_begin(PythonThread* thread, uint32_t part) {
  uint8_t least = part == OTP_PHASE_STEP || part == OTP_PHASE_BACKWARD ? 2 : 1;
  if (thread->may_begin_step < least) return;
  if (part != OTP_PHASE_ZEROING) thread->may_begin_step = 0;
  note_usage(thread);
}

// A phase has ended after which a step of training may begin.
void step_may_end(PythonThread* thread, uint32_t part) {
  if (part == OTP_PHASE_BACKWARD || part == OTP_PHASE_STEP || part == OTP_PHASE_SCALER_STEP ||
      part == OTP_PHASE_SCALER_UPDATE)
    thread->trains = true;
  if (!thread->trains || part == OTP_PHASE_FORWARD || is_of_generation(part)) return;
  thread->may_begin_step = part == OTP_PHASE_BACKWARD && thread->may_begin_step == 0 ? 1 : 2;
}

// Whether it is on the stack, to be ended.
bool begin_nested(PythonThread* thread, uint32_t part, PyObject* object) {
  bool recorded = record(part, object);
  try {
    thread->phases.push_back({object, part, recorded});
  } catch (const std::bad_alloc&) {
    if (recorded) g_api->end(key_of(part, object), OTP_FLAG_UNFINISHED, nullptr, 0);
    return false;
  }
  return true;
}

// The innermost that is open of an object; null where there is none.
OpenPhase* open_of(PythonThread* thread, PyObject* object) {
  size_t at = thread->phases.size();
  while (at > 0 && thread->phases[at - 1].object != object) --at;
  return at == 0 ? nullptr : &thread->phases[at - 1];
}

void end_nested(PythonThread* thread, PyObject* object, uint8_t flags, const char* error, uint32_t error_size) {
  const OpenPhase* open = open_of(thread, object);
  if (open == nullptr) return;  // it began before anybody recorded phases
  size_t left = static_cast<size_t>(open - thread->phases.data());
  while (thread->phases.size() > left + 1) {
    close(thread->phases.back(), OTP_FLAG_UNFINISHED, nullptr, 0);
    thread->phases.pop_back();
  }
  close(thread->phases.back(), flags, error, error_size);
  if (thread->phases.back().recorded) step_may_end(thread, thread->phases.back().part);
  thread->phases.pop_back();
}

// A module that is no root yet may have the id of one that was.
void note_root(PyObject* module, PyObject* id) {
  PyObject* known = PyDict_GetItemWithError(g_roots, id);
  if (known != nullptr && PyWeakref_GetObject(known) == module) return;
  PyObject* reference = PyWeakref_NewRef(module, nullptr);
  if (reference != nullptr && PyDict_SetItem(g_roots, id, reference) == 0) PySet_Discard(g_trained, id);
  Py_XDECREF(reference);
  if (PyErr_Occurred() == nullptr) Py_XDECREF(call_uncompiled(g_found, module));
  if (PyErr_Occurred() != nullptr) forget_error();
}

// Whether a root is evaluated where it is called without gradients: it is trained, and in eval(). `with_gradients`: it
// is trained from now on.
bool is_evaluated(PyObject* module, bool with_gradients) {
  PyObject* id = PyLong_FromVoidPtr(module);
  if (id == nullptr) return false;
  note_root(module, id);
  bool trained = PySet_Contains(g_trained, id) == 1;
  if (with_gradients && !trained) PySet_Add(g_trained, id);
  Py_DECREF(id);
  if (with_gradients || !trained) return false;
  PyObject* training = PyObject_GetAttrString(module, "training");
  if (training == nullptr) forget_error();
  Py_XDECREF(training);
  return training == Py_False;
}

uint32_t part_of_root(PyObject* module) {
  PyObject* enabled = PyObject_CallNoArgs(g_is_grad_enabled);
  bool with_gradients = enabled == Py_True;
  Py_XDECREF(enabled);
  bool evaluated = is_evaluated(module, with_gradients);
  return with_gradients ? OTP_PHASE_FORWARD : evaluated ? OTP_PHASE_EVALUATION : OTP_PHASE_INFERENCE;
}

// Inside another root, or inside a backward pass, which checkpointing has run a part of the forward pass again.
bool is_part(const PythonThread* thread) {
  if (thread->phases.size() > phases_around(thread) && is_root(thread->phases.back().part)) return true;
  PyObject* number = PyObject_CallNoArgs(g_graph_task);
  bool in_backward = number != nullptr && PyLong_AsLong(number) != -1;
  Py_XDECREF(number);
  return in_backward;
}

PyObject* wrong_count(const char* name) {
  return PyErr_Format(PyExc_TypeError, "%s(): wrong number of arguments", name);
}

void begin_phase(uint32_t part, PyObject* object) {
  PythonThread* thread = recording_thread();
  if (thread == nullptr) return;
  Unraising guard;
  if (part <= OTP_PHASE_SAVE) close_left_behind(thread, false);
  bool recorded = part < kParts && record(part, object);
  if (recorded &&
      (part == OTP_PHASE_NEXT || part == OTP_PHASE_BACKWARD || part == OTP_PHASE_ZEROING || part == OTP_PHASE_SAVE))
    step_may_begin(thread, part);
  if (part == OTP_PHASE_COMPILATION) ++thread->compilations;
}

// phase_begin(part, object); see _python.pyi.
PyObject* phase_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return wrong_count("phase_begin");
  auto part = static_cast<uint32_t>(PyLong_AsUnsignedLong(args[0]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  begin_phase(part, args[1]);
  Py_RETURN_NONE;
}

// By which a function says that there is no more.
bool is_end(PyObject* type) {
  return PyErr_GivenExceptionMatches(type, PyExc_StopIteration) != 0 ||
         PyErr_GivenExceptionMatches(type, PyExc_GeneratorExit) != 0;
}

void end_event(uint32_t part, PyObject* object, PyObject* type) {
  if (is_end(type)) type = Py_None;
  PyObject *name = type == Py_None ? nullptr : class_name(type), *owner = nullptr;
  Py_ssize_t size = 0;
  const char* error = name == nullptr ? nullptr : utf8(name, &size, &owner);
  bool is_error = type != Py_None && !is_no_error(error);
  g_api->end(key_of(part, object), is_error ? OTP_FLAG_ERROR : 0, is_error ? error : nullptr,
             is_error ? static_cast<uint32_t>(size) : 0);
  foresee_end(part, number_of(object));
  Py_XDECREF(name);
  Py_XDECREF(owner);
}

// Not asked whether anybody records: what is open ends.
void end_phase(uint32_t part, PyObject* object, PyObject* type) {
  Unraising guard;
  PythonThread* thread = python_thread();
  if (thread != nullptr && part == OTP_PHASE_COMPILATION && thread->compilations != 0) --thread->compilations;
  bool has_no_more = part == OTP_PHASE_NEXT && type != Py_None;  // and what comes next begins with another loader
  bool may_end = part == OTP_PHASE_BACKWARD || part == OTP_PHASE_SCALER_STEP || part == OTP_PHASE_SCALER_UPDATE ||
                 part == OTP_PHASE_SAVE || has_no_more;
  if (thread != nullptr && may_end) step_may_end(thread, part);
  if (part < kParts) end_event(part, object, type);
}

// phase_end(part, object, type); see _python.pyi.
PyObject* phase_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return wrong_count("phase_end");
  auto part = static_cast<uint32_t>(PyLong_AsUnsignedLong(args[0]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  end_phase(part, args[1], args[2]);
  Py_RETURN_NONE;
}

// in_phase(parts, object, function, *arguments, **keywords); see _python.pyi. Torch counts functions of Python's to
// find the line that a warning is about: this is none.
PyObject* in_phase(PyObject*, PyObject* arguments, PyObject* keywords) {
  Py_ssize_t count = PyTuple_Size(arguments);
  if (count < 3 || !PyList_Check(PyTuple_GetItem(arguments, 0))) return wrong_count("in_phase");
  PyObject *parts = PyTuple_GetItem(arguments, 0), *object = PyTuple_GetItem(arguments, 1);
  PyObject *function = PyTuple_GetItem(arguments, 2), *rest = PyTuple_GetSlice(arguments, 3, count);
  if (rest == nullptr) return nullptr;
  auto part = PyList_Size(parts) == 0 ? kParts : static_cast<uint32_t>(PyLong_AsLong(PyList_GetItem(parts, 0)));
  if (part != kParts) begin_phase(part, object);
  PyObject* result = PyObject_Call(function, rest, keywords);
  PythonThread* loading = part == OTP_PHASE_NEXT && result != nullptr ? python_thread() : nullptr;
  if (loading != nullptr && PyTuple_Size(rest) == 1) count_batch(loading, PyTuple_GetItem(rest, 0), result);
  Py_DECREF(rest);
  if (part == kParts) return result;
  PyObject* type = result == nullptr ? PyErr_Occurred() : Py_None;
  Py_INCREF(type);
  end_phase(part, object, type);
  Py_DECREF(type);
  show_error();
  return result;
}

// generate_begin(model, prefills); see _python.pyi.
PyObject* generate_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return wrong_count("generate_begin");
  PythonThread* thread = recording_thread();
  if (thread == nullptr) Py_RETURN_NONE;
  Unraising guard;
  close_left_behind(thread, false);
  uint32_t part = is_evaluated(args[0], false) ? OTP_PHASE_EVALUATING_GENERATE : OTP_PHASE_GENERATE;
  uint64_t begin = g_api->ticks();
  bool recorded = record(part, args[0], begin);
  if (recorded) step_may_begin(thread, part);
  begin_generation(thread, args[0], begin, static_cast<uint32_t>(PyLong_AsUnsignedLong(args[1])), recorded);
  Py_RETURN_NONE;
}

// generate_end(model, type); see _python.pyi.
PyObject* generate_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return wrong_count("generate_end");
  PythonThread* thread = python_thread();
  size_t phases = 0;
  if (thread == nullptr || !end_generation(thread, args[0], &phases)) Py_RETURN_NONE;
  Unraising guard;
  while (thread->phases.size() > phases) {  // an interrupt has left them
    close(thread->phases.back(), OTP_FLAG_UNFINISHED, nullptr, 0);
    thread->phases.pop_back();
  }
  step_may_end(thread, OTP_PHASE_GENERATE);
  end_event(OTP_PHASE_GENERATE, args[0], args[1]);
  Py_RETURN_NONE;
}

// optimizer_begin(optimizer, args, kwargs): torch's hook before the step of an optimizer.
PyObject* optimizer_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PythonThread* thread = count > 0 ? recording_thread() : nullptr;
  if (thread == nullptr) Py_RETURN_NONE;
  Unraising guard;
  close_left_behind(thread, true);
  if (begin_nested(thread, OTP_PHASE_STEP, args[0]) && thread->phases.back().recorded)
    step_may_begin(thread, OTP_PHASE_STEP);
  Py_RETURN_NONE;
}

// optimizer_end(optimizer, args, kwargs): and after it.
PyObject* optimizer_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  PythonThread* thread = count > 0 ? python_thread() : nullptr;
  if (thread == nullptr || thread->phases.empty()) Py_RETURN_NONE;
  Unraising guard;
  end_nested(thread, args[0], 0, nullptr, 0);
  Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

void replace(PyObject** place, PyObject* value) {
  PyObject* before = *place;
  Py_XINCREF(value);
  *place = value;
  Py_XDECREF(before);
}

// follow_phases(names, is_grad_enabled, graph_task, running, found); see _python.pyi.
PyObject* follow_phases(PyObject*, PyObject* args) {
  PyObject *names = nullptr, *is_grad_enabled = nullptr, *graph_task = nullptr, *running = nullptr, *found = nullptr;
  if (!PyArg_ParseTuple(args, "O!OOOO:follow_phases", &PyTuple_Type, &names, &is_grad_enabled, &graph_task, &running,
                        &found)) {
    return nullptr;
  }
  if (g_roots == nullptr && (g_roots = PyDict_New()) == nullptr) return nullptr;
  if (g_trained == nullptr && (g_trained = PySet_New(nullptr)) == nullptr) return nullptr;
  replace(&g_is_grad_enabled, is_grad_enabled);
  replace(&g_graph_task, graph_task);
  replace(&g_running, running);
  replace(&g_found, found);
  replace(&g_names, names);
  Py_RETURN_NONE;
}

// phase_collection(phase, info): for gc.callbacks, of full collections: the others are shorter than they are many.
PyObject* phase_collection(PyObject*, PyObject* const* args, Py_ssize_t count) {
  bool begins = count == 2 && PyUnicode_Check(args[0]) && PyUnicode_CompareWithASCIIString(args[0], "start") == 0;
  PythonThread* thread = count == 2 ? recording_thread() : nullptr;
  if (thread == nullptr) Py_RETURN_NONE;
  Unraising guard;
  PyObject* generation = PyMapping_GetItemString(args[1], "generation");
  bool is_full = generation != nullptr && PyLong_AsLong(generation) == 2;
  Py_XDECREF(generation);
  if (is_full && begins) record(OTP_PHASE_COLLECTION, nullptr);
  if (is_full && !begins) g_api->end(key_of(OTP_PHASE_COLLECTION, nullptr), 0, nullptr, 0);
  Py_RETURN_NONE;
}

// in_graph(): False; what dynamo reads in its place is True.
PyObject* in_graph(PyObject*, PyObject*) { Py_RETURN_FALSE; }

PyMethodDef g_methods[] = {{"phase_begin", fast(phase_begin), METH_FASTCALL, nullptr},
                           {"phase_end", fast(phase_end), METH_FASTCALL, nullptr},
                           {"in_phase", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(in_phase)),
                            METH_VARARGS | METH_KEYWORDS, nullptr},
                           {"generate_begin", fast(generate_begin), METH_FASTCALL, nullptr},
                           {"generate_end", fast(generate_end), METH_FASTCALL, nullptr},
                           {"optimizer_begin", fast(optimizer_begin), METH_FASTCALL, nullptr},
                           {"optimizer_end", fast(optimizer_end), METH_FASTCALL, nullptr},
                           {"phase_collection", fast(phase_collection), METH_FASTCALL, nullptr},
                           {"follow_phases", follow_phases, METH_VARARGS, nullptr},
                           {"in_graph", in_graph, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool begin_root(PythonThread* thread, PyObject* module) {
  // Nearly all modules are parts of one.
  if (thread->phases.size() > phases_around(thread) && is_root(thread->phases.back().part)) return false;
  if (recording_thread() == nullptr || g_is_grad_enabled == nullptr) return false;
  close_left_behind(thread, false);
  if (is_part(thread)) return false;
  uint32_t part = part_in_generation(thread, module, part_of_root(module));
  if (!begin_nested(thread, part, module)) return false;
  if (thread->phases.back().recorded && !is_of_generation(part)) step_may_begin(thread, part);
  return true;
}

void end_root(PythonThread* thread, PyObject* module, uint8_t flags, const char* error, uint32_t error_size) {
  end_nested(thread, module, flags, error, error_size);
}

int add_phases(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
