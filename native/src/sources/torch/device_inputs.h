// What of an operator says on which device it works.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <optional>

namespace otp::devices {

// Looks at what an input is or holds, until an index is found. `others`: something lies on another device.
struct DeviceSearch {
  c10::DeviceType type;
  bool others = false;
  std::optional<c10::DeviceIndex> found = std::nullopt;

  void look(c10::Device device, c10::DeviceIndex current) {
    if (device.type() == type) {
      found = device.has_index() ? device.index() : current;
    } else {
      others = true;
    }
  }
  void look(const at::Tensor& tensor, c10::DeviceIndex current) {
    if (tensor.defined()) look(tensor.device(), current);
  }
  void look(const c10::IValue& value, c10::DeviceIndex current) {
    if (value.isTensor()) {
      look(value.toTensor(), current);
    } else if (value.isDevice()) {
      look(value.toDevice(), current);
    } else if (value.isTensorList() || value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (found.has_value() || !(element.isTensor() || element.isNone())) break;
        if (element.isTensor()) look(element.toTensor(), current);
      }
    }
  }
};

// The device of an operator's inputs, the current one where these do not tell; nothing where all of them are
// elsewhere: an operator of the CPU leaves no work for a device.
inline std::optional<c10::DeviceIndex> device_index_of(const at::RecordFunction& fn, c10::DeviceType type,
                                                       c10::DeviceIndex current) {
  if (!fn.needsInputs()) return current;
  DeviceSearch search{type};
  for (const c10::IValue& value : fn.inputs()) {
    search.look(value, current);
    if (search.found.has_value()) return search.found;
  }
  return search.others ? std::nullopt : std::optional(current);
}

}  // namespace otp::devices
