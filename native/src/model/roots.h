// The topmost ancestor of each node of a forest.
#ifndef OTEL_TORCHPROF_SRC_MODEL_ROOTS_H_
#define OTEL_TORCHPROF_SRC_MODEL_ROOTS_H_

#include <algorithm>
#include <cstdint>

namespace otp {

// Mostly a node's parent comes before it, and its root is known. Else up to a node whose root is known, then the same
// way again to tell all on it. What is on the way has itself meanwhile, so that a circle ends where it began.
template <typename Node>
void fill_roots(uint64_t count, const Node* parent, Node* roots) {
  std::fill(roots, roots + count, -1);
  for (uint64_t i = 0; i < count; ++i) {
    if (roots[i] >= 0) continue;
    auto at = static_cast<Node>(i);
    if (parent[i] >= 0 && roots[parent[i]] >= 0) {
      roots[i] = roots[parent[i]];
      continue;
    }
    while (roots[at] < 0 && parent[at] >= 0) {
      roots[at] = at;
      at = parent[at];
    }
    const Node root = roots[at] < 0 ? at : roots[at];
    for (at = static_cast<Node>(i); at >= 0 && roots[at] != root; at = parent[at]) roots[at] = root;
  }
}

}  // namespace otp

#endif  // OTEL_TORCHPROF_SRC_MODEL_ROOTS_H_
