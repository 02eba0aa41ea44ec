// The attributes of spans, whose columns hold values of some rows only, for spans that mostly come in the order of
// their rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "otel_torchprof/encode.h"

namespace otp {

class AttributeWalk {
 public:
  // False where there is no memory.
  bool begin(const otp_spans& spans) {
    count_ = spans.attribute_count;
    columns_.reset(new (std::nothrow) Column[count_]);
    often_.reset(new (std::nothrow) uint64_t[count_]);
    if (columns_ == nullptr || often_ == nullptr) return false;
    for (uint64_t i = 0; i < count_; ++i) {
      const otp_attribute& column = spans.attributes[i];
      columns_[i] = {column.rows, column.row_count, 0, column.rows == nullptr || column.row_count > spans.count / 8};
      if (columns_[i].is_often) often_[often_count_++] = i;
    }
    return true;
  }

  // Calls visit(i, index) for each attribute i that the row has, in their order, with the index of its value.
  //
  // Of a drain's spans one in a thousand, a step, has twenty attributes that no other has. To look into each of their
  // columns for each span took a quarter of the encoding.
  template <typename Visit>
  void each(uint64_t row, Visit visit) {
    if (__builtin_expect(row < last_ || row >= soonest_, 0)) {
      soonest_ = UINT64_MAX;
      for (uint64_t i = 0; i < count_; ++i) look(i, row, visit);
    } else {
      for (uint64_t k = 0; k < often_count_; ++k) look(often_[k], row, visit);
    }
    last_ = row;
  }

 private:
  struct Column {
    const uint32_t* rows;  // null: all
    uint64_t count;
    uint64_t at;  // of the first of the rows that is not before the one of last time
    bool is_often;
  };

  template <typename Visit>
  void look(uint64_t i, uint64_t row, Visit& visit) {
    Column& column = columns_[i];
    if (column.rows == nullptr) return visit(i, row);
    const uint32_t* rows = column.rows;
    const uint64_t count = column.count;
    uint64_t at = column.at;
    if (at < count && rows[at] < row) ++at;
    const bool is_there = (at == count || rows[at] >= row) && (at == 0 || rows[at - 1] < row);
    if (__builtin_expect(!is_there, 0)) at = static_cast<uint64_t>(std::lower_bound(rows, rows + count, row) - rows);
    column.at = at;
    if (at == count) return;
    if (!column.is_often) soonest_ = std::min<uint64_t>(soonest_, rows[at]);
    if (rows[at] == row) visit(i, at);
  }

  uint64_t count_ = 0, often_count_ = 0;
  std::unique_ptr<Column[]> columns_;
  std::unique_ptr<uint64_t[]> often_;  // the columns that many spans have
  uint64_t last_ = UINT64_MAX;
  uint64_t soonest_ = 0;  // the first row, from the last one on, that any of the other columns has
};

}  // namespace otp
