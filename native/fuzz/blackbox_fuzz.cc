// Damaged images of a black box: what is read of them is sound, comes to an end, and has no event that nobody recorded.
//
// The input is a list of damages (flipped bits, cuts, swapped pieces), seven bytes each, that are done to one image and
// undone again. Each event has a number of its own: one with another number counts as invented. A flip can change no
// more than one, a swap as many as have a cut through them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "fuzz.h"
#include "otel_torchprof/blackbox_format.h"

namespace {

constexpr uint64_t kBytes = OTP_BLACKBOX_LEAST;
constexpr size_t kCutThrough = 8;  // records that a swap may cut through
constexpr size_t kListed = 16;  // events of a chunk's list, which has them once more where its head says what it is not

int64_t next_number = 0;

void record(int events, const char* name) {
  const otp_api& api = *otp_get_api();
  int64_t inputs[4] = {1, 2, 3, 4};
  for (int i = 0; i < events; ++i) {
    otp_begin_args args{};
    args.key = &args;
    args.name = name;
    args.name_size = UINT32_MAX;
    args.kind = OTP_EVENT_OPERATOR;
    args.nests = 1;
    args.sequence_nr = static_cast<int64_t>(static_cast<uint64_t>(++next_number) * 0x9E3779B97F4A7C15u >> 1);
    args.inputs = inputs;
    args.input_words = i % 3 == 0 ? 4 : 0;
    REQUIRE(api.begin(&args) != 0);
    if (i % 5 != 0) api.end(&args, 0, i % 7 == 0 ? "Error" : nullptr, 5);
    if (i % 40 == 39) {
      for (int open = 0; open < 8; ++open) api.end(&args, 0, nullptr, 0);
    }
  }
}

// An image as a process leaves it: every chunk has had another life, most have little in this one.
std::vector<uint8_t> made_image() {
  int fd = memfd_create("box", 0);
  REQUIRE(fd >= 0 && posix_fallocate(fd, 0, kBytes) == 0);
  otp_blackbox_options options{fd, kBytes, 0, 0, 0, 0, nullptr};
  otp_session_options plain{64u << 20, OTP_FULL_DROP_OLDEST, 1, 1, 0, 0, 0, 0};
  otp_session *box = nullptr, *session = nullptr;
  REQUIRE(otp_blackbox_open(&options, &box) == OTP_OK);
  REQUIRE(otp_session_new(&plain, &session) == OTP_OK && otp_session_start(session) == OTP_OK);
  otp_blackbox_set_info("{\"rank\": 1}", 11);
  std::thread([] { record(20000, "former life"); }).join();
  for (const char* name : {"aten::mm", "a label", "forward", "aten::add", "backward"})
    for (int i = 0; i < 2; ++i) std::thread([name] { record(60, name); }).join();
  record(100, "in flight");
  const otp_api& api = *otp_get_api();
  for (int64_t i = 1; i <= 20; ++i) {
    uint32_t group = api.intern(i % 2 == 0 ? "default" : "pair", UINT32_MAX, OTP_NAME_CODE);
    otp_blackbox_call call{0, i, 64, 64, group, group, 0, group, 0, 0, 2, 0, -1, -1, -1, 0, 0, 0, ""};
    uint64_t ticket = api.collective_enqueued(&call);
    if (i % 3 != 0) api.collective_completed(ticket, i % 5 == 0);
  }
  std::vector<uint8_t> image(kBytes);
  REQUIRE(pread(fd, image.data(), kBytes, 0) == static_cast<ssize_t>(kBytes));
  otp_session_free(session);
  otp_session_free(box);
  close(fd);
  return image;
}

struct Made {
  std::vector<uint8_t> image = made_image();
  std::set<int64_t> numbers;
  uint64_t chunks_at = 0;
  uint32_t chunks = 0;
};

otp_blackbox_contents* read(const uint8_t* data, uint64_t size) {
  otp_blackbox_contents* contents = nullptr;
  int status = otp_blackbox_read(-1, data, size, 0, &contents);
  REQUIRE(status == OTP_OK || status == OTP_E_NO_BLACKBOX);
  return contents;
}

// Its events, in batches of so many bytes of records.
template <typename Each>
void read_events(otp_blackbox_contents* contents, uint64_t max_bytes, Each each) {
  for (int64_t watermark = 0; watermark != INT64_MAX;) {
    otp_batch* batch = nullptr;
    REQUIRE(otp_blackbox_next(contents, max_bytes, &batch) == OTP_OK);
    watermark = batch->watermark;
    each(*batch);
    otp_batch_free(batch);
  }
}

Made& made() {
  static Made* found = [] {
    auto* made = new Made;
    otp_blackbox_contents* contents = read(made->image.data(), kBytes);
    REQUIRE(contents != nullptr && contents->chunks_damaged == 0 && contents->info_size == 11);
    REQUIRE(contents->group_count == 2 && contents->collective_count == 20);
    read_events(contents, 0, [made](const otp_batch& batch) {
      for (uint64_t row = 0; row < batch.rows; ++row) REQUIRE(made->numbers.insert(batch.sequence_nr[row]).second);
    });
    REQUIRE(made->numbers.size() > 600);
    otp_blackbox_contents_free(contents);
    otp_blackbox_header header;
    std::memcpy(&header, made->image.data(), sizeof header);
    made->chunks = header.chunk_count;
    made->chunks_at = kBytes - uint64_t{made->chunks} * OTP_CHUNK_BYTES;
    return made;
  }();
  return *found;
}

// Where something is that means anything: `a` says in which part, `b` where in that.
uint64_t place_of(uint8_t a, uint16_t b) {
  const Made& m = made();
  if (a < 32) return b % sizeof(otp_blackbox_header);
  if (a < 48) return OTP_BLACKBOX_INFO_AT + b % (OTP_BLACKBOX_NAME_ENDS_AT - OTP_BLACKBOX_INFO_AT);
  if (a < 64) return OTP_BLACKBOX_NAME_ENDS_AT + b % 256;
  uint64_t chunk = m.chunks_at + a % m.chunks * uint64_t{OTP_CHUNK_BYTES};
  if (a < 128) return chunk + b % OTP_BLACKBOX_CHUNK_HEADER;
  uint32_t published;
  std::memcpy(&published, m.image.data() + chunk + 8, sizeof published);
  return chunk + OTP_BLACKBOX_CHUNK_HEADER + b % std::min<uint32_t>(published + 200, OTP_CHUNK_BYTES - 200);
}

void check_rows(const otp_batch& batch) {
  for (uint64_t row = 0; row < batch.rows; ++row) {
    REQUIRE(batch.thread[row] < batch.thread_count && batch.end_thread[row] < batch.thread_count);
    REQUIRE(batch.end[row] >= batch.start[row] && batch.parent[row] < static_cast<int64_t>(row));
  }
}

void check(const otp_batch& batch, size_t allowed) {
  check_rows(batch);
  std::set<int64_t> seen;
  size_t invented = 0, twice = 0;
  for (uint64_t row = 0; row < batch.rows; ++row) {
    int64_t number = batch.sequence_nr[row];
    invented += made().numbers.count(number) == 0;
    twice += !seen.insert(number).second;
  }
  REQUIRE(invented <= allowed && twice <= allowed * kListed);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t>& image = made().image;
  uint64_t bytes = image.size();
  size_t allowed = 0;
  struct Swap {
    uint64_t a, b;
    size_t size;
  };
  std::vector<Swap> swaps;
  auto swap = [&image](const Swap& s) {
    std::swap_ranges(image.begin() + static_cast<std::ptrdiff_t>(s.a),
                     image.begin() + static_cast<std::ptrdiff_t>(s.a + s.size),
                     image.begin() + static_cast<std::ptrdiff_t>(s.b));
  };
  struct Flip {
    uint64_t at;
    uint8_t before;
  };
  std::vector<std::pair<bool, size_t>> done;  // whether it was a swap, and which
  std::vector<Flip> flips;
  for (size_t at = 0; at + 7 <= size && at < 7 * 16; at += 7) {
    const uint8_t* d = data + at;
    auto b = static_cast<uint16_t>(d[2] | d[3] << 8), c = static_cast<uint16_t>(d[4] | d[5] << 8);
    uint64_t place = place_of(d[1], b);
    if (d[0] < 200) {
      flips.push_back({place, image[place]});
      done.push_back({false, flips.size() - 1});
      image[place] = d[0] < 100 ? static_cast<uint8_t>(image[place] ^ 1 << d[6] % 8) : d[6];
      allowed += 1;
    } else if (d[0] < 250) {
      uint64_t other = place_of(d[6], c);
      bool whole = d[0] < 225;  // whole chunks or pages, else any piece
      uint64_t unit = d[0] < 212 ? OTP_CHUNK_BYTES : 4096;
      Swap s{place, other, size_t{1} + c % 4096};
      if (whole) s = {place / unit * unit, other / unit * unit, unit};
      bool overlaps = std::max(s.a, s.b) - std::min(s.a, s.b) < s.size || std::max(s.a, s.b) + s.size > image.size();
      if (overlaps) continue;
      swap(s);
      swaps.push_back(s);
      done.push_back({true, swaps.size() - 1});
      allowed += kCutThrough;
    } else {
      bytes = std::min(bytes, place);
    }
  }
  std::vector<uint8_t> cut;  // of its exact size: a read beyond it is seen
  if (bytes < image.size()) cut.assign(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(bytes));
  otp_blackbox_contents* contents = read(cut.empty() ? image.data() : cut.data(), bytes);
  if (contents != nullptr) {
    read_events(contents, 0, [allowed](const otp_batch& batch) { check(batch, allowed); });
    otp_blackbox_rewind(contents);
    uint64_t batches = 0;
    read_events(contents, size * 100, [&](const otp_batch& batch) {
      check_rows(batch);
      REQUIRE(++batches <= made().chunks + 1);  // each has a chunk at least
    });
    REQUIRE(contents->group_count <= OTP_BLACKBOX_GROUPS && contents->collective_count <= OTP_BLACKBOX_COLLECTIVES);
    REQUIRE(otp_blackbox_refresh(contents, contents->last) == OTP_OK);
    read_events(contents, 0, [allowed](const otp_batch& batch) { check(batch, allowed); });
  }
  otp_blackbox_contents_free(contents);
  for (size_t i = done.size(); i-- > 0;) {
    if (done[i].first) {
      swap(swaps[done[i].second]);
    } else {
      image[flips[done[i].second].at] = flips[done[i].second].before;
    }
  }
  return 0;
}
