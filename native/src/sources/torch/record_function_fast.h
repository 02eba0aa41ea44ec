/* Torch's _RecordFunctionFast, which begins only where one of torch's profilers is on. A part of the torch library of
 * its own (see ops.h), and none that has to do with the recorder.
 */
#ifndef OTEL_TORCHPROF_TORCH_RECORD_FUNCTION_FAST_H_
#define OTEL_TORCHPROF_TORCH_RECORD_FUNCTION_FAST_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Until otp_fast_records_stand_down, torch finds a profiler on the calling thread, which takes inputs or not. Returns
 * 1; 0 where one of torch's is on, which is left alone, or where there is no memory: then there is nothing to stand
 * down.
 */
int otp_fast_records_stand_in(int with_inputs);

/* Ends that, on the same thread. */
void otp_fast_records_stand_down(void);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_RECORD_FUNCTION_FAST_H_ */
