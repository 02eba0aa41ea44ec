"""Native loops over columns for which numpy has no operation. Thread-safe; without the GIL.

A column is a contiguous array with an entry per row; ``parent`` has the row of each row's parent, -1 for none, and every parent comes
before its children.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._process.heap import Arena

from .ffi import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Array = npt.NDArray[Any]
_C_TYPES = {
    np.dtype(f"{sign}{size}"): ffi.typeof(f"{'u' * (sign == 'u')}int{8 * size}_t[]")
    for sign in "iu"
    for size in (1, 4, 8)
}
_C_TYPES[np.dtype(np.bool_)] = _C_TYPES[np.dtype(np.uint8)]
_C_TYPES[np.dtype(np.float64)] = ffi.typeof("double[]")


def pointer(array: Array) -> Any:
    """The values of a contiguous array of numbers for C, which keep the array alive."""
    return ffi.from_buffer(_C_TYPES[array.dtype], array)  # 0.2 us; a pointer cast from ``array.ctypes.data`` takes 1.4


def _checked(result: int) -> None:
    if result < 0:
        raise MemoryError("no memory left for the events; read fewer at a time")


def add_to_parents(parent: Array, values: Array) -> npt.NDArray[np.int64]:
    """Returns the values plus those of all descendants."""
    total: npt.NDArray[np.int64] = np.array(values, dtype=np.int64)
    above = np.ascontiguousarray(parent, dtype=np.int32)
    lib.otp_add_to_parents(len(total), pointer(above), pointer(total))
    return total


def max_to_parents(parent: Array, values: Array) -> npt.NDArray[np.int64]:
    """The highest value of each row and of all rows below it."""
    highest: npt.NDArray[np.int64] = np.array(values, dtype=np.int64)
    above = np.ascontiguousarray(parent, dtype=np.int32)
    lib.otp_max_to_parents(len(highest), pointer(above), pointer(highest))
    return highest


def subtract_from_parents(totals: npt.NDArray[np.int64], parent: Array, values: Array) -> None:
    """Subtracts each value from the total of its row's parent, in place; from a copy of the durations this makes self times.

    1 ns per row, ten times as fast as ``np.subtract.at`` with its copies of the rows that have a parent (a million rows).
    """
    parent, values = np.ascontiguousarray(parent, dtype=np.int32), np.ascontiguousarray(values, dtype=np.int64)
    lib.otp_subtract_from_parents(len(parent), pointer(parent), pointer(values), pointer(totals))


def self_times(parent: Array, start: Array, end: Array, room: Arena | None = None) -> npt.NDArray[np.int64]:
    """The self time of each row: its duration without its children, ns."""
    own_times = np.empty(len(parent), np.int64) if room is None else room.empty(len(parent), np.int64)
    parent = np.ascontiguousarray(parent, dtype=np.int32)
    start, end = np.ascontiguousarray(start, dtype=np.int64), np.ascontiguousarray(end, dtype=np.int64)
    lib.otp_self_times(len(own_times), *map(pointer, (parent, start, end, own_times)))
    return own_times


def display_parents(events: Mapping[str, Array]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]] | None:
    """Returns by row the parent on display, -1 for none, and a mask of events that are not on display; None if all are, as recorded.

    ``events``: the arrays of ``otp_events`` in ``display.h``, by name. Some 5 ns per row.

    Raises:
        MemoryError: memory is short.
    """
    count = len(events["parent"])
    parent, left_out = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.bool_)
    differs = lib.otp_display_parents(ffi.new("otp_events *", _events(events)), pointer(parent), pointer(left_out))
    _checked(differs)
    return (parent, left_out) if differs else None


def sums_by_name(
    events: Mapping[str, Array], more: Mapping[str, Array], amounts: Sequence[Array], names: int
) -> npt.NDArray[np.int64]:
    """Returns the columns that ``otp_display_sums_by_name`` in ``display.h`` writes. Some 10 ns per event.

    Args:
        events: the arrays of ``otp_events``, by name.
        more: other arrays of ``otp_display_sums``, by name, except room to work in.
        amounts: int64 columns to be summed.
        names: number of names.

    Raises:
        MemoryError: memory is short.
    """
    columns = [pointer(column) for column in amounts]
    addresses = ffi.new("int64_t *[]", columns)
    native = ffi.new("otp_display_sums *", {name: pointer(column) for name, column in more.items()})
    native.events, native.columns, native.column_count = _events(events), addresses, len(columns)
    native.child_count = len(more.get("child_row", ()))
    count = 2 * len(events["parent"])
    room = Arena(8 * count).empty(count, np.int64)
    native.room = pointer(room)
    sums = np.empty((4 + len(columns), min(len(events["parent"]), 2 * names)), dtype=np.int64)
    count = lib.otp_display_sums_by_name(native, sums.shape[1], pointer(sums))
    _checked(count)
    return sums[:, :count]


def _events(columns: Mapping[str, Array]) -> dict[str, Any]:
    return {"count": len(columns["parent"]), **{name: pointer(column) for name, column in columns.items()}}


class Display(NamedTuple):
    """Rows of a tree that are on display, by position."""

    parent: npt.NDArray[np.int32]
    """Position of the parent, -1 for none."""
    duration: npt.NDArray[np.int64]
    self_time: npt.NDArray[np.int64]
    """Returns durations minus those of the direct children."""
    children: npt.NDArray[np.int32]
    """Number of these children."""


def display_tree(rows: Array | None, parent: Array, start: Array, end: Array, room: Arena) -> Display:
    """The tree of the given rows; for None of all rows, with unchanged parents.

    ``parent``, ``start`` and ``end`` are by row.
    """
    count = len(parent) if rows is None else len(rows)
    above = np.ascontiguousarray(parent, dtype=np.int32)
    start, end = np.ascontiguousarray(start, dtype=np.int64), np.ascontiguousarray(end, dtype=np.int64)
    made = Display(above, room.empty(count, np.int64), room.empty(count, np.int64), room.empty(count, np.int32))
    columns: dict[str, Array] = {"parent": above, "start": start, "end": end, "duration": made.duration}
    columns |= {"self_time": made.self_time, "children": made.children}
    if rows is not None:
        made = made._replace(parent=room.empty(count, np.int32))
        columns |= {"rows": rows, "position": np.empty(len(parent), np.int32), "display_parent": made.parent}
    native = ffi.new("otp_display *", {name: pointer(column) for name, column in columns.items()})
    native.row_count, native.count = len(parent), count
    lib.otp_display_tree(native)
    return made


def event_span_ids(ids: Array, key: int, room: Arena | None = None) -> npt.NDArray[np.uint64]:
    """The span ids of events, see :func:`~otel_torchprof._model.span_table.event_span_ids`."""
    ids = np.ascontiguousarray(ids, dtype=np.uint64)
    span_ids = (room or Arena(0)).empty(len(ids), np.uint64)
    lib.otp_event_span_ids(len(ids), pointer(ids), key, pointer(span_ids))
    return span_ids


def positions_of(ids: Array, requested: Array) -> npt.NDArray[np.int64]:
    """For each requested id, its first position in ``ids``; -1 if it is missing, and for 0. Costs some ns per id.

    Raises:
        MemoryError: memory is short.
    """
    positions = np.empty(len(requested), dtype=np.int64)
    ids, requested = np.ascontiguousarray(ids, dtype=np.uint64), np.ascontiguousarray(requested, dtype=np.uint64)
    _checked(lib.otp_positions_of(pointer(ids), len(ids), pointer(requested), len(requested), pointer(positions)))
    return positions


class LeftOutRows(NamedTuple):
    """What is left out of trace groups, see ``otp_left_out`` in ``model.h``; one entry per row."""

    group: npt.NDArray[np.int32]
    """Trace group of what is left out, else -1."""
    is_left: npt.NDArray[np.bool_]
    recorded: npt.NDArray[np.int64]
    """Rows of each trace group, left out or not."""
    linked: npt.NDArray[np.uint32]
    """The rows of those to which a backward function may link."""


def leave_out(columns: Mapping[str, Array], is_phase: npt.NDArray[np.bool_] | None, groups: int) -> LeftOutRows:
    """Leaves the events of ``groups`` trace groups out. Costs some ns per row.

    ``columns``: of ``otp_left_out``, with its types. ``is_phase``: by name; None if none is.
    """
    count = len(columns["group"])
    made = LeftOutRows(
        np.empty(count, np.int32), np.empty(count, np.bool_), np.zeros(groups, np.int64), np.empty(count, np.uint32)
    )
    columns = {**columns, "left_group": made.group, "is_left": made.is_left.view(np.uint8)}
    columns |= {"recorded": made.recorded, "linked": made.linked}
    if is_phase is not None:
        columns["is_phase"] = is_phase.view(np.uint8)
    native = ffi.new("otp_left_out *", {name: pointer(np.ascontiguousarray(own)) for name, own in columns.items()})
    native.count = count
    return made._replace(linked=made.linked[: lib.otp_leave_out(native)])


def top_level(parent: Array, flags: Array) -> npt.NDArray[np.int32]:
    """For each row, the topmost of itself and its ancestors that has a flag; see ``otp_top_level`` in ``model.h``."""
    topmost = np.empty(len(parent), dtype=np.int32)
    parent, flags = np.ascontiguousarray(parent, dtype=np.int32), np.ascontiguousarray(flags, dtype=np.uint8)
    lib.otp_top_level(len(parent), pointer(parent), pointer(flags), pointer(topmost))
    return topmost


def roots_of(parent: Array) -> npt.NDArray[np.int64]:
    """The topmost ancestor of each node, or itself; ``parent``: any node, negative for none. Costs some ns per node."""
    roots = np.empty(len(parent), dtype=np.int64)
    lib.otp_roots(len(parent), pointer(np.ascontiguousarray(parent, dtype=np.int64)), pointer(roots))
    return roots


def add_to_groups(group: Array, begin: int, first: Array, count: Array, sums: Sequence[tuple[Array, Array]]) -> None:
    """Adds rows to their groups, in place. Costs 2 ns per row and 1 per column.

    Args:
        group: of each row; numbers within the arrays of groups.
        begin: number of the first row.
        first: the first row of each group, int64; negative if it has none yet.
        count: rows of each group, int64.
        sums: pairs of a column over the rows and its sums by group, int64 both.

    Raises:
        IndexError: a number of ``group`` is not within the arrays of groups.
    """
    group = np.ascontiguousarray(group, dtype=np.uint32)
    if len(group) and int(group.max()) >= len(first):
        raise IndexError(f"group {group.max()} is not one of the {len(first)}")
    columns = [pointer(np.ascontiguousarray(column)) for column, _ in sums]
    native = (ffi.new("int64_t *[]", arrays) for arrays in (columns, [pointer(of_groups) for _, of_groups in sums]))
    lib.otp_add_to_groups(len(group), pointer(group), begin, pointer(first), pointer(count), len(columns), *native)


def event_attributes(
    spans: npt.NDArray[np.uint32],
    rows: Array | None,
    columns: Mapping[str, Array],
    room: Arena,
    front: Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, tuple[Array, npt.NDArray[np.uint32]]]]:
    """The attributes that most events have: values of those that all have, values and spans of the others. Costs 5 ns per span.

    ``spans``: of events. ``rows``: int64, of each the row of its event; None: the rows from 0 on. ``columns``: the other arrays of
    ``otp_event_attributes`` in ``model.h``, which names the attributes too. ``front``: values to be put before those of events.

    Raises:
        IndexError: a row or the number of a thread is out of range.
    """
    count, most, few = len(spans), room.empty, np.empty  # of memory that nobody touches, there are no pages
    of_all: dict[str, Array] = {}
    for name, dtype in (("thread_id", np.int64), ("thread_name", np.uint32), ("self_duration", np.float64)):
        before = front.get(name, ())
        of_all[name] = most(len(before) + count, dtype)
        of_all[name][: len(before)] = before
    of_some = {
        "op_scope": (most(count, np.uint32), most(count, np.uint32)),
        "op_sequence_nr": (few(count, np.int64), few(count, np.uint32)),
        "op_forward_thread": (few(count, np.int64), few(count, np.uint32)),
    }
    arrays = {**columns, "span": spans, **({} if rows is None else {"row": rows})}
    views = {name: pointer(np.ascontiguousarray(array)) for name, array in arrays.items()}
    views |= {name: pointer(values[len(values) - count :]) for name, values in of_all.items()}
    views |= {name: {"values": pointer(values), "spans": pointer(own)} for name, (values, own) in of_some.items()}
    native = ffi.new("otp_event_attributes *", views)
    native.count, native.row_count = count, len(columns["kind"])
    native.scope_count, native.thread_count = len(columns["name_of_scope"]), len(columns["id_of_thread"])
    if lib.otp_make_event_attributes(native) < 0:
        raise IndexError("a span has a row that is not in its batch, or that is of a thread that is not")
    made = {}
    for name, (values, own) in of_some.items():
        has = getattr(native, name).count
        rest_is_freed = 2 * has < count
        made[name] = (values[:has].copy(), own[:has].copy()) if rest_is_freed else (values[:has], own[:has])
    return of_all, made


def numbered_events(columns: Mapping[str, Array]) -> dict[str, Array]:
    """The events that can be in a pair, as the columns of ``otp_numbered_events``, for those of ``otp_flow_columns`` in ``model.h``.

    Costs 1 ns per row.

    Raises:
        IndexError: the number of a thread is out of range.
    """
    most = np.count_nonzero(columns["sequence_nr"] >= 0)  # few: room for all rows would be fresh memory
    made: dict[str, Array] = {name: np.empty(most, np.int64) for name in ("row", "number", "made_on", "start")}
    made["is_backward"] = np.empty(most, np.bool_)
    native = ffi.new("otp_flow_columns *", {name: pointer(np.ascontiguousarray(own)) for name, own in columns.items()})
    native.count, native.thread_count = len(columns["start"]), len(columns["torch_tid"])
    numbered = ffi.new("otp_numbered_events *", {name: pointer(values) for name, values in made.items()})
    if lib.otp_number_events(native, numbered) < 0:
        raise IndexError("an event is of a thread that is not in its batch")
    return {name: values[: numbered.count] for name, values in made.items()}


def paired_events(events: Mapping[str, Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The positions of forward operators and of their backward functions, by the latter; see ``otp_pair_events`` in ``model.h``.

    Raises:
        MemoryError: memory is short.
    """
    native = ffi.new("otp_numbered_events *", {name: pointer(values) for name, values in events.items()})
    native.count = len(events["start"])
    forward, backward = np.empty((2, np.count_nonzero(events["is_backward"])), np.int64)
    pairs = lib.otp_pair_events(native, pointer(forward), pointer(backward))
    _checked(pairs)
    return forward[:pairs], backward[:pairs]


class SpanForest(NamedTuple):
    """Rows as a forest, for any parents; see ``otp_span_tree`` in ``model.h``."""

    above: npt.NDArray[np.int64]
    """Row of the parent; -1 for none and in a cycle of parents. For rows that are too deep, a higher ancestor."""
    depth: npt.NDArray[np.int64]
    family: npt.NDArray[np.int64]
    """Equal for siblings: the row of the parent + 1; as given for rows without a parent."""
    order: npt.NDArray[np.int64]
    """The rows sorted by depth, family and thread, then as in ``by_start``."""


def forest(parent: Array, by_start: Array, thread: Array, family: npt.NDArray[np.int64], *, deepest: int) -> SpanForest:
    """Returns the forest of rows. All arrays are int64; linear in their number.

    Args:
        parent: row of the parent, -1 for none; may be a later row, and cycles are allowed.
        by_start: the rows in the order of siblings.
        thread: number of the thread, from 0.
        family: for rows without a parent a number up to the number of rows, equal for siblings. Written for the others.
        deepest: maximum depth.

    Raises:
        MemoryError: memory is short.
    """
    count = len(parent)
    above, depth, order = np.empty((3, count), dtype=np.int64)
    columns = {"parent": parent, "by_start": by_start, "thread": thread, "family": family}
    columns |= {"above": above, "depth": depth, "order": order}
    native = ffi.new("otp_span_tree *", {name: pointer(column) for name, column in columns.items()})
    native.count, native.thread_count, native.deepest = count, int(thread.max(initial=0)) + 1, deepest
    _checked(lib.otp_make_span_tree(native))
    return SpanForest(above, depth, family, order)


def raise_sums(forest: SpanForest, values: Array) -> npt.NDArray[np.int64]:
    """Returns the values, each plus those of all its descendants in the forest."""
    total: npt.NDArray[np.int64] = np.array(values, dtype=np.int64)
    lib.otp_raise_sums(len(total), pointer(forest.order), pointer(forest.above), pointer(total))
    return total


def raise_highest(forest: SpanForest, values: Array) -> npt.NDArray[np.int64]:
    """Returns for each row the highest of its own value and those of its descendants in the forest."""
    highest: npt.NDArray[np.int64] = np.array(values, dtype=np.int64)
    lib.otp_raise_highest(len(highest), pointer(forest.order), pointer(forest.above), pointer(highest))
    return highest


def device_lanes(order: Array, stream: Array, outer: Array, start: Array, duration: Array) -> npt.NDArray[np.int64]:
    """The lane of each slice of a device, int64 all: see ``otp_device_lanes`` in ``model.h``.

    Raises:
        MemoryError: memory is short.
    """
    lane = np.zeros(len(order), dtype=np.int64)
    _checked(lib.otp_device_lanes(len(order), *map(pointer, (order, stream, outer, start, duration, lane))))
    return lane


def fit_device_slices(outer: Array, line: Array, start: Array, duration: Array) -> None:
    """Puts slices of devices in the order of their line, in place; int64 all: see ``otp_fit_device_slices`` in ``model.h``.

    Raises:
        MemoryError: memory is short.
    """
    lines = int(line.max()) + 1
    _checked(
        lib.otp_fit_device_slices(len(outer), *map(pointer, (outer, line)), lines, *map(pointer, (start, duration)))
    )


def with_crossing(given: npt.NDArray[np.bool_], track: Array, start: Array, end: Array) -> npt.NDArray[np.bool_]:
    """Adds to ``given`` each row that crosses an earlier row of its track that is not in the result. ``track`` is int64.

    Costs a sort.

    Raises:
        MemoryError: memory is short.
    """
    crossing = given.astype(np.uint8)
    start, end = np.ascontiguousarray(start, dtype=np.int64), np.ascontiguousarray(end, dtype=np.int64)
    order = np.lexsort((start, track)).astype(np.int64, copy=False)
    _checked(
        lib.otp_chrome_detach_overlapping(
            len(crossing), pointer(order), pointer(track), pointer(start), pointer(end), pointer(crossing)
        )
    )
    return crossing.astype(np.bool_)


def memory_categories(counts: tuple[int, int], columns: dict[str, Array], of_block: Array, of_state: Array) -> None:
    """Writes the categories of blocks and of their states, uint8, in place, by the flow of data: ``otp_memory_flow`` in ``model.h``.

    ``counts``: of nodes and of blocks. ``columns``: the other arrays of that struct, by name.

    Raises:
        MemoryError: memory is short.
    """
    nodes, blocks = counts
    flow = ffi.new("otp_memory_flow *", {name: pointer(array) for name, array in columns.items()})
    flow.node_count, flow.block_count, flow.state_count = nodes, blocks, len(of_state)
    flow.of_block, flow.of_state = pointer(of_block), pointer(of_state)
    _checked(lib.otp_memory_categories(flow))
