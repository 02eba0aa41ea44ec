// Torch's operators as ranges of another profiler (NVTX, ITT): an observer of RecordFunction beside the one that
// records.
//
// Never calls into Python and takes no lock: an operator may run while its thread holds anything.
#include "ranges.h"

#include <ATen/record_function.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>

#include "context.h"
#include "range_text.h"

#if __has_include(<torch/csrc/profiler/stubs/base.h>)
#include <torch/csrc/profiler/stubs/base.h>
#define OTP_TORCH_HAS_RANGES 1
#endif

namespace otp::ranges {
namespace {

constexpr size_t kMaxEmissions = 16;
constexpr size_t kMaxLibraries = 64;
constexpr uint32_t kMaxDepth = 1024;

// One that makes ranges, from its start to its stop. Found by the handle of its callback, which torch copies into the
// threads that carry its state and never uses twice: a callback whose handle is not here is left over.
struct Emission {
  std::atomic<uint64_t> handle{0};
  std::atomic<const otp_range_functions*> functions{nullptr};
  std::atomic<uint32_t> parts{0};
  // Made when first needed and kept: another thread may still look into it.
  std::atomic<Producers*> producers{nullptr};
};
Emission g_emissions[kMaxEmissions];

// Copies, since ranges that are open are ended through them when the caller's may be freed. Guarded, like the start of
// an emission, by g_control.
otp_range_functions g_libraries[kMaxLibraries];
size_t g_library_count = 0;
std::mutex g_control;
std::once_flag g_fork_handler;

bool forked() { return g_forks.load(std::memory_order_relaxed) != 0; }

Emission* emission_of(uint64_t handle) {
  for (Emission& emission : g_emissions)
    if (emission.handle.load(std::memory_order_acquire) == handle) return &emission;
  return nullptr;
}

// What is open on a thread. An end is matched to its own begin: an operator that ends on another thread, or after what
// began inside it, must not end somebody else's range.
struct Open {
  const void* key;
  const otp_range_functions* functions;
};
struct ThreadRanges {
  uint32_t depth;
  Open open[kMaxDepth];
};
thread_local ThreadRanges t_ranges;

void push(const void* key, const char* text, const otp_range_functions* functions) {
  if (t_ranges.depth == kMaxDepth) return;
  t_ranges.open[t_ranges.depth++] = {key, functions};
  functions->push(text);
}

void pop_down_to(uint32_t depth) {
  while (t_ranges.depth > depth) t_ranges.open[--t_ranges.depth].functions->pop();
}

// True when it was open here. Whatever is still open inside it ends too.
bool pop(const void* key) {
  for (uint32_t i = t_ranges.depth; i-- > 0;) {
    if (t_ranges.open[i].key != key) continue;
    pop_down_to(i);
    return true;
  }
  return false;
}

// Operators that ended on another thread than they began on: only that one can end the range, and does when it begins
// the next. Each is one word, an address and torch's number of the thread; 0 is free. One for which there is no place
// stays open until what is around it ends.
std::atomic<uint64_t> g_ended_elsewhere[64];
std::atomic<uint32_t> g_ended_elsewhere_count{0};

uint64_t ended_elsewhere(const void* key, uint64_t thread) {
  return reinterpret_cast<uintptr_t>(key) ^ (thread + 1) << 48;
}

void remember_end(const at::RecordFunction& fn) {
  for (std::atomic<uint64_t>& place : g_ended_elsewhere) {
    uint64_t none = 0;
    if (!place.compare_exchange_strong(none, ended_elsewhere(&fn, fn.threadId()))) continue;
    g_ended_elsewhere_count.fetch_add(1, std::memory_order_release);
    return;
  }
}

bool forget_end(const void* key) {
  uint64_t requested = ended_elsewhere(key, at::RecordFunction::currentThreadId());
  for (std::atomic<uint64_t>& place : g_ended_elsewhere) {
    if (place.load(std::memory_order_relaxed) != requested) continue;
    place.store(0, std::memory_order_relaxed);
    g_ended_elsewhere_count.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

void pop_what_ended_elsewhere() {
  if (__builtin_expect(g_ended_elsewhere_count.load(std::memory_order_acquire) == 0, 1)) return;
  while (t_ranges.depth > 0 && forget_end(t_ranges.open[t_ranges.depth - 1].key)) pop_down_to(t_ranges.depth - 1);
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn);

// The one that the calling thread's torch state carries. A callback that is left over is taken away here, but not in a
// forked child, where torch's lock may be held by a thread that is not there.
Emission* here() {
  Emission* found = nullptr;
  uint64_t left_over = 0;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() != &on_begin) continue;
    Emission* emission = emission_of(entry.handle_);
    if (emission == nullptr) left_over = entry.handle_;
    if (emission != nullptr) found = emission;
  }
  if (left_over != 0 && !forked()) at::removeCallback(left_over);
  return found;
}

bool carried_here(uint64_t handle) {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_)
    if (entry.handle_ == handle) return true;
  return false;
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  static thread_local RangeText text;
  const Emission* emission = here();
  if (emission == nullptr) return nullptr;
  pop_what_ended_elsewhere();
  uint32_t parts = emission->parts.load(std::memory_order_relaxed);
  push(&fn, text.of(fn, parts, emission->producers.load(std::memory_order_relaxed)),
       emission->functions.load(std::memory_order_relaxed));
  return nullptr;
}

void on_end(const at::RecordFunction& fn, at::ObserverContext*) {
  if (!pop(&fn) && fn.threadId() != at::RecordFunction::currentThreadId()) remember_end(fn);
  if (!fn.needsOutputs()) return;
  const Emission* emission = here();
  if (emission == nullptr || (emission->parts.load(std::memory_order_relaxed) & OTP_RANGE_PRODUCERS) == 0) return;
  Producers* producers = emission->producers.load(std::memory_order_relaxed);
  if (producers == nullptr) return;
  for (size_t i = 0; i < fn.outputs().size(); ++i) {
    const c10::IValue& output = fn.outputs()[i];
    if (output.isTensor() && output.toTensor().defined())
      producers->set(output.toTensor().unsafeGetTensorImpl(), fn.handle(), i);
  }
}

// The child starts with none, and with a lock that nobody holds.
void after_fork_in_child() {
  new (&g_control) std::mutex;
  for (Emission& emission : g_emissions) emission.handle.store(0, std::memory_order_relaxed);
}

// The kept copy; null when there are too many different ones.
const otp_range_functions* kept(const otp_range_functions& given) {
  for (size_t i = 0; i < g_library_count; ++i) {
    const otp_range_functions& known = g_libraries[i];
    if (known.push == given.push && known.pop == given.pop && known.mark == given.mark) return &known;
  }
  if (g_library_count == kMaxLibraries) return nullptr;
  g_libraries[g_library_count] = given;
  return &g_libraries[g_library_count++];
}

// Of threads that ran no operator afterwards. Nobody looks at them while nothing makes ranges.
void forget_all_ends() {
  for (const Emission& emission : g_emissions)
    if (emission.handle.load(std::memory_order_relaxed) != 0) return;
  for (std::atomic<uint64_t>& place : g_ended_elsewhere) place.store(0, std::memory_order_relaxed);
  g_ended_elsewhere_count.store(0, std::memory_order_relaxed);
}

bool prepare(Emission* emission, const otp_range_functions& functions, uint32_t parts) {
  const otp_range_functions* ours = kept(functions);
  if (ours == nullptr) return false;
  if ((parts & OTP_RANGE_PRODUCERS) != 0) {
    Producers* producers = emission->producers.load(std::memory_order_relaxed);
    if (producers == nullptr) producers = new (std::nothrow) Producers;
    if (producers == nullptr) return false;
    producers->clear();
    emission->producers.store(producers, std::memory_order_relaxed);
  }
  emission->functions.store(ours, std::memory_order_relaxed);
  emission->parts.store(parts, std::memory_order_relaxed);
  return true;
}

uint64_t observe(uint32_t parts) {
  try {
    return at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                          .needsInputs((parts & (OTP_RANGE_SIZES | OTP_RANGE_PRODUCERS)) != 0)
                                          .needsOutputs((parts & OTP_RANGE_PRODUCERS) != 0)
                                          .needsIds((parts & (OTP_RANGE_OP_ID | OTP_RANGE_PRODUCERS)) != 0));
  } catch (...) {
    return 0;
  }
}

#ifdef OTP_TORCH_HAS_RANGES
// Torch's own way as plain functions.
template <const torch::profiler::impl::ProfilerStubs* (*stubs)()>
bool of_torch(otp_range_functions* out) {
  if (!stubs()->enabled()) return false;
  out->push = [](const char* text) {
    stubs()->rangePush(text);
    return 0;
  };
  out->pop = [] {
    stubs()->rangePop();
    return 0;
  };
  out->mark = [](const char* text) { stubs()->mark(text); };
  return true;
}
#endif

}  // namespace
}  // namespace otp::ranges

#define OTP_EXPORTED __attribute__((visibility("default")))

extern "C" {

OTP_EXPORTED int otp_ranges_of_torch([[maybe_unused]] int itt, [[maybe_unused]] otp_range_functions* out) {
#ifdef OTP_TORCH_HAS_RANGES
  using namespace torch::profiler::impl;
  return itt != 0 ? otp::ranges::of_torch<ittStubs>(out) : otp::ranges::of_torch<cudaStubs>(out);
#else
  return 0;
#endif
}

OTP_EXPORTED uint64_t otp_ranges_start(const otp_range_functions* functions, uint32_t parts) {
  if (otp::ranges::here() != nullptr) return 0;
  std::call_once(otp::ranges::g_fork_handler,
                 [] { pthread_atfork(nullptr, nullptr, otp::ranges::after_fork_in_child); });
  std::lock_guard<std::mutex> lock(otp::ranges::g_control);
  otp::ranges::forget_all_ends();
  otp::ranges::Emission* free = otp::ranges::emission_of(0);
  if (free == nullptr || !otp::ranges::prepare(free, *functions, parts)) return 0;
  uint64_t handle = otp::ranges::observe(parts);
  free->handle.store(handle, std::memory_order_release);
  return handle;
}

OTP_EXPORTED uint64_t otp_ranges_here(void) {
  const otp::ranges::Emission* emission = otp::ranges::here();
  return emission == nullptr ? 0 : emission->handle.load(std::memory_order_relaxed);
}

OTP_EXPORTED void otp_ranges_stop(uint64_t handle) {
  otp::ranges::Emission* emission = handle == 0 ? nullptr : otp::ranges::emission_of(handle);
  if (emission == nullptr) return;
  if (otp::ranges::carried_here(handle)) {
    // The end of a label is not reported any more, nor of that of an operator that ends on another thread.
    otp::ranges::pop_down_to(0);
    at::removeCallback(handle);
  }
  emission->handle.store(0, std::memory_order_release);
}

OTP_EXPORTED void otp_ranges_label_begin(const void* key, const char* text) {
  const otp::ranges::Emission* emission = otp::ranges::here();
  if (emission == nullptr) return;
  otp::ranges::pop_what_ended_elsewhere();
  otp::ranges::push(key, text, emission->functions.load(std::memory_order_relaxed));
}

OTP_EXPORTED void otp_ranges_label_end(const void* key) { otp::ranges::pop(key); }

OTP_EXPORTED void otp_ranges_mark(uint64_t handle, const char* text) {
  const otp::ranges::Emission* emission = handle == 0 ? nullptr : otp::ranges::emission_of(handle);
  if (emission != nullptr) emission->functions.load(std::memory_order_relaxed)->mark(text);
}

}  // extern "C"
