// What the tests and the fuzzers of trace files have in common: arrays for the reader, and a document read in pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "otel_torchprof/trace_files.h"

namespace otp::testing {

struct Row {
  int64_t start, duration, sequence_nr, inputs;
  uint64_t id, span_id, parent_id;
  std::string name, category, text, process, thread;
  uint32_t fwd_thread;
  char phase;
  uint8_t flags;
  std::string trace = {};  // compared by the tests that are about it

  bool operator==(const Row& other) const {
    return start == other.start && duration == other.duration && sequence_nr == other.sequence_nr &&
           inputs == other.inputs && id == other.id && span_id == other.span_id && parent_id == other.parent_id &&
           name == other.name && category == other.category && text == other.text && process == other.process &&
           thread == other.thread && fwd_thread == other.fwd_thread && phase == other.phase && flags == other.flags;
  }
};

struct Work {
  uint64_t row;
  int64_t correlation, stream, bytes;
  int32_t device;
};

struct Memory {
  int64_t time, bytes;
  uint64_t address, span;
  int64_t total_allocated, total_reserved;
  int32_t device_type, device_index;
  uint8_t flags;
};

// A document that was read, as far as it could be.
struct Document {
  std::vector<Row> rows;
  std::vector<Work> works;
  std::vector<Memory> memory;
  std::vector<std::pair<std::string, std::string>> members;
  std::vector<int64_t> inputs;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t, std::string, std::string>> attributes;
  otp_trace_figures figures{};
  int status = OTP_TRACE_MORE;
  uint32_t expected = 0;
  bool is_cut_off = false;
  uint64_t place = 0;     // offset of what was unexpected
  uint64_t consumed = 0;  // bytes of what was read
  std::string output;     // events that were rewritten
};

class DocumentReader {
 public:
  // `keys`: reads for sums, with these attributes.
  explicit DocumentReader(uint64_t capacity, uint64_t limit = uint64_t{1} << 30, const char* keys = nullptr)
      : d_reader(otp_trace_open(limit)),
        d_capacity(capacity),
        d_signed(5 * capacity),
        d_unsigned(3 * capacity),
        d_small(6 * capacity),
        d_bytes(2 * capacity),
        d_works(3 * capacity),
        d_amounts(4 * capacity),
        d_addresses(3 * capacity),
        d_tracks(capacity),
        d_devices(3 * capacity),
        d_flags(capacity) {
    if (keys != nullptr) otp_trace_read_for_sums(d_reader, keys);
    int64_t* s = d_signed.data();
    uint64_t* u = d_unsigned.data();
    uint32_t* n = d_small.data();
    const uint64_t c = capacity;
    d_rows = {c, 0,     s,         s + c,     u,         u + c,     u + 2 * c,      s + 2 * c,         s + 3 * c,
              n, n + c, n + 2 * c, n + 3 * c, n + 4 * c, n + 5 * c, d_bytes.data(), d_bytes.data() + c};
    d_work_rows = {
        c, 0, d_addresses.data(), d_works.data(), d_works.data() + c, d_works.data() + 2 * c, d_devices.data()};
    d_memory = {c,
                0,
                d_amounts.data(),
                d_amounts.data() + c,
                d_addresses.data() + c,
                d_amounts.data() + 2 * c,
                d_amounts.data() + 3 * c,
                d_addresses.data() + 2 * c,
                d_tracks.data(),
                d_devices.data() + c,
                d_devices.data() + 2 * c,
                d_flags.data()};
  }
  ~DocumentReader() { otp_trace_close(d_reader); }
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  // Reads the text in pieces of these sizes, the last of which is repeated.
  Document read(std::string_view text, const std::vector<size_t>& sizes) {
    Document document;
    std::string rest;
    size_t at = 0;
    for (size_t piece = 0; document.status == OTP_TRACE_MORE; ++piece) {
      const size_t size = std::min(sizes[std::min(piece, sizes.size() - 1)], text.size() - at);
      rest.append(text.substr(at, size));
      at += size;
      read_piece(rest, at == text.size(), &document);
    }
    take_sums(&document);
    return document;
  }

  // Rewrites the text. The process 7 is the rank's; others have the ids 1000, 1001 and so on, and these as metadata.
  Document rewrite(std::string_view text, const otp_trace_target& target, const std::vector<size_t>& sizes) {
    otp_trace_rewrite(d_reader, &target);
    add_process("7", target.pid, "");
    Document document = read(text, sizes);
    otp_buffer* output = otp_trace_output(d_reader);
    document.output.assign(reinterpret_cast<const char*>(output->data), output->size);
    output->size = 0;
    return document;
  }

  // Reads a request of OTLP, or a line; the new resources are members.
  Document read_request(std::string_view request, bool is_json, uint64_t offset = 0) {
    Document document;
    const std::vector<uint8_t> exact(request.begin(), request.end());  // so that a read beyond it is seen
    otp_trace_step step = {};
    do {
      document.status = otp_trace_read_request(d_reader, exact.data(), exact.size(), is_json, offset, &d_rows,
                                               &d_work_rows, &d_memory, &step);
      if (document.status == OTP_TRACE_MEMBER)
        document.members.emplace_back("resource", request.substr(step.value, step.value_size));
      take(&document);
    } while (document.status == OTP_TRACE_FULL || document.status == OTP_TRACE_MEMBER);
    document.consumed = step.consumed;
    take_sums(&document);
    return document;
  }

 private:
  void take_sums(Document* document) {
    document->figures = *otp_trace_get_figures(d_reader);
    uint64_t count;
    const int64_t* words = otp_trace_inputs(d_reader, &count);
    document->inputs.assign(words, words + count);
    const otp_trace_attribute* attributes = otp_trace_attributes(d_reader, &count);
    for (uint64_t i = 0; i < count; ++i)
      document->attributes.emplace_back(attributes[i].row, attributes[i].event, attributes[i].offset,
                                        name(attributes[i].key), name(attributes[i].value));
  }

  void read_piece(std::string& rest, bool is_last, Document* document) {
    do {
      const std::vector<uint8_t> exact(rest.begin(), rest.end());  // so that a read beyond it is seen
      otp_trace_step step;
      document->status =
          otp_trace_read(d_reader, exact.data(), exact.size(), is_last, &d_rows, &d_work_rows, &d_memory, &step);
      if (document->status == OTP_TRACE_MEMBER)
        document->members.emplace_back(rest.substr(step.place, step.name_size),
                                       rest.substr(step.value, step.value_size));
      if (document->status == OTP_TRACE_PROCESS) {
        const std::string process = rest.substr(step.value, step.value_size);
        const std::string pid = std::to_string(d_next_pid++);
        add_process(process, std::stoll(pid), ",\n{\"M\":" + pid + "}");
      }
      document->expected = step.expected;
      document->is_cut_off = step.is_cut_off != 0;
      if (document->status == OTP_TRACE_UNEXPECTED) document->place = document->consumed + step.place;
      document->consumed += step.consumed;
      rest.erase(0, step.consumed);
      take(document);
    } while (document->status == OTP_TRACE_FULL || document->status == OTP_TRACE_MEMBER ||
             document->status == OTP_TRACE_PROCESS);
  }

  void add_process(const std::string& process, int64_t pid, const std::string& events) {
    const auto bytes = [](const std::string& text) { return reinterpret_cast<const uint8_t*>(text.data()); };
    otp_trace_add_process(d_reader, bytes(process), process.size(), pid, bytes(events), events.size());
  }

  std::string name(uint32_t number) const {
    const otp_names names = otp_trace_names(d_reader);
    const uint64_t begin = number == 0 ? 0 : names.ends[number - 1];
    return {reinterpret_cast<const char*>(names.data) + begin, names.ends[number] - begin};
  }

  void take(Document* document) {
    uint64_t count;
    const uint32_t* tracks = otp_trace_tracks(d_reader, &count);
    for (uint64_t i = 0; i < d_rows.count; ++i) {
      const uint32_t track = d_rows.track[i];
      document->rows.push_back({d_rows.start[i], d_rows.duration[i], d_rows.sequence_nr[i], d_rows.inputs[i],
                                d_rows.id[i], d_rows.span_id[i], d_rows.parent_id[i], name(d_rows.name[i]),
                                name(d_rows.category[i]), name(d_rows.text[i]), name(tracks[2 * track]),
                                name(tracks[2 * track + 1]), d_rows.fwd_thread[i], static_cast<char>(d_rows.phase[i]),
                                d_rows.flags[i], name(d_rows.trace[i])});
    }
    for (uint64_t i = 0; i < d_work_rows.count; ++i)
      document->works.push_back({d_work_rows.row[i], d_work_rows.correlation[i], d_work_rows.stream[i],
                                 d_work_rows.bytes[i], d_work_rows.device[i]});
    for (uint64_t i = 0; i < d_memory.count; ++i)
      document->memory.push_back({d_memory.time[i], d_memory.bytes[i], d_memory.address[i], d_memory.span[i],
                                  d_memory.total_allocated[i], d_memory.total_reserved[i], d_memory.device_type[i],
                                  d_memory.device_index[i], d_memory.flags[i]});
    d_rows.count = d_work_rows.count = d_memory.count = 0;
  }

  otp_trace_reader* d_reader;
  int64_t d_next_pid = 1000;
  uint64_t d_capacity;
  std::vector<int64_t> d_signed;
  std::vector<uint64_t> d_unsigned;
  std::vector<uint32_t> d_small;
  std::vector<uint8_t> d_bytes;
  std::vector<int64_t> d_works, d_amounts;
  std::vector<uint64_t> d_addresses;
  std::vector<uint32_t> d_tracks;
  std::vector<int32_t> d_devices;
  std::vector<uint8_t> d_flags;
  otp_trace_rows d_rows{};
  otp_trace_works d_work_rows{};
  otp_trace_memory d_memory{};
};

inline Document read_document(std::string_view text, const std::vector<size_t>& sizes = {SIZE_MAX},
                              uint64_t capacity = 64) {
  return DocumentReader(capacity).read(text, sizes);
}

}  // namespace otp::testing
