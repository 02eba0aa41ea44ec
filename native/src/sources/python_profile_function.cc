#include "python_profile_function.h"

#include <dlfcn.h>

#include <cstring>

namespace otp_python {

int (*g_set_profile)(PyThreadState*, ProfileFunction, PyObject*) = nullptr;
PyFrameObject* (*g_frame_of)(PyThreadState*) = nullptr;
PyFrameObject* (*g_caller_of)(PyFrameObject*) = nullptr;
PyThreadState* (*g_first_thread)(PyInterpreterState*) = nullptr;
PyThreadState* (*g_next_thread)(PyThreadState*) = nullptr;

namespace {

constexpr int kUnknown = -1;
constexpr int kMostWords = 80;         // of a thread's state that are looked at
int g_profile_function_at = kUnknown;  // PyThreadState: its profile function, in words

}  // namespace

bool find_interpreter_functions() {
  auto find = [](const char* name, auto* function) {
    void* found = dlsym(RTLD_DEFAULT, name);
    std::memcpy(function, &found, sizeof found);
    return found != nullptr;
  };
  return find("_PyEval_SetProfile", &g_set_profile) && find("PyThreadState_GetFrame", &g_frame_of) &&
         find("PyFrame_GetBack", &g_caller_of) && find("PyInterpreterState_ThreadHead", &g_first_thread) &&
         find("PyThreadState_Next", &g_next_thread);
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
