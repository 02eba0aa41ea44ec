// Pairs of timing events: those of each thread, and those that wait for the device.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

namespace otp::devices {

struct Pair {
  uint64_t id;  // of the event of the recorder
  uint32_t consumers;
  uint32_t moment;  // how many moments the device's clock knew at the begin
  c10::Stream stream;
  void* begin;
  void* end;
  const void* by;  // the thread, by its marks
  int64_t era;     // the token of the last session at the begin
};

// By device index.
using Spares = std::vector<std::vector<void*>>;

inline void* take_spare(Spares& spares, c10::DeviceIndex index) {
  auto at = static_cast<size_t>(index);
  if (at >= spares.size() || spares[at].empty()) return nullptr;
  void* event = spares[at].back();
  spares[at].pop_back();
  return event;
}

inline void give_spare(Spares& spares, c10::DeviceIndex index, void* event) {
  auto at = static_cast<size_t>(index);
  if (at >= spares.size()) spares.resize(at + 1);
  spares[at].push_back(event);
}

// What one thread has marked. The lock is its own but for whoever gathers what has ended, and for the end of
// everything: these wait for a while only, since a thread may stand in the device's library, whose queue is full.
struct ThreadMarks {
  std::timed_mutex mutex;
  std::vector<Pair> open;
  std::vector<Pair> ended;
  Spares spares;
};

// A device comes to what one thread has put on one stream in order, so only the border between what is done and what is
// not is looked for. What several threads put on the same stream is gathered from each, in another order than the
// stream's.
class Waiting {
 public:
  void add(const Pair& pair) {
    d_queues[{pair.stream.device_index(), pair.stream.id(), pair.by}].push_back({d_added++, pair});
    ++d_size;
  }

  // Takes out what is done and gives it to `resolve`.
  template <typename IsDone, typename Resolve>
  void take_done(IsDone is_done, Resolve resolve) {
    for (auto at = d_queues.begin(); at != d_queues.end();) {
      Queue& queue = at->second;
      for (size_t count = done(queue, is_done); count > 0; --count) {
        Pair pair = queue.front().pair;
        queue.pop_front();
        --d_size;
        resolve(pair);
      }
      at = queue.empty() ? d_queues.erase(at) : std::next(at);
    }
  }

  template <typename Resolve>
  void take_all(Resolve resolve) {
    take_done([](const Pair&) { return true; }, resolve);
  }

  size_t size() const { return d_size; }

  // A device that something waits for.
  std::optional<c10::DeviceIndex> device() const {
    return d_queues.empty() ? std::nullopt : std::optional(std::get<0>(d_queues.begin()->first));
  }

  template <typename Matches>
  size_t count(Matches matches) const {
    size_t sum = 0;
    for (const auto& [key, queue] : d_queues)
      for (const Numbered& one : queue) sum += matches(one.pair) ? 1 : 0;
    return sum;
  }

  // How many were ever added; and how many of the first so many still wait.
  uint64_t added() const { return d_added; }
  uint64_t before(uint64_t added) const {
    uint64_t sum = 0;
    for (const auto& [key, queue] : d_queues)
      for (auto one = queue.begin(); one != queue.end() && one->number < added; ++one) ++sum;
    return sum;
  }

 private:
  struct Numbered {
    uint64_t number;
    Pair pair;
  };
  using Queue = std::deque<Numbered>;

  // How many at the front are done. Where the device keeps up, one question says all.
  template <typename IsDone>
  static size_t done(const Queue& pairs, IsDone is_done) {
    if (pairs.empty()) return 0;
    if (is_done(pairs.back().pair)) return pairs.size();
    size_t known = 0, open = pairs.size() - 1;  // those before `known` are done, the one at `open` is not
    while (known < open) {
      size_t middle = known + (open - known) / 2;
      if (is_done(pairs[middle].pair)) {
        known = middle + 1;
      } else {
        open = middle;
      }
    }
    return known;
  }

  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, const void*>, Queue> d_queues;
  uint64_t d_added = 0;
  size_t d_size = 0;
};

}  // namespace otp::devices
