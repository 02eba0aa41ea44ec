// Collectives: a kernel in front of each operator of c10d that looks at its arguments and continues to the backend's
// own.
//
// It stands at BackendSelect, the last station before the backends, where c10d has no kernels: so it hears of every
// collective that really runs, whoever issues it (Python, DistributedDataParallel's reducer, compiled code), and of
// none that is only traced. The event of the operator is open then, and the innermost of its thread.
//
// A number that is the same on every rank: the backend's own, which every collective of the group raises by one. Some
// backends (gloo) raise it for a send or a receive too, which only two ranks take part in. How much that was is
// taken off, from the first use of this library on.
#include "collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "collective_call.h"

namespace otp::collectives {
namespace {

const otp_api* g_collectives_api = nullptr;

using Options = c10::intrusive_ptr<c10d::Backend::Options>;

// A group with a backend of its own, which may serve several types of devices.
struct Known {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;  // as long as it is here, no other group has its address
  const c10d::ProcessGroup* address;
  const c10d::Backend* backend;  // to tell it from others only: a group may be given another one
  bool has_numbers;
  otp_collective facts;  // what is the same for all of its collectives
  Options options;       // null: it has none
  int64_t skew = 0;      // by how much the backend's number is ahead of the collectives
  int64_t last = -1;
  uint32_t repeat = 0;  // collectives since the last one that had another number
};

struct Listener {
  uint32_t consumer;
  int64_t token;
  uint64_t most;
  uint64_t lost = 0;
  std::vector<otp_collective> waiting;
};

struct State {
  std::mutex lock;  // never held while a group or a backend is asked: they may be written in Python
  std::vector<Known> known;
  std::vector<Listener> listeners;
  int64_t last_token = 0;
  std::atomic<uint64_t> most_times{0};  // 0: nothing is timed
  std::deque<otp_collective_time> times;
};

// Never destroyed; a forked child gets a new one, since another thread may have held the lock.
State* g_state = new State;

void after_fork_in_child() { g_state = new (std::nothrow) State; }

uint32_t interned(std::string_view text) {
  return g_collectives_api->intern(text.data(), static_cast<uint32_t>(text.size()), OTP_NAME_OPERATOR);
}

// What the backend was made with; null where it has none, or does not tell. Asked once for each group: a backend that
// does not tell throws. A template, so that the earlier versions of torch that have no such question are asked whether
// they do.
template <typename Backend>
Options options_of(Backend& backend) {
  try {
    if constexpr (requires { backend.getBackendOptions(); }) return backend.getBackendOptions();
  } catch (...) {  // it does not tell
  }
  return {};
}

// The global ranks of a group, separated by commas; empty where the backend was not told: then it is all ranks.
template <typename Pointer>
std::string ranks_of(const Pointer& options) {
  std::string text;
  if constexpr (requires { options->global_ranks_in_group; }) {
    if (!options) return text;
    for (uint64_t rank : options->global_ranks_in_group) text += (text.empty() ? "" : ",") + std::to_string(rank);
  }
  return text;
}

// In ms: the call's own, or else the group's, which may be another one with each call; 0 where neither is known.
uint32_t timeout_of(const Options& options, const Call& call) {
  int64_t found = call.timeout_ms > 0 || !options ? call.timeout_ms : options->timeout.count();
  return static_cast<uint32_t>(std::clamp<int64_t>(found, 0, UINT32_MAX));
}

int64_t number_of(c10d::Backend& backend) { return static_cast<int64_t>(backend.getSequenceNumberForGroup()); }

bool has_numbers(c10d::Backend& backend) try {
  number_of(backend);
  return true;
} catch (...) {
  return false;
}

Known made_known(const Call& call) {
  c10d::ProcessGroup& group = *call.group;
  c10d::Backend& backend = *call.backend;
  otp_collective facts{};
  Options options = options_of(backend);
  facts.group = interned(group.getGroupName());
  facts.ranks = interned(ranks_of(options));
  facts.backend = interned(backend.getBackendName());
  facts.group_size = group.getSize();
  facts.rank = group.getRank();
  return {c10::weak_intrusive_ptr<c10d::ProcessGroup>(call.group),
          &group,
          &backend,
          has_numbers(backend),
          facts,
          std::move(options)};
}

Known* find(State& s, const Call& call) {
  for (Known& known : s.known)
    if (known.address == call.group.get() && known.backend == call.backend.get()) return &known;
  return nullptr;
}

// Does with what is known of the call's group what is asked for, under the lock.
template <typename Work>
void with_known(State& s, const Call& call, Work work) {
  {
    std::lock_guard<std::mutex> lock(s.lock);
    if (Known* known = find(s, call)) return work(*known);
  }
  Known made = made_known(call);
  std::vector<Known> gone;  // whose destructors may run a backend's
  std::lock_guard<std::mutex> lock(s.lock);
  if (Known* known = find(s, call)) return work(*known);  // of another thread, which was faster
  auto end = std::partition(s.known.begin(), s.known.end(), [](const Known& k) { return !k.group.expired(); });
  std::move(end, s.known.end(), std::back_inserter(gone));
  s.known.erase(end, s.known.end());
  s.known.push_back(std::move(made));
  work(s.known.back());
}

// The backend's number before the call; -1: it has none.
int64_t number_before(State& s, const Call& call) {
  bool is_numbered = false;
  with_known(s, call, [&](Known& known) { is_numbered = known.has_numbers; });
  return is_numbered ? number_of(*call.backend) : -1;
}

otp_collective entry_of(Known& known, const Call& call, int64_t before) {
  otp_collective entry = known.facts;
  bool is_counted = before >= 0 && !call.is_transfer;
  entry.sequence_nr = is_counted ? before + 1 - known.skew : -1;
  if (is_counted) {
    known.repeat = known.last == entry.sequence_nr ? known.repeat + 1 : 0;
    known.last = entry.sequence_nr;
    entry.repeat = known.repeat;
  }
  entry.bytes_in = call.bytes_in;
  entry.bytes_out = call.bytes_out;
  entry.peer = call.peer;
  entry.root = call.root;
  entry.tag = call.tag;
  entry.flags = (call.is_transfer ? OTP_COLLECTIVE_TRANSFER : 0) | (call.is_async ? OTP_COLLECTIVE_ASYNC : 0);
  return entry;
}

// A call, and what the black box alone has of it.
struct Told {
  otp_collective entry{};
  uint32_t timeout_ms = 0;
};

// As the black box has it. Gloo completes the future of its work when that is done; others do so when it is enqueued on
// a device, or never.
otp_blackbox_call boxed(const Told& told, uint32_t name, bool is_tracked) {
  const otp_collective& entry = told.entry;
  uint32_t flags = entry.flags | (is_tracked ? 0 : OTP_BLACKBOX_UNTRACKED);
  return {entry.event,
          entry.sequence_nr,
          entry.bytes_in,
          entry.bytes_out,
          name,
          entry.group,
          entry.ranks,
          entry.backend,
          entry.dtype,
          entry.reduce_op,
          entry.group_size,
          entry.rank,
          entry.root,
          entry.peer,
          entry.tag,
          flags,
          told.timeout_ms,
          0,
          {}};
}
static_assert(static_cast<int>(OTP_COLLECTIVE_TRANSFER) == OTP_BLACKBOX_TRANSFER, "the same bits");
static_assert(static_cast<int>(OTP_COLLECTIVE_ASYNC) == OTP_BLACKBOX_ASYNC, "the same bits");

Told tell(State& s, const Call& call, int64_t before, uint64_t event, uint32_t consumers) {
  uint32_t dtype = interned(call.dtype), reduce_op = interned(call.reduce_op);
  Told told;
  with_known(s, call, [&](Known& known) {
    told.timeout_ms = timeout_of(known.options, call);
    otp_collective& entry = told.entry = entry_of(known, call, before);
    entry.event = event;
    entry.dtype = dtype;
    entry.reduce_op = reduce_op;
    for (Listener& listener : s.listeners) {
      if ((listener.consumer & consumers) == 0) continue;
      if (listener.waiting.size() >= listener.most) {
        ++listener.lost;
      } else {
        listener.waiting.push_back(entry);
      }
    }
  });
  return told;
}

// What a call that does not raise the backend's number by one has done to it, once it has run. As many as the
// collective itself stands for are left in.
class Skew {
 public:
  Skew(State& state, Call call, int64_t before) : d_state(state), d_call(std::move(call)), d_before(before) {}
  Skew(const Skew&) = delete;
  Skew& operator=(const Skew&) = delete;
  ~Skew() {
    if (d_before < 0) return;
    try {  // not around the whole, which in a destructor would throw it again
      int64_t rise = number_of(*d_call.backend) - d_before - (d_call.is_transfer ? 0 : 1);
      with_known(d_state, d_call, [rise](Known& known) { known.skew += rise; });
    } catch (...) {  // a backend that tells its number no more
    }
  }

 private:
  State& d_state;
  Call d_call;
  int64_t d_before;
};

// What is to be done once a call has run.
struct After {
  std::optional<Skew> skew;
  uint64_t ticket = 0;         // in the black box, where its end will be known
  otp_collective_time time{};  // where its end is to be taken; else without a start
};

bool tells_its_end(const Call& call) { return call.backend->getBackendName() == "gloo"; }

// Begins to time a call that no rank leaves before all have arrived.
void begin_time(State& s, const Call& call, otp_collective_time* time) {
  if (call.is_transfer || call.root >= 0 || !tells_its_end(call)) return;
  with_known(s, call, [time](const Known& known) { time->group = known.facts.group; });
  time->start = g_collectives_api->unix_ns(0);
}

// Takes the end of a call, on whichever thread it completes.
void end_time(otp_collective_time time) {
  State* state = g_state;
  if (state == nullptr) return;
  time.end = g_collectives_api->unix_ns(0);
  std::lock_guard<std::mutex> lock(state->lock);
  uint64_t most = state->most_times;
  if (most == 0) return;
  if (state->times.size() >= most) state->times.pop_front();
  state->times.push_back(time);
}

// Notes a call in the black box; a ticket for its end, 0 where the backend will not tell that.
uint64_t note_in_box(const Told& told, const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                     const Call& call) {
  bool is_tracked = tells_its_end(call);
  otp_blackbox_call noted = boxed(told, interned(op.schema().name()), is_tracked);
  shapes_of_inputs(op, stack).copy(noted.shapes, sizeof noted.shapes - 1);
  uint64_t ticket = g_collectives_api->collective_enqueued(&noted);
  return is_tracked ? ticket : 0;
}

// Reports a call that is about to run. Never throws: a collective runs whatever becomes of the report.
void before_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack, After* after) try {
  State* state = g_state;
  uint32_t consumers = 0;
  uint64_t event = g_collectives_api->innermost(&consumers);
  bool may_skew = op.schema().name().find("send") != std::string::npos ||
                  op.schema().name().find("recv") != std::string::npos ||
                  op.schema().name().find("monitored") != std::string::npos;
  bool is_boxed = *g_collectives_api->box_is_open != 0;
  bool is_timed = state != nullptr && state->most_times.load(std::memory_order_relaxed) != 0;
  if (state == nullptr || (event == 0 && !may_skew && !is_boxed && !is_timed)) return;
  Call call = call_of(op, stack);
  if (!call.group) return;
  int64_t before = number_before(*state, call);
  if (event != 0 || is_boxed) {
    Told told = tell(*state, call, before, event, consumers);
    if (is_boxed) after->ticket = note_in_box(told, op, stack, call);
  }
  if (is_timed) begin_time(*state, call, &after->time);
  if (call.counts_otherwise) after->skew.emplace(*state, std::move(call), before);
} catch (...) {
}

// The work that a call has returned; null where it returned none, and so is complete.
c10::intrusive_ptr<c10d::Work> work_in(const torch::jit::Stack& stack) {
  if (stack.empty()) return {};
  const c10::IValue& last = stack.back();
  if (last.isTuple() && !last.toTupleRef().elements().empty() && last.toTupleRef().elements().back().isCustomClass())
    return last.toTupleRef().elements().back().toCustomClass<c10d::Work>();
  return last.isCustomClass() ? last.toCustomClass<c10d::Work>() : c10::intrusive_ptr<c10d::Work>{};
}

// Reports the end of a call: to the black box where it has a ticket, and its time where that is taken.
void completed(uint64_t ticket, const otp_collective_time& time, bool failed) {
  if (ticket != 0) g_collectives_api->collective_completed(ticket, failed ? 1 : 0);
  if (time.start != 0) end_time(time);
}

// Reports the end of a call that has returned once its work is done. Never throws.
void await_end(const torch::jit::Stack& stack, const After& after) try {
  if (after.ticket == 0 && after.time.start == 0) return;
  c10::intrusive_ptr<c10d::Work> work = work_in(stack);
  c10::intrusive_ptr<c10::ivalue::Future> future = work ? work->getFuture() : nullptr;
  if (!future) return completed(after.ticket, after.time, false);
  future->addCallback([ticket = after.ticket, time = after.time](c10::ivalue::Future& done) {
    completed(ticket, time, done.hasError());
  });
} catch (...) {  // it stays without an end
}

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  After after;
  before_call(op, *stack, &after);
  try {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
                       stack);
  } catch (...) {
    if (after.ticket != 0) g_collectives_api->collective_completed(after.ticket, 1);
    throw;
  }
  await_end(*stack, after);
}

bool takes_a_group(const c10::OperatorHandle& op) {
  if (!op.hasSchema() || op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) return false;
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return a.name() == "process_group"; });
}

// Never taken back: torch's table of an operator may be changed while nobody calls it only, and it is changed here in
// the one way that a caller at the same moment does not notice (the kernel is there before the dispatcher looks for
// it).
void intercept_all() {
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!begins_with(name.name, "c10d::")) continue;
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || !takes_a_group(*op)) continue;
    handles->push_back(dispatcher.registerImpl(name, c10::DispatchKey::BackendSelect,
                                               c10::KernelFunction::makeFromBoxedFunction<&intercept>(), std::nullopt,
                                               nullptr, "otel_torchprof"));
  }
}

bool intercepted() {
  static const bool done = (intercept_all(), true);
  return done;
}

Listener* listener_of(State& s, int64_t token) {
  for (Listener& listener : s.listeners)
    if (listener.token == token) return &listener;
  return nullptr;
}

}  // namespace
}  // namespace otp::collectives

extern "C" {

__attribute__((visibility("default"))) void otp_torch_attach_collectives(const otp_api* api) {
  using namespace otp::collectives;
  if (g_collectives_api != nullptr) return;
  g_collectives_api = api;
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
}

__attribute__((visibility("default"))) int64_t otp_torch_collectives_start(uint32_t consumer, uint64_t most) try {
  using namespace otp::collectives;
  State* state = g_state;
  if (!intercepted() || state == nullptr) return 0;
  std::lock_guard<std::mutex> lock(state->lock);
  state->listeners.push_back({consumer, ++state->last_token, most});
  return state->last_token;
} catch (...) {
  return 0;
}

__attribute__((visibility("default"))) uint64_t otp_torch_collectives_take(int64_t token, otp_collective* out,
                                                                           uint64_t room) {
  using namespace otp::collectives;
  State* state = g_state;
  if (state == nullptr) return 0;
  std::lock_guard<std::mutex> lock(state->lock);
  Listener* listener = listener_of(*state, token);
  if (listener == nullptr) return 0;
  uint64_t count = std::min<uint64_t>(room, listener->waiting.size());
  std::copy(listener->waiting.end() - static_cast<ptrdiff_t>(count), listener->waiting.end(), out);
  listener->waiting.resize(listener->waiting.size() - count);
  return count;
}

__attribute__((visibility("default"))) uint64_t otp_torch_collectives_lost(int64_t token) {
  using namespace otp::collectives;
  State* state = g_state;
  if (state == nullptr) return 0;
  std::lock_guard<std::mutex> lock(state->lock);
  Listener* listener = listener_of(*state, token);
  return listener == nullptr ? 0 : listener->lost;
}

__attribute__((visibility("default"))) void otp_torch_collectives_stop(int64_t token) {
  using namespace otp::collectives;
  State* state = g_state;
  if (state == nullptr) return;
  std::lock_guard<std::mutex> lock(state->lock);
  auto& all = state->listeners;
  all.erase(std::remove_if(all.begin(), all.end(), [token](const Listener& l) { return l.token == token; }), all.end());
}

__attribute__((visibility("default"))) int otp_torch_collectives_time(uint64_t most) try {
  using namespace otp::collectives;
  State* state = g_state;
  if (state == nullptr || (most != 0 && !intercepted())) return 0;
  std::lock_guard<std::mutex> lock(state->lock);
  state->most_times = most;
  if (most == 0) std::deque<otp_collective_time>().swap(state->times);
  return 1;
} catch (...) {
  return 0;
}

__attribute__((visibility("default"))) uint64_t otp_torch_collectives_take_times(otp_collective_time* out,
                                                                                 uint64_t room) {
  using namespace otp::collectives;
  State* state = g_state;
  if (state == nullptr) return 0;
  std::lock_guard<std::mutex> lock(state->lock);
  uint64_t count = std::min<uint64_t>(room, state->times.size());
  auto end = state->times.begin() + static_cast<ptrdiff_t>(count);
  std::copy(state->times.begin(), end, out);
  state->times.erase(state->times.begin(), end);
  return count;
}

}  // extern "C"
