// Which span of the application is current where an event begins.
//
// OpenTelemetry keeps its current context in a context variable. The interpreter keeps the values of all context
// variables in an immutable mapping: setting or resetting one replaces the mapping of the current Context, and a switch
// of tasks replaces the current Context. So as long as the mapping of a thread's Context is the same object, no span
// can have become current or have ceased to be. Its address is compared per event, without Python's lock; only when it
// has changed is the lock taken and OpenTelemetry asked. The mapping last seen is kept alive per thread, since another
// one could come to stand at its address.
//
// Reading needs no lock: what is read is the thread's own state and the Context that it is in, which only the thread
// itself writes, in calls that it is not in while it records. (A Context is entered by one thread at a time; the
// interpreter raises otherwise.)
#include <atomic>
#include <cstring>

#include "source.h"

namespace otp_python {

namespace {

constexpr int kUnknown = -1;
constexpr int kMostWords = 35;  // of the thread's state that are looked at: as many as it has in 3.10, later ones more

// Where the fields are, in words: they are no part of the stable ABI, so they are looked for once.
int g_context_at = kUnknown;    // PyThreadState: its Context
int g_variables_at = kUnknown;  // Context: its mapping

PyObject* g_resolver = nullptr;
// Which resolver this is, from 1, in the highest bits of a version: what another one has said counts no more, also
// where the context is the same. 0: there is none.
constexpr int kGenerationShift = 44;
std::atomic<uint64_t> g_generation{0};
std::atomic<bool> g_by_identity{false};

PyObject* word(const void* object, int at) {
  PyObject* value;
  std::memcpy(&value, static_cast<const char*>(object) + static_cast<size_t>(at) * sizeof value, sizeof value);
  return value;
}

// Of the Context of a thread; null when it is in none.
PyObject* variables_of(PyThreadState* thread) {
  PyObject* context = word(thread, g_context_at);
  return context == nullptr ? nullptr : word(context, g_variables_at);
}

uint64_t version() {
  uint64_t generation = g_generation.load(std::memory_order_acquire);
  if (generation == 0) return 0;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return 0;
  if (!g_by_identity.load(std::memory_order_relaxed)) {
    static thread_local uint64_t asked = 0;  // never the same: slow, but right
    return ++asked;
  }
  // Addresses have 48 bits, of which the lowest four are 0. A thread that is in no Context has that for an address.
  return generation << kGenerationShift | reinterpret_cast<uintptr_t>(variables_of(thread)) >> 4;
}

// Keeps the mapping that the answer is about. Returns the one kept before, whose end may run any code.
PyObject* keep_variables() {
  PythonThread* thread = g_by_identity.load(std::memory_order_relaxed) ? python_thread() : nullptr;
  if (thread == nullptr) return nullptr;
  PyObject* before = thread->variables;
  thread->variables = variables_of(PyThreadState_Get());
  Py_XINCREF(thread->variables);
  return before;
}

uint32_t ask() {
  PyObject* answer = call_uncompiled(g_resolver);
  if (answer == nullptr) return 0;
  unsigned long long context = PyLong_AsUnsignedLongLong(answer);  // all ones on failure, with an exception set
  Py_DECREF(answer);
  return context > UINT32_MAX ? 0 : static_cast<uint32_t>(context);
}

uint32_t resolve() {
  if (g_generation.load(std::memory_order_acquire) == 0) return 0;
  PyGILState_STATE lock = PyGILState_Ensure();
  uint32_t context;
  {
    Unraising guard;
    PyObject* before = keep_variables();
    context = ask();
    Py_XDECREF(before);
  }
  PyGILState_Release(lock);
  return context;
}

const otp_context_source g_source = {version, resolve};

// ---- where the fields are ----

// Runs in a Context that is given to it: the word of this thread's state that points to it.
PyObject* find_context(PyObject*, PyObject* context) {
  PyThreadState* thread = PyThreadState_Get();
  for (int at = 0; at < kMostWords; ++at)
    if (word(thread, at) == context) return PyLong_FromLong(at);
  return PyLong_FromLong(kUnknown);
}

PyMethodDef g_find_context = {"find_context", find_context, METH_O, nullptr};

// Of a fresh Context; kUnknown with or without an exception set.
int context_at(PyObject* new_context) {
  PyObject* context = PyObject_CallNoArgs(new_context);
  PyObject* finder = context == nullptr ? nullptr : PyCFunction_New(&g_find_context, nullptr);
  PyObject* found = finder == nullptr ? nullptr : PyObject_CallMethod(context, "run", "OO", finder, context);
  int at = found == nullptr ? kUnknown : static_cast<int>(PyLong_AsLong(found));
  Py_XDECREF(found);
  Py_XDECREF(finder);
  Py_XDECREF(context);
  return at;
}

// Sets the variable in the Context. False with an exception set.
bool set_in(PyObject* context, PyObject* set, long value) {
  PyObject* token = PyObject_CallMethod(context, "run", "Ol", set, value);
  Py_XDECREF(token);
  return token != nullptr;
}

// The only word of a Context that is another one after each of two settings, and that a copy of it shares. The others
// are its counters, its weak references and what it was entered from, and are as before when the setting is over.
int variables_at(PyObject* context, PyObject* set, int words) {
  std::vector<PyObject*> before(words), between(words);
  if (!set_in(context, set, 1)) return kUnknown;
  for (int at = 0; at < words; ++at) before[at] = word(context, at);
  if (!set_in(context, set, 2)) return kUnknown;
  for (int at = 0; at < words; ++at) between[at] = word(context, at);
  if (!set_in(context, set, 3)) return kUnknown;
  int found = kUnknown;
  for (int at = 0; at < words; ++at) {
    if (before[at] == between[at] || between[at] == word(context, at)) continue;
    if (found != kUnknown) return kUnknown;
    found = at;
  }
  PyObject* copy = found == kUnknown ? nullptr : PyObject_CallMethod(context, "copy", nullptr);
  bool shared = copy != nullptr && word(copy, found) == word(context, found);
  Py_XDECREF(copy);
  return shared ? found : kUnknown;
}

int find_variables(PyObject* module, PyObject* new_context) {
  PyObject* context = PyObject_CallNoArgs(new_context);
  PyObject* size = PyObject_GetAttrString(new_context, "__basicsize__");
  PyObject* variable = PyObject_CallMethod(module, "ContextVar", "s", "otel_torchprof.probe");
  PyObject* set = variable == nullptr ? nullptr : PyObject_GetAttrString(variable, "set");
  int found = kUnknown;
  if (context != nullptr && size != nullptr && set != nullptr)
    found = variables_at(context, set, static_cast<int>(PyLong_AsLong(size) / static_cast<long>(sizeof(PyObject*))));
  Py_XDECREF(set);
  Py_XDECREF(variable);
  Py_XDECREF(size);
  Py_XDECREF(context);
  return found;
}

void find_fields() {
  Unraising guard;
  PyObject* module = PyImport_ImportModule("contextvars");
  PyObject* new_context = module == nullptr ? nullptr : PyObject_GetAttrString(module, "Context");
  if (new_context != nullptr) {
    int first = context_at(new_context);
    bool agree = first != kUnknown && context_at(new_context) == first;
    g_context_at = agree ? first : kUnknown;
    g_variables_at = agree ? find_variables(module, new_context) : kUnknown;
  }
  Py_XDECREF(new_context);
  Py_XDECREF(module);
}

// set_context_resolver(resolver, by_identity=True) -> bool; see _python.pyi. With None no thread calls into Python any
// more, also not one that is about to: it finds nobody to ask once it has the lock.
PyObject* set_context_resolver(PyObject*, PyObject* args) {
  PyObject* resolver = nullptr;
  int by_identity = 1;
  if (!PyArg_ParseTuple(args, "O|p:set_context_resolver", &resolver, &by_identity)) return nullptr;
  bool on = resolver != Py_None;
  PyObject* before = g_resolver;
  if (on) Py_INCREF(resolver);
  g_resolver = on ? resolver : nullptr;
  bool cheap = on && by_identity != 0 && g_context_at != kUnknown && g_variables_at != kUnknown;
  g_by_identity.store(cheap, std::memory_order_relaxed);
  static uint64_t resolvers = 0;
  g_generation.store(on ? 1 + resolvers++ % 0xFFFFF : 0, std::memory_order_release);
  g_api->set_context_source(on ? &g_source : nullptr);
  Py_XDECREF(before);
  return PyBool_FromLong(cheap);
}

PyMethodDef g_methods[] = {{"set_context_resolver", set_context_resolver, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_context(PyObject* module) {
  find_fields();
  return PyModule_AddFunctions(module, g_methods);
}

}  // namespace otp_python
