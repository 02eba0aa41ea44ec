// What the tracer of calls needs of the core: names by their ids, and begins for those sessions only that came later.
#include <thread>

#include "core_support.h"

namespace {

uint32_t begin_frame(const char* key, uint32_t not_for = 0) {
  otp_begin_args args = event(key, nullptr);
  args.name_size = api().intern(key, UINT32_MAX, OTP_NAME_CODE);
  args.kind = OTP_EVENT_FRAME;
  args.nests = 1;
  args.not_for = not_for;
  return api().begin(&args);
}

// An event whose name is given as an id has the text that was interned, as has the empty name.
void names_can_be_ids() {
  Session session;
  CHECK(begin_frame("one") != 0);
  CHECK(begin_frame("two") != 0);
  CHECK(begin_frame("") != 0);
  for (const char* key : {"", "two", "one"}) CHECK_EQ(end(key), 1);
  Batch batch(session.drain());
  CHECK_EQ(batch.name(0), std::string("one"));
  CHECK_EQ(batch.name(1), std::string("two"));
  CHECK_EQ(batch->name[2], 0u);
}

// A session that starts while calls are open gets them begun for itself alone; those before it see nothing of that, and
// what comes then has its parents in both.
void newcomers_get_what_is_open() {
  Session first;
  begin_frame("outer");
  begin_frame("inner");
  Session second;
  uint32_t not_for = otp_session_consumer(first);
  CHECK(begin_frame("outer", not_for) != 0);
  CHECK(begin_frame("inner", not_for) != 0);
  begin("operator");
  CHECK_EQ(end("operator"), 1);
  for (const char* key : {"inner", "outer"})
    for (int i = 0; i < 2; ++i) CHECK_EQ(end(key), 1);
  CHECK_EQ(end("outer"), 0);
  for (Session* session : {&first, &second}) {
    Batch batch(session->drain());
    batch.check_sound();
    CHECK_EQ(batch->rows, 3u);
    CHECK_EQ(batch.parent_name("operator"), std::string("inner"));
    CHECK_EQ(batch.parent_name("inner"), std::string("outer"));
    for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->flags[i], 0);
  }
}

// An event that is for nobody does not begin.
void events_for_nobody_do_not_begin() {
  Session session;
  CHECK_EQ(begin_frame("frame", UINT32_MAX), 0u);
  CHECK_EQ(Batch(session.drain())->rows, 0u);
}

uint32_t id_of(const char* name) { return api().intern(name, UINT32_MAX, OTP_NAME_CODE); }

// The short way in makes the same events as the long one: names, nesting, identity, error flags.
void short_way_makes_the_same_events() {
  Session session;
  uint32_t consumer = otp_session_consumer(session);
  CHECK(api().begin_frame("outer", id_of("outer"), 0, consumer) != 0);
  CHECK(api().begin_frame("inner", id_of("inner"), 7, consumer) != 0);
  begin("operator");
  CHECK_EQ(end("operator"), 1);
  CHECK_EQ(api().end_frame("inner", OTP_FLAG_ERROR), 1);
  CHECK_EQ(api().end_frame("outer", 0), 1);
  CHECK_EQ(api().end_frame("outer", 0), 0);
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 3u);
  CHECK_EQ(batch.parent_name("operator"), std::string("inner"));
  CHECK_EQ(batch.parent_name("inner"), std::string("outer"));
  CHECK_EQ(batch->fwd_thread[batch.row("inner")], 7u);
  CHECK_EQ(batch->flags[batch.row("inner")], OTP_FLAG_ERROR);
  CHECK_EQ(batch->kind[batch.row("outer")], OTP_EVENT_FRAME);
  CHECK_EQ(batch->sequence_nr[batch.row("outer")], -1);
}

// Only the sessions that are named get it, on threads that are in nobody's scope too.
void only_those_named_get_it() {
  Session first, second;
  std::thread([&first] {
    for (int i = 0; i < 3; ++i) {
      CHECK(api().begin_frame("frame", id_of("frame"), 0, otp_session_consumer(first)) != 0);
      CHECK_EQ(api().end_frame("frame", 0), 1);
    }
  }).join();
  CHECK_EQ(Batch(first.drain())->rows, 3u);
  CHECK_EQ(Batch(second.drain())->rows, 0u);
}

// A session that has stopped gets nothing, and a call that began before ends all the same.
void stopped_sessions_get_nothing() {
  Session session;
  uint32_t consumer = otp_session_consumer(session);
  CHECK(api().begin_frame("before", id_of("before"), 0, consumer) != 0);
  session.stop();
  CHECK_EQ(api().begin_frame("after", id_of("after"), 0, consumer), 0u);
  CHECK_EQ(api().end_frame("before", 0), 1);
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->flags[0], OTP_FLAG_UNFINISHED);
}

// More calls than the budget has room for, and calls too deep: each is recorded or counted.
void calls_are_recorded_or_counted() {
  otp_session_options requested = options();
  requested.budget_bytes = 2 * OTP_CHUNK_BYTES;
  Session session(requested);
  uint32_t consumer = otp_session_consumer(session);
  uint32_t name = id_of("frame");
  uint64_t begun = 0;
  for (uint32_t depth = 0; depth < OTP_MAX_DEPTH + 10; ++depth, ++begun)
    api().begin_frame(&requested, name, 0, consumer);
  for (uint32_t depth = 0; depth < OTP_MAX_DEPTH; ++depth) CHECK_EQ(api().end_frame(&requested, 0), 1);
  for (int i = 0; i < 5000; ++i, ++begun) {
    api().begin_frame(&requested, name, 0, consumer);
    CHECK_EQ(api().end_frame(&requested, 0), 1);
  }
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->dropped[OTP_LOSS_DEPTH], 10u);
  CHECK(batch->dropped[OTP_LOSS_BUDGET] > 0);
  CHECK_EQ(batch->rows + batch.dropped(), begun);
}

// A thread's calls end together, the innermost first, but for those with the named bits in their keys, and nothing else
// with them: on the thread itself, or on another one, and then they are not there any more when it looks.
void calls_end_together() {
  constexpr uintptr_t kOther = 4;
  auto key = [](uintptr_t number) { return reinterpret_cast<const void*>(number); };
  for (bool elsewhere : {false, true}) {
    Session session;
    uint32_t consumer = otp_session_consumer(session);
    uint32_t here = api().begin_frame(key(16), id_of("outer"), 0, consumer);
    begin("operator");
    CHECK(api().begin_frame(key(16 | kOther), id_of("other"), 0, consumer) != 0);
    CHECK(api().begin_frame(key(16), id_of("inner"), 0, consumer) != 0);
    auto end_them = [here] {
      CHECK_EQ(api().end_frames(here, kOther), 2u);
      CHECK_EQ(api().end_frames(here, kOther), 0u);
      CHECK_EQ(api().end_frames(here + 1000, kOther), 0u);
    };
    elsewhere ? std::thread(end_them).join() : end_them();
    CHECK_EQ(api().end_frame(key(16), 0), 0);
    CHECK_EQ(api().end_frame(key(16 | kOther), 0), 1);
    CHECK_EQ(end("operator"), 1);
    Batch batch(session.drain());
    CHECK_EQ(batch->rows, 4u);
    for (const char* name : {"outer", "inner"}) CHECK_EQ(batch->flags[batch.row(name)], elsewhere ? OTP_FLAG_ASYNC : 0);
    CHECK_EQ(batch->flags[batch.row("other")], 0);
    CHECK(batch->end[batch.row("inner")] <= batch->end[batch.row("outer")]);
  }
}

// What has begun before it was known has its own time, unless the thread has recorded something since.
void times_before_now() {
  Session session;
  uint64_t before = api().ticks();
  std::thread([before] {
    for (const char* key : {"first", "second"}) {
      otp_begin_args args = event(key, key);
      args.scope_mask = UINT32_MAX;
      args.ticks = before;
      CHECK(api().begin(&args) != 0);
      leaf(key == std::string("first") ? "between" : "last");
    }
    CHECK_EQ(end("second"), 1);
    CHECK_EQ(end("first"), 1);
  }).join();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK(batch->start[batch.row("first")] < batch->end[batch.row("first")]);
  CHECK_EQ(batch->start[batch.row("second")], batch->end[batch.row("between")]);
}

}  // namespace

int main() {
  RUN_CLEAN(short_way_makes_the_same_events);
  RUN_CLEAN(only_those_named_get_it);
  RUN_CLEAN(stopped_sessions_get_nothing);
  RUN_CLEAN(calls_are_recorded_or_counted);
  RUN_CLEAN(calls_end_together);
  RUN_CLEAN(times_before_now);
  RUN_CLEAN(names_can_be_ids);
  RUN_CLEAN(newcomers_get_what_is_open);
  RUN_CLEAN(events_for_nobody_do_not_begin);
}
