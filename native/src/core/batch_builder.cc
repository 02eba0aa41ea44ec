#include "core/batch_builder.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

namespace otp {

namespace {

constexpr size_t kAlignment = 64;         // a cache line
constexpr size_t kOwnPages = 1u << 20;    // from here on a block is the system's again once it is freed
constexpr size_t kMostSpare = 64u << 20;  // of addresses: a batch uses a part of its block
constexpr size_t kHugePage = 2u << 20;
constexpr size_t kLargestPage = 64u << 10;  // of those that systems have as ordinary ones

template <typename T>
constexpr const char* dtype_of() {
  constexpr const char* names[2][4] = {{"u1", "u2", "u4", "u8"}, {"i1", "i2", "i4", "i8"}};
  return names[std::is_signed<T>::value][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
}

#define OTP_COLUMN(group, prefix, field, counter)                                                           \
  otp_column {                                                                                              \
    #field, dtype_of<std::remove_pointer<decltype(otp_batch::prefix##field)>::type>(), OTP_COLUMNS_##group, \
        offsetof(otp_batch, prefix##field), offsetof(otp_batch, counter), sizeof(*otp_batch::prefix##field) \
  }
#define OTP_EVENTS(field) OTP_COLUMN(EVENTS, , field, rows)
#define OTP_MEMORY(field) OTP_COLUMN(MEMORY, memory_, field, memory_count)
#define OTP_OUTER(field) OTP_COLUMN(OUTER, outer_, field, outer_count)
#define OTP_OPEN(field) OTP_COLUMN(OPEN, open_, field, open_count)

constexpr otp_column kColumns[] = {
    OTP_EVENTS(id),
    OTP_EVENTS(start),
    OTP_EVENTS(end),
    OTP_EVENTS(sequence_nr),
    OTP_EVENTS(name),
    OTP_EVENTS(parent),
    OTP_EVENTS(thread),
    OTP_EVENTS(end_thread),
    OTP_EVENTS(fwd_thread),
    OTP_EVENTS(error_type),
    OTP_EVENTS(kind),
    OTP_EVENTS(scope),
    OTP_EVENTS(flags),
    OTP_COLUMN(INPUTS, , inputs, rows),
    OTP_COLUMN(CONTEXTS, , context, rows),
    OTP_COLUMN(INPUT_WORDS, , input_words, input_word_count),
    OTP_MEMORY(time),
    OTP_MEMORY(bytes),
    OTP_MEMORY(address),
    OTP_MEMORY(total_allocated),
    OTP_MEMORY(total_reserved),
    OTP_MEMORY(event),
    OTP_MEMORY(thread),
    OTP_MEMORY(device_type),
    OTP_MEMORY(device_index),
    OTP_MEMORY(flags),
    OTP_OUTER(row),
    OTP_OUTER(parent),
    OTP_OPEN(id),
    OTP_OPEN(parent),
    OTP_OPEN(start),
    OTP_OPEN(sequence_nr),
    OTP_OPEN(context),
    OTP_OPEN(name),
    OTP_OPEN(thread),
    OTP_OPEN(fwd_thread),
    OTP_OPEN(kind),
    OTP_OPEN(scope),
};

#undef OTP_OPEN
#undef OTP_OUTER
#undef OTP_MEMORY
#undef OTP_EVENTS
#undef OTP_COLUMN

bool is_per_event(const otp_column& column) { return column.count == offsetof(otp_batch, rows); }

char*& data_of(otp_batch* batch, const otp_column& column) {
  return *reinterpret_cast<char**>(reinterpret_cast<char*>(batch) + column.offset);
}

uint64_t aligned(uint64_t bytes, uint64_t to = kAlignment) { return (bytes + to - 1) / to * to; }

// Of a large block: whole pages. One that may be used again has one of four sizes per power of two, so that it fits a
// later batch that is a little larger; what is not touched is only addresses. Of a larger one, all of the last huge
// page where no more than an eighth of it is to spare.
uint64_t in_pages(uint64_t bytes) {
  if (bytes < kOwnPages) return bytes;
  if (bytes > kMostSpare)
    return std::max(aligned(bytes, kLargestPage), (bytes + kHugePage / 8) / kHugePage * kHugePage);
  uint64_t quarter = kOwnPages / 4;
  while (8 * quarter < bytes) quarter *= 2;
  return aligned(bytes, quarter);
}

// Large blocks in pages of their own, so that the system has them back at once and the heap keeps no holes between
// spans that wait; in huge pages where it has them, since half of what decoding a million events costs are the faults
// of ordinary ones (measured: 45 against 28 ns per event). A reader may wait for the page to be cleared; see ChunkPool
// for why a recording thread may not.
void* mapped_block(size_t size) {
  size_t spare = size < kHugePage ? 0 : kHugePage;
  void* mapped = mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (spare == 0) return mapped;
  // A block begins with a huge page: one of 4 MiB anywhere has a single whole one.
  char* begin = static_cast<char*>(mapped);
  size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePage;
  if (before != 0) munmap(begin, before);
  munmap(begin + before + size, spare - before);
#ifdef MADV_HUGEPAGE
  madvise(begin + before, size / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return begin + before;
}

// Blocks of drains that were freed, for later drains, which need about as much: a page that was touched before costs
// nothing. Two, since a batch waits for the ends of its steps while the next one is decoded. The first word of each is
// its size. They go when only small batches have come for a while, as of an idle program (between large ones there is a
// small one now and then, with the rest of the records), and with the last batch of a recording.
std::atomic<uint64_t*> g_spares[2];
std::atomic<uint32_t> g_small{0};  // small batches since the last large one
constexpr uint32_t kMostSmall = 8;
std::atomic<bool> g_ended{false};  // a recording has ended, and nobody has drained since: no block is kept

void release(uint64_t* block) {
  if (block != nullptr) munmap(block, *block);
}

void release_spares() {
  for (std::atomic<uint64_t*>& spare : g_spares) release(spare.exchange(nullptr));
}

void keep(uint64_t* block) {
  for (std::atomic<uint64_t*>& spare : g_spares) {
    uint64_t* none = nullptr;
    if (spare.compare_exchange_strong(none, block)) return;
  }
  release(block);
}

// A spare block of at least that size, but not of far more; null if there is none. What is too small is in the way.
uint64_t* take_spare(uint64_t size) {
  for (std::atomic<uint64_t*>& spare : g_spares) {
    uint64_t* block = spare.exchange(nullptr);
    if (block == nullptr) continue;
    if (size <= *block && *block / 8 <= size) return block;
    if (size <= *block)
      keep(block);
    else
      release(block);
  }
  return nullptr;
}

// At least `*size` bytes, which becomes what they are; null where there is no memory.
void* allocate(uint64_t* size) {
  g_ended.store(false);
  if (*size < kOwnPages) {
    if (g_small.fetch_add(1) >= kMostSmall) release_spares();
    return std::malloc(*size);
  }
  g_small.store(0);
  uint64_t* spare = take_spare(*size);
  if (spare == nullptr) return mapped_block(*size);
  *size = *spare;
  return spare;
}

constexpr uint64_t kAbsent = UINT64_MAX;

// Of inputs that later rows may share, a power of two: 64 KB, which stay in the L2 cache.
constexpr uint64_t kRemembered = 4096;

// By the first words, which tell kinds, types and sizes, and the last one.
uint64_t hash_of(const int64_t* words, uint64_t count) {
  uint64_t hash = count ^ static_cast<uint64_t>(words[count - 1]);
  for (uint64_t i = 0; i < std::min<uint64_t>(count, 8); ++i)
    hash = (hash ^ static_cast<uint64_t>(words[i])) * 0x9E3779B97F4A7C15u;
  return hash >> 32;
}

// Upper bounds for the groups that are placed at once; the others are placed at the end, when their numbers are known.
std::array<uint64_t, OTP_COLUMN_GROUPS> capacities(const BatchBuilder::Size& size) {
  std::array<uint64_t, OTP_COLUMN_GROUPS> found;
  found.fill(kAbsent);
  found[OTP_COLUMNS_EVENTS] = size.rows;
  if (size.with_contexts) found[OTP_COLUMNS_CONTEXTS] = size.rows;
  if (size.with_memory) found[OTP_COLUMNS_MEMORY] = size.memory;
  if (size.with_inputs) {
    found[OTP_COLUMNS_INPUTS] = size.rows;
    found[OTP_COLUMNS_INPUT_WORDS] = size.input_words;
  }
  return found;
}

// What finish() needs at most: a row is open, or its parent is outside, or neither.
uint64_t bytes_at_the_end(const BatchBuilder::Size& size) {
  uint64_t found = aligned(size.threads * sizeof(otp_thread));
  for (const otp_column& column : kColumns)
    if (column.group == OTP_COLUMNS_OPEN || column.group == OTP_COLUMNS_OUTER)
      found += aligned(size.rows * column.size);
  return found;
}

}  // namespace

BatchBuilder::BatchBuilder(const Size& size) : d_batch(nullptr), d_written(size.with_inputs ? kRemembered : 0) {
  std::array<uint64_t, OTP_COLUMN_GROUPS> entries = capacities(size);
  uint64_t bytes = aligned(sizeof(otp_batch)) + bytes_at_the_end(size);
  for (const otp_column& column : kColumns)
    if (entries[column.group] != kAbsent) bytes += aligned(entries[column.group] * column.size);
  bytes = in_pages(bytes);
  void* block = allocate(&bytes);
  if (block == nullptr) return;
  d_batch = new (block) otp_batch{};
  d_batch->bytes = bytes;
  d_used = aligned(sizeof(otp_batch));
  for (const otp_column& column : kColumns)
    if (entries[column.group] != kAbsent) place(column, entries[column.group]);
}

BatchBuilder::~BatchBuilder() { otp_batch_free(d_batch); }

void BatchBuilder::place(const otp_column& column, uint64_t entries) {
  data_of(d_batch, column) = reinterpret_cast<char*>(d_batch) + d_used;
  d_used += aligned(entries * column.size);
}

uint32_t BatchBuilder::thread_index(const otp_thread& thread) {
  for (uint32_t i = static_cast<uint32_t>(d_threads.size()); i-- > 0;)
    if (d_threads[i].id == thread.id) return i;
  d_threads.push_back(thread);
  return static_cast<uint32_t>(d_threads.size() - 1);
}

// A training step has the inputs of the one before: sharing them saves half of what a drain writes, and of the memory
// that it touches for the first time.
int64_t BatchBuilder::add_inputs(const int64_t* words, uint64_t count) {
  otp_batch& b = *d_batch;
  Words& slot = d_written[hash_of(words, count) % kRemembered];
  bool is_known = slot.count == count && std::memcmp(b.input_words + slot.offset, words, count * sizeof *words) == 0;
  if (!is_known) {
    slot = {b.input_word_count, count};
    std::memcpy(b.input_words + slot.offset, words, count * sizeof *words);
    b.input_word_count += count;
  }
  return static_cast<int64_t>(slot.offset);
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

uint64_t BatchBuilder::outer_parent(uint64_t row) const {
  for (const Outer& outer : d_outer)
    if (outer.row == row) return outer.parent;
  return 0;
}

// Moves what stands between the rows that go, column by column.
void BatchBuilder::close_gaps(const std::vector<uint64_t>& rows) {
  for (const otp_column& column : kColumns) {
    char* data = data_of(d_batch, column);
    if (!is_per_event(column) || data == nullptr) continue;
    uint64_t to = rows[0];
    for (size_t i = 0; i < rows.size(); ++i) {
      uint64_t from = rows[i] + 1, end = i + 1 < rows.size() ? rows[i + 1] : d_batch->rows;
      std::memmove(data + to * column.size, data + from * column.size, (end - from) * column.size);
      to += end - from;
    }
  }
  d_batch->rows -= rows.size();
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
  close_gaps(rows);
  for (uint64_t row = rows[0]; row < b.rows; ++row) {  // those before have their parents before them
    if (b.parent[row] < 0) continue;
    auto parent = static_cast<uint64_t>(b.parent[row]);
    uint64_t shift = removed_before(parent);
    bool gone = shift < rows.size() && rows[shift] == parent;
    b.parent[row] = gone ? -1 : static_cast<int32_t>(parent - shift);
    if (gone) add_outer(row, removed_ids[shift]);
  }
}

otp_batch* BatchBuilder::finish() {
  otp_batch& b = *d_batch;
  std::sort(d_outer.begin(), d_outer.end(), [](const Outer& a, const Outer& c) { return a.row < c.row; });
  for (const otp_column& column : kColumns) {
    if (column.group == OTP_COLUMNS_OUTER) place(column, d_outer.size());
    if (column.group == OTP_COLUMNS_OPEN) place(column, d_open.size());
  }
  for (const Outer& outer : d_outer) {
    b.outer_row[b.outer_count] = outer.row;
    b.outer_parent[b.outer_count++] = outer.parent;
  }
  for (const Open& open : d_open) {
    b.open_id[b.open_count] = open.id;
    b.open_parent[b.open_count] = open.parent;
    b.open_start[b.open_count] = open.start;
    b.open_sequence_nr[b.open_count] = open.sequence_nr;
    b.open_context[b.open_count] = open.context;
    b.open_name[b.open_count] = open.name;
    b.open_thread[b.open_count] = open.thread;
    b.open_fwd_thread[b.open_count] = open.fwd_thread;
    b.open_kind[b.open_count] = open.kind;
    b.open_scope[b.open_count++] = open.scope;
  }
  b.threads = reinterpret_cast<otp_thread*>(reinterpret_cast<char*>(d_batch) + d_used);
  b.thread_count = d_threads.size();
  std::copy(d_threads.begin(), d_threads.end(), b.threads);
  d_batch = nullptr;
  return &b;
}

}  // namespace otp

extern "C" {

const otp_column* otp_batch_columns(uint32_t* count) {
  *count = static_cast<uint32_t>(std::end(otp::kColumns) - std::begin(otp::kColumns));
  return otp::kColumns;
}

void otp_batch_free(otp_batch* batch) {
  if (batch == nullptr) return;
  uint64_t bytes = batch->bytes;
  bool is_last = batch->watermark == INT64_MAX;
  if (is_last) {
    otp::g_ended.store(true);
    otp::release_spares();
  }
  if (bytes < otp::kOwnPages) {
    std::free(batch);
  } else if (otp::g_ended.load() || bytes > otp::kMostSpare) {
    munmap(batch, bytes);
  } else {
    auto* block = reinterpret_cast<uint64_t*>(batch);
    *block = bytes;
    otp::keep(block);
  }
}

}  // extern "C"
