/* The boundary of the torch library: what the wrapper loads and calls. Built on the user's machine against the torch
 * that is installed there; everything else of the package knows no torch.
 *
 * Control calls only; any thread, unless said otherwise.
 */
#ifndef OTEL_TORCHPROF_TORCH_OPS_H_
#define OTEL_TORCHPROF_TORCH_OPS_H_

#include "otel_torchprof/recorder.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the library the recorder to write to. Once; OTP_E_VERSION when it was built for another recorder. */
int otp_torch_attach(const otp_api* api);

/* The version of the headers that the library was built with; static memory. */
const char* otp_torch_version(void);

/* What torch calls the type with this number (a c10::ScalarType); static memory, null where no type has it. */
const char* otp_torch_dtype_name(int number);

/* What an observer requests beside the operators. What is recorded is the union; sessions that keep no INPUTS records
 * get none of it. */
enum otp_torch_requests {
  OTP_REQUEST_INPUTS = 1,           /* inputs and keyword inputs */
  OTP_REQUEST_OVERLOADS = 2,        /* overload names */
  OTP_REQUEST_CALL_STACKS = 4,      /* TorchScript's call stack */
  OTP_REQUEST_MODULE_HIERARCHY = 8, /* TorchScript's modules */
  OTP_REQUEST_STORAGES = 16,        /* with the inputs, where tensors lie */
  OTP_REQUEST_DEVICES = 32,         /* that whoever times devices can look at the inputs; recorded is nothing */
  OTP_REQUEST_COUNT = 6,            /* as many bits */
};

/* Registers the observer for a running session: on the calling thread and wherever torch carries its thread-local state
 * (autograd, jit.fork), or on all threads. Writes its handle, which is never used again, or 0 when torch refused. */
void otp_torch_observe(uint32_t consumer, int all_threads, uint32_t requests, uint64_t* handle);

/* Removes the observer; from any thread, any number of times. One that another thread still carries removes itself when
 * it is called. */
void otp_torch_unobserve(uint64_t handle);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_OPS_H_ */
