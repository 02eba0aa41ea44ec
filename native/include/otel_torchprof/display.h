/* The events of a batch as torch's profiler displays them, and their sums by name. See encode.h for threads: nothing is
 * kept, any number of threads may call at once.
 */
#ifndef OTEL_TORCHPROF_DISPLAY_H_
#define OTEL_TORCHPROF_DISPLAY_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Events, by row. */
typedef struct {
  uint64_t count;
  const uint32_t* name;  /* the displayed one */
  const int32_t* parent; /* row, or negative for none; no circles */
  const int64_t* start;
  const int64_t* end;
  const uint8_t* kind;
  const uint8_t* flags;
  const uint8_t* hidden; /* whether torch never displays it; null: it displays all */
  /* 1: it stands for several calls, 2: others were collapsed into it; null: none does. Whether a call in one of the
   * same name was the only one in it is not known of these, and they are not merged. */
  const uint8_t* reduced;
} otp_events;

/* Writes by row the parent on display, or -1, and whether the event is left out: hidden, or merged with its parent, of
 * whose name it is. Returns whether that differs from what was recorded, or -1 when memory is short. Linear, but for
 * phases, which look for the phase around them. */
int otp_display_parents(const otp_events* events, int32_t* parent, uint8_t* left_out);

/* Rows of a tree that are on display, at positions of an order of their own, with their times. */
typedef struct {
  uint64_t row_count;
  uint64_t count;        /* on display */
  const int32_t* rows;   /* by position; null: all rows as they stand */
  const int32_t* parent; /* by row: the row of its parent, or negative */
  const int64_t* start;  /* by row */
  const int64_t* end;    /* by row */
  int32_t* position;     /* by row: room to work in; null where `rows` is */
  /* Written, by position. */
  int32_t* display_parent; /* position of the parent, -1 for none, and where that is not on display; null as `rows` */
  int64_t* duration;
  int64_t* self_time; /* the duration less those of its children on display */
  int32_t* children;  /* how many these are */
} otp_display;

/* Fills in what is written. Every row is below `row_count`, and stands at one position at most. */
void otp_display_tree(const otp_display* display);

/* What is summed by name: the events on display. */
typedef struct {
  otp_events events;
  const uint8_t* scope;   /* by row: labels are summed apart from operators of the same name */
  const uint8_t* counted; /* by row: whether it is in the sums; null: all are */
  uint64_t child_count;
  const int64_t* child_row;  /* rows with children that are no rows */
  const int64_t* child_time; /* of each of these, ns: of such children, which is no self time */
  int64_t* room;             /* to work in: two numbers per event */
  uint64_t column_count;
  const int64_t* const* columns; /* by row: what else is summed */
} otp_display_sums;

/* Writes the sums by name, in the order in which torch displays the first event of each: to `sums`, `room` numbers
 * apart, the row of that event, the number of events, their durations, their self times and each of the columns. Of at
 * most `room` names. Returns how many there are, or -1 when memory is short. Some 10 ns an event. */
int64_t otp_display_sums_by_name(const otp_display_sums* events, uint64_t room, int64_t* sums);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_DISPLAY_H_ */
