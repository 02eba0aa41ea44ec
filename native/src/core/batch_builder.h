// Columns while they are being filled.
#pragma once

#include <cstdint>
#include <vector>

#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace otp {

// The rows of a batch while they are being made: columns at their full size from the start (an upper bound is known,
// and pages that are not touched cost nothing), behind them room for what finish() adds.
class BatchBuilder {
 public:
  // An event that is no row, since it has not ended.
  struct Open {
    uint64_t id, parent;
    int64_t start, sequence_nr;
    uint32_t context, name, thread, fwd_thread;
    uint8_t kind, scope;
  };

  // Upper bounds, and which of the optional arrays there are.
  struct Size {
    uint64_t rows, input_words, memory, threads;
    bool with_inputs, with_contexts, with_memory;
  };

  explicit BatchBuilder(const Size& size);
  ~BatchBuilder();
  BatchBuilder(const BatchBuilder&) = delete;
  BatchBuilder& operator=(const BatchBuilder&) = delete;

  // Whether there was memory for it.
  bool ok() const { return d_batch != nullptr; }
  otp_batch* batch() { return d_batch; }
  uint32_t thread_index(const otp_thread& thread);
  void add_outer(uint64_t row, uint64_t parent_id) { d_outer.push_back({row, parent_id}); }
  uint64_t outer_parent(uint64_t row) const;
  void add_open(const Open& open) { d_open.push_back(open); }
  // Where these words are from now on: rows with the same inputs share them, as far as they are remembered.
  int64_t add_inputs(const int64_t* words, uint64_t count);
  void add_memory(const otp_record_memory& record, int64_t time, uint64_t event, uint32_t thread);
  // Takes rows out, once; their children keep the id of their parent as an outer one. `rows` ascending.
  void remove_rows(const std::vector<uint64_t>& rows);
  // Hands the batch over.
  otp_batch* finish();

 private:
  struct Outer {
    uint64_t row, parent;
  };
  void place(const otp_column& column, uint64_t entries);
  void close_gaps(const std::vector<uint64_t>& rows);

  struct Words {
    uint64_t offset, count;
  };

  otp_batch* d_batch;
  std::vector<Words> d_written;  // by hash, the last that were written; empty without inputs
  uint64_t d_used = 0;           // bytes of its block
  std::vector<otp_thread> d_threads;
  std::vector<Outer> d_outer;
  std::vector<Open> d_open;
};

}  // namespace otp
