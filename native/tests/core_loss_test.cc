// Budgets: nothing is lost without being counted, and what stays is what the policy promises.
#include <algorithm>
#include <atomic>
#include <thread>

#include "core_support.h"

namespace {

// The number of an event, kept in its sequence number.
void numbered(int64_t number, const void* key, const char* name) {
  otp_begin_args args = event(key, name);
  args.sequence_nr = number;
  CHECK(api().begin(&args) != 0);
}

void numbered_leaf(int64_t number) {
  numbered(number, "leaf", "leaf");
  CHECK_EQ(end("leaf"), 1);
}

// Runs `work(i)` on as many threads at the same time.
template <typename Work>
void on_threads(int count, Work work) {
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      ready.fetch_add(1);
      while (ready.load() < count) std::this_thread::yield();
      work(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What several drains of one session brought.
struct Tally {
  uint64_t rows = 0, unfinished = 0;
  uint64_t dropped[OTP_LOSS_REASONS] = {};
  std::map<uint32_t, std::vector<int64_t>> numbers;  // by thread, in the order of the rows
  std::map<uint64_t, int> ids;

  void add(const Batch& batch) {
    batch.check_sound();
    rows += batch->rows;
    for (int i = 0; i < OTP_LOSS_REASONS; ++i) dropped[i] += batch->dropped[i];
    for (uint64_t i = 0; i < batch->rows; ++i) {
      CHECK_EQ(++ids[batch->id[i]], 1);
      numbers[batch->threads[batch->thread[i]].id].push_back(batch->sequence_nr[i]);
      unfinished += (batch->flags[i] & OTP_FLAG_UNFINISHED) != 0;
    }
  }
  uint64_t all_dropped() const { return dropped[0] + dropped[1] + dropped[2] + dropped[3]; }
};

constexpr int kThreads = 8;
constexpr int64_t kPerThread = 200000 / kSlowdown;

// Eight threads at full speed for two consumers, one that keeps the oldest in a small budget and one that keeps the
// newest and is drained meanwhile: each gets or counts every event, once.
void every_event_is_kept_or_counted() {
  Session bounded(options(40 * OTP_CHUNK_BYTES));
  Session live(options(24 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  std::atomic<bool> done{false};
  Tally of_live, of_bounded;
  std::thread reader([&] {
    while (!done.load()) of_live.add(Batch(live.drain()));
  });
  on_threads(kThreads, [&](int) {
    for (int64_t i = 0; i < kPerThread / 2; ++i) {
      numbered(2 * i, "outer", "outer");
      numbered_leaf(2 * i + 1);
      CHECK_EQ(end("outer"), 1);
    }
  });
  done.store(true);
  reader.join();
  live.stop();
  bounded.stop();
  of_live.add(Batch(live.drain()));
  of_bounded.add(Batch(bounded.drain()));
  constexpr uint64_t kProduced = kThreads * kPerThread;
  for (auto* pair : {&of_live, &of_bounded}) {
    CHECK_EQ(pair->rows + pair->all_dropped(), kProduced);
    CHECK_EQ(pair->unfinished, 0u);
    CHECK_EQ(pair->dropped[OTP_LOSS_DEPTH] + pair->dropped[OTP_LOSS_NO_MEMORY], 0u);
  }
  CHECK(of_bounded.dropped[OTP_LOSS_BUDGET] > 0);
  CHECK_EQ(of_bounded.dropped[OTP_LOSS_EVICTED], 0u);
  for (auto& [thread, numbers] : of_bounded.numbers)  // the oldest: no number is missing among those that are there
    for (size_t i = 0; i < numbers.size(); ++i) CHECK_EQ(numbers[i], static_cast<int64_t>(i));
  CHECK_EQ(live.stats().recorded, of_live.rows);
  CHECK(live.stats().bytes_buffered_max <= 24u * OTP_CHUNK_BYTES);
  CHECK(bounded.stats().bytes_buffered_max <= 40u * OTP_CHUNK_BYTES);
}

// A session that keeps the oldest has the first events, whole, and counts the others under the budget.
void drop_newest_keeps_the_oldest() {
  Session session(options(2 * OTP_CHUNK_BYTES));
  constexpr int64_t kEvents = 20000;
  numbered(0, "outer", "outer");
  for (int64_t i = 1; i < kEvents; ++i) numbered_leaf(i);
  CHECK_EQ(end("outer"), 1);  // begun inside the budget, ended far outside
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_BUDGET], static_cast<uint64_t>(kEvents));
  CHECK_EQ(batch->dropped[OTP_LOSS_BUDGET], batch.dropped());
  CHECK(batch->rows > 2 * OTP_CHUNK_BYTES / 48 - 16);  // 48 bytes each
  for (uint64_t i = 0; i < batch->rows; ++i) {
    CHECK_EQ(batch->sequence_nr[i], static_cast<int64_t>(i));
    CHECK_EQ(batch->flags[i], 0);
    CHECK(batch->end[i] <= batch->end[0]);
    CHECK_EQ(batch->parent[i], i == 0 ? -1 : 0);
  }
  CHECK(batch->end[0] > batch->end[batch->rows - 1]);
}

// A session that keeps the newest has the last events without a gap, marks the first of them, and counts the others.
void drop_oldest_keeps_the_newest() {
  Session session(options(3 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  constexpr int64_t kEvents = 20000;
  for (int64_t i = 0; i < kEvents; ++i) numbered_leaf(i);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_EVICTED], static_cast<uint64_t>(kEvents));
  CHECK_EQ(batch->dropped[OTP_LOSS_EVICTED], batch.dropped());
  CHECK(batch->rows > 2 * OTP_CHUNK_BYTES / 48 - 16);
  for (uint64_t i = 0; i < batch->rows; ++i) {
    CHECK_EQ(batch->sequence_nr[i], kEvents - static_cast<int64_t>(batch->rows - i));
    CHECK_EQ(batch->flags[i], i == 0 ? OTP_FLAG_LOSS_BEFORE : 0);
  }
}

// The newest stay even where the budget is one chunk.
void one_chunk_is_enough_for_the_newest() {
  Session session(options(OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  constexpr int64_t kEvents = 20000;
  for (int64_t i = 0; i < kEvents; ++i) numbered_leaf(i);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_EVICTED], static_cast<uint64_t>(kEvents));
  CHECK(batch->rows > 0);
  CHECK_EQ(batch->sequence_nr[batch->rows - 1], kEvents - 1);
}

// An event that was drained open keeps its true end though the chunk that the end lay in was evicted.
void an_eviction_keeps_the_ends_of_what_was_drained() {
  Session session(options(2 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  begin("long");
  begin("failed");
  Batch first(session.drain());
  CHECK_EQ(first->rows, 0u);
  CHECK_EQ(api().end("failed", OTP_FLAG_ERROR, "KeyError", 8), 1);
  CHECK_EQ(end("long"), 1);
  for (int64_t i = 0; i < 10000; ++i) numbered_leaf(i);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  uint64_t row = batch.row("long"), failed = batch.row("failed");
  CHECK(batch->dropped[OTP_LOSS_EVICTED] > 0);
  CHECK_EQ(batch->flags[row], 0);
  CHECK_EQ(batch->flags[failed], OTP_FLAG_ERROR);
  CHECK_EQ(batch.text(batch->error_type[failed]), "KeyError");
  CHECK_EQ(batch->end_thread[row], batch->thread[row]);
  CHECK(batch->end[failed] <= batch->end[row]);
  CHECK(batch->end[row] < batch->start[batch->rows - 1]);
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_EVICTED], 10002u);
}

// The mark of a loss is on the first event after the gap, not on one before it that was still there.
void the_mark_is_on_the_event_after_the_gap() {
  Session session(options(OTP_CHUNK_BYTES));
  int64_t number = 0;
  while (session.stats().dropped[OTP_LOSS_BUDGET] == 0) numbered_leaf(number++);
  for (int i = 0; i < 5; ++i) numbered_leaf(number++);
  Batch first(session.drain());
  CHECK_EQ(first->rows + 6, static_cast<uint64_t>(number));
  CHECK_EQ(first->dropped[OTP_LOSS_BUDGET], 6u);
  for (uint64_t i = 0; i < first->rows; ++i) CHECK_EQ(first->flags[i], 0);
  int64_t after = number;
  numbered_leaf(number++);
  numbered_leaf(number++);
  session.stop();
  Batch second(session.drain());
  CHECK_EQ(second->rows, 2u);
  CHECK_EQ(second->sequence_nr[0], after);
  CHECK_EQ(second->flags[0], OTP_FLAG_LOSS_BEFORE);
  CHECK_EQ(second->flags[1], 0);
  CHECK_EQ(second.dropped(), 0u);
}

// A session whose budget all threads' first chunks fill records again after every drain.
void a_drain_makes_room_again() {
  for (uint32_t policy : {OTP_FULL_DROP_NEWEST, OTP_FULL_DROP_OLDEST}) {
    Session session(options(OTP_CHUNK_BYTES, policy));
    uint64_t produced = 0, rows = 0, dropped = 0;
    for (int round = 0; round < 5; ++round) {
      for (int i = 0; i < 3000; ++i, ++produced) numbered_leaf(i);
      Batch batch(session.drain());
      CHECK(batch->rows > 0);
      rows += batch->rows;
      dropped += batch.dropped();
    }
    CHECK_EQ(rows + dropped, produced);
  }
}

// One session's full budget costs another nothing: that gets every event, with its end, in order.
void a_full_session_takes_nothing_from_another() {
  Session small(options(OTP_CHUNK_BYTES));
  Session big;
  constexpr int64_t kEvents = 50000;
  for (int64_t i = 0; i < kEvents / 2; ++i) {
    numbered(2 * i, "outer", "outer");
    numbered_leaf(2 * i + 1);
    CHECK_EQ(end("outer"), 1);
  }
  big.stop();
  small.stop();
  Batch all(big.drain()), some(small.drain());
  all.check_sound();
  some.check_sound();
  CHECK_EQ(all->rows, static_cast<uint64_t>(kEvents));
  CHECK_EQ(all.dropped(), 0u);
  for (uint64_t i = 0; i < all->rows; ++i) {
    CHECK_EQ(all->sequence_nr[i], static_cast<int64_t>(i));
    CHECK_EQ(all->parent[i], i % 2 == 0 ? -1 : static_cast<int32_t>(i - 1));
    CHECK_EQ(all->flags[i], 0);
  }
  CHECK_EQ(some->rows + some->dropped[OTP_LOSS_BUDGET], static_cast<uint64_t>(kEvents));
  for (uint64_t i = 0; i < some->rows; ++i) {
    CHECK_EQ(some->id[i], all->id[i]);
    CHECK_EQ(some->end[i], all->end[i]);
    CHECK_EQ(some->flags[i], 0);
  }
}

// A session that gets the bit of one that lost events does not inherit the mark of that loss.
void a_bit_is_handed_on_without_its_marks() {
  Session lossy(options(OTP_CHUNK_BYTES));
  for (int64_t i = 0; i < 5000; ++i) numbered_leaf(i);
  uint32_t bit = otp_session_consumer(lossy);
  lossy.stop();
  CHECK(Batch(lossy.drain()).dropped() > 0);
  for (;;) {
    Session next;
    if (otp_session_consumer(next) != bit) continue;
    leaf("unmarked");
    next.stop();
    Batch batch(next.drain());
    CHECK_EQ(batch->rows, 1u);
    CHECK_EQ(batch->flags[0], 0);
    CHECK_EQ(batch.dropped(), 0u);
    return;
  }
}

// A session that keeps the newest and is never drained keeps no thread that has ended and whose events are gone.
void an_undrained_session_forgets_threads() {
  uint32_t threads_before = recorder_stats().threads;
  Session session(options(4 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  for (int i = 0; i < 100; ++i) std::thread([] { leaf("short-lived"); }).join();
  CHECK(recorder_stats().threads <= threads_before + 5);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_EVICTED], 100u);
}

// More inputs than a chunk holds are left out and said to be; the event stays, and memory around it too.
void inputs_too_large_for_a_chunk_are_cut() {
  Session session(options(kPlenty, OTP_FULL_DROP_NEWEST, 1, 1));
  std::vector<int64_t> words(1u << 16, -1);
  for (uint32_t count : {8166u, 8167u, 65536u, 0x20000001u}) {
    otp_begin_args args = event("large", "large");
    args.inputs = words.data();
    args.input_words = count;
    CHECK(api().begin(&args) != 0);
    end("large");
  }
  leaf("after");
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 5u);
  CHECK_EQ(batch->inputs[0], 0);
  CHECK_EQ(batch->flags[0], 0);
  CHECK_EQ(batch->input_word_count, 8166u);
  for (uint64_t i = 1; i < 4; ++i) {
    CHECK_EQ(batch->inputs[i], -1);
    CHECK_EQ(batch->flags[i], OTP_FLAG_INPUTS_CUT);
  }
  CHECK_EQ(batch->flags[4], 0);
}

// At its budget a session takes no smaller event in the place of a larger one that it had no room for.
void the_oldest_stay_whatever_their_size() {
  Session session(options(OTP_CHUNK_BYTES, OTP_FULL_DROP_NEWEST, 1, 1));
  std::vector<int64_t> words(1000, 0);
  for (int64_t i = 0; i < 100; ++i) {
    otp_begin_args args = event("mixed", "mixed");
    args.sequence_nr = i;
    args.inputs = words.data();
    args.input_words = i % 3 == 0 ? 1000 : 0;
    CHECK(api().begin(&args) != 0);
    end("mixed");
  }
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_BUDGET], 100u);
  CHECK(batch->rows > 10);
  for (uint64_t i = 0; i < batch->rows; ++i) {
    CHECK_EQ(batch->sequence_nr[i], static_cast<int64_t>(i));
    CHECK_EQ(batch->flags[i], 0);
  }
}

}  // namespace

int main() {
  RUN_CLEAN(drop_newest_keeps_the_oldest);
  RUN_CLEAN(drop_oldest_keeps_the_newest);
  RUN_CLEAN(one_chunk_is_enough_for_the_newest);
  RUN_CLEAN(an_eviction_keeps_the_ends_of_what_was_drained);
  RUN_CLEAN(the_mark_is_on_the_event_after_the_gap);
  RUN_CLEAN(a_drain_makes_room_again);
  RUN_CLEAN(a_full_session_takes_nothing_from_another);
  RUN_CLEAN(a_bit_is_handed_on_without_its_marks);
  RUN_CLEAN(an_undrained_session_forgets_threads);
  RUN_CLEAN(inputs_too_large_for_a_chunk_are_cut);
  RUN_CLEAN(the_oldest_stay_whatever_their_size);
  RUN_CLEAN(every_event_is_kept_or_counted);
}
