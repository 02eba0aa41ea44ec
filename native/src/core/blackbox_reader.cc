// Reads the image of a black box: any bytes are safe.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "core/blackbox.h"
#include "core/chunk_list.h"
#include "core/drain.h"
#include "core/registry.h"
#include "otel_torchprof/blackbox_format.h"

namespace otp {

namespace {

// By how much an end may be older than its chunk (its time was taken before there was room for it), and a record
// younger than the last that is known of the clock: a tenth of a second, and a day, at least. What begins in a chunk is
// younger than that: a record of its former life behind its last is told by this.
constexpr uint64_t kOlder = uint64_t{1} << 28, kYounger = uint64_t{1} << 48;

constexpr int64_t kLastTime = 6'000'000'000'000'000'000;  // Unix ns: from here on sums may overflow
constexpr uint64_t kMostBytes = uint64_t{1} << 32;
constexpr uint32_t kMostThreads = 1u << (64 - OTP_INDEX_BITS);
constexpr uint64_t kMostIndex = uint64_t{1} << (OTP_INDEX_BITS - 1);

// A copy of a chunk's records, as far as they make sense.
struct FoundChunk {
  uint64_t sequence, next_index, events;
  uint32_t thread;
  otp_thread info;
  std::vector<uint8_t> records;
};

bool overlap(const FoundChunk& before, const FoundChunk& after) {
  return before.thread == after.thread &&
         (before.sequence == after.sequence || after.next_index < before.next_index + before.events);
}

bool has_time(const otp_record& record) {
  return record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_LOSS && record.kind != OTP_RECORD_CONTEXT;
}

class Image {
 public:
  Image(const uint8_t* data, uint64_t size) : d_data(data), d_size(std::min(size, kMostBytes)) {}

  // False: it is none.
  bool read_header();
  otp_blackbox_contents* contents();

 private:
  template <typename T>
  bool copy(uint64_t at, T* out) const {
    if (at > d_size || d_size - at < sizeof *out) return false;
    std::memcpy(out, d_data + at, sizeof *out);
    return true;
  }
  uint64_t texts_at() const { return OTP_BLACKBOX_NAME_ENDS_AT + uint64_t{d_header.name_capacity} * sizeof(uint32_t); }
  uint64_t chunks_at() const { return texts_at() + d_header.name_text_capacity; }

  void read_points();
  void read_chunks();
  bool read_chunk(uint64_t at, FoundChunk* found);
  bool copy_head(uint64_t at, hot::ChunkHead* out) const;
  uint32_t sound_bytes(const hot::ChunkHead& head, const std::vector<uint8_t>& records, uint64_t* events);
  bool is_sound(const hot::ChunkHead& head, const otp_record& record, uint64_t before) const;
  void drop_overlapping();
  void read_late_ends();
  otp_batch* decode();
  void rename(otp_batch* batch);
  void read_groups(otp_blackbox_contents* out);
  void read_collectives(otp_blackbox_contents* out);
  uint64_t time_of(uint64_t ticks) const {
    return ticks == 0 ? 0 : static_cast<uint64_t>(ClockReader(d_points).unix_ns(ticks));
  }
  uint32_t own_name(uint32_t id);
  void copy_info(otp_blackbox_contents* out) const;
  void copy_hang(otp_blackbox_contents* out) const;

  const uint8_t* d_data;
  uint64_t d_size;
  otp_blackbox_header d_header{};
  std::vector<ClockPoint> d_points;
  std::vector<FoundChunk> d_chunks;  // by thread, and within one as they were written
  std::vector<LateEnd> d_late_ends;
  std::map<uint32_t, uint32_t> d_names;
  uint64_t d_last = 0;  // ticks
  uint32_t d_found = 0, d_damaged = 0;
};

bool Image::read_header() {
  if (!copy(0, &d_header)) return false;
  bool is_ours = std::memcmp(d_header.magic, OTP_BLACKBOX_MAGIC, sizeof d_header.magic) == 0 &&
                 d_header.version == OTP_BLACKBOX_VERSION &&
                 d_header.record_format_version == OTP_RECORD_FORMAT_VERSION;
  if (!is_ours) return false;
  uint64_t chunks = uint64_t{d_header.chunk_count} * OTP_CHUNK_BYTES;
  return chunks_at() <= kMostBytes && chunks <= kMostBytes && chunks_at() % OTP_CHUNK_BYTES == 0;
}

void Image::read_points() {
  for (const otp_blackbox_point& point : d_header.points)
    if (point.ticks != 0 && point.unix_ns > 0 && point.unix_ns < kLastTime)
      d_points.push_back({point.ticks, point.unix_ns});
  std::sort(d_points.begin(), d_points.end(),
            [](const ClockPoint& a, const ClockPoint& b) { return a.ticks < b.ticks; });
  auto is_no_later = [](const ClockPoint& a, const ClockPoint& b) {
    return b.ticks == a.ticks || b.unix_ns <= a.unix_ns;
  };
  d_points.erase(std::unique(d_points.begin(), d_points.end(), is_no_later), d_points.end());
  if (d_points.empty()) d_points.push_back({0, 0});  // then the times say how long, and not when
  d_last = d_points.back().ticks;
}

// Fences on both sides, since the process may be writing: the same sequence before and after means that what was read
// in between belongs together.
bool Image::copy_head(uint64_t at, hot::ChunkHead* out) const {
  if (at > d_size || d_size - at < OTP_BLACKBOX_CHUNK_HEADER) return false;
  full_fence();
  std::memcpy(static_cast<void*>(out), d_data + at, sizeof *out);
  full_fence();
  return true;
}

// Whether a record can be one: `before` is the time of the one before it.
bool Image::is_sound(const hot::ChunkHead& head, const otp_record& record, uint64_t before) const {
  if (record.kind == OTP_RECORD_INPUTS) return true;
  if (record.consumers == 0) return false;
  bool is_ours = (record.consumers & d_header.consumer) != 0;  // calls, which are others', may have begun at any time
  if (!has_time(record) || !is_ours) return true;
  bool begins_here = record.kind == OTP_RECORD_BEGIN || record.kind == OTP_RECORD_MEMORY;
  uint64_t earliest = record.kind == OTP_RECORD_OPEN ? before : std::max(before, head.taken_ticks);
  if (record.ticks + (begins_here ? 0 : kOlder) < earliest) return false;
  if (record.ticks > d_points.back().ticks + kYounger) return false;
  if (record.kind != OTP_RECORD_BEGIN && record.kind != OTP_RECORD_OPEN) return true;
  uint32_t kind = record.detail >> 4;
  bool has_name = record.value < d_header.name_count || record.value >= d_header.name_capacity;
  return kind != 0 && kind < OTP_EVENT_KINDS && has_name;
}

// Bytes up to the first record that makes no sense: what follows may be of the chunk's former life, or anything.
uint32_t Image::sound_bytes(const hot::ChunkHead& head, const std::vector<uint8_t>& records, uint64_t* events) {
  auto size = static_cast<uint32_t>(records.size());
  uint64_t time = 0;
  bool lists = true;
  uint32_t at = 0;
  while (size - at >= sizeof(otp_record)) {
    otp_record record;
    std::memcpy(&record, records.data() + at, sizeof record);
    uint32_t step = record_size(record, size - at);
    lists = lists && record.kind == OTP_RECORD_OPEN;
    bool is_misplaced = record.kind == OTP_RECORD_OPEN && !lists;
    if (step == 0 || is_misplaced || !is_sound(head, record, time)) break;
    if (has_time(record) && (record.consumers & d_header.consumer) != 0) time = std::max(time, record.ticks);
    *events += record.kind == OTP_RECORD_BEGIN;
    at += step;
  }
  d_last = std::max(d_last, time);
  return at;
}

// False where it has no records that can be read. Reads the head again after the records: the process may have taken
// the chunk anew.
bool Image::read_chunk(uint64_t at, FoundChunk* found) {
  hot::ChunkHead head, again;
  if (!copy_head(at, &head)) {  // the image is cut off before it
    ++d_found;
    ++d_damaged;
    return false;
  }
  if (head.sequence == 0) return false;
  uint32_t published = head.published;
  uint64_t records_at = at + OTP_BLACKBOX_CHUNK_HEADER;
  uint64_t there = std::min<uint64_t>(d_size - std::min(d_size, records_at), Chunk::kCapacity);
  auto size = static_cast<size_t>(std::min<uint64_t>(published, there));
  found->records.assign(d_data + records_at, d_data + records_at + size);
  if (!copy_head(at, &again) || again.sequence != head.sequence) return false;
  ++d_found;
  bool is_head = head.check == head.checksum(head.sequence) && head.thread != 0 && head.thread < kMostThreads &&
                 head.next_index < kMostIndex;
  found->sequence = head.sequence;
  found->next_index = head.next_index;
  found->thread = head.thread;
  found->info = {0, head.source_tid, head.os_tid, head.thread, {}};
  std::memcpy(found->info.name, head.name, sizeof head.name - 1);
  found->events = 0;
  if (is_head) found->records.resize(sound_bytes(head, found->records, &found->events));
  bool is_whole = is_head && found->records.size() == published;
  d_damaged += !is_whole;
  return is_head;
}

void Image::read_chunks() {
  for (uint32_t i = 0; i < d_header.chunk_count; ++i) {
    FoundChunk found;
    if (read_chunk(chunks_at() + uint64_t{i} * OTP_CHUNK_BYTES, &found)) d_chunks.push_back(std::move(found));
  }
  std::sort(d_chunks.begin(), d_chunks.end(), [](const FoundChunk& a, const FoundChunk& b) {
    return a.thread != b.thread ? a.thread < b.thread : a.sequence < b.sequence;
  });
  drop_overlapping();
}

// The events of a thread are numbered from chunk to chunk: where two chunks have the same number, one of them is
// damaged, and it cannot be told which.
void Image::drop_overlapping() {
  std::vector<FoundChunk> kept;
  for (size_t i = 0; i < d_chunks.size(); ++i) {
    bool overlaps = (i > 0 && overlap(d_chunks[i - 1], d_chunks[i])) ||
                    (i + 1 < d_chunks.size() && overlap(d_chunks[i], d_chunks[i + 1]));
    d_damaged += overlaps;
    if (!overlaps) kept.push_back(d_chunks[i]);
  }
  d_chunks = std::move(kept);
}

void Image::read_late_ends() {
  std::map<uint64_t, LateEnd> by_sequence;
  for (uint32_t i = 0; i < OTP_BLACKBOX_LATE_ENDS; ++i) {
    otp_blackbox_late_end entry;
    if (!copy(OTP_BLACKBOX_LATE_ENDS_AT + i * sizeof entry, &entry)) break;
    bool is_sound = entry.sequence != 0 && entry.ticks <= d_points.back().ticks + kYounger;
    if (!is_sound) continue;
    LateEnd end{entry.thread,  entry.index, entry.ticks, entry.error_type, static_cast<uint8_t>(entry.flags),
                entry.ended_on};
    end.ended_on.name[sizeof end.ended_on.name - 1] = 0;
    by_sequence.emplace(entry.sequence, end);
  }
  for (auto& [sequence, end] : by_sequence) d_late_ends.push_back(end);
}

otp_batch* Image::decode() {
  uint64_t bytes = 0;
  for (const FoundChunk& chunk : d_chunks) bytes += chunk.records.size();
  BatchBuilder builder(
      {bytes / sizeof(otp_record_begin), 0, 0, d_chunks.size() + d_late_ends.size(), false, false, false});
  if (!builder.ok()) throw std::bad_alloc();
  ClockReader clock(d_points);
  DecodeLimits limits{0, UINT64_MAX, UINT64_MAX, d_header.consumer, OTP_BLACKBOX_OPEN_LISTED};
  for (size_t i = 0; i < d_chunks.size();) {
    uint32_t thread = d_chunks[i].thread;
    ThreadDecoder state;
    ThreadDecode decode(builder, state, clock, limits, d_chunks[i].info);
    for (; i < d_chunks.size() && d_chunks[i].thread == thread; ++i) {
      const FoundChunk& chunk = d_chunks[i];
      decode.chunk({chunk.records.data(), static_cast<uint32_t>(chunk.records.size()), chunk.next_index});
    }
    for (const LateEnd& end : d_late_ends)
      if (end.thread == thread) decode.late_end(end, builder.thread_index(end.ended_on));
    decode.finish_all(d_last);
  }
  otp_batch* batch = builder.finish();
  batch->watermark = INT64_MAX;
  rename(batch);
  return batch;
}

// The id that the name has in this process.
uint32_t Image::own_name(uint32_t id) {
  if (id == 0) return 0;
  auto [known, is_new] = d_names.try_emplace(id, 0);
  if (!is_new) return known->second;
  std::string_view text = "(name not kept)";
  uint32_t begin = 0, end = 0;
  uint64_t ends_at = OTP_BLACKBOX_NAME_ENDS_AT + uint64_t{id} * sizeof end;
  bool has_text = id < d_header.name_count && id < d_header.name_capacity && copy(ends_at, &end) &&
                  copy(ends_at - sizeof begin, &begin) && begin < end && end <= d_header.name_text_capacity &&
                  texts_at() + end <= d_size;
  if (has_text) text = {reinterpret_cast<const char*>(d_data) + texts_at() + begin, end - begin};
  return known->second = registry().interner.intern(text, OTP_NAME_OPERATOR).id;
}

void Image::rename(otp_batch* batch) {
  for (uint64_t row = 0; row < batch->rows; ++row) {
    batch->name[row] = own_name(batch->name[row]);
    batch->error_type[row] = own_name(batch->error_type[row]);
  }
}

void Image::read_groups(otp_blackbox_contents* out) {
  std::vector<otp_blackbox_group> found;
  for (uint32_t i = 0; i < OTP_BLACKBOX_GROUPS; ++i) {
    otp_blackbox_group group;
    if (!copy(OTP_BLACKBOX_GROUPS_AT + i * sizeof group, &group)) break;
    if (group.group == 0) continue;
    for (uint32_t* name : {&group.group, &group.ranks, &group.backend}) *name = own_name(*name);
    found.push_back(group);
  }
  out->groups = new otp_blackbox_group[found.size()];
  out->group_count = static_cast<uint32_t>(found.size());
  std::copy(found.begin(), found.end(), out->groups);
}

void Image::read_collectives(otp_blackbox_contents* out) {
  std::vector<otp_blackbox_collective> found;
  uint64_t latest = d_points.back().ticks + kYounger;
  for (uint32_t i = 0; i < OTP_BLACKBOX_COLLECTIVES; ++i) {
    otp_blackbox_collective entry;
    if (!copy(OTP_BLACKBOX_COLLECTIVES_AT + i * sizeof entry, &entry)) break;
    if (entry.ticket == 0 || entry.enqueued > latest || entry.completed > latest) continue;
    otp_blackbox_call& call = entry.call;
    for (uint32_t* name : {&call.name, &call.group, &call.ranks, &call.backend, &call.dtype, &call.reduce_op})
      *name = own_name(*name);
    call.shapes[sizeof call.shapes - 1] = 0;
    d_last = std::max({d_last, entry.enqueued, entry.completed});
    entry.enqueued = time_of(entry.enqueued);
    entry.completed = time_of(entry.completed);
    found.push_back(entry);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.ticket < b.ticket; });
  out->collectives = new otp_blackbox_collective[found.size()];
  out->collective_count = static_cast<uint32_t>(found.size());
  std::copy(found.begin(), found.end(), out->collectives);
}

void Image::copy_info(otp_blackbox_contents* out) const {
  uint32_t size = std::min<uint32_t>(d_header.info_bytes, OTP_BLACKBOX_INFO_BYTES);
  otp_blackbox_header again;
  bool is_there = d_size >= OTP_BLACKBOX_INFO_AT + OTP_BLACKBOX_INFO_BYTES && d_header.info_sequence % 2 == 0;
  if (!is_there) return;
  std::memcpy(out->info, d_data + OTP_BLACKBOX_INFO_AT, size);
  if (copy(0, &again) && again.info_sequence == d_header.info_sequence) out->info_size = size;
}

void Image::copy_hang(otp_blackbox_contents* out) const {
  if (d_header.hang_since == 0 || d_header.hang_since > d_last) return;
  out->hang_since = ClockReader(d_points).unix_ns(d_header.hang_since);
  out->hang_os_tid = d_header.hang_os_tid;
  uint32_t size = std::min<uint32_t>(d_header.stacks_bytes, OTP_BLACKBOX_STACKS_BYTES);
  if (d_size < OTP_BLACKBOX_STACKS_AT + OTP_BLACKBOX_STACKS_BYTES || d_header.stacks_sequence % 2 != 0) return;
  otp_blackbox_header again;
  std::memcpy(out->stacks, d_data + OTP_BLACKBOX_STACKS_AT, size);
  if (copy(0, &again) && again.stacks_sequence == d_header.stacks_sequence) out->stacks_size = size;
}

otp_blackbox_contents* Image::contents() {
  std::unique_ptr<otp_blackbox_contents, decltype(&otp_blackbox_contents_free)> out(new otp_blackbox_contents{},
                                                                                    otp_blackbox_contents_free);
  read_points();
  read_chunks();
  read_late_ends();
  read_groups(out.get());
  read_collectives(out.get());
  out->batch = decode();
  out->pid = d_header.pid;
  out->is_closed = d_header.state == OTP_BLACKBOX_CLOSED ? 1 : 0;
  out->last = ClockReader(d_points).unix_ns(d_last);
  out->chunks = d_found;
  out->chunks_damaged = d_damaged;
  out->names_left_out = d_header.names_left_out;
  out->dropped = d_header.dropped;
  copy_info(out.get());
  copy_hang(out.get());
  return out.release();
}

}  // namespace
}  // namespace otp

extern "C" {

int otp_blackbox_read(const uint8_t* data, uint64_t size, otp_blackbox_contents** out) try {
  otp::Image image(data, size);
  if (!image.read_header()) return OTP_E_NO_BLACKBOX;
  *out = image.contents();
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

void otp_blackbox_contents_free(otp_blackbox_contents* contents) {
  if (contents == nullptr) return;
  otp_batch_free(contents->batch);
  delete[] contents->groups;
  delete[] contents->collectives;
  delete contents;
}

}  // extern "C"
