// Chrome JSON of spans. A span becomes a line "X" with its ids and attributes as arguments, an arrow between two of
// them a pair of lines "s" and "f". Room for a whole span is reserved at once, as in chrome.cc.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "encode/attribute_walk.h"
#include "encode/buffer.h"
#include "encode/chrome_writer.h"
#include "otel_torchprof/encode_chrome.h"

namespace otp {
namespace {

// More than the literals, numbers and ids of one span without texts, attributes and links, or of one arrow.
constexpr uint64_t kMaxFixedSize = 768;
// A value that is no text, or the quotes of one, and a comma.
constexpr uint64_t kMaxValueSize = 3 + std::max(kMaxDoubleSize, kMaxIntegerSize);
constexpr uint64_t kMaxLinkSize = 100;

constexpr uint64_t kTraceIdDigits = 32;

// Two digits per byte, all bytes after one another.
struct HexTable {
  char digits[512];
  constexpr HexTable() : digits() {
    constexpr char kHex[] = "0123456789abcdef";
    for (int i = 0; i < 256; ++i) {
      digits[2 * i] = kHex[i >> 4];
      digits[2 * i + 1] = kHex[i & 15];
    }
  }
};
constexpr HexTable kHexTable;

char* put_hex(char* out, const uint8_t* bytes, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(out, kHexTable.digits + 2 * bytes[i], 2);
    out += 2;
  }
  return out;
}

char* put_span_id(char* out, uint64_t id) {
  for (int shift = 56; shift >= 0; shift -= 8) {
    std::memcpy(out, kHexTable.digits + 2 * ((id >> shift) & 0xFF), 2);
    out += 2;
  }
  return out;
}

class Encoder {
 public:
  Encoder(const otp_spans& spans, const otp_chrome_layout& layout, otp_buffer* out)
      : spans_(spans), layout_(layout), out_(out) {}

  // See otp_encode_chrome_spans.
  int64_t encode(uint64_t first, uint64_t limit);

 private:
  bool prepare();
  bool append_span(uint64_t place);
  bool append_text(uint64_t place);
  bool append_arrow(uint64_t arrow);
  uint64_t span_bound(uint64_t place, uint64_t row, uint64_t links);
  uint64_t find_links(uint64_t row);
  char* put_ids(char* at, uint64_t row);
  char* put_attributes(char* at, uint64_t row);
  char* put_value(char* at, const otp_attribute& column, uint64_t index) const;
  char* put_links(char* at, uint64_t count) const;
  ChromeTrack track(uint64_t place) const { return {layout_.pid, layout_.tid[place], layout_.base}; }
  JsonText name(uint32_t index) const { return text_at(layout_.names, index); }

  const otp_spans& spans_;
  const otp_chrome_layout& layout_;
  otp_buffer* out_;
  uint64_t bound_ = kMaxFixedSize;
  AttributeWalk walk_;
  const otp_link* link_ = nullptr;  // the first of the current span
  // Spans of a trace mostly follow one another, so its digits are kept.
  uint32_t trace_ = UINT32_MAX;
  char trace_digits_[kTraceIdDigits];
};

bool Encoder::prepare() {
  for (uint64_t i = 0; i < spans_.attribute_count; ++i) bound_ += text_at(layout_.keys, i).size + kMaxValueSize;
  return walk_.begin(spans_);
}

uint64_t Encoder::find_links(uint64_t row) {
  const otp_link* const end = spans_.links + spans_.link_count;
  link_ =
      std::lower_bound(spans_.links, end, row, [](const otp_link& link, uint64_t needed) { return link.row < needed; });
  const otp_link* last = link_;
  while (last != end && last->row == row) ++last;
  return static_cast<uint64_t>(last - link_);
}

uint64_t Encoder::span_bound(uint64_t place, uint64_t row, uint64_t links) {
  uint64_t texts = name(spans_.name[row]).size + text_at(layout_.categories, layout_.category[place]).size;
  if (spans_.trace_state != nullptr) texts += name(spans_.trace_state[spans_.trace[row]]).size;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    const otp_attribute& column = spans_.attributes[i];
    if (column.type == OTP_ATTRIBUTE_NAME) texts += name(static_cast<const uint32_t*>(column.values)[index]).size;
  });
  return bound_ + texts + links * kMaxLinkSize;
}

// What identifies the span, and what is odd about it; a comma after each.
char* Encoder::put_ids(char* at, uint64_t row) {
  const uint32_t trace = spans_.trace[row];
  if (trace != trace_) {
    trace_ = trace;
    put_hex(trace_digits_, spans_.trace_ids + 16 * static_cast<uint64_t>(trace), 16);
  }
  at = put(at, "\"trace_id\":\"");
  std::memcpy(at, trace_digits_, kTraceIdDigits);
  at = put(at + kTraceIdDigits, "\",\"span_id\":\"");
  at = put(put_span_id(at, spans_.span_id[row]), "\",");
  if (spans_.parent_span_id[row] != 0) {
    at = put(at, "\"parent_id\":\"");
    at = put(put_span_id(at, spans_.parent_span_id[row]), "\",");
  }
  if (spans_.trace_state != nullptr && spans_.trace_state[trace] != 0) {
    at = put(at, "\"trace_state\":\"");
    at = put(put_text(at, name(spans_.trace_state[trace])), "\",");
  }
  if (spans_.error != nullptr && spans_.error[row] != 0) at = put(at, "\"status\":\"ERROR\",");
  if (spans_.dropped_attributes != nullptr && spans_.dropped_attributes[row] != 0) {
    at = put(put_integer(put(at, "\"dropped_attributes\":"), spans_.dropped_attributes[row]), ",");
  }
  if (spans_.dropped_links != nullptr && spans_.dropped_links[row] != 0) {
    at = put(put_integer(put(at, "\"dropped_links\":"), spans_.dropped_links[row]), ",");
  }
  return at;
}

char* Encoder::put_value(char* at, const otp_attribute& column, uint64_t index) const {
  switch (column.type) {
    case OTP_ATTRIBUTE_INT64:
      return put_integer(at, static_cast<const int64_t*>(column.values)[index]);
    case OTP_ATTRIBUTE_DOUBLE:
      return put_double(at, static_cast<const double*>(column.values)[index]);
    case OTP_ATTRIBUTE_BOOL:
      return static_cast<const uint8_t*>(column.values)[index] != 0 ? put(at, "true") : put(at, "false");
    default:
      *at++ = '"';
      at = put_text(at, name(static_cast<const uint32_t*>(column.values)[index]));
      *at++ = '"';
      return at;
  }
}

char* Encoder::put_attributes(char* at, uint64_t row) {
  char* const begin = at;
  at = put(at, "\"attributes\":{");
  char* const first = at;
  walk_.each(row, [&](uint64_t i, uint64_t index) {
    at = put_value(put_text(at, text_at(layout_.keys, i)), spans_.attributes[i], index);
    *at++ = ',';
  });
  return at == first ? begin : put(at - 1, "},");
}

char* Encoder::put_links(char* at, uint64_t count) const {
  at = put(at, "\"links\":[");
  for (uint64_t i = 0; i < count; ++i) {
    at = put_hex(put(at, "{\"trace_id\":\""), link_[i].trace_id, 16);
    at = put_span_id(put(at, "\",\"span_id\":\""), link_[i].span_id);
    at = put(at, "\"},");
  }
  return put(at - 1, "],");
}

// A span whose arguments are text: one that was no row of a table.
bool Encoder::append_text(uint64_t place) {
  const uint64_t row = layout_.rows[place];
  const JsonText category = text_at(layout_.categories, layout_.category[place]);
  const JsonText arguments = text_at(layout_.arguments, row);
  if (!buffer_reserve(out_, kMaxFixedSize + category.size + name(spans_.name[row]).size + arguments.size)) return false;
  const bool is_instant = layout_.instant != nullptr && layout_.instant[place] != 0;
  char* at = put(cursor(out_), ",\n{\"ph\":\"");
  at = is_instant ? put(at, "i\",\"s\":\"t") : put(at, "X");
  at = put(put_text(put(at, "\",\"cat\":\""), category), "\",\"name\":\"");
  at = put(put_text(at, name(spans_.name[row])), "\"");
  at = is_instant ? put_place(at, track(place), spans_.start[row])
                  : put_extent(at, track(place), spans_.start[row], spans_.end[row]);
  finish(out_, put(put_text(put(at, ",\"args\":"), arguments), "}"));
  return true;
}

bool Encoder::append_span(uint64_t place) {
  if (layout_.arguments.count != 0) return append_text(place);
  const uint64_t row = layout_.rows[place];
  const bool linked = spans_.link_count != 0 && (layout_.linked == nullptr || layout_.linked[place] != 0);
  const uint64_t links = linked ? find_links(row) : 0;
  if (!buffer_reserve(out_, span_bound(place, row, links))) return false;
  char* at = put(cursor(out_), ",\n{\"ph\":\"X\",\"cat\":\"");
  at = put(put_text(at, text_at(layout_.categories, layout_.category[place])), "\",\"name\":\"");
  at = put(put_text(at, name(spans_.name[row])), "\"");
  at = put_extent(at, track(place), spans_.start[row], spans_.end[row]);
  at = put_ids(put(at, ",\"args\":{"), row);
  at = put_attributes(at, row);
  if (links != 0) at = put_links(at, links);
  finish(out_, put(at - 1, "}}"));
  return true;
}

// The arrow's end lies at the start of the span.
bool Encoder::append_arrow(uint64_t arrow) {
  if (!buffer_reserve(out_, 2 * kMaxEventSize)) return false;
  const uint64_t id = layout_.first_arrow_id + arrow;
  const uint64_t from = layout_.arrow_from[arrow], to = layout_.arrow_to[arrow];
  char* at = put_arrow_end(cursor(out_), 's', id, "link", track(from), spans_.start[layout_.rows[from]]);
  finish(out_, put_arrow_end(at, 'f', id, "link", track(to), spans_.start[layout_.rows[to]]));
  return true;
}

int64_t Encoder::encode(uint64_t first, uint64_t limit) {
  if (!prepare()) return -1;
  const uint64_t count = layout_.row_count + layout_.arrow_count;
  uint64_t item = first;
  for (; item < count && out_->size < limit; ++item) {
    if (!(item < layout_.row_count ? append_span(item) : append_arrow(item - layout_.row_count))) return -1;
  }
  return static_cast<int64_t>(item);
}

// The links by the span that they point to: open addressing, with those of one span in a chain.
class LinksByTarget {
 public:
  explicit LinksByTarget(const otp_spans& spans) : spans_(spans), chain_(spans.link_count, kNone) {
    uint64_t size = 8;
    while (size < 2 * spans.link_count) size *= 2;
    slots_.assign(size, kNone);
    for (uint64_t i = 0; i < spans.link_count; ++i) {
      uint32_t& slot = slot_of(spans.links[i].span_id);
      chain_[i] = slot;
      slot = static_cast<uint32_t>(i);
    }
  }

  // Notes in `target` the links to the span in `row`, where none is noted yet.
  void note(uint64_t row, int64_t place, int64_t* target) {
    const uint8_t* trace = spans_.trace_ids + 16 * static_cast<uint64_t>(spans_.trace[row]);
    for (uint32_t i = slot_of(spans_.span_id[row]); i != kNone; i = chain_[i]) {
      if (target[i] < 0 && std::memcmp(spans_.links[i].trace_id, trace, 16) == 0) target[i] = place;
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  uint32_t& slot_of(uint64_t span_id) {
    const uint64_t mask = slots_.size() - 1;
    // Ids are mostly random already; an odd multiplier (Fibonacci hashing) spreads those that count up.
    uint64_t at = (span_id * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[at] != kNone && spans_.links[slots_[at]].span_id != span_id) at = (at + 1) & mask;
    return slots_[at];
  }

  const otp_spans& spans_;
  std::vector<uint32_t> slots_, chain_;
};

}  // namespace
}  // namespace otp

extern "C" int64_t otp_encode_chrome_spans(const otp_spans* spans, const otp_chrome_layout* layout, uint64_t first,
                                           uint64_t limit, otp_buffer* out) {
  return otp::Encoder(*spans, *layout, out).encode(first, limit);
}

extern "C" int otp_chrome_link_targets(const otp_spans* spans, const uint64_t* rows, uint64_t row_count,
                                       int64_t* target) {
  std::fill(target, target + spans->link_count, -1);
  try {
    otp::LinksByTarget links(*spans);
    for (uint64_t place = 0; place < row_count; ++place) links.note(rows[place], static_cast<int64_t>(place), target);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}
