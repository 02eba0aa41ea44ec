/* What happens at SIGTERM where the program has not said: a bounded time for a flush, then the signal's default action.
 *
 * The handler only wakes a thread of its own, the watchdog. That thread wakes whoever waits in otp_sigterm_wait, and
 * ends the process when the flush is done, or at the deadline, whatever the program does meanwhile: it needs no lock of
 * anybody. A second SIGTERM ends the process at once. A handler that the program sets later is never touched.
 *
 * Any thread may call these. In a forked child nothing is watched, and the action is the default again.
 */
#ifndef OTEL_TORCHPROF_SIGTERM_H_
#define OTEL_TORCHPROF_SIGTERM_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Handles SIGTERM from now on, with so many milliseconds for a flush. 1: it does; 0: the program handles or ignores
 * SIGTERM, and nothing was changed; OTP_E_STATE: it does already; OTP_E_NO_MEMORY: there is no thread to be had. */
int otp_sigterm_watch(uint32_t flush_ms);

/* Waits. 1: SIGTERM has come, and otp_sigterm_flushed is to be called after a flush; 0: nothing is watched any more. */
int otp_sigterm_wait(void);

/* The flush is done: the process ends now. */
void otp_sigterm_flushed(void);

/* Puts the default action back, unless a handler of the program's has taken its place. 0: nothing is watched any more;
 * 1: SIGTERM has come, and the process is about to end. */
int otp_sigterm_unwatch(void);

#ifdef __cplusplus
}
#endif

#endif /* OTEL_TORCHPROF_SIGTERM_H_ */
