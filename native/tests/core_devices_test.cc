// What the device source hears: the begin and the end of what is recorded for sessions that request it, by the event's
// id.
#include <functional>
#include <mutex>
#include <thread>

#include "core_support.h"

namespace {

struct Heard {
  char what;  // B: begin, E: end
  uint64_t id;
  uint32_t consumers;
};

std::mutex g_mutex;
std::vector<Heard> g_heard;
bool g_refuses = false;
std::function<void()> g_at_end;

int hear_begin(uint64_t id, const otp_begin_args* event, uint32_t consumers) {
  std::lock_guard<std::mutex> hold(g_mutex);
  CHECK(event->kind != OTP_EVENT_FRAME);
  g_heard.push_back({'B', id, consumers});
  return g_refuses ? 0 : 1;
}

void hear_end(uint64_t id) {
  std::lock_guard<std::mutex> hold(g_mutex);
  g_heard.push_back({'E', id, 0});
  if (g_at_end) g_at_end();
}

const otp_device_source kSource = {hear_begin, hear_end};

class Listening {
 public:
  Listening() {
    g_heard.clear();
    g_refuses = false;
    g_at_end = nullptr;
    api().set_device_source(&kSource);
  }
  ~Listening() { api().set_device_source(nullptr); }
};

otp_session_options with_devices(uint64_t budget = kPlenty, uint32_t policy = OTP_FULL_DROP_NEWEST) {
  otp_session_options requested = options(budget, policy);
  requested.devices = 1;
  return requested;
}

std::string heard() {
  std::string text;
  for (const Heard& one : g_heard) text += one.what;
  return text;
}

// Each event is told of by its id at its begin and at its end, in the order in which things happened.
void begins_and_ends_are_heard() {
  Listening listening;
  Session session(with_devices());
  begin("outer");
  leaf("one");
  leaf("two");
  end("outer");
  leaf("after");
  Batch batch(session.drain());
  CHECK_EQ(heard(), std::string("BBEBEEBE"));
  const char* names[] = {"outer", "one", "one", "two", "two", "outer", "after", "after"};
  for (size_t i = 0; i < g_heard.size(); ++i) CHECK_EQ(g_heard[i].id, batch->id[batch.row(names[i])]);
  for (const Heard& one : g_heard)
    if (one.what == 'B') CHECK_EQ(one.consumers, otp_session_consumer(session));
}

// A session that requests no devices has its events unmarked, alone and beside one that does; and the marks are for
// that one only.
void only_for_those_that_request_it() {
  Listening listening;
  Session plain;
  leaf("alone");
  CHECK_EQ(heard(), std::string());
  {
    Session session(with_devices());
    leaf("beside");
    CHECK_EQ(heard(), std::string("BE"));
    CHECK_EQ(g_heard[0].consumers, otp_session_consumer(session));
  }
  leaf("afterwards");
  CHECK_EQ(heard(), std::string("BE"));
  CHECK_EQ(Batch(plain.drain())->rows, 3u);
}

// An event that has been drained as ended has its mark: the other way round, a drain between the two would send it
// without its time.
void a_drain_finds_no_end_without_its_mark() {
  Listening listening;
  Session session(with_devices());
  begin("event");
  g_at_end = [&] {
    Batch between(session.drain());
    CHECK_EQ(between->rows, 0u);
    CHECK_EQ(between->open_count, 1u);
  };
  CHECK_EQ(end("event"), 1);
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 1u);
  CHECK_EQ(g_heard[1].id, batch->id[0]);
}

// What is asked twice for one event, as torch does where two observers are there, is one mark.
void a_second_call_is_no_second_mark() {
  Listening listening;
  Session session(with_devices());
  begin("event");
  CHECK_EQ(begin("event"), 0u);
  CHECK_EQ(end("event"), 1);
  CHECK_EQ(end("event"), 0);
  CHECK_EQ(heard(), std::string("BE"));
}

// The end of an event that the source did not mark is not told.
void refused_marks_have_no_end() {
  Listening listening;
  Session session(with_devices());
  g_refuses = true;
  begin("outer");
  g_refuses = false;
  leaf("inner");
  end("outer");
  CHECK_EQ(heard(), std::string("BBE"));
}

// Calls of functions are not marked, and cost no look at the source.
void frames_are_not_marked() {
  Listening listening;
  Session session(with_devices());
  uint32_t name = api().intern("call", UINT32_MAX, OTP_NAME_CODE);
  CHECK(api().begin_frame("frame", name, 0, otp_session_consumer(session)) != 0);
  leaf("inside");
  CHECK_EQ(api().end_frame("frame", 0), 1);
  CHECK_EQ(heard(), std::string("BE"));
  CHECK_EQ(g_heard[0].id, Batch(session.drain())->id[1]);
}

// Events that end in another order, that wait as coroutines do, or that an exception leaves are told of by their own
// ids.
void odd_ends_are_heard() {
  Listening listening;
  Session session(with_devices());
  begin("first");
  begin("second");
  CHECK_EQ(end("first"), 1);
  CHECK_EQ(end("second"), 1);
  begin("waits");
  CHECK_EQ(api().suspend("waits"), 1);
  leaf("meanwhile");
  CHECK_EQ(api().resume("waits"), 1);
  CHECK_EQ(api().end("waits", OTP_FLAG_ERROR, "ValueError", UINT32_MAX), 1);
  Batch batch(session.drain());
  CHECK_EQ(heard(), std::string("BBEEBBEE"));
  const char* names[] = {"first", "second", "first", "second", "waits", "meanwhile", "meanwhile", "waits"};
  for (size_t i = 0; i < g_heard.size(); ++i) CHECK_EQ(g_heard[i].id, batch->id[batch.row(names[i])]);
}

// What ends on another thread is not told, since its mark is its own thread's.
void ends_elsewhere_are_not_heard() {
  Listening listening;
  Session session(with_devices());
  uint32_t here = begin("async");
  std::thread([&] { CHECK_EQ(api().end_elsewhere("async", here, 0, 0, nullptr, 0), 1); }).join();
  leaf("next");
  CHECK_EQ(heard(), std::string("BBE"));
}

// What a full session drops is not marked.
void dropped_events_are_not_marked() {
  Listening listening;
  Session session(with_devices(2 * OTP_CHUNK_BYTES));
  for (int i = 0; i < 10000; ++i) leaf("event");
  Batch batch(session.drain());
  CHECK(batch.dropped() > 0);
  size_t begins = 0;
  for (const Heard& one : g_heard) begins += one.what == 'B';
  CHECK_EQ(begins, batch->rows);
}

// After the stop of a session its bit is another's, who may request no devices.
void the_next_owner_of_a_bit_is_not_marked() {
  Listening listening;
  for (int i = 0; i < 2 * OTP_MAX_SESSIONS; ++i) {
    Session session(i % 2 == 0 ? with_devices() : options());
    leaf("event");
    CHECK_EQ(heard(), std::string(i % 2 == 0 ? "BE" : ""));
    g_heard.clear();
  }
}

// The clock that sources are given is that of the events.
void the_clock_is_the_recorders() {
  int64_t before = otp_now_ns();
  uint64_t ticks = api().ticks();
  int64_t between = api().unix_ns(ticks), after = api().unix_ns(0);
  CHECK(before <= between && between <= after && after <= otp_now_ns());
}

}  // namespace

int main() {
  RUN_CLEAN(begins_and_ends_are_heard);
  RUN_CLEAN(only_for_those_that_request_it);
  RUN_CLEAN(a_drain_finds_no_end_without_its_mark);
  RUN_CLEAN(a_second_call_is_no_second_mark);
  RUN_CLEAN(refused_marks_have_no_end);
  RUN_CLEAN(frames_are_not_marked);
  RUN_CLEAN(odd_ends_are_heard);
  RUN_CLEAN(ends_elsewhere_are_not_heard);
  RUN_CLEAN(dropped_events_are_not_marked);
  RUN_CLEAN(the_next_owner_of_a_bit_is_not_marked);
  RUN_CLEAN(the_clock_is_the_recorders);
  return 0;
}
