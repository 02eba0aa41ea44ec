#include "profile_function.h"

#include <dlfcn.h>

#include <cstring>

namespace otp_python {

int (*g_set_profile)(PyThreadState*, ProfileFunction, PyObject*) = nullptr;
PyFrameObject* (*g_frame_of)(PyThreadState*) = nullptr;
PyFrameObject* (*g_caller_of)(PyFrameObject*) = nullptr;
int (*g_instruction_of)(PyFrameObject*) = nullptr;
PyThreadState* (*g_next_thread)(PyThreadState*) = nullptr;
PyObject* (*g_variable_of)(PyFrameObject*, const char*) = nullptr;

CodePath g_code_path = CodePath::kUnknown;

namespace {

PyThreadState* (*g_first_thread)(PyInterpreterState*) = nullptr;
constexpr unsigned long kNobody = ~0UL;  // no thread's ident
constexpr long kSeparate = 0x030B0000, kUnknownFrom = 0x030C0000;
constexpr int kUnknown = -1;
constexpr int kMostWords = 34;  // of a thread's state that are looked at, and the next: it has 35 at least (3.10)
int g_profile_function_at = kUnknown;  // PyThreadState: its profile function, in words
int g_ident_at = kUnknown;             // its ids: one word each, one behind the other
bool g_has_system_id = false;

unsigned long number_at(PyThreadState* thread, int at) {
  return static_cast<unsigned long>(reinterpret_cast<uintptr_t>(word_of(thread, at)));
}

}  // namespace

bool find_interpreter_functions() {
  auto find = [](const char* name, auto* function) {
    void* found = dlsym(RTLD_DEFAULT, name);
    std::memcpy(function, &found, sizeof found);
    return found != nullptr;
  };
  find("PyFrame_GetVarString", &g_variable_of);
  find("_PyEval_SetProfile", &g_set_profile);
  find("PyFrame_GetLasti", &g_instruction_of);
  return find("PyThreadState_GetFrame", &g_frame_of) && find("PyFrame_GetBack", &g_caller_of) &&
         find("PyInterpreterState_ThreadHead", &g_first_thread) && find("PyThreadState_Next", &g_next_thread);
}

PyThreadState* first_thread() {
  PyThreadState* first = g_first_thread(PyInterpreterState_Get());
  // A native thread that asks for Python's lock makes its state without it, and CPython 3.11 puts that at the head of
  // the list before it is filled in: without frames (to look for them crashes) and without a next one (all others would
  // be missed). All of that happens under the lock of the list, which no API takes but those that search the list: once
  // this one has looked for nobody, what was read above is complete.
  PyThreadState_SetAsyncExc(kNobody, nullptr);
  return first;
}

long instruction_of(PyFrameObject* frame) {
  if (__builtin_expect(g_instruction_of != nullptr, 1)) return g_instruction_of(frame);
  Unraising guard;
  PyObject* instruction = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_lasti");
  long at = instruction == nullptr ? -1 : PyLong_AsLong(instruction);
  Py_XDECREF(instruction);
  return at;
}

PyObject* code_of(PyFrameObject* frame) {
  if (PyObject* found = find_code(frame)) return found;
  auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  Py_DECREF(code);
  return code;
}

void find_code_of_frame() {
  PyFrameObject* frame = g_frame_of(PyThreadState_Get());
  PyObject* number = PySys_GetObject("hexversion");
  long version = number == nullptr ? kUnknownFrom : PyLong_AsLong(number);
  if (frame == nullptr) return;
  bool behind = version >= kSeparate;
  const void* holder = behind ? word_of(frame, kCodeAt - 1) : frame;
  if (version < kUnknownFrom && holder != nullptr && word_of(holder, kCodeAt) == code_of(frame))
    g_code_path = behind ? CodePath::kBehind : CodePath::kInFrame;
  Py_DECREF(frame);
}

void find_thread_ids() {
  PyThreadState* thread = PyThreadState_Get();
  for (int at = 0; at < kMostWords; ++at) {
    if (number_at(thread, at) != PyThread_get_thread_ident()) continue;
    g_ident_at = at;
    g_has_system_id = number_at(thread, at + 1) == PyThread_get_thread_native_id();
    return;
  }
}

bool can_see_thread_ids() {
  return g_ident_at != kUnknown && ids_of(PyThreadState_Get()).ident == PyThread_get_thread_ident();
}

ThreadIds ids_of(PyThreadState* thread) {
  return {number_at(thread, g_ident_at), g_has_system_id ? number_at(thread, g_ident_at + 1) : 0};
}

int set_profile(PyThreadState* thread, ProfileFunction function, PyObject* object) {
  Unraising guard;
  return g_set_profile(thread, function, object);
}

ProfileFunction profile_function_of(PyThreadState* thread) {
  ProfileFunction function;
  std::memcpy(&function, reinterpret_cast<const char*>(thread) + g_profile_function_at * sizeof function,
              sizeof function);
  return function;
}

void find_profile_function(ProfileFunction known) {
  PyThreadState* thread = PyThreadState_Get();
  for (g_profile_function_at = 0; g_profile_function_at < kMostWords; ++g_profile_function_at)
    if (profile_function_of(thread) == known) return;
  g_profile_function_at = kUnknown;
}

bool can_see_profile_functions() { return g_profile_function_at != kUnknown; }

}  // namespace otp_python
