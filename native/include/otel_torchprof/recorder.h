/* The C boundary of the recorder. Everything that records (the torch library, the Python labels) and everything that
 * reads (the cffi wrapper) goes through this header; nothing else of the core is visible.
 *
 * The functions and their callers:
 *
 * - Sources, on recording threads: otp_api (begin, end, end_elsewhere, ...). No lock, no allocation, no system call on
 *   the fast path; they never call into Python.
 * - Control, on any thread: otp_session_*. Hold the registry's lock for microseconds.
 * - Readers, one thread at a time: otp_session_drain, otp_batch_*. Decode outside the lock.
 *
 * Functions that can fail return 0 or a negative otp_status; nothing throws across this boundary.
 * After a fork the child's recorder is off and empty; sessions of the parent answer OTP_E_FORKED there.
 */
#ifndef OTEL_TORCHPROF_RECORDER_H_
#define OTEL_TORCHPROF_RECORDER_H_

#include <stddef.h>
#include <stdint.h>

#include "otel_torchprof/encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when this header changes in a way that a library built against the old one would not survive. */
#define OTP_ABI_VERSION 13

/* As many sessions can record at the same time; a record has one bit for each. */
#define OTP_MAX_SESSIONS 16

enum otp_status {
  OTP_OK = 0,
  OTP_E_NO_MEMORY = -1,
  OTP_E_TOO_MANY_SESSIONS = -2,
  OTP_E_BUDGET_TOO_SMALL = -3,
  OTP_E_STATE = -4, /* started twice, stopped before start, drained while another thread drains */
  OTP_E_FORKED = -5,
  OTP_E_VERSION = -6,
  OTP_E_NO_BLACKBOX = -7, /* no image of a black box, or of another version */
};

/* The version of the package that this was compiled with; static memory. */
const char* otp_version(void);

/* One sentence for a status; static memory. */
const char* otp_status_text(int status);

/* Why an event was not kept. Counted per session. */
enum otp_loss {
  OTP_LOSS_BUDGET = 0,    /* the session's memory budget was full and it keeps the oldest */
  OTP_LOSS_EVICTED = 1,   /* recorded, then thrown away for newer events by a session that keeps the newest */
  OTP_LOSS_DEPTH = 2,     /* more than OTP_MAX_DEPTH events open on one thread */
  OTP_LOSS_NO_MEMORY = 3, /* the system gave no memory */
  OTP_LOSS_DEADLINE = 4,  /* recorded, and thrown away unread after the stop: there was no time to drain it */
  OTP_LOSS_REASONS = 5,
};

/* What a name is of. Each kind has a limit of its own by count and by bytes; a name above it gets the id 1 + kind,
 * whose text says so: "(other labels)". */
enum otp_name_kind {
  OTP_NAME_OPERATOR = 0, /* operators, their overloads, phases, groups of ranks */
  OTP_NAME_CODE = 1,     /* functions, modules, stacks, exceptions: more come where a program compiles code */
  OTP_NAME_LABEL = 2,    /* labels, this package's and torch's: may have anything in their names */
  OTP_NAME_TEXT = 3,     /* arguments of labels */
  OTP_NAME_KINDS = 4,
};

/* What a session does at its budget. */
enum otp_full_policy {
  OTP_FULL_DROP_NEWEST = 0, /* a bounded profile: what began first stays */
  OTP_FULL_DROP_OLDEST = 1, /* a live consumer: the latest stays */
};

typedef struct {
  uint64_t budget_bytes; /* of chunks held for this session; at least OTP_CHUNK_BYTES */
  uint32_t full_policy;  /* otp_full_policy */
  uint32_t all_threads;  /* 1: every thread; 0: the thread that starts it, and those that a source's scope hook names */
  uint32_t inputs;       /* 1: keep the INPUTS records */
  uint32_t kinds;        /* bits 1 << otp_event_kind of what it requests; 0: every kind */
  uint32_t contexts;     /* 1: follow contexts: fill the column `context`, and leave out what is muted */
  uint32_t memory;       /* 1: keep the MEMORY records; a session that follows contexts gets those inside its events */
  uint32_t devices;      /* 1: the device source hears of its events: see otp_device_source */
} otp_session_options;

/* A context in which sessions that follow contexts record nothing (an unsampled request, suppressed instrumentation).
 */
#define OTP_CONTEXT_MUTED 4294967295u

/* Size of a chunk, the unit in which budgets are charged. */
#define OTP_CHUNK_BYTES 65536

/* Events that can be open on one thread at the same time. */
#define OTP_MAX_DEPTH 1024

typedef struct otp_session otp_session;

/* Creates a stopped session; *out is the caller's, until otp_session_free. */
int otp_session_new(const otp_session_options* options, otp_session** out);

/* Starts it; the calling thread is in its scope. Events that are open already are not recorded. Once per session. */
int otp_session_start(otp_session* session);

/* Stops it, from any thread; without effect where it does not run. Events still open end now, marked unfinished. What
 * was recorded stays until drained or freed. */
int otp_session_stop(otp_session* session);

/* While `muted`, a session that follows contexts leaves out what begins outside of any context (a step that is not
 * sampled). What is open continues to its end. From any thread. */
int otp_session_mute_roots(otp_session* session, int muted);

/* Threads of this process may be in contexts from now on, though none was resolved yet: a span of the service is
 * current. Until then sources need not look for what is muted. From any thread; 20 ns where it was called before. */
void otp_expect_contexts(void);

/* From now on no session that follows contexts gets anything of the calling thread, whatever context it is in. */
void otp_mute_thread(void);

/* While `reserved`, its bit is given to no other session, though it has stopped and was drained: for sources that know
 * it by that bit, until they have stopped too. From any thread, in any state; freeing ends it. */
int otp_session_reserve(otp_session* session, int reserved);

/* The session's bit in record masks; for sources. 0 before the start. */
uint32_t otp_session_consumer(const otp_session* session);

/* Frees the session and what it holds; stops it first where needed. Not while another thread drains it. Null is fine.
 * In a forked child it forgets only. */
void otp_session_free(otp_session* session);

typedef struct {
  uint64_t recorded;   /* drained so far, MEMORY records among them */
  uint64_t dropped[5]; /* by otp_loss */
  uint64_t bytes_buffered;
  uint64_t bytes_buffered_max;
  int64_t start_ns; /* Unix ns; 0 before the start */
  int64_t stop_ns;  /* Unix ns; 0 before the stop */
} otp_session_stats;

int otp_session_get_stats(otp_session* session, otp_session_stats* out);

typedef struct {
  uint64_t ident;      /* pthread_self */
  uint64_t source_tid; /* torch's id for it; 0: none */
  uint32_t os_tid;
  uint32_t id;   /* of the recorder */
  char name[16]; /* as the system knows it, zero-terminated */
} otp_thread;

/* Events as columns; see otel_torchprof/_columns/schema.py for the meaning of each. It and all that it points to are
 * one block of memory, owned by the caller until otp_batch_free; refers to nothing else. */
typedef struct {
  uint64_t bytes; /* of the block, of which the system may not have given all */
  uint64_t rows;
  uint64_t* id;
  int64_t* start;
  int64_t* end;
  int64_t* sequence_nr;
  int64_t* inputs;   /* where their words begin: rows with the same may share them; -1: none; null when the session
                        keeps none */
  uint32_t* context; /* null when the session does not follow contexts */
  uint32_t* name;
  int32_t* parent;
  uint32_t* thread;
  uint32_t* end_thread;
  uint32_t* fwd_thread;
  uint32_t* error_type;
  uint8_t* kind;
  uint8_t* scope;
  uint8_t* flags;
  int64_t* input_words;
  uint64_t input_word_count;
  uint64_t* outer_row;    /* rows whose parent is not in this batch (still open, or drained before) ... */
  uint64_t* outer_parent; /* ... and the id of that parent */
  uint64_t outer_count;
  uint64_t* open_id;     /* events that were open when this was drained, and so are no rows yet, each parent before its
                            children ... */
  uint64_t* open_parent; /* ... the ids of their parents, 0 for none, ... */
  int64_t* open_start;   /* ... when they began, Unix ns, ... */
  int64_t* open_sequence_nr; /* ... as in the column, ... */
  uint32_t* open_context;    /* ... their contexts, 0 where the session does not follow them, ... */
  uint32_t* open_name;       /* ... their names, ... */
  uint32_t* open_thread;     /* ... threads, as in the column, ... */
  uint32_t* open_fwd_thread; /* ... as in the column, ... */
  uint8_t* open_kind;        /* ... kinds ... */
  uint8_t* open_scope;       /* ... and scopes */
  uint64_t open_count;
  int64_t* memory_time; /* MEMORY records, by thread and within a thread by time; null when the session keeps none */
  int64_t* memory_bytes;
  uint64_t* memory_address;
  int64_t* memory_total_allocated;
  int64_t* memory_total_reserved;
  uint64_t* memory_event; /* id of the event around it, 0 for none */
  uint32_t* memory_thread;
  int32_t* memory_device_type;
  int32_t* memory_device_index;
  uint8_t* memory_flags;
  uint64_t memory_count;
  otp_thread* threads;
  uint64_t thread_count;
  uint64_t dropped[5]; /* by otp_loss, since the last drain */
  int64_t watermark;   /* Unix ns: what began or ended later has not been drained; INT64_MAX: all has been */
} otp_batch;

/* Which columns have the same number of entries, and are there or not together. */
enum otp_column_group {
  OTP_COLUMNS_EVENTS = 0,
  OTP_COLUMNS_INPUTS = 1, /* one per event too */
  OTP_COLUMNS_CONTEXTS = 2,
  OTP_COLUMNS_INPUT_WORDS = 3,
  OTP_COLUMNS_MEMORY = 4,
  OTP_COLUMNS_OUTER = 5,
  OTP_COLUMNS_OPEN = 6,
  OTP_COLUMN_GROUPS = 7,
};

/* A column of otp_batch. */
typedef struct {
  const char* name;  /* of the field, without the name of its group */
  const char* dtype; /* as numpy names it: i8 is an int64_t */
  uint32_t group;    /* otp_column_group */
  uint32_t offset;   /* in otp_batch, of the pointer to its first entry */
  uint32_t count;    /* in otp_batch, of the number of its entries */
  uint32_t size;     /* of an entry */
} otp_column;

/* All of them, forever valid; `count` gets how many. By them a batch is allocated, compacted and seen from Python. */
const otp_column* otp_batch_columns(uint32_t* count);

/* Decodes what is there for the session: the oldest `max_bytes` of records, or all where it is 0. Of all threads it
 * takes what happened up to one time, the watermark, so that the batches of several drains are those of one, cut by
 * time; a thread may bring a chunk more than its share. While the session runs, events still open stay for a later
 * drain; once it has stopped, all come. One drain per session at a time. The recording continues meanwhile; the
 * registry's lock is held to list the chunks, and to copy each that is in a black box. */
int otp_session_drain(otp_session* session, uint64_t max_bytes, otp_batch** out);

/* Throws away what a stopped session still holds: the next drain tells how many events that was, as OTP_LOSS_DEADLINE.
 */
int otp_session_discard(otp_session* session);

/* Null is fine. */
void otp_batch_free(otp_batch* batch);

/* All interned names so far; names of a batch drained before this call are among them. Index 0 is the empty name.
 * Static memory, of which each call shows the same and what was added behind it; a forked child has a table of its own.
 */
void otp_names_view(otp_names* out);

/* The recorder's clock now, Unix ns: the same clock as the events'. */
int64_t otp_now_ns(void);

typedef struct {
  uint32_t sessions;    /* running */
  uint32_t threads;     /* with a buffer */
  uint64_t chunk_bytes; /* mapped for chunks, free ones included */
  uint64_t names;
  uint64_t names_refused[OTP_NAME_KINDS]; /* uses of names that share an id, since their kind was at its limit */
  uint64_t clock_steps;                   /* jumps of the wall clock that were seen */
  uint64_t unmatched_ends;                /* ends on another thread whose begin was not found */
  uint32_t clock_is_tsc;
  uint32_t forks; /* times that this recorder was emptied in a child */
} otp_recorder_stats;

void otp_get_recorder_stats(otp_recorder_stats* out);

/* ---- for the black box: see blackbox.h ---- */

/* What a collective is, a send or a receive, as its source knows it. Strings are ids of names. */
typedef struct {
  uint64_t event;      /* id of the operator's event; 0: nobody records it */
  int64_t sequence_nr; /* the same on all ranks of the group; -1: it has none */
  int64_t bytes_in;
  int64_t bytes_out;
  uint32_t name; /* of the operator */
  uint32_t group;
  uint32_t ranks;
  uint32_t backend;
  uint32_t dtype;
  uint32_t reduce_op;
  int32_t group_size;
  int32_t rank;
  int32_t root; /* -1: none, as the next two */
  int32_t peer;
  int32_t tag;
  uint32_t flags;      /* otp_blackbox_collective_flag */
  uint32_t timeout_ms; /* 0: not known */
  uint32_t padding;
  /* Of the inputs, as "[[2, 16], [4]]"; cut where they are longer. Text, and no name: there may be others with each. */
  char shapes[112];
} otp_blackbox_call;

enum otp_blackbox_collective_flag {
  OTP_BLACKBOX_TRANSFER = 1,  /* a send or a receive */
  OTP_BLACKBOX_ASYNC = 2,     /* its caller does not wait for it at once */
  OTP_BLACKBOX_FAILED = 4,    /* it ended with an error */
  OTP_BLACKBOX_UNTRACKED = 8, /* its backend does not say when it is complete */
};

/* ---- for sources: libraries of their own get this table once and call through it ---- */

typedef struct {
  const void* key;  /* identity of the open event: nothing else that is open may have it, except where `nests` is set */
  const char* name; /* null: `name_size` is the name's id (see intern), which is found without looking */
  uint32_t name_size; /* UINT32_MAX: zero-terminated */
  uint8_t scope;      /* at::RecordScope */
  uint8_t kind;       /* otp_event_kind */
  uint8_t flags;      /* OTP_FLAG_INPUTS_CUT or 0; the other flags are known at the end */
  uint8_t nests;      /* 1: the same key may be open several times on a thread (labels); 0: a second begin is ignored */
  int64_t sequence_nr;
  uint32_t fwd_thread;
  uint32_t source_tid; /* torch's id of this thread; 0: unknown */
  uint32_t scope_mask; /* consumers that request this thread beyond those that the recorder knows of */
  uint32_t input_words;
  const int64_t* inputs; /* copied */
  /* A source that knows when a name's memory is given up vouches for names: it passes a number that is not 0 and that
   * it raises whenever one is given up, and answers whether the name of the event with this key is such a one: 1 yes; 0
   * no; -1 no, and no other name at this address will be. 0 and null: nobody vouches, names are found by content. */
  uint32_t name_generation;
  uint32_t not_for; /* consumers that must not get it, since they have it already (what is open where another starts) */
  int (*name_is_stable)(const void* key);
  uint64_t ticks; /* when it began, by otp_api.ticks; 0: now. What the thread has recorded already was before it */
} otp_begin_args;

typedef struct {
  int64_t bytes; /* below 0: freed */
  uint64_t address;
  int64_t total_allocated;
  int64_t total_reserved;
  int32_t device_type; /* c10::DeviceType */
  int32_t device_index;
  uint32_t source_tid; /* torch's id of this thread; 0: unknown */
  uint32_t scope_mask; /* consumers that request this thread beyond those that the recorder knows of */
  uint8_t flags;       /* otp_memory_flag */
} otp_memory_args;

/* Tells in which context the calling thread is. A context is whatever the source numbers, from 1: the spans of a
 * service. Asked only where a running session follows contexts, and not for an operator (scope FUNCTION or
 * BACKWARD_FUNCTION) that begins directly inside another: there Python has not changed the context, and the thread may
 * hold what must not be waited with. */
typedef struct {
  /* A number that is another one whenever the calling thread's context may be another one; 0 on a thread that the
   * source cannot tell of. Never waits: called before every such event. */
  uint64_t (*version)(void);
  /* The context; 0: none; OTP_CONTEXT_MUTED. May wait, and may run anything, operators too: called when the version has
   * changed. */
  uint32_t (*resolve)(void);
} otp_context_source;

/* Takes contexts along to threads that the source cannot tell of (autograd's own, those of jit.fork). */
typedef struct {
  /* Lets the calling thread's state carry its context from now on; `thread` is its id in the recorder. */
  void (*carry)(uint32_t context, uint32_t thread);
  /* The context that the calling thread's state carries (0: none), and which thread put it there. Never waits. */
  uint32_t (*carried)(uint32_t* thread);
} otp_context_carrier;

/* Hears of what begins and ends for sessions with `devices`, but for calls of functions (OTP_EVENT_FRAME): marks the
 * work of devices with their own events. What it finds out is its own to keep, by the event's id. */
typedef struct {
  /* An event begins on the calling thread, with this id (as in the column), for these consumers; its time is not taken
   * yet. 1: `end` is to be called, on the same thread, unless the event ends on another or never. */
  int (*begin)(uint64_t id, const otp_begin_args* event, uint32_t consumers);
  /* Its end; its time has been taken. */
  void (*end)(uint64_t id);
} otp_device_source;

/* How recorder_hot.h reaches what it reads and writes, from a library that was compiled with it. */
typedef struct {
  uint64_t layout;    /* otp::hot::kLayout of the core: with another one, nothing of this may be used */
  const void* shared; /* otp::hot::Shared */
  int64_t buffer_at;  /* where the pointer to a thread's buffer is, from its thread pointer on; x86-64 and ELF only */
  void* (*buffer)(void); /* the same pointer: otp::hot::Thread */
  uint32_t clock_is_tsc;
} otp_hot;

typedef struct {
  uint32_t abi_version;
  uint32_t record_format_version;

  /* Bits of the running sessions: [0] of all, [kind] of those that request that kind of event. And of those among all
   * that request inputs. Read relaxed on the fast path. */
  const volatile uint32_t* active;
  const volatile uint32_t* requests_inputs;

  /* Begins an event on the calling thread. Returns the thread's id in the recorder, or 0 when no session requested it:
   * then there is nothing to end, which matters where `nests` is set, since an end would find an outer one. */
  uint32_t (*begin)(const otp_begin_args* args);

  /* Ends the innermost open event with that key on the calling thread. 1: done; 0: none is open here. */
  int (*end)(const void* key, uint8_t flags, const char* error_type, uint32_t error_type_size);

  /* As begin and end, for the calls of functions (OTP_EVENT_FRAME), which come in great numbers: the name by its id, no
   * inputs, the same key as often as requested. `identity` goes where an operator has its forward thread. `consumers`
   * (not 0) are the only sessions that get it, whatever thread it is. end_frame is for the innermost event of this
   * thread; where that has another key it does what end does. */
  uint32_t (*begin_frame)(const void* key, uint32_t name, uint32_t identity, uint32_t consumers);
  int (*end_frame)(const void* key, uint8_t flags);

  /* Ends the open calls (OTP_EVENT_FRAME) of a thread, `thread` as begin returned it, whose keys have none of these
   * bits: those of the calling thread as end_frame does, another's, on which none begins or ends meanwhile, as
   * end_elsewhere does. How many. */
  uint32_t (*end_frames)(uint32_t thread, uintptr_t without);

  /* Now, for otp_begin_args. */
  uint64_t (*ticks)(void);

  /* Ends an event that began on another thread: `thread` as begin returned it, or 0 and that thread's source_tid. */
  int (*end_elsewhere)(const void* key, uint32_t thread, uint32_t source_tid, uint8_t flags, const char* error_type,
                       uint32_t error_type_size);

  /* Takes an open event of this thread off the stack of parents (a suspended coroutine) and puts it back. 1: done. */
  int (*suspend)(const void* key);
  int (*resume)(const void* key);

  /* Records that memory was allocated or freed on the calling thread, inside the innermost open event. 1: done; 0:
   * no session requested it, or none had room. */
  int (*memory)(const otp_memory_args* args);

  /* Id of a string among the names; 0 for the empty one. size UINT32_MAX: zero-terminated. `kind`: otp_name_kind, whose
   * limit it counts against where it is new. Seldom waits: each thread remembers what it has asked for lately. */
  uint32_t (*intern)(const char* text, uint32_t size, uint32_t kind);

  /* A source that knows which sessions request the calling thread (torch's thread-local state) tells so here; null:
   * none.
   */
  void (*set_scope_hook)(uint32_t (*hook)(void));

  /* Static memory both; null: none. Threads that are in a call into the old one may still be when this returns. */
  void (*set_context_source)(const otp_context_source* source);
  void (*set_context_carrier)(const otp_context_carrier* carrier);
  void (*set_device_source)(const otp_device_source* source);

  /* The time of `ticks` by the recorder's clock, Unix ns; 0: now. */
  int64_t (*unix_ns)(uint64_t ticks);

  /* Id of the innermost open event of the calling thread, as in the column, and the running sessions that have it; 0
   * where there is none or nobody has it. For what a source finds out of an event after its begin. */
  uint64_t (*innermost)(uint32_t* consumers);

  /* As otp_session_mute_roots, of the running session with that bit; nothing where none has it. Takes the registry's
   * lock for a fraction of a microsecond. */
  void (*mute_roots)(uint32_t bit, int muted);

  /* Called when it may have changed which sessions leave out what begins outside of any context, or whether there are
   * contexts (otp::hot::Shared says both): a source that has nothing else for a session can then stop to look. On the
   * thread that changed it, without a lock of the recorder's. */
  void (*set_mute_hook)(void (*hook)(void));

  /* Whether a black box is open: 0 or not. Read relaxed. */
  const volatile uint32_t* box_is_open;
  /* Notes in the open black box that a collective is enqueued on the calling thread; a ticket for its end, 0 where none
   * is open. Takes the registry's lock for a fraction of a microsecond, as its end does, from any thread. */
  uint64_t (*collective_enqueued)(const otp_blackbox_call* call);
  void (*collective_completed)(uint64_t ticket, int failed);

  /* For begin and end without a call. */
  otp_hot hot;
} otp_api;

/* Static memory; valid as long as the process. */
const otp_api* otp_get_api(void);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_RECORDER_H_ */
