// Spans as a forest: depths, and the order level by level in which sums go up. Parents may come after their children,
// may be missing, and may form circles: whatever somebody's ids say.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "otel_torchprof/model.h"

namespace otp {
namespace {

constexpr int64_t kUnknown = -1;
constexpr int64_t kOnPath = -2;
constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();  // in a circle, or below one

class SpanTree {
 public:
  explicit SpanTree(const otp_span_tree& tree) : t_(tree), depth_(tree.count, kUnknown) {}

  void fill() {
    for (uint64_t i = 0; i < t_.count; ++i) {
      if (depth_[i] == kUnknown) climb(i);
    }
    sort();
  }

 private:
  // Each row on the way up to one whose depth is known, the highest first.
  void climb(uint64_t row) {
    path_.clear();
    int64_t at = static_cast<int64_t>(row);
    while (at >= 0 && depth_[at] == kUnknown) {
      depth_[at] = kOnPath;
      path_.push_back(at);
      at = t_.parent[at];
    }
    int64_t above = at < 0 ? -1 : depth_[at] == kOnPath ? kEndless : depth_[at];
    for (; !path_.empty(); path_.pop_back()) {
      const int64_t now = path_.back();
      depth_[now] = above == kEndless ? kEndless : above + 1;
      above = depth_[now];
      place(now);
    }
  }

  void place(int64_t row) {
    const int64_t depth = depth_[row], parent = t_.parent[row];
    if (depth == kEndless || parent < 0) {
      t_.above[row] = -1;
      t_.depth[row] = 0;
      if (parent >= 0) t_.family[row] = 0;
      return;
    }
    // What is too deep hangs under the last ancestor that has room, as its own parent does.
    t_.above[row] = depth > t_.deepest ? t_.above[parent] : parent;
    t_.depth[row] = std::min(depth, t_.deepest);
    t_.family[row] = t_.above[row] + 1;
  }

  // From `by_start`, stable: by thread, then by family, then by depth.
  void sort() {
    std::vector<int64_t> other(t_.by_start, t_.by_start + t_.count);
    count_out(other.data(), t_.order, t_.thread, t_.thread_count);
    count_out(t_.order, other.data(), t_.family, t_.count + 1);
    count_out(other.data(), t_.order, t_.depth, static_cast<uint64_t>(t_.deepest) + 1);
  }

  void count_out(const int64_t* from, int64_t* to, const int64_t* key, uint64_t keys) {
    counts_.assign(keys + 1, 0);
    for (uint64_t i = 0; i < t_.count; ++i) ++counts_[key[i] + 1];
    for (uint64_t i = 0; i < keys; ++i) counts_[i + 1] += counts_[i];
    for (uint64_t i = 0; i < t_.count; ++i) to[counts_[key[from[i]]]++] = from[i];
  }

  const otp_span_tree& t_;
  std::vector<int64_t> depth_;
  std::vector<int64_t> path_;
  std::vector<uint64_t> counts_;
};

}  // namespace
}  // namespace otp

extern "C" int otp_make_span_tree(const otp_span_tree* tree) {
  try {
    otp::SpanTree(*tree).fill();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

extern "C" void otp_raise_sums(uint64_t count, const int64_t* order, const int64_t* above, int64_t* values) {
  for (uint64_t i = count; i-- > 0;) {
    const int64_t row = order[i];
    if (above[row] >= 0) values[above[row]] += values[row];
  }
}

extern "C" void otp_raise_highest(uint64_t count, const int64_t* order, const int64_t* above, int64_t* values) {
  for (uint64_t i = count; i-- > 0;) {
    const int64_t row = order[i];
    if (above[row] >= 0) values[above[row]] = std::max(values[above[row]], values[row]);
  }
}
