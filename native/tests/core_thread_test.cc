// Threads that come and go, memory that must not grow, and what a thread does on its way out.
#include <pthread.h>

#include <atomic>
#include <set>
#include <thread>

#include "core_support.h"

namespace {

constexpr uint64_t kKept = 10u << 20;  // the free memory that the recorder keeps, and a mapping that is in use

// A thousand short-lived threads: all their events, one entry each in the table, no number used twice, nothing kept.
void short_lived_threads_are_all_there() {
  std::set<uint32_t> ids;
  for (int round = 0; round < 2; ++round) {
    constexpr int kThreads = 1000;
    Session session;
    for (int i = 0; i < kThreads; i += 10) {
      std::vector<std::thread> threads;
      for (int k = 0; k < 10; ++k) {
        threads.emplace_back([k] {
          char name[16] = "worker ?";
          name[7] = static_cast<char>('0' + k);
          pthread_setname_np(pthread_self(), name);
          begin("outer");
          leaf("inner");
          end("outer");
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    session.stop();
    {
      Batch batch(session.drain());
      batch.check_sound();
      CHECK_EQ(batch->rows, 2u * kThreads);
      CHECK_EQ(batch->thread_count, static_cast<uint64_t>(kThreads));
      for (uint64_t i = 0; i < batch->rows; ++i)
        CHECK_EQ(batch->parent[i], i % 2 == 0 ? -1 : static_cast<int32_t>(i - 1));
      for (uint64_t i = 0; i < batch->thread_count; ++i) {
        CHECK(ids.insert(batch->threads[i].id).second);
        CHECK_EQ(std::strncmp(batch->threads[i].name, "worker ", 7), 0);
        CHECK(batch->threads[i].os_tid != 0 && batch->threads[i].ident != 0);
      }
    }
    CHECK_EQ(session.stats().bytes_buffered, 0u);
  }
  otp_recorder_stats after = recorder_stats();
  CHECK_EQ(after.threads, 1u);  // the main thread
  CHECK(after.chunk_bytes <= 10u << 20);
}

// A live drain lets go of threads that have ended, and of those only, with an event open or not.
void live_drains_let_go_of_threads() {
  Session session;
  uint32_t threads_before = recorder_stats().threads;
  uint32_t id = 0;
  std::thread([&] { id = begin("never ended there"); }).join();
  for (int i = 0; i < 50; ++i) {
    std::thread([] { leaf("event"); }).join();
    CHECK_EQ(Batch(session.drain())->rows, 1u);
    CHECK_EQ(recorder_stats().threads, threads_before + 1);
  }
  CHECK_EQ(api().end_elsewhere("never ended there", id, 0, 0, nullptr, 0), 1);
  Batch batch(session.drain());
  CHECK_EQ(batch->flags[batch.row("never ended there")], OTP_FLAG_ASYNC);
  CHECK_EQ(recorder_stats().threads, threads_before);
  session.stop();
}

// A thousand sessions one after the other leave the memory as it was.
void sessions_leave_no_memory_behind() {
  uint64_t flat = 0;
  for (int i = 0; i < 1000; ++i) {
    Session session(options(kPlenty, static_cast<uint32_t>(i % 2)));
    for (int k = 0; k < 5000 / kSlowdown; ++k) leaf("event");
    session.stop();
    if (i % 3 != 0) Batch(session.drain()).check_sound();
    if (i == 20) flat = recorder_stats().chunk_bytes;
    if (i > 20) CHECK_EQ(recorder_stats().chunk_bytes, flat);
  }
}

// Memory that one large session took is freed with it.
void a_large_session_gives_its_memory_back() {
  uint64_t before = recorder_stats().chunk_bytes;
  {
    Session session;
    while (session.stats().bytes_buffered < 40u << 20)
      for (int k = 0; k < 1000; ++k) leaf("event");
    CHECK(recorder_stats().chunk_bytes >= 40u << 20);
  }
  CHECK(recorder_stats().chunk_bytes <= before + kKept);
}

// Threads end while a session that keeps the newest throws their chunks away and another drains: each event is counted.
void threads_end_while_their_chunks_are_read() {
  Session live(options(4 * OTP_CHUNK_BYTES, OTP_FULL_DROP_OLDEST));
  Session all;
  std::atomic<bool> done{false};
  uint64_t rows = 0, dropped = 0, produced = 0;
  auto take = [&] {
    Batch batch(live.drain());
    batch.check_sound();
    rows += batch->rows;
    dropped += batch.dropped();
  };
  std::thread reader([&] {
    while (!done.load()) take();
  });
  for (int round = 0; round < 400 / kSlowdown; ++round) {
    std::vector<std::thread> threads;
    for (int k = 0; k < 4; ++k) {
      threads.emplace_back([] {
        begin("outer");
        for (int i = 0; i < 1999; ++i) leaf("event");
        end("outer");
      });
    }
    for (std::thread& thread : threads) thread.join();
    produced += 4 * 2000;
  }
  done.store(true);
  reader.join();
  live.stop();
  all.stop();
  take();
  CHECK_EQ(rows + dropped, produced);
  Batch batch(all.drain());
  CHECK_EQ(batch->rows + batch.dropped(), produced);
}

struct Late {
  ~Late() {
    CHECK_EQ(begin("after the recorder has gone"), 0u);
    CHECK_EQ(end("after the recorder has gone"), 0);
  }
};

// An operator that runs while its thread is torn down, after the recorder's part of that, records nothing and is safe.
void operators_in_late_destructors_are_safe() {
  Session session;
  std::thread([] {
    static thread_local Late late;  // made before the recorder's own, so destroyed after it
    static_cast<void>(&late);
    leaf("event");
  }).join();
  session.stop();
  CHECK_EQ(Batch(session.drain())->rows, 1u);
}

}  // namespace

int main() {
  RUN_CLEAN(operators_in_late_destructors_are_safe);
  RUN_CLEAN(short_lived_threads_are_all_there);
  RUN_CLEAN(live_drains_let_go_of_threads);
  RUN_CLEAN(sessions_leave_no_memory_behind);
  RUN_CLEAN(a_large_session_gives_its_memory_back);
  RUN_CLEAN(threads_end_while_their_chunks_are_read);
}
