// Drains of a part: what they bring is what one drain brings, cut by time.
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core_support.h"

namespace {

constexpr uint64_t kSlice = 2 * OTP_CHUNK_BYTES;
constexpr int64_t kClocks = 1000000;  // ns: times of several batches are of several calibrations

struct Event {
  std::string name;
  uint64_t parent;
  int64_t start, end;
  uint32_t fwd_thread;
  uint8_t flags;
  std::vector<int64_t> inputs;

  void check_same(const Event& other) const {
    CHECK_EQ(name, other.name);
    // Whether the one before was open, while another thread ends it, is for no drain to say.
    if (name != "ends elsewhere") CHECK_EQ(parent, other.parent);
    CHECK_EQ(fwd_thread, other.fwd_thread);
    CHECK_EQ(flags, other.flags);
    CHECK(inputs == other.inputs);
    CHECK(std::abs(start - other.start) < kClocks && std::abs(end - other.end) < kClocks);
  }
};

using Events = std::map<uint64_t, Event>;  // by id

void take(const Batch& batch, int64_t watermark_before, Events* out) {
  batch.check_sound();
  for (uint64_t i = 0; i < batch->rows; ++i) {
    std::vector<int64_t> inputs;
    if (batch->inputs[i] >= 0) {
      const int64_t* words = batch->input_words + batch->inputs[i];
      inputs.assign(words, words + 2);
    }
    CHECK(batch->watermark == INT64_MAX || batch->end[i] < batch->watermark + kClocks);
    CHECK(batch->end[i] > watermark_before - kClocks);
    Event event{batch.name(i),        batch.parent_id(i), batch->start[i], batch->end[i],
                batch->fwd_thread[i], batch->flags[i],    inputs};
    CHECK(out->emplace(batch->id[i], event).second);
  }
}

// Begins and ends at random, with inputs and ends out of order; some are ended by the next thread.
void record_at_random(uint32_t seed, int events, std::atomic<const void*>* handed_over, std::atomic<uint32_t>* thread) {
  static const char* const kNames[] = {"a", "b", "c", "d", "e"};
  std::mt19937 random(seed);
  std::vector<std::unique_ptr<char>> keys;
  for (int begun = 0; begun < events || !keys.empty();) {
    if (begun < events && keys.size() < 20 && random() % 2 == 0) {
      keys.push_back(std::make_unique<char>());
      otp_begin_args args = event(keys.back().get(), kNames[random() % 5]);
      int64_t words[] = {begun, seed};
      args.fwd_thread = static_cast<uint32_t>(begun++);
      args.inputs = words;
      args.input_words = random() % 3 == 0 ? 2 : 0;
      CHECK(api().begin(&args) != 0);
    } else if (!keys.empty()) {
      auto which = keys.begin() +
                   static_cast<std::ptrdiff_t>(keys.size() - 1 - (random() % 8 == 0 ? random() % keys.size() : 0));
      CHECK_EQ(end(which->get()), 1);
      keys.erase(which);
    }
    if (const void* other = handed_over->exchange(nullptr); other != nullptr)
      CHECK_EQ(api().end_elsewhere(other, thread->load(), 0, 0, nullptr, 0), 1);
  }
}

void slices_are_one_drain_cut_by_time() {
  constexpr int kThreads = 5, kEvents = 20000;
  otp_session_options requested = options(kPlenty, OTP_FULL_DROP_OLDEST, 1, 1);
  Session whole(requested), sliced(requested);
  std::atomic<const void*> handed_over{nullptr};
  std::atomic<uint32_t> main_thread{0};
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      record_at_random(i, kEvents >> i, &handed_over, &main_thread);  // some fill their chunks slowly
      --running;
    });
  Events found;
  int64_t watermark = 0;
  int cut = 0;
  auto drain = [&] {
    Batch batch(sliced.drain(kSlice));
    take(batch, watermark, &found);
    // A thread that is interrupted between the two reads the time first and writes its record later.
    if (running.load() == 0 && batch->watermark != INT64_MAX) watermark = batch->watermark;
    cut += batch->watermark != INT64_MAX;
    return batch->watermark != INT64_MAX;
  };
  int elsewhere = 0;
  while (running.load() > 0) {
    if (sliced.stats().bytes_buffered > 3 * kSlice) drain();
    if (handed_over.load() != nullptr || elsewhere == 100) continue;
    static char keys[100];
    main_thread = begin(&keys[elsewhere], "ends elsewhere");
    handed_over = &keys[elsewhere++];
  }
  for (std::thread& thread : threads) thread.join();
  watermark = 0;
  sliced.stop();
  whole.stop();
  while (drain()) {
  }
  Events expected;
  take(Batch(whole.drain()), 0, &expected);
  CHECK_EQ(found.size(), expected.size());
  for (const auto& [id, event] : expected) {
    // One that the two stops found open has an end of each.
    if ((event.flags & OTP_FLAG_UNFINISHED) == 0) found.at(id).check_same(event);
  }
  CHECK(cut > 3);
}

// A thread that fills its chunk slowly holds nothing up, however many of them there are.
void slow_threads_hold_nothing_up() {
  constexpr int kSlow = 60, kRounds = 40;
  constexpr uint64_t kEvents = 1000 * kRounds;
  Session session;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 1000; ++i) leaf("fast");
  }
  std::atomic<int> turn{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kSlow; ++i)
    threads.emplace_back([&, i] {
      while (turn.load() != i) std::this_thread::yield();
      for (int k = 0; k < 500; ++k) leaf("slow");
      ++turn;
      while (turn.load() <= kSlow) std::this_thread::yield();  // with its chunk open
    });
  while (turn.load() != kSlow) std::this_thread::yield();
  uint64_t rows = 0, bytes_before = session.stats().bytes_buffered;
  int slices = 0;
  for (bool more = true; more; ++slices) {
    Batch batch(session.drain(kSlice));
    more = batch->watermark != INT64_MAX;
    CHECK(batch->rows > 0);
    CHECK(batch->rows * sizeof(otp_record_begin) < kSlice + (kSlow + 1) * 2 * OTP_CHUNK_BYTES);
    rows += batch->rows;
  }
  ++turn;
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(rows, kEvents + 500 * kSlow);
  CHECK(slices > 3);
  CHECK(session.stats().bytes_buffered < bytes_before);
  session.stop();
}

// What a stopped session still holds can be thrown away: each event is counted once, and its place is free.
void what_is_discarded_is_counted() {
  constexpr uint64_t kEvents = 20000;
  Session session;
  begin("open");
  for (uint64_t i = 0; i < kEvents; ++i) leaf("event");
  CHECK_EQ(otp_session_discard(session), OTP_E_STATE);  // it runs
  uint64_t rows = Batch(session.drain(kSlice))->rows;
  CHECK(rows > 0 && rows < kEvents);
  session.stop();
  for (int i = 0; i < 2; ++i) CHECK_EQ(otp_session_discard(session), OTP_OK);
  CHECK_EQ(rows + session.stats().dropped[OTP_LOSS_DEADLINE], kEvents + 1);
  CHECK_EQ(session.stats().bytes_buffered, 0u);
  Batch after(session.drain());
  CHECK_EQ(after->rows, 0u);
  CHECK_EQ(rows + after.dropped(), kEvents + 1);
  end("open");
}

}  // namespace

int main() {
  RUN_CLEAN(slices_are_one_drain_cut_by_time);
  RUN_CLEAN(slow_threads_hold_nothing_up);
  RUN_CLEAN(what_is_discarded_is_counted);
  return 0;
}
