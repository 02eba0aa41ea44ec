// The black box, as its process writes it: chunks, names and clock in a mapping that outlives the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/chunk_list.h"
#include "core/clock.h"
#include "core/guarded_mapping.h"
#include "otel_torchprof/blackbox_format.h"
#include "otel_torchprof/recorder.h"

namespace otp {

struct LateEnd;
struct ThreadBuffer;

// What is written in clear.
struct NamePolicy {
  uint32_t hidden = 0;                    // bits 1 << otp_name_kind
  std::vector<std::string> shown_labels;  // patterns of fnmatch(3) for labels that are written all the same
  bool hides_shapes = false;              // of collectives
  bool hides_threads = false;             // their names

  std::string_view shown(std::string_view name, otp_name_kind kind) const;
};

// Maps a file that has all of its blocks, and may be cut all the same: nothing that is read there is relied on.
//
// Callers hold one lock for each part: the interner's for names, the clock's for points, the registry's for all else.
// A reader in another process can tell what is being changed: see blackbox_format.h.
class BlackBox {
 public:
  // Throws std::bad_alloc where it cannot be mapped. `bytes` is at least OTP_BLACKBOX_LEAST.
  BlackBox(int fd, uint64_t bytes, NamePolicy policy);
  BlackBox(const BlackBox&) = delete;
  BlackBox& operator=(const BlackBox&) = delete;

  // From here on it is one. Under the registry's lock, as the end of it then.
  void publish(uint32_t consumer);

  Chunk* take();  // null when all are in use
  void give_back(Chunk* chunk);
  // What is open on the calling thread for the box, and will be at the head of its next chunk: to be listed while the
  // chunk is there that the thread leaves. At most as many bytes.
  uint32_t list_open(const ThreadBuffer& thread, uint32_t consumer, uint32_t bytes);
  void append_open(ThreadBuffer& thread, uint32_t count);
  const otp_record_open& listed(uint32_t i) const { return d_open[i]; }
  // Whether the main thread has ever enqueued any.
  bool main_has_collectives() const { return d_main_has_collectives; }
  // Of the collectives that the thread has enqueued and that are not complete, the least; 0: all are complete.
  uint32_t pending_timeout_ms(uint32_t os_tid) const;

  void add_name(uint32_t id, std::string_view name, otp_name_kind kind);
  void add_point(ClockPoint point);
  void add_late_end(const LateEnd& end);
  // `ticket` is above 0, and no other collective of the process has it.
  void add_collective(uint64_t ticket, const otp_blackbox_call& call, uint32_t os_tid);
  void complete_collective(uint64_t ticket, bool failed);
  void set_info(std::string_view json);
  void set_dropped(uint64_t events);
  // A thread has begun and ended nothing since then. The stacks of all threads come later, or never.
  void set_hang(uint32_t os_tid, uint64_t since_ticks);
  void set_stacks(std::string_view text);

  // Ends it. True: no chunk of it is in use, and it can be destroyed; else once the last chunk is returned.
  bool close();
  bool can_go() const { return d_is_closed && d_free.size() == d_chunks.size(); }
  bool hides_threads() const { return d_policy.hides_threads; }
  // Its file was cut: what is written here can be read by nobody.
  bool is_lost() const { return d_memory.is_lost(); }

 private:
  // Once it is closed: without the file as soon as nobody reads a chunk of it.
  void leave_file();
  uint8_t* at(uint64_t offset) const { return d_memory.memory() + offset; }
  uint64_t texts_at() const { return OTP_BLACKBOX_NAME_ENDS_AT + d_name_capacity * sizeof(uint32_t); }
  otp_blackbox_group* group_of(const otp_blackbox_call& call);
  otp_blackbox_collective& collective(uint64_t ticket) {
    auto* entries = reinterpret_cast<otp_blackbox_collective*>(at(OTP_BLACKBOX_COLLECTIVES_AT));
    return entries[ticket % OTP_BLACKBOX_COLLECTIVES];
  }

  GuardedMapping d_memory;
  NamePolicy d_policy;
  otp_blackbox_header* d_header;
  uint32_t d_name_capacity, d_name_text_capacity;
  uint32_t d_name_text_bytes = 0;  // written
  std::vector<Chunk> d_chunks;
  std::vector<Chunk*> d_free;
  std::vector<otp_record_open> d_open;  // as listed
  bool d_is_closed = false;
  bool d_main_has_collectives = false;
};

}  // namespace otp
