// What is open at a drain: told of, so that the rows whose parents are still open can be placed.
#include <atomic>
#include <thread>

#include "core_context_support.h"

namespace {

// The place of an open event in the list, by its id.
uint64_t place(const Batch& batch, uint64_t id) {
  for (uint64_t i = 0; i < batch->open_count; ++i)
    if (batch->open_id[i] == id) return i;
  CHECK(false);
  return 0;
}

// Each drain names what is open then, outermost first, with the ids that the rows have later; the last one names none.
void open_events_are_told_of() {
  Contexts contexts;
  Session session(following());
  enter(1);
  begin_label("outer");
  enter(2);
  otp_begin_args inner = label("inner");
  inner.scope = 7;
  inner.fwd_thread = 5;
  inner.sequence_nr = 4711;
  api().begin(&inner);
  leaf("leaf");
  Batch first(session.drain());
  CHECK_EQ(first->rows, 1u);
  CHECK_EQ(first->open_count, 2u);
  CHECK_EQ(first->open_parent[0], 0u);
  CHECK_EQ(first->open_parent[1], first->open_id[0]);
  CHECK_EQ(first.parent_id(0), first->open_id[1]);
  CHECK_EQ(first->open_context[0], 1u);
  CHECK_EQ(first->open_context[1], 2u);
  CHECK_EQ(first->open_kind[0], OTP_EVENT_LABEL);
  CHECK_EQ(first->open_scope[0], 0);
  CHECK_EQ(first->open_scope[1], 7);
  CHECK_EQ(first->open_fwd_thread[0], 0u);
  CHECK_EQ(first->open_fwd_thread[1], 5u);
  CHECK_EQ(first->open_sequence_nr[0], -1);
  CHECK_EQ(first->open_sequence_nr[1], 4711);
  CHECK_EQ(first->open_thread[1], first->thread[0]);
  CHECK(first->open_start[0] <= first->open_start[1] && first->open_start[1] <= first->start[0]);
  end("inner");
  Batch second(session.drain());
  CHECK_EQ(second->open_count, 1u);
  CHECK_EQ(second->open_id[0], first->open_id[0]);
  CHECK_EQ(second->open_context[0], 1u);
  CHECK_EQ(second->id[0], first->open_id[1]);
  CHECK_EQ(second->start[0], first->open_start[1]);
  session.stop();
  Batch last(session.drain());
  CHECK_EQ(last->open_count, 0u);
  CHECK_EQ(last->id[0], first->open_id[0]);
  CHECK_EQ(last->start[0], first->open_start[0]);
  CHECK_EQ(last->flags[0], OTP_FLAG_UNFINISHED);
}

// Who follows no contexts is told of open events without them; who has not got an event is not told of it.
void each_session_has_its_own() {
  Contexts contexts;
  Session plain, follower(following());
  enter(OTP_CONTEXT_MUTED);
  begin_label("muted");
  enter(3);
  begin_label("heard");
  Batch all(plain.drain()), some(follower.drain());
  CHECK_EQ(all->open_count, 2u);
  CHECK_EQ(all->open_context[0] | all->open_context[1], 0u);
  CHECK_EQ(all->open_parent[1], all->open_id[0]);
  CHECK_EQ(some->open_count, 1u);
  CHECK_EQ(some->open_id[0], all->open_id[1]);
  CHECK_EQ(some->open_parent[0], 0u);
  CHECK_EQ(some->open_context[0], 3u);
  end("heard");
  end("muted");
  CHECK_EQ(Batch(plain.drain())->open_count, 0u);
}

// Misnested, suspended and ended elsewhere: open is what has not ended, wherever it stands.
void open_is_what_has_not_ended() {
  Session session;
  uint32_t here = begin("a");
  begin("b");
  begin("c");
  CHECK_EQ(end("a"), 1);
  CHECK_EQ(api().suspend("b"), 1);
  Batch first(session.drain());
  first.check_sound();
  CHECK_EQ(first->rows, 1u);
  CHECK_EQ(first->open_count, 2u);
  CHECK_EQ(first->open_parent[0], first->id[0]);  // which has ended
  CHECK_EQ(first->open_parent[1], first->open_id[0]);
  uint64_t c = first->open_id[1];
  std::thread([&] { CHECK_EQ(api().end_elsewhere("b", here, 0, 0, nullptr, 0), 1); }).join();
  Batch second(session.drain());
  CHECK_EQ(second->open_count, 1u);
  CHECK_EQ(second->open_id[0], c);
  end("c");
  CHECK_EQ(Batch(session.drain())->open_count, 0u);
}

// Several threads, one of which has ended with something open: all are told of, by thread.
void threads_have_their_own() {
  Session session;
  begin("here");
  std::thread([] { begin("left open"); }).join();
  std::atomic<bool> begun{false}, done{false};
  std::thread other([&] {
    begin("there");
    leaf("leaf");
    begun.store(true);
    while (!done.load()) std::this_thread::yield();
    end("there");
  });
  while (!begun.load()) std::this_thread::yield();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->open_count, 3u);
  CHECK_EQ(place(batch, batch.parent_id(batch.row("leaf"))), 2u);
  done.store(true);
  other.join();
  end("here");
  Batch next(session.drain());
  CHECK_EQ(next->rows, 2u);
  CHECK_EQ(next->open_count, 1u);
  CHECK_EQ(next->open_id[0], batch->open_id[1]);
}

}  // namespace

int main() {
  RUN_CLEAN(open_events_are_told_of);
  RUN_CLEAN(each_session_has_its_own);
  RUN_CLEAN(open_is_what_has_not_ended);
  RUN_CLEAN(threads_have_their_own);
}
