// Inputs of an event as arguments of its slice in Chrome JSON.
#pragma once

#include "encode/input_reader.h"
#include "encode/json_writer.h"
#include "otel_torchprof/encode.h"

namespace otp {

// Appends "Input Dims":[[2,3],[]],"Input type":["float",""], and so on, each argument with a comma behind it. `names`
// are escaped. False when memory is short.
bool append_input_arguments(InputReader reader, const otp_names& names, otp_buffer* out);

}  // namespace otp
