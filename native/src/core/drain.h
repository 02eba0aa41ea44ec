// Records to columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/batch_builder.h"
#include "core/clock.h"
#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace otp {

// Size of a record with that head, of which so many bytes are there; 0 where it is no whole, known one.
uint32_t record_size(const otp_record& head, uint32_t left);

// The end of an event that is not in its thread's chunks: it came from another thread, or there was no chunk for it.
struct LateEnd {
  uint32_t thread;  // where the event began
  uint64_t index;
  uint64_t ticks;
  uint32_t error_type;
  uint8_t flags;
  otp_thread ended_on;
};

// An event that was still open at the end of a drain; becomes the first rows of the next.
struct PendingEvent {
  uint64_t index;
  uint64_t parent;  // its id; 0: none
  int64_t start;
  int64_t sequence_nr;
  uint32_t name;
  uint32_t fwd_thread;
  uint32_t context;
  uint8_t kind, scope, flags;
  std::vector<int64_t> inputs;
};

// What a decoder must remember of a thread from one drain to the next.
struct ThreadDecoder {
  struct Open {
    uint64_t index;
    uint64_t row;
    uint64_t input_words;
  };
  uint64_t next_index = 0;
  int64_t last_ns = 0;     // of its records: later ones are not earlier, whatever was learnt of the clock since
  bool mark_loss = false;  // on the next event
  uint32_t context = 0;    // of the next events
  std::vector<Open> open;
  std::vector<PendingEvent> pending;
};

struct DecodeLimits {
  uint64_t start_ticks, stop_ticks;
  uint64_t cut_ticks;        // later records stay for another drain
  uint32_t consumer;         // the session's bit
  uint32_t most_listed = 0;  // OPEN records at the head of a chunk; 0: chunks have no such lists
};

// A piece of a thread's records.
struct ChunkView {
  const uint8_t* data;
  uint32_t size;
  uint64_t next_index;     // of the first event that begins in it
  bool continues = false;  // the rest of a chunk: it has no list at its head
};

// Of records that will not be decoded: the number of events (memory among them) that are there for the consumer. Adds
// the ends of those of its events that began before; the caller fills in the threads.
uint64_t scan_lost(const ChunkView& view, uint32_t consumer, std::vector<LateEnd>* ends);

// Decodes the chunks of one thread into rows. Any bytes are safe: a record that makes no sense ends its chunk.
class ThreadDecode {
 public:
  ThreadDecode(BatchBuilder& builder, ThreadDecoder& state, ClockReader& clock, DecodeLimits limits,
               const otp_thread& thread);

  void after_loss() { d_state.mark_loss = true; }
  // How many of its bytes were read: all, or up to the first record that is later than the cut.
  uint32_t chunk(const ChunkView& view);
  // An end from elsewhere. False when its begin has not been seen.
  bool late_end(const LateEnd& end, uint32_t thread_index);
  // Closes what is open at the stop.
  void finish_all(uint64_t stop_ticks);
  // Saves what is still open in the state and names its rows, for BatchBuilder::remove_rows. Call once, at the end.
  void keep_open(std::vector<uint64_t>* rows);

 private:
  uint32_t record(const otp_record& head, const uint8_t* at, uint32_t left);
  uint32_t rare_record(const otp_record& head, const uint8_t* at, uint32_t left);
  bool is_behind_cut(const otp_record& head) const;
  void begin(const otp_record_begin& record);
  void memory(const otp_record_memory& record);
  void opened(const otp_record_open& record);
  void close_unlisted();
  void row_of(const otp_record_begin& record, uint64_t index);
  void inputs(const int64_t* words, uint64_t count, uint8_t flags);
  void end(ThreadDecoder::Open* open, int64_t end_ns, uint8_t flags, uint32_t error_type);
  void end_here(uint64_t index, uint64_t ticks, uint8_t flags, uint32_t error_type);
  int64_t next_ns(uint64_t ticks) { return d_state.last_ns = std::max(d_state.last_ns, d_clock.unix_ns(ticks)); }
  uint64_t new_row(uint64_t index);
  const ThreadDecoder::Open* open_around(uint64_t index) const;
  void set_parent(uint64_t row, uint64_t parent);
  ThreadDecoder::Open* find_open(uint64_t index);
  uint64_t id_of(uint64_t index) const { return (static_cast<uint64_t>(d_thread.id) << OTP_INDEX_BITS) + index + 1; }
  void restore_pending();
  void restore_parent(uint64_t row, uint64_t parent_id);
  void close_row(uint64_t row, int64_t end_ns, uint8_t flags);

  BatchBuilder& d_builder;
  otp_batch& d_batch;
  ThreadDecoder& d_state;
  ClockReader& d_clock;
  DecodeLimits d_limits;
  otp_thread d_thread;
  uint32_t d_thread_index;
  bool d_last_begin_ours = false;
  std::vector<uint64_t> d_listed;  // of the chunk at hand: indices of its OPEN records
  bool d_is_listing = false;
};

}  // namespace otp
