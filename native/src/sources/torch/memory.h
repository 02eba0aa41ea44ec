/* What torch allocates and frees: told to the recorder out of the slot that torch has for it in every thread. The
 * second part of the boundary of the torch library (see ops.h).
 *
 * Control calls only; any thread, unless said otherwise.
 */
#ifndef OTEL_TORCHPROF_TORCH_MEMORY_H_
#define OTEL_TORCHPROF_TORCH_MEMORY_H_

#include "otel_torchprof/recorder.h"

#ifdef __cplusplus
extern "C" {
#endif

enum otp_torch_memory_status {
  OTP_TORCH_MEMORY_OCCUPIED = -1, /* another profiler is in the calling thread's slot */
  OTP_TORCH_MEMORY_REFUSED = -2,  /* torch refused */
};

/* Gives this part the recorder, which otp_torch_attach has accepted. Once; a library that was built without this part
 * has none of these functions. */
void otp_torch_attach_memory(const otp_api* api);

/* Lets a running session have the calling thread's allocations, and those of the threads to which torch carries its
 * thread-local state from here (autograd, jit.fork). Returns a token above 0, or an otp_torch_memory_status. */
int64_t otp_torch_observe_memory(uint32_t consumer);

/* Ends that on all of these threads; from any thread, in any order, with the token of its start. 0: a profiler of
 * torch's has taken it out of the slot of the calling thread before, where it began; 1 otherwise. */
int otp_torch_unobserve_memory(uint32_t consumer, int64_t token);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_MEMORY_H_ */
