// What the system says of a thread where a step of training may begin: how long it ran, how long it was ready to run
// and did not, page faults and context switches, all since the thread began; how long the other threads of the
// process ran; and the memory of the process. With it goes what data loaders have returned to the thread so far.
//
// Which phase begins a step is known later, so it is asked where one may, of threads that train: two or three times a
// step. That is one system call (0.5 us). How long a thread waited to run is in a file, which takes ten times as long:
// it is read only where the thread has been switched out since, without which it has run all the time and has not
// waited; what other threads did meanwhile is nothing that it waited for, and is left out. A descriptor that is kept
// would save most of that, and may be closed by the program, and another file have its number. Resident memory is in
// such a file, too (8 us), so that it is read every 10 ms at most; the highest comes with the system call.
//
// Python's lock is held in all of this.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

#include "source.h"

namespace otp_python {

namespace {

struct Usage {
  uint64_t event;    // of the phase at whose begin this was; 0: none
  int64_t thread;    // the system's number
  int64_t runnable;  // ns; -1: the system does not say
  int64_t minor_faults, major_faults, voluntary_switches, involuntary_switches;
  int64_t running, of_process;  // ns that the thread ran, and all threads together
  int64_t resident, peak;       // bytes of the process's resident memory, and the most so far; -1: unknown
  Loaded loaded;
};

constexpr size_t kMost = 1 << 16;   // that may wait for a drain; memory is touched only for as many as do
constexpr size_t kNear = 16;        // entries between two that a drain asks for, as a rule
std::array<Usage, kMost> g_latest;  // of all threads
size_t g_count = 0;
size_t g_next = 0;    // behind the one that was found last: a drain asks for them in the order of time
pid_t g_process = 0;  // that these are of: a forked child counts its events anew
constexpr int64_t kResidentEvery = 10'000'000;  // ns between two readings of resident memory
int64_t g_resident = -1, g_resident_at = 0;     // as of the latest reading; when that was

int64_t clock_ns(clockid_t clock) {
  struct timespec now;
  return clock_gettime(clock, &now) == 0 ? now.tv_sec * INT64_C(1000000000) + now.tv_nsec : 0;
}

// The second number in a small file; -1 where there is none.
int64_t second_number(const char* path) {
  char text[128];
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size <= 0) return -1;
  text[size] = '\0';
  int64_t first = 0, second = 0;
  return std::sscanf(text, "%" SCNd64 " %" SCNd64, &first, &second) == 2 ? second : -1;
}

void forget_in_child() {
  if (g_process == getpid()) return;
  g_process = getpid();
  g_count = g_next = 0;
  g_resident_at = 0;
}

int64_t resident(int64_t now) {
  forget_in_child();
  if (g_resident_at != 0 && now - g_resident_at < kResidentEvery) return g_resident;
  g_resident_at = now;
  int64_t pages = second_number("/proc/self/statm");
  g_resident = pages < 0 ? -1 : pages * sysconf(_SC_PAGESIZE);
  return g_resident;
}

bool ask(PythonThread* thread, Usage* usage) {
#ifdef RUSAGE_THREAD
  struct rusage found;
  if (getrusage(RUSAGE_THREAD, &found) != 0) return false;
  int64_t switches = found.ru_nvcsw + found.ru_nivcsw, id = syscall(SYS_gettid);
  int64_t now = clock_ns(CLOCK_MONOTONIC);
  if (thread->usage_of != id || thread->switches != switches) {
    thread->usage_of = id;
    thread->switches = switches;
    thread->runnable = second_number("/proc/thread-self/schedstat");  // the first is as of the latest tick
    thread->running = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    thread->of_process = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
  } else {
    thread->running += now - thread->asked_at;
    thread->of_process += now - thread->asked_at;
  }
  thread->asked_at = now;
  *usage = {0,
            id,
            thread->runnable,
            found.ru_minflt,
            found.ru_majflt,
            found.ru_nvcsw,
            found.ru_nivcsw,
            thread->running,
            thread->of_process,
            resident(now),
            INT64_C(1024) * found.ru_maxrss,
            thread->loaded};
  return true;
#else
  (void)thread;
  (void)usage;
  return false;
#endif
}

PyObject* as_tuple(const Usage& usage) {
  return Py_BuildValue("LLLLLLLLLLLL", static_cast<long long>(usage.thread), static_cast<long long>(usage.runnable),
                       static_cast<long long>(usage.minor_faults), static_cast<long long>(usage.major_faults),
                       static_cast<long long>(usage.voluntary_switches),
                       static_cast<long long>(usage.involuntary_switches), static_cast<long long>(usage.running),
                       static_cast<long long>(usage.of_process), static_cast<long long>(usage.resident),
                       static_cast<long long>(usage.peak), static_cast<long long>(usage.loaded.tokens),
                       static_cast<long long>(usage.loaded.samples));
}

// The usage at an event; null if none was read there, or too many since.
const Usage* find(uint64_t event) {
  size_t oldest = g_count > kMost ? g_count - kMost : 0, from = std::max(g_next, oldest);
  for (size_t i = from; i < std::min(from + kNear, g_count); ++i) {
    if (g_latest[i % kMost].event != event) continue;
    g_next = i + 1;
    return &g_latest[i % kMost];
  }
  for (size_t i = g_count; i-- > oldest;) {
    const Usage& usage = g_latest[i % kMost];
    if (usage.event == event) {
      g_next = i + 1;
      return &usage;
    }
    // A thread's ids rise, so that of an event that was not asked for only what came after it is looked through.
    if (usage.event >> OTP_INDEX_BITS == event >> OTP_INDEX_BITS && usage.event < event) break;
  }
  return nullptr;
}

// usage_at(event); see _python.pyi.
PyObject* usage_at(PyObject*, PyObject* number) {
  uint64_t event = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  forget_in_child();
  const Usage* usage = event == 0 ? nullptr : find(event);
  if (usage == nullptr) Py_RETURN_NONE;
  return as_tuple(*usage);
}

// usage_now(); see _python.pyi.
PyObject* usage_now(PyObject*, PyObject*) {
  PythonThread* thread = python_thread();
  Usage usage;
  if (thread == nullptr || !ask(thread, &usage)) Py_RETURN_NONE;
  return as_tuple(usage);
}

PyMethodDef g_methods[] = {{"usage_at", usage_at, METH_O, nullptr},
                           {"usage_now", usage_now, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void note_usage(PythonThread* thread) {
  Usage usage;
  uint32_t consumers = 0;
  if (!ask(thread, &usage)) return;
  usage.event = g_api->innermost(&consumers);
  g_latest[g_count++ % kMost] = usage;
}

int add_usage(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
