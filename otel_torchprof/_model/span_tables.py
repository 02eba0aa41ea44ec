"""Selects rows of a span table, and joins several span tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Names
from otel_torchprof._process.give_way import give_way
from otel_torchprof._process.heap import own_memory

from .frames import distinct
from .span_table import COLUMN_TYPES, AttributeColumn, AttributeType, SpanTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Array = npt.NDArray[Any]

_ALIGNMENT = 64
"""Bytes to which the arrays of a packed table are aligned: a cache line."""

_COLUMNS = ("start", "end", "span_id", "parent_span_id", "error", "row", "step")
_OPTIONAL = ("parent_is_remote", "dropped_attributes", "dropped_links")


def taken(table: SpanTable, rows: Array) -> SpanTable:
    """The spans at ``rows``, each once and in this order, with their attributes and links.

    Shares nothing with ``table``: names, traces, states and attributes that none of the spans has are not in it, so the memory
    that it holds is that of its spans. Costs a few numpy passes over the rows per attribute. Thread-safe.
    """
    rows = np.asarray(rows, dtype=np.int64)
    attributes = picked_attributes(table, rows)
    name, attributes, names = _with_own_names(table.name[rows], attributes, table.names)
    traces, trace = distinct(table.trace[rows])
    states = tuple(table.trace_states[i] for i in traces.tolist()) if table.trace_states else ()
    own: dict[str, Any] = {key: getattr(table, key)[rows] for key in _COLUMNS}
    own |= {
        key: column[rows] for key in _OPTIONAL if (column := getattr(table, key)) is not None and column[rows].any()
    }
    return SpanTable(
        name=name,
        trace=trace,
        trace_ids=table.trace_ids[traces],
        links=_picked_links(table.links, rows, len(table)),
        names=names,
        attributes=tuple(attributes),
        trace_states=states if any(states) else (),
        **own,
    )


def picked(table: SpanTable, rows: Array) -> SpanTable:
    """As :func:`taken`, but keeps all traces and names, for tables that are soon freed. Copies nothing if ``rows`` are most of the table."""
    # Views keep the whole table alive: only of most of it, or the queue would hold far more than it counts.
    if 2 * len(rows) >= len(table) > 0 and _is_run(rows):
        return _without_ends(table, int(rows[0]), int(rows[-1]) + 1)
    own = {key: getattr(table, key)[rows] for key in ("name", "trace", *_COLUMNS)}
    own |= {key: column[rows] for key in _OPTIONAL if (column := getattr(table, key)) is not None}
    links = _picked_links(table.links, rows, len(table))
    return replace(table, links=links, attributes=tuple(picked_attributes(table, rows)), **own)


def without_rows(table: SpanTable, rows: Array) -> SpanTable:
    """As :func:`picked` for all rows but these, which rise; the table itself without any. Where these are its ends, costs nothing per span."""
    if not len(rows):
        return table
    before, staying = rows - np.arange(len(rows)), len(table) - len(rows)
    if 2 * staying >= len(table) and ((before == 0) | (before == staying)).all():
        begin = int((before == 0).sum())
        return _without_ends(table, begin, begin + staying)
    stays = np.ones(len(table), dtype=np.bool_)
    stays[rows] = False
    return picked(table, np.flatnonzero(stays))


def _is_run(rows: Array) -> bool:
    """Whether there are rows, and they follow each other."""
    return len(rows) > 0 and bool(rows[-1] - rows[0] + 1 == len(rows) and (rows[1:] > rows[:-1]).all())


def _without_ends(table: SpanTable, begin: int, end: int) -> SpanTable:
    """Returns the spans from row ``begin`` up to ``end``, as views."""
    own = {key: getattr(table, key)[begin:end] for key in ("name", "trace", *_COLUMNS)}
    own |= {key: column[begin:end] for key in _OPTIONAL if (column := getattr(table, key)) is not None}
    attributes = tuple(_attributes_between(table, begin, end))
    return replace(table, links=_links_between(table.links, begin, end), attributes=attributes, **own)


def _links_between(links: Array, begin: int, end: int) -> Array:
    """Returns the links of the spans from row ``begin`` up to ``end``: a view if the rows begin with the first."""
    first, last = _between(links["row"], begin, end)
    links = links[first:last]
    if begin and len(links):
        links = links.copy()
        links["row"] -= begin
    return links


def _attributes_between(table: SpanTable, begin: int, end: int) -> Iterator[AttributeColumn]:
    """Yields the attributes that any span from row ``begin`` up to ``end`` has, as views."""
    for column in table.attributes:
        first, last, rows = begin, end, column.rows
        if rows is not None:
            first, last = _between(rows, begin, end)
            own_rows = rows[first:last]
            rows = None if last - first == end - begin else own_rows - begin if begin else own_rows
        if last > first:
            yield AttributeColumn(column.key, column.type, column.values[first:last], rows)


def _between(rows: Array, begin: int, end: int) -> tuple[int, int]:
    """Returns the bounds of the rising rows from ``begin`` up to ``end``."""
    if not len(rows) or rows.item(-1) < begin or end <= rows.item(0):
        return 0, 0
    if begin <= rows.item(0) and rows.item(-1) < end:
        return 0, len(rows)
    # With bounds of another type, numpy would convert all rows.
    first, last = rows.searchsorted(np.array((begin, end), dtype=rows.dtype)).tolist()
    return first, last


def narrowed(table: SpanTable) -> SpanTable:
    """The same spans, without unused names if the table has more names than its spans can use."""
    texts = sum(column.type == AttributeType.NAME for column in table.attributes)
    if len(table.names) <= 1 + len(table) * (1 + texts):
        return table
    name, attributes, names = _with_own_names(table.name, list(table.attributes), table.names)
    return replace(table, name=name, attributes=tuple(attributes), names=names)


def packed(table: SpanTable) -> SpanTable:
    """Copies all arrays of a table into one block of memory, which is returned to the system when it is freed.

    For buffered spans: separate arrays fragment the heap (measured: 100 MiB of unusable free memory beside 256 MiB), and views of a
    drain's columns keep all of these alive. Costs about 20 ns per span.
    """
    arrays = table.arrays()
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    block = own_memory(sum(sizes))
    copies: dict[int, Array] = {}
    for array, begin in zip(arrays, _offsets(sizes), strict=True):
        copy = block[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies[id(array)] = copy
    own: dict[str, Any] = {key: copies[id(array)] for key, array in vars(table).items() if id(array) in copies}
    attributes = [
        replace(c, values=copies[id(c.values)], rows=None if c.rows is None else copies[id(c.rows)])
        for c in table.attributes
    ]
    return replace(table, **own, attributes=tuple(attributes))


def joined_tables(tables: Sequence[SpanTable]) -> SpanTable:
    """The spans of all tables, one table after the other; the table itself where there is one.

    Attributes are matched by key and type, equal names become one. Costs a copy of everything and, where the tables do not
    share their names, some 0.3 µs per name. Thread-safe.

    Raises:
        ValueError: there are no tables.
    """
    if not tables:
        raise ValueError("no tables of spans to join; at least one is needed")
    if len(tables) == 1:
        return tables[0]
    if any(table.names is not tables[0].names for table in tables):
        tables = [narrowed(table) for table in tables]
    names, places = _one_list_of_names([table.names for table in tables])
    first_trace = _offsets([len(table.trace_ids) for table in tables])
    keys = dict.fromkeys((column.key, column.type) for table in tables for column in table.attributes)
    has_states = any(table.trace_states for table in tables)
    plain: dict[str, Any] = {key: np.concatenate([getattr(table, key) for table in tables]) for key in _COLUMNS}
    plain |= {key: _joined_optional(tables, key) for key in _OPTIONAL}
    return SpanTable(
        name=np.concatenate([_moved(table.name, place) for table, place in zip(tables, places, strict=True)]),
        trace=np.concatenate([t.trace + np.uint32(first) for t, first in zip(tables, first_trace, strict=True)]),
        trace_ids=np.concatenate([table.trace_ids for table in tables]),
        links=_joined_links(tables),
        names=names,
        attributes=tuple(_joined_column(key, kind, tables, places) for key, kind in keys),
        trace_states=tuple(chain.from_iterable(map(_states, tables))) if has_states else (),
        **plain,
    )


def picked_attributes(table: SpanTable, rows: Array) -> list[AttributeColumn]:
    """The attributes that any of the rows has, for the rows in their order, each once."""
    if _is_run(rows):
        run = _attributes_between(table, int(rows[0]), int(rows[-1]) + 1)
        return [AttributeColumn(c.key, c.type, c.values.copy(), None if c.rows is None else c.rows.copy()) for c in run]
    if not len(rows):
        return []
    find = _finder(rows, len(table))
    picked_columns = []
    for column in table.attributes:
        if column.rows is None:
            picked_columns.append(replace(column, values=column.values[rows]))
            continue
        here, now = find(column.rows)
        if not here.size:
            continue
        picked_columns.append(replace(column, values=column.values[here], rows=None if len(now) == len(rows) else now))
    return picked_columns


_FEW = 16
"""Rows of a table are few if it has more than so many times as many: they are searched for, for some 100 ns each."""


def _finder(rows: Array, count: int) -> Callable[[Array], tuple[Array, Array]]:
    """Returns a function from a rising column of rows, of ``count``, to the positions of those that are among ``rows`` and their places there.

    Both are in the order of ``rows``. A row may be in the column more than once.
    """
    if _FEW * len(rows) < count:
        return lambda column: _searched(column, rows.astype(column.dtype))
    place = np.full(count, -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))

    def found(column: Array) -> tuple[Array, Array]:
        now = place[column]
        here = np.flatnonzero(now >= 0)
        now = now[here]
        if (now[1:] < now[:-1]).any():  # the order changes
            order = np.argsort(now, kind="stable")
            here, now = here[order], now[order]
        return here, now

    return found


def _searched(column: Array, rows: Array) -> tuple[Array, Array]:
    """As :func:`_finder`, at a cost that does not depend on the length of the column: a drain is picked apart step by step."""
    first, end = np.searchsorted(column, rows), np.searchsorted(column, rows, side="right")
    here = np.flatnonzero(end > first)
    first, counts = first[here], (end - first)[here]
    if (counts == 1).all():
        return first, here
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum()), np.repeat(here, counts)


def _picked_links(links: Array, rows: Array, count: int) -> Array:
    if not len(links):
        return links[:0].copy()
    if _is_run(rows):
        return _links_between(links, int(rows[0]), int(rows[-1]) + 1).copy()
    here, now = _finder(rows, count)(np.ascontiguousarray(links["row"]))
    picked_links = links[here]
    picked_links["row"] = now
    return picked_links


def _with_own_names(
    name: Array, attributes: list[AttributeColumn], names: Names
) -> tuple[Array, list[AttributeColumn], Names]:
    """Only the names that are used, the empty one before them, and what points to them."""
    texts = [column for column in attributes if column.type == AttributeType.NAME]
    pointing = [np.zeros(1, np.uint32), name, *(text.values for text in texts)]
    used, place = distinct(np.concatenate(pointing))
    ends = [*accumulate(map(len, pointing))]
    name, *values = (place[begin:end].astype(np.uint32) for begin, end in pairwise(ends))
    moved = iter(values)
    attributes = [
        AttributeColumn(c.key, c.type, next(moved), c.rows) if c.type == AttributeType.NAME else c for c in attributes
    ]
    return name, attributes, _chosen_names(names, used)


def _chosen_names(names: Names, used: Array) -> Names:
    """The names at these rising indices. Decodes nothing."""
    if not len(names):
        return Names.of([""])
    if names.added is not None:
        split = int(np.searchsorted(used, len(names.ends)))
        own = _chosen_names(Names(names.data, names.ends), used[:split])
        if split == len(used):
            return own
        return own.followed_by(_chosen_names(names.added, used[split:] - len(names.ends))).flat()
    ends = names.ends[used].astype(np.int64)
    starts = np.where(used > 0, names.ends[used - 1].astype(np.int64), 0)
    sizes = ends - starts
    own_ends = np.cumsum(sizes)
    at = np.arange(own_ends[-1]) + np.repeat(starts - (own_ends - sizes), sizes)
    return Names(names.data[at], own_ends.astype(np.uint64))


def _one_list_of_names(lists: Sequence[Names]) -> tuple[Names, list[Array | None]]:
    """All names, and for each list the new indices of its names; None if they are unchanged."""
    if all(names is lists[0] for names in lists):
        return lists[0], [None] * len(lists)
    index: dict[bytes, int] = {b"": 0}
    places: list[Array | None] = []
    for names in map(Names.flat, lists):
        data, ends = names.data.tobytes(), names.ends.tolist()
        indices = [index.setdefault(data[a:b], len(index)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        places.append(np.array(indices, dtype=np.uint32))
    return Names.of(list(index)), places


def _moved(values: Array, place: Array | None) -> Array:
    return values if place is None else place[values]


def _offsets(sizes: list[int]) -> list[int]:
    return [0, *np.cumsum(sizes).tolist()][:-1]


def _states(table: SpanTable) -> tuple[str, ...]:
    return table.trace_states or ("",) * len(table.trace_ids)


def _joined_links(tables: Sequence[SpanTable]) -> Array:
    links = np.concatenate([table.links for table in tables])
    first = np.array(_offsets([len(table) for table in tables]), dtype=np.uint64)
    links["row"] += np.repeat(first, [len(table.links) for table in tables])
    return links


def _joined_column(
    key: str, kind: AttributeType, tables: Sequence[SpanTable], places: Sequence[Array | None]
) -> AttributeColumn:
    values: list[Array] = []
    rows: list[Array] = []
    first = _offsets([len(table) for table in tables])
    for table, place, begin in zip(tables, places, first, strict=True):
        give_way()
        column = next((c for c in table.attributes if (c.key, c.type) == (key, kind)), None)
        if column is not None:
            values.append(_moved(column.values, place) if kind == AttributeType.NAME else column.values)
            rows.append(begin + (np.arange(len(table)) if column.rows is None else column.rows.astype(np.int64)))
    here = np.concatenate(rows)
    return AttributeColumn(key, kind, np.concatenate(values), None if len(here) == sum(map(len, tables)) else here)


def _joined_optional(tables: Sequence[SpanTable], key: str) -> Array | None:
    columns = [getattr(table, key) for table in tables]
    if all(values is None for values in columns):
        return None
    return np.concatenate(
        [
            np.zeros(len(t), COLUMN_TYPES[key]) if values is None else values
            for t, values in zip(tables, columns, strict=True)
        ]
    )
