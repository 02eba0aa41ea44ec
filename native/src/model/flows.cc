// Backward functions and the forward operators that made them: see flows.py.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace otp {
namespace {

constexpr uint8_t kBackwardFunction = 1;  // at::RecordScope::BACKWARD_FUNCTION

// The keys of backward functions, by open addressing: a number and the thread on which the node was made.
class Keys {
 public:
  Keys(const otp_numbered_events& events, uint64_t backward) : events_(events) {
    uint64_t size = 16;
    while (size < 4 * backward) size *= 2;  // most of what is looked up is not there
    slots_.assign(size, kNone);
    firsts_.reserve(backward);
  }

  // The place of an event's key among them; kNone if it is none of them.
  uint32_t find(uint64_t event) const { return slots_[slot_of(event)]; }

  uint32_t add(uint64_t event) {
    uint32_t& slot = slots_[slot_of(event)];
    if (slot == kNone) {
      slot = static_cast<uint32_t>(firsts_.size());
      firsts_.push_back(event);
    }
    return slot;
  }

  uint64_t size() const { return firsts_.size(); }

  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  uint64_t slot_of(uint64_t event) const {
    const auto number = static_cast<uint64_t>(events_.number[event]);
    const auto thread = static_cast<uint64_t>(events_.made_on[event]);
    const uint64_t mask = slots_.size() - 1;
    uint64_t at = ((number + (thread << 40)) * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[at] != kNone && !is_equal(firsts_[slots_[at]], event)) at = (at + 1) & mask;
    return at;
  }

  bool is_equal(uint64_t one, uint64_t other) const {
    return events_.number[one] == events_.number[other] && events_.made_on[one] == events_.made_on[other];
  }

  const otp_numbered_events& events_;
  std::vector<uint32_t> slots_;
  std::vector<uint64_t> firsts_;  // an event with each key
};

// The forward operators with the key of each backward function, one key after another, in the order of their starts.
class Candidates {
 public:
  explicit Candidates(const otp_numbered_events& events, uint64_t backward) : events_(events), keys_(events, backward) {
    for (uint64_t i = 0; i < events.count; ++i)
      if (events.is_backward[i] != 0) keys_.add(i);
    std::vector<uint32_t> forward, key;
    begins_.assign(keys_.size() + 1, 0);
    for (uint64_t i = 0; i < events.count; ++i) {
      if (events.is_backward[i] != 0) continue;
      const uint32_t found = keys_.find(i);
      if (found == Keys::kNone) continue;
      forward.push_back(static_cast<uint32_t>(i)), key.push_back(found);
      ++begins_[found + 1];
    }
    for (uint64_t k = 0; k < keys_.size(); ++k) begins_[k + 1] += begins_[k];
    std::vector<uint32_t> next(begins_.begin(), begins_.end() - 1);
    sorted_.resize(forward.size());
    for (uint64_t i = 0; i < forward.size(); ++i) sorted_[next[key[i]]++] = forward[i];
    const auto is_before = [&](uint32_t one, uint32_t other) { return events.start[one] < events.start[other]; };
    for (uint64_t k = 0; k < keys_.size(); ++k) {
      const auto begin = sorted_.begin() + begins_[k], end = sorted_.begin() + begins_[k + 1];
      if (!std::is_sorted(begin, end, is_before)) std::stable_sort(begin, end, is_before);
    }
  }

  // The last one that does not start after a backward function; kNone without any.
  uint32_t latest(uint64_t backward) const {
    const uint32_t key = keys_.find(backward);
    const auto begin = sorted_.begin() + begins_[key], end = sorted_.begin() + begins_[key + 1];
    const auto after = std::upper_bound(begin, end, events_.start[backward],
                                        [&](int64_t start, uint32_t i) { return start < events_.start[i]; });
    return after == begin ? Keys::kNone : *(after - 1);
  }

 private:
  const otp_numbered_events& events_;
  Keys keys_;
  std::vector<uint32_t> begins_, sorted_;
};

}  // namespace
}  // namespace otp

extern "C" int otp_number_events(const otp_flow_columns* columns, otp_numbered_events* numbered) {
  const otp_flow_columns& c = *columns;
  otp_numbered_events n = *numbered;
  n.count = 0;
  for (uint64_t row = 0; row < c.count; ++row) {
    if (__builtin_expect(c.sequence_nr[row] < 0, 1) || c.kind[row] == OTP_EVENT_PHASE) continue;
    if (c.thread[row] >= c.thread_count) return -1;
    const bool is_backward = c.scope[row] == otp::kBackwardFunction;
    const int64_t made_on = is_backward ? c.fwd_thread[row] : c.torch_tid[c.thread[row]];
    if (made_on == 0) continue;
    n.row[n.count] = static_cast<int64_t>(row), n.number[n.count] = c.sequence_nr[row];
    n.made_on[n.count] = made_on, n.start[n.count] = c.start[row], n.is_backward[n.count] = is_backward;
    ++n.count;
  }
  numbered->count = n.count;
  return 0;
}

extern "C" int64_t otp_pair_events(const otp_numbered_events* events, int64_t* forward, int64_t* backward) {
  const auto count = std::count(events->is_backward, events->is_backward + events->count, 1);
  if (count == 0) return 0;
  int64_t pairs = 0;
  try {
    const otp::Candidates candidates(*events, static_cast<uint64_t>(count));
    for (uint64_t i = 0; i < events->count; ++i) {
      if (events->is_backward[i] == 0) continue;
      const uint32_t found = candidates.latest(i);
      if (found == otp::Keys::kNone) continue;
      forward[pairs] = found;
      backward[pairs++] = static_cast<int64_t>(i);
    }
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return pairs;
}
