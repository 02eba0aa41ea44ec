// Drains: every event comes once, with its own end and its own parent, wherever a drain cuts.
#include <atomic>
#include <string>
#include <thread>

#include "core_support.h"

namespace {

otp_session_options here_only() { return options(kPlenty, OTP_FULL_DROP_NEWEST, 0); }

// Every event comes exactly once over many drains, under the right parent, also where that was drained before or is
// still open.
void open_events_cross_drains() {
  Session session;
  begin("root");
  begin("middle");
  leaf("leaf 1");
  Batch first(session.drain());
  CHECK_EQ(first->rows, 1u);
  CHECK_EQ(first->outer_count, 1u);
  uint64_t middle_id = first->outer_parent[0];
  leaf("leaf 2");
  Batch second(session.drain());
  CHECK_EQ(second->rows, 1u);
  CHECK_EQ(second.parent_id(0), middle_id);
  begin("inner");
  Batch third(session.drain());
  CHECK_EQ(third->rows, 0u);
  end("middle");  // out of order: its child stays open
  Batch fourth(session.drain());
  CHECK_EQ(fourth->rows, 1u);
  CHECK_EQ(fourth->id[fourth.row("middle")], middle_id);
  uint64_t root_id = fourth.parent_id(0);
  leaf("leaf 3");
  end("inner");
  session.stop();
  Batch last(session.drain());
  CHECK_EQ(last->rows, 3u);
  CHECK_EQ(last->id[last.row("root")], root_id);
  CHECK_EQ(last.parent_id(last.row("root")), 0u);
  CHECK_EQ(last.parent_id(last.row("inner")), middle_id);
  CHECK_EQ(last.parent_name("leaf 3"), "inner");
  CHECK_EQ(last->flags[last.row("root")], OTP_FLAG_UNFINISHED);
  CHECK_EQ(last->flags[last.row("inner")], 0);
  CHECK_EQ(last->end[last.row("root")], session.stats().stop_ns);
  for (const Batch* batch : {&first, &second, &fourth, &last}) batch->check_sound();
  CHECK_EQ(session.stats().recorded, 6u);
  CHECK_EQ(Batch(session.drain())->rows, 0u);
}

// What was known of an event at its begin is still there when it ends some drains later: inputs, error, flags, threads.
void pending_events_keep_their_columns() {
  Session session(options(kPlenty, OTP_FULL_DROP_NEWEST, 1, 1));
  int64_t words[] = {OTP_INPUT_TENSOR | 7 << 8 | int64_t{2} << 32, -5, INT64_MAX};
  for (const char* name : {"with inputs", "without", "with inputs too", "ends elsewhere"}) {
    otp_begin_args args = event(name, name);
    args.sequence_nr = 5;
    args.fwd_thread = 6;
    args.scope = 3;
    if (std::strcmp(name, "without") != 0) {
      args.inputs = words;
      args.input_words = 3;
      args.flags = OTP_FLAG_INPUTS_CUT;
    }
    CHECK(api().begin(&args) != 0);
  }
  uint32_t here = begin("id");
  end("id");
  for (int i = 0; i < 3; ++i) Batch(session.drain()).check_sound();
  std::thread([&] { CHECK_EQ(api().end_elsewhere("ends elsewhere", here, 0, 0, "E", 1), 1); }).join();
  end("with inputs");
  end("without");
  end("with inputs too");
  Batch batch(session.drain());
  session.stop();
  CHECK_EQ(batch->rows, 4u);
  batch.check_sound();
  for (uint64_t i = 0; i < 4; ++i) {
    bool inputs = batch.name(i) != "without", elsewhere = batch.name(i) == "ends elsewhere";
    CHECK_EQ(batch->sequence_nr[i], 5);
    CHECK_EQ(batch->fwd_thread[i], 6u);
    CHECK_EQ(batch->scope[i], 3);
    CHECK_EQ(batch->flags[i], (inputs ? OTP_FLAG_INPUTS_CUT : 0) | (elsewhere ? OTP_FLAG_ASYNC : 0));
    CHECK_EQ(batch->end_thread[i] != batch->thread[i], elsewhere);
    CHECK_EQ(batch.text(batch->error_type[i]), elsewhere ? "E" : "");
    CHECK_EQ(batch->inputs[i] >= 0, inputs);
    if (inputs) CHECK_EQ(std::memcmp(batch->input_words + batch->inputs[i], words, sizeof words), 0);
  }
}

// Rows with the same inputs share their words; all others have words of their own.
void rows_share_the_words_of_equal_inputs() {
  Session session(options(kPlenty, OTP_FULL_DROP_NEWEST, 1, 1));
  const std::vector<int64_t> some = {1, OTP_INPUT_INT, 4}, longer = {1, OTP_INPUT_INT, 4, 4},
                             others = {1, OTP_INPUT_INT, 5};
  for (const std::vector<int64_t>* words : {&some, &others, &some, &longer, &others, &some}) {
    otp_begin_args args = event("op", "op");
    args.inputs = words->data();
    args.input_words = static_cast<uint32_t>(words->size());
    CHECK(api().begin(&args) != 0);
    end("op");
  }
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->input_word_count, 10u);
  const std::vector<int64_t> found(batch->inputs, batch->inputs + batch->rows);
  CHECK(found == (std::vector<int64_t>{0, 3, 0, 6, 3, 0}));
  CHECK(std::equal(longer.begin(), longer.end(), batch->input_words + 6));
}

// Events that live drains cut anywhere come once each, with the parent and the end that they had.
void live_drains_cut_anywhere() {
  Session session(here_only());
  constexpr int kRounds = 3000 / kSlowdown;
  std::map<uint64_t, uint64_t> parents;  // by id
  std::map<uint64_t, std::string> names;
  auto take = [&] {
    Batch batch(session.drain());
    batch.check_sound();
    for (uint64_t i = 0; i < batch->rows; ++i) {
      CHECK(parents.emplace(batch->id[i], batch.parent_id(i)).second);
      names[batch->id[i]] = batch.name(i);
      CHECK_EQ(batch->flags[i], 0);
    }
  };
  uint64_t state = 1;
  auto maybe_take = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    if (state >> 62 == 0) take();
  };
  for (int i = 0; i < kRounds; ++i) {
    for (const char* name : {"a", "b", "c"}) {
      begin(name);
      maybe_take();
    }
    for (const char* name : {"c", "b", "a"}) {
      end(name);
      maybe_take();
    }
  }
  session.stop();
  take();
  CHECK_EQ(parents.size(), 3u * kRounds);
  for (auto& [id, parent] : parents) {
    std::string requested = names[id] == "a" ? "" : names[id] == "b" ? "a" : "b";
    CHECK_EQ(parent == 0 ? "" : names.at(parent), requested);
    if (parent != 0) CHECK_EQ(parent, id - 1);
  }
}

// Two threads that drain one session at the same time: one gets the events, the other its status.
void two_drains_at_once_do_not_meet() {
  Session session;
  constexpr int kEvents = 200000 / kSlowdown;
  std::atomic<uint64_t> rows{0};
  std::atomic<int> refused{0};
  std::atomic<bool> done{false};
  auto reader = [&] {
    while (!done.load()) {
      otp_batch* batch = nullptr;
      int status = otp_session_drain(session, 0, &batch);
      CHECK(status == OTP_OK || (status == OTP_E_STATE && batch == nullptr));
      refused += status != OTP_OK;
      if (batch != nullptr) rows += batch->rows;
      otp_batch_free(batch);
    }
  };
  std::thread one(reader), two(reader);
  for (int i = 0; i < kEvents || refused.load() == 0; ++i) {
    leaf("event");
    if (i >= kEvents) rows -= 1;
  }
  done.store(true);
  one.join();
  two.join();
  session.stop();
  rows += Batch(session.drain())->rows;
  CHECK_EQ(rows.load() + session.stats().dropped[OTP_LOSS_BUDGET], static_cast<uint64_t>(kEvents));
}

// A stop in the middle of another thread's drain harms neither: every event is in the one batch or in the next.
void a_stop_during_a_drain() {
  for (int round = 0; round < 30; ++round) {
    Session session(here_only());
    constexpr int kEvents = 20000 / kSlowdown;
    for (int i = 0; i < kEvents; ++i) leaf("event");
    uint64_t rows = 0;
    std::thread reader([&] { rows += Batch(session.drain())->rows; });
    session.stop();
    reader.join();
    rows += Batch(session.drain())->rows;
    CHECK_EQ(rows, static_cast<uint64_t>(kEvents));
  }
}

}  // namespace

int main() {
  RUN_CLEAN(open_events_cross_drains);
  RUN_CLEAN(pending_events_keep_their_columns);
  RUN_CLEAN(rows_share_the_words_of_equal_inputs);
  RUN_CLEAN(live_drains_cut_anywhere);
  RUN_CLEAN(two_drains_at_once_do_not_meet);
  RUN_CLEAN(a_stop_during_a_drain);
}
