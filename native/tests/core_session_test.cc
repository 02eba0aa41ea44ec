// Sessions: what each sees, whatever the others do, and what each answers when it cannot.
#include <atomic>
#include <memory>
#include <thread>

#include "core_support.h"

namespace {

otp_session_options here_only() { return options(kPlenty, OTP_FULL_DROP_NEWEST, 0); }

// Sixteen sessions record side by side, each its own time; the seventeenth is told so, and can start when one is free.
void sixteen_sessions_and_no_more() {
  std::vector<std::unique_ptr<Session>> sessions;
  uint32_t bits = 0;
  for (int i = 0; i < OTP_MAX_SESSIONS; ++i) {
    sessions.push_back(std::make_unique<Session>());
    uint32_t bit = otp_session_consumer(*sessions.back());
    CHECK(bit != 0 && (bits & bit) == 0);
    bits |= bit;
    leaf("event");
  }
  CHECK_EQ(bits, 0xffffu);
  CHECK_EQ(recorder_stats().sessions, 16u);
  CHECK_EQ(*api().active, bits);
  Session late(options(), false);
  CHECK_EQ(otp_session_start(late), OTP_E_TOO_MANY_SESSIONS);
  CHECK_EQ(otp_session_consumer(late), 0u);
  for (uint64_t i = 0; i < sessions.size(); ++i) {
    sessions[i]->stop();
    CHECK_EQ(Batch(sessions[i]->drain())->rows, 16 - i);
  }
  late.start();  // a drained session has given its bit back
  leaf("late");
  late.stop();
  CHECK_EQ(Batch(late.drain())->rows, 1u);
}

// A bit that has come free is the last to be given out again.
void bits_go_round() {
  std::vector<uint32_t> bits;
  for (int i = 0; i < 2 * OTP_MAX_SESSIONS; ++i) bits.push_back(otp_session_consumer(Session()));
  for (int i = 0; i < OTP_MAX_SESSIONS; ++i) {
    CHECK_EQ(bits[i], bits[i + OTP_MAX_SESSIONS]);
    for (int k = 0; k < i; ++k) CHECK(bits[i] != bits[k]);
  }
}

// A bit that is reserved stays its session's when that has stopped and was drained or thrown away, until it is not any
// more, or freed.
void a_reserved_bit_is_nobody_elses() {
  for (int how = 0; how < 3; ++how) {
    Session reserved;
    uint32_t bit = otp_session_consumer(reserved);
    CHECK_EQ(otp_session_reserve(reserved, 1), OTP_OK);
    reserved.stop();
    if (how == 0) Batch(reserved.drain());
    if (how == 1) CHECK_EQ(otp_session_discard(reserved), OTP_OK);
    for (int i = 0; i < 2 * OTP_MAX_SESSIONS; ++i) CHECK(otp_session_consumer(Session()) != bit);
    CHECK_EQ(otp_session_reserve(reserved, 0), OTP_OK);
    bool comes_round = false;
    for (int i = 0; i < OTP_MAX_SESSIONS; ++i) comes_round |= otp_session_consumer(Session()) == bit;
    CHECK_EQ(comes_round, how != 2);  // what was neither drained nor thrown away keeps it
  }
  CHECK_EQ(recorder_stats().sessions, 0u);
}

// What cannot be done answers with its status, and changes nothing.
void wrong_calls_are_refused() {
  otp_session* none = nullptr;
  otp_session_options small = options(OTP_CHUNK_BYTES - 1);
  CHECK_EQ(otp_session_new(&small, &none), OTP_E_BUDGET_TOO_SMALL);
  CHECK(none == nullptr);
  otp_session_free(nullptr);
  otp_batch_free(nullptr);
  Session session(options(), false);
  otp_batch* batch = nullptr;
  CHECK_EQ(otp_session_stop(session), OTP_OK);
  CHECK_EQ(otp_session_drain(session, 0, &batch), OTP_E_STATE);
  CHECK_EQ(session.stats().start_ns, 0);
  session.start();
  CHECK_EQ(otp_session_start(session), OTP_E_STATE);
  leaf("kept");
  session.stop();
  CHECK_EQ(otp_session_stop(session), OTP_OK);
  CHECK_EQ(otp_session_start(session), OTP_E_STATE);
  CHECK_EQ(Batch(session.drain())->rows, 1u);
  CHECK_EQ(Batch(session.drain())->rows, 0u);
  CHECK(session.stats().stop_ns >= session.stats().start_ns && session.stats().start_ns > 0);
  for (int status = -7; status <= 0; ++status) CHECK(otp_status_text(status)[0] != 0);
  Session never_started(options(), false);
}

// Two sessions that overlap on one thread, the first to start being the first to stop, each see their own time.
void overlapping_sessions_see_their_own_time() {
  auto first = std::make_unique<Session>(here_only());
  leaf("first only");
  begin("open at the second's start");
  Session second(here_only());
  leaf("both");
  end("open at the second's start");
  begin("open at the first's stop");
  first->stop();
  end("open at the first's stop");
  leaf("second only");
  Batch of_first(first->drain());
  first.reset();
  leaf("second only, later");
  second.stop();
  leaf("neither");
  Batch of_second(second.drain());
  of_first.check_sound();
  of_second.check_sound();
  CHECK_EQ(of_first->rows, 4u);
  CHECK_EQ(of_first.parent_name("both"), "open at the second's start");
  CHECK_EQ(of_first->flags[of_first.row("open at the first's stop")], OTP_FLAG_UNFINISHED);
  CHECK(of_first.has("first only"));
  CHECK_EQ(of_second->rows, 4u);
  CHECK_EQ(of_second.parent_name("both"), "");
  CHECK_EQ(of_second->flags[of_second.row("open at the first's stop")], 0);
  CHECK(of_second.has("second only") && of_second.has("second only, later"));
  CHECK_EQ(of_first->id[of_first.row("both")], of_second->id[of_second.row("both")]);
}

// A session can be stopped, drained and freed on other threads than the one that started it, while events come.
void control_from_any_thread() {
  std::atomic<bool> done{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&] {
      while (!done.load()) {
        begin("outer");
        leaf("inner");
        end("outer");
      }
    });
  }
  for (int round = 0; round < 60; ++round) {
    auto session = std::make_unique<Session>(options(8 * OTP_CHUNK_BYTES, round % 2));
    auto other = std::make_unique<Session>(options(kPlenty));
    std::thread([&] { session->stop(); }).join();
    std::thread([&] { Batch(session->drain()).check_sound(); }).join();
    std::thread([&] { session.reset(); }).join();
    Batch(other->drain()).check_sound();
    if (round % 3 == 0) other->stop();
    other.reset();  // running, two times out of three
  }
  done.store(true);
  for (std::thread& thread : busy) thread.join();
}

// A session that starts while a chunk is half full begins there: no event of before, all ids and parents right.
void a_session_begins_in_the_middle_of_a_chunk() {
  Session first(here_only());
  begin("outer");
  for (int i = 0; i < 100; ++i) leaf("before");
  Session second(here_only());
  for (int i = 0; i < 2000; ++i) leaf("after");  // into the next chunk
  end("outer");
  second.stop();
  first.stop();
  Batch of_first(first.drain()), of_second(second.drain());
  CHECK_EQ(of_second->rows, 2000u);
  CHECK_EQ(of_first->rows, 2101u);
  for (uint64_t i = 0; i < of_second->rows; ++i) {
    CHECK_EQ(of_second->id[i], of_first->id[i + 101]);
    CHECK_EQ(of_second->end[i], of_first->end[i + 101]);
    CHECK_EQ(of_second->parent[i], -1);
    CHECK_EQ(of_second->flags[i], 0);
  }
}

std::atomic<uint32_t> g_hooked{0};
thread_local bool t_hooked = false;
uint32_t hook() { return t_hooked ? g_hooked.load() : 0; }

// A session of one thread sees that thread, and those for which the source's hook or the event itself names it.
void a_thread_scoped_session_sees_its_threads() {
  Session session(here_only());
  g_hooked.store(otp_session_consumer(session));
  api().set_scope_hook(hook);
  leaf("here");
  std::thread([] {
    CHECK_EQ(begin("there"), 0u);
    CHECK_EQ(end("there"), 0);
    t_hooked = true;
    leaf("there, hooked");
  }).join();
  std::thread([&] {
    otp_begin_args args = event("there, named", "there, named");
    args.scope_mask = otp_session_consumer(session);
    CHECK(api().begin(&args) != 0);
    end("there, named");
    CHECK_EQ(begin("there, unnamed"), 0u);
  }).join();
  api().set_scope_hook(nullptr);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 3u);
  CHECK_EQ(batch->thread_count, 3u);
  CHECK(batch.has("here") && batch.has("there, hooked") && batch.has("there, named"));
}

// A session that requests a thread's events now and then gets those, under their own ids, across chunks and drains.
void a_scope_that_comes_and_goes() {
  Session always(here_only());
  Session sometimes(options(kPlenty, OTP_FULL_DROP_NEWEST, 0));
  uint32_t bit = otp_session_consumer(sometimes);
  std::map<int64_t, uint64_t> all, some;  // sequence number to id
  constexpr int kEvents = 40000 / kSlowdown;
  auto take = [](Session& session, std::map<int64_t, uint64_t>* into) {
    Batch batch(session.drain());
    batch.check_sound();
    for (uint64_t i = 0; i < batch->rows; ++i) {
      CHECK(into->emplace(batch->sequence_nr[i], batch->id[i]).second);
      CHECK_EQ(batch->flags[i], 0);
    }
  };
  // On a thread that neither was started on, so that the events say what they are for.
  std::thread([&] {
    for (int i = 0; i < kEvents; ++i) {
      otp_begin_args args = event("event", "event");
      args.sequence_nr = i;
      args.scope_mask = otp_session_consumer(always);
      if (i / 700 % 3 != 1) args.scope_mask |= bit;  // 1365 events fill a chunk
      CHECK(api().begin(&args) != 0);
      if (i % 5000 == 4321) take(sometimes, &some);  // with the event open
      end("event");
    }
  }).join();
  always.stop();
  sometimes.stop();
  take(always, &all);
  take(sometimes, &some);
  CHECK_EQ(all.size(), static_cast<size_t>(kEvents));
  for (auto& [number, id] : all) {
    bool requested = number / 700 % 3 != 1;
    CHECK_EQ(some.count(number), requested ? 1u : 0u);
    if (requested) CHECK_EQ(some[number], id);
  }
}

// Inputs go to the session that keeps them, word for word, and to no other; what was cut is said only there.
void inputs_are_kept_for_those_who_request_them() {
  Session with(options(kPlenty, OTP_FULL_DROP_NEWEST, 1, 1));
  Session without;
  CHECK_EQ(*api().requests_inputs, otp_session_consumer(with));
  std::vector<int64_t> words;
  for (int64_t i = 0; i < 300; ++i) words.push_back(i * 0x0123456789abcd);
  for (uint32_t count : {0u, 1u, 300u}) {
    otp_begin_args args = event("event", "event");
    args.inputs = words.data();
    args.input_words = count;
    args.flags = count == 300 ? OTP_FLAG_INPUTS_CUT : 0;
    api().begin(&args);
    end("event");
  }
  with.stop();
  CHECK_EQ(*api().requests_inputs, 0u);
  without.stop();
  Batch kept(with.drain()), stripped(without.drain());
  CHECK_EQ(kept->rows, 3u);
  CHECK_EQ(kept->inputs[0], -1);
  CHECK_EQ(kept->input_word_count, 301u);
  CHECK_EQ(kept->input_words[kept->inputs[1]], 0);
  CHECK_EQ(std::memcmp(kept->input_words + kept->inputs[2], words.data(), 300 * sizeof(int64_t)), 0);
  CHECK_EQ(kept->flags[2], OTP_FLAG_INPUTS_CUT);
  CHECK_EQ(kept->flags[1], 0);
  CHECK_EQ(stripped->rows, 3u);
  CHECK(stripped->inputs == nullptr && stripped->input_words == nullptr);
  CHECK_EQ(stripped->flags[2], 0);
}

// Nothing is recorded, and no end found, when no session runs.
void off_is_off() {
  CHECK_EQ(*api().active, 0u);
  CHECK_EQ(begin("off"), 0u);
  CHECK_EQ(end("off"), 0);
  CHECK_EQ(api().suspend("off"), 0);
  CHECK_EQ(api().resume("off"), 0);
  CHECK_EQ(api().abi_version, static_cast<uint32_t>(OTP_ABI_VERSION));
  CHECK_EQ(api().record_format_version, static_cast<uint32_t>(OTP_RECORD_FORMAT_VERSION));
}

}  // namespace

int main() {
  RUN_CLEAN(off_is_off);
  RUN_CLEAN(sixteen_sessions_and_no_more);
  RUN_CLEAN(bits_go_round);
  RUN_CLEAN(a_reserved_bit_is_nobody_elses);
  RUN_CLEAN(wrong_calls_are_refused);
  RUN_CLEAN(overlapping_sessions_see_their_own_time);
  RUN_CLEAN(control_from_any_thread);
  RUN_CLEAN(a_session_begins_in_the_middle_of_a_chunk);
  RUN_CLEAN(a_thread_scoped_session_sees_its_threads);
  RUN_CLEAN(a_scope_that_comes_and_goes);
  RUN_CLEAN(inputs_are_kept_for_those_who_request_them);
}
