// The black box: what is in its image at any moment, whoever else records.
#include <algorithm>
#include <atomic>
#include <future>
#include <string>
#include <thread>

#include "child.h"
#include "core_blackbox_support.h"

namespace {

constexpr int kPerChunk = OTP_CHUNK_BYTES / 48;  // events without inputs
constexpr int kMany = 60 * kPerChunk;            // more than twice what the box holds

void what_has_ended_and_what_is_open_is_in_the_image() {
  BoxFile file;
  OpenBox box(file);
  begin("outer");
  leaf("inner");
  begin("in flight");
  Contents contents(file);
  CHECK_EQ(contents.batch()->rows, 3u);
  CHECK(contents.is_open("outer") && contents.is_open("in flight") && !contents.is_open("inner"));
  CHECK(contents.batch().parent_name("inner") == "outer" && contents.batch().parent_name("in flight") == "outer");
  CHECK_EQ(contents->pid, static_cast<uint32_t>(getpid()));
  CHECK_EQ(contents->is_closed, 0u);
  CHECK_EQ(contents->chunks_damaged, 0u);
  CHECK_EQ(contents->complete_since, 0);
  CHECK_EQ(contents.batch()->threads[0].os_tid, static_cast<uint32_t>(gettid()));
  end("in flight");
  end("outer");
}

void times_are_those_that_a_session_gets() {
  BoxFile file;
  Session session;
  OpenBox box(file);
  leaf("timed");
  Contents contents(file);
  Batch batch(session.drain());
  int64_t apart = contents.batch()->start[contents.batch().row("timed")] - batch->start[batch.row("timed")];
  CHECK(apart > -100000 && apart < 100000);
  session.stop();
}

void the_latest_stay_and_what_is_open_is_known_however_long_ago_it_began() {
  BoxFile file;
  OpenBox box(file);
  begin("long ago");
  begin("also");
  leaf("evicted");
  for (int i = 0; i < kMany; ++i) leaf("many");
  end("also");
  leaf("last");
  Contents contents(file);
  CHECK(contents.is_open("long ago") && contents.batch().has("last") && !contents.batch().has("evicted"));
  CHECK(!contents.is_open("also") && contents.batch().parent_name("last") == "long ago");
  CHECK(contents.batch().parent_name("also") == "long ago");
  uint64_t many = contents.count("many");
  CHECK(many > 20 * kPerChunk && many < kMany);
  CHECK_EQ(contents->dropped, 0u);
  const Batch& batch = contents.batch();
  int64_t first = INT64_MAX, last = 0;
  for (uint64_t row = 0; row < batch->rows; ++row) {
    if (batch.name(row) != "many") continue;
    first = std::min(first, batch->start[row]);
    last = std::max(last, batch->start[row]);
  }
  CHECK(contents->complete_since > first - 1000000 && contents->complete_since < last);
  end("long ago");
}

void a_slow_session_keeps_what_the_box_evicts() {
  BoxFile file;
  Session session;
  {
    OpenBox box(file);
    for (int i = 0; i < kMany; ++i) leaf("many");
    leaf("last");
    CHECK(Contents(file).batch().has("last"));
  }
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, static_cast<uint64_t>(kMany) + 1);
  CHECK_EQ(batch.dropped(), 0u);
  batch.check_sound();
}

void a_drain_takes_no_room_from_it_and_gets_all() {
  BoxFile file;
  Session session;
  OpenBox box(file);
  constexpr int kRounds = 10 / kSlowdown;
  uint64_t drained = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kMany; ++i) leaf("many");
    std::future<uint64_t> drain = std::async(std::launch::async, [&session] {
      Batch batch(session.drain());
      batch.check_sound();
      return batch->rows;
    });
    for (int i = 0; i < kMany; ++i) leaf("many");
    drained += drain.get();
  }
  leaf("last");
  Contents contents(file);
  const otp_batch& latest = *contents.batch();
  CHECK(latest.rows > 20 * kPerChunk);
  CHECK_EQ(latest.id[latest.rows - 1] - latest.id[0], latest.rows - 1);  // no gap
  CHECK_EQ(contents.batch().row("last"), latest.rows - 1);
  CHECK_EQ(contents->dropped, 0u);
  session.stop();
  Batch rest(session.drain());
  CHECK_EQ(drained + rest->rows, uint64_t{2} * kRounds * kMany + 1);
  CHECK_EQ(rest.dropped(), 0u);
}

void a_session_at_its_budget_takes_nothing_from_the_box() {
  BoxFile file;
  Session session(options(2 * OTP_CHUNK_BYTES));
  OpenBox box(file);
  for (int i = 0; i < kMany; ++i) leaf("many");
  leaf("last");
  CHECK(Contents(file).batch().has("last"));
  session.stop();
  Batch batch(session.drain());
  CHECK(batch.dropped() > 0 && !batch.has("last"));
}

void other_kinds_than_it_asked_for_are_not_its_own() {
  BoxFile file;
  otp_blackbox_options requested = box_options(file);
  requested.kinds = 1u << OTP_EVENT_PHASE;
  OpenBox box(requested);
  Session session;
  otp_begin_args phase = event("phase", "phase");
  phase.kind = OTP_EVENT_PHASE;
  api().begin(&phase);
  for (int i = 0; i < kMany; ++i) leaf("operator");
  Contents contents(file);
  CHECK_EQ(contents.batch()->rows, 1u);
  CHECK(contents.is_open("phase"));
  end("phase");
  session.stop();
}

void collectives_are_there_with_their_state() {
  BoxFile file;
  OpenBox box(file);
  uint32_t all = api().intern("default", UINT32_MAX, OTP_NAME_CODE), pair = api().intern("pair", 4, OTP_NAME_CODE);
  uint32_t name = api().intern("c10d::allreduce_", UINT32_MAX, OTP_NAME_OPERATOR);
  auto call = [&](uint32_t group, int64_t number, uint32_t flags = 0) {
    otp_blackbox_call made{0, number, 400, 400, name, group, 0,       0, 0,        0,
                           4, 1,      -1,  -1,  -1,   flags, 1800000, 0, "[[100]]"};
    uint64_t ticket = api().collective_enqueued(&made);
    CHECK(ticket != 0);
    return ticket;
  };
  api().collective_completed(call(all, 1), 0);
  api().collective_completed(call(all, 2), 1);
  uint64_t last = call(all, 3);
  call(pair, 1);
  call(pair, -1, OTP_BLACKBOX_TRANSFER);
  Contents contents(file);
  CHECK_EQ(contents->collective_count, 5u);
  CHECK_EQ(contents->group_count, 3u);
  const otp_blackbox_group& group = contents->groups[0];
  CHECK(contents.batch().text(group.group) == "default" && group.group_size == 4 && group.rank == 1);
  CHECK(group.enqueued == 3 && group.completed == 2 && group.last_enqueued == 3 && group.last_completed == 2);
  CHECK((contents->groups[2].flags & OTP_BLACKBOX_TRANSFER) != 0 && contents->groups[2].last_enqueued == -1);
  const otp_blackbox_collective* entries = contents->collectives;
  CHECK(entries[0].completed >= entries[0].enqueued && entries[0].enqueued > 0);
  CHECK((entries[1].call.flags & OTP_BLACKBOX_FAILED) != 0 && entries[2].completed == 0);
  CHECK(contents.batch().text(entries[2].call.name) == "c10d::allreduce_");
  for (int i = 0; i < 2 * OTP_BLACKBOX_COLLECTIVES; ++i) api().collective_completed(call(pair, 2 + i), 0);
  api().collective_completed(last, 0);  // its place is another's by now
  Contents later(file);
  CHECK_EQ(later->collective_count, static_cast<uint32_t>(OTP_BLACKBOX_COLLECTIVES));
  CHECK(later->groups[0].last_completed == 2 && later->groups[1].completed == 2u * OTP_BLACKBOX_COLLECTIVES);
}

void an_end_from_another_thread_is_known() {
  BoxFile file;
  OpenBox box(file);
  uint32_t here = begin("carried over");
  std::thread([here] { CHECK_EQ(api().end_elsewhere("carried over", here, 0, 0, nullptr, 0), 1); }).join();
  leaf("after");
  Contents contents(file);
  CHECK(!contents.is_open("carried over") && contents.batch().parent_name("after").empty());
}

void threads_that_have_ended_stay_until_they_are_evicted() {
  BoxFile file;
  OpenBox box(file);
  for (int i = 0; i < 200; ++i) std::thread([] { leaf("of a short thread"); }).join();
  Contents contents(file);
  CHECK(contents.batch().has("of a short thread") == false || contents.count("of a short thread") > 15);
  CHECK(contents.count("of a short thread") > 15);
  CHECK(recorder_stats().threads < 40);
}

void where_all_chunks_are_written_to_what_finds_none_is_counted() {
  BoxFile file;
  auto box = new OpenBox(file);
  Session session;
  std::atomic<int> ready{0};
  std::atomic<bool> may_end{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 40; ++i) {
    threads.emplace_back([&] {
      leaf("one of many");
      ++ready;
      while (!may_end) std::this_thread::yield();
      leaf("once more");
    });
  }
  while (ready < 40) std::this_thread::yield();
  Contents contents(file);
  CHECK(contents.count("one of many") < 40 && contents.count("one of many") > 15);
  CHECK(contents->dropped > 0);  // of a process that dies, too
  delete box;
  CHECK(Contents(file)->dropped >= 40 - contents.count("one of many"));
  may_end = true;
  for (std::thread& thread : threads) thread.join();
  session.stop();
  Batch batch(session.drain());
  CHECK_EQ(batch->rows, 80u);
}

// The rows of an image in batches of so many bytes of records, cut by time, that lies in a file.
std::vector<std::string> rows_in_slices(const BoxFile& file, uint64_t bytes, int* batches) {
  otp_blackbox_contents* contents = nullptr;
  CHECK_EQ(otp_blackbox_read(file.fd(), nullptr, kBoxBytes, 0, &contents), OTP_OK);
  std::vector<std::string> found;
  for (int pass = 0; pass < 2; ++pass) {  // the second is the same
    std::vector<std::string> rows;
    int64_t from = 0;
    for (*batches = 0;; ++*batches) {
      otp_batch* raw = nullptr;
      CHECK_EQ(otp_blackbox_next(contents, bytes, &raw), OTP_OK);
      Batch batch(raw);
      batch.check_sound();
      for (uint64_t row = 0; row < batch->rows; ++row) {
        CHECK(batch->end[row] >= from && batch->end[row] <= std::max(batch->watermark, contents->last));
        rows.push_back(std::to_string(batch->id[row]) + batch.name(row) + std::to_string(batch->start[row]) + " " +
                       std::to_string(batch->end[row]) + " " + std::to_string(batch.parent_id(row)) + " " +
                       std::to_string(batch->flags[row]));
      }
      for (uint64_t i = 0; i < batch->open_count; ++i) CHECK(!batch.text(batch->open_name[i]).empty());
      from = batch->watermark;
      if (batch->watermark == INT64_MAX) break;
    }
    std::sort(rows.begin(), rows.end());
    CHECK(pass == 0 || rows == found);
    found = rows;
    otp_blackbox_rewind(contents);
  }
  otp_blackbox_contents_free(contents);
  return found;
}

// However small the batches are, together they have the rows that one has; events that are open stay for the last.
void in_slices_it_is_the_same() {
  BoxFile file;
  OpenBox box(file);
  std::atomic<int> turn{0};
  std::thread other([&] {
    begin("open from the beginning");
    while (turn < 1) std::this_thread::yield();
    for (int i = 0; i < kMany / 4; ++i) {
      begin("around");
      leaf("inside");
      end("around");
      if (i % 1000 == 0) std::this_thread::yield();
    }
    turn = 2;
    while (turn < 3) std::this_thread::yield();
    end("open from the beginning");
  });
  begin("open to the end");
  turn = 1;
  for (int i = 0; i < kMany / 4; ++i) leaf("leaf");
  while (turn < 2) std::this_thread::yield();
  int one = 0, few = 0, many = 0;
  std::vector<std::string> whole = rows_in_slices(file, 0, &one);
  CHECK(rows_in_slices(file, 200'000, &few) == whole);
  CHECK(rows_in_slices(file, 1, &many) == whole);
  CHECK(one == 0 && few >= 5 && many >= 20);
  turn = 3;
  other.join();
  end("open to the end");
}

void names_can_be_hidden_but_for_labels_that_are_listed() {
  BoxFile file;
  auto label = [](const char* name) {
    otp_begin_args args = event(name, name);
    args.kind = OTP_EVENT_LABEL;
    api().begin(&args);
    end(name);
  };
  {
    Session before;  // names that are known before the box is
    label("secret early");
    label("step 1");
    before.stop();
    otp_batch_free(before.drain());
  }
  otp_blackbox_options requested = box_options(file);
  requested.hidden_names = 1u << OTP_NAME_LABEL;
  requested.shown_names = "step *\nepoch";
  OpenBox box(requested);
  for (const char* name : {"secret early", "secret late", "step 1", "step 2"}) label(name);
  leaf("aten::add");
  std::vector<uint8_t> image = file.image();
  CHECK(std::string(image.begin(), image.end()).find("secret") == std::string::npos);
  Contents contents(image);
  CHECK_EQ(contents.count("(hidden label)"), 2u);
  CHECK(contents.batch().has("step 1") && contents.batch().has("step 2") && contents.batch().has("aten::add"));
}

void names_that_do_not_fit_are_counted_and_the_events_stay() {
  in_child([] {  // whose table of names is its own
    BoxFile file(OTP_BLACKBOX_LEAST);
    OpenBox box(box_options(file, OTP_BLACKBOX_LEAST));
    constexpr int kNames = 30000;  // the image has room for 2,048
    for (int i = 0; i < kNames; ++i) {
      std::string name = "label " + std::to_string(i);
      otp_begin_args args = event("key", name.c_str());
      args.kind = OTP_EVENT_LABEL;
      api().begin(&args);
      end("key");
    }
    Contents contents(file);
    CHECK(contents->names_left_out > kNames - 2048);
    CHECK(contents.count("(name not kept)") == contents.batch()->rows && contents.batch()->rows > 10000);
  });
}

// A refresh from some time on leaves out what ended long before it, and knows all that ended since, and what is open.
void a_refresh_reads_what_is_new() {
  BoxFile file;
  OpenBox box(file);
  begin("outer");
  leaf("early");
  otp_blackbox_contents* contents = nullptr;
  CHECK_EQ(otp_blackbox_read(file.fd(), nullptr, kBoxBytes, 1, &contents), OTP_OK);
  for (int i = 0; i < kMany / 4; ++i) leaf("many");
  int64_t since = otp_now_ns();
  leaf("new");
  CHECK_EQ(otp_blackbox_refresh(contents, since), OTP_OK);
  CHECK(contents->chunks >= 1 && contents->chunks <= 2);
  otp_batch* raw = nullptr;
  CHECK_EQ(otp_blackbox_next(contents, 0, &raw), OTP_OK);
  {
    Batch batch(raw);
    batch.check_sound();
    CHECK(batch->rows < kMany / 8);
    CHECK_EQ(batch.name(batch.row("new")), "new");
    CHECK(batch->start[batch.row("outer")] < since);
    CHECK((batch->flags[batch.row("outer")] & OTP_FLAG_UNFINISHED) != 0);
  }
  CHECK_EQ(otp_blackbox_refresh(contents, 0), OTP_OK);
  CHECK(contents->chunks > 2);
  end("outer");
  otp_blackbox_contents_free(contents);
}

void a_late_end_of_a_collective_of_an_earlier_box_ends_none() {
  BoxFile first, second;
  otp_blackbox_call call{0,  1, 4, 4, 0, api().intern("group", 5, OTP_NAME_CODE), 0, 0, 0, 0, 2, 0, -1, -1,
                         -1, 0, 0, 0, ""};
  uint64_t early;
  {
    OpenBox box(first);
    early = api().collective_enqueued(&call);
  }
  OpenBox box(second);
  api().collective_enqueued(&call);
  api().collective_completed(early, 0);
  Contents contents(second);
  CHECK(contents->collective_count == 1 && contents->collectives[0].completed == 0);
  CHECK_EQ(contents->groups[0].completed, 0u);
}

void what_an_image_lacks_is_said() {
  BoxFile file;
  OpenBox box(file);
  std::vector<uint8_t> image = file.image();
  CHECK_EQ(Contents(image)->chunks_damaged, 0u);
  image.resize(image.size() / 2);
  CHECK(Contents(image)->chunks_damaged > 10);
}

void there_is_one_box_and_after_it_another() {
  BoxFile first, second;
  otp_blackbox_options requested = box_options(second);
  otp_session* session = nullptr;
  {
    OpenBox box(first);
    CHECK_EQ(otp_blackbox_open(&requested, &session), OTP_E_STATE);
    otp_blackbox_set_info("{\"rank\": 3}", 11);
    leaf("in the first");
    CHECK_EQ(std::string(Contents(first)->info, Contents(first)->info_size), "{\"rank\": 3}");
  }
  CHECK_EQ(Contents(first)->is_closed, 1u);
  OpenBox box(second);
  leaf("in the second");
  Contents contents(second);
  CHECK(contents.batch().has("in the second") && !contents.batch().has("in the first"));
  requested.bytes = OTP_BLACKBOX_LEAST - 1;
  CHECK_EQ(otp_blackbox_open(&requested, &session), OTP_E_BUDGET_TOO_SMALL);
}

void a_forked_child_writes_nothing_into_it() {
  BoxFile file;
  OpenBox box(file);
  leaf("of the parent");
  in_child([&] {
    leaf("of the child");
    Session session;
    leaf("of the child");
    session.stop();
    Batch batch(session.drain());
    CHECK_EQ(batch->rows, 1u);
    BoxFile own;
    OpenBox own_box(own);
    leaf("of the child");
    CHECK(Contents(own).batch().has("of the child"));
  });
  Contents contents(file);
  CHECK(contents.batch().has("of the parent") && !contents.batch().has("of the child"));
}

void it_can_be_read_while_it_is_written() {
  BoxFile file;
  OpenBox box(file);
  void* mapped = mmap(nullptr, kBoxBytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&stop, i] {
      for (int round = 0; !stop; ++round) {
        begin("around");
        leaf(("inside of " + std::to_string(i) + " for the time " + std::to_string(round / 100)).c_str());
        end("around");
      }
    });
  }
  for (int i = 0; i < 50 / kSlowdown + 1; ++i) {
#if !defined(__SANITIZE_THREAD__)  // which cannot know that what is torn is thrown away
    std::vector<uint8_t> copy(static_cast<uint8_t*>(mapped), static_cast<uint8_t*>(mapped) + kBoxBytes);
    otp_blackbox_contents* live = nullptr;
    CHECK_EQ(otp_blackbox_read(-1, static_cast<uint8_t*>(mapped), kBoxBytes, 0, &live), OTP_OK);
    otp_batch* batch = nullptr;
    CHECK_EQ(otp_blackbox_next(live, 0, &batch), OTP_OK);
    Batch(batch).check_sound();
    CHECK_EQ(live->chunks_damaged, 0u);
    otp_blackbox_contents_free(live);
#endif
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  munmap(mapped, kBoxBytes);
}

}  // namespace

int main() {
  RUN_CLEAN(what_has_ended_and_what_is_open_is_in_the_image);
  RUN_CLEAN(times_are_those_that_a_session_gets);
  RUN_CLEAN(the_latest_stay_and_what_is_open_is_known_however_long_ago_it_began);
  RUN_CLEAN(a_slow_session_keeps_what_the_box_evicts);
  RUN_CLEAN(a_drain_takes_no_room_from_it_and_gets_all);
  RUN_CLEAN(a_session_at_its_budget_takes_nothing_from_the_box);
  RUN_CLEAN(other_kinds_than_it_asked_for_are_not_its_own);
  RUN_CLEAN(an_end_from_another_thread_is_known);
  RUN_CLEAN(collectives_are_there_with_their_state);
  RUN_CLEAN(threads_that_have_ended_stay_until_they_are_evicted);
  RUN_CLEAN(where_all_chunks_are_written_to_what_finds_none_is_counted);
  RUN_CLEAN(in_slices_it_is_the_same);
  RUN_CLEAN(a_refresh_reads_what_is_new);
  RUN_CLEAN(names_can_be_hidden_but_for_labels_that_are_listed);
  RUN_CLEAN(names_that_do_not_fit_are_counted_and_the_events_stay);
  RUN_CLEAN(a_late_end_of_a_collective_of_an_earlier_box_ends_none);
  RUN_CLEAN(what_an_image_lacks_is_said);
  RUN_CLEAN(there_is_one_box_and_after_it_another);
  RUN_CLEAN(a_forked_child_writes_nothing_into_it);
  RUN_CLEAN(it_can_be_read_while_it_is_written);
}
