// The tracer of calls: what is open on each thread, and for which sessions. How it comes to know of calls is another
// matter: frames.cc (a profile function, up to Python 3.11), monitoring.cc (sys.monitoring, since 3.12).
//
// A thread can only write to its own buffer, so what is on its stack already when a session starts is begun with the
// thread's first event, and with the time of the session's start. Threads that have none at all: waiting.cc.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_TRACER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_TRACER_H_

#include <unistd.h>

#include <unordered_map>
#include <vector>

#include "frame_names.h"

namespace otp_python {

// Which calls are open on a thread, the recorder's stack says. The key of a call there is the address of its frame (or
// whatever a mechanism has in its place: a multiple of 16); of a C function, that of its caller plus kFunction. Where a
// session comes while a frame runs, the call is begun for that session with kRunning added to the key: above its plain
// key, if another session has the call too.
constexpr uintptr_t kFunction = 1, kRunning = 2;
// No key of a call has any of these bits; other events of their kind have (collections.cc).
constexpr uintptr_t kNoCall = 12;

// Why calls of a thread take the long way.
enum Special : uint32_t {
  kInsideClosed = 1,  // of a function of this package that calls nothing of the program's
  kPaused = 2,        // nothing of it is requested now
  kLimited = 4,       // a session has a maximum depth
  kFollowed = 8,      // a session follows contexts: to begin a call may run code of the program
};

// What begins with a call of that code, where it is a usual one: known by its object.
struct LastCode {
  PyObject* object = nullptr;
  uint32_t name = 0;
  uint32_t sessions = 0;  // that get it
};

// One thread's.
struct ThreadCalls {
  uint32_t special = 0;
  uint32_t sessions = 0;                  // that request calls
  uint32_t epoch = 0;                     // of the tracer, when `sessions` was true
  LastCode last;                          // while `sessions` are the same
  std::vector<uintptr_t> left_out;        // the keys of frames that run and that no session has, the innermost last
  uintptr_t closed_by = 0;                // the outermost frame all of whose callees are left out
  uint32_t run = 0;                       // of the tracer, that all of this is of
  uint32_t id = 0;                        // the recorder's, of the thread; 0: it has recorded nothing
  uint64_t since[OTP_MAX_SESSIONS] = {};  // by session: the recorder's index from which calls count for its depth
  uint64_t number = 0;                    // of Python's state of the thread, once it has had an event
  PyObject* owner = nullptr;              // what this goes with, if that is an object; borrowed
};

// A way in which the interpreter reports calls.
struct Mechanism {
  // On the calling thread: that one and all others from now on. `passed_over`: threads that are another tool's. False,
  // with an exception set, where the interpreter refuses.
  bool (*start)(int* passed_over);
  void (*stop)();
  // A session has started, or one has stopped while others run: what the interpreter reports may have to change.
  void (*adapt)();
  // As what it lists a frame.
  uintptr_t (*key)(PyFrameObject* frame);
  // The calling thread's, or null where it has none (any more).
  ThreadCalls* (*here)();
  // Sees to it that what runs on the calling thread is open in the recorder, as with the thread's next event.
  void (*look)();
  // Whether it sees all calls and returns of a thread that are requested.
  bool (*follows)(PyThreadState* thread);
};

// Where the process ends with the tracer on, or with calls inside of it, nothing of it may be released: there is no
// interpreter any more, or this thread is none of its own. So what is of the interpreter has no owner here.
struct Tracer {
  FrameNames* names = nullptr;  // null: it is off
  const Mechanism* mechanism = nullptr;
  uint32_t sessions = 0;
  uint32_t epoch = 1;         // raised when one starts or stops
  uint32_t run = 0;           // how many times it was switched on
  uint32_t no_functions = 0;  // sessions that request no C functions
  uint32_t filtered = 0;      // sessions that leave out some codes
  uint32_t limited = 0;       // sessions with a maximum depth
  uint32_t following = 0;     // sessions that follow contexts
  uint32_t max_depth[OTP_MAX_SESSIONS] = {};
  uint32_t came_in[OTP_MAX_SESSIONS] = {};               // the epoch
  uint64_t started[OTP_MAX_SESSIONS] = {};               // the recorder's ticks
  uint64_t last_thread[OTP_MAX_SESSIONS] = {};           // the highest number of a thread's state that there was then
  std::unordered_map<uint64_t, uint32_t> looked_around;  // when a thread last did: the epoch, by its state's number
  uint32_t displaced = 0;                                // threads that another tool took
  pid_t process = 0;                                     // that it belongs to

  // What makes a name can run Python code (a finalizer, a metaclass), and that code, or another thread meanwhile, can
  // stop the tracer. Then what the calls that are still inside of it use stays until the last of them is done.
  uint32_t inside = 0;
  std::vector<FrameNames*> retired;
};
extern Tracer g_tracer;
extern thread_local uint32_t t_pauses;  // how many times the calling thread was paused, traced or not

// Around what may run code of the program, or stop the tracer.
class Inside {
 public:
  explicit Inside(ThreadCalls& thread) : d_owner(thread.owner) {
    Py_XINCREF(d_owner);
    ++g_tracer.inside;
  }
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  PyObject* d_owner;
};

inline const void* key_of(uintptr_t open) { return reinterpret_cast<const void*>(open); }

// ---- the long ways ----

// Of a generator or coroutine: whether it begins or continues; of all else it does not matter.
enum class Start { kFresh, kResumed, kUnknown };

// A segment of a generator that begins, or continues, where one of its code has before. False: it does not.
bool enter_segment(ThreadCalls& thread, uintptr_t key, const Code& code, PyFrameObject* frame);
// A call that is none of the usual: to be named first, a generator's, left out, or on a special thread. `code` is run
// by `frame`, which is null where a mechanism has none at hand: it is then the thread's innermost.
void enter_slowpath(ThreadCalls& thread, uintptr_t key, PyObject* code, PyFrameObject* frame, Start start);
// The caller's code is that of its frame, where it is null. The function may be null where its name is known.
void enter_function_slowpath(ThreadCalls& thread, uintptr_t caller, PyObject* code, PyFrameObject* frame,
                             PyObject* function, uint32_t name = 0);
// What is not the innermost, left out, open for a session that came later, too, not there, or ends with an error whose
// type is known.
void leave_slowpath(ThreadCalls& thread, uintptr_t key, uint8_t flags, const char* error, uint32_t error_size);
// Whether the recorder has the call of a C function open on the calling thread.
bool is_function_open(uintptr_t key);
// All that is open on the calling thread, by plain keys: what the recorder has, the innermost call first, and what is
// left out.
std::vector<uintptr_t> open_calls(const ThreadCalls& thread);
// The sessions that have started since the thread last looked around.
uint32_t newcomers_of(const ThreadCalls& thread);
// Sessions have started or stopped since the thread's last event. `innermost` was there before it; released.
void follow_sessions(ThreadCalls& thread, PyFrameObject* innermost);
// Ends all that is open on the thread, from whichever thread. Whether anything was.
bool end_all(ThreadCalls& thread);
// As that, and the thread ends.
bool forget_thread(ThreadCalls& thread);

// The calls on a stack that count as open where a session comes, from the innermost on. Takes the frame; the caller
// releases what it gets.
std::vector<PyFrameObject*> frames_from(PyFrameObject* innermost);

// ---- for the mechanisms ----

// The functions of the extension that switch the tracer on and off. 0, or -1 with an exception set.
int add_tracer(PyObject* module, const Mechanism* mechanism);

// ---- waiting.cc ----

// waiting_stacks(consumer) -> list; see _python.pyi.
PyObject* waiting_stacks(PyObject*, PyObject* argument);

// ---- what every call does ----

inline bool is_left_out(const ThreadCalls& thread, uintptr_t frame) {
  return !thread.left_out.empty() && thread.left_out.back() == frame;
}

// Whether a frame that is entered only now has begun already: it ran when the thread's stack was begun.
inline __attribute__((always_inline)) bool is_begun(const ThreadCalls& thread, uintptr_t key) {
  const otp::hot::Thread* here = otp::hot::this_thread(g_hot);
  uint32_t depth = here == nullptr ? 0 : here->depth.get();
  bool ran = depth != 0 && here->open[depth - 1].key.get() == key_of(key | kRunning);
  return __builtin_expect(ran, 0) ? here->ended_elsewhere_flag.load(std::memory_order_relaxed) == 0
                                  : is_left_out(thread, key);
}

// For those sessions, of which there are some; false where that needs the recorder's function.
inline __attribute__((always_inline)) bool begin_inline(ThreadCalls& thread, uintptr_t key, uint32_t name,
                                                        uint32_t identity, uint32_t sessions) {
  const otp::hot::Thread* here = otp::hot::begin_call_here(g_hot, key_of(key), name, identity, sessions);
  if (__builtin_expect(here == nullptr, 0)) return false;
  thread.id = here->id;
  return true;
}

// As that, with the recorder's function; or leaves the call out, where no session gets it.
void begin_or_leave_out(ThreadCalls& thread, uintptr_t key, uint32_t name, uint32_t identity, uint32_t not_for);

inline void begin_call(ThreadCalls& thread, uintptr_t key, uint32_t name, uint32_t identity, uint32_t not_for) {
  uint32_t sessions = thread.sessions & ~not_for;
  if (__builtin_expect(sessions == 0 || !begin_inline(thread, key, name, identity, sessions), 0))
    begin_or_leave_out(thread, key, name, identity, not_for);
}

// Whether the call is a usual one, and has begun.
inline __attribute__((always_inline)) bool enter_usual(ThreadCalls& thread, uintptr_t key, PyObject* object) {
  if (__builtin_expect(thread.special != 0 || is_begun(thread, key), 0)) return false;
  if (thread.last.object != object) {
    const Code* code = g_tracer.names->find(object);
    if (__builtin_expect(code == nullptr || !code->is_usual, 0)) return false;
    uint32_t sessions = thread.sessions & ~code->not_for;
    if (__builtin_expect(sessions == 0, 0)) return false;
    thread.last = {object, code->name, sessions};
  }
  return begin_inline(thread, key, thread.last.name, 0, thread.last.sessions);
}

// Whether the call was a usual one, and has ended.
inline __attribute__((always_inline)) bool leave_usual(const ThreadCalls& thread, uintptr_t key) {
  return thread.special == 0 && otp::hot::end_call_here(g_hot, key_of(key));
}

// Whether a call of a function of C, by its name (0: not known), is a usual one and has begun, or nobody requests it.
inline __attribute__((always_inline)) bool enter_usual_function(ThreadCalls& thread, uintptr_t caller, uint32_t name) {
  uint32_t sessions = thread.sessions & ~g_tracer.no_functions;
  if (__builtin_expect(sessions == 0, 0)) return true;
  bool usual = name != 0 && (thread.special | g_tracer.filtered) == 0 && !is_left_out(thread, caller);
  return __builtin_expect(usual, 1) && begin_inline(thread, caller | kFunction, name, 0, sessions);
}

// Of a builtin_function_or_method. For `code` and `frame` see enter_function_slowpath.
inline void enter_function(ThreadCalls& thread, uintptr_t caller, PyObject* code, PyFrameObject* frame,
                           PyObject* function) {
  uint32_t name = g_tracer.names->find_function(function);
  if (!enter_usual_function(thread, caller, name)) enter_function_slowpath(thread, caller, code, frame, function, name);
}

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_TRACER_H_
