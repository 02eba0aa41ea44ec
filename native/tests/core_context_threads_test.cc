// Contexts on many threads: those that the source cannot tell of, full budgets, forks.
#include <atomic>
#include <thread>

#include "child.h"
#include "core_context_support.h"

namespace {

// As long as nothing was carried the carrier is not asked again, on threads that the source knows and on others, and
// sessions that come later have what begins there, too. The first test of this process.
void nothing_is_asked_where_nothing_was_carried() {
  Contexts contexts(&kFakeCarrier);
  Session session(following());
  for (bool is_known : {false, true}) {
    std::thread([is_known] {
      if (is_known) enter(0);
      leaf("first");
      int asked = t_carried_asked;
      for (int i = 0; i < 10; ++i) leaf("next");
      CHECK_EQ(t_carried_asked, asked);
      Session later(following());
      for (int i = 0; i < 10; ++i) leaf("for both");
      CHECK_EQ(Batch(later.drain())->rows, 10u);
      if (is_known) {
        enter(5);
        leaf("inside");
        enter(0);
        asked = t_carried_asked;
        leaf("outside");
        leaf("asked");
        CHECK_EQ(t_carried_asked, asked + 2);
      }
    }).join();
  }
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 45u);
  CHECK_EQ(context_of(batch, "inside"), 5u);
  CHECK_EQ(context_of(batch, "asked"), 0u);
}

// A thread can keep what it records from all who follow contexts, and no context of it is asked for; others get it.
void a_thread_can_be_muted() {
  Contexts contexts(&kFakeCarrier);
  Session follower(following()), other;
  std::thread([] {
    otp_mute_thread();
    for (uint32_t context : {0u, 7u}) {
      enter(context);
      leaf("muted");
    }
    Session later(following());
    leaf("muted");
    CHECK_EQ(Batch(later.drain())->rows, 0u);
    CHECK_EQ(t_here.resolved, 0);
  }).join();
  leaf("here");
  CHECK_EQ(Batch(follower.drain())->rows, 1u);
  CHECK_EQ(Batch(other.drain())->rows, 4u);
}

// A thread that the source cannot tell of has what was carried to it, asked for every time; nothing carried is none.
void contexts_are_carried() {
  Contexts contexts(&kFakeCarrier);
  Session session(following());
  enter(5);
  uint32_t here = begin("here");
  end("here");
  CHECK_EQ(t_carried.context, 5u);
  CHECK_EQ(t_carried.origin, here);
  FakeCarried from_here = t_carried;
  std::thread([&] {
    leaf("before");
    t_carried = from_here;
    leaf("carried");
    t_carried.context = OTP_CONTEXT_MUTED;
    CHECK_EQ(begin("carried muted"), 0u);
    t_carried = FakeCarried();
    leaf("after");
    CHECK_EQ(t_here.resolved, 0);
  }).join();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 4u);
  CHECK_EQ(context_of(batch, "before"), 0u);
  CHECK_EQ(context_of(batch, "carried"), 5u);
  CHECK_EQ(context_of(batch, "after"), 0u);
}

// A thread of Python's without a context of its own (one of autograd's) has what is carried, though its version stays;
// one with a context keeps that.
void a_carried_context_fills_in_for_none() {
  Contexts contexts(&kFakeCarrier);
  Session session(following());
  std::thread([&] {
    enter(0);
    leaf("none");
    t_carried = {5, 4711};
    leaf("first task");
    t_carried = {6, 4711};
    leaf("second task");
    enter(7);
    leaf("own");
    CHECK_EQ(t_carried.context, 7u);
    CHECK_EQ(t_here.resolved, 2);
  }).join();
  Batch batch(session.drain());
  CHECK_EQ(context_of(batch, "none"), 0u);
  CHECK_EQ(context_of(batch, "first task"), 5u);
  CHECK_EQ(context_of(batch, "second task"), 6u);
  CHECK_EQ(context_of(batch, "own"), 7u);
}

// What a thread let its own state carry is over when it leaves the context, and again when torch puts it back.
void what_a_thread_carries_for_others_is_not_its_own() {
  Contexts contexts(&kFakeCarrier);
  Session session(following());
  enter(5);
  leaf("inside");
  FakeCarried saved = t_carried;
  enter(0);
  leaf("left");
  CHECK_EQ(t_carried.context, 0u);
  t_carried = saved;
  leaf("put back");
  CHECK_EQ(t_carried.context, 0u);
  t_carried = saved;
  t_here.version = 0;
  leaf("without a version");
  Batch batch(session.drain());
  CHECK_EQ(context_of(batch, "inside"), 5u);
  for (const char* name : {"left", "put back", "without a version"}) CHECK_EQ(context_of(batch, name), 0u);
}

// An event whose number in the test is that of its context.
void leaf_in(uint32_t context) {
  otp_begin_args args = event("leaf", "leaf");
  args.sequence_nr = context;
  CHECK(api().begin(&args) != 0);
  CHECK_EQ(end("leaf"), 1);
}

uint64_t check_contexts(const Batch& batch) {
  batch.check_sound();
  for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->context[i], batch->sequence_nr[i]);
  return batch->rows;
}

// A session that throws away its oldest events knows the contexts of those that stay, drained in between or not.
void eviction_keeps_contexts() {
  Contexts contexts;
  Session session(following(3 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  uint32_t context = 0;
  auto record = [&](uint32_t count, uint32_t each) {
    for (uint32_t i = 0; i < count; ++i) {
      enter(++context);
      for (uint32_t k = 0; k < each; ++k) leaf_in(context);
    }
  };
  record(1, 100);
  check_contexts(Batch(session.drain()));
  for (uint32_t k = 0; k < 7000; ++k) leaf_in(context);  // the chunk that told of this context goes
  record(3000, 1);
  CHECK(check_contexts(Batch(session.drain())) < 5000u);
  record(7, 3000);
  session.stop();
  Batch last(session.drain());
  CHECK(check_contexts(last) > 1000u);
  CHECK(last->dropped[OTP_LOSS_EVICTED] > 0);
}

// Threads that change their contexts all the time, for sessions that come, go, evict and are drained meanwhile: every
// event has its context, and nothing is lost uncounted.
void threads_in_many_contexts() {
  constexpr int kThreads = 4, kEvents = 60000 / kSlowdown;
  Contexts contexts(&kFakeCarrier);
  Session live(following(8 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST)), all(following(1u << 30)),
      plain(options(1u << 30));
  std::atomic<int> working{kThreads};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < kEvents; ++i) {
        uint32_t context = t * kEvents + i / (1 + t) + 1;
        if (i % (1 + t) == 0) enter(context);
        leaf_in(context);
      }
      working.fetch_sub(1);
    });
  }
  uint64_t rows = 0, dropped = 0;
  auto drain = [&] {
    Batch batch(live.drain());
    rows += check_contexts(batch);
    dropped += batch.dropped();
  };
  while (working.load() > 0) {
    drain();
    Session passing(following());
    std::this_thread::yield();
    check_contexts(Batch(passing.drain()));
  }
  for (std::thread& thread : threads) thread.join();
  drain();
  constexpr uint64_t kProduced = uint64_t{kThreads} * kEvents;
  CHECK_EQ(rows + dropped, kProduced);
  CHECK_EQ(check_contexts(Batch(all.drain())), kProduced);
  CHECK_EQ(Batch(plain.drain())->rows, kProduced);
}

// In a child nobody follows and nothing is muted; a new session there finds the source again, and asks it.
void a_child_asks_anew() {
  Contexts contexts;
  Session session(following());
  CHECK_EQ(otp_session_mute_roots(session, 1), OTP_OK);
  enter(1);
  leaf("in the parent");
  in_child([&] {
    CHECK_EQ(otp_session_mute_roots(session, 0), OTP_E_FORKED);
    t_here.context = 2;
    Session own(following());
    leaf("in the child");
    enter(0);
    leaf("root of the child");
    Batch batch(own.drain());
    CHECK_EQ(batch->rows, 2u);
    CHECK_EQ(context_of(batch, "in the child"), 2u);
    CHECK_EQ(context_of(batch, "root of the child"), 0u);
  });
  leaf("in the parent again");
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 2u);
  CHECK_EQ(context_of(batch, "in the parent again"), 1u);
}

// A process that is forked while its thread asks the source, where the child starts a session too: the event around it
// is the parent's alone, and the child continues with a recorder of its own.
void a_fork_inside_the_source() {
  Contexts contexts;
  Session session(following());
  enter(1);
  bool is_child = false;
  Session* own = nullptr;
  pid_t child = -1;
  t_here.inside = [&] {
    std::fflush(nullptr);
    child = fork();
    is_child = child == 0;
    if (is_child) own = new Session;
  };
  uint32_t thread = begin("around the fork");
  if (is_child) {
    alarm(60);
    t_here.inside = nullptr;
    CHECK_EQ(thread, 0u);
    CHECK_EQ(end("around the fork"), 0);
    Session follower(following());
    leaf("in the child");
    Batch all(own->drain()), some(follower.drain());
    CHECK_EQ(all->rows, 1u);
    CHECK_EQ(some->rows, 1u);
    CHECK_EQ(context_of(some, "in the child"), 1u);
    _exit(0);
  }
  t_here.inside = nullptr;
  CHECK_EQ(end("around the fork"), 1);
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->context[0], 1u);
}

}  // namespace

int main() {
  RUN_CLEAN(nothing_is_asked_where_nothing_was_carried);
  RUN_CLEAN(a_thread_can_be_muted);
  RUN_CLEAN(contexts_are_carried);
  RUN_CLEAN(a_carried_context_fills_in_for_none);
  RUN_CLEAN(what_a_thread_carries_for_others_is_not_its_own);
  RUN_CLEAN(eviction_keeps_contexts);
  RUN_CLEAN(threads_in_many_contexts);
  RUN_CLEAN(a_child_asks_anew);
  RUN_CLEAN(a_fork_inside_the_source);
}
