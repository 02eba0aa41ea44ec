#include "core/batch_builder.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace otp {

namespace {

constexpr size_t kHugePage = 2u << 20;

// Large columns in huge pages where the system has them: half of what decoding a million events costs are the page
// faults of ordinary ones (measured: 45 against 28 ns per event). A reader may wait for the page to be cleared; see
// ChunkPool for why a recording thread may not.
template <typename T>
bool allocate(T** out, uint64_t count) {
  size_t size = (count + 1) * sizeof(T);
  void* memory = nullptr;
  if (size < 2 * kHugePage) {
    memory = std::malloc(size);
  } else if (posix_memalign(&memory, kHugePage, size) != 0) {
    memory = nullptr;
  }
#ifdef MADV_HUGEPAGE
  if (size >= 2 * kHugePage && memory != nullptr) madvise(memory, size, MADV_HUGEPAGE);
#endif
  *out = static_cast<T*>(memory);
  return memory != nullptr;
}

bool allocate_memory(otp_batch* b, uint64_t count) {
  return allocate(&b->memory_time, count) && allocate(&b->memory_bytes, count) && allocate(&b->memory_address, count) &&
         allocate(&b->memory_total_allocated, count) && allocate(&b->memory_total_reserved, count) &&
         allocate(&b->memory_event, count) && allocate(&b->memory_thread, count) &&
         allocate(&b->memory_device_type, count) && allocate(&b->memory_device_index, count) &&
         allocate(&b->memory_flags, count);
}

}  // namespace

BatchBuilder::BatchBuilder(const Size& size)
    : d_batch(static_cast<otp_batch*>(std::calloc(1, sizeof(otp_batch)))), d_ok(d_batch != nullptr) {
  if (!d_ok) return;
  otp_batch& b = *d_batch;
  uint64_t max_rows = size.rows;
  d_ok = allocate(&b.id, max_rows) && allocate(&b.start, max_rows) && allocate(&b.end, max_rows) &&
         allocate(&b.sequence_nr, max_rows) && allocate(&b.name, max_rows) && allocate(&b.parent, max_rows) &&
         allocate(&b.thread, max_rows) && allocate(&b.end_thread, max_rows) && allocate(&b.fwd_thread, max_rows) &&
         allocate(&b.error_type, max_rows) && allocate(&b.kind, max_rows) && allocate(&b.scope, max_rows) &&
         allocate(&b.flags, max_rows);
  if (size.with_contexts) d_ok = d_ok && allocate(&b.context, max_rows);
  if (size.with_inputs) d_ok = d_ok && allocate(&b.inputs, max_rows) && allocate(&b.input_words, size.input_words);
  if (size.with_memory) d_ok = d_ok && allocate_memory(&b, size.memory);
}

BatchBuilder::~BatchBuilder() { otp_batch_free(d_batch); }

uint32_t BatchBuilder::thread_index(const otp_thread& thread) {
  for (uint32_t i = static_cast<uint32_t>(d_threads.size()); i-- > 0;)
    if (d_threads[i].id == thread.id) return i;
  d_threads.push_back(thread);
  return static_cast<uint32_t>(d_threads.size() - 1);
}

void BatchBuilder::add_memory(const otp_record_memory& record, int64_t time, uint64_t event, uint32_t thread) {
  otp_batch& b = *d_batch;
  uint64_t at = b.memory_count++;
  b.memory_time[at] = time;
  b.memory_bytes[at] = record.bytes;
  b.memory_address[at] = record.address;
  b.memory_total_allocated[at] = record.total_allocated;
  b.memory_total_reserved[at] = record.total_reserved;
  b.memory_event[at] = event;
  b.memory_thread[at] = thread;
  b.memory_device_type[at] = record.device_type;
  b.memory_device_index[at] = record.device_index;
  b.memory_flags[at] = record.head.detail;
}

void BatchBuilder::move_row(uint64_t from, uint64_t to) {
  otp_batch& b = *d_batch;
  b.id[to] = b.id[from];
  b.start[to] = b.start[from];
  b.end[to] = b.end[from];
  b.sequence_nr[to] = b.sequence_nr[from];
  if (b.inputs != nullptr) b.inputs[to] = b.inputs[from];
  if (b.context != nullptr) b.context[to] = b.context[from];
  b.name[to] = b.name[from];
  b.parent[to] = b.parent[from];
  b.thread[to] = b.thread[from];
  b.end_thread[to] = b.end_thread[from];
  b.fwd_thread[to] = b.fwd_thread[from];
  b.error_type[to] = b.error_type[from];
  b.kind[to] = b.kind[from];
  b.scope[to] = b.scope[from];
  b.flags[to] = b.flags[from];
}

uint64_t BatchBuilder::outer_parent(uint64_t row) const {
  for (const Outer& outer : d_outer)
    if (outer.row == row) return outer.parent;
  return 0;
}

void BatchBuilder::remove_rows(const std::vector<uint64_t>& rows) {
  if (rows.empty()) return;
  otp_batch& b = *d_batch;
  auto removed_before = [&rows](uint64_t row) {
    return static_cast<uint64_t>(std::lower_bound(rows.begin(), rows.end(), row) - rows.begin());
  };
  auto removed = [&rows](uint64_t row) { return std::binary_search(rows.begin(), rows.end(), row); };
  std::vector<uint64_t> removed_ids;
  for (uint64_t row : rows) removed_ids.push_back(b.id[row]);

  d_outer.erase(std::remove_if(d_outer.begin(), d_outer.end(), [&](const Outer& o) { return removed(o.row); }),
                d_outer.end());
  for (Outer& outer : d_outer) outer.row -= removed_before(outer.row);
  uint64_t to = 0, next = 0;
  for (uint64_t from = 0; from < b.rows; ++from) {
    if (next < rows.size() && rows[next] == from) {
      ++next;
      continue;
    }
    move_row(from, to);
    if (b.parent[to] >= 0) {
      auto parent = static_cast<uint64_t>(b.parent[to]);
      uint64_t shift = removed_before(parent);
      bool gone = shift < rows.size() && rows[shift] == parent;
      b.parent[to] = gone ? -1 : static_cast<int32_t>(parent - shift);
      if (gone) add_outer(to, removed_ids[shift]);
    }
    ++to;
  }
  b.rows = to;
}

otp_batch* BatchBuilder::finish() {
  otp_batch& b = *d_batch;
  std::sort(d_outer.begin(), d_outer.end(), [](const Outer& a, const Outer& c) { return a.row < c.row; });
  d_ok = d_ok && allocate(&b.threads, d_threads.size()) && allocate(&b.outer_row, d_outer.size()) &&
         allocate(&b.outer_parent, d_outer.size()) && allocate(&b.open_id, d_open.size()) &&
         allocate(&b.open_parent, d_open.size()) && allocate(&b.open_start, d_open.size()) &&
         allocate(&b.open_context, d_open.size()) && allocate(&b.open_name, d_open.size()) &&
         allocate(&b.open_thread, d_open.size()) && allocate(&b.open_kind, d_open.size()) &&
         allocate(&b.open_scope, d_open.size());
  if (!d_ok) return nullptr;
  std::copy(d_threads.begin(), d_threads.end(), b.threads);
  b.thread_count = d_threads.size();
  for (const Outer& outer : d_outer) {
    b.outer_row[b.outer_count] = outer.row;
    b.outer_parent[b.outer_count++] = outer.parent;
  }
  for (const Open& open : d_open) {
    b.open_id[b.open_count] = open.id;
    b.open_parent[b.open_count] = open.parent;
    b.open_start[b.open_count] = open.start;
    b.open_context[b.open_count] = open.context;
    b.open_name[b.open_count] = open.name;
    b.open_thread[b.open_count] = open.thread;
    b.open_kind[b.open_count] = open.kind;
    b.open_scope[b.open_count++] = open.scope;
  }
  otp_batch* done = d_batch;
  d_batch = nullptr;
  return done;
}

}  // namespace otp

extern "C" void otp_batch_free(otp_batch* batch) {
  if (batch == nullptr) return;
  void* arrays[] = {batch->id,
                    batch->start,
                    batch->end,
                    batch->sequence_nr,
                    batch->inputs,
                    batch->name,
                    batch->parent,
                    batch->thread,
                    batch->end_thread,
                    batch->fwd_thread,
                    batch->error_type,
                    batch->kind,
                    batch->scope,
                    batch->flags,
                    batch->input_words,
                    batch->outer_row,
                    batch->outer_parent,
                    batch->threads,
                    batch->memory_time,
                    batch->memory_bytes,
                    batch->memory_address,
                    batch->memory_total_allocated,
                    batch->memory_total_reserved,
                    batch->memory_event,
                    batch->memory_thread,
                    batch->memory_device_type,
                    batch->memory_device_index,
                    batch->memory_flags,
                    batch->context,
                    batch->open_id,
                    batch->open_parent,
                    batch->open_start,
                    batch->open_context,
                    batch->open_name,
                    batch->open_thread,
                    batch->open_kind,
                    batch->open_scope};
  for (void* array : arrays) std::free(array);
  std::free(batch);
}
