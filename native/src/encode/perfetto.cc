// Perfetto's trace format (perfetto/protos/perfetto/trace/perfetto_trace.proto). A span is a packet where it begins,
// with its name and arguments, and one where it ends; texts are interned. Packets of a track are in order of time,
// those of the whole file are not, which readers of files sort.
//
// Room for the packets of a whole span is reserved at once, as in otlp.cc. Nested messages have sizes of four bytes,
// also where fewer would do: what a message takes is then known when it is written. Perfetto's own writers do so, too.
#include <algorithm>

#include "encode/attribute_walk.h"
#include "encode/buffer.h"
#include "encode/proto_writer.h"
#include "otel_torchprof/encode_perfetto.h"

namespace otp {
namespace {

// Field numbers as they are written: number << 3 | wire type.
enum Tag : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
};
constexpr uint32_t tag(uint32_t field, Tag type) { return field << 3 | type; }

// Trace
constexpr uint32_t kPacket = tag(1, kBytes);
// TracePacket
constexpr uint32_t kTimestamp = tag(8, kVarint), kSequence = tag(10, kVarint), kTrackEvent = tag(11, kBytes);
constexpr uint32_t kSequenceFlags = tag(13, kVarint);
constexpr uint64_t kNeedsState = 2;  // of interned data
// TrackEvent
constexpr uint32_t kCategory = tag(3, kVarint), kAnnotation = tag(4, kBytes), kType = tag(9, kVarint);
constexpr uint32_t kName = tag(10, kVarint), kTrack = tag(11, kVarint), kCounter = tag(30, kVarint);
constexpr uint32_t kFlow = tag(47, kFixed64), kEndingFlow = tag(48, kFixed64);
constexpr uint64_t kBegin = 1, kEnd = 2, kValue = 4;
// DebugAnnotation
constexpr uint32_t kKey = tag(1, kVarint), kBool = tag(2, kVarint), kInt = tag(4, kVarint), kDouble = tag(5, kFixed64);
constexpr uint32_t kText = tag(6, kBytes), kTextIid = tag(17, kVarint), kEntry = tag(11, kBytes);

constexpr uint64_t kSizeBytes = 4;
// More than a packet without arguments and arrows; than an argument, whose texts are interned; than an arrow.
constexpr uint64_t kMaxPacket = 96, kMaxArgument = 48, kMaxFlow = 12;
constexpr uint64_t kIdDigits = 16;

uint8_t* put_tagged(uint8_t* at, uint32_t field, uint64_t value) { return put_varint(put_varint(at, field), value); }

uint8_t* put_double(uint8_t* at, uint32_t field, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return put_fixed64(put_varint(at, field), bits);
}

// A message whose size is written when it is complete.
class Message {
 public:
  Message(uint8_t* at, uint32_t field) : begin(put_varint(at, field) + kSizeBytes) {}

  // Returns the position after it, which is `at`.
  uint8_t* end(uint8_t* at) const {
    const auto size = static_cast<uint32_t>(at - begin);
    const uint32_t spread = (size & 0x7F) | (size & 0x3F80) << 1 | (size & 0x1FC000) << 2 | (size & 0xFE00000) << 3;
    put_fixed32(begin - kSizeBytes, spread | 0x808080);
    return at;
  }

  uint8_t* const begin;
};

// The digits of an id, as OpenTelemetry writes it.
uint8_t* put_id(uint8_t* at, uint64_t id) {
  constexpr char kHex[] = "0123456789abcdef";
  for (int shift = 60; shift >= 0; shift -= 4) *at++ = static_cast<uint8_t>(kHex[(id >> shift) & 15]);
  return at;
}

class Encoder {
 public:
  Encoder(const otp_spans& spans, otp_perfetto_layout& layout, otp_buffer* out)
      : spans_(spans), layout_(layout), out_(out) {}

  // See otp_encode_perfetto.
  int64_t encode(uint64_t first, uint64_t limit);

 private:
  bool append_span(uint64_t place);
  bool close_before(uint64_t place);
  bool close_one();
  uint8_t* put_event(uint8_t* at, uint64_t type, uint64_t place) const;
  uint8_t* put_flows(uint8_t* at, uint64_t place);
  uint8_t* put_text_argument(uint8_t* at, uint32_t key, uint64_t iid) const;
  uint8_t* put_id_argument(uint8_t* at, uint32_t key, uint64_t id) const;
  uint8_t* put_value(uint8_t* at, const otp_attribute& column, uint64_t index) const;
  uint8_t* put_arguments(uint8_t* at, uint64_t row);
  uint8_t* put_attributes(uint8_t* at, uint64_t row);

  const otp_spans& spans_;
  otp_perfetto_layout& layout_;
  otp_buffer* out_;
  AttributeWalk walk_;
  uint64_t flow_ = 0;  // the first that is not written
};

// What is before the event of a packet.
uint8_t* put_head(uint8_t* at, int64_t time, uint32_t sequence) {
  at = put_tagged(at, kTimestamp, static_cast<uint64_t>(std::max<int64_t>(time, 0)));
  at = put_tagged(at, kSequence, sequence);
  return put_tagged(at, kSequenceFlags, kNeedsState);
}

uint8_t* Encoder::put_event(uint8_t* at, uint64_t type, uint64_t place) const {
  return put_tagged(put_tagged(at, kType, type), kTrack, layout_.track[place]);
}

uint8_t* Encoder::put_flows(uint8_t* at, uint64_t place) {
  for (; flow_ < layout_.flow_count && layout_.flow_place[flow_] == place; ++flow_)
    at = put_fixed64(put_varint(at, layout_.flow_ends[flow_] != 0 ? kEndingFlow : kFlow), layout_.flow_id[flow_]);
  return at;
}

uint8_t* Encoder::put_text_argument(uint8_t* at, uint32_t key, uint64_t iid) const {
  const Message argument(at, kAnnotation);
  return argument.end(put_tagged(put_tagged(argument.begin, kKey, key), kTextIid, iid));
}

uint8_t* Encoder::put_id_argument(uint8_t* at, uint32_t key, uint64_t id) const {
  const Message argument(at, kAnnotation);
  at = put_varint(put_varint(put_tagged(argument.begin, kKey, key), kText), kIdDigits);
  return argument.end(put_id(at, id));
}

uint8_t* Encoder::put_value(uint8_t* at, const otp_attribute& column, uint64_t index) const {
  switch (column.type) {
    case OTP_ATTRIBUTE_INT64:
      return put_tagged(at, kInt, static_cast<uint64_t>(static_cast<const int64_t*>(column.values)[index]));
    case OTP_ATTRIBUTE_DOUBLE:
      return put_double(at, kDouble, static_cast<const double*>(column.values)[index]);
    case OTP_ATTRIBUTE_BOOL:
      return put_tagged(at, kBool, static_cast<const uint8_t*>(column.values)[index] != 0 ? 1 : 0);
    default:
      return put_tagged(at, kTextIid, static_cast<const uint32_t*>(column.values)[index] + uint64_t{1});
  }
}

uint8_t* Encoder::put_attributes(uint8_t* at, uint64_t row) {
  const Message attributes(at, kAnnotation);
  uint8_t* const first = put_tagged(attributes.begin, kKey, OTP_PERFETTO_ATTRIBUTES);
  uint8_t* next = first;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    const Message entry(next, kEntry);
    next = entry.end(put_value(put_tagged(entry.begin, kKey, layout_.key_iids[i]), spans_.attributes[i], index));
  });
  return next == first ? at : attributes.end(next);
}

uint8_t* Encoder::put_arguments(uint8_t* at, uint64_t row) {
  at = put_text_argument(at, OTP_PERFETTO_TRACE_ID, layout_.first_trace_iid + spans_.trace[row]);
  at = put_id_argument(at, OTP_PERFETTO_SPAN_ID, spans_.span_id[row]);
  if (spans_.parent_span_id[row] != 0) at = put_id_argument(at, OTP_PERFETTO_PARENT_ID, spans_.parent_span_id[row]);
  if (spans_.error != nullptr && spans_.error[row] != 0) {
    const Message status(at, kAnnotation);
    at = put_tagged(status.begin, kKey, OTP_PERFETTO_STATUS);
    at = status.end(put_field(at, kText, "ERROR", 5));
  }
  return put_attributes(at, row);
}

bool Encoder::close_one() {
  const uint64_t place = layout_.open[--layout_.open_count], row = layout_.rows[place];
  if (!buffer_reserve(out_, kMaxPacket)) return false;
  const Message packet(out_->data + out_->size, kPacket);
  const Message event(put_head(packet.begin, std::max(spans_.start[row], spans_.end[row]), layout_.sequence),
                      kTrackEvent);
  uint8_t* const end = packet.end(event.end(put_event(event.begin, kEnd, place)));
  out_->size = static_cast<uint64_t>(end - out_->data);
  return true;
}

// The ends of those that are not around the span.
bool Encoder::close_before(uint64_t place) {
  const int64_t start = spans_.start[layout_.rows[place]];
  while (layout_.open_count != 0) {
    const uint64_t open = layout_.open[layout_.open_count - 1];
    const bool is_around = layout_.track[open] == layout_.track[place] && spans_.end[layout_.rows[open]] > start;
    if (is_around) return true;
    if (!close_one()) return false;
  }
  return true;
}

bool Encoder::append_span(uint64_t place) {
  const uint64_t row = layout_.rows[place];
  uint64_t flows = flow_;
  while (flows < layout_.flow_count && layout_.flow_place[flows] == place) ++flows;
  const uint64_t arguments = OTP_PERFETTO_KEYS + spans_.attribute_count;
  if (!buffer_reserve(out_, kMaxPacket + arguments * kMaxArgument + (flows - flow_) * kMaxFlow)) return false;
  const Message packet(out_->data + out_->size, kPacket);
  const Message event(put_head(packet.begin, spans_.start[row], layout_.sequence), kTrackEvent);
  uint8_t* at = put_event(event.begin, kBegin, place);
  at = put_tagged(at, kName, spans_.name[row] + uint64_t{1});
  at = put_tagged(at, kCategory, layout_.category[place]);
  at = put_arguments(put_flows(at, place), row);
  out_->size = static_cast<uint64_t>(packet.end(event.end(at)) - out_->data);
  layout_.open[layout_.open_count++] = place;
  return true;
}

int64_t Encoder::encode(uint64_t first, uint64_t limit) {
  if (!walk_.begin(spans_)) return -1;
  const uint64_t* const places = layout_.flow_place;
  flow_ = static_cast<uint64_t>(std::lower_bound(places, places + layout_.flow_count, first) - places);
  uint64_t place = first;
  for (; place < layout_.row_count && out_->size < limit; ++place) {
    if (!close_before(place) || !append_span(place)) return -1;
  }
  while (place == layout_.row_count && layout_.open_count != 0) {
    if (!close_one()) return -1;
  }
  return static_cast<int64_t>(place);
}

}  // namespace
}  // namespace otp

extern "C" int64_t otp_encode_perfetto(const otp_spans* spans, otp_perfetto_layout* layout, uint64_t first,
                                       uint64_t limit, otp_buffer* out) {
  return otp::Encoder(*spans, *layout, out).encode(first, limit);
}

extern "C" int64_t otp_encode_perfetto_counter(const otp_perfetto_counter* counter, uint64_t first, uint64_t limit,
                                               otp_buffer* out) {
  using namespace otp;
  uint64_t i = first;
  for (; i < counter->count && out->size < limit; ++i) {
    if (!buffer_reserve(out, kMaxPacket)) return -1;
    const Message packet(out->data + out->size, kPacket);
    const Message event(put_head(packet.begin, counter->time[i], counter->sequence), kTrackEvent);
    uint8_t* at = put_tagged(put_tagged(event.begin, kType, kValue), kTrack, counter->track);
    at = put_tagged(at, kCounter, static_cast<uint64_t>(counter->value[i]));
    out->size = static_cast<uint64_t>(packet.end(event.end(at)) - out->data);
  }
  return static_cast<int64_t>(i);
}
