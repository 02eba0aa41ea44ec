/* Watches whether the threads of a training loop still begin and end anything, while a black box is open.
 *
 * A thread of its own looks at what the recording threads have published, and needs neither Python's lock nor anybody
 * else's for long. A thread hangs where something is open on it (a phase of the loop, a collective that it enqueued, or
 * anything on the main thread; in a process that has enqueued collectives that may be nothing) and nothing has begun or
 * ended for a limit: the given one, ten times the longest pause that the thread has come out of, or the long limit,
 * whichever is most. Longer where it compiles or saves; with a collective that is not complete at most eight minutes,
 * before its group gives up.
 *
 * Any thread may call these. In a forked child nothing is watched.
 */
#ifndef OTEL_TORCHPROF_HANG_WATCH_H_
#define OTEL_TORCHPROF_HANG_WATCH_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Begins. `write_stacks`: address of a function `uint32_t (*)(uint32_t os_tid, char* text, uint32_t bytes)`, which
 * writes the stacks of all threads, beginning with that one's, and returns how many bytes they have; 0: there is none.
 * It is called by the watch's own thread while the program continues, once for each pause, and takes no lock.
 * OTP_E_STATE: it watches already. */
int otp_hang_watch_start(uint64_t limit_ns, uint64_t long_limit_ns, uint64_t write_stacks);

/* Waits. The system's id of a thread that hangs, whose stacks are in the black box; 0: nothing is watched any more.
 * Once for each pause. */
uint32_t otp_hang_watch_wait(void);

/* Ends; again without effect. */
void otp_hang_watch_stop(void);

#ifdef __cplusplus
}
#endif

#endif /* OTEL_TORCHPROF_HANG_WATCH_H_ */
