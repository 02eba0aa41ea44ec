/* What lies in a chunk: the records of one thread, in the order in which it wrote them.
 *
 *   chunk   | BEGIN | INPUTS | BEGIN | END | END | BEGIN | ...        each record a multiple of 8 bytes
 *
 *            0        8  9  10    12       16           20           24        32
 *   BEGIN    | ticks  |k |s | for | name   | parent     | fwd_thread | seq     |
 *   END      | ticks  |k |f | for | event  |
 *   ERR_END  | ticks  |k |f | for | error  | event                  |
 *   INPUTS   | words  |k |f | for | -      | words * int64 ...
 *   LOSS     | count  |k |- | for | -      |
 *   CONTEXT  | -      |k |- | for | context|
 *   MEMORY   | ticks  |k |f | for | around | bytes | address | total allocated | total reserved | device |
 *   OPEN     | ticks  |k |s | for | name   | parent     | fwd_thread | seq     | event |
 *
 *   k  record kind          s  at::RecordScope (low 4 bits) and event kind (high 4 bits)
 *   f  flags                for  bit mask of the consumers that the record is for
 *
 * Ids are never written where they can be counted: the i-th BEGIN behind a place is event Held::next_index + i of its
 * thread. `parent` and `event` are distances backwards from the next event's index, so that 32 bits are enough for a
 * recording of any length. Ends that come from another thread are not in a chunk: see Session::late_ends.
 *
 * A CONTEXT record tells in which context the events behind it begin, until the next one; a session that follows
 * contexts has one at the head of what it holds of every chunk.
 *
 * A MEMORY record is no event of the tree: a block of memory that was allocated or freed, at one moment, inside
 * the event `around` (a distance as in BEGIN; 0: none).
 *
 * OPEN records stand at the head of a chunk of the black box, for that alone: the events that are open there, outermost
 * first, each as its BEGIN was. So one chunk says what its thread is doing, whatever became of those before it.
 *
 * Records hold no pointers and no absolute ids: a chunk means the same in another process.
 */
#ifndef OTEL_TORCHPROF_RECORD_FORMAT_H_
#define OTEL_TORCHPROF_RECORD_FORMAT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define OTP_STATIC_ASSERT(what, why) static_assert(what, why)
#else
#define OTP_STATIC_ASSERT(what, why) _Static_assert(what, why)
#endif

/* Raised whenever a record's layout or meaning changes; compared when the parts are put together (see otp_api). */
#define OTP_RECORD_FORMAT_VERSION 5

enum otp_record_kind {
  OTP_RECORD_BEGIN = 1,
  OTP_RECORD_END = 2,
  OTP_RECORD_ERROR_END = 3,
  OTP_RECORD_INPUTS = 4,
  OTP_RECORD_LOSS = 5,
  OTP_RECORD_CONTEXT = 6,
  OTP_RECORD_MEMORY = 7,
  OTP_RECORD_OPEN = 8,
};

/* Event kinds: column `kind`. */
enum otp_event_kind {
  OTP_EVENT_OPERATOR = 1,
  OTP_EVENT_LABEL = 2,
  OTP_EVENT_MODULE = 3,
  OTP_EVENT_FRAME = 4, /* a call of a Python or a C function */
  OTP_EVENT_PHASE = 5, /* of a training loop; fwd_thread: which part of it, sequence_nr: the object that it is of */
  OTP_EVENT_KINDS = 6, /* one more than the last */
};

/* Event flags: column `flags`; END, ERROR_END and INPUTS carry those that they know of. */
enum otp_event_flag {
  OTP_FLAG_ASYNC = 1,
  OTP_FLAG_UNFINISHED = 2,
  OTP_FLAG_ERROR = 4,
  OTP_FLAG_LOSS_BEFORE = 8,
  OTP_FLAG_INPUTS_CUT = 16,
  OTP_FLAG_ROOT = 128, /* of a module: it is no part of the one around it; known at its end */
};

/* What a phase is: column `fwd_thread` of events of that kind. */
enum otp_phase {
  OTP_PHASE_NEXT = 1,
  OTP_PHASE_FORWARD = 2,
  OTP_PHASE_INFERENCE = 3,
  OTP_PHASE_EVALUATION = 4,
  OTP_PHASE_BACKWARD = 5,
  OTP_PHASE_RECOMPUTATION = 6,
  OTP_PHASE_STEP = 7,
  OTP_PHASE_SCALER_STEP = 8,
  OTP_PHASE_SCALER_UPDATE = 9,
  OTP_PHASE_UNSCALE = 10,
  OTP_PHASE_CLIPPING = 11,
  OTP_PHASE_ZEROING = 12,
  OTP_PHASE_SAVE = 13,
  OTP_PHASE_COLLECTIVE = 14,
  OTP_PHASE_COMPILATION = 15,
  OTP_PHASE_COLLECTION = 16,
  OTP_PHASE_DEVICE_WAIT = 17,
  OTP_PHASE_AVERAGING = 18,
  OTP_PHASE_GENERATE = 19,
  OTP_PHASE_PREFILL = 20,
  OTP_PHASE_DECODE = 21,
  OTP_PHASE_EVALUATING_GENERATE = 22,
};

/* Flags of MEMORY records. */
enum otp_memory_flag {
  OTP_MEMORY_OUT_OF_MEMORY = 1, /* the allocator had no `bytes` to give */
};

/* Inputs are words of 64 bits. The first: number of inputs | number of extras << 32. Then every input, then every
 * extra: a header kind | dtype << 8 | flags << 16 | n << 32, and what the kind says. Strings are ids of names. */
enum otp_input_kind {
  OTP_INPUT_OTHER = 0,       /* nothing that is kept; a scalar where OTP_INPUT_SYMBOLIC is set */
  OTP_INPUT_TENSOR = 1,      /* n sizes, then n strides where OTP_INPUT_STRIDED is set; else it is contiguous; then two
                                words for its storage where OTP_INPUT_STORED is set */
  OTP_INPUT_TENSOR_LIST = 2, /* n tensors, each with a header of its own */
  OTP_INPUT_INT = 3,         /* one word */
  OTP_INPUT_DOUBLE = 4,      /* one word: the bits */
  OTP_INPUT_BOOL = 5,        /* n is the value */
  OTP_INPUT_COMPLEX = 6,     /* two words: bits of the real and of the imaginary part */
  OTP_INPUT_SCALAR_LIST = 7, /* n scalars (INT to COMPLEX; for a keyword also STRING), each with a header of its own */
  OTP_INPUT_STRING = 8,      /* n is the id */
  /* Extras. */
  OTP_INPUT_KEYWORD = 9,           /* n is the id of the keyword; one input follows, its value */
  OTP_INPUT_OVERLOAD = 10,         /* n is the id of the operator's overload name */
  OTP_INPUT_CALL_STACK = 11,       /* n is the id of TorchScript's call stack: entries, innermost first, by line */
  OTP_INPUT_MODULE_HIERARCHY = 12, /* n is the id of TorchScript's module hierarchy */
};

enum otp_input_flag {
  OTP_INPUT_STRIDED = 1,
  OTP_INPUT_NO_STRIDES = 2, /* a tensor whose layout has none */
  OTP_INPUT_SYMBOLIC = 4,   /* a scalar without a value */
  OTP_INPUT_STORED = 8,     /* a tensor of which it is told where it lies */
};

/* A storage: the address of its first byte, 0 where it has none, and a word with its size in bytes (below 2^48) |
 * device type << 48 | device index << 56, where a device without an index has 0. */
#define OTP_STORAGE_WORDS 2

/* The first 16 bytes of every record. */
typedef struct {
  uint64_t ticks; /* INPUTS: number of words; LOSS: number of events */
  uint8_t kind;
  uint8_t detail; /* BEGIN: scope | event kind << 4; ends and INPUTS: flags */
  uint16_t consumers;
  uint32_t value; /* BEGIN: name; END: distance to the event; ERROR_END: error type (a name);
                     CONTEXT: context */
} otp_record;

typedef struct {
  otp_record head;
  uint32_t parent;     /* distance to the parent, 0: none; UINT32_MAX: too far, the nearest open event */
  uint32_t fwd_thread; /* torch's id of the forward thread, 0: none */
  int64_t sequence_nr; /* -1: none */
} otp_record_begin;

typedef struct {
  otp_record head;
  uint64_t event; /* distance to the event */
} otp_record_error_end;

typedef struct {
  otp_record_begin begin; /* but for its kind */
  uint64_t event;         /* distance to the event */
} otp_record_open;

typedef struct {
  otp_record head; /* value: distance to the event around it, as parent above */
  int64_t bytes;   /* below 0: freed */
  uint64_t address;
  int64_t total_allocated; /* by its allocator, after it; -1: unknown */
  int64_t total_reserved;
  int32_t device_type; /* c10::DeviceType */
  int32_t device_index;
} otp_record_memory;

/* An event's id is thread << 38 | (index + 1). 38 bits of index: 76 hours of one thread at a million events a second;
 * 26 bits of thread: 67 million threads. */
#define OTP_INDEX_BITS 38

OTP_STATIC_ASSERT(sizeof(otp_record) == 16, "END is 16 bytes");
OTP_STATIC_ASSERT(offsetof(otp_record, kind) == 8 && offsetof(otp_record, value) == 12, "as drawn above");
OTP_STATIC_ASSERT(sizeof(otp_record_begin) == 32 && offsetof(otp_record_begin, sequence_nr) == 24, "as drawn above");
OTP_STATIC_ASSERT(sizeof(otp_record_error_end) == 24, "as drawn above");
OTP_STATIC_ASSERT(sizeof(otp_record_memory) == 56, "as drawn above");
OTP_STATIC_ASSERT(sizeof(otp_record_open) == 40, "as drawn above");

#endif /* OTEL_TORCHPROF_RECORD_FORMAT_H_ */
