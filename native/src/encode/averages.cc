// Averages by name of the spans that are left out of steps: one pass with a table of sums, a sort of the few sums,
// text.
#include "otel_torchprof/encode_averages.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "encode/buffer.h"
#include "encode/json_writer.h"
#include "encode/utf8_repair.h"
#include "model/key_places.h"

namespace otp {
namespace {

struct Sum {
  int32_t group;
  uint32_t name;
  bool is_in_data;
  int64_t calls;
  int64_t self_time;
};

// When the loop waited for data. Spans come by thread and time: the next one is mostly after the same wait as the last.
class Waits {
 public:
  explicit Waits(const otp_averages& spans)
      : begin_(spans.wait_start), end_(begin_ + spans.wait_count), ends_(spans.wait_end) {}

  // Whether the last wait that had begun by `time` was not over.
  bool has(int64_t time) {
    if (time < from_ || time >= until_) {
      const int64_t* after = std::upper_bound(begin_, end_, time);
      from_ = after == begin_ ? INT64_MIN : after[-1];
      until_ = after == end_ ? INT64_MAX : *after;
      wait_end_ = after == begin_ ? INT64_MIN : ends_[after - begin_ - 1];
    }
    return time < wait_end_;
  }

 private:
  const int64_t* begin_;
  const int64_t* end_;
  const int64_t* ends_;
  int64_t from_ = 0, until_ = 0, wait_end_ = INT64_MIN;  // an empty interval
};

// The sums by group, name and phase.
class Sums {
 public:
  explicit Sums(const otp_averages& spans) {
    Waits waits(spans);
    for (uint64_t i = 0; i < spans.count; ++i) {
      if (spans.group[i] < 0) continue;
      Sum& sum = at(spans.group[i], spans.name[i], waits.has(spans.start[i]));
      sum.calls += spans.calls == nullptr ? 1 : spans.calls[i];
      sum.self_time =
          static_cast<int64_t>(static_cast<uint64_t>(sum.self_time) + static_cast<uint64_t>(spans.self_time[i]));
    }
  }

  // By group, the longest first.
  std::vector<Sum> sorted() && {
    std::sort(sums_.begin(), sums_.end(), [](const Sum& a, const Sum& b) {
      if (a.group != b.group) return a.group < b.group;
      if (a.self_time != b.self_time) return a.self_time > b.self_time;
      return a.name != b.name ? a.name < b.name : a.is_in_data < b.is_in_data;
    });
    return std::move(sums_);
  }

 private:
  Sum& at(int32_t group, uint32_t name, bool is_in_data) {
    const uint64_t key = static_cast<uint64_t>(group) << 33 | static_cast<uint64_t>(name) << 1 | is_in_data;
    const uint32_t place = places_.of(key);
    if (place == sums_.size()) sums_.push_back({group, name, is_in_data, 0, 0});
    return sums_[place];
  }

  KeyPlaces places_;
  std::vector<Sum> sums_;
};

// The size of the first characters of a name, as put_escaped writes them: what is no UTF-8 is one for each U+FFFD.
uint64_t cut(const JsonText& name, uint64_t characters) {
  uint64_t size = 0;
  for (; size < name.size && characters != 0; --characters) size += utf8_piece(name.data + size, name.size - size).size;
  return size;
}

constexpr int64_t kMostExact = int64_t{1} << 52;

// The double that is nearest to four digits of a time in seconds.
double seconds(int64_t nanoseconds) {
  if (nanoseconds >= 0 && nanoseconds < kMostExact) {
    int64_t unit = 1;
    while (nanoseconds / unit >= 10000) unit *= 10;
    const int64_t rest = nanoseconds % unit;
    // Both numbers are exact as doubles, so that their quotient is the nearest one. Ties are rounded as printf does it.
    if (2 * rest != unit) return static_cast<double>((nanoseconds / unit + (2 * rest > unit)) * unit) / 1e9;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", static_cast<double>(nanoseconds) / 1e9);
  return std::strtod(text, nullptr);  // of the same locale
}

constexpr uint64_t kEntrySize = 64 + kMaxIntegerSize + kMaxDoubleSize;  // without its name

char* put_entry(char* out, const Sum& sum, const JsonText& name, uint64_t name_size) {
  out = put(out, "{\"name\":\"");
  out = put_escaped(out, name.data, name_size);
  out = put(out, "\",\"count\":");
  out = put_integer(out, sum.calls);
  out = put(out, ",\"self\":");
  out = put_double(out, seconds(sum.self_time));
  if (sum.is_in_data) out = put(out, ",\"phase\":\"data\"");
  return put(out, "}");
}

// Writes the entries of one group that fit, from `sum` on; false when memory is short.
bool put_group(const otp_averages& averages, const Sum* sum, const Sum* end, int64_t most_bytes, otp_buffer* out) {
  if (!buffer_reserve(out, 2)) return false;
  const uint64_t begin = out->size;
  finish(out, put(cursor(out), "["));
  for (; sum != end; ++sum) {
    const JsonText name = text_at(averages.names, sum->name);
    const uint64_t name_size = cut(name, averages.longest_name);
    if (!buffer_reserve(out, kEntrySize + kMaxEscapedBytesPerByte * name_size)) return false;
    const uint64_t before = out->size;
    char* at = cursor(out);
    if (before > begin + 1) at = put(at, ",");
    finish(out, put_entry(at, *sum, name, name_size));
    if (static_cast<int64_t>(out->size - begin + 1) > most_bytes) {
      out->size = before;
      break;
    }
  }
  finish(out, put(cursor(out), "]"));
  return true;
}

bool put_groups(const otp_averages& averages, const std::vector<Sum>& sums, otp_buffer* out, uint64_t* ends) {
  const Sum* next = sums.data();
  const Sum* const last = next + sums.size();
  for (uint64_t group = 0; group < averages.group_count; ++group) {
    const Sum* end = next;
    while (end != last && end->group == static_cast<int32_t>(group)) ++end;
    if (!put_group(averages, next, end, averages.most_bytes[group], out)) return false;
    next = end;
    ends[group] = out->size;
  }
  return true;
}

}  // namespace
}  // namespace otp

extern "C" int otp_encode_averages(const otp_averages* averages, otp_buffer* out, uint64_t* ends) {
  try {
    return otp::put_groups(*averages, otp::Sums(*averages).sorted(), out, ends) ? 0 : -1;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
