// The clock, the events and the counters of a device that does not exist, for tests: nothing in here knows a tensor.
#pragma once

#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>

#include "simulated_streams.h"

namespace simulated {

constexpr int kDevices = 2;

// What is counted, in the order of COUNTS in simulated_device.py.
enum Count {
  CREATED,
  CREATED_TIMED,
  DESTROYED,
  RECORDS,
  RECORDS_TIMED,
  QUERIES,
  ELAPSED,
  SYNCHRONIZES,
  WAITS,
  STREAM_QUERIES,
  KERNELS,
  ALLOCATIONS,
  FREES,
  VIOLATIONS,
  FAILURES,
  COUNTS
};

// INSTANT: everything has completed as soon as it is enqueued. REAL: the clock is the machine's. MANUAL: nothing
// completes by itself. In INSTANT and MANUAL the clock stands until somebody moves it.
enum Mode { INSTANT, REAL, MANUAL };

struct Failure {
  std::string text;
  int64_t times;
};

class Queues {
 public:
  // ---- what the device guard calls; all of it may throw ----

  Event* record(Event* event, StreamKey key, bool timed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_if_told("record");
    if (event == nullptr) {
      event = new Event{key.first, timed, nullptr};
      events_.insert(event);
      alive_most_ = std::max(alive_most_, events_.size());
      count(CREATED);
      if (timed) count(CREATED_TIMED);
    }
    require_alive(event, "record");
    TORCH_CHECK(event->device == key.first, "event of device ", event->device, " recorded on device ", key.first);
    count(RECORDS);
    if (event->timed) count(RECORDS_TIMED);
    event->mark = std::make_shared<Mark>();
    event->mark->captured = streams_.at(key).capturing;
    if (event->mark->captured) violation("an event was recorded on a stream that is capturing");
    enqueue(key, {0, 0, event->mark, false});
    return event;
  }

  bool query(Event* event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(QUERIES);
    fail_if_told("query");
    forbid_in_capture("an event was queried");
    return event == nullptr || is_done(event, "query");
  }

  double elapsed_ms(Event* begin, Event* end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(ELAPSED);
    fail_if_told("elapsed");
    TORCH_CHECK(begin != nullptr && end != nullptr, "elapsed time of an event that was never recorded");
    const bool done = is_done(begin, "elapsed") && is_done(end, "elapsed");
    TORCH_CHECK(begin->timed && end->timed, "elapsed time of an event that was made without timing");
    TORCH_CHECK(begin->device == end->device, "elapsed time between events of two devices");
    TORCH_CHECK(done, "elapsed time of an event that has not completed");
    return static_cast<double>(end->mark->time - begin->mark->time) / 1e6;
  }

  void block(Event* event, StreamKey key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(WAITS);
    fail_if_told("block");
    if (event == nullptr) return;
    require_alive(event, "block");
    if (event->mark && !event->mark->captured) enqueue(key, {0, 0, event->mark, true});
  }

  void destroy(Event* event) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (event == nullptr) return;
    if (events_.erase(event) == 0) return violation("an event was destroyed twice");
    count(DESTROYED);
    delete event;
  }

  void synchronize_event(Event* event) {
    std::unique_lock<std::mutex> lock(mutex_);
    count(SYNCHRONIZES);
    fail_if_told("synchronize");
    forbid_in_capture("an event was waited for");
    if (event == nullptr) return;
    require_alive(event, "synchronize");
    const auto mark = event->mark;
    wait_until(lock, [&] { return !mark || mark->done; });
  }

  // Calls of the guard's count; what a copy to the host waits for does not.
  void synchronize_stream(StreamKey key, bool counted) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (counted) count(SYNCHRONIZES);
    if (counted) fail_if_told("synchronize");
    forbid_in_capture("a stream was waited for");
    wait_until(lock, [&] { return streams_.at(key).items.empty(); });
  }

  void synchronize_device(int device) {
    std::unique_lock<std::mutex> lock(mutex_);
    count(SYNCHRONIZES);
    fail_if_told("synchronize");
    forbid_in_capture("a device was waited for");
    wait_until(lock, [&] {
      return std::all_of(streams_.all.begin(), streams_.all.end(),
                         [&](const auto& one) { return one.first.first != device || one.second.items.empty(); });
    });
  }

  bool query_stream(StreamKey key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(STREAM_QUERIES);
    fail_if_told("query_stream");
    forbid_in_capture("a stream was queried");
    settle_as_time_goes();
    return streams_.at(key).items.empty();
  }

  bool is_capturing(StreamKey key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_if_told("is_capturing");
    return streams_.at(key).capturing;
  }

  void fail_for(const char* what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_if_told(what);
  }

  int64_t new_stream() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++last_stream_;
  }

  void kernel(const std::string& name, StreamKey key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(KERNELS);
    const auto own = durations_.find(name);
    enqueue(key, {0, own == durations_.end() ? duration_ : own->second, nullptr, false});
  }

  void allocation(bool begins, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count(begins ? ALLOCATIONS : FREES);
    memory_ += begins ? bytes : -bytes;
  }

  // ---- what the test calls; none of it throws ----

  // Completes what is there and begins a new count. Handles of events stay good.
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : streams_.all) one.second.capturing = false;
    streams_.settle(kEver);
    streams_.all.clear();
    counts_.clear();
    failures_.clear();
    durations_.clear();
    violations_.clear();
    duration_ = 5000;
    now_ = 0;
    mode_ = INSTANT;
    captures_ = 0;
    alive_most_ = events_.size();
  }

  void set_mode(Mode mode) {
    const std::lock_guard<std::mutex> lock(mutex_);
    now_ = now();
    origin_ = machine() - now_;
    mode_ = mode;
    settle_as_time_goes();
  }

  // The next items of a stream, all of them with n < 0; returns how many completed: fewer where one waits for a mark.
  int64_t complete(StreamKey key, int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Stream& stream = streams_.at(key);
    int64_t done = 0;
    while (done != n && Streams::step(stream, kEver)) ++done;
    now_ = std::max(now_, stream.ended);
    return done;
  }

  void complete_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.settle(kEver);
    now_ = std::max(now_, streams_.ended());
  }

  void advance(int64_t ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    now_ += ns;
    origin_ -= ns;
    streams_.settle(now());
  }

  void set_duration(const std::string& name, int64_t ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    (name.empty() ? duration_ : durations_[name]) = ns;
  }

  void capture(StreamKey key, bool begins) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Stream& stream = streams_.at(key);
    captures_ += static_cast<int>(begins) - static_cast<int>(stream.capturing);
    stream.capturing = begins;
  }

  void fail(const std::string& what, const std::string& text, int64_t times) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_[what] = {text, times};
  }

  int64_t counted(int what, int64_t thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t sum = 0;
    for (const auto& one : counts_)
      if (thread < 0 || one.first == thread) sum += one.second[what];
    return sum;
  }

  int64_t alive() {
    return locked([this] { return static_cast<int64_t>(events_.size()); });
  }
  int64_t alive_most() {
    return locked([this] { return static_cast<int64_t>(alive_most_); });
  }
  int64_t memory() {
    return locked([this] { return memory_; });
  }
  int64_t pending(StreamKey key) {
    return locked([&] { return static_cast<int64_t>(streams_.at(key).items.size()); });
  }
  int64_t time() {
    return locked([this] { return now(); });
  }
  std::string violations() {
    return locked([this] { return violations_; });
  }

 private:
  template <class F>
  std::invoke_result_t<F> locked(F read) {
    const std::lock_guard<std::mutex> lock(mutex_);
    settle_as_time_goes();
    return read();
  }

  static int64_t machine() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  int64_t now() const { return mode_ == REAL ? machine() - origin_ : now_; }

  void count(Count what) { ++counts_[syscall(SYS_gettid)][what]; }

  void violation(const char* text) {
    count(VIOLATIONS);
    violations_ += std::string(text) + "\n";
  }

  void require_alive(Event* event, const char* what) {
    if (events_.count(event) != 0) return;
    violation("an event was used after it was destroyed");
    TORCH_CHECK(false, what, " of an event that has been destroyed");
  }

  // As CUDA does in its strictest mode of capture, which is torch's: whoever asks, on whatever thread.
  void forbid_in_capture(const char* text) {
    if (captures_ == 0) return;
    violation(text);
    TORCH_CHECK(false, text, " while a stream is capturing");
  }

  void fail_if_told(const char* what) {
    const auto found = failures_.find(what);
    if (found == failures_.end() || found->second.times == 0) return;
    if (found->second.times > 0) --found->second.times;
    count(FAILURES);
    TORCH_CHECK(false, found->second.text);
  }

  bool is_done(Event* event, const char* what) {
    require_alive(event, what);
    TORCH_CHECK(!event->mark->captured, what, " of an event that belongs to a capture");
    settle_as_time_goes();
    return event->mark->done;
  }

  void enqueue(StreamKey key, Item item) {
    Stream& stream = streams_.at(key);
    if (stream.capturing) return;
    item.enqueued = now();
    stream.items.push_back(std::move(item));
    settle_as_time_goes();
  }

  void settle_as_time_goes() {
    if (mode_ != MANUAL) streams_.settle(mode_ == INSTANT ? kEver : now());
  }

  // With a clock that stands, waiting is what moves it; with the machine's, somebody really waits.
  template <class F>
  void wait_until(std::unique_lock<std::mutex>& lock, F done) {
    settle_as_time_goes();
    while (mode_ == REAL && !done()) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
      settle_as_time_goes();
    }
    if (done()) return;
    streams_.settle(kEver);
    now_ = std::max(now_, streams_.ended());
  }

  std::mutex mutex_;
  Mode mode_ = INSTANT;
  int64_t now_ = 0;
  int64_t origin_ = 0;
  int64_t duration_ = 5000;
  int64_t last_stream_ = 0;
  int64_t memory_ = 0;
  int captures_ = 0;
  size_t alive_most_ = 0;
  Streams streams_;
  std::set<Event*> events_;
  std::map<std::string, int64_t> durations_;
  std::map<std::string, Failure> failures_;
  std::map<int64_t, std::array<int64_t, COUNTS>> counts_;
  std::string violations_;
};

// Never destroyed: tensors may be freed after the library's own statics.
inline Queues& queues() {
  static Queues& made = *new Queues;
  return made;
}

inline thread_local int current_device = 0;
inline thread_local std::array<int64_t, kDevices> current_streams{};
inline StreamKey current_stream(int device) { return {device, current_streams[device]}; }

}  // namespace simulated
