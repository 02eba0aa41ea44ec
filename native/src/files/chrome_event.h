// One event of a Chrome trace as it is written: the values that are used, as JSON text.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "files/input_texts.h"
#include "files/json_cursor.h"
#include "files/trace_tables.h"

namespace otp {

// Names of the keys of attributes, or of the arguments of a collective of torch, and their values as JSON text.
using FoundAttributes = std::vector<std::pair<uint32_t, std::string_view>>;

struct ChromeArguments {
  bool is_unusable = false;  // they are neither an object nor missing
  bool is_async = false;
  bool is_unfinished = false;
  bool follows_loss = false;
  bool has_inputs_cut = false;
  bool is_collective = false;  // of torch
  std::string_view external_id, sequence_nr, fwd_thread, python_identity, correlation, device, stream, stream_id;
  std::string_view name, labels, error_type, phase_name, call_stack, modules, module;
  std::string_view bytes, address, total_allocated, total_reserved, device_id, device_type;
  std::string_view span_id, parent_id, trace_id, thread_id, data;
  std::string_view allocated, released, peak, device_allocated, device_released, device_peak;  // of a span
  InputTexts inputs;
};

struct ChromeEvent {
  std::string_view phase, category, name, process, thread, start, duration, id, local_id;
  ChromeArguments arguments;

  // The cursor is at its brace, and then behind it. `attributes`: gets the wanted ones. False: as for JsonCursor.
  bool read(JsonCursor* cursor, TraceTables* tables, FoundAttributes* attributes);

  // Where the value of a member goes; null: it is not used.
  std::string_view* place_of(std::string_view key);
};

}  // namespace otp
