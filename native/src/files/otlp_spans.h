// Spans of OTLP requests, as protobuf or as JSON, to rows: an event per span, a track per thread of a resource.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/json_cursor.h"
#include "files/trace_tables.h"

namespace otp {

// A span as it is written; texts without escapes.
struct OtlpSpan : SpanMemory {
  uint64_t span_id = 0;
  uint64_t parent_id = 0;
  uint64_t start = 0;  // Unix ns
  uint64_t end = 0;
  bool has_ids = false;  // a trace id and a span id, of the sizes that these have
  uint32_t fault = OTP_FAULT_NONE;
  std::string_view trace_id;  // 16 bytes, or 32 digits
  std::string_view name;
  // Attributes.
  std::string_view scope, function, module, phase, step_kind, thread_name, error_type, shapes, dtypes, values;
  int64_t thread_id = -1, step = -1, sequence_nr = -1, forward_thread = 0, dropped = 0, flops = -1;
  int64_t stream = -1, device = -1;
  double device_duration = 0;  // seconds
  std::string_view device_type;
  bool is_async = false, is_unfinished = false, follows_loss = false;
  std::string links;  // ids as digits, `trace/span`, a blank after each; only where they are wanted
};

// A value of an attribute.
struct OtlpValue {
  enum class Kind { kNone, kText, kNumber, kFlag, kReal, kOther } kind = Kind::kNone;
  std::string_view text;
  int64_t number = 0;
  double real = 0;
  std::string_view token = {};  // where the file has it as JSON
};

// Reads requests one by one, each in as many calls as the arrays for rows are full. For one thread.
class OtlpReader {
 public:
  explicit OtlpReader(TraceTables* tables) : d_tables(tables) {}

  // Continues at `step->consumed`. Returns an otp_trace_status; `offset`: of the request in the file.
  int read(std::string_view request, bool is_json, uint64_t offset, const TraceOutput& out, otp_trace_step* step);

 private:
  // Whether reading continues: not where the arrays are full, nor at a resource that is new.
  bool begin_resource(std::string_view resource, const char* here);
  void begin_scope(std::string_view name);
  // Whether there is room for the rows of a span.
  bool begin_span(const char* here);
  void take_attribute(std::string_view key, const OtlpValue& value, OtlpSpan* span);
  void add(const OtlpSpan& span, const char* here);
  // The request, or this part of it, is not what it must be: `here` is where that is seen.
  bool refuse(const char* here);

  bool read_request(std::string_view request);
  bool read_resource_spans(std::string_view message);
  bool read_scope_spans(std::string_view message);
  bool read_span(std::string_view message, OtlpSpan* span);
  bool read_attribute(std::string_view message, OtlpSpan* span);
  bool is_behind(const char* end) const { return end <= d_begin; }

  // The cursor is at the value, and then behind it. False: reading stops, or the line is not what it must be there.
  bool read_line(std::string_view line);
  bool read_resource_object(JsonCursor* cursor);
  bool read_scope_object(JsonCursor* cursor);
  bool add_span_object(JsonCursor* cursor);
  bool read_span_object(JsonCursor* cursor, OtlpSpan* span);
  bool read_attribute_object(JsonCursor* cursor, OtlpSpan* span);
  bool read_link_object(JsonCursor* cursor, OtlpSpan* span);
  bool read_value_object(JsonCursor* cursor, OtlpValue* value);
  std::string_view text_of(std::string_view token);

  void put_row(const OtlpSpan& span, uint64_t offset);
  void put_operator(const OtlpSpan& span, uint64_t row);
  void put_attributes(const OtlpSpan& span, uint64_t offset);
  std::string_view json_of(const OtlpValue& value);
  void put_plain_row(uint8_t phase, uint32_t name, uint32_t track);
  void put_device_time(const OtlpSpan& span, uint32_t track);
  uint32_t category_of(const OtlpSpan& span);
  uint32_t name_of(const OtlpSpan& span);
  uint32_t track_of(const OtlpSpan& span);
  uint32_t trace_of(const OtlpSpan& span);

  TraceTables* d_tables;
  TraceOutput d_out = {};
  otp_trace_step* d_step = nullptr;
  const char* d_data = nullptr;   // of the request
  const char* d_begin = nullptr;  // what ends before it was read by an earlier call
  uint64_t d_offset = 0;
  int d_status = OTP_TRACE_END;
  HashTable d_resources;
  int64_t d_resource_count = 0;
  uint64_t d_row = 0;      // number of the next row
  uint32_t d_process = 0;  // name of the resource
  bool d_is_own = false;   // the scope is this package
  int64_t d_links = -1;    // name of the attribute in whose place links are; -1: not wanted
  int64_t d_last_thread = -1;
  uint32_t d_last_process = UINT32_MAX;
  uint32_t d_last_track = 0;
  std::string d_last_trace_id;
  uint32_t d_last_trace = 0;
  std::string d_scratch;
  std::vector<std::pair<uint32_t, OtlpValue>> d_found;  // the wanted attributes of the span that is being read
  std::deque<std::string> d_unescaped;                  // texts of the span that is being read
};

}  // namespace otp
