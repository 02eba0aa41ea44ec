// What the tracer of calls needs of the core: names by their ids, and begins for those sessions only that came later.
#include "core_support.h"

namespace {

uint32_t begin_frame(const char* key, uint32_t not_for = 0) {
  otp_begin_args args = event(key, nullptr);
  args.name_size = api().intern(key, UINT32_MAX);
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

}  // namespace

int main() {
  RUN_CLEAN(names_can_be_ids);
  RUN_CLEAN(newcomers_get_what_is_open);
  RUN_CLEAN(events_for_nobody_do_not_begin);
}
