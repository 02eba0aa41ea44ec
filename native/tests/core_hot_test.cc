// The begin and end that other libraries have inline, and events of allocators: what they write is, byte for byte, what
// the functions write.
#include "otel_torchprof/recorder_hot.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "core/drain.h"
#include "core/registry.h"
#include "core_context_support.h"

namespace {

namespace hot = otp::hot;

// An event's key says whether its source vouches for its name.
struct Key {
  int stable;
};
int is_stable(const void* key) { return static_cast<const Key*>(key)->stable; }

// What a library begins: an operator, as the torch library's.
struct Operator {
  const otp_begin_args& args;

  const void* key() const { return args.key; }
  uint8_t scope() const { return args.scope; }
  uint8_t kind() const { return args.kind; }
  bool nests() const { return args.nests != 0; }
  int64_t sequence_nr() const { return args.sequence_nr; }
  uint32_t fwd_thread() const { return args.fwd_thread; }
  uint32_t source_tid() const { return args.source_tid; }
  bool name(hot::Thread& thread, uint32_t* id) const {
    return thread.addresses.find(args.name, args.name_generation, id);
  }
  uint32_t inputs(uint8_t* place, uint32_t room, uint32_t consumers) const {
    if (args.input_words == 0) return 0;
    uint32_t bytes = static_cast<uint32_t>(sizeof(otp_record) + args.input_words * sizeof(int64_t));
    if (bytes > room || args.flags != 0) return hot::kNoRoom;
    auto* record = reinterpret_cast<otp_record*>(place);
    record->ticks = args.input_words;
    hot::write_head(record, OTP_RECORD_INPUTS, 0, consumers, 0);
    std::memcpy(record + 1, args.inputs, args.input_words * sizeof(int64_t));
    return bytes;
  }
  uint64_t now() const { return hot::ticks(api().hot.clock_is_tsc != 0); }
};

// How a program records: by the functions only, or inline where that can.
struct Way {
  bool is_inline;
  uint64_t inline_begins = 0, inline_calls = 0, inline_ends = 0, inline_memory = 0;

  void begin(const otp_begin_args& args) {
    if (is_inline && hot::begin_here(api().hot, Operator{args})) {
      ++inline_begins;
    } else {
      api().begin(&args);
    }
  }
  void end(const void* key, uint8_t flags, const char* error = nullptr) {
    if (is_inline && error == nullptr && hot::end_here(api().hot, key, flags)) {
      ++inline_ends;
    } else {
      api().end(key, flags, error, UINT32_MAX);
    }
  }
  void memory(const otp_memory_args& args) {
    if (is_inline && hot::memory_here(api().hot, args)) {
      ++inline_memory;
    } else {
      api().memory(&args);
    }
  }
  bool begin_call(const void* key, uint32_t name, uint32_t identity, uint32_t consumers) {
    bool begun = is_inline && hot::begin_call_here(api().hot, key, name, identity, consumers) != nullptr;
    inline_calls += begun;
    return begun || api().begin_frame(key, name, identity, consumers) != 0;
  }
  void end_call(const void* key) {
    bool ended = is_inline && hot::end_call_here(api().hot, key);
    inline_ends += ended;
    if (!ended) api().end_frame(key, 0);
  }
};

// Does at random, the same for the same seed, what a thread of a program does.
class Program {
 public:
  Program(uint32_t seed, Way* way) : d_random(seed), d_way(*way) {}

  // For that many sessions one after the other, some of them at the same time.
  void run(int steps, std::vector<std::unique_ptr<Session>>* sessions) {
    Contexts contexts;
    for (int i = 0; i < steps; ++i) {
      if (one_in(steps / 12)) change_sessions(sessions);
      step();
    }
    while (!d_open.empty()) end_at(d_open.size() - 1);
    for (auto& session : *sessions) session->stop();
  }

 private:
  struct Open {
    std::unique_ptr<Key> key;
    bool is_label;
    bool is_call = false;
  };

  uint32_t below(uint32_t limit) { return d_random() % limit; }
  bool one_in(int count) { return below(static_cast<uint32_t>(count)) == 0; }

  void change_sessions(std::vector<std::unique_ptr<Session>>* sessions) {
    if (sessions->size() > 2 && one_in(2)) (*sessions)[below(static_cast<uint32_t>(sessions->size()))]->stop();
    if (sessions->size() == 8) return;
    uint64_t budget = one_in(4) ? 2 * OTP_CHUNK_BYTES : kPlenty;
    otp_session_options requested = options(budget, OTP_FULL_DROP_NEWEST, one_in(4) ? 0 : 1, 1);
    requested.contexts = below(2);
    requested.memory = below(2);
    uint32_t kind = below(6);
    requested.kinds = kind == OTP_EVENT_OPERATOR || kind == OTP_EVENT_LABEL ? 1u << kind : 0;
    sessions->push_back(std::make_unique<Session>(requested));
  }

  void step() {
    uint32_t what = below(1000);
    if (what < 10) return enter(one_in(4) ? OTP_CONTEXT_MUTED : below(3));
    if (what < 14) return static_cast<void>(++d_generation);
    if (what < 30) return begin_label();
    if (what < 40) return wait();
    if (what < 45) return end_on_another_thread();
    if (what < 65) return allocate();
    if (d_open.size() < 30 && what < 110) return begin_call();
    if (d_open.size() < 30 && what < 520) return begin_operator();
    if (d_open.empty()) return;
    end_at(one_in(12) ? below(static_cast<uint32_t>(d_open.size())) : d_open.size() - 1);
  }

  const void* open(int stable, bool is_label) {
    d_open.push_back({std::make_unique<Key>(Key{stable}), is_label});
    return d_open.back().key.get();
  }

  void begin_operator() {
    static const char* const kNames[] = {"aten::a", "aten::b", "aten::c", "aten::d", "backward", "script"};
    uint32_t name = below(12) % 7 % 6;
    otp_begin_args args = event(open(name < 4 ? 1 : name == 4 ? 0 : -1, false), kNames[name]);
    int64_t words[600] = {2};
    args.scope = static_cast<uint8_t>(one_in(3) ? below(9) : 0);
    args.sequence_nr = static_cast<int64_t>(below(100)) - 1;
    args.fwd_thread = below(3);
    args.source_tid = 77;
    args.inputs = words;
    args.input_words = one_in(3) ? 1 + below(one_in(50) ? 600 : 12) : 0;
    args.flags = args.input_words != 0 && one_in(20) ? OTP_FLAG_INPUTS_CUT : 0;
    args.name_generation = d_generation;
    args.name_is_stable = is_stable;
    d_way.begin(args);
    if (one_in(10)) d_way.begin(args);  // another callback of torch's
  }

  void allocate() {
    otp_memory_args args{};
    args.bytes = static_cast<int64_t>(below(1000)) - 500;
    args.address = below(1000);
    args.total_allocated = below(1000);
    args.total_reserved = below(1000);
    args.device_type = static_cast<int32_t>(below(3));
    args.device_index = static_cast<int32_t>(below(3)) - 1;
    args.source_tid = 77;
    args.flags = one_in(20) ? OTP_MEMORY_OUT_OF_MEMORY : 0;
    d_way.memory(args);
  }

  void begin_label() {
    otp_begin_args args = label("label");
    args.key = open(0, true);
    if (api().begin(&args) == 0) d_open.pop_back();
  }

  void begin_call() {
    uint32_t consumers = api().active[OTP_EVENT_FRAME];
    if (consumers == 0) return;
    uint32_t name = api().intern(one_in(2) ? "f" : "g", UINT32_MAX, OTP_NAME_CODE);
    bool begun = d_way.begin_call(open(0, false), name, below(3), consumers);
    d_open.back().is_call = true;
    if (!begun) d_open.pop_back();
  }

  void end_at(size_t place) {
    const Key* key = d_open[place].key.get();
    bool fails = one_in(20);
    uint8_t flags = one_in(10) ? OTP_FLAG_ASYNC : 0;
    if (d_open[place].is_call && !fails) {
      d_way.end_call(key);
    } else {
      d_way.end(key, flags, fails ? "Error" : nullptr);
    }
    if (one_in(10)) d_way.end(key, flags);
    d_open.erase(d_open.begin() + static_cast<std::ptrdiff_t>(place));
  }

  // The innermost label is suspended, or one that is, resumed.
  void wait() {
    if (!d_waiting.empty() && one_in(2)) {
      api().resume(d_waiting.back().key.get());
      d_open.push_back(std::move(d_waiting.back()));
      d_waiting.pop_back();
    } else if (!d_open.empty() && d_open.back().is_label) {
      api().suspend(d_open.back().key.get());
      d_waiting.push_back(std::move(d_open.back()));
      d_open.pop_back();
    }
  }

  void end_on_another_thread() {
    if (d_open.empty()) return;
    size_t place = below(static_cast<uint32_t>(d_open.size()));
    const void* key = d_open[place].key.get();
    std::thread([key] { api().end_elsewhere(key, 0, 77, 0, nullptr, 0); }).join();
    d_ended.push_back(std::move(d_open[place]));  // its address must not be another's while it may be on the stack
    d_open.erase(d_open.begin() + static_cast<std::ptrdiff_t>(place));
  }

  std::mt19937 d_random;
  Way& d_way;
  uint32_t d_generation = 1;
  std::vector<Open> d_open, d_waiting, d_ended;
};

// What the sessions hold: all records but their times, for sessions in the order in which they were started.
std::vector<std::string> records_of(const std::vector<std::unique_ptr<Session>>& sessions) {
  std::vector<std::string> found;
  for (const auto& session : sessions) {
    std::string bytes;
    otp_session* held_by = *session;
    for (const otp::Held& held : held_by->held) {
      uint32_t size = held.chunk->readable_bytes();
      bytes += '|';
      for (uint32_t at = held.from, length = 0; at < size; at += length) {
        otp_record record;
        std::memcpy(&record, held.chunk->data() + at, sizeof record);
        length = otp::record_size(record, size - at);
        CHECK(length != 0);
        std::string text(reinterpret_cast<const char*>(held.chunk->data() + at), length);
        if (record.kind != OTP_RECORD_INPUTS && record.kind != OTP_RECORD_LOSS) text.replace(0, 8, 8, '\0');
        uint16_t consumers = 0;  // by the order of the sessions: their bits are others each time
        for (size_t i = 0; i < sessions.size(); ++i)
          if ((record.consumers & otp_session_consumer(*sessions[i])) != 0)
            consumers = static_cast<uint16_t>(consumers | 1u << i);
        std::memcpy(&text[offsetof(otp_record, consumers)], &consumers, sizeof consumers);
        bytes += text;
      }
    }
    found.push_back(bytes);
  }
  return found;
}

struct Outcome {
  std::vector<std::string> records;
  std::vector<std::string> rows;
  Way way;
};

Outcome outcome_of(uint32_t seed, bool is_inline) {
  Outcome outcome{{}, {}, {is_inline}};
  std::vector<std::unique_ptr<Session>> sessions;
  // Whoever holds chunks of the thread must not lose them when it ends, and all of it is one thread's.
  std::thread([&] { Program(seed, &outcome.way).run(40000 / kSlowdown, &sessions); }).join();
  outcome.records = records_of(sessions);
  for (auto& session : sessions) {
    Batch batch(session->drain());
    batch.check_sound();
    std::string rows = std::to_string(batch.dropped());
    for (uint64_t i = 0; i < batch->rows; ++i)
      rows += " " + batch.name(i) + ":" + std::to_string(batch->parent[i]) + ":" + std::to_string(batch->flags[i]);
    outcome.rows.push_back(rows);
  }
  return outcome;
}

// Whatever a thread does, and whatever sessions start and stop and contexts change, the records are the functions'.
void random_programs_record_the_same() {
  uint64_t begins = 0, calls = 0, ends = 0, memory = 0;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    Outcome expected = outcome_of(seed, false), found = outcome_of(seed, true);
    CHECK(found.records == expected.records);
    CHECK(found.rows == expected.rows);
    begins += found.way.inline_begins;
    calls += found.way.inline_calls;
    ends += found.way.inline_ends;
    memory += found.way.inline_memory;
  }
  CHECK(begins > 12 * 5000 / kSlowdown && ends > 12 * 5000 / kSlowdown);  // or nothing was compared
  CHECK(calls > 12 * 50 / kSlowdown && memory > 12 * 100 / kSlowdown);
}

otp_begin_args vouched(const Key* key, const char* name) {
  otp_begin_args args = event(key, name);
  args.name_generation = 1;
  args.name_is_stable = is_stable;
  args.source_tid = 77;
  return args;
}

bool begin_inline(const otp_begin_args& args) { return hot::begin_here(api().hot, Operator{args}); }
bool end_inline(const void* key) { return hot::end_here(api().hot, key, 0); }

// What is unusual is left alone: nothing is written and nothing is open, and the functions do it.
void what_is_unusual_is_left_to_the_functions() {
  std::thread([] {
    Key key{1};
    otp_begin_args args = vouched(&key, "aten::hot");
    CHECK(!begin_inline(args));  // no session
    Session session;
    CHECK(!begin_inline(args) && !end_inline(&key));  // a thread's first event
    CHECK(api().begin(&args) != 0 && end_inline(&key) && !end_inline(&key));
    CHECK(begin_inline(args) && end_inline(&key));
    args.name_generation = 2;
    CHECK(!begin_inline(args));  // a name that may be another one by now
    args.name_generation = 1;
    Session second;
    CHECK(!begin_inline(args));  // a session that the thread has not seen
    CHECK(api().begin(&args) != 0);
    second.stop();
    CHECK(!end_inline(&key));  // a session that has stopped
    CHECK_EQ(end(&key), 1);
    Key outer{1};
    CHECK(begin_inline(vouched(&outer, "aten::hot")) && begin_inline(args));
    CHECK(!end_inline(&outer));  // not the innermost
    CHECK_EQ(end(&outer), 1);
    CHECK(end_inline(&key));
    std::vector<Key> keys(OTP_MAX_DEPTH + 1, Key{1});
    for (size_t i = 0; i < OTP_MAX_DEPTH; ++i) CHECK(begin_inline(vouched(&keys[i], "aten::hot")));
    CHECK(!begin_inline(vouched(&keys.back(), "aten::hot")));  // too deep
    for (size_t i = OTP_MAX_DEPTH; i-- > 0;) CHECK(end_inline(&keys[i]));
    uint64_t until_full = 0;
    while (begin_inline(args) && end_inline(&key)) ++until_full;
    CHECK(until_full > 0 && until_full < OTP_CHUNK_BYTES / sizeof(otp_record_begin));
    session.stop();
    Batch batch(session.drain());
    CHECK_EQ(batch->rows, 5 + OTP_MAX_DEPTH + until_full);
    CHECK_EQ(batch.dropped(), 0u);
  }).join();
}

// For a session that follows contexts nothing has to be asked where the context is that of before; another one is, and
// what is muted has begun nothing.
void a_context_that_stays_is_followed_inline() {
  std::thread([] {
    Contexts contexts;
    Session session(following());
    Key outer{1}, inner{1};
    otp_begin_args around = vouched(&outer, "aten::hot"), inside = vouched(&inner, "aten::hot");
    enter(1);
    CHECK(!begin_inline(around));
    CHECK(api().begin(&around) != 0 && begin_inline(inside) && end_inline(&inner) && end_inline(&outer));
    CHECK(begin_inline(around) && end_inline(&outer));
    CHECK_EQ(t_here.resolved, 1);
    enter(2);
    CHECK(!begin_inline(around));
    CHECK(api().begin(&around) != 0 && end_inline(&outer));
    enter(OTP_CONTEXT_MUTED);
    CHECK(!begin_inline(around));
    CHECK_EQ(api().begin(&around), 0u);
    CHECK(begin_inline(around) && !end_inline(&outer));
    CHECK_EQ(t_here.resolved, 3);
    session.stop();
    Batch batch(session.drain());
    CHECK_EQ(batch->rows, 4u);
    for (uint64_t i = 0; i < 4; ++i) CHECK_EQ(batch->context[i], i < 3 ? 1u : 2u);
  }).join();
}

// Threads record inline while sessions start, stop, drain and drop on another, and what they wrote is whole. What TSan
// would say of it is half of this test.
void threads_record_inline_while_sessions_come_and_go() {
  constexpr int kThreads = 3;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> produced{0};
  Session whole(options(kPlenty));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      Key keys[3] = {{1}, {1}, {1}};
      for (uint64_t round = 0; round < 2000 || (!done.load() && round < 100000); ++round) {
        for (const Key& key : keys) {
          otp_begin_args args = vouched(&key, "aten::hot");
          if (!begin_inline(args)) api().begin(&args);
        }
        for (size_t k = 3; k-- > 0;)
          if (!end_inline(&keys[k])) end(&keys[k]);
        produced.fetch_add(3);
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    Session session(options(2 * OTP_CHUNK_BYTES, i % 2 == 0 ? OTP_FULL_DROP_OLDEST : OTP_FULL_DROP_NEWEST));
    Batch running(session.drain());
    running.check_sound();
    session.stop();
    Batch rest(session.drain());
    rest.check_sound();
  }
  done.store(true);
  for (std::thread& thread : threads) thread.join();
  whole.stop();
  Batch batch(whole.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows + batch.dropped(), produced.load());
  for (uint64_t i = 0; i < batch->rows; ++i) CHECK_EQ(batch->flags[i] & OTP_FLAG_UNFINISHED, 0);
}

// A thread's buffer is where otp_hot says, on every thread: before its first event, after it, and none in a child of
// it.
void a_buffer_is_where_it_is_told_to_be() {
  for (int i = 0; i < 3; ++i) {
    std::thread([] {
      CHECK(hot::this_thread(api().hot) == nullptr && api().hot.buffer() == nullptr);
      Session session;
      leaf("first");
      CHECK(hot::this_thread(api().hot) != nullptr);
      CHECK(hot::this_thread(api().hot) == api().hot.buffer());
    }).join();
  }
  CHECK_EQ(api().hot.layout, hot::kLayout);
}

}  // namespace

int main() {
  RUN_CLEAN(a_buffer_is_where_it_is_told_to_be);
  RUN_CLEAN(what_is_unusual_is_left_to_the_functions);
  RUN_CLEAN(a_context_that_stays_is_followed_inline);
  RUN_CLEAN(random_programs_record_the_same);
  RUN_CLEAN(threads_record_inline_while_sessions_come_and_go);
}
