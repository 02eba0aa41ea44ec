// What the rows of a file point to, the sums over it, and where the rows go: the same for every format.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "files/input_texts.h"
#include "files/text_table.h"
#include "otel_torchprof/trace_files.h"

namespace otp {

struct TraceOutput {
  otp_trace_rows* rows;
  otp_trace_works* works;
  otp_trace_memory* memory;

  bool is_full() const {
    return rows->count == rows->capacity || works->count == works->capacity ||
           memory->capacity - memory->count < OTP_TRACE_ROWS_PER_SPAN;
  }
};

// What a span allocated and released with the spans inside it, on the host and on devices; 0: nothing. A peak of -1 is
// not known.
struct SpanMemory {
  int64_t allocated = 0, released = 0, peak = -1;
  int64_t device_allocated = 0, device_released = 0, device_peak = -1;

  void put(uint64_t row, uint32_t track, otp_trace_memory* out) const {
    constexpr int32_t kCpu = 0, kCuda = 1;
    const struct {
      int64_t bytes, total;
      int32_t device;
    } moved[] = {{allocated, peak, kCpu},
                 {released, -1, kCpu},
                 {device_allocated, device_peak, kCuda},
                 {device_released, -1, kCuda}};
    static_assert(sizeof moved / sizeof *moved <= OTP_TRACE_ROWS_PER_SPAN, "there is room for them");
    for (size_t i = 0; i < sizeof moved / sizeof *moved; ++i) {
      if (moved[i].bytes <= 0) continue;
      const uint64_t at = out->count++;
      out->time[at] = 0;
      out->bytes[at] = i % 2 == 0 ? moved[i].bytes : -moved[i].bytes;
      out->address[at] = 0;
      out->total_allocated[at] = moved[i].total;
      out->total_reserved[at] = -1;
      out->span[at] = row;
      out->track[at] = track;
      out->device_type[at] = moved[i].device;
      out->device_index[at] = -1;
      out->flags[at] = 0;
    }
  }
};

constexpr std::string_view kCollective = "torch.collective.";

constexpr std::string_view kPhaseTime = "torch.phase.", kDuration = ".duration";

// An attribute that is always read: of steps, of spans that stand for several events, samples of stacks, and of
// collectives.
inline bool is_always_read(std::string_view key) {
  return key == "torch.aggregated.count" || key == "torch.aggregated.duration" || key == "torch.collapsed.count" ||
         key == "torch.collapsed.duration" || key == "torch.samples" || key == "torch.step.tokens" ||
         key == "torch.step.samples" || key == "torch.step.flops" || key == "torch.step.mfu" ||
         (key.substr(0, kPhaseTime.size()) == kPhaseTime && key.size() > kDuration.size() &&
          key.substr(key.size() - kDuration.size()) == kDuration) ||
         key.substr(0, kCollective.size()) == kCollective;
}

// What such a span has too: the sum over its events, whose inputs may differ.
constexpr std::string_view kFlops = "torch.op.flops";

// Throws std::bad_alloc.
class TraceTables {
 public:
  TraceTables(uint64_t limit, uint64_t seed) : d_limit(limit), d_seed(seed), d_names(seed), d_inputs(seed) {}

  bool is_over_limit() const {
    return d_names.bytes() + d_inputs.bytes() + d_attributes.size() * sizeof(otp_trace_attribute) > d_limit;
  }

  // Reads for sums, with the attributes of these keys, one a line.
  void read_for_sums(std::string_view keys);
  bool is_for_sums() const { return d_is_for_sums; }
  // The name of a key whose attributes are read; -1 for other keys.
  int64_t wanted(std::string_view key) {
    if (d_is_for_sums) return d_wanted.find(hash_of(key, d_seed));
    if (key == kFlops) return d_flops = name(key);
    return is_always_read(key) ? int64_t{name(key)} : -1;
  }
  // Whether any attribute found at a span is to be added: operations alone are those of a single event.
  template <class Found>
  bool keeps(const Found& found) const {
    for (const auto& attribute : found)
      if (attribute.first != d_flops) return true;
    return false;
  }
  // Adds an attribute of the event that was counted last; `value`: JSON text. The self time of a span matters only
  // where what is below it is not in the file: below a phase.
  void add_attribute(uint64_t row, uint64_t offset, bool is_phase, uint32_t key, std::string_view value) {
    if (is_phase || key != d_self_duration) d_attributes.push_back({row, figures.events, offset, key, name(value)});
  }
  const std::vector<otp_trace_attribute>& attributes() const { return d_attributes; }

  uint32_t name(std::string_view text) { return d_names.number_of(text); }
  // The name of the events of a phase: spans may have one of the conventions.
  uint32_t phase_name(std::string_view phase) {
    d_scratch = "torch.phase.";
    return name(d_scratch.append(phase));
  }
  // A row's inputs; -1 where it has none.
  int64_t inputs(const InputTexts& texts) { return texts.any() ? d_inputs.place_of(texts) : -1; }
  // The track of a process and a thread, which are names.
  uint32_t track(uint32_t process, uint32_t thread);

  // Counts an event that cannot be used; `offset`: of the document's begin.
  void note(uint32_t fault, uint64_t offset);

  otp_trace_figures figures = {};

  const TextTable& names() const { return d_names; }
  const std::vector<uint32_t>& tracks() const { return d_tracks; }
  const std::vector<int64_t>& input_words() const { return d_inputs.words(); }

 private:
  uint64_t d_limit;
  uint64_t d_seed;
  TextTable d_names;
  bool d_is_for_sums = false;
  HashTable d_wanted;
  uint32_t d_self_duration = 0;
  uint32_t d_flops = UINT32_MAX;
  std::vector<otp_trace_attribute> d_attributes;
  InputWordTable d_inputs;
  HashTable d_track_numbers;
  std::vector<uint32_t> d_tracks;
  uint64_t d_last_pair = 0;  // names of process and thread of the last track
  uint32_t d_last_track = UINT32_MAX;
  std::string d_scratch;
};

inline uint32_t TraceTables::track(uint32_t process, uint32_t thread) {
  const uint64_t pair = uint64_t{process} << 32 | thread;
  if (d_last_track != UINT32_MAX && pair == d_last_pair) return d_last_track;
  // The names are numbers that count up; spread over all bits they are as good as a hash.
  const uint64_t hash = mixed(pair ^ 0xE7037ED1A0B428DBu, 0x9E3779B97F4A7C15u);
  int64_t number = d_track_numbers.find(hash);
  if (number < 0) {
    number = static_cast<int64_t>(d_tracks.size() / 2);
    d_tracks.push_back(process);
    d_tracks.push_back(thread);
    d_track_numbers.add(hash, number);
  }
  d_last_pair = pair;
  return d_last_track = static_cast<uint32_t>(number);
}

inline void TraceTables::read_for_sums(std::string_view keys) {
  d_is_for_sums = true;
  for (size_t end; !keys.empty(); keys.remove_prefix(std::min(end + 1, keys.size()))) {
    end = std::min(keys.find('\n'), keys.size());
    const std::string_view key = keys.substr(0, end);
    d_wanted.add(hash_of(key, d_seed), name(key));
  }
  d_self_duration = name("torch.self_duration");
}

inline void TraceTables::note(uint32_t fault, uint64_t offset) {
  if (figures.unusable++ != 0) return;
  figures.first_fault = fault;
  figures.first_event = figures.events;
  figures.first_offset = offset;
}

}  // namespace otp
