// The clock's mapping and the table of names, without a recorder around them.
#include <cstring>
#include <memory>
#include <string>

#include "core/clock.h"
#include "core/interner.h"
#include "core/thread_buffer.h"
#include "core_support.h"

namespace {

constexpr uint64_t kMs = 1000000;

// A clock with points of our own: behind its own two, of which the rate of the ticks is known to be some other one.
struct Made {
  otp::Clock clock;
  uint64_t ticks, monotonic;
  int64_t unix_ns;

  Made() : ticks(otp::ticks_now() + 100000), monotonic(otp::clock_gettime_ns(CLOCK_MONOTONIC) + kMs) {
    unix_ns = static_cast<int64_t>(otp::clock_gettime_ns(CLOCK_REALTIME) + kMs);
    clock.add_point({ticks, unix_ns}, monotonic);
  }
  // As much later, at a rate of two ticks per nanosecond; `jump` of the wall clock meanwhile.
  void later(uint64_t ns, int64_t jump = 0) {
    ticks += 2 * ns;
    monotonic += ns;
    unix_ns += static_cast<int64_t>(ns) + jump;
    clock.add_point({ticks, unix_ns}, monotonic);
  }
  int64_t at(int64_t ns_ago) const { return clock.unix_ns(ticks - static_cast<uint64_t>(2 * ns_ago)); }
};

void check_never_decreasing(const otp::Clock& clock, uint64_t from, uint64_t to) {
  otp::ClockReader reader(clock);
  int64_t last = INT64_MIN;
  uint64_t step = (to - from) / 10000 + 1;
  for (uint64_t ticks = from; ticks < to; ticks += step) {
    int64_t now = reader.unix_ns(ticks);
    CHECK(now >= last);
    CHECK_EQ(now, clock.unix_ns(ticks));
    last = now;
  }
}

bool near(int64_t a, int64_t b, int64_t ns = 2) { return a - b <= ns && b - a <= ns; }

// Between two points time runs on the line through them, beyond the last on its rate, before the first backwards.
void time_runs_on_the_line_through_the_points() {
  Made made;
  made.later(10 * kMs);
  CHECK(near(made.at(0), made.unix_ns));
  CHECK(near(made.at(4 * kMs), made.unix_ns - static_cast<int64_t>(4 * kMs)));
  made.later(3000 * kMs);
  CHECK(near(made.at(1000 * kMs), made.unix_ns - static_cast<int64_t>(1000 * kMs)));
  CHECK(near(made.at(-500 * static_cast<int64_t>(kMs)), made.unix_ns + static_cast<int64_t>(500 * kMs)));
  CHECK(made.clock.unix_ns(1) < made.unix_ns);
  CHECK_EQ(made.clock.steps(), 0u);
  check_never_decreasing(made.clock, made.ticks - 9000 * kMs, made.ticks + 9000 * kMs);
}

// A wall clock set back is counted once, and time continues at its rate, before and after.
void a_step_back_does_not_take_time_back() {
  Made made;
  made.later(1000 * kMs);
  int64_t before = made.at(0);
  made.later(1000 * kMs, -60000 * static_cast<int64_t>(kMs));
  CHECK(near(made.at(0), before + static_cast<int64_t>(1000 * kMs)));
  for (int i = 0; i < 5; ++i) made.later(1000 * kMs);
  CHECK(near(made.at(0), before + static_cast<int64_t>(6000 * kMs)));
  CHECK_EQ(made.clock.steps(), 1u);
  made.later(1000 * kMs, 60000 * static_cast<int64_t>(kMs));  // and put right again
  CHECK(near(made.at(0), made.unix_ns));
  CHECK(near(made.at(0), before + static_cast<int64_t>(7000 * kMs)));
  CHECK_EQ(made.clock.steps(), 2u);
  check_never_decreasing(made.clock, made.ticks - 20000 * kMs, made.ticks + 2000 * kMs);
}

// A wall clock set forward moves what comes after it, at the old rate; what was before stays.
void a_step_forward_moves_what_comes_after() {
  Made made;
  made.later(1000 * kMs);
  int64_t before = made.at(0);
  made.later(1000 * kMs, 3600000 * static_cast<int64_t>(kMs));
  CHECK(near(made.at(500 * kMs), before + static_cast<int64_t>(500 * kMs)));
  // Past the last point, before another one: the rate is not that of the jump.
  CHECK(near(made.at(-2000), made.unix_ns + 2000));
  CHECK(near(made.at(-1000 * static_cast<int64_t>(kMs)), made.unix_ns + static_cast<int64_t>(1000 * kMs)));
  made.later(1000 * kMs);
  CHECK(near(made.at(500 * kMs), made.unix_ns - static_cast<int64_t>(500 * kMs)));
  CHECK_EQ(made.clock.steps(), 1u);
  check_never_decreasing(made.clock, made.ticks - 4000 * kMs, made.ticks + 2000 * kMs);
}

// Any row of points and jumps leaves a clock that does not decrease, however many points there were.
void no_row_of_steps_makes_time_decrease() {
  Made made;
  uint64_t state = 7;
  for (int i = 0; i < 10000; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int64_t jump = (state >> 60) == 0 ? static_cast<int64_t>(state >> 20 & 0xffffffff) - (int64_t{1} << 31) : 0;
    made.later(30000 + (state >> 40 & 0xfffff), jump);
  }
  CHECK(made.clock.steps() > 100);
  check_never_decreasing(made.clock, made.ticks - 4000 * kMs, made.ticks + 10 * kMs);
}

// Points that are older than the last, or hardly newer, or absurd ticks, change nothing.
void bad_points_and_ticks_are_harmless() {
  Made made;
  made.later(1000 * kMs);
  int64_t now = made.at(0);
  made.clock.add_point({made.ticks - 5, now + 1}, made.monotonic + kMs);
  made.clock.add_point({made.ticks + 5, now + 900000000}, made.monotonic + 100);
  CHECK(near(made.at(0), now));
  CHECK_EQ(made.clock.steps(), 0u);
  for (uint64_t ticks : {uint64_t{0}, UINT64_MAX, UINT64_MAX / 2, uint64_t{1} << 63}) made.clock.unix_ns(ticks);
}

// A new clock knows the rate of the ticks already, and the hour.
void a_new_clock_tells_the_time() {
  otp::Clock clock;
  auto wall = static_cast<int64_t>(otp::clock_gettime_ns(CLOCK_REALTIME));
  uint64_t ticks = otp::ticks_now();
  CHECK(near(clock.unix_ns(ticks), wall, 1000000000));
  // A wrong rate of 1 tick = 1 ns would be off by the processor's gigahertz. Several tries: any of the four readings
  // can be interrupted.
  double ratio = 0;
  for (int attempt = 0; attempt < 20 && (ratio < 0.8 || ratio > 1.25); ++attempt) {
    uint64_t begin = otp::ticks_now(), begin_ns = otp::clock_gettime_ns(CLOCK_MONOTONIC);
    while (otp::clock_gettime_ns(CLOCK_MONOTONIC) - begin_ns < 2 * kMs) continue;
    uint64_t end = otp::ticks_now(), end_ns = otp::clock_gettime_ns(CLOCK_MONOTONIC);
    ratio = static_cast<double>(clock.unix_ns(end) - clock.unix_ns(begin)) / static_cast<double>(end_ns - begin_ns);
  }
  CHECK(ratio > 0.8 && ratio < 1.25);
}

std::string text_in(const otp_names& names, uint32_t id) {
  uint64_t from = id == 0 ? 0 : names.ends[id - 1];
  return std::string(reinterpret_cast<const char*>(names.data) + from, names.ends[id] - from);
}

// Equal names have one number wherever they lie and whatever they are of, and a number's name is what was given in,
// zeros and all.
void names_are_equal_by_content() {
  otp::Interner names;
  std::string one = "aten::mm", two = "aten::mm";
  uint32_t id = names.intern(one, OTP_NAME_OPERATOR).id;
  CHECK_EQ(names.intern(two, OTP_NAME_LABEL).id, id);
  CHECK(names.intern("aten::m", OTP_NAME_OPERATOR).id != id);
  std::string with_zero("a\0b", 3);
  otp::InternedName zero = names.intern(with_zero, OTP_NAME_LABEL);
  CHECK(zero.id != names.intern("a", OTP_NAME_LABEL).id && zero.size == 3 && std::memcmp(zero.text, "a\0b", 3) == 0);
  CHECK_EQ(names.intern("", OTP_NAME_OPERATOR).id, 0u);
  CHECK_EQ(names.view().ends[0], 0u);
  CHECK(text_in(names.view(), id) == "aten::mm");
}

// What a reader was shown stays where it is, whatever is added: there is nothing to copy.
void names_are_shown_where_they_are() {
  otp::Interner names;
  uint32_t id = names.intern("aten::mm", OTP_NAME_OPERATOR).id;
  otp_names before = names.view();
  for (int i = 0; i < 100000; ++i) names.intern(std::to_string(i), OTP_NAME_CODE);
  otp_names after = names.view();
  CHECK(after.data == before.data && after.ends == before.ends);
  CHECK_EQ(after.count, before.count + 100000);
  CHECK(text_in(before, id) == "aten::mm");
}

// An address that is used again for another name gives the new name, even where the old one is its beginning.
void a_stale_address_gives_the_new_name() {
  otp::Interner names;
  auto cache = std::make_unique<otp::NamesByText>();
  char text[16];
  auto id_of = [&](const char* name, size_t size) {
    std::strcpy(text, name);
    uint32_t id = 0;
    std::string_view requested(text, size);
    return cache->find(requested, &id) ? id : cache->ask(names, requested, OTP_NAME_LABEL);
  };
  auto interned = [&](const char* name) { return names.intern(name, OTP_NAME_LABEL).id; };
  CHECK_EQ(id_of("first", 5), interned("first"));
  CHECK_EQ(id_of("first", 5), interned("first"));
  CHECK_EQ(id_of("first2", 6), interned("first2"));
  CHECK_EQ(id_of("fir", 3), interned("fir"));
  CHECK_EQ(id_of("first", 3), interned("fir"));
  CHECK_EQ(id_of("first", 5), interned("first"));
  CHECK_EQ(id_of("", 0), 0u);
}

// A name that its source vouches for is known by its address, until the source says that names went.
void a_vouched_name_is_known_by_its_address() {
  otp::hot::NamesByAddress cache;
  const char *add = "aten::add", *label = "label";
  uint32_t id = 0;
  CHECK(!cache.find(add, 1, &id));
  cache.keep(add, 1, 7);
  CHECK(cache.find(add, 1, &id));
  CHECK_EQ(id, 7u);
  CHECK(!cache.find(add, 2, &id));
  cache.keep(add, 2, 8);
  CHECK(cache.find(add, 2, &id) && id == 8);
  CHECK(!cache.find(add, 1, &id));  // what the address meant before is gone
  CHECK(!cache.is_unstable(add, 2));
  cache.keep_unstable(label, 1);
  CHECK(!cache.find(label, 1, &id));
  CHECK(cache.is_unstable(label, 1));
  CHECK(!cache.is_unstable(label, 2));
}

// A kind at its limit, by count or by bytes, gives one number to all that come later and counts them. It still knows
// those that it has, and takes nothing from the other kinds.
void a_full_kind_counts_what_it_refuses() {
  const otp::NameLimits limits = {{{2, 100}, {2, 100}, {3, 100}, {9, 20}}};
  otp::Interner names(limits);
  uint32_t known = names.intern("known", OTP_NAME_LABEL).id;
  for (const char* label : {"one", "two", "three", "four", "three"}) names.intern(label, OTP_NAME_LABEL);
  CHECK_EQ(names.refused(OTP_NAME_LABEL), 3u);
  CHECK_EQ(names.intern("known", OTP_NAME_LABEL).id, known);
  uint32_t other = names.intern("five", OTP_NAME_LABEL).id;
  CHECK_EQ(other, 1u + OTP_NAME_LABEL);
  CHECK(text_in(names.view(), other) == "(other labels)");
  uint32_t op = names.intern("aten::mm", OTP_NAME_OPERATOR).id;
  CHECK(text_in(names.view(), op) == "aten::mm");
  CHECK_EQ(names.intern("aten::mm", OTP_NAME_LABEL).id, op);  // a label has its name where another kind brought it
  CHECK_EQ(names.refused(OTP_NAME_OPERATOR), 0u);

  CHECK(names.intern("nineteen characters", OTP_NAME_TEXT).id > op);
  CHECK(text_in(names.view(), names.intern("no space", OTP_NAME_TEXT).id) == "(other texts)");
  CHECK(names.intern("x", OTP_NAME_TEXT).id > op);  // a short one still fits

  otp::NamesByText cache;
  for (uint64_t uses = 5; uses < 7; ++uses) {  // asked for again each time, and counted
    uint32_t id = 0;
    CHECK(!cache.find("five", &id));
    CHECK_EQ(cache.ask(names, "five", OTP_NAME_LABEL), other);
    CHECK_EQ(names.refused(OTP_NAME_LABEL), uses);
  }
}

// A million names of labels fill their own share, and an operator that comes after them has its name.
void labels_never_take_the_names_of_operators() {
  otp::Interner names;
  for (int i = 0; i < 1000000; ++i) names.intern("request " + std::to_string(i), OTP_NAME_LABEL);
  CHECK_EQ(names.refused(OTP_NAME_LABEL), 1000000 - otp::kNameLimits[OTP_NAME_LABEL].names);
  CHECK(text_in(names.view(), names.intern("aten::mm", OTP_NAME_OPERATOR).id) == "aten::mm");
  CHECK(text_in(names.view(), names.intern("forward", OTP_NAME_CODE).id) == "forward");
}

// Where the address space is short, the limits are lower and names are still kept.
void less_is_reserved_where_address_space_is_short() {
  constexpr uint64_t kTooMuch = uint64_t{1} << 47;  // of user space, there is no more
  otp::Interner names(otp::NameLimits{{{1u << 16, kTooMuch}, {100, 100}, {100, 100}, {100, 100}}});
  CHECK(text_in(names.view(), names.intern("aten::mm", OTP_NAME_OPERATOR).id) == "aten::mm");
}

}  // namespace

int main() {
  RUN(time_runs_on_the_line_through_the_points);
  RUN(a_step_back_does_not_take_time_back);
  RUN(a_step_forward_moves_what_comes_after);
  RUN(no_row_of_steps_makes_time_decrease);
  RUN(bad_points_and_ticks_are_harmless);
  RUN(a_new_clock_tells_the_time);
  RUN(names_are_equal_by_content);
  RUN(a_stale_address_gives_the_new_name);
  RUN(a_vouched_name_is_known_by_its_address);
  RUN(names_are_shown_where_they_are);
  RUN(a_full_kind_counts_what_it_refuses);
  RUN(labels_never_take_the_names_of_operators);
  RUN(less_is_reserved_where_address_space_is_short);
}
