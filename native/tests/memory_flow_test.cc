// What memory is used for, told from the flow of data.
#include <cstdint>
#include <utility>
#include <vector>

#include "check.h"
#include "otel_torchprof/model.h"

namespace {

// Nodes and their edges, and what is known of the blocks.
struct Flow {
  std::vector<int64_t> first_edge{0};
  std::vector<uint8_t> is_backward;
  std::vector<int32_t> block, reads, writes;
  std::vector<int32_t> states;  // per block: how many
  std::vector<uint8_t> of_block, is_optimizer_state;

  int32_t add_block(uint8_t known = OTP_MEMORY_UNKNOWN, bool is_state = false) {
    states.push_back(1);
    of_block.push_back(known);
    is_optimizer_state.push_back(is_state);
    return static_cast<int32_t>(states.size()) - 1;
  }

  // A node that reads the first and makes the second; states are of the block, not of all.
  void add_node(const std::vector<int32_t>& read, const std::vector<int32_t>& made, bool backward = false,
                const std::vector<int32_t>& changed = {}) {
    for (int32_t b : read) add_edge(b, states[b] - 1, -1);
    for (int32_t b : made) add_edge(b, -1, 0);
    for (int32_t b : changed) {
      add_edge(b, states[b] - 1, states[b]);
      ++states[b];
    }
    first_edge.push_back(static_cast<int64_t>(block.size()));
    is_backward.push_back(backward ? 1 : 0);
  }

  // The categories of each block's states.
  std::vector<std::vector<int>> run() {
    std::vector<int32_t> first{0};
    for (int32_t count : states) first.push_back(first.back() + count);
    for (size_t i = 0; i < block.size(); ++i) {
      if (reads[i] >= 0) reads[i] += first[block[i]];
      if (writes[i] >= 0) writes[i] += first[block[i]];
    }
    std::vector<uint8_t> of_state(first.back());
    const otp_memory_flow flow{
        is_backward.size(), states.size(),  of_state.size(), first_edge.data(), is_backward.data(),
        block.data(),       reads.data(),   writes.data(),   first.data(),      is_optimizer_state.data(),
        of_block.data(),    of_state.data()};
    CHECK_EQ(otp_memory_categories(&flow), 0);
    std::vector<std::vector<int>> found;
    for (size_t b = 0; b < states.size(); ++b)
      found.emplace_back(of_state.begin() + first[b], of_state.begin() + first[b + 1]);
    return found;
  }

 private:
  void add_edge(int32_t of, int32_t read, int32_t written) {
    block.push_back(of);
    reads.push_back(read);
    writes.push_back(written);
  }
};

using Found = std::vector<int>;

constexpr int kParameter = OTP_MEMORY_PARAMETER, kInput = OTP_MEMORY_INPUT, kActivation = OTP_MEMORY_ACTIVATION,
              kGradient = OTP_MEMORY_GRADIENT, kDetail = OTP_MEMORY_AUTOGRAD_DETAIL, kUnknown = OTP_MEMORY_UNKNOWN,
              kState = OTP_MEMORY_OPTIMIZER_STATE;

// A step of training, with the weight known or not.
void a_step(uint8_t known) {
  Flow flow;
  const int32_t x = flow.add_block(), weight = flow.add_block(known), y = flow.add_block(), loss = flow.add_block(),
                seed = flow.add_block(), detail = flow.add_block(), gradient = flow.add_block(OTP_MEMORY_GRADIENT),
                moment = flow.add_block(OTP_MEMORY_UNKNOWN, true), other = flow.add_block();
  flow.add_node({}, {x});
  flow.add_node({x, weight}, {y});
  flow.add_node({y}, {loss});
  flow.add_node({loss}, {seed});
  flow.add_node({seed}, {detail}, true);
  flow.add_node({detail, x}, {gradient}, true);
  flow.add_node({gradient}, {moment});
  flow.add_node({moment}, {}, false, {weight});
  flow.add_node({}, {other});
  const auto found = flow.run();
  CHECK(found[x] == (Found{kInput}));
  CHECK(found[weight] == (Found{kParameter, kParameter}));
  CHECK(found[y] == (Found{kActivation}) && found[loss] == (Found{kActivation}) && found[seed] == (Found{kActivation}));
  CHECK(found[detail] == (Found{kDetail}));
  CHECK(found[gradient] == (Found{kGradient}));
  CHECK(found[moment] == (Found{kState}));
  CHECK(found[other] == (Found{kUnknown}));
}

void a_step_with_a_known_weight() { a_step(OTP_MEMORY_PARAMETER); }
void a_step_tells_of_the_weight() { a_step(OTP_MEMORY_UNKNOWN); }

void without_gradients_and_parameters_all_is_unknown() {
  Flow flow;
  const int32_t a = flow.add_block(), b = flow.add_block();
  flow.add_node({}, {a});
  flow.add_node({a}, {b});
  const auto found = flow.run();
  CHECK(found[a] == (Found{kUnknown}) && found[b] == (Found{kUnknown}));
}

void a_block_changes_its_use() {
  Flow flow;
  const int32_t x = flow.add_block(), weight = flow.add_block(OTP_MEMORY_PARAMETER), y = flow.add_block();
  flow.add_node({}, {x});
  flow.add_node({x, weight}, {y});
  flow.add_node({}, {}, false, {x});
  const auto found = flow.run();
  CHECK(found[y] == (Found{kActivation}));
  CHECK(found[x] == (Found{kInput, kActivation}));
}

void nothing_is_nothing() {
  Flow flow;
  CHECK(flow.run().empty());
}

void outermost_flags() {
  const std::vector<int32_t> parent{-1, 0, 1, 1, -1, 4};
  const std::vector<uint8_t> flags{0, 1, 1, 0, 0, 1};
  std::vector<int32_t> found(6);
  otp_top_level(6, parent.data(), flags.data(), found.data());
  CHECK(found == (std::vector<int32_t>{-1, 1, 1, 1, -1, 5}));
}

// In any order, and where parents go round.
void topmost_ancestors() {
  const std::vector<int64_t> parent{3, 0, -1, 2, 5, 6, 5};
  std::vector<int64_t> roots(7);
  otp_roots(7, parent.data(), roots.data());
  CHECK((std::vector<int64_t>(roots.begin(), roots.begin() + 4) == std::vector<int64_t>{2, 2, 2, 2}));
  for (size_t i = 4; i < 7; ++i) CHECK(roots[i] == 5 || roots[i] == 6);
}

void sums_of_groups() {
  const std::vector<uint32_t> group{1, 0, 1};
  const std::vector<int64_t> values{1, 2, INT64_MAX};
  std::vector<int64_t> first{-1, 5}, counts{0, 2}, sums{0, 1};
  const int64_t* const columns[] = {values.data()};
  int64_t* const of_groups[] = {sums.data()};
  otp_add_to_groups(3, group.data(), 10, first.data(), counts.data(), 1, columns, of_groups);
  CHECK((first == std::vector<int64_t>{11, 5}));
  CHECK((counts == std::vector<int64_t>{1, 4}));
  CHECK((sums == std::vector<int64_t>{2, INT64_MIN + 1}));
}

}  // namespace

int main() {
  RUN(a_step_with_a_known_weight);
  RUN(a_step_tells_of_the_weight);
  RUN(without_gradients_and_parameters_all_is_unknown);
  RUN(a_block_changes_its_use);
  RUN(nothing_is_nothing);
  RUN(outermost_flags);
  RUN(topmost_ancestors);
  RUN(sums_of_groups);
  return 0;
}
