// Short of memory: no exception crosses the boundary, and what could not be kept is counted. Every allocation of a
// whole recording fails once, one run after the other, and the recorder works on.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <thread>

#include "core_support.h"

namespace {

// Allocations of this thread that still succeed; negative: all do.
thread_local int t_allocations_left = -1;
thread_local bool t_failed = false;
thread_local bool t_no_mappings = false;

bool fails() {
  if (t_allocations_left < 0) return false;
  if (t_allocations_left-- > 0) return false;
  t_failed = true;
  return true;  // and the next ones succeed again
}

}  // namespace

// Not inlined: gcc would see a `new` freed by `free`, and warn.
#define NOT_INLINED __attribute__((noinline))

NOT_INLINED void* operator new(size_t size) {
  void* memory = fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
NOT_INLINED void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return fails() ? nullptr : std::malloc(size);
}
NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#if !OTP_SANITIZED  // a sanitizer's runtime has an mmap of its own
extern "C" void* mmap(void* at, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  if (t_no_mappings) return MAP_FAILED;
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, size, protection, flags, file, offset));
}
#endif

namespace {

// The `n`-th allocation of what `work` does fails. True when there were as many.
template <typename Work>
bool with_failure(int n, Work work) {
  t_failed = false;
  t_allocations_left = n;
  work();
  t_allocations_left = -1;
  return t_failed;
}

// One recording of every kind: inputs, coroutines, ends elsewhere, errors, new names, evictions, live drains.
struct Recording {
  int n;
  uint64_t produced = 0, kept = 0;
  bool failed = false;

  template <typename Work>
  void step(Work work) {
    if (!failed)
      failed = with_failure(n, work);
    else
      work();
  }
  void leaf_named(const std::string& name) {
    step([&] {
      produced += begin("leaf", name.c_str()) != 0;
      end("leaf");
    });
  }
  // A drain that fails changes nothing: the next one has it all.
  void drain(otp_session* session) {
    otp_batch* batch = nullptr;
    int status = OTP_OK;
    step([&] { status = otp_session_drain(session, 0, &batch); });
    if (status != OTP_OK) {
      CHECK_EQ(status, OTP_E_NO_MEMORY);
      CHECK(batch == nullptr);
      CHECK_EQ(otp_session_drain(session, 0, &batch), OTP_OK);
    }
    Batch sound(batch);
    sound.check_sound();
    kept += sound->rows + sound.dropped();
  }
  void run(uint32_t policy);
};

void Recording::run(uint32_t policy) {
  otp_session_options requested = options(3 * OTP_CHUNK_BYTES, policy, 1, 1);
  otp_session* session = nullptr;
  int status = OTP_OK;
  step([&] { status = otp_session_new(&requested, &session); });
  CHECK_EQ(status == OTP_OK, session != nullptr);
  if (session == nullptr) CHECK_EQ(otp_session_new(&requested, &session), OTP_OK);
  step([&] { status = otp_session_start(session); });
  if (status != OTP_OK) {
    CHECK_EQ(status, OTP_E_NO_MEMORY);
    CHECK_EQ(otp_session_start(session), OTP_OK);
  }
  static int64_t words[200] = {};
  otp_begin_args args = event("outer", "outer");
  args.inputs = words;
  args.input_words = 200;
  uint32_t here = 0;
  step([&] { produced += (here = api().begin(&args)) != 0; });
  step([&] { produced += begin("coroutine") != 0; });
  int suspended = 0;
  step([&] { suspended = api().suspend("coroutine"); });
  leaf_named("new name " + std::to_string(n));
  drain(session);
  step([&] { CHECK_EQ(api().resume("coroutine"), suspended); });
  step([&] { api().end("coroutine", OTP_FLAG_ERROR, "an error type so long that it needs memory", 42); });
  step([&] { produced += begin("elsewhere") != 0; });
  std::thread([&] {
    int ended = 0;
    step([&] { ended = api().end_elsewhere("elsewhere", here, 0, 0, nullptr, 0); });
    if (ended == 0) api().end_elsewhere("elsewhere", here, 0, 0, nullptr, 0);
  }).join();
  for (int i = 0; i < 40; ++i) {
    for (int k = 0; k < 200; ++k) leaf_named("leaf");
    if (i == 20) drain(session);
  }
  end("outer");
  step([&] { CHECK_EQ(otp_session_stop(session), OTP_OK); });
  otp_session_stats stats;
  step([&] { CHECK_EQ(otp_session_get_stats(session, &stats), OTP_OK); });
  drain(session);
  step([&] { otp_session_free(session); });
  CHECK_EQ(kept, produced);
}

// Whichever allocation fails, every event is kept or counted, and no exception comes out.
void any_one_allocation_may_fail() {
  for (uint32_t policy : {OTP_FULL_DROP_NEWEST, OTP_FULL_DROP_OLDEST}) {
    int n = 0;
    for (bool failed = true; failed; ++n) {
      Recording recording{n};
      recording.run(policy);
      failed = recording.failed;
    }
    CHECK(n > 5);
  }
}

// A thread that gets no memory for its buffer records nothing, and can record when there is some.
void a_thread_without_memory_records_later() {
  Session session;
  std::thread([] {
    for (int n = 0; with_failure(n, [] { begin("first try"); }); ++n) end("first try");
    end("first try");
    leaf("second try");
  }).join();
  session.stop();
  CHECK(Batch(session.drain()).has("second try"));
}

// Where the system maps no more chunks, events are dropped and counted as such; those that have begun still end.
void without_mappings_events_are_counted() {
  if (OTP_SANITIZED) return;
  Session session;
  uint64_t produced = 1, failed = 0;
  begin("outer");
  for (int i = 0; i < 3000000 && failed == 0; ++i, ++produced) {
    t_no_mappings = i > 1000;
    leaf("leaf");
    if (i % 1000 == 999) failed = session.stats().dropped[OTP_LOSS_NO_MEMORY];
  }
  CHECK(failed > 0);
  CHECK_EQ(end("outer"), 1);
  t_no_mappings = false;
  leaf("after");
  ++produced;
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows + batch->dropped[OTP_LOSS_NO_MEMORY], produced);
  CHECK_EQ(batch.dropped(), batch->dropped[OTP_LOSS_NO_MEMORY]);
  CHECK_EQ(batch->flags[batch.row("after")], OTP_FLAG_LOSS_BEFORE);
  CHECK_EQ(batch->flags[batch.row("outer")], 0);
}

}  // namespace

int main() {
  otp_get_api();
  recorder_stats();
  RUN_CLEAN(any_one_allocation_may_fail);
  RUN_CLEAN(a_thread_without_memory_records_later);
  RUN_CLEAN(without_mappings_events_are_counted);
}
