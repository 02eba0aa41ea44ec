// Any bytes as the records of two threads, drained twice and once more for what is open then: the decoder must stay
// inside its memory, and what it makes of them must be a sound batch.
//
// The first bytes choose: how the rest is cut into chunks, inputs and contexts kept or not, evictions, late ends,
// whether the second drain is the last. The others are records; half of the inputs have their kinds and consumers put
// right first, since random bytes rarely get past the second record.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "core/chunk_list.h"
#include "core/drain.h"
#include "fuzz.h"

namespace {

constexpr uint32_t kConsumer = 1;
constexpr uint64_t kStart = 1000, kStop = uint64_t{1} << 62;

struct Choices {
  bool inputs, repair, final, loss, contexts, memory;
  uint8_t cut, late;
};

// Gives records a known kind and this consumer, and distances that are likely to hit.
void repair(std::vector<uint8_t>* bytes) {
  for (size_t at = 0; at + sizeof(otp_record) <= bytes->size();) {
    otp_record head;
    std::memcpy(&head, bytes->data() + at, sizeof head);
    head.kind = static_cast<uint8_t>(OTP_RECORD_BEGIN + head.kind % 7);
    if (head.detail % 8 != 0) head.consumers |= kConsumer;
    if (head.kind == OTP_RECORD_END) head.value %= 8;
    if (head.kind == OTP_RECORD_INPUTS) head.ticks %= 16;
    size_t size = sizeof(otp_record) + (head.kind == OTP_RECORD_BEGIN       ? 16
                                        : head.kind == OTP_RECORD_ERROR_END ? 8
                                        : head.kind == OTP_RECORD_MEMORY    ? 40
                                        : head.kind == OTP_RECORD_INPUTS    ? head.ticks * 8
                                                                            : 0);
    std::memcpy(bytes->data() + at, &head, sizeof head);
    if (head.kind == OTP_RECORD_BEGIN && at + size <= bytes->size()) (*bytes)[at + sizeof head + 1] = 0;
    at += size;
  }
}

void check(const otp_batch& batch, uint64_t max_rows, uint64_t max_words, const std::set<uint32_t>& words,
           std::set<uint64_t>* seen) {
  REQUIRE(batch.rows <= max_rows && batch.input_word_count <= max_words);
  for (uint64_t i = 0; i < batch.rows; ++i) {
    REQUIRE(batch.thread[i] < batch.thread_count && batch.end_thread[i] < batch.thread_count);
    REQUIRE(batch.end[i] >= batch.start[i]);
    REQUIRE(words.count(batch.name[i]) == 1);
    if (batch.context != nullptr) REQUIRE(batch.context[i] == 0 || words.count(batch.context[i]) == 1);
    REQUIRE(seen->insert(batch.id[i]).second);  // every event once
    REQUIRE(batch.parent[i] < static_cast<int64_t>(i));
    if (batch.parent[i] >= 0) REQUIRE(batch.thread[batch.parent[i]] == batch.thread[i]);
    if (batch.inputs != nullptr && batch.inputs[i] >= 0)
      REQUIRE(static_cast<uint64_t>(batch.inputs[i]) < batch.input_word_count);
  }
  for (uint64_t i = 0; i < batch.outer_count; ++i) {
    REQUIRE(batch.outer_row[i] < batch.rows && batch.outer_parent[i] != 0);
    REQUIRE(batch.parent[batch.outer_row[i]] == -1);
    if (i > 0) REQUIRE(batch.outer_row[i] > batch.outer_row[i - 1]);
  }
}

// What is open at a drain has not been a row, stands after its parent, and comes with a context where there are any.
void check_open(const otp_batch& batch, const std::set<uint32_t>& words, const std::set<uint64_t>& seen) {
  for (uint64_t i = 0; i < batch.open_count; ++i) {
    REQUIRE(batch.open_id[i] != 0 && seen.count(batch.open_id[i]) == 0);
    REQUIRE(batch.open_parent[i] < batch.open_id[i]);
    REQUIRE(i == 0 || batch.open_id[i] > batch.open_id[i - 1]);
    REQUIRE(batch.open_context[i] == 0 || (batch.context != nullptr && words.count(batch.open_context[i]) == 1));
  }
}

void check_memory(const otp_batch& batch, uint64_t max_memory) {
  REQUIRE(batch.memory_count <= (batch.memory_time == nullptr ? 0 : max_memory));
  for (uint64_t i = 0; i < batch.memory_count; ++i) {
    REQUIRE(batch.memory_thread[i] < batch.thread_count);
    if (i > 0 && batch.memory_thread[i] == batch.memory_thread[i - 1])
      REQUIRE(batch.memory_time[i] >= batch.memory_time[i - 1]);
  }
}

// A thread of the recorder, as far as the decoder sees it.
struct Source {
  otp_thread info{};
  otp::ThreadDecoder decoder;
  std::vector<std::vector<uint8_t>> chunks;  // of their exact size: a read beyond one is seen
};

struct Fuzz {
  Choices choices;
  Source sources[2];
  std::set<uint32_t> words;
  std::set<uint64_t> seen;

  void add_chunk(size_t source, std::vector<uint8_t> chunk);
  void drain(bool final);
};

void Fuzz::add_chunk(size_t source, std::vector<uint8_t> chunk) {
  // A name is whatever a BEGIN says, a context what a CONTEXT says: any four bytes at a multiple of four.
  for (size_t at = 0; at + 4 <= chunk.size(); at += 4) {
    uint32_t word;
    std::memcpy(&word, chunk.data() + at, sizeof word);
    words.insert(word);
  }
  sources[source].chunks.push_back(std::move(chunk));
}

// As session.cc does it, with the same bounds.
void Fuzz::drain(bool final) {
  uint64_t bytes = 0, pending = 0, pending_words = 0;
  for (Source& source : sources) {
    for (auto& chunk : source.chunks) bytes += chunk.size();
    pending += source.decoder.pending.size();
    for (auto& event : source.decoder.pending) pending_words += event.inputs.size();
  }
  uint64_t max_rows = bytes / sizeof(otp_record_begin) + pending, max_words = bytes / 8 + pending_words;
  uint64_t max_memory = bytes / sizeof(otp_record_memory);
  uint64_t max_threads = 2 * (1 + choices.late);
  otp::BatchBuilder builder(
      {max_rows, max_words, max_memory, max_threads, choices.inputs, choices.contexts, choices.memory});
  REQUIRE(builder.ok());
  static const otp::Clock clock;
  otp::ClockReader reader(clock);
  std::vector<otp::ThreadDecode> decodes;
  decodes.reserve(2);
  for (Source& source : sources) {
    decodes.emplace_back(builder, source.decoder, reader, otp::DecodeLimits{kStart, kStop, UINT64_MAX, kConsumer},
                         source.info);
    for (auto& chunk : source.chunks) {
      auto size = static_cast<uint32_t>(chunk.size());
      // Chunks were evicted in between: numbers continue higher up.
      uint64_t first = source.decoder.next_index + (choices.loss ? 1000 : 0);
      std::vector<otp::LateEnd> ends;
      uint64_t events = otp::scan_lost({chunk.data(), size, first}, kConsumer, &ends);
      REQUIRE(events <= size / sizeof(otp_record_begin));
      for (const otp::LateEnd& end : ends) REQUIRE(end.index < first);
      if (choices.loss) decodes.back().after_loss();
      decodes.back().chunk({chunk.data(), size, first});
    }
    source.chunks.clear();
    for (uint8_t i = 0; i < choices.late; ++i) {
      uint64_t index = i % 2 == 0 ? i : source.decoder.next_index - i;
      otp::LateEnd late{source.info.id, index, kStart * i, 0, OTP_FLAG_ASYNC, sources[1].info};
      decodes.back().late_end(late, builder.thread_index(late.ended_on));
    }
  }
  std::vector<uint64_t> open;
  for (otp::ThreadDecode& decode : decodes) {
    if (final) decode.finish_all(kStop);
    decode.keep_open(&open);
  }
  REQUIRE(!final || open.empty());
  std::sort(open.begin(), open.end());
  builder.remove_rows(open);
  otp_batch* batch = builder.finish();
  REQUIRE(batch->thread_count <= max_threads && batch->outer_count + open.size() <= max_rows);
  check(*batch, max_rows, max_words, words, &seen);
  check_open(*batch, words, seen);
  check_memory(*batch, max_memory);
  REQUIRE(batch->open_count == open.size());
  otp_batch_free(batch);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  Fuzz fuzz{{(data[0] & 1) != 0, (data[0] & 2) != 0, (data[0] & 4) != 0, (data[0] & 8) != 0, (data[0] & 16) != 0,
             (data[0] & 32) != 0, data[1], static_cast<uint8_t>(data[2] % 16)},
            {},
            {},
            {}};
  fuzz.sources[0].info.id = 1;
  fuzz.sources[1].info.id = 2;
  std::vector<uint8_t> bytes(data + 3, data + std::min(size, size_t{3 * otp::Chunk::kCapacity}));
  if (fuzz.choices.repair) repair(&bytes);
  size_t step =
      std::max<size_t>(std::min<size_t>(8u * (1 + fuzz.choices.cut), bytes.size() / 4), bytes.size() / 64 * 8);
  for (size_t part = 0; part < 2; ++part) {
    for (size_t i = 4 * part; i < 4 * part + 4; ++i) {
      size_t from = std::min(bytes.size(), i * step);
      size_t to = std::min({bytes.size(), from + (i == 7 ? bytes.size() : step), from + otp::Chunk::kCapacity});
      fuzz.add_chunk(
          i % 2, {bytes.begin() + static_cast<std::ptrdiff_t>(from), bytes.begin() + static_cast<std::ptrdiff_t>(to)});
    }
    fuzz.drain(part == 1 && fuzz.choices.final);
  }
  fuzz.drain(true);  // what was open still
  return 0;
}
