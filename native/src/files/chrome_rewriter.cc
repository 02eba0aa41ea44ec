#include "files/chrome_rewriter.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "encode/buffer.h"
#include "encode/json_writer.h"
#include "files/json_copy.h"
#include "files/json_values.h"

namespace otp {
namespace {

constexpr size_t kLongestProcess = 256;                     // bytes by which processes differ
constexpr uint64_t kMostTracks = 100'000;                   // at 32 bytes each
constexpr std::string_view kPhasesOfIds = "stfbneSTFpNOD";  // flows, asynchronous events and objects
constexpr uint64_t kIdSeed = 0x7FB5D329728EA185u;           // the same in every file

bool is_string(std::string_view token) { return !token.empty() && token.front() == '"'; }

bool is_given(std::string_view token) { return !token.empty() && token != "null"; }

std::string_view key_of_process(std::string_view token) {
  return token.empty() ? "null" : token.substr(0, kLongestProcess);
}

char* append(char* out, std::string_view text) { return put_bytes(out, text.data(), text.size()); }

}  // namespace

void ChromeRewriter::begin(const otp_trace_target& target) {
  d_target = target;
  d_lines.assign(target.lines, target.lines + target.line_count);
  d_pids.clear();
  d_last_process.clear();
}

void ChromeRewriter::add_process(std::string_view process, int64_t pid, std::string_view events) {
  if (!buffer_reserve(&output, events.size())) throw std::bad_alloc();
  finish(&output, append(cursor(&output), events));
  d_pids.emplace(key_of_process(process), pid);
  d_newest_pid = pid;
}

bool ChromeRewriter::read(JsonCursor* cursor) {
  d_event = {};
  if (!read_members(cursor, &d_members)) return false;
  for (const Member& member : d_members)
    if (std::string_view* place = d_event.place_of(unquoted(member.key))) *place = member.value;
  return true;
}

bool ChromeRewriter::read_members(JsonCursor* cursor, std::vector<Member>* members) {
  members->clear();
  for (++cursor->at; cursor->space_and_commas();) {
    if (*cursor->at == '}') {
      ++cursor->at;
      return true;
    }
    std::string_view key;
    if (!cursor->key(&key)) return false;
    const char* begin = cursor->at;
    if (!cursor->skip()) return false;
    members->push_back({{key.data() - 1, key.size() + 2}, {begin, static_cast<size_t>(cursor->at - begin)}});
  }
  return false;
}

bool ChromeRewriter::write(uint32_t* fault) {
  *fault = check();
  if (*fault != OTP_FAULT_NONE) return true;
  const std::string_view name = unquoted(d_event.name);
  if (d_is_metadata && (name == "process_name" || name == "process_sort_index")) return true;
  const bool is_known = find_process();
  if (d_is_metadata && name == "process_labels" && (!is_known || d_pid != d_target.pid)) return true;
  if (!is_known) return false;
  if (d_is_metadata && !is_new_track()) return true;
  const uint64_t size = output.size;
  if (!put_event()) {
    output.size = size;
    *fault = OTP_FAULT_JSON;
  }
  return true;
}

// What is wrong with the event, before anything of it is written.
uint32_t ChromeRewriter::check() {
  if (!is_string(d_event.phase)) return OTP_FAULT_PHASE;
  const std::string_view phase = unquoted(d_event.phase);
  d_is_metadata = phase == "M";
  d_has_ids = phase.size() == 1 && kPhasesOfIds.find(phase) != std::string_view::npos;
  if (d_is_metadata) return is_string(d_event.name) ? OTP_FAULT_NONE : OTP_FAULT_NAME;
  int64_t start, duration = 0;
  if (!nanoseconds_of(d_event.start, &start)) return OTP_FAULT_TS;
  if (is_given(d_event.duration) && !nanoseconds_of(d_event.duration, &duration)) return OTP_FAULT_DUR;
  start += d_target.base;
  if (!on_clock(start, &d_begin) || !on_clock(start + std::max<int64_t>(duration, 0), &d_end)) return OTP_FAULT_TS;
  return d_has_ids && d_event.id.empty() && d_event.local_id.empty() ? OTP_FAULT_NO_ID : OTP_FAULT_NONE;
}

bool ChromeRewriter::on_clock(int64_t time, int64_t* corrected) const {
  for (const otp_clock_line& line : d_lines) {
    int64_t since;
    if (__builtin_sub_overflow(time, line.origin, &since)) return false;
    const double drifted = std::nearbyint(line.drift * static_cast<double>(since));
    if (!(std::fabs(drifted) <= static_cast<double>(kLatest))) return false;
    if (__builtin_sub_overflow(time, line.offset, &time)) return false;
    if (__builtin_sub_overflow(time, static_cast<int64_t>(drifted), &time)) return false;
  }
  return !__builtin_sub_overflow(time, d_target.merged_base, corrected);
}

bool ChromeRewriter::find_process() {
  const std::string_view key = key_of_process(d_event.process);
  if (key != d_last_process) {
    const auto found = d_pids.find(key);
    const bool is_full = d_pids.size() >= OTP_TRACE_MOST_PROCESSES;
    if (found == d_pids.end() && !is_full) return false;
    d_last_pid = found == d_pids.end() ? d_newest_pid : found->second;
    d_last_process = key;
  }
  d_pid = d_last_pid;
  return true;
}

bool ChromeRewriter::is_new_track() {
  const uint64_t track = hash_of(d_event.thread, d_seed) ^ mixed(static_cast<uint64_t>(d_pid) ^ d_seed, d_seed | 1);
  const uint64_t hash = mixed(hash_of(d_event.name, d_seed) ^ track, 0x9E3779B97F4A7C15u);
  if (d_tracks.find(hash) >= 0) return false;
  if (d_track_count == kMostTracks) return true;
  ++d_track_count;
  d_tracks.add(hash, 0);
  return true;
}

// An id that no other rank has.
uint64_t ChromeRewriter::moved_id(std::string_view id) const {
  int64_t number;
  const bool is_small = !is_string(id) && integer_of(id, &number) && number >= 0 && number < OTP_TRACE_IDS;
  return d_target.first_id + (is_small ? static_cast<uint64_t>(number) : hash_of(id, kIdSeed) % OTP_TRACE_IDS);
}

bool ChromeRewriter::put_event() {
  const auto size = static_cast<uint64_t>(d_members.back().value.end() - d_members.front().key.begin());
  if (!buffer_reserve(&output, kMostCopied * size + 64)) throw std::bad_alloc();
  char *const begin = cursor(&output), *out = put(begin, ",\n{");
  for (const Member& member : d_members) {
    const bool is_time = member.key == "\"ts\"" || member.key == "\"dur\"";
    if (is_time && (d_is_metadata || member.value == "null")) continue;
    if (out != begin + 3) *out++ = ',';
    if (!copy_json(member.key, &out)) return false;
    *out++ = ':';
    if (!put_value(member, &out)) return false;
  }
  if (d_event.process.empty()) out = put_integer(put(out, ",\"pid\":"), d_pid);
  *out++ = '}';
  finish(&output, out);
  return true;
}

bool ChromeRewriter::put_value(const Member& member, char** out) {
  const std::string_view key = unquoted(member.key);
  if (key == "ts") {
    *out = put_microseconds_between(*out, 0, d_begin);
  } else if (key == "dur") {
    *out = put_microseconds_between(*out, d_begin, d_end);
  } else if (key == "pid") {
    *out = put_integer(*out, d_pid);
  } else if ((key == "id" && d_has_ids) || (key == "bind_id" && !d_is_metadata)) {
    *out = put_integer(*out, moved_id(member.value));
  } else if (key == "args" && d_event.phase == "\"P\"" && d_event.name == "\"Profile\"") {
    *out = put(put_integer(put(*out, "{\"data\":{\"startTime\":"), d_begin / 1000), "}}");  // of samples of stacks
  } else if (key == "id2" && d_has_ids && member.value.front() == '{') {
    return put_id2(member.value, out);
  } else {
    return copy_json(member.value, out);
  }
  return true;
}

bool ChromeRewriter::put_id2(std::string_view value, char** out) {
  JsonCursor inside{value.data(), value.data() + value.size()};
  if (!read_members(&inside, &d_ids)) return false;
  char separator = '{';
  for (const Member& member : d_ids) {
    *(*out)++ = separator;
    separator = ',';
    if (!copy_json(member.key, out)) return false;
    *(*out)++ = ':';
    if (member.key == "\"global\"") {
      *out = put_integer(*out, moved_id(member.value));
    } else if (!copy_json(member.value, out)) {
      return false;
    }
  }
  if (d_ids.empty()) *(*out)++ = '{';
  *(*out)++ = '}';
  return true;
}

}  // namespace otp
