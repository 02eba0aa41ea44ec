// The image of a black box, as a reader finds it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/blackbox.h"
#include "core/drain.h"
#include "otel_torchprof/blackbox_format.h"

namespace otp {

constexpr uint64_t kMostBytes = uint64_t{1} << 32;

// A chunk, as far as its records make sense.
struct FoundChunk {
  uint64_t at;  // in the image
  uint64_t sequence, next_index, events;
  uint64_t taken, last;  // ticks: its own records are not older, and not younger
  uint32_t thread, size;
  otp_thread info;
};

// How far the records of a thread have been decoded.
struct ReadThread {
  size_t begin, end;    // of its chunks
  size_t chunk;         // that is next, ...
  uint32_t from;        // ... from there on, ...
  uint64_t next_index;  // ... which continues the events there
  ThreadDecoder decoder;
};

class Image {
 public:
  Image(int fd, const uint8_t* data, uint64_t size)
      : d_fd(fd < 0 ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 0)), d_data(data), d_size(std::min(size, kMostBytes)) {}
  ~Image() {
    if (d_fd >= 0) close(d_fd);
  }
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  // False: it is none.
  bool read_header();
  // Anew, as otp_blackbox_read wants them. Whatever was read before is forgotten but for names.
  void read_contents(int64_t since, otp_blackbox_contents* out);
  otp_batch* next(uint64_t max_bytes);
  void rewind();

 private:
  bool read(uint64_t at, void* out, uint64_t bytes) const;
  template <typename T>
  bool copy(uint64_t at, T* out) const {
    return read(at, out, sizeof *out);
  }
  uint64_t texts_at() const { return OTP_BLACKBOX_NAME_ENDS_AT + uint64_t{d_header.name_capacity} * sizeof(uint32_t); }
  uint64_t chunks_at() const { return texts_at() + d_header.name_text_capacity; }

  // As many of `count` entries as there are.
  template <typename T>
  std::vector<T> copy_all(uint64_t at, uint32_t count) const {
    uint64_t whole = at > d_size ? 0 : (d_size - at) / sizeof(T);
    std::vector<T> entries(std::min<uint64_t>(count, whole));
    if (!read(at, entries.data(), entries.size() * sizeof(T))) entries.clear();
    return entries;
  }
  void forget();
  void read_points();
  std::vector<uint64_t> chunks_since(int64_t since);
  void read_chunks(int64_t since);
  bool read_chunk(uint64_t at, FoundChunk* found);
  bool copy_head(uint64_t at, hot::ChunkHead* out) const;
  uint32_t sound_bytes(const hot::ChunkHead& head, uint32_t size, FoundChunk* found);
  bool is_sound(const hot::ChunkHead& head, const otp_record& record, uint64_t before) const;
  void drop_overlapping();
  void read_late_ends();
  uint64_t cut_of(uint64_t max_bytes) const;
  bool begins_by(const ReadThread& thread, uint64_t cut) const;
  uint64_t bytes_up_to(uint64_t cut) const;
  void decode_thread(ReadThread& thread, uint64_t cut, BatchBuilder& builder, std::vector<uint64_t>* open_rows);
  bool records_of(const FoundChunk& chunk);
  void rename(otp_batch* batch);
  void read_groups(otp_blackbox_contents* out);
  void read_collectives(int64_t since, otp_blackbox_contents* out);
  uint64_t time_of(uint64_t ticks) const {
    return ticks == 0 ? 0 : static_cast<uint64_t>(ClockReader(d_points).unix_ns(ticks));
  }
  uint32_t own_name(uint32_t id);
  std::string text_of(uint32_t id) const;
  void copy_info(otp_blackbox_contents* out) const;
  void copy_hang(otp_blackbox_contents* out) const;

  int d_fd;
  const uint8_t* d_data;
  uint64_t d_size;
  otp_blackbox_header d_header{};
  std::vector<ClockPoint> d_points;
  std::vector<FoundChunk> d_chunks;  // by thread, and within one as they were written
  std::vector<LateEnd> d_late_ends;
  std::unordered_map<uint32_t, uint32_t> d_names;  // in this process, by the id there; the last that were asked for
  uint64_t d_last = 0;                             // ticks
  uint32_t d_found = 0, d_damaged = 0;
  int64_t d_complete_since = 0;    // Unix ns; see otp_blackbox_contents
  std::vector<uint8_t> d_records;  // of the chunk at hand

  // What rewind() begins anew.
  std::vector<ReadThread> d_threads;
  std::vector<LateEnd> d_late_left;
  bool d_is_done = false;
};

}  // namespace otp
