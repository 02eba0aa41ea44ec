// Calls of transformers' generate that are open on a thread: which calls of root modules in them are the prefill, and
// when the first token was there.
//
// The first token is taken to be there when the model is called again: it has been chosen by then, and where it was
// computed on a device the thread has waited for it, which the end of the prefill does not say.
//
// Python's lock is held in all of this.
#include <cstddef>
#include <new>

#include "source.h"

namespace otp_python {

namespace {

// The place of the innermost one of a model; that of none, where it has none.
size_t place_of(const PythonThread* thread, const void* model) {
  size_t at = thread->generations.size();
  while (at > 0 && thread->generations[at - 1].model != model) --at;
  return at == 0 ? thread->generations.size() : at - 1;
}

// generation(model); see _python.pyi.
PyObject* generation(PyObject*, PyObject* model) {
  PythonThread* thread = python_thread();
  if (thread == nullptr) Py_RETURN_NONE;
  size_t place = place_of(thread, model);
  if (place == thread->generations.size()) Py_RETURN_NONE;
  const OpenGeneration& open = thread->generations[place];
  int64_t begin = g_api->unix_ns(open.begin);
  int64_t first = open.first_token == 0 ? -1 : g_api->unix_ns(open.first_token) - begin;
  return Py_BuildValue("KLLn", static_cast<unsigned long long>(open.event),
                       static_cast<long long>(g_api->unix_ns(0) - begin), static_cast<long long>(first),
                       static_cast<Py_ssize_t>(place));
}

PyMethodDef g_methods[] = {{"generation", generation, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

void begin_generation(PythonThread* thread, PyObject* model, uint64_t begin, uint32_t prefills, bool recorded) {
  uint32_t consumers = 0;
  uint64_t event = recorded ? g_api->innermost(&consumers) : 0;
  try {
    thread->generations.push_back({model, event, begin, 0, prefills, thread->modules.size(), thread->phases.size()});
  } catch (const std::bad_alloc&) {
    // The calls in it are phases like those outside of any.
  }
}

bool end_generation(PythonThread* thread, PyObject* model, size_t* phases) {
  size_t place = place_of(thread, model);
  if (place == thread->generations.size()) return false;
  *phases = thread->generations[place].phases;
  thread->generations.resize(place);
  return true;
}

uint32_t part_in_generation(PythonThread* thread, PyObject* module, uint32_t part) {
  if (thread->generations.empty() || (part != OTP_PHASE_INFERENCE && part != OTP_PHASE_EVALUATION)) return part;
  OpenGeneration& open = thread->generations.back();
  uint32_t found = open.prefills != 0 ? OTP_PHASE_PREFILL : OTP_PHASE_DECODE;
  if (module != open.model) return found;  // an encoder, before the first call of the model itself
  if (open.prefills != 0) {
    --open.prefills;
  } else if (open.first_token == 0) {
    open.first_token = g_api->ticks();
  }
  return found;
}

int add_generations(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
