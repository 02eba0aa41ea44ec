// Inputs of an event as arguments of its slice in Chrome JSON.
#pragma once

#include <array>

#include "encode/input_reader.h"
#include "encode/json_writer.h"
#include "otel_torchprof/encode.h"

namespace otp {

// Inputs whose text is in the output already, by their words: a model has few sets of inputs, each of them many times.
class WrittenInputs {
 public:
  // Where the text of these inputs begins in the output, and its size without the last comma; {0, 0}: it is not there.
  struct Text {
    uint64_t at;
    uint64_t size;
  };
  Text find(const int64_t* words, uint64_t count) const;

  // Notes where the text of the inputs from `words` to `end` is. Its last comma may be overwritten.
  void add(const int64_t* words, const int64_t* end, uint64_t text_at, uint64_t text_size);

 private:
  static constexpr uint64_t kSlots = 1024;  // 32 KB; beyond that many sets, later ones are not noted
  static constexpr uint64_t kProbes = 8;

  struct Slot {
    const int64_t* words = nullptr;
    uint64_t count = 0;
    Text text{0, 0};
  };

  std::array<Slot, kSlots> d_slots{};
};

// Appends "Input Dims":[[2,3],[]],"Input type":["float",""], and so on, each argument with a comma behind it. `names`
// are escaped. `count`: of the words from the row's first one to the end of all. False when memory is short.
bool append_input_arguments(const int64_t* words, uint64_t count, const otp_names& names, WrittenInputs* written,
                            otp_buffer* out);

}  // namespace otp
