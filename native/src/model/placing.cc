#include "otel_torchprof/placing.h"

#include <algorithm>
#include <limits>

#include "roots.h"

namespace otp {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();

// Wraps around, as numpy's numbers do.
int64_t sum(int64_t one, int64_t other) {
  return static_cast<int64_t>(static_cast<uint64_t>(one) + static_cast<uint64_t>(other));
}

int64_t between(int64_t start, int64_t end) {
  return static_cast<int64_t>(static_cast<uint64_t>(end) - static_cast<uint64_t>(start));
}

// A value of a node: its row's, or its open event's.
template <typename Value>
Value of(const otp_nodes& nodes, const Value* rows, const Value* opens, uint64_t node) {
  return node < nodes.row_count ? rows[node] : opens[node - nodes.row_count];
}

// The nearest node around one that may be its parent, or -1.
int32_t nearest_parent(const otp_live_forest& f, uint64_t node, int64_t start, uint32_t context) {
  const otp_nodes& n = f.nodes;
  int32_t at = f.enclosing[node];
  for (; at >= 0; at = f.enclosing[at]) {
    const auto above = static_cast<uint64_t>(at);
    if (above < n.row_count && n.end[above] < start) continue;
    if (f.context != nullptr && of(n, f.context, f.open_context, above) != context) continue;
    if (f.is_long == nullptr || f.is_long[above] == 0 || f.step[above] == f.step[node]) break;
  }
  return at;
}

}  // namespace
}  // namespace otp

extern "C" uint64_t otp_lasting_rows(const otp_nodes* nodes, int64_t shortest, int64_t* rows) {
  uint64_t found = 0;
  for (uint64_t i = 0; i < nodes->row_count; ++i)
    if (otp::between(nodes->start[i], nodes->end[i]) >= shortest) rows[found++] = static_cast<int64_t>(i);
  return found;
}

extern "C" void otp_make_live_forest(otp_live_forest* forest) {
  otp_live_forest& f = *forest;
  const uint64_t rows = f.nodes.row_count, count = rows + f.nodes.open_count;
  for (uint64_t i = 0; i < rows; ++i)
    f.parent[i] = otp::nearest_parent(f, i, f.nodes.start[i], f.context == nullptr ? 0 : f.context[i]);
  for (uint64_t i = rows; i < count; ++i)
    f.parent[i] =
        otp::nearest_parent(f, i, f.nodes.open_start[i - rows], f.context == nullptr ? 0 : f.open_context[i - rows]);
  for (uint64_t i = 0; i < f.known_count; ++i) f.parent[f.known[i]] = f.known_parent[i];
  otp::fill_roots(count, f.parent, f.root);
  f.root_count = f.outer_count = f.moved = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const int32_t parent = f.parent[i];
    const bool is_outer = parent >= 0 && static_cast<uint64_t>(parent) >= rows;
    if (f.root[i] == static_cast<int32_t>(i)) f.roots[f.root_count++] = static_cast<int64_t>(i);
    if (i >= rows) continue;
    if (is_outer) f.outer[f.outer_count++] = static_cast<int64_t>(i);
    f.moved += (is_outer ? -1 : parent) != f.row_parent[i];
  }
}

extern "C" void otp_place(const otp_placing* placing) {
  const otp_placing& p = *placing;
  const otp_nodes& n = p.nodes;
  const uint64_t count = n.row_count + n.open_count;
  std::fill(p.sums, p.sums + p.group_count, otp_group_sums{otp::kMost, otp::kLeast, 0, 0, 0, 0});
  for (uint64_t i = 0; i < count; ++i) p.is_root[i] = p.parent[i] < 0;
  for (uint64_t i = 0; i < p.beyond_count; ++i) {
    const int64_t node = p.beyond[i];
    p.is_root[node] = 0;
    p.root_id[node] = p.beyond_root[i];
    if (static_cast<uint64_t>(node) < n.row_count) p.parent_span_id[node] = p.beyond_parent[i];
  }
  for (uint64_t i = 0; i < count; ++i) {
    const auto root = static_cast<uint64_t>(p.root[i]);
    const int64_t group = p.group[i] = p.group[root];
    if (p.group_root[group] != 0)
      p.root_id[i] = p.group_root[group];
    else
      p.root_id[i] = p.is_root[root] != 0 ? otp::of(n, p.span_id, p.open_span_id, root) : p.root_id[root];
    otp_group_sums& sums = p.sums[group];
    sums.start = std::min(sums.start, otp::of(n, n.start, n.open_start, i));
    if (i >= n.row_count) continue;
    if (p.parent[i] >= 0)
      p.parent_span_id[i] = otp::of(n, p.span_id, p.open_span_id, static_cast<uint64_t>(p.parent[i]));
    else if (p.is_root[i] != 0)
      p.parent_span_id[i] = p.group_parent[group];
    sums.end = std::max(sums.end, n.end[i]);
    if (p.is_loops[p.thread[i]] != 0) sums.own_end = std::max(sums.own_end, n.end[i]);
    ++sums.events;
    if (p.is_root[i] == 0) continue;
    const int64_t duration = otp::between(n.start[i], n.end[i]);
    sums.child_time = otp::sum(sums.child_time, duration);
    sums.longest = std::max(sums.longest, duration);
  }
  for (otp_group_sums* sums = p.sums; sums != p.sums + p.group_count; ++sums)
    sums->end = std::max(sums->start, sums->end);
}
