// What the benchmarks need in C++: observers of torch's operators and allocations that do nothing, and loops without
// Python in them.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define PEERS_CAN_COUNT 1
#else
#define PEERS_CAN_COUNT 0
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#endif

namespace {

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) { return nullptr; }
void end(const at::RecordFunction&, at::ObserverContext*) {}

struct EmptyReporter final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t, size_t, size_t, c10::Device) override {}
  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

extern "C" {

// The least that any observer of the calling thread costs; with `inputs`, torch also collects the arguments for it.
uint64_t peers_observe(int inputs) {
  return at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end).needsInputs(inputs != 0));
}

void peers_unobserve(uint64_t handle) { at::removeCallback(handle); }

// The least that being told of the calling thread's allocations costs.
void peers_observe_memory() {
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<EmptyReporter>());
}

void peers_unobserve_memory() { c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE); }

// `count` events of the allocator, half of which give back what the others allocated; no operators.
void peers_allocations(uint64_t count) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  for (uint64_t i = 0; i + 2 <= count; i += 2) allocator->allocate(64);
}

// `count` operators through the dispatcher, each of which does next to nothing: comparing two sizes.
void peers_operators(uint64_t count) {
  at::Tensor one = at::ones({4, 4}), other = at::ones({4, 4});
  for (uint64_t i = 0; i < count; ++i) at::is_same_size(one, other);
}

// `count` operators that do some work: small additions.
void peers_additions(uint64_t count) {
  at::Tensor one = at::ones({4, 4}), other = at::ones({4, 4});
  for (uint64_t i = 0; i < count; ++i) at::add(one, other);
}

// Whether valgrind counts what the next one does.
int peers_can_count() { return PEERS_CAN_COUNT; }

void peers_operators_counted(uint64_t count) {
  at::Tensor one = at::ones({4, 4}), other = at::ones({4, 4});
  CALLGRIND_START_INSTRUMENTATION;
  for (uint64_t i = 0; i < count; ++i) at::is_same_size(one, other);
  CALLGRIND_STOP_INSTRUMENTATION;
}

// `count` events as a tree: each group is one range with three operators inside.
void peers_groups(uint64_t count) {
  at::Tensor one = at::ones({4, 4}), other = at::ones({4, 4});
  for (uint64_t i = 0; i + 4 <= count; i += 4) {
    RECORD_FUNCTION("group", c10::ArrayRef<const c10::IValue>{});
    for (int j = 0; j < 3; ++j) at::is_same_size(one, other);
  }
}

}  // extern "C"
