#include "core/drain.h"

#include <algorithm>
#include <cstring>

#include "core/chunk_list.h"

namespace otp {

ThreadDecode::ThreadDecode(BatchBuilder& builder, ThreadDecoder& state, ClockReader& clock, DecodeLimits limits,
                           const otp_thread& thread)
    : d_builder(builder),
      d_batch(*builder.batch()),
      d_state(state),
      d_clock(clock),
      d_limits(limits),
      d_thread(thread),
      d_thread_index(builder.thread_index(thread)) {
  restore_pending();
}

void ThreadDecode::restore_pending() {
  d_state.open.clear();
  for (PendingEvent& event : d_state.pending) {
    uint64_t row = new_row(event.index);
    d_batch.start[row] = event.start;
    d_batch.sequence_nr[row] = event.sequence_nr;
    d_batch.name[row] = event.name;
    d_batch.fwd_thread[row] = event.fwd_thread;
    d_batch.kind[row] = event.kind;
    d_batch.scope[row] = event.scope;
    d_batch.flags[row] = event.flags;
    d_batch.thread[row] = d_batch.end_thread[row] = d_thread_index;
    if (d_batch.context != nullptr) d_batch.context[row] = event.context;
    restore_parent(row, event.parent);
    d_state.open.push_back({event.index, row, 0});
    inputs(event.inputs.data(), event.inputs.size(), 0);
  }
  d_state.pending.clear();
}

// Without its threads, and without what its end writes.
inline uint64_t ThreadDecode::new_row(uint64_t index) {
  uint64_t row = d_batch.rows++;
  d_batch.id[row] = id_of(index);
  d_batch.parent[row] = -1;
  if (d_batch.inputs != nullptr) d_batch.inputs[row] = -1;
  return row;
}

// A parent that this session did not get (dropped, or begun before its start) is replaced by the next one outwards that
// it did get: events are listed in the order of their begin, so that is the last open one before it.
inline const ThreadDecoder::Open* ThreadDecode::open_around(uint64_t index) const {
  for (size_t i = d_state.open.size(); i-- > 0;)
    if (d_state.open[i].index <= index) return &d_state.open[i];
  return nullptr;
}

inline void ThreadDecode::set_parent(uint64_t row, uint64_t parent) {
  const ThreadDecoder::Open* around = open_around(parent);
  if (around != nullptr) d_batch.parent[row] = static_cast<int32_t>(around->row);
}

void ThreadDecode::restore_parent(uint64_t row, uint64_t parent_id) {
  for (const ThreadDecoder::Open& open : d_state.open) {
    if (id_of(open.index) != parent_id) continue;
    d_batch.parent[row] = static_cast<int32_t>(open.row);
    return;
  }
  if (parent_id != 0) d_builder.add_outer(row, parent_id);
}

inline ThreadDecoder::Open* ThreadDecode::find_open(uint64_t index) {
  for (size_t i = d_state.open.size(); i-- > 0;)
    if (d_state.open[i].index == index) return &d_state.open[i];
  return nullptr;
}

inline __attribute__((always_inline)) void ThreadDecode::begin(const otp_record_begin& record) {
  uint64_t index = d_state.next_index++;
  d_last_begin_ours = (record.head.consumers & d_limits.consumer) != 0 && record.head.ticks >= d_limits.start_ticks &&
                      record.head.ticks <= d_limits.stop_ticks;
  if (d_last_begin_ours) row_of(record, index);
}

inline __attribute__((always_inline)) void ThreadDecode::row_of(const otp_record_begin& record, uint64_t index) {
  uint64_t row = new_row(index);
  d_batch.start[row] = next_ns(record.head.ticks);
  d_batch.sequence_nr[row] = record.sequence_nr;
  d_batch.name[row] = record.head.value;
  d_batch.fwd_thread[row] = record.fwd_thread;
  d_batch.kind[row] = record.head.detail >> 4;
  d_batch.scope[row] = record.head.detail & 15;
  d_batch.flags[row] = d_state.mark_loss ? static_cast<uint8_t>(OTP_FLAG_LOSS_BEFORE) : uint8_t{0};
  d_state.mark_loss = false;
  if (d_batch.context != nullptr) d_batch.context[row] = d_state.context;
  if (record.parent == UINT32_MAX) {
    set_parent(row, index);
  } else if (record.parent != 0 && record.parent <= index) {
    set_parent(row, index - record.parent);
  }
  d_state.open.push_back({index, row, 0});
}

// An event that began in an earlier chunk: known already where that was read.
void ThreadDecode::opened(const otp_record_open& record) {
  if (!d_is_listing || record.event == 0 || record.event > d_state.next_index) return;
  uint64_t index = d_state.next_index - record.event;
  if (!d_listed.empty() && index <= d_listed.back()) return;
  d_listed.push_back(index);
  bool is_new = d_batch.rows == 0 || d_batch.id[d_batch.rows - 1] < id_of(index);
  if (is_new) row_of(record.begin, index);
}

// What the list at a chunk's head does not have has ended, in a record that is no more: at the latest now.
void ThreadDecode::close_unlisted() {
  d_is_listing = false;
  if (d_listed.size() == d_limits.most_listed) return;  // it may not be whole
  for (size_t i = d_state.open.size(); i-- > 0;) {
    ThreadDecoder::Open* open = &d_state.open[i];
    if (!std::binary_search(d_listed.begin(), d_listed.end(), open->index)) end(open, d_state.last_ns, 0, 0);
  }
}

void ThreadDecode::inputs(const int64_t* words, uint64_t count, uint8_t flags) {
  if (d_batch.inputs == nullptr) return;
  uint64_t row = d_batch.rows - 1;
  d_batch.flags[row] |= flags;
  if (count == 0) return;
  d_batch.inputs[row] = d_builder.add_inputs(words, count);
  if (!d_state.open.empty() && d_state.open.back().row == row) d_state.open.back().input_words = count;
}

void ThreadDecode::memory(const otp_record_memory& record) {
  if (d_batch.memory_time == nullptr) return;
  if (record.head.ticks < d_limits.start_ticks || record.head.ticks > d_limits.stop_ticks) return;
  uint64_t distance = record.head.value;
  const ThreadDecoder::Open* around = nullptr;
  if (distance == UINT32_MAX) {
    around = open_around(d_state.next_index);
  } else if (distance != 0 && distance <= d_state.next_index) {
    around = open_around(d_state.next_index - distance);
  }
  if (around == nullptr && d_batch.context != nullptr) return;  // it may be that of a context that is muted
  d_builder.add_memory(record, next_ns(record.head.ticks), around == nullptr ? 0 : id_of(around->index),
                       d_thread_index);
}

inline void ThreadDecode::close_row(uint64_t row, int64_t end_ns, uint8_t flags) {
  d_batch.end[row] = std::max(end_ns, d_batch.start[row]);
  d_batch.flags[row] |= flags;
}

inline void ThreadDecode::end(ThreadDecoder::Open* open, int64_t end_ns, uint8_t flags, uint32_t error_type) {
  close_row(open->row, end_ns, flags);
  d_batch.error_type[open->row] = error_type;
  if (open == &d_state.open.back())
    d_state.open.pop_back();
  else
    d_state.open.erase(d_state.open.begin() + (open - d_state.open.data()));
}

inline __attribute__((always_inline)) void ThreadDecode::end_here(uint64_t index, uint64_t ticks, uint8_t flags,
                                                                  uint32_t error_type) {
  ThreadDecoder::Open* open = find_open(index);
  if (open != nullptr && ticks <= d_limits.stop_ticks) end(open, next_ns(ticks), flags, error_type);
}

bool ThreadDecode::late_end(const LateEnd& late, uint32_t thread_index) {
  ThreadDecoder::Open* open = find_open(late.index);
  if (open == nullptr) return late.index < d_state.next_index;
  if (late.ticks > d_limits.stop_ticks) return true;
  d_batch.end_thread[open->row] = thread_index;
  end(open, d_clock.unix_ns(late.ticks), late.flags, late.error_type);
  return true;
}

uint32_t record_size(const otp_record& head, uint32_t left) {
  uint64_t size = 0;
  switch (head.kind) {
    case OTP_RECORD_BEGIN:
      size = sizeof(otp_record_begin);
      break;
    case OTP_RECORD_ERROR_END:
      size = sizeof(otp_record_error_end);
      break;
    case OTP_RECORD_END:
    case OTP_RECORD_LOSS:
    case OTP_RECORD_CONTEXT:
      size = sizeof(otp_record);
      break;
    case OTP_RECORD_MEMORY:
      size = sizeof(otp_record_memory);
      break;
    case OTP_RECORD_OPEN:
      size = sizeof(otp_record_open);
      break;
    case OTP_RECORD_INPUTS:
      if (head.ticks > Chunk::kCapacity) return 0;
      size = sizeof(otp_record) + head.ticks * sizeof(int64_t);
      break;
    default:
      return 0;
  }
  return size <= left ? static_cast<uint32_t>(size) : 0;
}

uint64_t scan_lost(const ChunkView& view, uint32_t consumer, std::vector<LateEnd>* ends) {
  uint64_t events = 0, next_index = view.next_index;
  for (uint32_t at = 0, step = 0; view.size - at >= sizeof(otp_record); at += step) {
    otp_record head;
    std::memcpy(&head, view.data + at, sizeof head);
    step = record_size(head, view.size - at);
    if (step == 0) break;
    bool ours = (head.consumers & consumer) != 0;
    if (head.kind == OTP_RECORD_BEGIN) {
      ++next_index;
      events += ours;
      continue;
    }
    events += ours && head.kind == OTP_RECORD_MEMORY;
    if (!ours || (head.kind != OTP_RECORD_END && head.kind != OTP_RECORD_ERROR_END)) continue;
    uint64_t distance = head.value;
    if (head.kind == OTP_RECORD_ERROR_END) std::memcpy(&distance, view.data + at + sizeof head, sizeof distance);
    if (distance > next_index || next_index - distance >= view.next_index) continue;
    uint32_t error = head.kind == OTP_RECORD_ERROR_END ? head.value : 0;
    ends->push_back({0, next_index - distance, head.ticks, error, head.detail, {}});
  }
  return events;
}

// Decodes the record at `at`; its size, or 0 where there is no whole, known one. Nearly all are begins and ends.
inline __attribute__((always_inline)) uint32_t ThreadDecode::record(const otp_record& head, const uint8_t* at,
                                                                    uint32_t left) {
  if (head.kind == OTP_RECORD_BEGIN && left >= sizeof(otp_record_begin)) {
    otp_record_begin whole;
    std::memcpy(&whole, at, sizeof whole);
    begin(whole);
    return sizeof whole;
  }
  if (head.kind != OTP_RECORD_END) return rare_record(head, at, left);
  bool ours = (head.consumers & d_limits.consumer) != 0;
  if (ours && head.value <= d_state.next_index) end_here(d_state.next_index - head.value, head.ticks, head.detail, 0);
  return sizeof head;
}

uint32_t ThreadDecode::rare_record(const otp_record& head, const uint8_t* at, uint32_t left) {
  uint32_t size = record_size(head, left);
  if (size == 0) return 0;
  bool ours = (head.consumers & d_limits.consumer) != 0;
  if (head.kind == OTP_RECORD_OPEN && ours) {
    otp_record_open whole;
    std::memcpy(&whole, at, sizeof whole);
    opened(whole);
  } else if (head.kind == OTP_RECORD_ERROR_END && ours) {
    otp_record_error_end whole;
    std::memcpy(&whole, at, sizeof whole);
    if (whole.event <= d_state.next_index)
      end_here(d_state.next_index - whole.event, head.ticks, head.detail, head.value);
  } else if (head.kind == OTP_RECORD_MEMORY && ours) {
    otp_record_memory whole;
    std::memcpy(&whole, at, sizeof whole);
    memory(whole);
  } else if (head.kind == OTP_RECORD_INPUTS && ours && d_last_begin_ours) {
    inputs(reinterpret_cast<const int64_t*>(at + sizeof head), head.ticks, head.detail);
  } else if (head.kind == OTP_RECORD_LOSS && ours) {
    d_state.mark_loss = true;
  } else if (head.kind == OTP_RECORD_CONTEXT && ours) {
    d_state.context = head.value;
  }
  return size;
}

uint32_t ThreadDecode::chunk(const ChunkView& view) {
  d_state.next_index = view.next_index;
  d_last_begin_ours = false;
  d_listed.clear();
  d_is_listing = d_limits.most_listed != 0 && !view.continues;
  const uint64_t first = d_batch.rows;
  uint32_t at = 0;
  bool is_cut = false;
  for (uint32_t size = 0; view.size - at >= sizeof(otp_record); at += size) {
    otp_record head;
    std::memcpy(&head, view.data + at, sizeof head);
    is_cut = is_behind_cut(head);
    bool ends_list = d_is_listing && !is_cut && head.kind != OTP_RECORD_OPEN;
    if (__builtin_expect(ends_list, 0) && record_size(head, view.size - at) != 0) close_unlisted();
    size = is_cut ? 0 : record(head, view.data + at, view.size - at);
    if (size == 0) break;
  }
  if (d_is_listing && (is_cut || at != 0)) close_unlisted();
  std::fill(d_batch.thread + first, d_batch.thread + d_batch.rows, d_thread_index);
  std::fill(d_batch.end_thread + first, d_batch.end_thread + d_batch.rows, d_thread_index);
  return is_cut ? at : view.size;
}

// The records of a thread are in the order of their times; INPUTS, which have none, go with their BEGIN. A list at a
// chunk's head is read as a whole: it is older than the chunk.
inline bool ThreadDecode::is_behind_cut(const otp_record& head) const {
  return head.ticks > d_limits.cut_ticks && head.kind != OTP_RECORD_INPUTS && head.kind != OTP_RECORD_OPEN;
}

void ThreadDecode::finish_all(uint64_t stop_ticks) {
  int64_t stop_ns = d_clock.unix_ns(stop_ticks);
  for (const ThreadDecoder::Open& open : d_state.open) {
    close_row(open.row, stop_ns, OTP_FLAG_UNFINISHED);
    d_batch.error_type[open.row] = 0;
  }
  d_state.open.clear();
}

void ThreadDecode::keep_open(std::vector<uint64_t>* rows) {
  for (const ThreadDecoder::Open& open : d_state.open) {
    uint64_t row = open.row;
    PendingEvent event{open.index,
                       d_batch.parent[row] < 0 ? d_builder.outer_parent(row) : d_batch.id[d_batch.parent[row]],
                       d_batch.start[row],
                       d_batch.sequence_nr[row],
                       d_batch.name[row],
                       d_batch.fwd_thread[row],
                       d_batch.context != nullptr ? d_batch.context[row] : 0,
                       d_batch.kind[row],
                       d_batch.scope[row],
                       d_batch.flags[row],
                       {}};
    if (open.input_words != 0) {
      const int64_t* words = d_batch.input_words + d_batch.inputs[row];
      event.inputs.assign(words, words + open.input_words);
    }
    d_builder.add_open({d_batch.id[row], event.parent, event.start, event.sequence_nr, event.context, event.name,
                        d_thread_index, event.fwd_thread, d_batch.kind[row], d_batch.scope[row]});
    d_state.pending.push_back(std::move(event));
    rows->push_back(row);
  }
  d_state.open.clear();
}

}  // namespace otp
