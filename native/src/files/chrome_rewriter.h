// Writes the events of Chrome traces as those of one document: on one clock, with processes and ids of their own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "files/chrome_event.h"
#include "files/json_cursor.h"
#include "files/text_table.h"
#include "otel_torchprof/trace_files.h"

namespace otp {

// Throws std::bad_alloc.
class ChromeRewriter {
 public:
  explicit ChromeRewriter(uint64_t seed) : d_seed(seed) {}
  ~ChromeRewriter() { otp_buffer_free(&output); }
  ChromeRewriter(const ChromeRewriter&) = delete;
  ChromeRewriter& operator=(const ChromeRewriter&) = delete;

  // Begins a file.
  void begin(const otp_trace_target& target);
  // Adds a process of the file, by its JSON text, and the events that describe it.
  void add_process(std::string_view process, int64_t pid, std::string_view events);

  // The cursor is at the brace of an event, and then behind it. False: as for JsonCursor.
  bool read(JsonCursor* cursor);
  // Writes the event that was read. `fault`: otp_trace_fault. False: its process was not added yet.
  bool write(uint32_t* fault);
  // The process of the event that was read, as JSON text; empty: it has none.
  std::string_view process() const { return d_event.process; }

  otp_buffer output{};

 private:
  struct Member {
    std::string_view key;  // with its quotes
    std::string_view value;
  };

  static bool read_members(JsonCursor* cursor, std::vector<Member>* members);
  uint32_t check();
  bool find_process();
  bool is_new_track();
  bool on_clock(int64_t time, int64_t* corrected) const;
  uint64_t moved_id(std::string_view id) const;
  bool put_event();
  bool put_value(const Member& member, char** out);
  bool put_id2(std::string_view value, char** out);

  uint64_t d_seed;
  otp_trace_target d_target{};
  std::vector<otp_clock_line> d_lines;
  std::map<std::string, int64_t, std::less<>> d_pids;
  HashTable d_tracks;  // metadata of tracks that was written
  uint64_t d_track_count = 0;
  std::string d_last_process;
  int64_t d_last_pid = 0, d_newest_pid = 0;

  // The event.
  std::vector<Member> d_members, d_ids;
  ChromeEvent d_event;
  bool d_is_metadata = false, d_has_ids = false;
  int64_t d_pid = 0, d_begin = 0, d_end = 0;
};

}  // namespace otp
