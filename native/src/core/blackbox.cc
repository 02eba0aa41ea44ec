#include "core/blackbox.h"

#include <fnmatch.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "core/chunk_list.h"
#include "core/drain.h"
#include "core/thread_buffer.h"

namespace otp {

namespace {

constexpr uint64_t kChunksAlignment = OTP_CHUNK_BYTES;
constexpr uint64_t kNamesShare = 8;  // the names have an eighth of the image
constexpr uint64_t kBytesPerName = 64;
constexpr size_t kLongestShown = 255;  // a longer label matches no pattern

constexpr std::string_view kHidden[OTP_NAME_KINDS] = {"(hidden operator)", "(hidden function)", "(hidden label)",
                                                      "(hidden text)"};

template <typename T>
void store(T* place, T value) {
  __atomic_store_n(place, value, __ATOMIC_RELEASE);
}

}  // namespace

// Allocates nothing: the interner calls it in the middle of an addition.
std::string_view NamePolicy::shown(std::string_view name, otp_name_kind kind) const {
  if ((hidden >> kind & 1) == 0 || name.empty()) return name;
  char terminated[kLongestShown + 1];
  if (kind != OTP_NAME_LABEL || name.size() > kLongestShown) return kHidden[kind];
  std::memcpy(terminated, name.data(), name.size());
  terminated[name.size()] = 0;
  for (const std::string& pattern : shown_labels)
    if (fnmatch(pattern.c_str(), terminated, 0) == 0) return name;
  return kHidden[kind];
}

BlackBox::BlackBox(int fd, uint64_t bytes, NamePolicy policy) : d_memory(fd, bytes), d_policy(std::move(policy)) {
  uint64_t names = bytes / kNamesShare;
  d_name_capacity = static_cast<uint32_t>(names / kBytesPerName);
  uint64_t chunks_at = (texts_at() + names) / kChunksAlignment * kChunksAlignment;
  d_name_text_capacity = static_cast<uint32_t>(chunks_at - texts_at());
  d_chunks.resize((bytes - chunks_at) / OTP_CHUNK_BYTES);
  d_free.reserve(d_chunks.size());
  d_open.reserve(OTP_BLACKBOX_OPEN_LISTED);  // nothing allocates later
  std::memset(at(0), 0, chunks_at);          // and touches it: no page of it is missing later
  for (size_t i = d_chunks.size(); i-- > 0;) {
    uint8_t* memory = at(chunks_at + i * OTP_CHUNK_BYTES);
    std::memset(memory, 0, OTP_CHUNK_BYTES);
    d_chunks[i].head = reinterpret_cast<hot::ChunkHead*>(memory);
    d_chunks[i].box = this;
    d_free.push_back(&d_chunks[i]);
  }
  d_header = reinterpret_cast<otp_blackbox_header*>(at(0));
  d_header->version = OTP_BLACKBOX_VERSION;
  d_header->record_format_version = OTP_RECORD_FORMAT_VERSION;
  d_header->bytes = bytes;
  d_header->pid = static_cast<uint32_t>(getpid());
  d_header->name_capacity = d_name_capacity;
  d_header->name_text_capacity = d_name_text_capacity;
  d_header->chunk_count = static_cast<uint32_t>(d_chunks.size());
}

void BlackBox::publish(uint32_t consumer) {
  d_header->consumer = consumer;
  d_header->state = OTP_BLACKBOX_OPEN;
  full_fence();
  std::memcpy(d_header->magic, OTP_BLACKBOX_MAGIC, sizeof d_header->magic);
}

Chunk* BlackBox::take() {
  if (d_free.empty()) return nullptr;
  Chunk* chunk = d_free.back();
  d_free.pop_back();
  chunk->renew();
  return chunk;
}

// Its records stay until it is taken again: a reader still finds them.
void BlackBox::give_back(Chunk* chunk) {
  d_free.push_back(chunk);
  if (!d_is_closed) return;
  madvise(chunk->head, OTP_CHUNK_BYTES, MADV_REMOVE);  // it is not taken again: frees its memory
  leave_file();
}

namespace {

// The record of an open event, as it stands in the chunk in which it began, or in the list at the head of that; false
// where neither is this one.
bool find_open_record(const Chunk& chunk, const OpenEvent& event, otp_record_open* found) {
  uint64_t index = event.index.get();
  uint32_t place = event.place.get() * hot::kPlaceUnit;
  if (index >= chunk.next_index) {
    if (place + sizeof found->begin > chunk.readable_bytes()) return false;  // another thread asks, a little early
    std::memcpy(&found->begin, chunk.data() + place, sizeof found->begin);
    found->begin.head.kind = OTP_RECORD_OPEN;
    return true;
  }
  for (uint32_t at = 0; at + sizeof *found <= chunk.readable_bytes(); at += sizeof *found) {
    std::memcpy(found, chunk.data() + at, sizeof *found);
    if (found->begin.head.kind != OTP_RECORD_OPEN) break;
    if (chunk.next_index - found->event == index) return true;
  }
  return false;
}

}  // namespace

uint32_t BlackBox::list_open(const ThreadBuffer& thread, uint32_t consumer, uint32_t bytes) {
  const Chunk* chunk = thread.open_chunk;
  if (chunk == nullptr || chunk->box != this) return 0;  // then what is open began before the box, or found no room
  size_t most = std::min<size_t>(OTP_BLACKBOX_OPEN_LISTED, bytes / sizeof(otp_record_open));
  d_open.clear();
  auto list = [&](const OpenEvent& event) {
    otp_record_open record;
    if (d_open.size() == most || (event.consumers.get() & consumer) == 0) return;
    if (!find_open_record(*chunk, event, &record)) return;
    record.event = thread.next_index.get() - event.index.get();
    record.begin.head.consumers = static_cast<uint16_t>(consumer);
    d_open.push_back(record);
  };
  for (uint32_t i = 0; i < thread.depth.get(); ++i) list(thread.open[i]);
  for (const OpenEvent& event : thread.suspended) list(event);
  std::sort(d_open.begin(), d_open.end(),
            [](const otp_record_open& a, const otp_record_open& b) { return a.event > b.event; });
  return static_cast<uint32_t>(d_open.size());
}

void BlackBox::append_open(ThreadBuffer& thread, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) thread.append(d_open[i]);
  thread.publish(thread.at);
}

void BlackBox::add_name(uint32_t id, std::string_view name, otp_name_kind kind) {
  if (id >= d_name_capacity) return store(&d_header->names_left_out, d_header->names_left_out + 1);
  name = d_policy.shown(name, kind);
  if (name.size() > d_name_text_capacity - d_name_text_bytes) {
    store(&d_header->names_left_out, d_header->names_left_out + 1);
    name = {};  // the names after it keep their ids and texts
  }
  std::memcpy(at(texts_at() + d_name_text_bytes), name.data(), name.size());
  d_name_text_bytes += static_cast<uint32_t>(name.size());
  reinterpret_cast<uint32_t*>(at(OTP_BLACKBOX_NAME_ENDS_AT))[id] = d_name_text_bytes;
  store(&d_header->name_count, id + 1);
}

void BlackBox::add_point(ClockPoint point) {
  otp_blackbox_point& entry = d_header->points[d_header->point_count % OTP_BLACKBOX_POINTS];
  store(&entry.ticks, uint64_t{0});
  store(&entry.unix_ns, point.unix_ns);
  store(&entry.ticks, point.ticks);
  store(&d_header->point_count, d_header->point_count + 1);
}

void BlackBox::add_late_end(const LateEnd& end) {
  auto* entries = reinterpret_cast<otp_blackbox_late_end*>(at(OTP_BLACKBOX_LATE_ENDS_AT));
  uint64_t count = d_header->late_end_count;
  otp_blackbox_late_end& entry = entries[count % OTP_BLACKBOX_LATE_ENDS];
  store(&entry.sequence, uint64_t{0});
  full_fence();
  entry.ticks = end.ticks;
  entry.index = end.index;
  entry.thread = end.thread;
  entry.error_type = end.error_type;
  entry.ended_on = end.ended_on;
  if (d_policy.hides_threads) std::memset(entry.ended_on.name, 0, sizeof entry.ended_on.name);
  entry.flags = end.flags;
  store(&entry.sequence, count + 1);
  store(&d_header->late_end_count, count + 1);
}

// The slot of the call's group; null where all slots are taken: such groups are known by their collectives alone.
otp_blackbox_group* BlackBox::group_of(const otp_blackbox_call& call) {
  auto* groups = reinterpret_cast<otp_blackbox_group*>(at(OTP_BLACKBOX_GROUPS_AT));
  uint32_t kind = call.flags & OTP_BLACKBOX_TRANSFER;
  for (uint32_t i = 0; i < OTP_BLACKBOX_GROUPS; ++i) {
    otp_blackbox_group& slot = groups[i];
    bool is_it = slot.group == call.group && slot.ranks == call.ranks && (slot.flags & OTP_BLACKBOX_TRANSFER) == kind;
    if (is_it && slot.group != 0) return &slot;
    if (slot.group != 0) continue;
    uint32_t flags = call.flags & (OTP_BLACKBOX_TRANSFER | OTP_BLACKBOX_UNTRACKED);
    slot = {0, call.ranks, call.backend, call.group_size, call.rank, flags, 0, 0, -1, -1};
    store(&slot.group, call.group);
    return &slot;
  }
  return nullptr;
}

void BlackBox::add_collective(uint64_t ticket, const otp_blackbox_call& call, uint32_t os_tid) {
  d_main_has_collectives = d_main_has_collectives || os_tid == static_cast<uint32_t>(getpid());
  otp_blackbox_collective& entry = collective(ticket);
  store(&entry.ticket, uint64_t{0});
  full_fence();
  entry.enqueued = ticks_now();
  entry.completed = 0;
  entry.os_tid = os_tid;
  entry.call = call;
  if (d_policy.hides_shapes) std::memset(entry.call.shapes, 0, sizeof entry.call.shapes);
  store(&entry.ticket, ticket);
  store(&d_header->collective_count, d_header->collective_count + 1);
  if (otp_blackbox_group* group = group_of(call)) {
    store(&group->last_enqueued, call.sequence_nr);
    store(&group->enqueued, group->enqueued + 1);
  }
}

// Without effect where a later collective has taken its place, or where it was of an earlier box.
void BlackBox::complete_collective(uint64_t ticket, bool failed) {
  otp_blackbox_collective& entry = collective(ticket);
  if (entry.ticket != ticket || entry.completed != 0) return;
  if (failed) entry.call.flags |= OTP_BLACKBOX_FAILED;
  store(&entry.completed, ticks_now());
  if (otp_blackbox_group* group = group_of(entry.call)) {
    store(&group->last_completed, std::max(group->last_completed, entry.call.sequence_nr));
    store(&group->completed, group->completed + 1);
  }
}

void BlackBox::set_info(std::string_view json) {
  uint32_t sequence = d_header->info_sequence;
  store(&d_header->info_sequence, sequence + 1);
  full_fence();
  d_header->info_bytes = static_cast<uint32_t>(std::min<size_t>(json.size(), OTP_BLACKBOX_INFO_BYTES));
  std::memcpy(at(OTP_BLACKBOX_INFO_AT), json.data(), d_header->info_bytes);
  store(&d_header->info_sequence, sequence + 2);
}

void BlackBox::set_hang(uint32_t os_tid, uint64_t since_ticks) {
  d_header->hang_os_tid = os_tid;
  store(&d_header->hang_since, since_ticks);
}

void BlackBox::set_stacks(std::string_view text) {
  uint32_t sequence = d_header->stacks_sequence;
  store(&d_header->stacks_sequence, sequence + 1);
  full_fence();
  d_header->stacks_bytes = static_cast<uint32_t>(std::min<size_t>(text.size(), OTP_BLACKBOX_STACKS_BYTES));
  std::memcpy(at(OTP_BLACKBOX_STACKS_AT), text.data(), d_header->stacks_bytes);
  store(&d_header->stacks_sequence, sequence + 2);
}

uint32_t BlackBox::pending_timeout_ms(uint32_t os_tid) const {
  constexpr uint32_t kOfNccl = 10 * 60 * 1000;  // where none is known: the shortest of torch's defaults
  const auto* entries = reinterpret_cast<const otp_blackbox_collective*>(at(OTP_BLACKBOX_COLLECTIVES_AT));
  uint32_t least = 0;
  for (uint32_t i = 0; i < OTP_BLACKBOX_COLLECTIVES; ++i) {
    const otp_blackbox_collective& entry = entries[i];
    if (entry.ticket == 0 || entry.completed != 0 || entry.os_tid != os_tid) continue;
    if ((entry.call.flags & OTP_BLACKBOX_UNTRACKED) != 0) continue;
    uint32_t timeout = entry.call.timeout_ms == 0 ? kOfNccl : entry.call.timeout_ms;
    least = least == 0 ? timeout : std::min(least, timeout);
  }
  return least;
}

void BlackBox::set_dropped(uint64_t events) { store(&d_header->dropped, events); }

bool BlackBox::close() {
  store(&d_header->state, uint32_t{OTP_BLACKBOX_CLOSED});
  d_is_closed = true;
  for (Chunk* chunk : d_free) madvise(chunk->head, OTP_CHUNK_BYTES, MADV_REMOVE);
  leave_file();
  return can_go();
}

void BlackBox::leave_file() {
  if (std::none_of(d_chunks.begin(), d_chunks.end(), [](const Chunk& chunk) { return chunk.holders != 0; }))
    d_memory.detach();
}

}  // namespace otp
