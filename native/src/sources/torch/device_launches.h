// Which operators launch work on a device themselves, so that timing events around them measure something.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "otel_torchprof/recorder.h"

namespace otp::devices {

template <size_t N>
bool is_one_of(std::string_view name, const std::string_view (&sorted)[N]) {
  return std::binary_search(std::begin(sorted), std::end(sorted), name);
}

inline constexpr std::string_view kAten = "aten::";

// Launch nothing: an event pair around them would only cost time. Torch's own list, of its legacy profiler.
inline bool is_view_like(std::string_view name) {
  constexpr std::string_view kSorted[] = {
      "_unsafe_view", "as_strided", "empty",  "empty_like", "empty_strided", "expand",    "resize_", "size",
      "slice",        "squeeze",    "stride", "t",          "transpose",     "unsqueeze", "view",
  };
  return name.substr(0, kAten.size()) == kAten && is_one_of(name.substr(kAten.size()), kSorted);
}

// Backward functions that torch has generated, and what its engine puts around any: the operators that they call are
// all that they do. Those that Python defines may launch kernels of their own; their names have no number.
inline bool is_generated_node(std::string_view name) {
  constexpr std::string_view kAround = "autograd::engine::evaluate_function: ", kTorchs = "torch::autograd::";
  if (name.substr(0, kAround.size()) == kAround || name.substr(0, kTorchs.size()) == kTorchs) return true;
  constexpr std::string_view kEnd = "Backward";
  size_t end = name.find_last_not_of("0123456789");
  return end != std::string_view::npos && end + 1 < name.size() && name.substr(0, end + 1).size() >= kEnd.size() &&
         name.substr(end + 1 - kEnd.size(), kEnd.size()) == kEnd;
}

inline bool returns_views(const c10::FunctionSchema& schema) {
  auto is_view = [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), is_view);
}

inline c10::DispatchKey key_of(c10::DeviceType type) {
  switch (type) {
#define OTP_KEY(device, unused) \
  case c10::DeviceType::device: \
    return c10::DispatchKey::device;
    C10_FORALL_BACKEND_DEVICE_TYPES(OTP_KEY, unused)
#undef OTP_KEY
    default:
      return c10::DispatchKey::Undefined;
  }
}

// By what the dispatcher knows: a view launches nothing, and what is composed of other operators, on any device, leaves
// that to them. Once for each operator. The dispatcher has no lock for whoever asks: who registers kernels of torch's
// own operators does so before they run.
inline bool is_composed(const c10::OperatorHandle& op, c10::DeviceType type) {
  if (op.hasSchema() && returns_views(op.schema())) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
         !op.hasKernelForDispatchKey(key_of(type));
}

// Those of all devices' kernels ("CompositeExplicitAutograd") may launch something, as copy_ does. These do not.
inline bool calls_others(std::string_view name) {
  constexpr std::string_view kSorted[] = {
      "_convolution", "_to_copy", "clone",     "convolution", "full",       "full_like",
      "new_zeros",    "ones",     "ones_like", "zeros",       "zeros_like",
  };
  return is_one_of(name.substr(kAten.size()), kSorted);
}

inline bool find_launches(const at::RecordFunction& fn, std::string_view name, c10::DeviceType type) {
  if (is_view_like(name) || calls_others(name)) return false;
  std::optional<c10::OperatorName> full = fn.operator_name();
  std::optional<c10::OperatorHandle> op = full.has_value() ? c10::Dispatcher::singleton().findOp(*full) : std::nullopt;
  return !op.has_value() || !is_composed(*op, type);
}

// What is known of operators, by where their names are: those of torch's own operators stay there for the process's
// life. Whoever finds another one in its place looks again.
class LaunchesByName {
 public:
  template <typename Find>
  bool get(const char* name, Find find) {
    auto at = reinterpret_cast<uintptr_t>(name);
    std::atomic<uintptr_t>& place = d_places[(at >> 4 ^ at >> 12) % std::size(d_places)];
    uintptr_t known = place.load(std::memory_order_relaxed);
    if (known >> 1 == at) return (known & 1) != 0;
    bool found = find();
    place.store(at << 1 | (found ? 1 : 0), std::memory_order_relaxed);
    return found;
  }
  void clear() {
    for (auto& place : d_places) place.store(0, std::memory_order_relaxed);
  }

 private:
  std::atomic<uintptr_t> d_places[1024] = {};
};

// Whether an operator gives the device work itself. What it gives through others is told by marks around these: their
// sum is the time of its kernels, as torch.profiler has it, while marks around them all would take the stream 1.25 us
// each (H200), and a thread that records 2 to 3 us. On a training step whose operators are small these were two of five
// pairs.
inline bool launches(LaunchesByName& known, const otp_begin_args& event, c10::DeviceType type) {
  std::string_view name = event.name == nullptr ? std::string_view() : event.name;
  if (name.substr(0, kAten.size()) != kAten)
    return name != "detach" && !is_generated_node(name);  // around aten::detach
  const auto& fn = *static_cast<const at::RecordFunction*>(event.key);
  return known.get(event.name, [&] { return find_launches(fn, name, type); });
}

}  // namespace otp::devices
