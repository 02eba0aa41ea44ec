/* The image of a black box: a file of a fixed size, all of it allocated, that a process maps and writes, and that tells
 * what the process did when it is no more. Another process may read it at any time.
 *
 *   header | info | late ends | groups | stacks | collectives | ends of names | texts of names | chunks ...
 *
 * Times are ticks of the recorder; `points` say what they are in Unix ns. A chunk is OTP_CHUNK_BYTES with a
 * hot::ChunkHead at its beginning and records (record_format.h) OTP_BLACKBOX_CHUNK_HEADER bytes behind that. A name's
 * text ends at `name_end[id]` in the texts, and begins where the one before it ends; a name whose id is `name_count` or
 * more did not fit.
 *
 * What may change under a reader is written so that it can be noticed: a chunk's `sequence` is 0 while its head is
 * written, a point's `ticks`, a late end's `sequence` and a collective's `ticket` likewise, `info_sequence` and
 * `stacks_sequence` are odd. Counts are raised after what they count. A process that dies leaves each as it was between
 * two stores.
 *
 * Little-endian, as written by the machine; a reader trusts none of it.
 */
#ifndef OTEL_TORCHPROF_BLACKBOX_FORMAT_H_
#define OTEL_TORCHPROF_BLACKBOX_FORMAT_H_

#include <stdint.h>

#include "otel_torchprof/blackbox.h"
#include "otel_torchprof/record_format.h"

/* Raised whenever the layout or the meaning of the image changes. */
#define OTP_BLACKBOX_VERSION 2
#define OTP_BLACKBOX_MAGIC "OTPBOX\n\x1a"
#define OTP_BLACKBOX_CHUNK_HEADER 128

enum otp_blackbox_state {
  OTP_BLACKBOX_OPEN = 1,   /* its process writes it, or has died */
  OTP_BLACKBOX_CLOSED = 2, /* its process has ended it */
};

#define OTP_BLACKBOX_OPEN_LISTED 256 /* OPEN records at the head of a chunk, at most */
#define OTP_BLACKBOX_POINTS 128
#define OTP_BLACKBOX_LATE_ENDS 256
#define OTP_BLACKBOX_GROUPS 64
#define OTP_BLACKBOX_COLLECTIVES 512

/* A moment on both clocks. The table is a ring: the order of its entries says nothing. */
typedef struct {
  uint64_t ticks; /* 0: none */
  int64_t unix_ns;
} otp_blackbox_point;

/* The end of an event that is in no chunk, since it came from another thread. A ring likewise. */
typedef struct {
  uint64_t sequence; /* from 1 on; 0: none */
  uint64_t ticks;
  uint64_t index; /* of the event on its thread */
  uint32_t thread;
  uint32_t error_type;
  otp_thread ended_on;
  uint32_t flags;
  uint32_t padding;
} otp_blackbox_late_end;

typedef struct {
  char magic[8];
  uint32_t version;
  uint32_t record_format_version;
  uint64_t bytes; /* of the whole image */
  uint32_t pid;
  uint32_t state;    /* otp_blackbox_state */
  uint32_t consumer; /* the bit of the records that are meant for it; a chunk has others too */
  uint32_t name_capacity;
  uint32_t name_text_capacity;
  uint32_t name_count;
  uint32_t names_left_out; /* since they did not fit */
  uint32_t chunk_count;
  uint32_t info_bytes;
  uint32_t info_sequence;
  uint32_t point_count;      /* ever written */
  uint64_t late_end_count;   /* ever written */
  uint64_t collective_count; /* ever written */
  uint64_t dropped;          /* events that found no chunk */
  uint64_t hang_since;       /* ticks of the last thing that the thread did; 0: no thread was seen to hang */
  uint32_t hang_os_tid;
  uint32_t stacks_bytes; /* of the stacks of all threads then, as text */
  uint32_t stacks_sequence;
  uint32_t padding;
  otp_blackbox_point points[OTP_BLACKBOX_POINTS];
} otp_blackbox_header;

/* Where the parts begin. */
#define OTP_BLACKBOX_INFO_AT 4096
#define OTP_BLACKBOX_LATE_ENDS_AT (OTP_BLACKBOX_INFO_AT + OTP_BLACKBOX_INFO_BYTES)
#define OTP_BLACKBOX_GROUPS_AT 40960
#define OTP_BLACKBOX_STACKS_AT 49152
#define OTP_BLACKBOX_COLLECTIVES_AT 65536
#define OTP_BLACKBOX_NAME_ENDS_AT 196608

OTP_STATIC_ASSERT(sizeof(otp_blackbox_header) <= OTP_BLACKBOX_INFO_AT, "the header ends before the info");
OTP_STATIC_ASSERT(OTP_BLACKBOX_LATE_ENDS_AT + OTP_BLACKBOX_LATE_ENDS * sizeof(otp_blackbox_late_end) <=
                      OTP_BLACKBOX_GROUPS_AT,
                  "the late ends end before the groups");
OTP_STATIC_ASSERT(OTP_BLACKBOX_GROUPS_AT + OTP_BLACKBOX_GROUPS * sizeof(otp_blackbox_group) <= OTP_BLACKBOX_STACKS_AT,
                  "the groups end before the stacks");
OTP_STATIC_ASSERT(OTP_BLACKBOX_STACKS_AT + OTP_BLACKBOX_STACKS_BYTES <= OTP_BLACKBOX_COLLECTIVES_AT,
                  "the stacks end before the collectives");
OTP_STATIC_ASSERT(OTP_BLACKBOX_COLLECTIVES_AT + OTP_BLACKBOX_COLLECTIVES * sizeof(otp_blackbox_collective) <=
                      OTP_BLACKBOX_NAME_ENDS_AT,
                  "the collectives end before the names");

#endif /* OTEL_TORCHPROF_BLACKBOX_FORMAT_H_ */
