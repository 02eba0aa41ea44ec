// What an event costs: nanoseconds per begin and end on the recording thread, and per event of a drain.
//
//   g++ -std=c++17 -O2 -DNDEBUG -pthread -Inative/include -Inative/src native/bench/record_bench.cc
//       native/src/core/*.cc native/src/encode/*.cc -o build/record_bench && build/record_bench
//
// Medians of interleaved rounds; the first row is measured twice (A/A), so that the noise can be seen.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "otel_torchprof/blackbox.h"
#include "otel_torchprof/record_format.h"
#include "otel_torchprof/recorder.h"

namespace {

constexpr int kEvents = 200000;  // per thread and round: 9 MB of records
constexpr int kRounds = 9;

double now_ns() { return static_cast<double>(otp::clock_gettime_ns(CLOCK_MONOTONIC)); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

otp_session* start(uint64_t budget, uint32_t all_threads, uint32_t inputs, uint32_t contexts = 0) {
  uint32_t policy = budget == 2u << 20 ? OTP_FULL_DROP_OLDEST : OTP_FULL_DROP_NEWEST;
  otp_session_options options{budget, policy, all_threads, inputs, 0, contexts, 0, 0};
  otp_session* session = nullptr;
  if (otp_session_new(&options, &session) != OTP_OK || otp_session_start(session) != OTP_OK) std::abort();
  return session;
}

// As many events as `count`, each inside an outer one, as an operator is.
void record(int count, uint32_t input_words) {
  const otp_api* api = otp_get_api();
  int64_t inputs[32] = {};
  otp_begin_args args{};
  args.key = inputs;
  args.name = "aten::add";
  args.name_size = UINT32_MAX;
  args.kind = OTP_EVENT_OPERATOR;
  args.sequence_nr = -1;
  args.inputs = inputs;
  args.input_words = input_words;
  for (int i = 0; i < count; ++i) {
    api->begin(&args);
    api->end(inputs, 0, nullptr, 0);
  }
}

// Nanoseconds per event and thread when so many threads record at the same time.
double record_on(int threads, uint32_t input_words) {
  std::vector<double> spent(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (double& ns : spent) {
    workers.emplace_back([&ns, input_words] {
      record(1000, input_words);  // the thread's buffer, its first chunk
      double begin = now_ns();
      record(kEvents, input_words);
      ns = (now_ns() - begin) / kEvents;
    });
  }
  for (std::thread& worker : workers) worker.join();
  return median(spent);
}

struct Row {
  std::string what;
  std::function<double()> measure;
  std::vector<double> results;
};

double recorded(int threads, uint32_t input_words, int sessions, uint64_t budget) {
  std::vector<otp_session*> running;
  for (int i = 0; i < sessions; ++i) running.push_back(start(budget, 1, input_words != 0));
  double ns = record_on(threads, input_words);
  for (otp_session* session : running) otp_session_free(session);
  return ns;
}

// Beside a black box that is open, for no other session or for one.
double boxed(int sessions) {
  constexpr uint64_t kBytes = 16u << 20;
  int fd = memfd_create("box", 0);
  if (fd < 0 || posix_fallocate(fd, 0, kBytes) != 0) std::abort();
  otp_blackbox_options options{fd, kBytes, 0, 0, nullptr};
  otp_session* box = nullptr;
  if (otp_blackbox_open(&options, &box) != OTP_OK) std::abort();
  double ns = recorded(1, 0, sessions, 2u << 20);  // as much as a drained session holds
  otp_session_free(box);
  close(fd);
  return ns;
}

// For a session that follows contexts, where every event begins outermost and the context stays.
double followed(uint32_t context) {
  static uint32_t here;
  here = context;
  static const otp_context_source source{[]() -> uint64_t { return 1; }, []() -> uint32_t { return here; }};
  otp_get_api()->set_context_source(&source);
  otp_session* session = start(1u << 30, 1, 0, 1);
  double ns = record_on(1, 0);
  otp_session_free(session);
  otp_get_api()->set_context_source(nullptr);
  return ns;
}

double not_requested() {
  otp_session* session = start(OTP_CHUNK_BYTES, 0, 0);  // requests this thread only; the events come on another
  double ns = record_on(1, 0);
  otp_session_free(session);
  return ns;
}

double two_ticks() {
  uint64_t sum = 0;
  double begin = now_ns();
  for (int i = 0; i < kEvents; ++i) sum += otp::ticks_now() + otp::ticks_now();
  double ns = (now_ns() - begin) / kEvents;
  return sum == 0 ? 0 : ns;
}

double drained(uint32_t input_words) {
  otp_session* session = start(1u << 30, 1, input_words != 0);
  record(kEvents, input_words);
  otp_session_stop(session);
  otp_batch* batch = nullptr;
  double begin = now_ns();
  if (otp_session_drain(session, 0, &batch) != OTP_OK || batch->rows != kEvents) std::abort();
  double ns = (now_ns() - begin) / kEvents;
  otp_batch_free(batch);
  otp_session_free(session);
  return ns;
}

}  // namespace

int main() {
  constexpr uint64_t kPlenty = 1u << 30;
  std::vector<Row> rows;
  auto add = [&rows](const char* what, std::function<double()> measure) { rows.push_back({what, measure, {}}); };
  add("begin + end", [] { return recorded(1, 0, 1, kPlenty); });
  add("begin + end, once more (A/A)", [] { return recorded(1, 0, 1, kPlenty); });
  add("  2 threads at once, each", [] { return recorded(2, 0, 1, kPlenty); });
  add("  4 threads at once, each", [] { return recorded(4, 0, 1, kPlenty); });
  add("  for two sessions", [] { return recorded(1, 0, 2, kPlenty); });
  add("  for one that keeps the newest 2 MB", [] { return recorded(1, 0, 1, 2u << 20); });
  add("  black box alone", [] { return boxed(0); });
  add("  that session and a black box", [] { return boxed(1); });
  add("  with 12 words of inputs", [] { return recorded(1, 12, 1, kPlenty); });
  add("  followed: in a context", [] { return followed(1); });
  add("  followed: outside of any", [] { return followed(0); });
  add("  followed: muted", [] { return followed(OTP_CONTEXT_MUTED); });
  add("  dropped at the budget", [] { return recorded(1, 0, 1, OTP_CHUNK_BYTES); });
  add("  session of another thread", not_requested);
  add("  no session", [] { return record_on(1, 0); });
  add("two reads of the clock", two_ticks);
  add("drain", [] { return drained(0); });
  add("  with 12 words of inputs", [] { return drained(12); });
  for (int round = 0; round < kRounds; ++round)
    for (Row& row : rows) row.results.push_back(row.measure());
  std::printf("%-32s %8s %8s %8s\n", "ns per event", "median", "least", "most");
  for (Row& row : rows) {
    auto [least, most] = std::minmax_element(row.results.begin(), row.results.end());
    std::printf("%-32s %8.1f %8.1f %8.1f\n", row.what.c_str(), median(row.results), *least, *most);
  }
}
