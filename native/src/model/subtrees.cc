#include "otel_torchprof/model.h"

// From the last to the first: when a value is added to its parent, everything below it is in it already.
extern "C" void otp_add_to_parents(uint64_t count, const int32_t* parent, int64_t* values) {
  for (uint64_t i = count; i-- > 0;)
    if (parent[i] >= 0) values[parent[i]] += values[i];
}
