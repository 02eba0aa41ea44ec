/* Placing the events of a live drain: the trees that they form, and the ids that they get by the trace group of their
 * tree. See encode.h for threads: nothing is kept, any number of threads may call at once.
 *
 * Nodes are the rows of a drain, then the events that are open. Numbers of nodes, groups and threads are within their
 * arrays.
 */
#ifndef OTEL_TORCHPROF_PLACING_H_
#define OTEL_TORCHPROF_PLACING_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Times of nodes; an open event has no end yet. */
typedef struct {
  uint64_t row_count;
  uint64_t open_count;
  const int64_t* start;      /* of rows */
  const int64_t* end;        /* of rows */
  const int64_t* open_start; /* of open events */
} otp_nodes;

/* Lists the rows that take at least `shortest` ns, in order: `rows`. Returns their number. */
uint64_t otp_lasting_rows(const otp_nodes* nodes, int64_t shortest, int64_t* rows);

/* Parents of nodes, and the trees that these make. */
typedef struct {
  otp_nodes nodes;
  const uint32_t* context;      /* of rows; null where contexts were not recorded */
  const uint32_t* open_context; /* of open events; null as `context` */
  const int32_t* enclosing;     /* the node around each node on its thread, or -1 */
  const uint8_t* is_long;       /* nodes that are no parents of what began in another step; null where none is */
  const int64_t* step;          /* in which each node began; null as `is_long` */
  uint64_t known_count;
  const int64_t* known;        /* nodes whose parents an earlier drain decided */
  const int32_t* known_parent; /* these parents, or -1 */
  const int32_t* row_parent;   /* of rows: the row that the drain gives as its parent, or -1 */
  /* Written. */
  int32_t* parent;      /* the nearest node around each node that may be its parent, or -1 */
  int32_t* root;        /* the topmost ancestor of each node, or itself; in a circle of parents one of that */
  int64_t* roots;       /* nodes that are their own root, in order; room for all nodes */
  int64_t* outer;       /* rows whose parent is open, in order; room for all rows */
  uint64_t root_count;  /* of `roots` */
  uint64_t outer_count; /* of `outer` */
  uint64_t moved;       /* rows whose parent among the rows is not that of `row_parent` */
} otp_live_forest;

/* Fills in what is written. A node may be the parent of another that it encloses, with the same context, that began
 * before its end, and, for a long one, in the same step. Linear but for nodes without a parent in deep trees. */
void otp_make_live_forest(otp_live_forest* forest);

/* What a trace group has in a drain. */
typedef struct {
  int64_t start;      /* of the first of its nodes; the largest number where it has none */
  int64_t end;        /* of the last of its rows; `start` where it has none */
  int64_t own_end;    /* of the last of its rows on the loop's threads; 0 where it has none */
  int64_t child_time; /* durations of its top-level rows */
  int64_t longest;    /* of these durations */
  int64_t events;     /* rows */
} otp_group_sums;

/* Nodes with their trees, and trace groups. */
typedef struct {
  otp_nodes nodes;
  const uint32_t* thread;       /* of rows */
  const uint8_t* is_loops;      /* threads of the training loop */
  const int32_t* parent;        /* as in the forest */
  const int32_t* root;          /* as in the forest */
  const uint64_t* span_id;      /* of rows */
  const uint64_t* open_span_id; /* of open events */
  uint64_t beyond_count;
  const int64_t* beyond;         /* roots of trees whose parent ended in an earlier drain */
  const uint64_t* beyond_parent; /* span ids of these parents */
  const uint64_t* beyond_root;   /* span ids of the topmost ancestors of these */
  uint64_t group_count;
  const uint64_t* group_parent; /* span id of the parent of top-level events, or 0 */
  const uint64_t* group_root;   /* span id of the group's synthetic root; 0: the top-level event is its root */
  /* Written. */
  int64_t* group;           /* of nodes; those of roots are given */
  uint64_t* root_id;        /* of nodes: span id of the root of its group */
  uint64_t* parent_span_id; /* of rows */
  uint8_t* is_root;         /* of nodes: whether it has no parent at all */
  otp_group_sums* sums;     /* of groups */
} otp_placing;

/* Fills in what is written. Linear. */
void otp_place(const otp_placing* placing);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_PLACING_H_ */
