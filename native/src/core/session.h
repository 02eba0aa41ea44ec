// A consumer of the recording: what it wants, what is held for it, how far it has read.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "core/chunk_list.h"
#include "core/drain.h"
#include "otel_torchprof/recorder.h"

namespace otp {

struct ThreadBuffer;

// How far a session has read one thread.
struct Cursor {
  Chunk* chunk = nullptr;  // partly read; null: begin the next one at its start
  uint32_t offset = 0;
  bool skipped = false;  // chunks were evicted since the last drain
  ThreadDecoder decoder;
};

}  // namespace otp

// All of it belongs to the registry's lock, except what a drain has taken for itself (`draining`).
struct otp_session {
  enum class State { kNew, kRunning, kStopped };

  otp_session_options options{};
  State state = State::kNew;
  uint32_t bit = 0;
  uint32_t generation = 0;  // of the registry: tells a forked child
  bool draining = false;
  uint64_t start_ticks = 0;
  uint64_t stop_ticks = UINT64_MAX;
  uint64_t bytes_held = 0;
  uint64_t bytes_held_max = 0;
  uint64_t recorded = 0;
  uint64_t losses[OTP_LOSS_REASONS] = {};           // while it runs: Registry::losses
  uint64_t losses_reported[OTP_LOSS_REASONS] = {};  // in earlier batches
  std::deque<otp::Chunk*> held;                     // oldest first
  std::unordered_map<otp::ThreadBuffer*, otp::Cursor> cursors;
  std::vector<otp::LateEnd> late_ends;

  uint32_t mask() const { return 1u << bit; }
};
