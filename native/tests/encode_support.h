// What the tests of the encoders have in common.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "otel_torchprof/encode_otlp.h"

namespace otp::testing {

// Spans under construction; view() lends the vectors to an encoder.
struct Spans {
  std::string names;
  std::vector<uint64_t> ends;
  std::vector<uint32_t> name;
  std::vector<int64_t> start;
  std::vector<int64_t> end;
  std::vector<uint32_t> trace;
  std::vector<uint8_t> trace_ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  std::vector<uint64_t> span_id;
  std::vector<uint64_t> parent;
  std::vector<uint8_t> error;
  std::vector<otp_attribute> attributes;
  std::vector<otp_link> links;
  // Left empty: null.
  std::vector<uint32_t> trace_state;
  std::vector<uint8_t> remote;
  std::vector<uint32_t> dropped_attributes;
  std::vector<uint32_t> dropped_links;

  uint32_t intern(const std::string& text) {
    names += text;
    ends.push_back(names.size());
    return static_cast<uint32_t>(ends.size() - 1);
  }

  void add(const std::string& text, uint64_t id, uint64_t parent_id) {
    name.push_back(intern(text));
    start.push_back(0x11);
    end.push_back(0x2222);
    trace.push_back(0);
    span_id.push_back(id);
    parent.push_back(parent_id);
    error.push_back(0);
  }

  template <typename T>
  static const T* or_null(const std::vector<T>& column) {
    return column.empty() ? nullptr : column.data();
  }

  otp_spans view() const {
    otp_spans spans{};
    spans.count = name.size();
    spans.name = name.data();
    spans.start = start.data();
    spans.end = end.data();
    spans.trace = trace.data();
    spans.trace_ids = trace_ids.data();
    spans.trace_state = or_null(trace_state);
    spans.span_id = span_id.data();
    spans.parent_span_id = parent.data();
    spans.parent_is_remote = or_null(remote);
    spans.error = error.data();
    spans.attributes = attributes.data();
    spans.attribute_count = attributes.size();
    spans.dropped_attributes = or_null(dropped_attributes);
    spans.links = links.data();
    spans.link_count = links.size();
    spans.dropped_links = or_null(dropped_links);
    spans.names = {reinterpret_cast<const uint8_t*>(names.data()), ends.data(), ends.size(), nullptr, nullptr};
    return spans;
  }

  // The same, of which the names from `first` on are added to a table of the others.
  otp_spans view_with_added_names(size_t first) {
    const uint64_t from = first == 0 ? 0 : ends[first - 1];
    added_ends.clear();
    for (size_t i = first; i < ends.size(); ++i) added_ends.push_back(ends[i] - from);
    otp_spans spans = view();
    spans.names = {spans.names.data, ends.data(), first, spans.names.data + from, added_ends.data()};
    return spans;
  }
  std::vector<uint64_t> added_ends;
};

inline otp_bytes bytes(const char* text) { return {reinterpret_cast<const uint8_t*>(text), std::strlen(text)}; }

// A string literal with its NUL bytes.
template <size_t N>
std::string literal(const char (&text)[N]) {
  return std::string(text, N - 1);
}

}  // namespace otp::testing
