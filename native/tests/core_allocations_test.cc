// What is allocated and freed: MEMORY records beside the events of a thread.
#include <thread>

#include "core_support.h"

namespace {

otp_session_options with_memory(uint64_t budget = kPlenty, uint32_t policy = OTP_FULL_DROP_NEWEST) {
  otp_session_options requested = options(budget, policy);
  requested.memory = 1;
  return requested;
}

int allocate(int64_t bytes, uint64_t address = 64) {
  otp_memory_args args{};
  args.bytes = bytes;
  args.address = address;
  args.total_allocated = 100;
  args.total_reserved = -1;
  args.device_type = 1;
  args.device_index = 2;
  return api().memory(&args);
}

// Each stands inside the innermost event that is open, with all that was told of it.
void memory_stands_inside_the_innermost_event() {
  Session session(with_memory());
  CHECK_EQ(allocate(8), 1);
  begin("outer");
  begin("inner");
  CHECK_EQ(allocate(16), 1);
  end("inner");
  CHECK_EQ(allocate(-16), 1);
  end("outer");
  session.stop();
  Batch batch(session.drain());
  batch.check_sound();
  CHECK_EQ(batch->rows, 2u);
  CHECK_EQ(batch->memory_count, 3u);
  CHECK_EQ(session.stats().recorded, 5u);
  const uint64_t around[] = {0, batch->id[batch.row("inner")], batch->id[batch.row("outer")]};
  const int64_t bytes[] = {8, 16, -16};
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(batch->memory_event[i], around[i]);
    CHECK_EQ(batch->memory_bytes[i], bytes[i]);
    CHECK_EQ(batch->memory_address[i], 64u);
    CHECK_EQ(batch->memory_total_allocated[i], 100);
    CHECK_EQ(batch->memory_total_reserved[i], -1);
    CHECK_EQ(batch->memory_device_type[i], 1);
    CHECK_EQ(batch->memory_device_index[i], 2);
    if (i > 0) CHECK(batch->memory_time[i] >= batch->memory_time[i - 1]);
  }
  CHECK(batch->memory_time[1] >= batch->start[batch.row("inner")] &&
        batch->memory_time[1] <= batch->end[batch.row("inner")]);
}

// Nobody pays for what nobody requests: without a session that keeps memory there is no record.
void sessions_without_memory_have_none() {
  Session plain;
  CHECK_EQ(allocate(8), 0);
  Session session(with_memory());
  CHECK_EQ(allocate(8), 1);
  Batch of_plain(plain.drain()), of_session(session.drain());
  CHECK(of_plain->memory_time == nullptr);
  CHECK_EQ(of_plain->memory_count, 0u);
  CHECK_EQ(of_session->memory_count, 1u);
}

// Who follows contexts gets what is inside its events; the rest may be that of a context that is muted.
void who_follows_contexts_has_memory_inside_its_events() {
  otp_session_options requested = with_memory();
  requested.contexts = 1;
  Session session(requested);
  allocate(8);
  leaf("leaf");
  begin("outer");
  allocate(16);
  end("outer");
  allocate(32);
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->memory_count, 1u);
  CHECK_EQ(batch->memory_bytes[0], 16);
  CHECK_EQ(batch->memory_event[0], batch->id[batch.row("outer")]);
}

// While an event is open over several drains, what is allocated inside it names it in each.
void an_event_that_is_still_open_is_named() {
  Session session(with_memory());
  begin("outer");
  allocate(8);
  Batch first(session.drain());
  allocate(16);
  end("outer");
  session.stop();
  Batch second(session.drain());
  CHECK_EQ(first->open_count, 1u);
  CHECK_EQ(first->memory_event[0], first->open_id[0]);
  CHECK_EQ(second->memory_event[0], second->id[0]);
  CHECK_EQ(first->memory_event[0], second->memory_event[0]);
}

// Events and memory together are what was produced, kept or counted as lost, under both policies.
void recorded_and_dropped_are_produced() {
  for (uint32_t policy : {OTP_FULL_DROP_NEWEST, OTP_FULL_DROP_OLDEST}) {
    Session session(with_memory(3 * OTP_CHUNK_BYTES, policy));
    constexpr uint64_t kRounds = 20000;
    std::thread other([] {
      for (uint64_t i = 0; i < kRounds; ++i) allocate(1);
    });
    for (uint64_t i = 0; i < kRounds; ++i) {
      begin("event");
      allocate(static_cast<int64_t>(i));
      end("event");
    }
    other.join();
    session.stop();
    Batch batch(session.drain());
    batch.check_sound();
    CHECK(batch.dropped() > 0);
    CHECK_EQ(batch->rows + batch->memory_count + batch.dropped(), 3 * kRounds);
    CHECK_EQ(session.stats().recorded, batch->rows + batch->memory_count);
  }
}

// A string is one name however often it is asked for, on whichever thread.
void strings_are_interned() {
  uint32_t here = api().intern("a string", UINT32_MAX, OTP_NAME_TEXT), there = 0;
  std::thread([&there] { there = api().intern("a string, and more", 8, OTP_NAME_TEXT); }).join();
  CHECK(here != 0);
  CHECK_EQ(here, there);
  CHECK_EQ(api().intern("", 0, OTP_NAME_TEXT), 0u);
}

}  // namespace

int main() {
  RUN_CLEAN(memory_stands_inside_the_innermost_event);
  RUN_CLEAN(sessions_without_memory_have_none);
  RUN_CLEAN(who_follows_contexts_has_memory_inside_its_events);
  RUN_CLEAN(an_event_that_is_still_open_is_named);
  RUN_CLEAN(recorded_and_dropped_are_produced);
  RUN_CLEAN(strings_are_interned);
}
