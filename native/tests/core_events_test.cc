// Nesting, keys, ends from elsewhere and coroutines: every event gets its own end and its own parent.
#include <atomic>
#include <thread>

#include "core_support.h"

namespace {

constexpr uint32_t kHere = 4711;  // torch's id of the main thread, as it were: the first that it names stays

// Nested events get their names, their parents, and times inside their parents'.
void nested_events_lie_in_their_parents() {
  Session session;
  begin("outer");
  begin("middle");
  leaf("first");
  leaf("second");
  end("middle");
  leaf("third");
  end("outer");
  leaf("root");
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 6u);
  CHECK_EQ(batch.parent_name("middle"), "outer");
  CHECK_EQ(batch.parent_name("first"), "middle");
  CHECK_EQ(batch.parent_name("second"), "middle");
  CHECK_EQ(batch.parent_name("third"), "outer");
  CHECK_EQ(batch.parent_name("outer"), "");
  CHECK_EQ(batch.parent_name("root"), "");
  for (uint64_t i = 0; i < batch->rows; ++i) {
    CHECK_EQ(batch->flags[i], 0);
    CHECK(batch->start[i] >= session.stats().start_ns && batch->end[i] <= session.stats().stop_ns);
    if (batch->parent[i] >= 0) CHECK(batch->end[i] <= batch->end[batch->parent[i]]);
  }
  CHECK(batch->end[batch.row("first")] <= batch->start[batch.row("second")]);
}

// A source can ask which event is innermost, and who has it; nobody has what began before the session.
void the_innermost_event_is_told() {
  uint32_t consumers = 77;
  CHECK_EQ(api().innermost(&consumers), 0u);
  Session session;
  CHECK_EQ(api().innermost(&consumers), 0u);
  begin("outer");
  uint64_t outer = api().innermost(&consumers);
  CHECK_EQ(consumers, otp_session_consumer(session));
  leaf("leaf");
  CHECK_EQ(api().innermost(&consumers), outer);
  begin("inner");
  uint64_t inner = api().innermost(&consumers);
  end("inner");
  session.stop();
  CHECK_EQ(api().innermost(&consumers), 0u);  // open still, and for nobody
  end("outer");
  Batch batch(session.drain());
  CHECK_EQ(batch->id[batch.row("outer")], outer);
  CHECK_EQ(batch->id[batch.row("inner")], inner);
}

// What the source says of an event arrives in its columns.
void fields_arrive() {
  Session session;
  otp_begin_args args = event("x", "with fields, and a tail that is cut");
  args.name_size = 11;
  args.scope = 7;
  args.kind = OTP_EVENT_LABEL;
  args.sequence_nr = INT64_MAX - 5;
  args.fwd_thread = 77;
  args.source_tid = kHere;
  CHECK(api().begin(&args) != 0);
  CHECK_EQ(api().end("x", OTP_FLAG_ERROR, "ValueError etc", 10), 1);
  session.stop();
  Batch batch(session.drain());
  uint64_t row = batch.row("with fields");
  CHECK_EQ(batch->scope[row], 7);
  CHECK_EQ(batch->kind[row], OTP_EVENT_LABEL);
  CHECK_EQ(batch->sequence_nr[row], INT64_MAX - 5);
  CHECK_EQ(batch->fwd_thread[row], 77u);
  CHECK_EQ(batch->flags[row], OTP_FLAG_ERROR);
  CHECK_EQ(batch.text(batch->error_type[row]), "ValueError");
  CHECK_EQ(batch->threads[batch->thread[row]].source_tid, kHere);
  CHECK(batch->inputs == nullptr);
}

// Ends out of order go to their own begins, and what comes after gets the right parent.
void misnested_ends_find_their_begins() {
  Session session;
  begin("a");
  begin("b");
  begin("c");
  CHECK_EQ(end("a"), 1);
  leaf("in c");
  CHECK_EQ(end("b"), 1);
  CHECK_EQ(end("c"), 1);
  leaf("after");
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  uint64_t a = batch.row("a"), b = batch.row("b"), c = batch.row("c");
  CHECK(batch->end[a] <= batch->start[batch.row("in c")]);
  CHECK(batch->end[a] <= batch->end[b] && batch->end[b] <= batch->end[c]);
  CHECK_EQ(batch.parent_name("in c"), "c");
  CHECK_EQ(batch.parent_name("after"), "");
  for (uint64_t row : {a, b, c}) CHECK_EQ(batch->flags[row], 0);
}

// An end without a begin does nothing, and says so.
void unknown_ends_are_ignored() {
  Session session;
  begin("a");
  CHECK_EQ(end("never begun"), 0);
  CHECK_EQ(end("a"), 1);
  CHECK_EQ(end("a"), 0);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->flags[0], 0);
}

// A key that nests is open as often as it began, the innermost ends first; one that does not is open once.
void keys_nest_where_asked_to() {
  Session session;
  otp_begin_args label = event("key", "outer label");
  label.nests = 1;
  CHECK(api().begin(&label) != 0);
  label.name = "inner label";
  CHECK(api().begin(&label) != 0);
  leaf("in inner");
  CHECK_EQ(end("key"), 1);
  leaf("in outer");
  CHECK_EQ(end("key"), 1);
  CHECK_EQ(end("key"), 0);
  CHECK(begin("op", "operator") != 0);
  CHECK_EQ(begin("op", "operator again"), 0u);
  CHECK_EQ(end("op"), 1);
  CHECK_EQ(end("op"), 0);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 5u);
  CHECK_EQ(batch.parent_name("in inner"), "inner label");
  CHECK_EQ(batch.parent_name("in outer"), "outer label");
  CHECK(batch->end[batch.row("inner label")] <= batch->start[batch.row("in outer")]);
  CHECK(!batch.has("operator again"));
}

// The 1025th open event is dropped and counted, its end touches no other, and the next event says that one is missing.
void too_deep_events_are_counted() {
  Session session;
  std::vector<char> keys(OTP_MAX_DEPTH + 2);
  for (int i = 0; i < OTP_MAX_DEPTH; ++i) CHECK(begin(&keys[i], "deep") != 0);
  CHECK_EQ(begin(&keys[OTP_MAX_DEPTH], "too deep"), 0u);
  CHECK_EQ(begin(&keys[OTP_MAX_DEPTH + 1], "too deep"), 0u);
  CHECK_EQ(end(&keys[OTP_MAX_DEPTH]), 0);
  CHECK_EQ(end(&keys[OTP_MAX_DEPTH - 1]), 1);
  leaf("next");
  for (int i = OTP_MAX_DEPTH - 1; i-- > 0;) CHECK_EQ(end(&keys[i]), 1);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, OTP_MAX_DEPTH + 1u);
  CHECK_EQ(batch->dropped[OTP_LOSS_DEPTH], 2u);
  CHECK_EQ(batch->parent[batch.row("next")], OTP_MAX_DEPTH - 2);
  for (uint64_t i = 0; i < batch->rows; ++i)
    CHECK_EQ(batch->flags[i], batch.name(i) == "next" ? OTP_FLAG_LOSS_BEFORE : 0);
}

// An event that another thread has ended leaves room on a full stack for the next one.
void a_full_stack_is_repaired_before_it_counts_as_full() {
  Session session;
  std::vector<char> keys(OTP_MAX_DEPTH);
  uint32_t here = 0;
  for (char& key : keys) here = begin(&key, "deep");
  std::thread([&] { CHECK_EQ(api().end_elsewhere(&keys.back(), here, 0, 0, nullptr, 0), 1); }).join();
  CHECK(begin("room again") != 0);
  end("room again");
  for (size_t i = keys.size() - 1; i-- > 0;) CHECK_EQ(end(&keys[i]), 1);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch.dropped(), 0u);
  CHECK_EQ(batch->rows, OTP_MAX_DEPTH + 1u);
}

// An end on another thread is flagged, says where it was, and repairs the first thread's stack; by either kind of id.
void an_end_on_another_thread_is_the_events_end() {
  Session session;
  uint32_t here = begin("by id");
  otp_begin_args args = event("by tid", "by tid");
  args.source_tid = kHere;
  CHECK(api().begin(&args) != 0);
  uint32_t other = 0;
  std::thread([&] {
    otp_begin_args own = event("own", "own");
    own.source_tid = 990002;
    other = api().begin(&own);
    CHECK_EQ(api().end_elsewhere("by id", here, 0, 0, "Error", 5), 1);
    CHECK_EQ(api().end_elsewhere("by tid", 0, kHere, 0, nullptr, 0), 1);
    end("own");
  }).join();
  leaf("after");
  CHECK_EQ(end("by id"), 0);
  CHECK_EQ(end("by tid"), 0);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch.parent_name("after"), "");
  for (const char* name : {"by id", "by tid"}) {
    uint64_t row = batch.row(name);
    CHECK_EQ(batch->flags[row], OTP_FLAG_ASYNC);
    CHECK_EQ(batch->threads[batch->thread[row]].id, here);
    CHECK_EQ(batch->threads[batch->end_thread[row]].id, other);
    CHECK_EQ(batch->threads[batch->end_thread[row]].source_tid, 990002u);
    CHECK(batch->end[row] >= batch->start[batch.row("own")] && batch->end[row] <= batch->end[batch.row("own")]);
  }
  CHECK_EQ(batch.text(batch->error_type[batch.row("by id")]), "Error");
}

// An end on another thread whose begin is not there is counted, and touches nothing.
void unmatched_ends_elsewhere_are_counted() {
  Session session;
  uint32_t here = begin("a");
  uint64_t before = recorder_stats().unmatched_ends;
  std::thread([&] {
    CHECK_EQ(api().end_elsewhere("unknown", here, 0, 0, nullptr, 0), 0);
    CHECK_EQ(api().end_elsewhere("a", 1u << 20, 0, 0, nullptr, 0), 0);
    CHECK_EQ(api().end_elsewhere("a", 0, 123454321, 0, nullptr, 0), 0);
    CHECK_EQ(api().end_elsewhere("a", 0, 0, 0, nullptr, 0), 0);  // names no thread at all
  }).join();
  CHECK_EQ(recorder_stats().unmatched_ends, before + 4);
  CHECK_EQ(end("a"), 1);
  session.stop();
  CHECK_EQ(Batch(session.drain())->rows, 1u);
}

// Once ended on another thread an event is over: a second end from there, or one from its own thread, finds nothing.
void an_event_ends_once() {
  Session session;
  otp_begin_args label = event("key", "outer");
  label.nests = 1;
  uint32_t here = api().begin(&label);
  label.name = "inner";
  api().begin(&label);
  std::thread([&] { CHECK_EQ(api().end_elsewhere("key", here, 0, 0, nullptr, 0), 1); }).join();
  CHECK_EQ(end("key"), 1);  // the outer one: the inner one is over
  CHECK_EQ(end("key"), 0);
  begin("once");
  std::thread([&] {
    CHECK_EQ(api().end_elsewhere("once", here, 0, 0, nullptr, 0), 1);
    CHECK_EQ(api().end_elsewhere("once", here, 0, 0, nullptr, 0), 0);
  }).join();
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->flags[batch.row("inner")], OTP_FLAG_ASYNC);
  CHECK_EQ(batch->flags[batch.row("outer")], 0);
  CHECK_EQ(batch->flags[batch.row("once")], OTP_FLAG_ASYNC);
}

// The address of an event that ended on another thread can be the next event's at once, as malloc gives it out again.
void a_key_is_free_again_after_its_end_elsewhere() {
  Session session;
  char key = 0;
  uint32_t here = begin(&key, "first");
  std::thread([&] { CHECK_EQ(api().end_elsewhere(&key, here, 0, 0, nullptr, 0), 1); }).join();
  CHECK_EQ(begin(&key, "second"), here);
  CHECK_EQ(end(&key), 1);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 2u);
  CHECK_EQ(batch->flags[batch.row("second")], 0);
  CHECK_EQ(batch.parent_name("second"), "");
}

// A dropped event that ends on another thread leaves the stack, and leaves the recorded one there that comes after it.
void a_dropped_event_can_end_elsewhere() {
  Session small(options(OTP_CHUNK_BYTES));
  uint32_t here = 0;
  while (small.stats().dropped[OTP_LOSS_BUDGET] == 0) {
    here = begin("fill");
    end("fill");
  }
  begin("dropped");
  Session second;  // a fresh one, so that the next event is recorded, under the number that "dropped" did not use
  begin("recorded");
  std::thread([&] { CHECK_EQ(api().end_elsewhere("dropped", here, 0, 0, nullptr, 0), 1); }).join();
  leaf("child");
  CHECK_EQ(end("recorded"), 1);
  CHECK_EQ(end("dropped"), 0);
  second.stop();
  Batch batch(second.drain());
  CHECK_EQ(batch->rows, 2u);
  CHECK_EQ(batch->flags[batch.row("recorded")], 0);
  CHECK_EQ(batch.parent_name("child"), "recorded");
}

// Two coroutines that take turns: the children of each are its own, and those of neither have no parent.
void suspended_events_are_no_parents() {
  Session session;
  begin("outer");
  begin("one");
  leaf("one: 1");
  CHECK_EQ(api().suspend("one"), 1);
  begin("two");
  leaf("two: 1");
  CHECK_EQ(api().suspend("two"), 1);
  leaf("neither");
  CHECK_EQ(api().resume("one"), 1);
  leaf("one: 2");
  CHECK_EQ(api().resume("two"), 1);
  leaf("two: 2");
  CHECK_EQ(end("one"), 1);
  leaf("two: 3");
  CHECK_EQ(end("two"), 1);
  CHECK_EQ(end("outer"), 1);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  const char* requested[][2] = {{"one", "outer"},  {"two", "outer"},  {"one: 1", "one"}, {"one: 2", "one"},
                                {"two: 1", "two"}, {"two: 2", "two"}, {"two: 3", "two"}, {"neither", "outer"}};
  for (auto& pair : requested) CHECK_EQ(batch.parent_name(pair[0]), pair[1]);
  for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->flags[i], 0);
}

// A suspended event can end without being resumed, on its own thread or on another; it cannot be resumed after that.
void suspended_events_can_end() {
  Session session;
  uint32_t here = begin("ends here");
  CHECK_EQ(api().suspend("ends here"), 1);
  CHECK_EQ(api().suspend("ends here"), 0);
  begin("ends there");
  CHECK_EQ(api().suspend("ends there"), 1);
  CHECK_EQ(end("ends here"), 1);
  std::thread([&] { CHECK_EQ(api().end_elsewhere("ends there", here, 0, 0, nullptr, 0), 1); }).join();
  CHECK_EQ(api().resume("ends here"), 0);
  CHECK_EQ(api().resume("ends there"), 0);
  CHECK_EQ(api().resume("never begun"), 0);
  leaf("after");
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->flags[batch.row("ends here")], 0);
  CHECK_EQ(batch->flags[batch.row("ends there")], OTP_FLAG_ASYNC);
  CHECK_EQ(batch.parent_name("after"), "");
}

// A thread works on while another ends its events: each ends exactly once, whatever moves on the stack meanwhile.
void ends_from_elsewhere_race_with_the_stack() {
  constexpr int kRounds = 50000 / kSlowdown;
  Session session;
  std::vector<char> keys(kRounds);
  std::atomic<int> begun{0}, ended{0};
  std::atomic<uint32_t> owner{0};
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      while (begun.load() <= i) std::this_thread::yield();
      CHECK_EQ(api().end_elsewhere(&keys[i], owner.load(), 0, 0, nullptr, 0), 1);
      ended.store(i + 1);
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    while (i - ended.load() > 100) std::this_thread::yield();  // else the stack is full at some time
    owner.store(begin(&keys[i], "ends elsewhere"));
    begun.store(i + 1);
    begin("below");
    leaf("leaf");
    CHECK_EQ(end("below"), 1);
  }
  other.join();
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch.dropped(), 0u);
  CHECK_EQ(batch->rows, 3u * kRounds);
  uint32_t elsewhere = batch->name[0];
  for (uint64_t i = 0; i < batch->rows; ++i)
    CHECK_EQ(batch->flags[i], batch->name[i] == elsewhere ? OTP_FLAG_ASYNC : 0);
}

// Labels that a program forgets to end, in profile after profile, do not fill the thread's stack for good.
void what_is_never_ended_does_not_pile_up() {
  std::thread([] {
    std::vector<char> keys(OTP_MAX_DEPTH + 100);
    for (char& key : keys) {
      Session session;
      CHECK(begin(&key, "forgotten") != 0);
      leaf("after");
      session.stop();
      Batch batch(session.drain());
      CHECK_EQ(batch->rows, 2u);
    }
  }).join();
}

// Torch tells of one operator once per callback; one that is too deep is lost once.
void a_loss_of_depth_counts_once() {
  Session session;
  std::vector<char> keys(OTP_MAX_DEPTH + 1);
  for (int i = 0; i < OTP_MAX_DEPTH; ++i) CHECK(begin(&keys[i], "deep") != 0);
  otp_begin_args args = event(&keys[OTP_MAX_DEPTH], "too deep");
  args.nests = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(api().begin(&args), 0u);
    CHECK_EQ(api().begin(&args), 0u);
    CHECK_EQ(end(&keys[OTP_MAX_DEPTH]), 0);
    CHECK_EQ(end(&keys[OTP_MAX_DEPTH]), 0);
  }
  for (int i = OTP_MAX_DEPTH; i-- > 0;) CHECK_EQ(end(&keys[i]), 1);
  CHECK_EQ(session.stats().dropped[OTP_LOSS_DEPTH], 3u);
}

}  // namespace

int main() {
  RUN_CLEAN(nested_events_lie_in_their_parents);
  RUN_CLEAN(the_innermost_event_is_told);
  RUN_CLEAN(fields_arrive);
  RUN_CLEAN(misnested_ends_find_their_begins);
  RUN_CLEAN(unknown_ends_are_ignored);
  RUN_CLEAN(keys_nest_where_asked_to);
  RUN_CLEAN(too_deep_events_are_counted);
  RUN_CLEAN(a_loss_of_depth_counts_once);
  RUN_CLEAN(what_is_never_ended_does_not_pile_up);
  RUN_CLEAN(a_full_stack_is_repaired_before_it_counts_as_full);
  RUN_CLEAN(an_end_on_another_thread_is_the_events_end);
  RUN_CLEAN(unmatched_ends_elsewhere_are_counted);
  RUN_CLEAN(an_event_ends_once);
  RUN_CLEAN(a_key_is_free_again_after_its_end_elsewhere);
  RUN_CLEAN(a_dropped_event_can_end_elsewhere);
  RUN_CLEAN(suspended_events_are_no_parents);
  RUN_CLEAN(suspended_events_can_end);
  RUN_CLEAN(ends_from_elsewhere_race_with_the_stack);
}
