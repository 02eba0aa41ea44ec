// Torch's operators: an observer of RecordFunction that writes to the recorder.
//
// Never calls into Python and takes no lock: an operator may run while its thread holds anything.
#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <pthread.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/profiler/util.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "context.h"
#include "inputs.h"
#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder_hot.h"

namespace otp {
namespace {

// What every operator needs, in one cache line of this library's own.
struct alignas(64) Hot {
  otp_hot core{};
  // Raised whenever torch forgets an operator, whose name's memory is then free for another; 0 as long as nobody
  // watches.
  std::atomic<uint32_t> name_generation{0};
  std::atomic<uint64_t> requesting{0};  // how many observers request each of otp_torch_requests, 8 bits each

  const hot::Shared& shared() const { return *static_cast<const hot::Shared*>(core.shared); }
};
Hot g_hot;
const otp_api* g_api = nullptr;

// Handle of the thread-local callback of each session, by the session's bit. Torch copies callbacks, handles and all,
// into the threads that carry its state, and handles are never used twice: a callback whose handle is not here is left
// over.
std::atomic<uint64_t> g_handles[OTP_MAX_SESSIONS];

struct Observer {
  uint32_t consumer;
  bool all_threads;
  uint32_t requests;
  bool is_off;  // torch does not call it
};
// By handle, with g_control. Never destroyed: Python may remove an observer when the process ends.
std::unordered_map<uint64_t, Observer>& g_observers = *new std::unordered_map<uint64_t, Observer>;

// Counts the requests of an observer that comes (by = 1) or goes (-1).
void count_requests(uint32_t requests, int64_t by) {
  uint64_t counts = 0;
  for (uint32_t bit = 0; bit < OTP_REQUEST_COUNT; ++bit)
    counts += static_cast<uint64_t>(requests >> bit & 1) << 8 * bit;
  g_hot.requesting.fetch_add(counts * static_cast<uint64_t>(by), std::memory_order_relaxed);
}

bool is_requested(uint64_t requesting, otp_torch_requests what) {
  return (requesting >> 8 * __builtin_ctz(what) & 0xFF) != 0;
}

// Taking a callback away asks torch for its lock, which another thread may have held when this process was forked.
bool is_forked() { return g_forks.load(std::memory_order_relaxed) != 0; }

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn);

uint32_t consumer_of(uint64_t handle) {
  for (uint32_t bit = 0; bit < OTP_MAX_SESSIONS; ++bit)
    if (g_handles[bit].load(std::memory_order_relaxed) == handle) return 1u << bit;
  return 0;
}

// Sessions that the calling thread's torch state belongs to. A callback that is left over (its session was stopped on
// another thread, or while a jit.fork carried it) is taken away here: until then it costs that thread something per
// operator.
uint32_t carried_sessions() {
  uint32_t found = 0;
  uint64_t left_over = 0;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() != &on_begin) continue;
    uint32_t consumer = consumer_of(entry.handle_);
    if (consumer == 0) left_over = entry.handle_;
    found |= consumer;
  }
  if (left_over != 0 && !is_forked()) at::removeCallback(left_over);
  return found;
}

bool carried_here(uint64_t handle) {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_)
    if (entry.handle_ == handle) return true;
  return false;
}

// Around changes of the observers: see before_fork().
std::mutex g_control;

// In steps that a session leaves out torch does not even call its observer: half of what it costs to record an operator
// is torch's own. Only where no thread can be in a context, in which operators are recorded in every step.
bool is_needed(const Observer& observer) {
  bool is_muted = (g_hot.shared().muted_roots.load(std::memory_order_relaxed) & observer.consumer) != 0;
  return !observer.all_threads || !is_muted || g_hot.shared().has_contexts.load(std::memory_order_relaxed) != 0;
}

// With g_control. A microsecond, and another with each thread's next operator.
void switch_observer(uint64_t handle, Observer* observer, bool on) {
  if (on != observer->is_off) return;
  on ? at::reenableCallback(handle) : at::disableCallback(handle);
  observer->is_off = !on;
}

// What the recorder says now is what holds: of two that change it on two threads, the last one here sees what both did.
void follow_mute() try {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(g_control);
  for (auto& [handle, observer] : g_observers) switch_observer(handle, &observer, is_needed(observer));
} catch (...) {  // no memory: it is called as before
}

// Each thread keeps a copy of those observers. One whose copy is old makes a new one with its next operator, under a
// lock of torch's. Of a child, which has only the thread that forked, that lock may be held for ever by a thread that
// is not there: so its copy is made new here, with all of them on, and stays so until the child is there.
void before_fork() {
  g_control.lock();
  try {
    for (auto& [handle, observer] : g_observers) switch_observer(handle, &observer, true);
    at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  } catch (...) {  // no memory: then it is as it was
  }
}

void after_fork_in_parent() { g_control.unlock(); }

// What the parent had registered is left where it is: the child's recorder is empty, and its handles mean nothing.
void after_fork_in_child() {
  g_control.unlock();
  g_forks.fetch_add(1, std::memory_order_relaxed);
  for (std::atomic<uint64_t>& handle : g_handles) handle.store(0, std::memory_order_relaxed);
  g_hot.requesting.store(0, std::memory_order_relaxed);
}

class OperatorWatch final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override {
    if (g_hot.name_generation.fetch_add(1, std::memory_order_release) == UINT32_MAX) g_hot.name_generation = 1;
  }
};

void watch_operators() {
  try {
    // Never taken away: this library stays as long as the process.
    static auto* watch = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<OperatorWatch>()));
    if (watch != nullptr) g_hot.name_generation.store(1, std::memory_order_relaxed);
  } catch (...) {  // then names are compared by content
  }
}

// Whether the name is that of a registered operator, in the dispatcher's own memory (1). Backward functions and labels
// carry theirs in the RecordFunction itself, whose address says nothing (0); TorchScript's own operators have theirs in
// a schema that the dispatcher does not watch (-1).
int name_is_stable(const void* key) {
  const auto& fn = *static_cast<const at::RecordFunction*>(key);
  try {
    std::optional<c10::OperatorName> name = fn.operator_name();
    if (!name.has_value()) return 0;
    std::optional<c10::OperatorHandle> found = c10::Dispatcher::singleton().findSchema(*name);
    return found.has_value() && found->schema().name().c_str() == fn.name() ? 1 : -1;
  } catch (...) {  // then its text is compared each time, which is right too
    return 0;
  }
}

uint32_t intern(const std::string& text, otp_name_kind kind) {
  return g_api->intern(text.data(), static_cast<uint32_t>(text.size()), kind);
}

// A line for each entry; stacksToStr, which torch has for this, ends each with a separator.
uint32_t intern_lines(const std::vector<std::string>& entries, char separator) {
  std::string text;
  for (const std::string& entry : entries) {
    if (!text.empty()) text += separator;
    text += entry;
  }
  return intern(text, OTP_NAME_CODE);
}

// What TorchScript is running; nothing, and nothing allocated, outside of it.
bool add_call_stack(InputWords* words) {
  std::vector<torch::jit::StackEntry> stack = torch::jit::currentCallstack();
  if (stack.empty()) return true;
  using namespace torch::profiler::impl;
  return words->add_text(OTP_INPUT_CALL_STACK, intern_lines(callstackStr(prepareCallstack(stack)), '\n'));
}

bool add_module_hierarchy(InputWords* words) {
  std::vector<std::string> modules = torch::jit::currentModuleHierarchy();
  return modules.empty() || words->add_text(OTP_INPUT_MODULE_HIERARCHY, intern_lines(modules, '.'));
}

template <typename Function>  // what is asked of no template has to compile
uint32_t overload_of(const Function& fn) {
  if constexpr (requires { fn.overload_name(); }) {
    return g_api->intern(fn.overload_name(), UINT32_MAX, OTP_NAME_OPERATOR);
  } else {  // torch 2.6
    std::optional<c10::OperatorName> name = fn.operator_name();
    return name.has_value() ? intern(name->overload_name, OTP_NAME_OPERATOR) : 0;
  }
}

// Asking for keywords copies them. What has outputs before it has run is an operator with a schema, which has none.
bool may_have_keywords(const at::RecordFunction& fn) { return fn.num_outputs() == 0; }

bool collect(const at::RecordFunction& fn, uint64_t requesting, InputWords* words) try {
  bool fitted = true;
  if (is_requested(requesting, OTP_REQUEST_INPUTS) && fn.needsInputs()) {
    fitted = words->add_inputs(fn.inputs(), fn.scope() == at::RecordScope::USER_SCOPE ? g_api->intern : nullptr);
    if (may_have_keywords(fn)) fitted &= words->add_keywords(fn.kwinputs(), g_api->intern);
  }
  if (__builtin_expect(requesting < 0x100, 1)) return fitted;
  if (is_requested(requesting, OTP_REQUEST_OVERLOADS)) fitted &= words->add_text(OTP_INPUT_OVERLOAD, overload_of(fn));
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) return fitted;  // as torch has it
  if (is_requested(requesting, OTP_REQUEST_CALL_STACKS)) fitted &= add_call_stack(words);
  if (is_requested(requesting, OTP_REQUEST_MODULE_HIERARCHY)) fitted &= add_module_hierarchy(words);
  return fitted;
} catch (...) {  // an operator must run whatever its inputs are; what is there so far is whole
  return false;
}

struct Scratch {
  bool in_use = false;
  int64_t words[kMaxInputWords];
};

// Where the recorder has to do something first, the words wait in memory of the thread. Before the recorder has copied
// them it may ask for the context, and that may run operators, which then go without.
void begin_with_words(const at::RecordFunction& fn, uint64_t requesting, otp_begin_args* args) {
  static thread_local Scratch t_scratch;
  Scratch* scratch = &t_scratch;  // finding it is a call, which the compiler would repeat at each use (11 of them)
  asm("" : "+r"(scratch));
  bool was_in_use = scratch->in_use;
  if (!was_in_use) {
    scratch->in_use = true;
    bool with_storages = is_requested(requesting, OTP_REQUEST_STORAGES);
    InputWords words(scratch->words, kMaxInputWords, with_storages ? Tensors::kWithStorages : Tensors::kAny);
    if (!collect(fn, requesting, &words)) args->flags |= OTP_FLAG_INPUTS_CUT;
    if (!words.empty() || args->flags != 0) {
      args->inputs = scratch->words;
      args->input_words = words.size();
    }
  }
  g_api->begin(args);
  scratch->in_use = was_in_use;
}

// By the recorder's function, which can do what is unusual.
__attribute__((noinline, cold)) void begin_slowpath(const at::RecordFunction& fn) {
  if (g_hot.shared().active[OTP_EVENT_OPERATOR].load(std::memory_order_relaxed) == 0) {
    if (!is_forked()) carried_sessions();
    return;
  }
  otp_begin_args args{};
  args.key = &fn;
  args.name = fn.name();
  args.name_size = UINT32_MAX;
  args.scope = static_cast<uint8_t>(fn.scope());
  args.kind = OTP_EVENT_OPERATOR;
  args.sequence_nr = fn.seqNr();
  args.fwd_thread = static_cast<uint32_t>(fn.forwardThreadId());
  args.source_tid = static_cast<uint32_t>(fn.threadId());
  args.name_generation = g_hot.name_generation.load(std::memory_order_relaxed);
  args.name_is_stable = name_is_stable;
  uint64_t requesting = g_hot.requesting.load(std::memory_order_relaxed);
  if (requesting != 0 && g_hot.shared().requests_inputs.load(std::memory_order_relaxed) != 0) {
    begin_with_words(fn, requesting, &args);
  } else {
    g_api->begin(&args);
  }
}

// For recorder_hot.h.
struct Operator {
  const at::RecordFunction& fn;
  const char* text;  // its name: a call into torch, made when there is nothing yet to be kept over it

  const void* key() const { return &fn; }
  uint8_t scope() const { return static_cast<uint8_t>(fn.scope()); }
  uint8_t kind() const { return OTP_EVENT_OPERATOR; }
  bool nests() const { return false; }
  int64_t sequence_nr() const { return fn.seqNr(); }
  uint32_t fwd_thread() const { return static_cast<uint32_t>(fn.forwardThreadId()); }
  uint32_t source_tid() const { return static_cast<uint32_t>(fn.threadId()); }
  bool name(hot::Thread& thread, uint32_t* id) const {
    return thread.addresses.find(text, g_hot.name_generation.load(std::memory_order_relaxed), id);
  }
  uint32_t inputs(uint8_t*, uint32_t, uint32_t) const { return 0; }
  uint64_t now() const { return hot::ticks(g_hot.core.clock_is_tsc != 0); }
};

// One whose words are written where they stay: behind the record of its begin. Of plain tensors only: for what is told
// of others torch may run Python, and whatever that records would be written to the same place.
struct OperatorWithInputs : Operator {
  uint64_t requesting;

  uint32_t inputs(uint8_t* place, uint32_t room, uint32_t consumers) const {
    auto* record = reinterpret_cast<otp_record*>(place);
    auto most = static_cast<uint32_t>(room / sizeof(int64_t));
    if (most < 3) return hot::kNoRoom;  // the record, and the word that says how many inputs there are
    InputWords words(reinterpret_cast<int64_t*>(record + 1), std::min(most - 2, kMaxInputWords), Tensors::kPlain);
    if (!collect(fn, requesting, &words)) return hot::kNoRoom;
    if (words.empty()) return 0;
    record->ticks = words.size();
    hot::write_head(record, OTP_RECORD_INPUTS, 0, consumers, 0);
    return static_cast<uint32_t>(sizeof *record + words.size() * sizeof(int64_t));
  }
};

__attribute__((noinline, hot)) void begin_with_inputs(const at::RecordFunction& fn, uint64_t requesting) {
  OperatorWithInputs event{{fn, fn.name()}, requesting};
  bool with_storages = is_requested(requesting, OTP_REQUEST_STORAGES);
  if (with_storages || !hot::begin_here(g_hot.core, event)) begin_slowpath(fn);
}

// Torch calls this between taking its start time and running the operator; what it costs is inside the parent's time.
// Returns no context: the address of `fn` is the identity of the event (it is not movable, and no two are open at one
// address), and a context would be an allocation per operator.
__attribute__((hot)) std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  uint64_t requesting = g_hot.requesting.load(std::memory_order_relaxed);
  if (__builtin_expect(requesting != 0, 0) && g_hot.shared().requests_inputs.load(std::memory_order_relaxed) != 0) {
    begin_with_inputs(fn, requesting);
  } else {
    Operator event{fn, fn.name()};
    if (!hot::begin_here(g_hot.core, event)) begin_slowpath(fn);
  }
  return nullptr;
}

__attribute__((noinline, cold)) void end_slowpath(const at::RecordFunction& fn, uint8_t flags) {
  if (g_api->end(&fn, flags, nullptr, 0) != 0) return;
  // Not open here: begun before the session, ended by another of our callbacks, or begun on another thread.
  if (fn.threadId() != at::RecordFunction::currentThreadId())
    g_api->end_elsewhere(&fn, 0, static_cast<uint32_t>(fn.threadId()), flags, nullptr, 0);
}

__attribute__((hot)) void on_end(const at::RecordFunction& fn, at::ObserverContext*) {
  uint8_t flags = fn.isAsync() ? OTP_FLAG_ASYNC : 0;
  if (__builtin_expect(!hot::end_here(g_hot.core, &fn, flags), 0)) end_slowpath(fn, flags);
}

}  // namespace
}  // namespace otp

extern "C" {

__attribute__((visibility("default"))) const char* otp_torch_dtype_name(int number) {
  static const auto& names = *new std::vector<std::string>([] {
    std::vector<std::string> found;
    for (int type = 0; type < static_cast<int>(c10::ScalarType::Undefined); ++type) {
      auto name = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(type)).name();
      found.emplace_back(name.data(), name.size());
    }
    return found;
  }());
  bool is_type = number >= 0 && number < static_cast<int>(names.size());
  return is_type ? names[static_cast<size_t>(number)].c_str() : nullptr;
}

__attribute__((visibility("default"))) int otp_torch_attach(const otp_api* api) {
  if (api->abi_version != OTP_ABI_VERSION || api->record_format_version != OTP_RECORD_FORMAT_VERSION ||
      api->hot.layout != otp::hot::kLayout)
    return OTP_E_VERSION;
  if (otp::g_api != nullptr) return OTP_OK;
  otp::g_hot.core = api->hot;
  otp::g_api = api;
  otp::watch_operators();
  pthread_atfork(otp::before_fork, otp::after_fork_in_parent, otp::after_fork_in_child);
  api->set_scope_hook(otp::carried_sessions);
  api->set_context_carrier(&otp::kContextCarrier);
  api->set_mute_hook(otp::follow_mute);
  return OTP_OK;
}

__attribute__((visibility("default"))) const char* otp_torch_version(void) { return TORCH_VERSION; }

__attribute__((visibility("default"))) void otp_torch_observe(uint32_t consumer, int all_threads, uint32_t requests,
                                                              uint64_t* handle) {
  at::RecordFunctionCallback callback(otp::on_begin, otp::on_end);
  callback.needsInputs((requests & (OTP_REQUEST_INPUTS | OTP_REQUEST_DEVICES)) != 0);
  otp::count_requests(requests, 1);
  *handle = 0;
  try {
    std::lock_guard<std::mutex> lock(otp::g_control);
    otp::g_observers.insert_or_assign(
        0, otp::Observer{consumer, all_threads != 0, requests, false});  // needs memory: first
    *handle = all_threads != 0 ? at::addGlobalCallback(callback) : at::addThreadLocalCallback(callback);
    auto observer = otp::g_observers.extract(0);
    observer.key() = *handle;
    otp::g_observers.insert(std::move(observer));
    if (all_threads == 0) otp::g_handles[__builtin_ctz(consumer)].store(*handle, std::memory_order_relaxed);
  } catch (...) {
    otp::count_requests(requests, -1);
    *handle = 0;  // of which otp_torch_unobserve knows that nothing is to be done
  }
  otp::follow_mute();
}

__attribute__((visibility("default"))) void otp_torch_unobserve(uint64_t handle) {
  if (handle == 0) return;
  std::lock_guard<std::mutex> lock(otp::g_control);
  auto found = otp::g_observers.find(handle);
  if (found == otp::g_observers.end()) return;
  otp::Observer observer = found->second;
  otp::g_observers.erase(found);
  otp::count_requests(observer.requests, -1);
  // Only its own entry: a profile that nobody stopped goes when it is collected, and its bit may be another's by then.
  uint64_t own = handle;
  otp::g_handles[__builtin_ctz(observer.consumer)].compare_exchange_strong(own, 0, std::memory_order_relaxed);
  // Torch would complain on stderr of a handle that it does not find here.
  if (!observer.all_threads && !otp::carried_here(handle)) return;
  try {
    at::removeCallback(handle);
  } catch (...) {  // torch knows nothing of it any more: then there is nothing to take away
  }
}

}  // extern "C"
