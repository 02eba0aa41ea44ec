/* What collectives are: of which group, with which number, of how many bytes. Torch's observer of operators is told of
 * their arguments only if it requests those of all operators, which costs each of them; so the operators of c10d, and
 * no others, are intercepted in the dispatcher. The fourth part of the boundary of the torch library (see ops.h).
 *
 * Control calls only; any thread.
 */
#ifndef OTEL_TORCHPROF_TORCH_COLLECTIVES_H_
#define OTEL_TORCHPROF_TORCH_COLLECTIVES_H_

#include "otel_torchprof/recorder.h"

#ifdef __cplusplus
extern "C" {
#endif

enum otp_collective_flag {
  OTP_COLLECTIVE_TRANSFER = 1, /* a send or a receive: between two ranks, without a number */
  OTP_COLLECTIVE_ASYNC = 2,    /* its caller does not wait for it at once */
};

/* The columns of COLLECTIVE_COLUMNS in _columns/schema.py, which has their meanings. Strings are ids of names. */
typedef struct {
  uint64_t event;
  int64_t sequence_nr;
  int64_t bytes_in;
  int64_t bytes_out;
  uint32_t group;
  uint32_t ranks;
  uint32_t backend;
  uint32_t dtype;
  uint32_t reduce_op;
  uint32_t repeat;
  int32_t group_size;
  int32_t rank;
  int32_t peer;
  int32_t root;
  int32_t tag;
  uint32_t flags;
} otp_collective;

/* The black box has them all, while one is open and anything listens: see otp_api. */

/* When a rank called a collective and when its backend had completed it, Unix ns; the group is the id of a name. */
typedef struct {
  int64_t start;
  int64_t end;
  uint32_t group;
  uint32_t reserved;
} otp_collective_time;

/* Gives this part the recorder, which otp_torch_attach has accepted. Once. */
void otp_torch_attach_collectives(const otp_api* api);

/* From now on what a running session has of collectives is told; at most `most` wait to be taken. A token above 0, or 0
 * where torch refused. The first one intercepts the operators, which stay so: one microsecond each. */
int64_t otp_torch_collectives_start(uint32_t consumer, uint64_t most);

/* Moves up to `room` of what is there to the caller, in no order; returns how many. Each is there before the event's
 * end can be drained. */
uint64_t otp_torch_collectives_take(int64_t token, otp_collective* out, uint64_t room);

/* How many there was no room for. */
uint64_t otp_torch_collectives_lost(int64_t token);

/* Ends it; what was not taken is freed. Nothing where the token is none. */
void otp_torch_collectives_stop(int64_t token);

/* From now on collectives are timed, whoever records them; of more than `most` that wait to be taken the oldest are
 * dropped. 0: no longer. Only those that no rank leaves before the last has arrived (none with a root, no send or
 * receive), of backends that tell when they are complete (gloo). 1: done; 0: torch refused. Intercepts the operators as
 * otp_torch_collectives_start does; some microseconds each. */
int otp_torch_collectives_time(uint64_t most);

/* Moves up to `room` of the oldest times to the caller, in the order of their ends; returns how many. */
uint64_t otp_torch_collectives_take_times(otp_collective_time* out, uint64_t room);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TORCH_COLLECTIVES_H_ */
