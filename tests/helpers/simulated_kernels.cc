// The operators of the simulated device: every operator that the CPU has, run by the CPU on the same memory.
//
// One boxed function stands for all of them. It shows the CPU the device's memory as tensors of its own, hands what
// comes back over to the device, and enqueues one item of work on the current stream; an operator whose results are all
// views enqueues none. What the CPU does inside is hidden from profilers, since a real device's kernel would show none
// of it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "simulated_queue.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::DeviceType;
using c10::IValue;
using torch::jit::Stack;

// The last values on the stack, to be changed in place.
struct Last {
  IValue* first;
  IValue* past;
  IValue* begin() const { return first; }
  IValue* end() const { return past; }
};
Last last(Stack* stack, size_t n) { return {stack->data() + stack->size() - n, stack->data() + stack->size()}; }

constexpr auto kDeviceKey = c10::DispatchKey::PrivateUse1;

c10::Allocator* memory() { return c10::GetAllocator(DeviceType::PrivateUse1); }

// No profiler sees what happens on this thread while it lives: no operator, no memory.
class Hidden {
 public:
  Hidden() { c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr); }
  ~Hidden() { c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(before_); }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_ = c10::ThreadLocalDebugInfo::current();
  at::RecordFunctionGuard no_operators_{/*is_enabled=*/false};
};

// One call: what stands for what.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const size_t inputs = op_.schema().arguments().size();
    const size_t outputs = op_.schema().returns().size();
    if (op_.schema().name() == "aten::copy_") non_blocking_ = stack->back().toBool();
    for (IValue& value : last(stack, inputs)) value = to_cpu(value);
    {
      const Hidden hidden;
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    if (device_ < 0) device_ = current_device;
    const int before = std::exchange(current_device, device_);
    for (const auto& [cpu, own] : shown_) take_over_if_grown(Tensor(cpu), own);
    std::vector<IValue> spent;
    for (IValue& value : last(stack, outputs)) spent.push_back(std::exchange(value, to_device(value)));
    current_device = before;
    enqueue(outputs);
    forget(std::move(spent));
  }

 private:
  template <class F>
  IValue each_tensor(const IValue& value, F change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> changed;
      for (const Tensor& one : value.toTensorVector()) changed.push_back(change(one));
      return c10::List<Tensor>(std::move(changed));
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> changed;
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
        changed.push_back(one ? std::optional<Tensor>(change(*one)) : std::nullopt);
      return changed;
    }
    return value;
  }

  IValue to_cpu(const IValue& value) {
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      note_device(value.toDevice());
      return c10::Device(DeviceType::CPU);
    }
    return each_tensor(value, [this](const Tensor& one) { return shown(one); });
  }

  void note_device(c10::Device device) {
    if (device_ < 0) device_ = device.index() < 0 ? current_device : device.index();
  }

  Tensor shown(const Tensor& own) {
    if (!own.defined()) return own;
    if (!own.device().is_privateuseone()) {
      host_.insert(own.unsafeGetTensorImpl());
      return own;
    }
    note_device(own.device());
    c10::Storage storage = storage_shown(own.storage());
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         own.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(own.sizes(), own.strides(), own.storage_offset());
    shown_.emplace_back(made.getIntrusivePtr(), own);
    return made;
  }

  // The same memory, or, where there is none, a place that may grow: an empty `out`.
  c10::Storage storage_shown(const c10::Storage& own) {
    for (const auto& [cpu, known] : storages_)
      if (known.unsafeGetStorageImpl() == own.unsafeGetStorageImpl()) return cpu;
    const Hidden hidden;
    const bool empty = own.nbytes() == 0;
    auto* cpu = c10::GetAllocator(DeviceType::CPU);
    auto data = empty ? cpu->allocate(0) : c10::DataPtr(own.mutable_data(), c10::Device(DeviceType::CPU));
    c10::Storage made(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(data), empty ? cpu : nullptr, empty);
    storages_.emplace_back(made, own);
    return made;
  }

  static Tensor copied(const Tensor& cpu) {
    auto made = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), memory(), c10::DispatchKeySet(kDeviceKey),
                                                  cpu.scalar_type());
    if (made.storage().nbytes() > 0)
      std::memcpy(made.mutable_data_ptr(), cpu.const_data_ptr(), made.storage().nbytes());
    return made;
  }

  static void take_over_if_grown(const Tensor& cpu, const Tensor& own) {
    if (cpu.sizes() == own.sizes() && cpu.strides() == own.strides()) return;
    auto* impl = own.unsafeGetTensorImpl();
    if (cpu.storage().nbytes() > own.storage().nbytes()) impl->set_storage_keep_dtype(copied(cpu).storage());
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  IValue to_device(const IValue& value) {
    if (!value.isTensor() && !value.isTensorList()) {
      leaves_device_ = true;
      return value;
    }
    return each_tensor(value, [this](const Tensor& one) { return owned(one); });
  }

  // A result: one of the inputs, a view of one, or new.
  Tensor owned(const Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [cpu, own] : shown_)
      if (cpu.get() == result.unsafeGetTensorImpl()) return own;
    if (host_.count(result.unsafeGetTensorImpl()) != 0) {
      leaves_device_ = true;
      return result;
    }
    for (const auto& [cpu, own] : storages_) {
      if (cpu.unsafeGetStorageImpl() != result.storage().unsafeGetStorageImpl()) continue;
      auto view =
          at::detail::make_tensor<c10::TensorImpl>(c10::Storage(own), c10::DispatchKeySet(kDeviceKey), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return view;
    }
    makes_new_ = true;
    return copied(result);
  }

  void enqueue(size_t outputs) {
    const bool view = !makes_new_ && !leaves_device_ && !op_.schema().is_mutable() && outputs > 0;
    if (view) return;
    queues().kernel(op_.schema().name(), current_stream(device_));
    if (leaves_device_ && !non_blocking_) queues().synchronize_stream(current_stream(device_), /*counted=*/false);
  }

  // What only the CPU saw goes unseen. What is the device's goes with the call, in sight.
  void forget(std::vector<IValue> spent) {
    const Hidden hidden;
    spent.clear();
    for (auto& one : shown_) one.first.reset();
    for (auto& one : storages_) one.first = c10::Storage();
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<c10::intrusive_ptr<c10::TensorImpl>, Tensor>> shown_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::unordered_set<const c10::TensorImpl*> host_;
  bool non_blocking_ = false;
  int device_ = -1;
  bool makes_new_ = false;
  bool leaves_device_ = false;
};

void on_cpu(const c10::OperatorHandle& op, Stack* stack) { Call(op).run(stack); }

class Inside {
 public:
  explicit Inside(std::optional<c10::Device> device) {
    if (device && device->index() >= 0) current_device = device->index();
  }
  ~Inside() { current_device = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  int before_ = current_device;
};

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const Inside inside(device);
  return at::detail::empty_generic(size, memory(), c10::DispatchKeySet(kDeviceKey), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const Inside inside(device);
  return at::detail::empty_strided_generic(size, stride, memory(), c10::DispatchKeySet(kDeviceKey),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  return const_cast<Tensor&>(to).copy_(from, non_blocking);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t bytes =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), static_cast<size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

// Written by hand: they make, give away or change memory, which is the device's business.
const std::unordered_set<std::string> kOwn{"aten::empty.memory_format", "aten::empty_strided", "aten::_copy_from",
                                           "aten::resize_", "aten::set_.source_Storage_storage_offset"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || kOwn.count(c10::toString(name)) != 0) continue;
    m.impl(c10::toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

// What the CPU has no kernel of its own for, and nothing else either: the error is the CPU's.
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

}  // namespace
}  // namespace simulated
