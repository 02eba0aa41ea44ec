// Threads that make no call and no return as long as a session runs: they wait in a lock or a socket, or for a long C
// function. Nothing was begun on them, since only a thread itself can write to its buffer. What was on such a thread's
// stack when the session came is there still, so it is looked at once, before the session's end.
//
// The stacks are taken in one go, in which nothing of the program's runs and no thread begins or ends; only then they
// get their names, which may run anything.
//
// Python's lock is held in all of this.
#include <new>

#include "profile_function.h"
#include "tracer.h"

namespace otp_python {

namespace {

// A frame of a thread that waits; owned. What else there is to it may change as soon as the thread continues.
struct Place {
  PyFrameObject* frame;
  uintptr_t key;
  int line;
};

struct Waiting {
  ThreadIds ids;
  std::vector<Place> places;  // from the innermost on
};

// Releases the frames.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks() {
    Unraising guard;
    for (const Waiting& thread : d_threads)
      for (const Place& place : thread.places) Py_DECREF(place.frame);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void take(PyThreadState* thread) {
    std::vector<PyFrameObject*> frames = frames_from(g_frame_of(thread));
    if (frames.empty()) return;
    std::vector<Place>& places = d_threads.emplace_back(Waiting{ids_of(thread), {}}).places;
    places.reserve(frames.size());
    for (PyFrameObject* frame : frames)
      places.push_back({frame, g_tracer.mechanism->key(frame), PyFrame_GetLineNumber(frame)});
  }

  const std::vector<Waiting>& threads() const { return d_threads; }

 private:
  std::vector<Waiting> d_threads;
};

// To make the object of a frame may be the moment in which garbage is collected, up to Python 3.11.
class NoCollections {
 public:
  NoCollections() : d_enabled(PyGC_Disable()) {}
  ~NoCollections() {
    if (d_enabled != 0) PyGC_Enable();
  }
  NoCollections(const NoCollections&) = delete;
  NoCollections& operator=(const NoCollections&) = delete;

 private:
  int d_enabled;
};

// Whether the thread was there when the session came, and has had no event since, though it would have been reported.
bool waits(PyThreadState* thread, int bit) {
  uint64_t number = PyThreadState_GetID(thread);
  if (number > g_tracer.last_thread[bit] || !g_tracer.mechanism->follows(thread)) return false;
  auto last = g_tracer.looked_around.find(number);
  return last == g_tracer.looked_around.end() || last->second < g_tracer.came_in[bit];
}

void take_stacks(int bit, Stacks* stacks) {
  Unraising guard;
  NoCollections pause;
  for (PyThreadState* thread = first_thread(); thread != nullptr; thread = g_next_thread(thread))
    if (waits(thread, bit)) stacks->take(thread);
}

// A list of (name, identity) from the top-level call on, without what the session leaves out.
PyObject* named(FrameNames& names, const std::vector<Place>& places, uint32_t session) {
  PyObject* calls = PyList_New(0);
  bool closed = false;
  for (size_t i = places.size(); calls != nullptr && i-- > 0;) {
    const Place& place = places[i];
    PyObject* object = reinterpret_cast<PyObject*>(PyFrame_GetCode(place.frame));
    Code& code = names.code_of(object, place.frame);
    Py_DECREF(object);
    closed |= code.is_closed;
    if (code.is_own || closed || (code.not_for & session) != 0) continue;
    uint32_t name = names.of_running(code, place.frame, place.line);
    uint32_t identity = code.is_suspended ? names.of_generator(key_of(place.key), false) : 0;
    PyObject* call = Py_BuildValue("II", name, identity);
    int status = call == nullptr ? -1 : PyList_Append(calls, call);
    Py_XDECREF(call);
    if (status != 0) Py_CLEAR(calls);
  }
  return calls;
}

// Null with an exception set where there is no memory.
PyObject* list_of(FrameNames& names, const Stacks& stacks, uint32_t session) {
  PyObject* threads = PyList_New(0);
  for (const Waiting& thread : stacks.threads()) {
    if (threads == nullptr) break;
    PyObject* calls = named(names, thread.places, session);
    PyObject* entry = calls == nullptr ? nullptr : Py_BuildValue("kkN", thread.ids.ident, thread.ids.system, calls);
    int status = entry == nullptr ? -1 : PyList_Append(threads, entry);
    Py_XDECREF(entry);
    if (status != 0) Py_CLEAR(threads);
  }
  return threads;
}

}  // namespace

PyObject* waiting_stacks(PyObject*, PyObject* argument) try {
  auto session = static_cast<uint32_t>(PyLong_AsUnsignedLong(argument));
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (g_tracer.names == nullptr || g_tracer.process != getpid()) return PyList_New(0);
  bool one = (session & (session - 1)) == 0 && (session & g_tracer.sessions) != 0;
  Stacks stacks;
  if (one && (g_tracer.names->modules_only & session) == 0 && can_see_thread_ids())
    take_stacks(__builtin_ctz(session), &stacks);
  ThreadCalls outside;  // keeps the names, whatever runs meanwhile
  Inside inside(outside);
  return list_of(*g_tracer.names, stacks, session);
} catch (const std::bad_alloc&) {
  return PyErr_NoMemory();
}

}  // namespace otp_python
