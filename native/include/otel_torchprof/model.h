/* Arithmetic on trees of events that numpy cannot do in one pass. See encode.h for threads: nothing is kept, any number
 * of threads may call at once.
 */
#ifndef OTEL_TORCHPROF_MODEL_H_
#define OTEL_TORCHPROF_MODEL_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Adds to each of `count` values those of everything below it in the tree: own amounts in, inclusive ones out.
 * parent[i] is below i, or negative for a root. */
void otp_add_to_parents(uint64_t count, const int32_t* parent, int64_t* values);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_MODEL_H_ */
