#include "tracer.h"

#include <algorithm>
#include <utility>

#include "profile_function.h"

namespace otp_python {

Tracer g_tracer;
thread_local uint32_t t_pauses = 0;

namespace {

constexpr size_t kMostFrames = 128;         // of a stack that is there already, from the innermost on
constexpr char kUnknownError[] = "_OTHER";  // OpenTelemetry's word for an error.type that is not known

// One by one: what goes with them may run code that comes here too.
__attribute__((noinline)) void release_retired() {
  Unraising guard;
  while (!g_tracer.retired.empty()) {
    FrameNames* names = g_tracer.retired.back();
    g_tracer.retired.pop_back();
    delete names;
  }
}

// ---- the long ways ----

bool is_closed(const ThreadCalls& thread) { return !thread.open.empty() && (thread.open.back() & kClosed) != 0; }

// After the list has become longer or shorter.
void note_innermost(ThreadCalls& thread) {
  thread.special = (thread.special & ~kInsideClosed) | (is_closed(thread) ? kInsideClosed : 0u);
}

// A call that is not to be seen.
void leave_out(ThreadCalls& thread, uintptr_t key, bool closed) {
  thread.open.push_back(key | kLeftOut | (closed ? kClosed : 0));
  note_innermost(thread);
}

// The sessions for which another call would be too deep.
uint32_t too_deep(const ThreadCalls& thread) {
  uint32_t found = 0;
  if ((thread.special & kLimited) == 0) return found;
  for (uint32_t rest = g_tracer.limited; rest != 0; rest &= rest - 1)
    if (thread.depths.of(__builtin_ctz(rest)) >= g_tracer.max_depth[__builtin_ctz(rest)]) found |= rest & -rest;
  return found;
}

void begin_kept(ThreadCalls& thread, uintptr_t key, uint32_t name, uint32_t identity, uint32_t not_for) {
  if ((thread.special & kLimited) != 0)
    thread.depths.add(thread.open.size(), thread.sessions & g_tracer.limited & ~not_for);
  begin_listed(thread, key, name, identity, not_for);
}

void finish(uintptr_t open, uint8_t flags, const char* error, uint32_t error_size) {
  if ((open & (kLeftOut | kNotTaken)) != 0) return;
  if ((flags & OTP_FLAG_ERROR) == 0) {
    g_api->end_frame(key_of(open & ~kMarks), flags);
  } else if (error == nullptr) {
    g_api->end(key_of(open & ~kMarks), flags, kUnknownError, sizeof kUnknownError - 1);
  } else {
    g_api->end(key_of(open & ~kMarks), flags, error, error_size);
  }
}

// The frame that the calling thread runs, where the caller has none at hand.
class RunningFrame {
 public:
  explicit RunningFrame(PyFrameObject* known) : d_frame(known == nullptr ? g_frame_of(PyThreadState_Get()) : known) {
    if (known != nullptr) Py_INCREF(d_frame);
  }
  ~RunningFrame() { Py_XDECREF(d_frame); }
  RunningFrame(const RunningFrame&) = delete;
  RunningFrame& operator=(const RunningFrame&) = delete;
  PyFrameObject* get() const { return d_frame; }

 private:
  PyFrameObject* d_frame;
};

// Whether a generator begins to run, in a frame of it.
bool begins(Start start, const Code& code, PyFrameObject* frame) {
  return start == Start::kUnknown ? instruction_of(frame) <= code.start : start == Start::kFresh;
}

// What is entered unseen may be a generator that begins, in the frame of one that was seen. Of a code that is not known
// nothing was ever seen.
void enter_unseen(FrameNames& names, uintptr_t key, const Code* code, PyFrameObject* frame, Start start) {
  bool is_new = code == nullptr || (code->is_suspended && begins(start, *code, frame));
  if (is_new) names.forget_generator(key_of(key));
}

// Whether the thread's innermost call is that frame, and nothing that it calls is requested: it is left out for all
// sessions that it is listed for, or closed.
bool is_unrequested(const ThreadCalls& thread, uintptr_t frame) {
  const std::vector<uintptr_t>& open = thread.open;
  auto kept = [frame](uintptr_t entry) { return (entry & ~kMarks) == frame && (entry & (kLeftOut | kClosed)) == 0; };
  if (open.empty() || (open.back() & ~kMarks) != frame || kept(open.back())) return false;
  return thread.again == 0 || std::none_of(open.begin(), open.end(), kept);
}

// The sessions that leave out what a code calls.
uint32_t not_for_callees(PyObject* object, PyFrameObject* frame) {
  PyObject* of_frame = object == nullptr ? reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)) : nullptr;
  const Code* code = g_tracer.names->find(object == nullptr ? of_frame : object);
  Py_XDECREF(of_frame);
  return code == nullptr ? 0 : code->not_for;
}

}  // namespace

Inside::~Inside() {
  if (--g_tracer.inside == 0 && __builtin_expect(!g_tracer.retired.empty(), 0)) release_retired();
  Py_XDECREF(d_owner);
}

uint32_t newcomers_of(const ThreadCalls& thread) {
  uint32_t found = 0;
  for (uint32_t rest = g_tracer.sessions; rest != 0; rest &= rest - 1)
    if (g_tracer.came_in[__builtin_ctz(rest)] > thread.epoch) found |= rest & -rest;
  return found;
}

__attribute__((noinline)) void list_unlisted(ThreadCalls& thread) {
  std::vector<uintptr_t>& open = thread.open;
  size_t listed = open.size();
  if (open.capacity() - listed < OTP_MAX_DEPTH) open.reserve(2 * listed + OTP_MAX_DEPTH);
  open.resize(listed + thread.unlisted);  // no array on the stack, of which a thread may have little
  open.resize(listed + g_api->unmark_frames(kUnlisted, thread.unlisted, open.data() + listed));
  thread.unlisted = 0;
}

void begin_listed(ThreadCalls& thread, uintptr_t key, uint32_t name, uint32_t identity, uint32_t not_for) {
  list_open(thread);
  thread.open.push_back(key);
  uint32_t sessions = thread.sessions & ~not_for;
  if (sessions == 0) {
    thread.open.back() |= kLeftOut;
    return;
  }
  uint32_t id = g_api->begin_frame(key_of(key), name, identity, sessions);
  if (id != 0) thread.id = id;
  if (id == 0) thread.open.back() |= kNotTaken;
}

bool enter_segment(ThreadCalls& thread, uintptr_t key, const Code& code, PyFrameObject* frame) {
  if (code.is_own || thread.special != 0) return false;
  FrameNames& names = *g_tracer.names;
  long instruction = instruction_of(frame);
  uint32_t name = names.find_place(code, instruction);
  if (name == 0) return false;
  begin_call(thread, key, name, names.of_generator(key_of(key), instruction <= code.start), code.not_for);
  return true;
}

void enter_slowpath(ThreadCalls& thread, uintptr_t key, PyObject* object, PyFrameObject* known, Start start) {
  list_open(thread);
  if ((thread.special & kPaused) != 0) {
    enter_unseen(*g_tracer.names, key, g_tracer.names->find(object), known, start);
    return leave_out(thread, key, is_closed(thread));
  }
  Inside inside(thread);
  FrameNames& names = *g_tracer.names;
  Code& code = names.code_of(object, known);
  bool closed = is_closed(thread);
  uint32_t not_for = code.not_for | too_deep(thread);
  if (code.is_own || closed || (thread.sessions & ~not_for) == 0) {
    enter_unseen(names, key, &code, known, start);
    return leave_out(thread, key, closed || code.is_closed);
  }
  uint32_t name = code.name;
  uint32_t identity = 0;
  if (!code.is_usual) {
    RunningFrame frame(known);
    if (code.is_suspended) identity = names.of_generator(key_of(key), begins(start, code, frame.get()));
    if (code.is_step) identity = names.of_optimizer(frame.get());
    name = names.of_call(code, frame.get());
    if (code.is_suspended && known != nullptr) names.keep_place(code, instruction_of(known), known);
  }
  // Naming may have let sessions go, and others come in their place.
  not_for |= newcomers_of(thread);
  if ((thread.sessions & ~not_for) == 0) return;
  begin_kept(thread, key, name, identity, not_for);
  if (code.is_quiet) thread.open.back() |= kClosed;
  note_innermost(thread);
}

// C functions that a left-out function calls are left out with it, and are not even listed.
void enter_function_slowpath(ThreadCalls& thread, uintptr_t caller, PyObject* code, PyFrameObject* frame,
                             PyObject* function, uint32_t name) {
  list_open(thread);
  if ((thread.special & kPaused) != 0 || is_unrequested(thread, caller)) return;
  if (name == 0 && !PyCFunction_Check(function)) return;
  Inside inside(thread);
  uint32_t not_for = g_tracer.no_functions | too_deep(thread);
  if (g_tracer.filtered != 0) not_for |= not_for_callees(code, frame);
  if ((thread.sessions & ~not_for) == 0) return;
  if (name == 0) name = g_tracer.names->of_function(function);
  not_for |= newcomers_of(thread);  // see enter_slowpath
  if (name != 0 && (thread.sessions & ~not_for) != 0) begin_kept(thread, caller | kFunction, name, 0, not_for);
}

namespace {

// What was open before the tracer came is not there.
__attribute__((noinline)) void leave_inside(ThreadCalls& thread, uintptr_t key, uint8_t flags, const char* error,
                                            uint32_t error_size) {
  std::vector<uintptr_t>& open = thread.open;
  bool found = false;
  for (size_t i = open.size(); i-- > 0;) {
    if ((open[i] & ~kMarks) != key) continue;
    uintptr_t entry = open[i];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    thread.depths.remove(i);
    finish(entry, flags, error, error_size);
    if (found && --thread.again == 0) thread.special &= ~kTwice;
    if (thread.again == 0) return;
    found = true;
  }
}

}  // namespace

void leave_slowpath(ThreadCalls& thread, uintptr_t key, uint8_t flags, const char* error, uint32_t error_size) {
  list_open(thread);
  uintptr_t innermost = thread.open.empty() ? 0 : thread.open.back();
  bool listed = (key & kFunction) == 0 || (innermost & ~kMarks) != (key & ~kFunction) || thread.again != 0;
  if (!listed) return;
  if ((innermost & ~kMarks) == key && thread.again == 0) {
    thread.open.pop_back();
    thread.depths.remove(thread.open.size());
    finish(innermost, flags, error, error_size);
  } else {
    leave_inside(thread, key, flags, error, error_size);
  }
  note_innermost(thread);
}

// ---- what was there before ----

namespace {

// When what is on the stack has begun for the newcomers: at their start, if the thread was there then; else now (0).
uint64_t beginning(uint32_t newcomers) {
  uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
  uint64_t found = 0;
  for (uint32_t rest = newcomers; rest != 0; rest &= rest - 1) {
    int bit = __builtin_ctz(rest);
    if (thread > g_tracer.last_thread[bit]) return 0;
    if (found == 0 || g_tracer.started[bit] < found) found = g_tracer.started[bit];
  }
  return found;
}

void begin_running(ThreadCalls& thread, FrameNames& names, PyFrameObject* frame, Code& code, otp_begin_args* event) {
  uintptr_t key = g_tracer.mechanism->key(frame);
  event->key = key_of(key);
  event->name = nullptr;
  event->name_size = names.of_running(code, frame, PyFrame_GetLineNumber(frame));
  event->fwd_thread = code.is_suspended ? names.of_generator(key_of(key), false) : 0;
  event->not_for |= newcomers_of(thread);  // see enter_slowpath
  thread.open.push_back(key);
  uint32_t id = g_api->begin(event);
  if (id == 0) thread.open.back() |= kNotTaken;
  if (id != 0) thread.id = id;
}

// Begins what is on the thread's stack, the top-level call first, for sessions that have none of it. Takes the frame.
// Naming, and making frames' objects, can let another thread run, and that can stop the tracer: what is left of the
// stack is then no part of any recording.
void begin_stack(ThreadCalls& thread, PyFrameObject* innermost, uint32_t newcomers) {
  FrameNames& names = *g_tracer.names;
  std::vector<PyFrameObject*> frames = frames_from(innermost);
  if (!thread.open.empty()) thread.again += frames.size();
  otp_begin_args event = {};
  event.kind = OTP_EVENT_FRAME;
  event.nests = 1;
  event.sequence_nr = -1;
  event.scope_mask = g_tracer.sessions;
  event.ticks = beginning(newcomers);
  bool closed = false;
  for (size_t i = frames.size(); i-- > 0;) {
    if (g_tracer.names != &names) {
      Py_DECREF(frames[i]);
      continue;
    }
    PyObject* object = reinterpret_cast<PyObject*>(PyFrame_GetCode(frames[i]));
    Code& code = names.code_of(object, frames[i]);
    Py_DECREF(object);
    closed |= code.is_closed;
    event.not_for = ~newcomers | code.not_for;
    if (code.is_own || closed || (newcomers & ~code.not_for) == 0) {
      leave_out(thread, g_tracer.mechanism->key(frames[i]), closed);
    } else {
      begin_running(thread, names, frames[i], code, &event);
    }
    Py_DECREF(frames[i]);
  }
  note_innermost(thread);
}

}  // namespace

std::vector<PyFrameObject*> frames_from(PyFrameObject* innermost) {
  std::vector<PyFrameObject*> frames;
  frames.reserve(kMostFrames);
  PyFrameObject* frame = innermost;
  for (; frame != nullptr && frames.size() < kMostFrames; frame = g_caller_of(frame)) frames.push_back(frame);
  Py_XDECREF(frame);
  return frames;
}

void follow_sessions(ThreadCalls& thread, PyFrameObject* innermost) {
  Inside inside(thread);
  if (thread.run != g_tracer.run) end_all(thread);
  list_open(thread);
  thread.run = g_tracer.run;
  thread.thread = pthread_self();
  uint32_t newcomers = newcomers_of(thread);
  thread.epoch = g_tracer.epoch;
  thread.number = PyThreadState_GetID(PyThreadState_Get());
  g_tracer.told[thread.number] = thread.epoch;
  thread.sessions = g_tracer.sessions;
  thread.last = {};
  if (newcomers != 0) {
    begin_stack(thread, innermost, newcomers);
  } else {
    Py_XDECREF(innermost);
  }
  thread.special &= kInsideClosed;
  if (t_pauses != 0) thread.special |= kPaused;
  if (thread.again != 0) thread.special |= kTwice;
  if (g_tracer.following != 0) thread.special |= kFollowed;
  if (g_tracer.limited != 0) thread.special |= kLimited;
  if (g_tracer.limited == 0) thread.depths.clear();
  thread.depths.forget(newcomers);
}

// In a forked child the recorder is empty, and this thread's buffer another one.
bool end_all(ThreadCalls& thread) {
  bool here = pthread_equal(thread.thread, pthread_self()) != 0;
  bool found = !thread.open.empty();
  if (getpid() == g_tracer.process) {
    if (here) {
      try {
        list_open(thread);
      } catch (const std::bad_alloc&) {  // then they end with their sessions: this is called where nobody catches it
      }
      found |= !thread.open.empty();
    } else if (thread.unlisted != 0) {
      found |= g_api->end_marked_frames(kUnlisted, thread.id) != 0;
    }
    for (size_t i = thread.open.size(); i-- > 0;) {
      uintptr_t open = thread.open[i];
      if ((open & (kLeftOut | kNotTaken)) != 0) continue;
      if (here) {
        g_api->end(key_of(open & ~kMarks), 0, nullptr, 0);
      } else {
        g_api->end_elsewhere(key_of(open & ~kMarks), thread.id, 0, 0, nullptr, 0);
      }
    }
  }
  thread.open.clear();
  thread.unlisted = 0;
  thread.again = 0;
  thread.depths.clear();
  thread.special &= kPaused;
  return found;
}

bool forget_thread(ThreadCalls& thread) {
  g_tracer.told.erase(thread.number);
  return end_all(thread);
}

}  // namespace otp_python
