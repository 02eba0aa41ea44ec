// What torch's profiler calls the types of inputs.
#pragma once

#include <cstdint>

#include "encode/input_reader.h"

namespace otp {

constexpr uint64_t kMaxTypeNameSize = 32;

// Of an input as a whole: "float", "Scalar", "TensorList".
const char* type_name(const InputHead& head);

}  // namespace otp
