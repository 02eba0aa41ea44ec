/* Watches whether the threads of a training loop still begin and end anything, while a black box is open.
 *
 * A thread of its own looks at what the recording threads have published, and needs neither Python's lock nor anybody
 * else's for long. A thread hangs where something is open on it (a phase of the loop, a collective that it enqueued, or
 * anything on the main thread; if that has enqueued collectives that may be nothing) and nothing has begun or
 * ended for a limit: the given one, ten times the longest pause that the thread has come out of, or the long limit,
 * whichever is most. Longer where it compiles or saves; with a collective that is not complete at most four fifths of
 * its timeout. Time in which the process is stopped, or a debugger is attached to it, does not count.
 *
 * A hang is one line on stderr. Where a command is given, one of the processes that name the same file starts it: its
 * output in that file begins with `hang: ` and is then the line of all of them, or the hang is none. It has forty
 * seconds, and is no child of the process. Without it, or where it fails, the line names the thread.
 *
 * Any thread may call these. In a forked child nothing is watched.
 */
#ifndef OTEL_TORCHPROF_HANG_WATCH_H_
#define OTEL_TORCHPROF_HANG_WATCH_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint64_t limit_ns, long_limit_ns;
  uint64_t write_stacks; /* address of a function `uint32_t (*)(uint32_t os_tid, char* text, uint32_t bytes)`, which
                            writes the stacks of all threads, beginning with that one's, and returns how many bytes they
                            have; 0: there is none. It is called by the watch's own thread while the program continues,
                            once for each pause, and takes no lock */
  const char* const* command; /* program and arguments, up to a null; null: none. Copied */
  const char* report;         /* path of the file; null without a command. Copied */
  int32_t exit_status;        /* the process ends with it once the line was written; 0: it continues */
  uint32_t padding;
} otp_hang_options;

/* Begins. OTP_E_STATE: it watches already; OTP_E_NO_MEMORY: there is no thread or memory to be had. */
int otp_hang_watch_start(const otp_hang_options* options);

/* Waits. The system's id of a thread that hangs, whose stacks are in the black box, and what was written to stderr of
 * it, without the prefix; 0: nothing is watched any more. Once for each pause. */
uint32_t otp_hang_watch_wait(char* line, uint32_t bytes);

/* Who waited has logged it: a process that is to end does so now, and else some seconds later. */
void otp_hang_watch_logged(void);

/* Ends; again without effect. */
void otp_hang_watch_stop(void);

#ifdef __cplusplus
}
#endif

#endif /* OTEL_TORCHPROF_HANG_WATCH_H_ */
