/* Trace files in, columns out: reads the events of Chrome JSON, of torch and of this package, and spans of OTLP. Or
 * Chrome JSON in, Chrome JSON out: the events of several files as those of one document.
 *
 * Nothing in a file is trusted. Memory grows with different names and different inputs only; rows go to arrays of the
 * caller. A reader is for one thread at a time; different readers for any threads.
 */
#ifndef OTEL_TORCHPROF_TRACE_FILES_H_
#define OTEL_TORCHPROF_TRACE_FILES_H_

#include <stdint.h>

#include "otel_torchprof/encode.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct otp_trace_reader otp_trace_reader;

/* Flags of a row. */
enum otp_trace_flag {
  OTP_TRACE_ASYNC = 1,       /* "async": true */
  OTP_TRACE_UNFINISHED = 2,  /* "unfinished": true */
  OTP_TRACE_ERROR = 4,       /* "error.type" */
  OTP_TRACE_LOSS_BEFORE = 8, /* "lost before": true */
  OTP_TRACE_INPUTS_CUT = 16, /* "inputs cut": true */
  OTP_TRACE_WORK = 32,       /* it has a row among works */
  OTP_TRACE_TIMED = 64,      /* the time between two timing events of a stream, "stream id" */
  OTP_TRACE_APART = 128,     /* a span in OTLP of a step of profile.step(), or of a whole profile: no event of it */
};

/* Events with a time, and the names of processes and threads (phase M), in the order of the file. */
typedef struct {
  uint64_t capacity;
  uint64_t count;
  int64_t* start;       /* ns since the file's base time */
  int64_t* duration;    /* ns; -1: the event has none */
  uint64_t* id;         /* "External id", "id2" of a pair of phases b and e, or "thread.id" of a span; 0: none */
  uint64_t* span_id;    /* 0: none */
  uint64_t* parent_id;  /* likewise */
  int64_t* sequence_nr; /* -1: none */
  int64_t* inputs;      /* where their words begin (otp_trace_inputs); -1: none */
  uint32_t* name;       /* names: otp_trace_names */
  uint32_t* category;   /* a name; 0: none */
  uint32_t* track;      /* otp_trace_tracks */
  uint32_t* fwd_thread; /* "Fwd thread id", or of a Python call "Python identity"; 0: none */
  uint32_t* text;       /* a name: "error.type", else of calls of modules these; of phase M "name" or "labels"; for sums
                         * only the last; 0: none */
  uint32_t* trace;      /* a name: the trace id of a span, in hexadecimal digits; 0: none */
  uint8_t* phase;       /* 'X', 'B', 'E', 'b', 'e', 'M', or 'P': a chunk of samples */
  uint8_t* flags;       /* otp_trace_flag */
} otp_trace_rows;

/* Rows that are work of a device, or that launched some. */
typedef struct {
  uint64_t capacity;
  uint64_t count;
  uint64_t* row;        /* number of the row among all rows of the file */
  int64_t* correlation; /* -1: none */
  int64_t* stream;      /* -1: none; then it is no work of a device */
  int64_t* bytes;       /* of a copy; -1: none */
  int32_t* device;      /* -1: none */
} otp_trace_works;

/* An attribute of a span of this package, an argument of a collective of torch, or "ProfileChunk" of a chunk of
 * samples. Always samples, and those of steps and of spans that stand for several events, others if it reads for sums.
 */
typedef struct {
  uint64_t row;    /* number of the row among all rows of the file */
  uint64_t event;  /* number of the event, from 1 ... */
  uint64_t offset; /* ... and its offset in the document */
  uint32_t key;    /* a name; "attributes": they are no object, but the value */
  uint32_t value;  /* a name, which is JSON text */
} otp_trace_attribute;

/* Allocations and releases. */
typedef struct {
  uint64_t capacity;
  uint64_t count;
  int64_t* time;
  int64_t* bytes;
  uint64_t* address;
  int64_t* total_allocated; /* -1: none */
  int64_t* total_reserved;
  uint64_t* span; /* the row of a span that moved so much, with those inside it; UINT64_MAX: it is one change */
  uint32_t* track;
  int32_t* device_type;
  int32_t* device_index;
  uint8_t* flags; /* otp_memory_flag */
} otp_trace_memory;

/* Why otp_trace_read returned. */
enum otp_trace_status {
  OTP_TRACE_MORE = 0,       /* it needs the next bytes */
  OTP_TRACE_FULL = 1,       /* an array is full */
  OTP_TRACE_MEMBER = 2,     /* a member of the document that is no list of events */
  OTP_TRACE_END = 3,        /* the document has ended; bytes that are left come after it */
  OTP_TRACE_UNEXPECTED = 4, /* the bytes are not what they must be; nothing more can be read */
  OTP_TRACE_NO_MEMORY = 5,  /* names and inputs would exceed the limit, or there is no memory */
  OTP_TRACE_PROCESS = 6,    /* the next event is of a process that otp_trace_add_process has not added */
};

/* What was expected, where OTP_TRACE_UNEXPECTED. */
enum otp_trace_expected {
  OTP_EXPECTED_DOCUMENT = 1,
  OTP_EXPECTED_MEMBER = 2,
  OTP_EXPECTED_COLON = 3,
  OTP_EXPECTED_VALUE = 4,
  OTP_EXPECTED_ELEMENT = 5,
  OTP_EXPECTED_STRING_END = 6,
  OTP_EXPECTED_VALUE_END = 7,
  OTP_EXPECTED_EVENTS = 8,
};

/* The part of an event that made it unusable. */
enum otp_trace_fault {
  OTP_FAULT_NONE = 0,
  OTP_FAULT_SIZE = 1, /* the event is larger than OTP_TRACE_LARGEST */
  OTP_FAULT_EVENT = 2,
  OTP_FAULT_TS = 3,
  OTP_FAULT_DUR = 4,
  OTP_FAULT_NAME = 5,
  OTP_FAULT_ARGS = 6,
  OTP_FAULT_ID = 7,
  OTP_FAULT_MESSAGE = 8, /* a part of a request, or of a line, is none of OTLP */
  OTP_FAULT_SPAN = 9,    /* a span without the ids that spans have: of metrics, or of logs */
  OTP_FAULT_TIME = 10,
  OTP_FAULT_PHASE = 11,
  OTP_FAULT_NO_ID = 12, /* an event of a flow, or an asynchronous one, without an id */
  OTP_FAULT_JSON = 13,  /* the event is no JSON, or nested too deeply */
};

/* Bytes of the largest event or member that is read; a larger one is passed over. */
#define OTP_TRACE_LARGEST 1048576

typedef struct {
  uint64_t consumed; /* bytes that need not be given again */
  uint64_t place;    /* in the bytes: what was unexpected, or the member's name, without its quotes */
  uint64_t name_size;
  uint64_t value;      /* in the bytes: the member's value */
  uint64_t value_size; /* 0: it is larger than OTP_TRACE_LARGEST, and was passed over */
  uint32_t expected;   /* otp_trace_expected */
  uint32_t is_cut_off; /* the bytes end too early */
} otp_trace_step;

/* Sums over what was read so far. */
typedef struct {
  uint64_t events;       /* elements of lists of events */
  uint64_t unusable;     /* of these, with a part that cannot be read */
  uint64_t first_event;  /* number of the first of them, from 1 ... */
  uint64_t first_offset; /* ... its offset in the document ... */
  uint32_t first_fault;  /* ... and its otp_trace_fault */
  uint32_t is_document;  /* an object, with members */
  uint64_t without_duration;
  uint64_t dropped;       /* events that spans say were dropped */
  uint64_t has_flops;     /* spans have numbers of floating-point operations */
  uint64_t is_live;       /* steps have kinds: of a stream or of an instrumentation */
  uint64_t by_phase[256]; /* events that are no rows, by the first byte of their phase; 0: without one */
} otp_trace_figures;

/* A reader; `limit`: bytes of names and inputs. Null: no memory. */
otp_trace_reader* otp_trace_open(uint64_t limit);
void otp_trace_close(otp_trace_reader* reader);
/* Reads for sums only, from here on: the attributes of spans with these keys, one a line, and nothing that only single
 * operators have: their ids, sequence numbers, inputs and changes of memory. Returns 0, or -1: no memory. */
int otp_trace_read_for_sums(otp_trace_reader* reader, const char* keys);

/* Arrays that rows are appended to have room for so many at least. */
#define OTP_TRACE_ROWS_PER_SPAN 4

/* Reads on: `data` begins with what the last call did not consume. `is_last`: nothing comes after it. Appends rows to
 * the arrays. Returns an otp_trace_status. After OTP_TRACE_MEMBER the member is consumed. */
int otp_trace_read(otp_trace_reader* reader, const uint8_t* data, uint64_t size, int is_last, otp_trace_rows* rows,
                   otp_trace_works* works, otp_trace_memory* memory, otp_trace_step* step);

/* Reads a serialized ExportTraceServiceRequest, or a line of OTLP/JSON, on from `step->consumed`, 0 for its begin.
 * `offset`: where it begins in the file. Appends a row per span; spans that cannot be read are counted. Returns
 * OTP_TRACE_END, or OTP_TRACE_FULL, OTP_TRACE_NO_MEMORY or OTP_TRACE_MEMBER: then `value` is a resource that none had
 * before, whose tracks have the process "resource 0", then "resource 1" and so on. A reader reads one format. */
int otp_trace_read_request(otp_trace_reader* reader, const uint8_t* request, uint64_t size, int is_json,
                           uint64_t offset, otp_trace_rows* rows, otp_trace_works* works, otp_trace_memory* memory,
                           otp_trace_step* step);

/* A correction of times in ns: less `offset`, and `drift` per ns since `origin`. */
typedef struct {
  int64_t offset;
  int64_t origin;
  double drift;
} otp_clock_line;

/* Ids of a rank: those of a file from 0 on that are smaller are moved by the rank's first id, others are hashed. */
#define OTP_TRACE_IDS 1099511627776
/* Most processes of a file; further ones share the last one. */
#define OTP_TRACE_MOST_PROCESSES 1000

/* What a file of a rank becomes in the merged document. */
typedef struct {
  int64_t base;        /* Unix ns from which the times of the file count ... */
  int64_t merged_base; /* ... and those of the document */
  const otp_clock_line* lines;
  uint64_t line_count;
  uint64_t first_id;
  int64_t pid; /* of the process that is the rank */
} otp_trace_target;

/* Begins a file whose events otp_trace_read appends to the output, each after a comma and a line feed, without arrays.
 * Times, process ids, and ids of flows and asynchronous events are changed; names of processes are left out, as is
 * metadata of a track that came before, in any file; everything else stays, with texts in UTF-8, and numbers that JSON
 * or viewers do not have as texts. Returns 0, or -1: no memory. */
int otp_trace_rewrite(otp_trace_reader* reader, const otp_trace_target* target);
/* Adds a process of the file, by its JSON text (empty: null), and appends the `events` that describe it to the output.
 * After OTP_TRACE_PROCESS the text is `value`. Returns 0, or -1: no memory. */
int otp_trace_add_process(otp_trace_reader* reader, const uint8_t* process, uint64_t size, int64_t pid,
                          const uint8_t* events, uint64_t events_size);
/* The caller takes bytes out by setting the size to 0. */
otp_buffer* otp_trace_output(otp_trace_reader* reader);

/* Valid until the reader reads on or is closed. Names: index 0 is the empty one. */
const otp_trace_figures* otp_trace_get_figures(const otp_trace_reader* reader);
otp_names otp_trace_names(const otp_trace_reader* reader);
/* Process and thread of each track as JSON text: two names each. */
const uint32_t* otp_trace_tracks(const otp_trace_reader* reader, uint64_t* count);
/* Attributes of spans and collectives. */
const otp_trace_attribute* otp_trace_attributes(const otp_trace_reader* reader, uint64_t* count);
/* Inputs as words (otp_input_kind). */
const int64_t* otp_trace_inputs(const otp_trace_reader* reader, uint64_t* count);

/* Gives each row of phase B or b the duration up to its end (phase E of its track, or e of its id), or leaves -1.
 * Returns the number of ends without a begin, or -1: no memory. */
int64_t otp_trace_pair(const otp_trace_rows* rows);

/* For rows by track, start, and of those the longer first: the row of the innermost one that is open when each begins;
 * -1 for none, and where `apart` is not 0: these contain none either. `whole` is not 0: and that ends no earlier. */
void otp_trace_nest(uint64_t count, const uint32_t* track, const int64_t* start, const int64_t* end,
                    const uint8_t* apart, int whole, int32_t* parent);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_TRACE_FILES_H_ */
