/* Arithmetic on trees of events that numpy cannot do in one pass. See encode.h for threads: nothing is kept, any number
 * of threads may call at once.
 */
#ifndef OTEL_TORCHPROF_MODEL_H_
#define OTEL_TORCHPROF_MODEL_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Adds to each of `count` values those of everything below it in the tree: own amounts in, inclusive ones out.
 * parent[i] is below i, or negative for a root. */
void otp_add_to_parents(uint64_t count, const int32_t* parent, int64_t* values);

/* Likewise makes each of `count` values the largest of its own and those of everything below it. */
void otp_max_to_parents(uint64_t count, const int32_t* parent, int64_t* values);

/* Takes each of `count` values off the total of its parent: durations in, self times out where `totals` began as a
 * copy. parent[i] is the number of a total, or negative for none. */
void otp_subtract_from_parents(uint64_t count, const int32_t* parent, const int64_t* values, int64_t* totals);

/* The time that each of `count` events spent in none of those right below it. parent[i] is below i, or negative for a
 * root. */
void otp_self_times(uint64_t count, const int32_t* parent, const int64_t* start, const int64_t* end, int64_t* self);

/* The span ids of `count` events by their ids, none of which is 0: see event_span_ids in span_table.py. */
void otp_event_span_ids(uint64_t count, const uint64_t* ids, uint64_t key, uint64_t* span_ids);

/* For each of `wanted_count` ids the first of `count` that is the same: its position; -1 where there is none, and for
 * 0. Returns 0, or -1 where there is no memory. */
int otp_positions_of(const uint64_t* ids, uint64_t count, const uint64_t* wanted, uint64_t wanted_count,
                     int64_t* positions);

/* For each row the top-level one of those that are flagged among it and its ancestors, or -1. parent[i] is below i, or
 * negative for a root. */
void otp_top_level(uint64_t count, const int32_t* parent, const uint8_t* flags, int32_t* top_level);

/* Adds up the rows of groups: of each its first row, from `begin` on, where `first` was negative, the number of its
 * rows, and its sum of each of `column_count` columns. Groups are numbers within the arrays. */
void otp_add_to_groups(uint64_t count, const uint32_t* group, int64_t begin, int64_t* first, int64_t* counts,
                       uint64_t column_count, const int64_t* const* columns, int64_t* const* sums);

/* For each node its topmost ancestor, or itself: `roots`. parent[i] is any node, or negative for a root. Linear. A node
 * in a circle of parents, or below one, has one of the circle. */
void otp_roots(uint64_t count, const int64_t* parent, int64_t* roots);

/* Events of trace groups of which only the roots and the phases right below these, or below such phases, become spans.
 * A group is a number from 0. */
typedef struct {
  uint64_t count;
  const int32_t* group;       /* negative: all of it becomes spans */
  const int32_t* parent;      /* below its own row, or negative for none */
  const uint64_t* span_id;    /* of a root that is an event the same as `root` */
  const uint64_t* root;       /* the id of the root of its group */
  const uint8_t* is_root;     /* whether it is a top-level event */
  const uint8_t* kind;        /* otp_event_kind */
  const int64_t* sequence_nr; /* negative: no backward function links to it */
  const uint32_t* name;
  const uint8_t* is_phase; /* by name; null: none is */
  /* Written. */
  int32_t* left_group; /* the group of what is left out, else -1 */
  uint8_t* is_left;
  int64_t* recorded; /* per group: its events, added to what stands there */
  uint32_t* linked;  /* room for `count` rows: those left out to which a backward function may link */
} otp_left_out;

/* Fills in what is written; returns the number of rows in `linked`. */
uint64_t otp_leave_out(const otp_left_out* events);

/* Spans as a forest. Parents may be anything, also circles. */
typedef struct {
  uint64_t count;
  const int64_t* parent;   /* row of each span's parent, or -1 */
  const int64_t* by_start; /* the rows, each once */
  const int64_t* thread;   /* below thread_count */
  uint64_t thread_count;
  int64_t deepest; /* what is deeper hangs under an ancestor above this depth */
  int64_t* family; /* of those without a parent a number up to `count`; written for the others: the row above plus 1 */
  /* Written. */
  int64_t* above; /* as parent, but for what is too deep; -1 in circles and below them */
  int64_t* depth; /* number of ancestors up to `deepest`; 0 where there is none above */
  int64_t* order; /* the rows by depth, then by family, then by thread, then as in by_start */
} otp_span_tree;

/* Fills in what is written. Linear. Returns 0, or -1 when memory is short. */
int otp_make_span_tree(const otp_span_tree* tree);

/* Adds to the value of each row those of all rows below it. `order` and `above`: of such a forest. */
void otp_raise_sums(uint64_t count, const int64_t* order, const int64_t* above, int64_t* values);

/* Likewise makes it the highest of them. */
void otp_raise_highest(uint64_t count, const int64_t* order, const int64_t* above, int64_t* values);

/* The values of an attribute, and the spans that have one each, rising. */
typedef struct {
  uint32_t* spans;
  uint32_t* values; /* names */
  uint64_t count;
} otp_span_names;

typedef struct {
  uint32_t* spans;
  int64_t* values;
  uint64_t count;
} otp_span_numbers;

/* The attributes that most events have, of the spans of events in any order. */
typedef struct {
  uint64_t count;
  const uint32_t* span; /* the number of each, for what is not of all */
  const int64_t* row;   /* of each: the row of its event; null: the rows from 0 on */
  uint64_t row_count;
  const uint8_t* kind;  /* by row, as the columns of a batch: otp_event_kind */
  const uint8_t* scope; /* those from scope_count on have no name */
  const int64_t* sequence_nr;
  const uint32_t* fwd_thread;
  const uint32_t* thread;
  const int64_t* self_time;      /* by row, ns */
  const uint32_t* name_of_scope; /* by scope */
  uint64_t scope_count;
  const uint32_t* name_of_thread; /* by thread; 0: none */
  const int64_t* id_of_thread;    /* by thread */
  uint64_t thread_count;
  /* Written: room for `count` each. */
  int64_t* thread_id;                 /* of all */
  uint32_t* thread_name;              /* of all; 0: none */
  double* self_duration;              /* of all, seconds */
  otp_span_names op_scope;            /* not of modules, calls and phases */
  otp_span_numbers op_sequence_nr;    /* sequence numbers; not of phases, which have other numbers there */
  otp_span_numbers op_forward_thread; /* not of calls and phases */
} otp_event_attributes;

/* Fills in what is written. Returns 0, or -1 if a row or a thread is out of range. */
int otp_make_event_attributes(otp_event_attributes* attributes);

/* What the links of backward functions are made of: the columns of a batch. */
typedef struct {
  uint64_t count;
  const int64_t* sequence_nr; /* negative: none */
  const int64_t* start;
  const uint8_t* kind;  /* otp_event_kind */
  const uint8_t* scope; /* at::RecordScope */
  const uint32_t* thread;
  const uint32_t* fwd_thread; /* of a backward function: torch's id of the forward operator's thread */
  const int64_t* torch_tid;   /* by thread: torch's id; 0: unknown */
  uint64_t thread_count;
} otp_flow_columns;

/* The events with an autograd sequence number, but phases, whose node of the graph was made on a known thread. */
typedef struct {
  uint64_t count;
  int64_t* row;
  int64_t* number;
  int64_t* made_on; /* torch's id of that thread */
  int64_t* start;
  uint8_t* is_backward;
} otp_numbered_events;

/* Fills in such events, in the order of their rows; there is room for as many as have a number. Returns 0, or -1 if a
 * thread is out of range. */
int otp_number_events(const otp_flow_columns* columns, otp_numbered_events* numbered);

/* Pairs each backward function with the last forward operator that has the same number and thread, and does not start
 * after it; of several with one start, the later one. Writes their positions, with room for as many as there are
 * backward functions, in the order of these. Linear, for events in the order of their starts. Returns the number of
 * pairs, or -1 when memory is short. */
int64_t otp_pair_events(const otp_numbered_events* events, int64_t* forward, int64_t* backward);

/* What memory is used for: torch's categories, with its numbers in files. */
enum otp_memory_category {
  OTP_MEMORY_PARAMETER = 0,
  OTP_MEMORY_OPTIMIZER_STATE = 1,
  OTP_MEMORY_INPUT = 2,
  OTP_MEMORY_TEMPORARY = 3,
  OTP_MEMORY_ACTIVATION = 4,
  OTP_MEMORY_GRADIENT = 5,
  OTP_MEMORY_AUTOGRAD_DETAIL = 6,
  OTP_MEMORY_UNKNOWN = 7,
};

/* The flow of data through nodes (operators), in the order in which they began. A block of memory has states, one more
 * each time that a node writes to it. An edge is of a node and a block: the state that the node found, and the one that
 * it left. States of a block follow each other. */
typedef struct {
  uint64_t node_count;
  uint64_t block_count;
  uint64_t state_count;
  const int64_t* first_edge;         /* node_count + 1: where each node's edges begin */
  const uint8_t* is_backward;        /* per node: runs in autograd's backward pass */
  const int32_t* block;              /* per edge */
  const int32_t* reads;              /* per edge: state, or -1 */
  const int32_t* writes;             /* per edge: state, or -1 */
  const int32_t* first_state;        /* block_count + 1 */
  const uint8_t* is_optimizer_state; /* per block */
  uint8_t* of_block;                 /* what is known: parameters and gradients, else unknown; parameters are added */
  uint8_t* of_state;                 /* all that is found; written only */
} otp_memory_flow;

/* Tells what every state of every block is used for. Linear in nodes, edges and states. Returns 0, or -1 when memory is
 * short. The edges' numbers must be in range. */
int otp_memory_categories(const otp_memory_flow* flow);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_MODEL_H_ */
