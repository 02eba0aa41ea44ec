// Sessions, events and batches for the tests of the core, through the C boundary only.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OTP_SANITIZED 1
constexpr int kSlowdown = 10;  // sanitizers cost about that much: as many times fewer events
#else
#define OTP_SANITIZED 0
constexpr int kSlowdown = 1;
#endif

constexpr uint64_t kPlenty = 256u << 20;

inline otp_session_options options(uint64_t budget = kPlenty, uint32_t policy = OTP_FULL_DROP_NEWEST,
                                   uint32_t all_threads = 1, uint32_t inputs = 0) {
  return {budget, policy, all_threads, inputs, 0, 0, 0, 0};
}

inline const otp_api& api() { return *otp_get_api(); }

// A batch with its names looked up.
class Batch {
 public:
  explicit Batch(otp_batch* batch) : d_batch(batch) { otp_names_view(&d_names); }
  ~Batch() { otp_batch_free(d_batch); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const otp_batch* operator->() const { return d_batch; }
  const otp_batch& operator*() const { return *d_batch; }
  std::string text(uint32_t name) const {
    uint64_t from = name == 0 ? 0 : d_names.ends[name - 1];
    return std::string(reinterpret_cast<const char*>(d_names.data) + from, d_names.ends[name] - from);
  }
  std::string name(uint64_t row) const { return text(d_batch->name[row]); }
  // The one row with that name.
  uint64_t row(const std::string& requested) const {
    uint64_t found = UINT64_MAX;
    for (uint64_t i = 0; i < d_batch->rows; ++i) {
      if (name(i) != requested) continue;
      CHECK_EQ(found, UINT64_MAX);
      found = i;
    }
    CHECK(found != UINT64_MAX);
    return found;
  }
  bool has(const std::string& requested) const {
    for (uint64_t i = 0; i < d_batch->rows; ++i)
      if (name(i) == requested) return true;
    return false;
  }
  // The parent's id, whether it is in this batch or not; 0: none.
  uint64_t parent_id(uint64_t row) const {
    if (d_batch->parent[row] >= 0) return d_batch->id[d_batch->parent[row]];
    for (uint64_t i = 0; i < d_batch->outer_count; ++i)
      if (d_batch->outer_row[i] == row) return d_batch->outer_parent[i];
    return 0;
  }
  std::string parent_name(const std::string& of) const {
    int32_t parent = d_batch->parent[row(of)];
    return parent < 0 ? "" : name(static_cast<uint64_t>(parent));
  }
  uint64_t dropped() const {
    uint64_t sum = 0;
    for (uint64_t count : d_batch->dropped) sum += count;
    return sum;
  }
  // What every batch has to satisfy, whatever was recorded.
  void check_sound() const;

 private:
  otp_batch* d_batch;
  otp_names d_names{};
};

// All that a batch points to lies in its own block, aligned, and no two columns overlap.
inline void check_is_one_block(const otp_batch& b) {
  auto* block = reinterpret_cast<const char*>(&b);
  const char* free_from = block + sizeof b;
  uint32_t count = 0;
  const otp_column* columns = otp_batch_columns(&count);
  CHECK_EQ(count, 38u);
  for (uint32_t i = 0; i < count; ++i) {
    char* data;
    uint64_t entries;
    std::memcpy(&data, block + columns[i].offset, sizeof data);
    std::memcpy(&entries, block + columns[i].count, sizeof entries);
    if (data == nullptr) continue;
    CHECK(data >= free_from && reinterpret_cast<uintptr_t>(data) % columns[i].size == 0);
    free_from = data + entries * columns[i].size;
  }
  CHECK(reinterpret_cast<const char*>(b.threads) >= free_from);
  CHECK(reinterpret_cast<const char*>(b.threads + b.thread_count) <= block + b.bytes);
}

inline void Batch::check_sound() const {
  const otp_batch& b = *d_batch;
  check_is_one_block(b);
  std::map<uint64_t, uint64_t> outer;
  for (uint64_t i = 0; i < b.outer_count; ++i) {
    CHECK(b.outer_row[i] < b.rows && b.outer_parent[i] != 0);
    CHECK(outer.emplace(b.outer_row[i], b.outer_parent[i]).second);
    CHECK_EQ(b.parent[b.outer_row[i]], -1);
  }
  for (uint64_t i = 0; i < b.open_count; ++i) {
    CHECK(b.open_id[i] > b.open_parent[i]);
    if (i > 0) CHECK(b.open_id[i] > b.open_id[i - 1]);  // by thread, and within one as they began
  }
  for (uint64_t i = 0; i < b.rows; ++i) {
    CHECK(b.end[i] >= b.start[i]);
    CHECK(b.thread[i] < b.thread_count && b.end_thread[i] < b.thread_count);
    CHECK_EQ(b.id[i] >> OTP_INDEX_BITS, b.threads[b.thread[i]].id);
    if (i > 0 && b.thread[i] == b.thread[i - 1]) CHECK(b.id[i] > b.id[i - 1] && b.start[i] >= b.start[i - 1]);
    if (b.parent[i] < 0) continue;
    auto parent = static_cast<uint64_t>(b.parent[i]);
    CHECK(parent < i && b.thread[parent] == b.thread[i] && b.start[parent] <= b.start[i]);
  }
}

// A session that is freed at the end of its scope.
class Session {
 public:
  explicit Session(const otp_session_options& requested = options(), bool start_now = true) {
    CHECK_EQ(otp_session_new(&requested, &d_session), OTP_OK);
    if (start_now) start();
  }
  ~Session() { otp_session_free(d_session); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  operator otp_session*() const { return d_session; }
  void start() { CHECK_EQ(otp_session_start(d_session), OTP_OK); }
  void stop() { CHECK_EQ(otp_session_stop(d_session), OTP_OK); }
  otp_batch* drain(uint64_t max_bytes = 0) {
    otp_batch* batch = nullptr;
    CHECK_EQ(otp_session_drain(d_session, max_bytes, &batch), OTP_OK);
    return batch;
  }
  otp_session_stats stats() const {
    otp_session_stats stats;
    CHECK_EQ(otp_session_get_stats(d_session, &stats), OTP_OK);
    return stats;
  }

 private:
  otp_session* d_session = nullptr;
};

inline otp_begin_args event(const void* key, const char* name) {
  otp_begin_args args{};
  args.key = key;
  args.name = name;
  args.name_size = UINT32_MAX;
  args.kind = OTP_EVENT_OPERATOR;
  args.sequence_nr = -1;
  return args;
}

// Names serve as keys where no other is given: the tests' literals differ.
inline uint32_t begin(const void* key, const char* name) {
  otp_begin_args args = event(key, name);
  return api().begin(&args);
}
inline uint32_t begin(const char* name) { return begin(name, name); }
inline int end(const void* key, uint8_t flags = 0) { return api().end(key, flags, nullptr, 0); }

// An event that begins and ends.
inline void leaf(const char* name) {
  begin(name);
  end(name);
}

inline otp_recorder_stats recorder_stats() {
  otp_recorder_stats stats;
  otp_get_recorder_stats(&stats);
  return stats;
}

// Runs a test, and proves that it left no session running.
#define RUN_CLEAN(test)                      \
  do {                                       \
    RUN(test);                               \
    CHECK_EQ(recorder_stats().sessions, 0u); \
  } while (false)
