// What the arguments of an operator of c10d say: its tensors, its group, its root or its peer.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "otel_torchprof/recorder.h"
#include "tensors.h"

namespace otp::collectives {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Call {
  Group group;
  c10::intrusive_ptr<c10d::Backend> backend;  // which is asked after the call too, when the group may have let go of it
  std::optional<c10::DeviceType> device;
  const char* reduce_op = "";
  std::string_view dtype;
  int64_t bytes_in = 0, bytes_out = 0;
  int64_t timeout_ms = -1;
  int32_t peer = -1, root = -1, tag = -1;
  bool is_transfer = false, is_async = false;
  bool counts_otherwise = false;  // the backend's number does not rise by one
};

inline bool begins_with(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

inline int32_t small(int64_t value) {
  return value < 0 || value > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(value);
}

// Notes the device and the type of a tensor, and gives its size in bytes.
inline int64_t bytes_of(const at::Tensor& tensor, Call* call) {
  if (!tensor.defined() || !has_plain_sizes(tensor)) return 0;
  if (!call->device.has_value()) {
    call->device = tensor.device().type();
    call->dtype = tensor.dtype().name();
  }
  return static_cast<int64_t>(tensor.numel() * tensor.itemsize());
}

inline int64_t bytes_of(const c10::IValue& value, Call* call) {
  if (value.isTensor()) return bytes_of(value.toTensor(), call);
  int64_t sum = 0;
  if (value.isList())
    for (const c10::IValue& element : value.toListRef()) sum += bytes_of(element, call);
  return sum;
}

inline const char* name_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::BAND:
      return "band";
    case c10d::ReduceOp::BOR:
      return "bor";
    case c10d::ReduceOp::BXOR:
      return "bxor";
    case c10d::ReduceOp::PREMUL_SUM:
      return "premul_sum";
    default:
      return "";
  }
}

// The schemas of c10d name their arguments alike: `tensors` are worked on in place, others are inputs or outputs.
inline void add_argument(std::string_view name, const c10::IValue& value, Call* call) {
  if (name == "process_group") {
    call->group = value.toCustomClass<c10d::ProcessGroup>();
  } else if (name == "reduce_op") {
    call->reduce_op = name_of(value.toCustomClass<c10d::ReduceOp>()->op_);
  } else if (name == "tensors") {
    call->bytes_in = call->bytes_out = bytes_of(value, call);
  } else if (name == "tensor") {  // of a barrier: it tells the device, and nothing else
    bytes_of(value, call);
  } else if (begins_with(name, "output") && !value.isIntList()) {
    call->bytes_out = bytes_of(value, call);
  } else if (begins_with(name, "input") && !value.isIntList()) {
    call->bytes_in = bytes_of(value, call);
  } else if (name == "root_rank") {
    call->root = small(value.toInt());
  } else if (name == "dst" || name == "src") {
    call->peer = small(value.toInt());
  } else if (name == "tag") {
    call->tag = small(value.toInt());
  } else if (name == "async_op" || name == "asyncOp") {  // the second in earlier versions of torch
    call->is_async = value.toBool();
  } else if (name == "timeout") {
    call->timeout_ms = value.toInt();
  }
}

inline void append_shapes(const c10::IValue& value, std::string* text) {
  if (text->size() >= sizeof(otp_blackbox_call::shapes)) return;  // it will be cut
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) append_shapes(element, text);
  } else if (value.isTensor() && has_plain_sizes(value.toTensor())) {
    if (text->size() > 1) *text += ", ";
    *text += '[';
    for (int64_t i = 0; i < value.toTensor().dim(); ++i)
      *text += (i == 0 ? "" : ", ") + std::to_string(value.toTensor().size(i));
    *text += ']';
  }
}

// As PyTorch's flight recorder prints them: "[[2, 16], [4]]".
inline std::string shapes_of_inputs(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::string text = "[";
  const auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    if (name == "tensors" || begins_with(name, "input")) append_shapes(stack[first + i], &text);
  }
  return text.size() == 1 ? "" : text + "]";
}

// Throws where an argument is not what its name says, and where a group is none of torch's own.
inline Call call_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Call call;
  const auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) add_argument(arguments[i].name(), stack[first + i], &call);
  const std::string& name = op.schema().name();
  call.is_transfer = name == "c10d::send" || begins_with(name, "c10d::recv_");
  if (name == "c10d::send") call.bytes_out = 0;
  if (begins_with(name, "c10d::recv_")) call.bytes_in = 0;
  if (begins_with(name, "c10d::barrier") || begins_with(name, "c10d::monitored_barrier")) call.dtype = "";
  if (call.group) call.backend = call.group->getBackend(call.device.value_or(c10::DeviceType::CPU));
  call.counts_otherwise = call.is_transfer || name == "c10d::monitored_barrier_";
  return call;
}

}  // namespace otp::collectives
