// Kinds of events: a session gets those that it requests, at its own cost only.
#include "core_support.h"

namespace {

otp_session_options requesting(uint32_t kinds) {
  otp_session_options requested = options();
  requested.kinds = kinds;
  return requested;
}

uint32_t begin_kind(const char* name, uint8_t kind) {
  otp_begin_args args = event(name, name);
  args.kind = kind;
  args.nests = kind != OTP_EVENT_OPERATOR;
  return api().begin(&args);
}

// Each session has its kinds and the parents among them, whatever the others request; 0 requests all.
void sessions_have_the_kinds_that_they_request() {
  Session modules(requesting(1u << OTP_EVENT_MODULE)), operators(requesting(1u << OTP_EVENT_OPERATOR));
  Session two(requesting(1u << OTP_EVENT_LABEL | 1u << OTP_EVENT_MODULE)), all;
  for (int i = 0; i < 3000; ++i) {  // over several chunks
    begin_kind("module", OTP_EVENT_MODULE);
    begin_kind("label", OTP_EVENT_LABEL);
    begin_kind("operator", OTP_EVENT_OPERATOR);
    begin_kind("inner module", OTP_EVENT_MODULE);
    for (const char* name : {"inner module", "operator", "label", "module"}) CHECK_EQ(end(name), 1);
  }
  Batch of_modules(modules.drain()), of_operators(operators.drain()), of_two(two.drain()), of_all(all.drain());
  for (const Batch* batch : {&of_modules, &of_operators, &of_two, &of_all}) batch->check_sound();
  CHECK_EQ(of_all->rows, 12000u);
  CHECK_EQ(of_modules->rows, 6000u);
  CHECK_EQ(of_operators->rows, 3000u);
  CHECK_EQ(of_two->rows, 9000u);
  for (uint64_t i = 0; i < of_modules->rows; ++i) {
    CHECK_EQ(of_modules->kind[i], OTP_EVENT_MODULE);
    CHECK_EQ(of_modules->parent[i], i % 2 == 0 ? -1 : static_cast<int32_t>(i) - 1);
  }
  for (uint64_t i = 0; i < of_operators->rows; ++i) CHECK_EQ(of_operators->parent[i], -1);
  for (uint64_t i = 0; i < of_two->rows; ++i)
    CHECK_EQ(of_two->parent[i], i % 3 == 0 ? -1 : static_cast<int32_t>(i) - 1);
  for (uint64_t i = 0; i < of_all->rows; ++i) CHECK_EQ(of_all->flags[i], 0);
}

// A kind that nobody requests does not begin, and its end finds nothing; the bits of running sessions say so.
void unrequested_kinds_do_not_begin() {
  CHECK_EQ(api().active[0], 0u);
  Session session(requesting(1u << OTP_EVENT_LABEL));
  uint32_t bit = otp_session_consumer(session);
  CHECK_EQ(api().active[0], bit);
  CHECK_EQ(api().active[OTP_EVENT_LABEL], bit);
  CHECK_EQ(api().active[OTP_EVENT_OPERATOR] | api().active[OTP_EVENT_MODULE], 0u);
  CHECK_EQ(begin("operator"), 0u);
  CHECK_EQ(end("operator"), 0);
  CHECK(begin_kind("label", OTP_EVENT_LABEL) != 0);
  CHECK_EQ(begin("operator"), 0u);
  CHECK_EQ(end("operator"), 0);
  CHECK_EQ(end("label"), 1);
  session.stop();
  CHECK_EQ(api().active[0] | api().active[OTP_EVENT_LABEL], 0u);
  CHECK_EQ(Batch(session.drain())->rows, 1u);
}

// Modules nest like labels: one key can be open several times.
void modules_nest() {
  Session session;
  begin_kind("module", OTP_EVENT_MODULE);
  begin_kind("module", OTP_EVENT_MODULE);
  CHECK_EQ(end("module"), 1);
  CHECK_EQ(end("module"), 1);
  CHECK_EQ(end("module"), 0);
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 2u);
  CHECK_EQ(batch->parent[1], 0);
}

// Events of sessions that request other kinds stay open when a thread's stack is full and cleared of forgotten ones.
void a_full_stack_keeps_what_others_have_open() {
  Session labels(requesting(1u << OTP_EVENT_LABEL)), operators(requesting(1u << OTP_EVENT_OPERATOR));
  std::vector<char> keys(OTP_MAX_DEPTH);
  begin_kind("label", OTP_EVENT_LABEL);
  for (size_t i = 1; i < keys.size(); ++i) CHECK(begin(&keys[i], "deep") != 0);
  CHECK_EQ(begin("too deep"), 0u);
  for (size_t i = keys.size(); i-- > 1;) CHECK_EQ(end(&keys[i]), 1);
  CHECK_EQ(end("label"), 1);
  Batch batch(labels.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(batch->flags[0], 0);
  CHECK_EQ(operators.stats().dropped[OTP_LOSS_DEPTH], 1u);
  CHECK_EQ(labels.stats().dropped[OTP_LOSS_DEPTH], 0u);
}

}  // namespace

int main() {
  RUN_CLEAN(sessions_have_the_kinds_that_they_request);
  RUN_CLEAN(unrequested_kinds_do_not_begin);
  RUN_CLEAN(modules_nest);
  RUN_CLEAN(a_full_stack_keeps_what_others_have_open);
}
