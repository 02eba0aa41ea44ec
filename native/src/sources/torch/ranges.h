/* The boundary of the part of the torch library that shows operators as ranges to another profiler (NVTX, ITT). It has
 * nothing to do with the recorder.
 *
 * Control calls may come from any thread, unless said otherwise.
 */
#ifndef OTEL_TORCHPROF_TORCH_RANGES_H_
#define OTEL_TORCHPROF_TORCH_RANGES_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where ranges go. Ranges are a stack per thread: pop ends the innermost. Texts are zero-terminated UTF-8, the
 * caller's. The functions must be there until the process ends. */
typedef struct {
  int (*push)(const char* text);
  int (*pop)(void);
  void (*mark)(const char* text);
} otp_range_functions;

/* What stands in a text behind the name, in this order. */
enum otp_range_parts {
  OTP_RANGE_SEQ = 1,       /* ", seq = N": the number that pairs a forward operator with its backward function */
  OTP_RANGE_STASHED = 2,   /* "stashed seq" instead, for the backward function */
  OTP_RANGE_OP_ID = 4,     /* ", op_id = N": torch's number of the call */
  OTP_RANGE_SIZES = 8,     /* ", sizes = [[2, 3], []]": of each input, lists of tensors laid flat */
  OTP_RANGE_PRODUCERS = 16 /* ", input_op_ids = [(N,0), (0,-1)]": which call made each input, as which output */
};

/* The ways out that torch has itself: NVTX (itt 0) where it was built with CUDA, else ITT. 1, or 0 where it has none.
 */
int otp_ranges_of_torch(int itt, otp_range_functions* out);

/* Makes ranges of the operators of the calling thread and of those that torch carries on for it (autograd, jit.fork).
 * Returns a handle, or 0: the thread has some already, 16 are running, or torch refused. */
uint64_t otp_ranges_start(const otp_range_functions* functions, uint32_t parts);

/* The handle of what makes ranges of the calling thread's operators; 0: nothing. */
uint64_t otp_ranges_here(void);

/* Ends it; what is open on the calling thread ends now. From another thread than the one that started it, it takes
 * itself away there when the next operator runs, and makes no ranges meanwhile. Unknown handles are ignored. */
void otp_ranges_stop(uint64_t handle);

/* A range that is no operator, where ranges are made for the calling thread: `key` is its identity. The end closes what
 * is still open inside it too, and does nothing on a thread where it is not open. */
void otp_ranges_label_begin(const void* key, const char* text);
void otp_ranges_label_end(const void* key);

/* An instant; nothing where the handle has ended. */
void otp_ranges_mark(uint64_t handle, const char* text);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_RANGES_H_ */
