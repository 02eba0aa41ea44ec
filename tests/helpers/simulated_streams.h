// The streams of the simulated device.
//
// A stream is a queue of items: work with a duration, marks (recorded events) and waits for marks. When an item
// completes, its times follow from the queue alone: it begins when the one before it has ended and it has been
// enqueued.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <utility>

namespace simulated {

constexpr int64_t kEver = std::numeric_limits<int64_t>::max();

// The device, and the number of the stream on it.
using StreamKey = std::pair<int, int64_t>;

// One recording of an event. A recording anew makes a new one: who waits, waits for the one that he saw.
struct Mark {
  bool done = false;
  bool captured = false;
  int64_t time = 0;
};

struct Event {
  int device;
  bool timed;
  std::shared_ptr<Mark> mark;
};

struct Item {
  int64_t enqueued;
  int64_t duration;
  std::shared_ptr<Mark> mark;
  bool wait;
};

struct Stream {
  std::deque<Item> items;
  int64_t ended = 0;
  bool capturing = false;
};

struct Streams {
  std::map<StreamKey, Stream> all;

  Stream& at(StreamKey key) { return all[key]; }

  int64_t ended() const {
    int64_t last = 0;
    for (const auto& one : all) last = std::max(last, one.second.ended);
    return last;
  }

  // Completes the first item if it ends by then and what it waits for is done.
  static bool step(Stream& stream, int64_t limit) {
    if (stream.items.empty()) return false;
    const Item& item = stream.items.front();
    if (item.wait && !item.mark->done) return false;
    const int64_t waited = item.wait ? item.mark->time : 0;
    const int64_t end = std::max({stream.ended, item.enqueued, waited}) + item.duration;
    if (end > limit) return false;
    stream.ended = end;
    if (item.mark && !item.wait) {
      item.mark->done = true;
      item.mark->time = end;
    }
    stream.items.pop_front();
    return true;
  }

  // Completes what ends by then, on all streams.
  void settle(int64_t limit) {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& one : all)
        while (step(one.second, limit)) moved = true;
    }
  }
};

}  // namespace simulated
