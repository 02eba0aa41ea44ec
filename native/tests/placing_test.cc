// Placing: parents and trees of nodes against a walk, the ids that they get, and what is summed by trace group.
#include "otel_torchprof/placing.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

namespace {

constexpr int64_t kMost = INT64_MAX;

// Rows, then open events, with room for what is made of them.
struct Forest {
  std::vector<int64_t> start, end, step, known, roots, outer;
  std::vector<uint32_t> context;
  std::vector<int32_t> enclosing, known_parent, row_parent, parent, root;
  std::vector<uint8_t> is_long;
  otp_live_forest native{};

  uint64_t rows() const { return end.size(); }
  uint64_t count() const { return start.size(); }

  otp_nodes nodes() const { return {rows(), count() - rows(), start.data(), end.data(), start.data() + rows()}; }

  void make() {
    parent.resize(count()), root.resize(count()), roots.resize(count()), outer.resize(rows());
    row_parent.resize(rows(), -1);
    native.nodes = nodes();
    if (!context.empty()) native.context = context.data(), native.open_context = context.data() + rows();
    if (!is_long.empty()) native.is_long = is_long.data(), native.step = step.data();
    native.enclosing = enclosing.data(), native.row_parent = row_parent.data();
    native.known_count = known.size(), native.known = known.data(), native.known_parent = known_parent.data();
    native.parent = parent.data(), native.root = root.data();
    native.roots = roots.data(), native.outer = outer.data();
    otp_make_live_forest(&native);
    roots.resize(native.root_count), outer.resize(native.outer_count);
  }
};

void parents_have_the_context_the_time_and_the_step() {
  // 0 around 1 around 2; 3 is open, around 4 and 5, and 0 is around 3.
  Forest forest;
  forest.start = {0, 10, 20, 60, 70, 5}, forest.end = {50, 30, 25, 65, 75};
  forest.enclosing = {-1, 0, 1, 5, 5, 0};
  forest.make();
  CHECK((forest.parent == std::vector<int32_t>{-1, 0, 1, 5, 5, 0}));
  CHECK((forest.root == std::vector<int32_t>{0, 0, 0, 0, 0, 0}));
  CHECK((forest.roots == std::vector<int64_t>{0}));
  CHECK((forest.outer == std::vector<int64_t>{3, 4}));
  CHECK_EQ(forest.native.moved, 2U);  // of -1, 0 and 1 the last two differ from what the drain gave

  forest.context = {0, 1, 0, 0, 0, 0};
  forest.make();
  CHECK((forest.parent == std::vector<int32_t>{-1, -1, 0, 5, 5, 0}));
  forest.is_long = {1, 0, 0, 0, 0, 1}, forest.step = {0, 0, 1, 0, 1, 0};
  forest.make();
  CHECK((forest.parent == std::vector<int32_t>{-1, -1, -1, 5, -1, 0}));
  forest.known = {4, 0}, forest.known_parent = {3, -1};
  forest.make();
  CHECK((forest.parent == std::vector<int32_t>{-1, -1, -1, 5, 3, 0}));
  forest.start[5] = 51;  // after the end of 0
  forest.make();
  CHECK((forest.roots == std::vector<int64_t>{0, 1, 2, 5}));
}

void every_node_has_a_root_of_its_own_in_a_circle() {
  Forest forest;
  forest.start.resize(5), forest.end.resize(5, 9);
  forest.enclosing = {1, 2, 1, -1, 3};
  forest.make();
  for (const int32_t root : forest.root) CHECK_EQ(forest.root[static_cast<size_t>(root)], root);
  CHECK(std::find(forest.roots.begin(), forest.roots.end(), forest.root[0]) != forest.roots.end());
}

Forest random_forest(std::mt19937_64* random) {
  const auto below = [random](int64_t bound) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(bound));
  };
  Forest forest;
  const int64_t rows = below(40), count = rows + below(8);
  for (int64_t i = 0; i < count; ++i) {
    forest.start.push_back(below(50));
    if (i < rows) forest.end.push_back(forest.start.back() + below(60));
    const bool has_open =
        i < rows && count > rows && below(4) == 0;  // else an earlier node; open ones by rising number
    forest.enclosing.push_back(static_cast<int32_t>(has_open ? rows + below(count - rows) : below(i + 1) - 1));
    forest.context.push_back(static_cast<uint32_t>(below(3)));
    forest.is_long.push_back(below(5) == 0);
    forest.step.push_back(below(2));
  }
  for (int32_t& at : forest.enclosing)  // no circles through open events
    if (&at - forest.enclosing.data() >= rows && at < rows) at = -1;
  if (below(3) == 0) forest.context.clear();
  if (below(3) == 0) forest.is_long.clear();
  return forest;
}

void forests_are_those_of_a_walk() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 3000; ++round) {
    Forest forest = random_forest(&random);
    forest.make();
    std::vector<int64_t> roots, outer;
    for (size_t i = 0; i < forest.count(); ++i) {
      int32_t above = forest.enclosing[i];
      for (; above >= 0; above = forest.enclosing[static_cast<size_t>(above)]) {
        const auto at = static_cast<size_t>(above);
        const bool is_open = at >= forest.rows() || forest.end[at] >= forest.start[i];
        const bool is_alike = forest.context.empty() || forest.context[at] == forest.context[i];
        const bool is_near = forest.is_long.empty() || forest.is_long[at] == 0 || forest.step[at] == forest.step[i];
        if (is_open && is_alike && is_near) break;
      }
      CHECK_EQ(forest.parent[i], above);
      size_t top = i;
      while (forest.parent[top] >= 0) top = static_cast<size_t>(forest.parent[top]);
      CHECK_EQ(forest.root[i], static_cast<int32_t>(top));
      if (above < 0) roots.push_back(static_cast<int64_t>(i));
      if (i < forest.rows() && above >= static_cast<int32_t>(forest.rows())) outer.push_back(static_cast<int64_t>(i));
    }
    CHECK(forest.roots == roots);
    CHECK(forest.outer == outer);
  }
}

void long_rows() {
  const std::vector<int64_t> start{0, 5, INT64_MIN}, end{4, 10, INT64_MIN + 5};
  std::vector<int64_t> rows(3);
  const otp_nodes nodes{3, 0, start.data(), end.data(), nullptr};
  CHECK_EQ(otp_lasting_rows(&nodes, 5, rows.data()), 2U);
  CHECK((rows == std::vector<int64_t>{1, 2, 0}));
  CHECK_EQ(otp_lasting_rows(&nodes, kMost, rows.data()), 0U);
}

// Rows 0 to 3 and the open events 4 and 5: 1 is below 0, 2 below the open 4, 3 and 5 below parents of earlier drains.
void ids_and_sums() {
  const std::vector<int64_t> start{10, 11, 20, 30, 5, 40}, end{19, 15, 28, 39};
  const std::vector<uint32_t> thread{0, 1, 0, 1};
  const std::vector<uint8_t> is_loops{1, 0};
  const std::vector<int32_t> parent{-1, 0, 4, -1, -1, -1}, root{0, 0, 4, 3, 4, 5};
  const std::vector<uint64_t> span_id{100, 101, 102, 103}, open_span_id{104, 105};
  const std::vector<int64_t> beyond{3, 5};
  const std::vector<uint64_t> beyond_parent{203, 205}, beyond_root{303, 305}, group_parent{1, 2, 3, 4},
      group_root{1, 0, 0, 4};
  std::vector<int64_t> group{0, -1, -1, 1, 2, 2};
  std::vector<uint64_t> root_id(6), parent_span_id(4);
  std::vector<uint8_t> is_root(6);
  std::vector<otp_group_sums> sums(4);
  const otp_placing placing{{4, 2, start.data(), end.data(), start.data() + 4},
                            thread.data(),
                            is_loops.data(),
                            parent.data(),
                            root.data(),
                            span_id.data(),
                            open_span_id.data(),
                            2,
                            beyond.data(),
                            beyond_parent.data(),
                            beyond_root.data(),
                            4,
                            group_parent.data(),
                            group_root.data(),
                            group.data(),
                            root_id.data(),
                            parent_span_id.data(),
                            is_root.data(),
                            sums.data()};
  otp_place(&placing);
  CHECK((group == std::vector<int64_t>{0, 0, 2, 1, 2, 2}));
  CHECK((root_id == std::vector<uint64_t>{1, 1, 104, 303, 104, 305}));
  CHECK((parent_span_id == std::vector<uint64_t>{1, 100, 104, 203}));
  CHECK((is_root == std::vector<uint8_t>{1, 0, 0, 0, 1, 0}));
  const int64_t expected[4][6] = {
      {10, 19, 19, 9, 9, 2}, {30, 39, 0, 0, 0, 1}, {5, 28, 28, 0, 0, 1}, {kMost, kMost, 0, 0, 0, 0}};
  for (size_t i = 0; i < 4; ++i) {
    const otp_group_sums& of = sums[i];
    const int64_t actual[] = {of.start, of.end, of.own_end, of.child_time, of.longest, of.events};
    CHECK(std::equal(actual, actual + 6, expected[i]));
  }
}

void nothing_is_placed() {
  Forest forest;
  forest.make();
  CHECK_EQ(forest.native.root_count + forest.native.outer_count + forest.native.moved, 0U);
  const otp_placing placing{};
  otp_place(&placing);
}

}  // namespace

int main() {
  RUN(parents_have_the_context_the_time_and_the_step);
  RUN(every_node_has_a_root_of_its_own_in_a_circle);
  RUN(forests_are_those_of_a_walk);
  RUN(long_rows);
  RUN(ids_and_sums);
  RUN(nothing_is_placed);
  return 0;
}
