/* The black box: the latest events in a file that a process maps, and that outlives it.
 *
 * Control and reading, on any thread; what recording threads do for it is behind otp_api. blackbox_format.h has the
 * image's layout.
 */
#ifndef OTEL_TORCHPROF_BLACKBOX_H_
#define OTEL_TORCHPROF_BLACKBOX_H_

#include "otel_torchprof/recorder.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One in an image: the last of all groups. */
typedef struct {
  uint64_t ticket;    /* from 1 on; 0: none */
  uint64_t enqueued;  /* ticks */
  uint64_t completed; /* ticks; 0: not yet, or not known */
  uint32_t os_tid;    /* that enqueued it */
  uint32_t padding;
  otp_blackbox_call call;
} otp_blackbox_collective;

/* A group in an image, and apart from it, its sends and receives. */
typedef struct {
  uint32_t group; /* 0: none */
  uint32_t ranks;
  uint32_t backend;
  int32_t group_size;
  int32_t rank;
  uint32_t flags;         /* OTP_BLACKBOX_TRANSFER and OTP_BLACKBOX_UNTRACKED */
  uint64_t enqueued;      /* how many */
  uint64_t completed;     /* how many, in whatever order */
  int64_t last_enqueued;  /* sequence_nr; -1: none */
  int64_t last_completed; /* the highest */
} otp_blackbox_group;

typedef struct {
  int fd;                  /* of a file of that size that has all of its blocks; may be closed afterwards */
  uint64_t bytes;          /* OTP_BLACKBOX_LEAST at least */
  uint32_t kinds;          /* as in otp_session_options */
  uint32_t hidden_names;   /* bits 1 << otp_name_kind of names that are not to stand in it */
  uint32_t hides_shapes;   /* of collectives */
  uint32_t hides_threads;  /* their names */
  const char* shown_names; /* labels that may stand in it though they are hidden: patterns of fnmatch(3), separated by
                              newlines; null: none */
} otp_blackbox_options;

#define OTP_BLACKBOX_LEAST 1048576
#define OTP_BLACKBOX_INFO_BYTES 8192
#define OTP_BLACKBOX_STACKS_BYTES 16384

/* Begins a black box, with a session of its own that starts at once, sees every thread, and keeps the latest chunks for
 * as long as it runs: it is not to be drained. otp_session_stop and otp_session_free end the box. While it is open all
 * chunks of all threads come from its memory; what other sessions still want of a chunk that has to make room is
 * copied. One at a time: OTP_E_STATE. */
int otp_blackbox_open(const otp_blackbox_options* options, otp_session** out);

/* What stands in it of the process: JSON, at most OTP_BLACKBOX_INFO_BYTES. Any thread; without effect where none is
 * open. */
void otp_blackbox_set_info(const char* json, uint32_t size);

/* 1: the open box's file was cut by another process, and what is recorded is in no file any more. Any thread. */
uint32_t otp_blackbox_is_lost(void);

/* What an image holds beside its events. */
typedef struct {
  uint32_t pid;
  uint32_t is_closed;      /* 1: its process has ended it */
  int64_t last;            /* Unix ns of the last that is known of the process */
  uint32_t chunks;         /* that have records */
  uint32_t chunks_damaged; /* of them, those that could not be read to their end */
  uint32_t names_left_out; /* since they did not fit */
  uint32_t padding;
  uint64_t dropped;       /* events that found no chunk */
  int64_t complete_since; /* Unix ns up to which events have given way to later ones; 0: none have */
  otp_blackbox_group* groups;
  uint32_t group_count;
  uint32_t collective_count;
  otp_blackbox_collective* collectives; /* in the order of their tickets; `enqueued` and `completed` are Unix ns here */
  uint32_t info_size;                   /* 0: none, or it was being written */
  char info[8192];
  int64_t hang_since;   /* Unix ns from which on a thread was seen to hang; 0: none was */
  uint32_t hang_os_tid; /* of that thread */
  uint32_t stacks_size; /* 0: none, or they were being written */
  char stacks[16384];
  void* image; /* of the reader */
} otp_blackbox_contents;

/* Reads an image, of which nothing is trusted: in a file, whose descriptor may be closed afterwards, or in memory where
 * `data` is not null, which stays until otp_blackbox_contents_free. It may be shorter than `size` says, and may be
 * changed by its process meanwhile. *out is the caller's. OTP_E_NO_BLACKBOX where it is none. Names are added to those
 * of this process. Takes some hundred bytes per chunk.
 *
 * With `since` (Unix ns; 0: all), only what is needed to know what happened from then on and what is open: of each
 * thread its last chunk and those that were left later, and the collectives that were enqueued, completed or pending.
 */
int otp_blackbox_read(int fd, const uint8_t* data, uint64_t size, int64_t since, otp_blackbox_contents** out);

/* Reads the same image again, which its process may have changed since; names that are known are not read again. Where
 * it fails, `contents` can only be freed, or read again. */
int otp_blackbox_refresh(otp_blackbox_contents* contents, int64_t since);

/* The next of its events, those in the oldest `max_bytes` of records, or all that are left where it is 0; as
 * otp_session_drain. The last batch, whose watermark is INT64_MAX, has what was open at the end too, with the flag
 * OTP_FLAG_UNFINISHED and `last` as its end; empty ones follow it. */
int otp_blackbox_next(otp_blackbox_contents* contents, uint64_t max_bytes, otp_batch** out);

/* The next batch begins with the first event again. */
void otp_blackbox_rewind(otp_blackbox_contents* contents);

/* Null is fine. */
void otp_blackbox_contents_free(otp_blackbox_contents* contents);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_BLACKBOX_H_ */
