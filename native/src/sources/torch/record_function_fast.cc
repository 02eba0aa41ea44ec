// Stands in for a profiler of torch's in the thread's PROFILER_STATE slot, for the time of one call of torch's.
#include "record_function_fast.h"

#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>

namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;
using DebugInfo = c10::ThreadLocalDebugInfo;

// Torch takes inputs only for a profiler whose state says that it is one. It does nothing.
class StandIn final : public ProfilerStateBase {
 public:
  explicit StandIn(bool with_inputs) : ProfilerStateBase(ProfilerConfig(ProfilerState::CPU, with_inputs)) {}
  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }
  void reportMemoryUsage(void*, int64_t, size_t, size_t, c10::Device) override {}
};

// Never destroyed: a thread may be in the middle of a call when the process ends.
std::shared_ptr<c10::DebugInfoBase> stand_in(bool with_inputs) {
  static auto* const kWithout = new StandIn(false);
  static auto* const kWith = new StandIn(true);
  return {std::shared_ptr<void>(), with_inputs ? kWith : kWithout};
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int otp_fast_records_stand_in(int with_inputs) try {
  if (torch::profiler::impl::profilerEnabled()) return 0;
  DebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, stand_in(with_inputs != 0));
  return 1;
} catch (...) {
  return 0;
}

__attribute__((visibility("default"))) void otp_fast_records_stand_down(void) try {
  DebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
} catch (...) {  // somebody has put another kind in front and left it there
}

}  // extern "C"
