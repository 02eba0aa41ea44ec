// A consumer of the recording: what it requests, what is held for it, how far it has read.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/blackbox.h"
#include "core/chunk_list.h"
#include "core/drain.h"
#include "otel_torchprof/recorder.h"

namespace otp {

struct ThreadBuffer;

// A chunk that is held for a session, and from where on. Not from its start where the session came later than the
// chunk's first record, or was away for some of them (torch's thread-local scope), or has drained a part.
struct Held {
  Chunk* chunk;
  uint64_t next_index;  // of the first event that begins behind `from`
  uint32_t from;        // bytes
  bool after_loss;      // chunks before it were evicted
  Chunk** reader;       // where this session's drain has it, which follows where it is moved; null: it reads it not
};

// How far a session has read one thread.
struct Cursor {
  uint32_t chunks = 0;      // held
  bool after_loss = false;  // chunks were evicted, and none has come since
  ThreadDecoder decoder;
};

}  // namespace otp

// All of it belongs to the registry's lock, except what a drain has taken for itself (`draining`).
struct otp_session {
  enum class State { kNew, kRunning, kStopped };

  otp_session_options options{};
  State state = State::kNew;
  uint32_t bit = 0;
  uint32_t generation = 0;    // of the registry: tells a forked child
  uint32_t start_epoch = 0;   // of the registry: tells what a thread knew before
  uint32_t follow_epoch = 0;  // the same for contexts
  bool draining = false;
  bool roots_muted = false;   // kept for the start, where it is said before
  bool bit_reserved = false;  // sources know it by its bit, though all that it had may be given back
  bool given_back = false;    // all but the bit
  uint64_t start_ticks = 0;
  uint64_t stop_ticks = UINT64_MAX;
  uint64_t bytes_buffered = 0;
  uint64_t bytes_buffered_max = 0;
  uint64_t recorded = 0;
  uint64_t losses[OTP_LOSS_REASONS] = {};           // while it runs: Registry::losses
  uint64_t losses_reported[OTP_LOSS_REASONS] = {};  // in earlier batches
  std::deque<otp::Held> held;                       // oldest first
  std::unordered_map<otp::ThreadBuffer*, otp::Cursor> cursors;
  std::vector<otp::LateEnd> late_ends;
  std::unique_ptr<otp::BlackBox> box;  // that it will open with its start

  uint32_t mask() const { return 1u << bit; }
};
