#include "otel_torchprof/model.h"

// From the last to the first: when a value is added to its parent, everything below it is in it already.
extern "C" void otp_add_to_parents(uint64_t count, const int32_t* parent, int64_t* values) {
  for (uint64_t i = count; i-- > 0;)
    if (parent[i] >= 0) values[parent[i]] += values[i];
}

extern "C" void otp_max_to_parents(uint64_t count, const int32_t* parent, int64_t* values) {
  for (uint64_t i = count; i-- > 0;)
    if (parent[i] >= 0 && values[parent[i]] < values[i]) values[parent[i]] = values[i];
}

extern "C" void otp_top_level(uint64_t count, const int32_t* parent, const uint8_t* flags, int32_t* outermost) {
  for (uint64_t i = 0; i < count; ++i) {
    int32_t around = parent[i] < 0 ? -1 : outermost[parent[i]];
    outermost[i] = around < 0 && flags[i] != 0 ? static_cast<int32_t>(i) : around;
  }
}
