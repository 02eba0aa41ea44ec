// Contexts: every event of a session that follows them has the one that its thread was in when it began.
#include <thread>

#include <atomic>

#include "core_context_support.h"

namespace {

// Events have the context of their begin; the source is asked when the version has changed, and not inside an operator.
void events_have_the_context_of_their_begin() {
  Contexts contexts;
  Session session(following());
  leaf("outside");
  enter(7);
  int before = t_here.resolved;
  leaf("first");
  begin("outer");
  enter(8);
  leaf("in outer");
  end("outer");
  CHECK_EQ(t_here.resolved, before + 1);
  leaf("second");
  leaf("third");
  CHECK_EQ(t_here.resolved, before + 2);
  enter(0);
  leaf("outside again");
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(context_of(batch, "outside"), 0u);
  for (const char* name : {"first", "outer", "in outer"}) CHECK_EQ(context_of(batch, name), 7u);
  for (const char* name : {"second", "third"}) CHECK_EQ(context_of(batch, name), 8u);
  CHECK_EQ(context_of(batch, "outside again"), 0u);
}

// Under a label, and for a label wherever it begins, the context is looked at: Python runs there.
void labels_let_the_context_change() {
  Contexts contexts;
  Session session(following());
  enter(1);
  begin_label("label");
  enter(2);
  begin("operator");
  enter(3);
  begin_label("label in the operator");
  enter(4);
  leaf("leaf");
  end("label in the operator");
  end("operator");
  end("label");
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(context_of(batch, "label"), 1u);
  CHECK_EQ(context_of(batch, "operator"), 2u);
  CHECK_EQ(context_of(batch, "label in the operator"), 3u);
  CHECK_EQ(context_of(batch, "leaf"), 4u);
}

// Torch's own labels hold Python too, and its TorchScript functions stay open when their thread has gone on.
void not_all_that_torch_tells_of_keeps_a_context() {
  constexpr uint8_t kFunction = 0, kBackward = 1, kTorchScript = 2, kUser = 7;
  Contexts contexts;
  Session session(following());
  char keys[8];
  enter(1);
  for (uint8_t scope : {kUser, kTorchScript, kBackward}) {
    otp_begin_args around = event(&keys[scope], "around");
    around.scope = scope;
    CHECK(api().begin(&around) != 0);
    enter(t_here.context + 1);
  }
  leaf("in a backward function");
  otp_begin_args torchs = event("torch's label", "torch's label");
  torchs.scope = kUser;
  CHECK(api().begin(&torchs) != 0);
  begin("in torch's label");
  enter(9);
  otp_begin_args args = event("operator", "operator");
  args.scope = kFunction;
  CHECK(api().begin(&args) != 0);
  for (const char* name : {"operator", "in torch's label", "torch's label"}) CHECK_EQ(end(name), 1);
  for (uint8_t scope : {kBackward, kTorchScript, kUser}) CHECK_EQ(end(&keys[scope]), 1);
  session.stop();
  Batch batch(session.drain());
  for (uint64_t i = 0; i < 3; ++i) CHECK_EQ(batch->context[i], i + 1);
  CHECK_EQ(context_of(batch, "in a backward function"), 3u);
  CHECK_EQ(context_of(batch, "torch's label"), 4u);
  CHECK_EQ(context_of(batch, "in torch's label"), 4u);
  CHECK_EQ(context_of(batch, "operator"), 4u);
}

// A context lasts over full chunks and over drains, and an event that is open over a drain keeps its own.
void a_context_lasts() {
  constexpr int kEvents = 5000;  // four chunks
  Contexts contexts;
  Session session(following());
  enter(1);
  begin_label("open over drains");
  enter(5);
  for (int part = 0; part < 3; ++part) {
    for (int i = 0; i < kEvents; ++i) leaf("leaf");
    Batch batch(session.drain());
    CHECK_EQ(batch->rows, static_cast<uint64_t>(kEvents));
    for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->context[i], 5u);
  }
  CHECK_EQ(t_here.resolved, 2);
  end("open over drains");
  session.stop();
  Batch last(session.drain());
  CHECK_EQ(last->rows, 1u);
  CHECK_EQ(last->context[0], 1u);
}

// Who follows contexts leaves out what is muted, and loses nothing by it; who does not has it all, without contexts.
void one_follows_and_one_does_not() {
  Contexts contexts;
  Session follower(following()), other;
  enter(3);
  begin_label("outer");
  enter(OTP_CONTEXT_MUTED);
  CHECK(begin_label("muted") != 0);
  leaf("in muted");
  CHECK_EQ(end("muted"), 1);
  enter(3);
  leaf("heard");
  end("outer");
  follower.stop();
  other.stop();
  Batch heard(follower.drain()), all(other.drain());
  heard.check_sound();
  all.check_sound();
  CHECK(all->context == nullptr);
  CHECK_EQ(all->rows, 4u);
  CHECK_EQ(all.parent_name("in muted"), "muted");
  CHECK_EQ(heard->rows, 2u);
  CHECK_EQ(heard.parent_name("heard"), "outer");
  CHECK_EQ(context_of(heard, "heard"), 3u);
  CHECK_EQ(heard.dropped() + all.dropped(), 0u);
  for (uint64_t i = 0; i < heard->rows; ++i) CHECK_EQ(heard->flags[i], 0);
}

// What is muted for everybody is not begun, and its end finds nothing; what is open already ends as usual.
void muted_events_do_not_begin() {
  Contexts contexts;
  Session session(following());
  enter(OTP_CONTEXT_MUTED);
  CHECK_EQ(begin("muted"), 0u);
  CHECK_EQ(end("muted"), 0);
  enter(1);
  begin_label("open");
  enter(OTP_CONTEXT_MUTED);
  CHECK_EQ(begin("muted"), 0u);
  CHECK_EQ(end("muted"), 0);
  CHECK_EQ(end("open"), 1);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->flags[0], 0);
  CHECK_EQ(batch.dropped(), 0u);
}

// A source is told whenever it may have changed which sessions leave roots out, after that, and once when the first
// context is expected: threads that expect one meanwhile tell it, too.
std::atomic<uint32_t> g_told{0};
void what_is_muted_is_told() {
  Contexts contexts;
  api().set_mute_hook([] {
    ++g_told;
    if (g_told == 4) otp_expect_contexts();
  });
  Session muted(following());
  for (int i : {1, 0}) CHECK_EQ(otp_session_mute_roots(muted, i), OTP_OK);
  api().mute_roots(static_cast<uint32_t>(__builtin_ctz(otp_session_consumer(muted))), 1);
  CHECK_EQ(g_told, 3u);
  for (int i = 0; i < 3; ++i) otp_expect_contexts();
  CHECK_EQ(g_told, 5u);
  api().set_mute_hook(nullptr);
}

// Muted roots: what begins outside of any context is left out for that session, from its start on if so said before.
void roots_can_be_muted() {
  Contexts contexts;
  Session muted(following(), false), other(following());
  CHECK_EQ(otp_session_mute_roots(muted, 1), OTP_OK);
  muted.start();
  leaf("root 1");
  enter(4);
  leaf("in a context");
  enter(0);
  CHECK_EQ(otp_session_mute_roots(muted, 0), OTP_OK);
  begin("root 2");
  CHECK_EQ(otp_session_mute_roots(muted, 1), OTP_OK);
  leaf("in root 2");
  end("root 2");
  CHECK_EQ(otp_session_mute_roots(muted, 0), OTP_OK);
  leaf("root 3");
  muted.stop();
  CHECK_EQ(otp_session_mute_roots(muted, 1), OTP_OK);
  Session next(following());
  leaf("root 4");
  Batch some(muted.drain()), all(other.drain());
  CHECK_EQ(all->rows, 6u);
  CHECK_EQ(some->rows, 3u);
  CHECK(some.has("in a context") && some.has("root 2") && some.has("root 3"));
  CHECK_EQ(some->flags[some.row("root 2")], 0);
  CHECK_EQ(Batch(next.drain())->rows, 1u);
}

// Phases are recorded all the same, by which it is known when the next step begins; what is inside of them is not.
void phases_are_roots_that_stay() {
  Contexts contexts;
  Session session(following());
  CHECK_EQ(otp_session_mute_roots(session, 1), OTP_OK);
  otp_begin_args phase = label("phase");
  phase.kind = OTP_EVENT_PHASE;
  CHECK(api().begin(&phase) != 0);
  leaf("inside");
  CHECK_EQ(end("phase"), 1);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->kind[0], OTP_EVENT_PHASE);
}

// Who does not follow contexts is not muted.
void roots_of_others_stay() {
  Contexts contexts;
  Session session;
  CHECK_EQ(otp_session_mute_roots(session, 1), OTP_OK);
  leaf("root");
  CHECK_EQ(Batch(session.drain())->rows, 1u);
}

// A session that joins in the middle of a chunk, and of a context, has that context from its first event on.
void who_joins_a_chunk_is_told_the_context() {
  Contexts contexts;
  Session first(following());
  enter(6);
  leaf("before");
  Session second(following());
  leaf("after");
  leaf("after that");
  for (Session* session : {&first, &second}) {
    Batch batch(session->drain());
    CHECK_EQ(batch->rows, session == &first ? 3u : 2u);
    for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->context[i], 6u);
  }
}

// A session that starts inside an open operator has nothing of it: the context there may be older than the session.
// Who was there before continues.
void who_starts_inside_an_operator_waits_for_its_end() {
  Contexts contexts;
  Session first(following());
  enter(1);
  begin("outer");
  Session second(following());
  leaf("in outer");
  begin("inner");
  leaf("in inner");
  end("inner");
  end("outer");
  leaf("next");
  Batch all(first.drain()), some(second.drain());
  CHECK_EQ(all->rows, 5u);
  for (uint64_t i = 0; i < all->rows; ++i) CHECK_EQ(all->context[i], 1u);
  CHECK_EQ(some->rows, 1u);
  CHECK_EQ(context_of(some, "next"), 1u);
}

// What a context was before the session, with a source that numbered otherwise, is not believed.
void a_new_session_asks_anew() {
  Contexts contexts;
  {
    Session session(following());
    enter(1);
    leaf("of the first");
  }
  t_here.context = 2;  // under the same version
  Session session(following());
  leaf("of the second");
  api().set_context_source(nullptr);
  leaf("without a source");
  t_here.context = 3;
  api().set_context_source(&kFakeSource);
  leaf("with a source again");
  Batch batch(session.drain());
  CHECK_EQ(context_of(batch, "of the second"), 2u);
  CHECK_EQ(context_of(batch, "without a source"), 0u);
  CHECK_EQ(context_of(batch, "with a source again"), 3u);
}

// Ends out of order, coroutines that wait, an end on another thread: the context is the thread's at the begin.
void misnested_and_suspended_events() {
  Contexts contexts;
  Session session(following());
  enter(1);
  uint32_t here = begin_label("one");
  enter(2);
  begin_label("two");
  CHECK_EQ(api().suspend("two"), 1);
  enter(1);
  leaf("in one");
  CHECK_EQ(end("one"), 1);
  enter(2);
  CHECK_EQ(api().resume("two"), 1);
  leaf("in two");
  enter(3);
  begin("ends elsewhere");
  std::thread([&] { CHECK_EQ(api().end_elsewhere("ends elsewhere", here, 0, 0, nullptr, 0), 1); }).join();
  enter(4);
  leaf("in two again");
  CHECK_EQ(end("two"), 1);
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(context_of(batch, "one"), 1u);
  CHECK_EQ(context_of(batch, "in one"), 1u);
  CHECK_EQ(context_of(batch, "two"), 2u);
  CHECK_EQ(context_of(batch, "in two"), 2u);
  CHECK_EQ(context_of(batch, "ends elsewhere"), 3u);
  CHECK_EQ(context_of(batch, "in two again"), 4u);
  CHECK_EQ(batch.parent_name("in two again"), "two");
}

// Operators that run inside the source are for nobody who follows contexts, and do not ask it again; a session may come
// or go meanwhile.
void the_source_may_run_operators() {
  Contexts contexts;
  Session follower(following()), other;
  Session* late = nullptr;
  enter(1);
  t_here.inside = [&] {
    begin("inside");
    for (int i = 0; i < 3000; ++i) leaf("leaf");  // the thread continues to other chunks
    end("inside");
    if (late == nullptr) late = new Session(following());
  };
  begin("event");
  t_here.inside = nullptr;
  leaf("child");
  end("event");
  CHECK_EQ(t_here.resolved, 1);
  leaf("next");
  CHECK_EQ(t_here.resolved, 2);  // for the late one
  Batch some(follower.drain()), all(other.drain()), last(late->drain());
  delete late;
  CHECK_EQ(some->rows, 3u);
  CHECK_EQ(all->rows, 3004u);
  CHECK_EQ(all.parent_name("event"), "");
  CHECK_EQ(last->rows, 1u);
  for (const char* name : {"event", "child", "next"}) CHECK_EQ(context_of(some, name), 1u);
  CHECK_EQ(context_of(last, "next"), 1u);
}

}  // namespace

int main() {
  RUN_CLEAN(what_is_muted_is_told);
  RUN_CLEAN(events_have_the_context_of_their_begin);
  RUN_CLEAN(labels_let_the_context_change);
  RUN_CLEAN(not_all_that_torch_tells_of_keeps_a_context);
  RUN_CLEAN(a_context_lasts);
  RUN_CLEAN(one_follows_and_one_does_not);
  RUN_CLEAN(muted_events_do_not_begin);
  RUN_CLEAN(roots_can_be_muted);
  RUN_CLEAN(phases_are_roots_that_stay);
  RUN_CLEAN(roots_of_others_stay);
  RUN_CLEAN(who_joins_a_chunk_is_told_the_context);
  RUN_CLEAN(who_starts_inside_an_operator_waits_for_its_end);
  RUN_CLEAN(a_new_session_asks_anew);
  RUN_CLEAN(misnested_and_suspended_events);
  RUN_CLEAN(the_source_may_run_operators);
}
