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

void set_closed_by(ThreadCalls& thread, uintptr_t frame) {
  thread.closed_by = frame;
  thread.special = (thread.special & ~kInsideClosed) | (frame != 0 ? kInsideClosed : 0u);
}

bool is_closed(const ThreadCalls& thread) { return thread.closed_by != 0; }

// A call that is not to be seen.
void leave_out(ThreadCalls& thread, uintptr_t frame, bool closed) {
  thread.left_out.push_back(frame);
  if (closed && !is_closed(thread)) set_closed_by(thread, frame);
}

void forget_left_out(ThreadCalls& thread, uintptr_t frame) {
  auto entry = std::find(thread.left_out.rbegin(), thread.left_out.rend(), frame);
  if (entry != thread.left_out.rend()) thread.left_out.erase(std::next(entry).base());
}

// The calling thread in the recorder, without what other threads have ended; null where it has recorded nothing.
const otp::hot::Thread* recorded_here() {
  const otp::hot::Thread* here = otp::hot::this_thread(g_hot);
  uint32_t sessions = 0;
  if (here != nullptr && here->ended_elsewhere_flag.load(std::memory_order_relaxed) != 0) g_api->innermost(&sessions);
  return here;
}

// Of the event at that place of the stack: its key, or 0 where it is no call.
uintptr_t call_at(const otp::hot::Thread& here, uint32_t place) {
  const otp::hot::OpenEvent& event = here.open[place];
  auto key = reinterpret_cast<uintptr_t>(event.key.get());
  bool is_call = event.what.get() == otp::hot::what_is(0, OTP_EVENT_FRAME) && (key & kNoCall) == 0;
  return is_call ? key : 0;
}

// How a call is open in the recorder on the calling thread.
struct Open {
  uint32_t running = 0;   // how often with kRunning
  bool is_plain = false;  // with its plain key, which is beneath those
  bool any() const { return is_plain || running != 0; }
};

Open find_open(uintptr_t key) {
  Open open;
  const otp::hot::Thread* here = recorded_here();
  for (uint32_t i = here == nullptr ? 0 : here->depth.get(); i-- > 0;) {
    uintptr_t call = call_at(*here, i);
    open.running += call == (key | kRunning);
    open.is_plain = call == key;
    if (open.is_plain || call == (key & ~kFunction)) break;  // what a frame calls is above it
  }
  return open;
}

// How many calls a session has open on the calling thread, of those that have begun since it came. One that the
// recorder had no room for keeps its place, and counts for every session.
uint32_t depth_of(const ThreadCalls& thread, const otp::hot::Thread& here, int bit) {
  uint32_t depth = 0;
  for (uint32_t i = here.depth.get(); i-- > 0;) {
    uintptr_t call = call_at(here, i);
    if (call == 0) continue;
    const otp::hot::OpenEvent& event = here.open[i];
    if (event.index.get() < thread.since[bit]) break;
    uint32_t sessions = event.consumers.get();
    depth += (call & kRunning) == 0 && (sessions == 0 || (sessions >> bit & 1) != 0);
  }
  return depth;
}

// The sessions for which another call would be too deep.
uint32_t too_deep(const ThreadCalls& thread) {
  uint32_t sessions = 0;
  const otp::hot::Thread* here = (thread.special & kLimited) != 0 ? recorded_here() : nullptr;
  for (uint32_t rest = here == nullptr ? 0 : g_tracer.limited; rest != 0; rest &= rest - 1) {
    int bit = __builtin_ctz(rest);
    if (depth_of(thread, *here, bit) >= g_tracer.max_depth[bit]) sessions |= rest & -rest;
  }
  return sessions;
}

void finish(uintptr_t key, uint8_t flags, const char* error, uint32_t error_size) {
  if ((flags & OTP_FLAG_ERROR) == 0) {
    g_api->end_frame(key_of(key), flags);
  } else if (error == nullptr) {
    g_api->end(key_of(key), flags, kUnknownError, sizeof kUnknownError - 1);
  } else {
    g_api->end(key_of(key), flags, error, error_size);
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

bool is_function_open(uintptr_t key) { return find_open(key).any(); }

std::vector<uintptr_t> open_calls(const ThreadCalls& thread) {
  std::vector<uintptr_t> keys;
  const otp::hot::Thread* here = recorded_here();
  for (uint32_t i = here == nullptr ? 0 : here->depth.get(); i-- > 0;)
    if (uintptr_t call = call_at(*here, i)) keys.push_back(call & ~kRunning);
  keys.insert(keys.end(), thread.left_out.begin(), thread.left_out.end());
  return keys;
}

void begin_or_leave_out(ThreadCalls& thread, uintptr_t key, uint32_t name, uint32_t identity, uint32_t not_for) {
  uint32_t sessions = thread.sessions & ~not_for;
  if (sessions == 0) return thread.left_out.push_back(key);
  uint32_t id = g_api->begin_frame(key_of(key), name, identity, sessions);
  if (id != 0) thread.id = id;
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
  begin_or_leave_out(thread, key, name, identity, not_for);
  if (code.is_quiet) set_closed_by(thread, key);
}

// C functions that a left-out function calls are left out with it.
void enter_function_slowpath(ThreadCalls& thread, uintptr_t caller, PyObject* code, PyFrameObject* frame,
                             PyObject* function, uint32_t name) {
  if ((thread.special & kPaused) != 0 || is_closed(thread) || is_left_out(thread, caller)) return;
  if (name == 0 && !PyCFunction_Check(function)) return;
  Inside inside(thread);
  uint32_t not_for = g_tracer.no_functions | too_deep(thread);
  if (g_tracer.filtered != 0) not_for |= not_for_callees(code, frame);
  if ((thread.sessions & ~not_for) == 0) return;
  if (name == 0) name = g_tracer.names->of_function(function);
  not_for |= newcomers_of(thread);  // see enter_slowpath
  if (name != 0 && (thread.sessions & ~not_for) != 0) begin_or_leave_out(thread, caller | kFunction, name, 0, not_for);
}

void leave_slowpath(ThreadCalls& thread, uintptr_t key, uint8_t flags, const char* error, uint32_t error_size) {
  if (key == thread.closed_by) set_closed_by(thread, 0);
  std::vector<uintptr_t>& left_out = thread.left_out;
  if (is_left_out(thread, key & ~kFunction)) {  // so nothing that it calls itself is open either
    if ((key & kFunction) == 0) left_out.pop_back();
    return;
  }
  Open open = find_open(key);
  for (uint32_t i = 0; i < open.running; ++i) finish(key | kRunning, flags, error, error_size);
  if (open.is_plain) finish(key, flags, error, error_size);
  if (!open.any()) forget_left_out(thread, key);
}

// ---- what was there before ----

namespace {

// Whether anything was open; of a thread whose number in the recorder is right, or 0.
bool end_open(ThreadCalls& thread) {
  bool any = !thread.left_out.empty();
  if (thread.id != 0) any |= g_api->end_frames(thread.id, kNoCall) != 0;
  thread.left_out.clear();
  thread.closed_by = 0;
  thread.special &= kPaused;
  return any;
}

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

// The names are those that the caller began with: what has made the code's may have stopped the tracer.
void begin_running(ThreadCalls& thread, FrameNames& names, uintptr_t key, PyFrameObject* frame, Code& code,
                   otp_begin_args* event) {
  event->key = key_of(key | kRunning);
  event->name = nullptr;
  event->name_size = names.of_running(code, frame, PyFrame_GetLineNumber(frame));
  event->fwd_thread = code.is_suspended ? names.of_generator(key_of(key), false) : 0;
  event->not_for |= newcomers_of(thread);  // see enter_slowpath
  uint32_t id = g_api->begin(event);
  if (id != 0) thread.id = id;
}

// Begins what is on the thread's stack, the top-level call first, for sessions that have none of it. Takes the frame.
// Naming, and making frames' objects, can let another thread run, and that can stop the tracer: what is left of the
// stack is then no part of any recording.
void begin_stack(ThreadCalls& thread, PyFrameObject* innermost, uint32_t newcomers) {
  FrameNames& names = *g_tracer.names;
  std::vector<PyFrameObject*> frames = frames_from(innermost);
  for (PyFrameObject* frame : frames) forget_left_out(thread, g_tracer.mechanism->key(frame));
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
    uintptr_t key = g_tracer.mechanism->key(frames[i]);
    bool requested = !code.is_own && !closed && (newcomers & ~code.not_for) != 0;
    if (requested) begin_running(thread, names, key, frames[i], code, &event);
    if (!requested && !find_open(key).any()) leave_out(thread, key, closed);
    Py_DECREF(frames[i]);
  }
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
  const otp::hot::Thread* here = otp::hot::this_thread(g_hot);
  if (thread.run != g_tracer.run) {
    thread.id = here == nullptr ? 0 : here->id;
    end_open(thread);
  }
  thread.run = g_tracer.run;
  uint32_t newcomers = newcomers_of(thread);
  thread.epoch = g_tracer.epoch;
  thread.number = PyThreadState_GetID(PyThreadState_Get());
  g_tracer.looked_around[thread.number] = thread.epoch;
  thread.sessions = g_tracer.sessions;
  thread.last = {};
  if (newcomers != 0) {
    begin_stack(thread, innermost, newcomers);
  } else {
    Py_XDECREF(innermost);
  }
  thread.special &= kInsideClosed;
  if (t_pauses != 0) thread.special |= kPaused;
  if (g_tracer.following != 0) thread.special |= kFollowed;
  if (g_tracer.limited != 0) thread.special |= kLimited;
  here = otp::hot::this_thread(g_hot);
  for (uint32_t rest = newcomers; rest != 0; rest &= rest - 1)
    thread.since[__builtin_ctz(rest)] = here == nullptr ? 0 : here->next_index.get();
}

// Of an earlier run there is nothing in the recorder, or its thread ends it when it next looks around; in a forked
// child the recorder is empty, and its numbers of threads are others.
bool end_all(ThreadCalls& thread) {
  bool is_known = getpid() == g_tracer.process && thread.run == g_tracer.run;
  thread.id = is_known ? thread.id : 0;
  return end_open(thread);
}

bool forget_thread(ThreadCalls& thread) {
  g_tracer.looked_around.erase(thread.number);
  return end_all(thread);
}

}  // namespace otp_python
