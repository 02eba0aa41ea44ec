// Attributes of events: which spans have them, and what is out of range.
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "otel_torchprof/model.h"
#include "otel_torchprof/record_format.h"

namespace {

using Named = std::vector<std::pair<uint32_t, uint32_t>>;
using Numbered = std::vector<std::pair<uint32_t, int64_t>>;

struct Event {
  uint8_t kind, scope;
  int64_t sequence_nr;
  uint32_t fwd_thread, thread;
  int64_t self_time;
};

struct Attributes {
  Numbered thread_id, op_sequence_nr, op_forward_thread;
  Named thread_name, op_scope;
  std::vector<double> self_duration;
  int result = 0;
};

const std::vector<uint32_t> kScopes{10, 11, 12}, kThreadNames{20, 0};
const std::vector<int64_t> kThreadIds{7'000'000'000, 8};

template <typename Values, typename Column>
Values pairs(const Column& column) {
  Values found;
  for (uint64_t i = 0; i < column.count; ++i) found.emplace_back(column.spans[i], column.values[i]);
  return found;
}

Attributes attributes(const std::vector<int64_t>& row, const std::vector<Event>& events) {
  std::vector<uint8_t> kind, scope;
  std::vector<int64_t> sequence_nr, self_time;
  std::vector<uint32_t> fwd_thread, thread;
  for (const Event& event : events) {
    kind.push_back(event.kind), scope.push_back(event.scope), sequence_nr.push_back(event.sequence_nr);
    fwd_thread.push_back(event.fwd_thread), thread.push_back(event.thread), self_time.push_back(event.self_time);
  }
  std::vector<uint32_t> spans;
  std::vector<int64_t> rows;
  for (uint32_t i = 0; i < row.size(); ++i)
    if (row[i] >= 0) spans.push_back(i), rows.push_back(row[i]);
  bool is_plain = true;
  for (uint64_t i = 0; i < rows.size(); ++i) is_plain = is_plain && rows[i] == static_cast<int64_t>(i);
  std::vector<std::vector<uint32_t>> narrow(5, std::vector<uint32_t>(spans.size()));
  std::vector<std::vector<int64_t>> wide(3, std::vector<int64_t>(spans.size()));
  Attributes found;
  found.self_duration.resize(spans.size());
  otp_event_attributes a{};
  a.count = spans.size(), a.span = spans.data(), a.row = is_plain ? nullptr : rows.data(), a.row_count = events.size();
  a.kind = kind.data(), a.scope = scope.data(), a.sequence_nr = sequence_nr.data(), a.self_time = self_time.data();
  a.fwd_thread = fwd_thread.data(), a.thread = thread.data();
  a.name_of_scope = kScopes.data(), a.scope_count = kScopes.size();
  a.name_of_thread = kThreadNames.data(), a.id_of_thread = kThreadIds.data(), a.thread_count = kThreadIds.size();
  a.thread_id = wide[0].data(), a.thread_name = narrow[0].data(), a.self_duration = found.self_duration.data();
  a.op_scope = {narrow[1].data(), narrow[2].data(), 0};
  a.op_sequence_nr = {narrow[3].data(), wide[1].data(), 0};
  a.op_forward_thread = {narrow[4].data(), wide[2].data(), 0};
  found.result = otp_make_event_attributes(&a);
  if (found.result != 0) return found;
  for (uint64_t i = 0; i < spans.size(); ++i) {
    found.thread_id.emplace_back(spans[i], a.thread_id[i]);
    if (a.thread_name[i] != 0) found.thread_name.emplace_back(spans[i], a.thread_name[i]);
  }
  found.op_scope = pairs<Named>(a.op_scope), found.op_sequence_nr = pairs<Numbered>(a.op_sequence_nr);
  found.op_forward_thread = pairs<Numbered>(a.op_forward_thread);
  return found;
}

void each_kind_has_its_own() {
  const auto found = attributes({-1, 1, 0, -1, 4, 3, 2}, {{OTP_EVENT_OPERATOR, 1, 5, 9, 0, 1'500'000'000},
                                                          {OTP_EVENT_LABEL, 2, -1, 0, 1, -3},
                                                          {OTP_EVENT_MODULE, 0, 6, 8, 0, 0},
                                                          {OTP_EVENT_FRAME, 0, 7, 8, 0, 0},
                                                          {OTP_EVENT_PHASE, 0, 8, 8, 0, 0}});
  CHECK_EQ(found.result, 0);
  const int64_t id = kThreadIds[0];
  CHECK(found.thread_id == (Numbered{{1, 8}, {2, id}, {4, id}, {5, id}, {6, id}}));
  CHECK(found.self_duration == (std::vector<double>{0, 1.5, 0, 0, 0}));
  CHECK(found.thread_name == (Named{{2, 20}, {4, 20}, {5, 20}, {6, 20}}));
  CHECK(found.op_scope == (Named{{1, 12}, {2, 11}}));
  CHECK(found.op_sequence_nr == (Numbered{{2, 5}, {5, 7}, {6, 6}}));
  CHECK(found.op_forward_thread == (Numbered{{2, 9}, {6, 8}}));
}

void unknown_scopes_have_no_name() {
  CHECK(attributes({0}, {{OTP_EVENT_OPERATOR, 3, -1, 0, 0, 0}}).op_scope.empty());
  CHECK(attributes({0}, {{255, 2, -1, 0, 0, 0}}).op_scope == (Named{{0, 12}}));
}

void what_is_out_of_range_is_refused() {
  const Event event{OTP_EVENT_OPERATOR, 0, -1, 0, 0, 0}, foreign{OTP_EVENT_OPERATOR, 0, -1, 0, 2, 0};
  CHECK_EQ(attributes({0, 1}, {event}).result, -1);
  CHECK_EQ(attributes({INT64_MAX}, {event}).result, -1);
  CHECK_EQ(attributes({0}, {foreign}).result, -1);
  CHECK_EQ(attributes({-1, INT64_MIN}, {foreign}).result, 0);  // of no event
  CHECK_EQ(attributes({}, {}).result, 0);
}

void all_events_are_there() {
  std::mt19937 random(7);
  std::vector<Event> events;
  for (int i = 0; i < 1'000; ++i) {
    events.push_back({static_cast<uint8_t>(1 + random() % 5), static_cast<uint8_t>(random() % 4),
                      static_cast<int64_t>(random() % 3) - 1, static_cast<uint32_t>(random() % 2),
                      static_cast<uint32_t>(random() % 2), static_cast<int64_t>(random())});
  }
  std::vector<int64_t> row;
  for (int i = 0; i < 2'000; ++i) row.push_back(static_cast<int64_t>(random() % 1'500) - 500);
  const auto found = attributes(row, events);
  uint64_t count = 0, numbered = 0;
  for (uint32_t i = 0; i < row.size(); ++i) {
    if (row[i] < 0) continue;
    const Event& event = events[static_cast<size_t>(row[i])];
    CHECK_EQ(found.thread_id[count], std::make_pair(i, kThreadIds[event.thread]));
    CHECK_EQ(found.self_duration[count++], static_cast<double>(event.self_time) / 1e9);
    if (event.sequence_nr < 0 || event.kind == OTP_EVENT_PHASE) continue;
    CHECK_EQ(found.op_sequence_nr[numbered++], std::make_pair(i, event.sequence_nr));
  }
  CHECK_EQ(found.thread_id.size(), count);
  CHECK_EQ(found.op_sequence_nr.size(), numbered);
}

}  // namespace

int main() {
  RUN(each_kind_has_its_own);
  RUN(unknown_scopes_have_no_name);
  RUN(what_is_out_of_range_is_refused);
  RUN(all_events_are_there);
}
