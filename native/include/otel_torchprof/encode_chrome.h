/* Chrome JSON: events or spans as columns in, the elements of a trace's array of events out.
 *
 * The format is "Trace Event Format" (Google, "Duration", "Async", "Flow" events) with the names, categories and
 * arguments that torch's Kineto uses, so that what reads Kineto's traces reads these. See encode.h for ownership and
 * threads.
 */
#ifndef OTEL_TORCHPROF_ENCODE_CHROME_H_
#define OTEL_TORCHPROF_ENCODE_CHROME_H_

#include "otel_torchprof/encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Events as columns of `count` rows (meanings and units: the table in schema.py). Every index must be in range: thread
 * and end_thread in thread_tids, name and error_type in names, flow_row in the rows; not checked here. */
typedef struct {
  uint64_t count;
  const uint64_t* id; /* 0: the row is no recorded event and is written without "External id" and "Ev Idx" */
  const int64_t* start;
  const int64_t* end;
  const int64_t* sequence_nr;
  const uint32_t* name;
  const uint32_t* thread;
  const uint32_t* end_thread;
  const uint32_t* fwd_thread;
  const uint32_t* error_type;
  const uint8_t* kind;
  const uint8_t* scope;
  const uint8_t* flags;
  const uint8_t* detached;    /* 1: written as an async pair (otp_chrome_detach_overlapping) */
  const uint32_t* hierarchy;  /* index in `hierarchies`, 0 for none; or null */
  const int64_t* inputs;      /* offset in input_words, -1 for none; or null */
  const int64_t* input_words; /* format: Batch.inputs in batch.py; what is cut short there is left out */
  uint64_t input_word_count;
  const int64_t* python_id;        /* of a call, among calls; null, as the next two, where there are no calls */
  const int64_t* python_parent_id; /* of the call around it, -1 for none */
  const int64_t* python_module_id; /* of a module's call, among its class; else -1 */
  const int64_t* python_threads;   /* a number for each of thread_tids, for its calls; or null */
  const int64_t* stack;            /* of each row, in the two below, 0 for none; or null */
  const int64_t* stack_outer; /* of each stack, what is around its innermost entry: one with a lower number, or 0 */
  const int64_t* stack_name;  /* of each stack, its innermost entry, in names */
  const uint64_t* flow_row;   /* ends of the arrows, sorted by row */
  const uint64_t* flow_id;    /* the same number at both ends of an arrow, at no other */
  const uint8_t* flow_phase;  /* 's': the arrow starts here, 'f': it finishes here */
  uint64_t flow_count;
  const int64_t* thread_tids;
  otp_names names;       /* already escaped: otp_json_escape_names */
  otp_names hierarchies; /* of modules; escaped likewise */
  int64_t base;          /* Unix ns that "ts" counts from */
  int64_t pid;
} otp_chrome_events;

/* Appends every name to `out` as the inside of a JSON string and writes where each ends (names->count numbers) to
 * `ends`. Invalid UTF-8 becomes U+FFFD, one for each maximal subpart, as Python's decode("utf-8", "replace") does.
 * Returns 0, or -1 when memory is short. */
int otp_json_escape_names(const otp_names* names, otp_buffer* out, uint64_t* ends);

/* Sets detached[row] for each row that overlaps an earlier row of its track without lying inside it: as complete events
 * the two could not be drawn one under the other. Rows that are detached already stand in nobody's way. `order` lists
 * the rows by track, then start, then row. Returns 0, or -1 when memory is short. */
int otp_chrome_detach_overlapping(uint64_t count, const int64_t* order, const int64_t* track, const int64_t* start,
                                  const int64_t* end, uint8_t* detached);

/* Appends the rows [first, ...) to `out`, each event on a line and preceded by a comma, until `out` holds `limit` bytes
 * or more. Returns the next row (count when all are written), or -1 when memory is short; `out` is then to be thrown
 * away. */
int64_t otp_chrome_encode(const otp_chrome_events* events, uint64_t first, uint64_t limit, otp_buffer* out);

/* What was allocated and freed, as columns of `count` rows (MEMORY_COLUMNS in schema.py). Every thread must be in
 * thread_tids; not checked here. */
typedef struct {
  uint64_t count;
  const int64_t* time;
  const int64_t* bytes;
  const uint64_t* address;
  const int64_t* total_allocated;
  const int64_t* total_reserved;
  const uint32_t* thread;
  const int32_t* device_type;
  const int32_t* device_index;
  const uint8_t* flags;
  const int64_t* thread_tids;
  uint64_t first_index; /* "Ev Idx" of the first row */
  int64_t base;         /* Unix ns that "ts" counts from */
  int64_t pid;
} otp_chrome_memory;

/* As otp_chrome_encode: each row becomes an instant event, as Kineto writes it. */
int64_t otp_chrome_encode_memory(const otp_chrome_memory* memory, uint64_t first, uint64_t limit, otp_buffer* out);

/* One quantity over time, as `count` samples, each of which holds until the next. */
typedef struct {
  uint64_t count;
  const int64_t* time;
  const int64_t* bytes;
  const char* name; /* of its track; already escaped */
  uint64_t name_size;
  int64_t base; /* Unix ns that "ts" counts from */
  int64_t pid;
} otp_chrome_counter;

/* As otp_chrome_encode: each sample becomes a counter event. */
int64_t otp_chrome_encode_counter(const otp_chrome_counter* counter, uint64_t first, uint64_t limit, otp_buffer* out);

/* How spans are written: which, where, and the texts that are the same for many. Not checked here: every row must be
 * below spans->count, every category below categories.count. */
typedef struct {
  const uint64_t* rows; /* the spans to write, in this order */
  uint64_t row_count;
  const int64_t* tid;       /* per entry of `rows`: the track */
  const uint32_t* category; /* likewise: index into `categories` */
  const uint8_t* linked;    /* likewise: 0 where the span has no links; or null: any may have */
  const uint8_t* instant;   /* likewise: 1 for a moment on the track instead of a slice; or null: all are slices */
  otp_names arguments;      /* per span: all its arguments as JSON; where there are none, they come from the columns */
  otp_names categories;     /* already escaped (otp_json_escape_names), as are the names */
  otp_names names;          /* of spans->names */
  otp_names keys;           /* of spans->attributes, in their order, with quotes and colon: "thread.id": */
  const uint64_t* arrow_from; /* arrows from span to span, each an index into `rows`; written after the spans */
  const uint64_t* arrow_to;
  uint64_t arrow_count;
  uint64_t first_arrow_id; /* numbers of arrows rise from here */
  int64_t base;            /* Unix ns that "ts" counts from */
  int64_t pid;
} otp_chrome_layout;

/* Appends the items [first, ...) of row_count spans and then arrow_count arrows to `out`, each event on a line and
 * preceded by a comma, until `out` holds `limit` bytes or more. Returns the next item (row_count + arrow_count when all
 * are written), or -1 when memory is short; `out` is then to be thrown away. */
int64_t otp_encode_chrome_spans(const otp_spans* spans, const otp_chrome_layout* layout, uint64_t first, uint64_t limit,
                                otp_buffer* out);

/* For each link of `spans`, where the span that it points to is in `rows` (the first place where it stands), or -1.
 * Takes up to 20 bytes per link for as long as it runs. Returns 0, or -1 when memory is short. */
int otp_chrome_link_targets(const otp_spans* spans, const uint64_t* rows, uint64_t row_count, int64_t* target);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_ENCODE_CHROME_H_ */
