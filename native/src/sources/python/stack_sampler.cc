// Samples of the stacks of threads that run loops: a thread of its own looks at them some times a second, without
// Python's lock, and keeps what it saw until all who want samples have taken it.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "lock_holder.h"
#include "sampled_stacks.h"
#include "source.h"
#include "stack_reader.h"

namespace otp_python {

uint32_t g_loops_run = 1;

namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr size_t kMostSamples = 1u << 19;
constexpr uint32_t kMostThreads = 16;  // in a look
constexpr uint64_t kMostIntervals = 10;
constexpr uint64_t kNoEnd = UINT64_MAX;

// A thread whose stack is sampled.
struct Sampled {
  uint64_t number;  // of no other thread, also where these are used again:
  uintptr_t state;
  uint64_t ident;
  uint32_t os_tid;
  uint32_t users = 0;                 // that sample it whether or not it runs a loop
  uint32_t run = 0;                   // of g_loops_run, in which a loop was seen on it
  std::atomic<uint64_t> begin_ns{0};  // nothing before that is sampled
  // Only of the thread that samples:
  uint64_t last_ns = 0;
  uint64_t ran_ns = 0;   // by the time of its latest stack
  bool is_torn = false;  // that could not be read: no more can be, until it runs
  bool has_run = false;  // between the latest two looks
  bool is_cut = false;   // its latest stack lacks calls
  uint32_t stack = 0;
  StackHints hints;
  std::vector<CallCopy> calls;
};

struct Sample {
  uint64_t ticks;
  uint64_t duration_ns;
  uint64_t thread;  // its number
  uint64_t ident;
  uint32_t os_tid;
  uint32_t stack;
};

// Who wants samples.
struct User {
  uint64_t number;
  uint64_t interval_ns;
  uint64_t thread;        // the number of the only one; 0: all that run loops
  uint64_t next;          // sample, counted since the process began
  uint64_t end = kNoEnd;  // behind the last one
  uint64_t lost = 0;      // that had to make room
  uint64_t cut = 0;       // Sampler::cut when it began
};

uint64_t g_last_user = 0, g_last_thread = 0;

// Never destroyed (it has no destructor to run): its thread may wait until the process has ended. A forked child gets a
// new one in its place.
struct Sampler {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake;
  pthread_t thread{};
  bool is_running = false, must_end = false;
  bool is_paused = false;  // for a fork; what is done next about samples or loops starts the thread again
  std::string own;
  std::vector<User> users;
  std::vector<std::shared_ptr<Sampled>> threads;
  size_t turn = 0;
  std::deque<Sample> samples;
  uint64_t first = 0;  // number of the oldest sample
  uint64_t torn = 0;
  uint64_t cut = 0;  // samples without their innermost calls, since there are too many different ones

  Sampler() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&wake, &attributes);
    pthread_condattr_destroy(&attributes);
  }
};
alignas(Sampler) char g_place[sizeof(Sampler)];
Sampler* g_sampler = nullptr;

class Hold {
 public:
  explicit Hold(Sampler& sampler) : d_mutex(&sampler.mutex) { pthread_mutex_lock(d_mutex); }
  ~Hold() { pthread_mutex_unlock(d_mutex); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  pthread_mutex_t* d_mutex;
};

class Released {
 public:
  explicit Released(Sampler& sampler) : d_mutex(&sampler.mutex) { pthread_mutex_unlock(d_mutex); }
  ~Released() { pthread_mutex_lock(d_mutex); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  pthread_mutex_t* d_mutex;
};

void after_fork_in_child() {
  g_sampler = new (g_place) Sampler;
  g_loops_run += 1;
}

Sampler& sampler() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_sampler = new (g_place) Sampler;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  return *g_sampler;
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * kSecond + static_cast<uint64_t>(now.tv_nsec);
}

// ---- the thread that samples ----

bool is_wanted(const Sampler& all, const Sampled& thread) {
  if (thread.users != 0) return true;
  if (thread.run != g_loops_run) return false;
  return std::any_of(all.users.begin(), all.users.end(),
                     [](const User& user) { return user.thread == 0 && user.end == kNoEnd; });
}

// 0: nobody wants samples, or there is no thread to sample.
uint64_t interval_of(const Sampler& all) {
  uint64_t shortest = UINT64_MAX;
  for (const User& user : all.users)
    if (user.end == kNoEnd) shortest = std::min(shortest, user.interval_ns);
  if (shortest == UINT64_MAX) return 0;
  for (const auto& thread : all.threads)
    if (is_wanted(all, *thread)) return shortest;
  return 0;
}

// The threads of this look, by turns where there are many.
std::vector<std::shared_ptr<Sampled>> due_threads(Sampler& all) {
  std::vector<std::shared_ptr<Sampled>> due;
  size_t count = all.threads.size();
  for (size_t i = 0; i < count && due.size() < kMostThreads; ++i) {
    const std::shared_ptr<Sampled>& thread = all.threads[all.turn++ % count];
    if (is_wanted(all, *thread)) due.push_back(thread);
  }
  if (due.size() < kMostThreads) all.turn = 0;
  return due;
}

void forget_taken(Sampler& all) {
  uint64_t needed = UINT64_MAX;
  for (const User& user : all.users) needed = std::min(needed, std::min(user.next, user.end));
  while (!all.samples.empty() && (all.first < needed || all.samples.size() > kMostSamples)) {
    all.samples.pop_front();
    ++all.first;
  }
}

// The processor that a thread was on last; negative: not known.
int processor_of(uint32_t os_tid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/self/task/%u/stat", os_tid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[std::max<ssize_t>(size, 0)] = '\0';
  const char* at = std::strrchr(text, ')');  // the name before it may have blanks
  for (int field = 2; at != nullptr && field < 39; ++field) at = std::strchr(at + 1, ' ');
  return at == nullptr ? -1 : std::atoi(at + 1);
}

// Keeps the calling thread off the processors of the loops. On theirs it would get its turn mostly when they sleep: of
// a loop that sleeps for 47 % of the time in pieces of 50 us, 58 % of the samples were asleep, and from the other
// processor 50 %.
class OtherProcessors {
 public:
  OtherProcessors() { sched_getaffinity(0, sizeof d_allowed, &d_allowed); }

  // Looks where they are at every fourth call: 25 us each.
  void stay_off(const std::vector<std::shared_ptr<Sampled>>& threads) {
    if (d_calls++ % 4 != 0) return;
    cpu_set_t rest = d_allowed;
    for (const auto& thread : threads) {
      int processor = thread->has_run ? processor_of(thread->os_tid) : -1;
      if (processor >= 0 && processor < CPU_SETSIZE) CPU_CLR(processor, &rest);
    }
    if (CPU_COUNT(&rest) == 0) rest = d_allowed;
    if (CPU_EQUAL(&rest, &d_now) == 0 && sched_setaffinity(0, sizeof rest, &rest) == 0) d_now = rest;
  }

 private:
  cpu_set_t d_allowed{}, d_now{};
  uint32_t d_calls = 0;
};

// What the thread needs; of its own.
class Looker {
 public:
  explicit Looker(const std::string& own) : d_codes(own) {}

  OtherProcessors processors;

  // Whether there is a sample. Counts what could not be read.
  bool look(Sampled& thread, uint64_t interval_ns, Sample* out, uint64_t* torn) {
    uint64_t ticks = g_api->ticks(), now = now_ns(), ran = ran_ns(thread.os_tid);
    thread.has_run = ran == 0 || ran != thread.ran_ns;
    bool has_run_always = ran - thread.ran_ns > (now - thread.last_ns) / 8 * 7;
    bool is_waiting = !has_run_always && d_holder.is_waiting(thread.os_tid);
    if (thread.has_run) {  // else it is where it was
      auto found = d_reader.read(thread.state, thread.ident, &thread.hints, &d_stack);
      uint32_t stack = 0;
      if (found == StackReader::Found::kStack) stack = d_codes.stack_of(d_stack, &d_tree, &thread.calls);
      thread.ran_ns = ran;
      thread.stack = stack;
      thread.is_torn = found == StackReader::Found::kTorn || stack == KnownCodes::kTorn;
      thread.is_cut = found == StackReader::Found::kStack && d_codes.is_cut();
    }
    if (thread.is_torn) {
      ++*torn;
      return false;  // the next one stands for its time, too
    }
    uint64_t since = std::max(thread.last_ns, thread.begin_ns.load(std::memory_order_relaxed));
    thread.last_ns = now;
    if (since >= now) return false;  // it began after this look
    uint64_t duration = std::min(now - since, kMostIntervals * interval_ns);
    uint32_t stack = is_waiting && thread.stack != 0 ? with_holder(thread) : thread.stack;
    *out = {ticks, duration, thread.number, thread.ident, thread.os_tid, stack};
    return stack != 0;
  }

  // Between three quarters of the interval and five, so that it does not go with the loop.
  uint64_t pause(uint64_t interval_ns) {
    d_random ^= d_random << 13;
    d_random ^= d_random >> 7;
    d_random ^= d_random << 17;
    return interval_ns / 4 * 3 + d_random % (interval_ns / 2 + 1);
  }

 private:
  // The stack of a thread that waits for the interpreter's lock, with a call that stands for where the thread is that
  // has it: its line is the number of the stack of that one.
  uint32_t with_holder(const Sampled& thread) {
    PythonThreadCopy other{};
    if (!d_holder.find(thread.os_tid, &other)) return thread.stack;
    if (other.state != d_holder_state) {
      d_holder_hints = {};
      d_holder_calls.clear();
    }
    d_holder_state = other.state;
    auto found = d_reader.read(other.state, other.ident, &d_holder_hints, &d_stack);
    if (found != StackReader::Found::kStack) return thread.stack;
    uint32_t stack = d_codes.stack_of(d_stack, &d_tree, &d_holder_calls);
    if (stack == 0 || stack == KnownCodes::kTorn) return thread.stack;
    uint32_t function = d_tree.function(kWaitsForLock, "");
    return function == 0 ? thread.stack : d_tree.call(thread.stack, function, static_cast<int>(stack));
  }

  LockHolder d_holder;
  uintptr_t d_holder_state = 0;
  StackHints d_holder_hints;
  std::vector<CallCopy> d_holder_calls;
  StackReader d_reader;
  StackCopy d_stack;
  StackTree d_tree;
  KnownCodes d_codes;
  uint64_t d_random = now_ns() | 1;
};

// With the lock, which it gives up meanwhile.
void look_at_all(Sampler& all, Looker& looker, uint64_t interval_ns) {
  std::vector<std::shared_ptr<Sampled>> due = due_threads(all);
  std::vector<Sample> samples;
  uint64_t torn = 0, cut = 0;
  {
    Released released(all);
    for (const auto& thread : due) {
      Sample sample;
      if (!looker.look(*thread, interval_ns, &sample, &torn)) continue;
      samples.push_back(sample);
      cut += thread->is_cut ? 1 : 0;
    }
    looker.processors.stay_off(due);
    due.clear();
  }
  all.torn += torn;
  all.cut += cut;
  all.samples.insert(all.samples.end(), samples.begin(), samples.end());
  if (all.samples.size() > kMostSamples) forget_taken(all);
}

// Until that time, or until something has changed.
void rest(Sampler& all, uint64_t until_ns) {
  timespec until{static_cast<time_t>(until_ns / kSecond), static_cast<long>(until_ns % kSecond)};
  pthread_cond_timedwait(&all.wake, &all.mutex, &until);
}

void run(Sampler& all) {
  std::unique_ptr<Looker> looker;
  uint64_t next_ns = 0;  // when the next look is due, whatever changes meanwhile
  Hold hold(all);
  while (!all.must_end) {
    uint64_t interval_ns = interval_of(all), now = now_ns();
    try {
      if (looker == nullptr) looker = std::make_unique<Looker>(all.own);
      if (interval_ns == 0) {
        next_ns = 0;
        pthread_cond_wait(&all.wake, &all.mutex);
      } else if (next_ns == 0 || next_ns > now + 2 * interval_ns) {
        next_ns = now + looker->pause(interval_ns);
      } else if (now < next_ns) {
        rest(all, next_ns);
      } else {
        next_ns = 0;
        look_at_all(all, *looker, interval_ns);
      }
    } catch (const std::bad_alloc&) {
      ++all.torn;
      rest(all, now + kSecond);
    }
  }
}

void* run_thread(void* argument) {
  pthread_setname_np(pthread_self(), "otel-torchprof");
  run(*static_cast<Sampler*>(argument));
  return nullptr;
}

// With signals blocked: handlers of the program are for its own threads.
bool start_thread(Sampler& all) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  bool started = pthread_create(&all.thread, nullptr, run_thread, &all) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

// ---- who wants samples, and of which threads; with the lock ----

void resume(Sampler& all) {
  if (all.is_paused && !all.is_running && !all.users.empty()) all.is_running = start_thread(all);
}

User* find_user(Sampler& all, uint64_t number) {
  for (User& user : all.users)
    if (user.number == number) return &user;
  return nullptr;
}

Sampled* find_thread(Sampler& all, uint64_t number) {
  for (const auto& thread : all.threads)
    if (thread->number == number) return thread.get();
  return nullptr;
}

void forget(Sampler& all, uintptr_t state) {
  auto is_of_state = [state](const auto& known) { return known->state == state; };
  all.threads.erase(std::remove_if(all.threads.begin(), all.threads.end(), is_of_state), all.threads.end());
}

Sampled& this_thread(Sampler& all, uintptr_t state) {
  uint64_t ident = PyThread_get_thread_ident();
  auto os_tid = static_cast<uint32_t>(syscall(SYS_gettid));
  for (const auto& known : all.threads)
    if (known->state == state && known->ident == ident && known->os_tid == os_tid) return *known;
  forget(all, state);
  auto thread = std::make_shared<Sampled>();
  thread->number = ++g_last_thread;
  thread->state = state;
  thread->ident = ident;
  thread->os_tid = os_tid;
  all.threads.push_back(thread);
  return *thread;
}

void begin(Sampled& thread) { thread.begin_ns.store(now_ns(), std::memory_order_relaxed); }

void end_user(Sampler& all, User& user) {
  if (user.end != kNoEnd) return;
  user.end = all.first + all.samples.size();
  Sampled* thread = find_thread(all, user.thread);
  if (thread != nullptr) --thread->users;
  bool has_loops = std::any_of(all.users.begin(), all.users.end(),
                               [](const User& other) { return other.thread == 0 && other.end == kNoEnd; });
  if (user.thread == 0 && !has_loops) __atomic_store_n(&g_loops_run, g_loops_run + 1, __ATOMIC_RELAXED);
}

// `state`: of the only thread, the calling one; 0: all that run loops. False where the system has no thread for it.
bool add_user(User user, uintptr_t state, const std::string& own) {
  Sampler& all = sampler();
  Hold hold(all);
  all.own = own;
  if (!all.is_running && !(all.is_running = start_thread(all))) return false;
  Sampled* thread = state == 0 ? nullptr : &this_thread(all, state);
  user.thread = thread == nullptr ? 0 : thread->number;
  user.next = all.first + all.samples.size();
  user.cut = all.cut;
  all.users.push_back(user);
  if (thread != nullptr && thread->users++ == 0) begin(*thread);
  pthread_cond_signal(&all.wake);
  return true;
}

// The samples that a user has not had, up to that time.
struct TakenSample {
  int64_t time, duration;
  uint64_t ident;
  uint32_t os_tid, stack;
};
struct Losses {
  unsigned long long lost = 0, cut = 0;
};
Losses take(uint64_t number, int64_t until, std::vector<TakenSample>* out) {
  Sampler& all = sampler();
  Hold hold(all);
  User* user = find_user(all, number);
  if (user == nullptr) return {};  // of the parent of this process
  resume(all);
  if (user->next < all.first) {
    user->lost += std::min(all.first, user->end) - user->next;
    user->next = std::min(all.first, user->end);
  }
  uint64_t end = std::min(user->end, all.first + all.samples.size());
  for (; user->next < end; ++user->next) {
    const Sample& sample = all.samples[user->next - all.first];
    int64_t time = g_api->unix_ns(sample.ticks);
    if (time >= until) break;
    if (user->thread == 0 || user->thread == sample.thread)
      out->push_back({time, static_cast<int64_t>(sample.duration_ns), sample.ident, sample.os_tid, sample.stack});
  }
  forget_taken(all);
  return {user->lost, all.cut - user->cut};
}

constexpr char kUser[] = "otel_torchprof.samples";

uint64_t number_of(PyObject* capsule) {
  return reinterpret_cast<uintptr_t>(PyCapsule_GetPointer(capsule, kUser));  // 0 with an exception set
}

void free_user(PyObject* capsule) {
  uint64_t number = number_of(capsule);
  Sampler& all = sampler();
  Hold hold(all);
  User* user = find_user(all, number);
  if (user == nullptr) return;  // of the parent of this process
  end_user(all, *user);
  all.users.erase(all.users.begin() + (user - all.users.data()));
  forget_taken(all);
}

// start_samples(interval_ns, own, here); see _python.pyi.
PyObject* start_samples(PyObject*, PyObject* arguments) {
  unsigned long long interval_ns = 0;
  const char* own = nullptr;
  Py_ssize_t size = 0;
  int here = 0;
  if (PyArg_ParseTuple(arguments, "Ks#p:start_samples", &interval_ns, &own, &size, &here) == 0) return nullptr;
  PythonThread* thread = python_thread();
  if (thread == nullptr) return PyErr_NoMemory();
  uint64_t number = ++g_last_user;
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(static_cast<uintptr_t>(number)), kUser, free_user);
  if (capsule == nullptr) return nullptr;
  bool is_started = false;
  try {
    is_started = add_user({number, interval_ns, 0, 0}, here != 0 ? thread->state : 0, {own, static_cast<size_t>(size)});
  } catch (const std::bad_alloc&) {
  }
  if (is_started) return capsule;
  Py_DECREF(capsule);
  return PyErr_NoMemory();
}

// stop_samples(user); see _python.pyi.
PyObject* stop_samples(PyObject*, PyObject* capsule) {
  uint64_t number = number_of(capsule);
  if (number == 0) return nullptr;
  Sampler& all = sampler();
  Hold hold(all);
  if (User* user = find_user(all, number)) end_user(all, *user);
  Py_RETURN_NONE;
}

// take_samples(user, until) -> (bytes, lost, cut); see _python.pyi.
PyObject* take_samples(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  long long until = 0;
  if (PyArg_ParseTuple(arguments, "OL:take_samples", &capsule, &until) == 0) return nullptr;
  uint64_t number = number_of(capsule);
  if (number == 0) return nullptr;
  std::vector<TakenSample> taken;
  Losses losses;
  try {
    losses = take(number, until, &taken);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  auto* bytes = reinterpret_cast<const char*>(taken.data());
  return Py_BuildValue("y#KK", taken.empty() ? "" : bytes, static_cast<Py_ssize_t>(taken.size() * sizeof taken[0]),
                       losses.lost, losses.cut);
}

// sampled_stack(number) -> (number of the stack around its innermost call, file, line, function); see _python.pyi.
PyObject* sampled_stack(PyObject*, PyObject* number) {
  unsigned long stack = PyLong_AsUnsignedLong(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (stack == 0 || stack >= sampled_stack_count())
    return PyErr_Format(PyExc_IndexError, "no stack with calls has the number %lu", stack);
  const SampledCall& call = sampled_call(static_cast<uint32_t>(stack));
  const SampledFunction& function = sampled_function(call.function);
  return Py_BuildValue("(Is#is#)", static_cast<unsigned int>(call.parent), function.file.data(),
                       static_cast<Py_ssize_t>(function.file.size()), call.line, function.name.data(),
                       static_cast<Py_ssize_t>(function.name.size()));
}

// sampled_stacks() -> int: how many there are.
PyObject* sampled_stacks(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(sampled_stack_count()); }

// sample_loop(): the calling thread runs a loop.
PyObject* sample_loop(PyObject*, PyObject*) {
  note_loop(python_thread());
  Py_RETURN_NONE;
}

PyObject* end_thread(bool is_paused) {
  if (g_sampler == nullptr) Py_RETURN_NONE;
  Sampler& all = *g_sampler;
  pthread_t thread;
  {
    Hold hold(all);
    if (!all.is_running) Py_RETURN_NONE;
    all.is_running = false;
    all.must_end = true;
    thread = all.thread;
    pthread_cond_signal(&all.wake);
  }
  pthread_join(thread, nullptr);
  Hold hold(all);
  all.must_end = false;
  all.is_paused = is_paused;
  if (is_paused) __atomic_store_n(&g_loops_run, g_loops_run + 1, __ATOMIC_RELAXED);
  Py_RETURN_NONE;
}

// end_samples(): ends the thread, before the interpreter does.
PyObject* end_samples(PyObject*, PyObject*) { return end_thread(false); }

// pause_samples(): ends the thread until resume_samples(), take_samples() or the next phase or step.
PyObject* pause_samples(PyObject*, PyObject*) { return end_thread(true); }

// resume_samples(): starts it again, if it was paused.
PyObject* resume_samples(PyObject*, PyObject*) {
  if (g_sampler == nullptr) Py_RETURN_NONE;
  Hold hold(*g_sampler);
  resume(*g_sampler);
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {
    {"pause_samples", pause_samples, METH_NOARGS, nullptr},   {"resume_samples", resume_samples, METH_NOARGS, nullptr},
    {"start_samples", start_samples, METH_VARARGS, nullptr},  {"stop_samples", stop_samples, METH_O, nullptr},
    {"take_samples", take_samples, METH_VARARGS, nullptr},    {"sampled_stack", sampled_stack, METH_O, nullptr},
    {"sampled_stacks", sampled_stacks, METH_NOARGS, nullptr}, {"sample_loop", sample_loop, METH_NOARGS, nullptr},
    {"end_samples", end_samples, METH_NOARGS, nullptr},       {nullptr, nullptr, 0, nullptr}};

}  // namespace

void note_loop_slowpath(PythonThread* thread) {
  Sampler& all = sampler();
  Hold hold(all);
  thread->loops_run = g_loops_run;
  try {
    Sampled& sampled = this_thread(all, thread->state);
    sampled.run = g_loops_run;
    if (sampled.users == 0) begin(sampled);
    resume(all);
    pthread_cond_signal(&all.wake);
  } catch (const std::bad_alloc&) {
    thread->loops_run = 0;
  }
}

void forget_loop(PythonThread* thread) {
  if (g_sampler == nullptr) return;
  Hold hold(*g_sampler);
  forget(*g_sampler, thread->state);
}

int add_samples(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
