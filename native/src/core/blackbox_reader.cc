// Reads the image of a black box: any bytes are safe.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "core/blackbox_image.h"
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

constexpr std::string_view kNotKept = "(name not kept)";
constexpr size_t kMostNames = 1u << 18, kLongestName = 1u << 20;
constexpr int64_t kLastTime = 6'000'000'000'000'000'000;  // Unix ns: from here on sums may overflow
constexpr uint32_t kMostThreads = 1u << (64 - OTP_INDEX_BITS);
constexpr uint64_t kMostIndex = uint64_t{1} << (OTP_INDEX_BITS - 1);

bool overlap(const FoundChunk& before, const FoundChunk& after) {
  return before.thread == after.thread &&
         (before.sequence == after.sequence || after.next_index < before.next_index + before.events);
}

bool has_time(const otp_record& record) {
  return record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_LOSS && record.kind != OTP_RECORD_CONTEXT;
}

}  // namespace

bool Image::read(uint64_t at, void* out, uint64_t bytes) const {
  if (at > d_size || d_size - at < bytes) return false;
  if (d_data != nullptr) {
    std::memcpy(out, d_data + at, bytes);
    return true;
  }
  for (uint64_t done = 0; done < bytes;) {
    ssize_t got = pread(d_fd, static_cast<char*>(out) + done, bytes - done, static_cast<off_t>(at + done));
    if (got <= 0) return false;  // it was cut meanwhile, or cannot be read
    done += static_cast<uint64_t>(got);
  }
  return true;
}

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
  bool is_read = read(at, static_cast<void*>(out), sizeof *out);
  full_fence();
  return is_read;
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
uint32_t Image::sound_bytes(const hot::ChunkHead& head, uint32_t size, FoundChunk* found) {
  uint64_t time = 0;
  bool lists = true;
  uint32_t at = 0;
  while (size - at >= sizeof(otp_record)) {
    otp_record record;
    std::memcpy(&record, d_records.data() + at, sizeof record);
    uint32_t step = record_size(record, size - at);
    lists = lists && record.kind == OTP_RECORD_OPEN;
    bool is_misplaced = record.kind == OTP_RECORD_OPEN && !lists;
    if (step == 0 || is_misplaced || !is_sound(head, record, time)) break;
    if (has_time(record) && (record.consumers & d_header.consumer) != 0) time = std::max(time, record.ticks);
    if (record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_OPEN)
      found->last = std::max(found->last, record.ticks);
    found->events += record.kind == OTP_RECORD_BEGIN;
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
  auto size = static_cast<uint32_t>(std::min<uint64_t>(published, there));
  if (!read(records_at, d_records.data(), size)) size = 0;
  if (!copy_head(at, &again) || again.sequence != head.sequence) return false;
  (void)copy(offsetof(otp_blackbox_header, name_count), &d_header.name_count);  // its records may have new names
  ++d_found;
  bool is_head = head.check == head.checksum(head.sequence) && head.thread != 0 && head.thread < kMostThreads &&
                 head.next_index < kMostIndex;
  *found = {at, head.sequence, head.next_index, 0, head.taken_ticks, 0, head.thread, 0, {}};
  found->info = {0, head.source_tid, head.os_tid, head.thread, {}};
  std::memcpy(found->info.name, head.name, sizeof head.name - 1);
  if (is_head) found->size = sound_bytes(head, size, found);
  d_damaged += !is_head || found->size != published;
  return is_head;
}

// Where the chunks are whose records may be from then on, or say what is open: the last of each thread, and those whose
// successor was taken later. Heads alone are read for that.
std::vector<uint64_t> Image::chunks_since(int64_t since) {
  struct Place {
    uint32_t thread;
    uint64_t sequence, at;
    int64_t taken;
    uint64_t next_index;
  };
  std::vector<Place> places;
  for (uint32_t i = 0; i < d_header.chunk_count; ++i) {
    uint64_t at = chunks_at() + uint64_t{i} * OTP_CHUNK_BYTES;
    hot::ChunkHead head;
    if (!copy_head(at, &head)) {
      places.push_back({0, i, at, INT64_MAX, 0});
    } else if (head.sequence != 0) {
      const auto taken = static_cast<int64_t>(time_of(head.taken_ticks));
      places.push_back({head.thread, head.sequence, at, taken, head.next_index});
    }
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.thread != b.thread ? a.thread < b.thread : a.sequence < b.sequence;
  });
  std::vector<uint64_t> found;
  bool has_lost = false;
  int64_t first_left = INT64_MAX;
  for (size_t i = 0; i < places.size(); ++i) {
    // The chunk that its thread left first gives way first: before a thread left any of those that are there.
    const bool is_first = i == 0 || places[i - 1].thread != places[i].thread;
    has_lost |= is_first && places[i].next_index > 0;
    if (!is_first) first_left = std::min(first_left, places[i].taken);
    bool is_last = i + 1 == places.size() || places[i + 1].thread != places[i].thread;
    if (since == 0 || is_last || places[i + 1].taken >= since) found.push_back(places[i].at);
  }
  d_complete_since = has_lost && first_left != INT64_MAX ? first_left : 0;
  return found;
}

void Image::read_chunks(int64_t since) {
  d_records.resize(Chunk::kCapacity);
  for (uint64_t at : chunks_since(since)) {
    FoundChunk found;
    if (read_chunk(at, &found)) d_chunks.push_back(std::move(found));
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
  for (size_t i = 1; i < d_chunks.size(); ++i)  // a chunk is read after those before it
    if (d_chunks[i - 1].thread == d_chunks[i].thread)
      d_chunks[i].last = std::max(d_chunks[i].last, d_chunks[i - 1].last);
}

void Image::read_late_ends() {
  std::map<uint64_t, LateEnd> by_sequence;
  for (const auto& entry : copy_all<otp_blackbox_late_end>(OTP_BLACKBOX_LATE_ENDS_AT, OTP_BLACKBOX_LATE_ENDS)) {
    bool is_sound = entry.sequence != 0 && entry.ticks <= d_points.back().ticks + kYounger;
    if (!is_sound) continue;
    LateEnd end{entry.thread,  entry.index, entry.ticks, entry.error_type, static_cast<uint8_t>(entry.flags),
                entry.ended_on};
    end.ended_on.name[sizeof end.ended_on.name - 1] = 0;
    by_sequence.emplace(entry.sequence, end);
  }
  for (auto& [sequence, end] : by_sequence) d_late_ends.push_back(end);
}

void Image::rewind() {
  d_is_done = false;
  d_late_left = d_late_ends;
  d_threads.clear();
  for (size_t i = 0; i < d_chunks.size(); ++i) {
    bool is_first = i == 0 || d_chunks[i - 1].thread != d_chunks[i].thread;
    if (is_first) d_threads.push_back({i, i, i, 0, d_chunks[i].next_index, {}});
    ++d_threads.back().end;
  }
}

// Up to when the next batch goes: as many of the chunks that end first as fit, and one at least.
uint64_t Image::cut_of(uint64_t max_bytes) const {
  std::vector<std::pair<uint64_t, uint64_t>> unread;  // when it ends, bytes
  uint64_t total = 0;
  for (const ReadThread& thread : d_threads) {
    for (size_t i = thread.chunk; i < thread.end; ++i) {
      uint64_t size = d_chunks[i].size - (i == thread.chunk ? thread.from : 0);
      unread.emplace_back(d_chunks[i].last, size);
      total += size;
    }
  }
  if (max_bytes == 0 || total <= max_bytes) return UINT64_MAX;
  std::sort(unread.begin(), unread.end());
  uint64_t cut = unread.front().first, bytes = 0;
  for (const auto& [last, size] : unread) {
    if ((bytes += size) > max_bytes) break;
    cut = last;
  }
  return cut;
}

// The first batch has what was open when the first chunk of each thread began, whenever that was.
bool Image::begins_by(const ReadThread& thread, uint64_t cut) const {
  bool is_untouched = thread.chunk == thread.begin && thread.from == 0;
  return thread.chunk < thread.end && (is_untouched || d_chunks[thread.chunk].taken <= cut);
}

uint64_t Image::bytes_up_to(uint64_t cut) const {
  uint64_t bytes = 0;
  for (const ReadThread& thread : d_threads) {
    ReadThread at = {thread.begin, thread.end, thread.chunk, thread.from, 0, {}};
    for (; begins_by(at, cut); ++at.chunk) bytes += d_chunks[at.chunk].size;
  }
  return bytes;
}

// Reads them as they were found; false: the process has used the chunk anew, or the file was cut.
bool Image::records_of(const FoundChunk& chunk) {
  hot::ChunkHead head;
  return read(chunk.at + OTP_BLACKBOX_CHUNK_HEADER, d_records.data(), chunk.size) && copy_head(chunk.at, &head) &&
         head.sequence == chunk.sequence;
}

void Image::decode_thread(ReadThread& thread, uint64_t cut, BatchBuilder& builder, std::vector<uint64_t>* open_rows) {
  ClockReader clock(d_points);
  const otp_thread& info = d_chunks[thread.begin].info;
  ThreadDecode decode(builder, thread.decoder, clock, {0, UINT64_MAX, cut, d_header.consumer, OTP_BLACKBOX_OPEN_LISTED},
                      info);
  for (; begins_by(thread, cut); ++thread.chunk, thread.from = 0) {
    const FoundChunk& chunk = d_chunks[thread.chunk];
    if (thread.from == 0) thread.next_index = chunk.next_index;
    if (!records_of(chunk)) continue;
    uint32_t left = chunk.size - thread.from;
    uint32_t done = decode.chunk({d_records.data() + thread.from, left, thread.next_index, thread.from != 0});
    thread.next_index = thread.decoder.next_index;
    thread.from += done;
    if (done < left) break;
  }
  auto is_done = [&](const LateEnd& end) {
    return end.thread == info.id && end.ticks <= cut && decode.late_end(end, builder.thread_index(end.ended_on));
  };
  d_late_left.erase(std::remove_if(d_late_left.begin(), d_late_left.end(), is_done), d_late_left.end());
  if (cut == UINT64_MAX) decode.finish_all(d_last);
  decode.keep_open(open_rows);
}

otp_batch* Image::next(uint64_t max_bytes) {
  uint64_t cut = d_is_done ? UINT64_MAX : cut_of(max_bytes), pending = 0;
  for (const ReadThread& thread : d_threads) pending += thread.decoder.pending.size();
  uint64_t rows = bytes_up_to(cut) / sizeof(otp_record_begin) + pending;
  BatchBuilder builder({rows, 0, 0, d_threads.size() + d_late_left.size(), false, false, false});
  if (!builder.ok()) throw std::bad_alloc();
  std::vector<uint64_t> open_rows;
  for (ReadThread& thread : d_threads)
    if (!d_is_done && (begins_by(thread, cut) || !thread.decoder.pending.empty()))
      decode_thread(thread, cut, builder, &open_rows);
  std::sort(open_rows.begin(), open_rows.end());
  builder.remove_rows(open_rows);
  otp_batch* batch = builder.finish();
  batch->watermark = cut == UINT64_MAX ? INT64_MAX : ClockReader(d_points).unix_ns(cut);
  d_is_done = cut == UINT64_MAX;
  rename(batch);
  return batch;
}

// The id that the name has in this process.
uint32_t Image::own_name(uint32_t id) {
  if (id == 0) return 0;
  if (id >= std::min(d_header.name_count, d_header.name_capacity))
    return registry().interner.intern(kNotKept, OTP_NAME_OPERATOR).id;
  if (d_names.size() == kMostNames) d_names.clear();
  auto [known, is_new] = d_names.try_emplace(id, 0);
  if (is_new) known->second = registry().interner.intern(text_of(id), OTP_NAME_OPERATOR).id;
  return known->second;
}

std::string Image::text_of(uint32_t id) const {
  uint32_t begin = 0, end = 0;
  uint64_t ends_at = OTP_BLACKBOX_NAME_ENDS_AT + uint64_t{id} * sizeof end;
  bool has_text = copy(ends_at, &end) && copy(ends_at - sizeof begin, &begin) && begin < end &&
                  end <= d_header.name_text_capacity && end - begin <= kLongestName;
  std::string text(has_text ? end - begin : 0, 0);
  return has_text && read(texts_at() + begin, text.data(), text.size()) ? text : std::string(kNotKept);
}

void Image::rename(otp_batch* batch) {
  for (uint64_t row = 0; row < batch->rows; ++row) {
    batch->name[row] = own_name(batch->name[row]);
    batch->error_type[row] = own_name(batch->error_type[row]);
  }
  for (uint64_t i = 0; i < batch->open_count; ++i) batch->open_name[i] = own_name(batch->open_name[i]);
}

void Image::read_groups(otp_blackbox_contents* out) {
  std::vector<otp_blackbox_group> found;
  for (auto& group : copy_all<otp_blackbox_group>(OTP_BLACKBOX_GROUPS_AT, OTP_BLACKBOX_GROUPS)) {
    if (group.group == 0) continue;
    for (uint32_t* name : {&group.group, &group.ranks, &group.backend}) *name = own_name(*name);
    found.push_back(group);
  }
  out->groups = new otp_blackbox_group[found.size()];
  out->group_count = static_cast<uint32_t>(found.size());
  std::copy(found.begin(), found.end(), out->groups);
}

void Image::read_collectives(int64_t since, otp_blackbox_contents* out) {
  std::vector<otp_blackbox_collective> found;
  uint64_t latest = d_points.back().ticks + kYounger;
  for (auto& entry : copy_all<otp_blackbox_collective>(OTP_BLACKBOX_COLLECTIVES_AT, OTP_BLACKBOX_COLLECTIVES)) {
    if (entry.ticket == 0 || entry.enqueued > latest || entry.completed > latest) continue;
    otp_blackbox_call& call = entry.call;
    bool is_pending = entry.completed == 0 && (call.flags & OTP_BLACKBOX_UNTRACKED) == 0;
    auto last = static_cast<int64_t>(time_of(std::max(entry.enqueued, entry.completed)));
    if (since != 0 && !is_pending && last < since) continue;
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
  if (!is_there || !read(OTP_BLACKBOX_INFO_AT, out->info, size)) return;
  if (copy(0, &again) && again.info_sequence == d_header.info_sequence) out->info_size = size;
}

void Image::copy_hang(otp_blackbox_contents* out) const {
  if (d_header.hang_since == 0 || d_header.hang_since > d_last) return;
  out->hang_since = ClockReader(d_points).unix_ns(d_header.hang_since);
  out->hang_os_tid = d_header.hang_os_tid;
  uint32_t size = std::min<uint32_t>(d_header.stacks_bytes, OTP_BLACKBOX_STACKS_BYTES);
  if (d_size < OTP_BLACKBOX_STACKS_AT + OTP_BLACKBOX_STACKS_BYTES || d_header.stacks_sequence % 2 != 0) return;
  otp_blackbox_header again;
  if (!read(OTP_BLACKBOX_STACKS_AT, out->stacks, size)) return;
  if (copy(0, &again) && again.stacks_sequence == d_header.stacks_sequence) out->stacks_size = size;
}

void Image::forget() {
  d_points.clear();
  d_chunks.clear();
  d_late_ends.clear();
  d_last = 0;
  d_found = d_damaged = 0;
}

void Image::read_contents(int64_t since, otp_blackbox_contents* out) {
  forget();
  read_points();
  read_chunks(since);
  // Again and again, only what there is: these tables are 160 KB. At first all, since nothing of a damaged image is
  // sure.
  if (since == 0 || d_header.late_end_count != 0) read_late_ends();
  read_groups(out);
  if (since == 0 || d_header.collective_count != 0) read_collectives(since, out);
  rewind();
  out->pid = d_header.pid;
  out->is_closed = d_header.state == OTP_BLACKBOX_CLOSED ? 1 : 0;
  out->last = ClockReader(d_points).unix_ns(d_last);
  out->chunks = d_found;
  out->chunks_damaged = d_damaged;
  out->names_left_out = d_header.names_left_out;
  out->dropped = d_header.dropped;
  out->complete_since = d_complete_since;
  copy_info(out);
  copy_hang(out);
}

}  // namespace otp

extern "C" {

int otp_blackbox_read(int fd, const uint8_t* data, uint64_t size, int64_t since, otp_blackbox_contents** out) try {
  auto image = std::make_unique<otp::Image>(fd, data, size);
  if (!image->read_header()) return OTP_E_NO_BLACKBOX;
  std::unique_ptr<otp_blackbox_contents, decltype(&otp_blackbox_contents_free)> contents(new otp_blackbox_contents{},
                                                                                         otp_blackbox_contents_free);
  contents->image = image.release();
  static_cast<otp::Image*>(contents->image)->read_contents(since, contents.get());
  *out = contents.release();
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

int otp_blackbox_refresh(otp_blackbox_contents* contents, int64_t since) try {
  auto* image = static_cast<otp::Image*>(contents->image);
  delete[] contents->groups;
  delete[] contents->collectives;
  *contents = {};
  contents->image = image;
  if (!image->read_header()) return OTP_E_NO_BLACKBOX;
  image->read_contents(since, contents);
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

int otp_blackbox_next(otp_blackbox_contents* contents, uint64_t max_bytes, otp_batch** out) try {
  *out = static_cast<otp::Image*>(contents->image)->next(max_bytes);
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

void otp_blackbox_rewind(otp_blackbox_contents* contents) { static_cast<otp::Image*>(contents->image)->rewind(); }

void otp_blackbox_contents_free(otp_blackbox_contents* contents) {
  if (contents == nullptr) return;
  delete static_cast<otp::Image*>(contents->image);
  delete[] contents->groups;
  delete[] contents->collectives;
  delete contents;
}

}  // extern "C"
