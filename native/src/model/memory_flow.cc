// What blocks of memory are used for, told from the flow of data between operators.
//
// The rules are those of torch's memory profiler (torch/profiler/_memory_profiler.py): gradients and parameters are
// known, and what they touch tells the rest. Each rule is one pass over the nodes, in their order or against it.
#include <cstdint>
#include <new>
#include <vector>

#include "otel_torchprof/model.h"

namespace {

using Marks = std::vector<uint8_t>;

class Flow {
 public:
  explicit Flow(const otp_memory_flow& flow) : d_flow(flow), d_of_state(flow.state_count, OTP_MEMORY_UNKNOWN) {}

  void run() {
    find_updated();
    set_inputs();
    set_parameters();
    set_activations();
    set_optimizer_state();
    set_autograd_detail();
    write();
  }

 private:
  struct Edge {
    int32_t block, reads, writes;
  };

  template <typename Visit>
  void edges(uint64_t node, Visit visit) const {
    for (int64_t i = d_flow.first_edge[node]; i < d_flow.first_edge[node + 1]; ++i)
      visit(Edge{d_flow.block[i], d_flow.reads[i], d_flow.writes[i]});
  }

  // What is known of a block holds for all of its states.
  uint8_t category(int32_t block, int32_t state) const {
    uint8_t known = d_flow.of_block[block];
    return known != OTP_MEMORY_UNKNOWN ? known : d_of_state[state];
  }
  bool is_gradient(int32_t block) const { return d_flow.of_block[block] == OTP_MEMORY_GRADIENT; }
  bool is_learnt(int32_t block) const { return is_gradient(block) || d_flow.of_block[block] == OTP_MEMORY_PARAMETER; }

  void set(int32_t state, otp_memory_category found) {
    if (d_of_state[state] == OTP_MEMORY_UNKNOWN) d_of_state[state] = found;
  }

  // The nodes that read each block, by block.
  void list_readers() {
    d_first_reader.assign(d_flow.block_count + 1, 0);
    for (uint64_t node = 0; node < d_flow.node_count; ++node)
      edges(node, [&](Edge e) { d_first_reader[e.block + 1] += e.reads >= 0 ? 1 : 0; });
    for (uint64_t block = 0; block < d_flow.block_count; ++block) d_first_reader[block + 1] += d_first_reader[block];
    d_readers.resize(d_first_reader[d_flow.block_count]);
    std::vector<uint64_t> next(d_first_reader.begin(), d_first_reader.end() - 1);
    for (uint64_t node = 0; node < d_flow.node_count; ++node)
      edges(node, [&](Edge e) {
        if (e.reads >= 0) d_readers[next[e.block]++] = node;
      });
  }

  // Blocks that at any time depend on a gradient or a parameter: what a node that read one of them wrote, whenever that
  // was. So a parameter is one of them from the first step on.
  void find_updated() {
    list_readers();
    d_updated.assign(d_flow.block_count, 0);
    Marks is_done(d_flow.node_count);
    std::vector<int32_t> open;
    auto mark = [&](int32_t block) {
      if (d_updated[block] != 0) return;
      d_updated[block] = 1;
      open.push_back(block);
    };
    for (uint64_t block = 0; block < d_flow.block_count; ++block)
      if (is_learnt(static_cast<int32_t>(block)) && d_first_reader[block] != d_first_reader[block + 1])
        mark(static_cast<int32_t>(block));
    while (!open.empty()) {
      int32_t block = open.back();
      open.pop_back();
      for (uint64_t i = d_first_reader[block]; i < d_first_reader[block + 1]; ++i) {
        uint64_t node = d_readers[i];
        if (is_done[node] != 0) continue;
        is_done[node] = 1;
        edges(node, [&](Edge e) {
          if (e.writes >= 0) mark(e.block);
        });
      }
    }
  }

  // Whatever leads to a gradient or to a parameter, does not depend on either and was not made in the backward pass.
  void set_inputs() {
    Marks leads(d_flow.state_count);
    for (uint64_t node = d_flow.node_count; node-- > 0;) {
      bool found = false;
      edges(node, [&](Edge e) {
        found |= ((e.reads >= 0 || e.writes >= 0) && is_learnt(e.block)) || (e.reads >= 0 && leads[e.reads] != 0) ||
                 (e.writes >= 0 && leads[e.writes] != 0);
      });
      if (!found) continue;
      edges(node, [&](Edge e) {
        if (e.reads >= 0) leads[e.reads] = 1;
        if (e.writes >= 0) leads[e.writes] = 1;
      });
    }
    for (uint64_t node = 0; node < d_flow.node_count; ++node) {
      if (d_flow.is_backward[node] == 0) continue;
      edges(node, [&](Edge e) {
        if (e.writes >= 0) leads[e.writes] = 0;
      });
    }
    for (uint64_t block = 0; block < d_flow.block_count; ++block) {
      if (d_updated[block] != 0) continue;
      for (int32_t state = d_flow.first_state[block]; state < d_flow.first_state[block + 1]; ++state)
        if (leads[state] != 0) set(state, OTP_MEMORY_INPUT);
    }
  }

  // Parameters of no module: read in the forward pass together with what comes from inputs, led to a gradient, and
  // depend on one.
  void set_parameters() {
    Marks forward(d_flow.state_count), beside(d_flow.state_count);
    for (uint64_t block = 0; block < d_flow.block_count; ++block)
      for (int32_t state = d_flow.first_state[block]; state < d_flow.first_state[block + 1]; ++state)
        forward[state] = category(static_cast<int32_t>(block), state) == OTP_MEMORY_INPUT;
    for (uint64_t node = 0; node < d_flow.node_count; ++node) {
      bool has_gradient = false, follows = false;
      edges(node, [&](Edge e) {
        has_gradient |= is_gradient(e.block) && (e.reads >= 0 || e.writes >= 0);
        follows |= e.reads >= 0 && forward[e.reads] != 0;
      });
      if (d_flow.is_backward[node] != 0 || has_gradient || !follows) continue;
      edges(node, [&](Edge e) {
        if (e.writes >= 0) forward[e.writes] = 1;
      });
      edges(node, [&](Edge e) {
        if (e.reads >= 0 && forward[e.reads] == 0) beside[e.reads] = 1;
      });
    }
    Marks used = used_for_gradients();
    for (uint64_t block = 0; block < d_flow.block_count; ++block) {
      if (d_updated[block] == 0) continue;
      bool found = false;
      for (int32_t state = d_flow.first_state[block]; state < d_flow.first_state[block + 1]; ++state)
        found |= beside[state] != 0 && used[state] != 0;
      if (found) d_flow.of_block[block] = OTP_MEMORY_PARAMETER;
    }
  }

  Marks used_for_gradients() const {
    Marks used(d_flow.state_count);
    for (uint64_t node = d_flow.node_count; node-- > 0;) {
      bool found = false;
      edges(node, [&](Edge e) { found |= e.writes >= 0 && (is_gradient(e.block) || used[e.writes] != 0); });
      if (!found) continue;
      edges(node, [&](Edge e) {
        if (e.reads >= 0) used[e.reads] = 1;
      });
    }
    return used;
  }

  // What the forward pass makes of inputs and parameters, and of what it made before.
  void set_activations() {
    for (uint64_t node = 0; node < d_flow.node_count; ++node) {
      if (d_flow.is_backward[node] != 0) continue;
      bool follows = false, has_other = false;
      edges(node, [&](Edge e) {
        if (e.reads < 0) return;
        uint8_t found = category(e.block, e.reads);
        bool is_source = found == OTP_MEMORY_INPUT || found == OTP_MEMORY_ACTIVATION;
        follows |= is_source;
        has_other |= !is_source && found != OTP_MEMORY_PARAMETER && found != OTP_MEMORY_TEMPORARY;
      });
      if (!follows || has_other) continue;
      edges(node, [&](Edge e) {
        if (e.writes >= 0) set(e.writes, OTP_MEMORY_ACTIVATION);
      });
    }
  }

  void set_optimizer_state() {
    for (uint64_t block = 0; block < d_flow.block_count; ++block)
      if (d_flow.is_optimizer_state[block] != 0) d_flow.of_block[block] = OTP_MEMORY_OPTIMIZER_STATE;
  }

  void set_autograd_detail() {
    for (uint64_t node = 0; node < d_flow.node_count; ++node) {
      if (d_flow.is_backward[node] == 0) continue;
      edges(node, [&](Edge e) {
        if (e.writes < 0) return;
        bool is_first = e.writes == d_flow.first_state[e.block];
        uint8_t before = is_first ? uint8_t{OTP_MEMORY_UNKNOWN} : category(e.block, e.writes - 1);
        if (before == OTP_MEMORY_UNKNOWN || before == OTP_MEMORY_AUTOGRAD_DETAIL)
          set(e.writes, OTP_MEMORY_AUTOGRAD_DETAIL);
      });
    }
  }

  void write() const {
    for (uint64_t block = 0; block < d_flow.block_count; ++block)
      for (int32_t state = d_flow.first_state[block]; state < d_flow.first_state[block + 1]; ++state)
        d_flow.of_state[state] = category(static_cast<int32_t>(block), state);
  }

  const otp_memory_flow& d_flow;
  Marks d_of_state;
  Marks d_updated;
  std::vector<uint64_t> d_first_reader;
  std::vector<uint64_t> d_readers;
};

}  // namespace

extern "C" int otp_memory_categories(const otp_memory_flow* flow) try {
  Flow(*flow).run();
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
