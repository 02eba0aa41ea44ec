// Torch's allocators: a reporter in the thread's PROFILER_STATE slot that writes to the recorder.
//
// Torch keeps such slots as a list per thread, the newest first, whose nodes are shared by all threads that it carries
// the list to. Each session puts a node of its own in front. What is taken out of the slot when a session ends is the
// content of its nodes, and from whichever thread ends it: torch can take a node itself away only at the very front,
// on the thread that put it there.
#include "memory.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder_hot.h"

namespace otp::memory {
namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;
using DebugInfo = c10::ThreadLocalDebugInfo;
using Node = std::shared_ptr<DebugInfo>;

otp_hot g_core{};
int (*g_memory)(const otp_memory_args*) = nullptr;

// Torch looks at whatever is in the slot as a ProfilerStateBase, so it has to be one. Its state is Disabled and its
// type NONE: whoever asks hears that no profiler of torch's is running, and starts none of the work that belongs to
// one. Never destroyed, since a thread may be calling it while its session ends.
class Reporter final : public ProfilerStateBase {
 public:
  Reporter() : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled, false, /*profile_memory=*/true)) {}

  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }
  bool memoryProfilingEnabled() const override {
    return static_cast<const hot::Shared*>(g_core.shared)->requests_memory.load(std::memory_order_relaxed) != 0;
  }

  void reportMemoryUsage(void* block, int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override {
    report(block, bytes, allocated, reserved, device, 0);
  }
  void reportOutOfMemory(int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override {
    report(nullptr, bytes, allocated, reserved, device, OTP_MEMORY_OUT_OF_MEMORY);
  }

  // The session, 0 for none; and the reporter behind this one in the thread's list, whose session wants to know too.
  std::atomic<uint32_t> consumer{0};
  std::atomic<Reporter*> behind{nullptr};
  int64_t token = 0;
  pthread_t began_on;
  // Every node that shows this reporter.
  std::vector<Node> nodes;

 private:
  uint32_t consumers() const {
    uint32_t found = 0;
    for (const Reporter* at = this; at != nullptr; at = at->behind.load(std::memory_order_relaxed))
      found |= at->consumer.load(std::memory_order_relaxed);
    return found;
  }

  // Called by the allocator, perhaps under its lock: no lock, no allocation, no Python.
  void report(void* block, int64_t bytes, size_t allocated, size_t reserved, c10::Device device, uint8_t flags) const {
    otp_memory_args args;
    args.bytes = bytes;
    args.address = reinterpret_cast<uintptr_t>(block);
    args.total_allocated = static_cast<int64_t>(allocated);
    args.total_reserved = static_cast<int64_t>(reserved);
    args.device_type = static_cast<int32_t>(device.type());
    args.device_index = device.index();
    args.flags = flags;
    if (__builtin_expect(hot::memory_here(g_core, args), 1)) return;
    args.source_tid = static_cast<uint32_t>(at::RecordFunction::currentThreadId());
    args.scope_mask = consumers();
    g_memory(&args);
  }
};

// One per session, made when first needed. The lock is for control calls; nobody who reports takes it.
Reporter* g_reporters[OTP_MAX_SESSIONS];
std::mutex g_mutex;
int64_t g_last_token = 0;

// Torch offers no way to the content of a node that is not at the front. The language does: an explicit instantiation
// may name a private member.
using Content = std::shared_ptr<c10::DebugInfoBase> DebugInfo::*;
Content content();
template <Content member>
struct Opened {
  friend Content content() { return member; }
};
template struct Opened<&DebugInfo::info_>;

// Without a count of references, so that replacing one is the store of one pointer. Other threads that carry the node
// may read it at this moment: they find the old one, which is never destroyed, or the new one.
std::shared_ptr<c10::DebugInfoBase> uncounted(Reporter* reporter) {
  return {std::shared_ptr<void>(), static_cast<c10::DebugInfoBase*>(reporter)};
}

Reporter* own_reporter(const c10::DebugInfoBase* found) {
  for (Reporter* reporter : g_reporters)
    if (reporter != nullptr && static_cast<c10::DebugInfoBase*>(reporter) == found) return reporter;
  return nullptr;
}

// Takes away, as far as torch lets the calling thread, what is at the front and shows nothing any more.
void drop_empty_nodes() try {
  while (DebugInfo::current() != nullptr && DebugInfo::_peek(c10::DebugInfoKind::PROFILER_STATE) == nullptr)
    DebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
} catch (...) {  // something of another kind is at the front: then they stay, and cost nothing
}

void drop_nodes_of(const Reporter& reporter) {
  for (auto at = reporter.nodes.rbegin(); at != reporter.nodes.rend() && *at == DebugInfo::current(); ++at)
    DebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
}

// What showed this reporter shows the one behind it from now on, on every thread.
void retire(Reporter* reporter) {
  Reporter* behind = reporter->behind.load(std::memory_order_relaxed);
  reporter->token = 0;
  reporter->consumer.store(0, std::memory_order_relaxed);
  for (Reporter* other : g_reporters)
    if (other != nullptr && other->behind.load(std::memory_order_relaxed) == reporter)
      other->behind.store(behind, std::memory_order_relaxed);
  for (Node& node : reporter->nodes) {
    (*node).*content() = uncounted(behind);
    if (behind != nullptr && node.use_count() > 1) behind->nodes.push_back(std::move(node));
  }
  reporter->nodes.clear();
  reporter->behind.store(nullptr, std::memory_order_relaxed);
}

// Torch's profiler takes away whatever is in the slot when it is started a second time after it was refused.
bool was_taken_away(const Reporter& reporter) {
  if (!pthread_equal(reporter.began_on, pthread_self())) return false;
  const Reporter* at = own_reporter(DebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  while (at != nullptr && at != &reporter) at = at->behind.load(std::memory_order_relaxed);
  return at == nullptr;
}

int64_t observe(uint32_t consumer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Reporter*& reporter = g_reporters[__builtin_ctz(consumer)];
  if (reporter == nullptr) reporter = new Reporter;
  if (reporter->token != 0) retire(reporter);  // its session was not ended, and is freed
  const c10::DebugInfoBase* found = DebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  Reporter* behind = own_reporter(found);
  if (found != nullptr && behind == nullptr) return OTP_TORCH_MEMORY_OCCUPIED;
  drop_empty_nodes();
  reporter->nodes.reserve(1);
  DebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, uncounted(reporter));
  reporter->nodes.push_back(DebugInfo::current());
  reporter->began_on = pthread_self();
  reporter->behind.store(behind, std::memory_order_relaxed);
  reporter->consumer.store(consumer, std::memory_order_relaxed);
  return reporter->token = ++g_last_token;
}

bool unobserve(uint32_t consumer, int64_t token) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Reporter* reporter = g_reporters[__builtin_ctz(consumer)];
  // Only its own: a profile that nobody stopped goes when it is collected, and its bit may be another's by then.
  if (reporter == nullptr || reporter->token != token) return true;
  bool was_there = !was_taken_away(*reporter);
  drop_nodes_of(*reporter);
  retire(reporter);
  drop_empty_nodes();
  return was_there;
}

// Nobody observes in the child, and torch's slot is free for others there. Nothing is allocated: no reporter has
// another one behind it, that would take its nodes.
void forget_in_child() {
  for (Reporter* reporter : g_reporters)
    if (reporter != nullptr) reporter->behind.store(nullptr, std::memory_order_relaxed);
  for (Reporter* reporter : g_reporters)
    if (reporter != nullptr) retire(reporter);
  drop_empty_nodes();
  g_mutex.unlock();
}

}  // namespace

}  // namespace otp::memory

extern "C" {

__attribute__((visibility("default"))) void otp_torch_attach_memory(const otp_api* api) {
  if (otp::memory::g_memory != nullptr) return;
  otp::memory::g_core = api->hot;
  otp::memory::g_memory = api->memory;
  pthread_atfork([] { otp::memory::g_mutex.lock(); }, [] { otp::memory::g_mutex.unlock(); },
                 otp::memory::forget_in_child);
}

__attribute__((visibility("default"))) int64_t otp_torch_observe_memory(uint32_t consumer) try {
  return otp::memory::observe(consumer);
} catch (...) {
  return OTP_TORCH_MEMORY_REFUSED;
}

__attribute__((visibility("default"))) int otp_torch_unobserve_memory(uint32_t consumer, int64_t token) try {
  return otp::memory::unobserve(consumer, token) ? 1 : 0;
} catch (...) {  // no memory for a list of nodes: what is left reports to nobody, since its session has ended
  return 1;
}

}  // extern "C"
