"""Reduces steps that are not sampled to their step span, phases, and averages of operators by name.

What one drain brought whole is left out before it becomes spans (:func:`left_out`); what several drains brought waits as spans
(:func:`root_only`).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._model.collectives import collective_name
from otel_torchprof._model.frame_spans import plain_names
from otel_torchprof._model.live_table import with_attributes
from otel_torchprof._model.span_tables import picked, taken
from otel_torchprof._model.span_tree import column_of, rows_of_spans
from otel_torchprof._native.encoders import encode_averages
from otel_torchprof._native.loops import leave_out, positions_of, subtract_from_parents

from .aggregating import collapsed_of, counts_of, phase_names, phases
from .policy import RECORDED, without_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from otel_torchprof._columns.batch import Batch, Names
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import StepSpan

    from .policy import TargetTrace

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

# ---- Start and end of the collectives of a step that is not traced in full ----

COLLECTIVES = "torch.collectives"
MOST_COLLECTIVES_BYTES = 511
_WORKS = ("gloo:", "nccl:")
"""Prefixes of the events of backends on their own threads; the name of the collective follows."""
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _NumberedCall(NamedTuple):
    """A collective that has a number in its group."""

    trace_group: int
    start: int
    name: str
    group: str
    number: int


class _Work(NamedTuple):
    """What a backend did for a collective on a thread of its own."""

    trace_group: int
    start: int
    name: str
    """Of the collective."""
    end: int


def _collective_texts(calls: Iterable[_NumberedCall], works: Iterable[_Work], begins: Sequence[int]) -> list[str]:
    """Returns for each trace group its collectives, as a JSON list of ``[group, number, begin, end]`` of at most 511 bytes.

    Times are in us since the trace group began (``begins``). The end is that of the backend's work with the same name; works have the
    order of the calls. Collectives without a known end are left out; without any, the text is empty.
    """
    ends: dict[tuple[int, str], deque[int]] = defaultdict(deque)
    for work in sorted(works, key=lambda work: work.start):
        ends[work.trace_group, work.name].append(work.end)
    entries: list[list[str]] = [[] for _ in begins]
    left = [MOST_COLLECTIVES_BYTES - len("[]")] * len(begins)
    for call in sorted(calls, key=lambda call: call.start):
        at = call.trace_group
        if left[at] < 0 or not (ends_of_name := ends[at, call.name]):
            continue
        times = ((time - begins[at]) / 1e3 for time in (call.start, ends_of_name.popleft()))
        entry = _JSON([call.group, call.number, *times])
        left[at] -= len(entry.encode("utf-8", "replace")) + len(",")
        if left[at] >= 0:
            entries[at].append(entry)
    return [f"[{','.join(own)}]" if own else "" for own in entries]


def _calls_of_batch(batch: Batch, trace_group: Array) -> Iterator[_NumberedCall]:
    """``trace_group``: of each row, negative for none."""
    columns = batch.collectives
    if columns is None or not len(columns["event"]):
        return
    rows = rows_of(batch, columns["event"])
    known = np.flatnonzero((rows >= 0) & (columns["sequence_nr"] >= 0) & (columns["group"] != 0))
    for at, row in zip(known.tolist(), rows[known].tolist(), strict=True):
        if trace_group[row] >= 0:
            name, group = batch.names[batch["name"][row]], batch.names[columns["group"][at]]
            number = int(columns["sequence_nr"][at])
            yield _NumberedCall(int(trace_group[row]), int(batch["start"][row]), collective_name(name), group, number)


def _calls_of_table(table: SpanTable) -> Iterator[_NumberedCall]:
    columns = [column_of(table, f"torch.collective.{key}") for key in ("name", "group", "sequence_nr")]
    known = [column for column in columns if column is not None]
    if len(known) < len(columns):
        return
    for row in np.flatnonzero(np.logical_and.reduce([present for _, present in known])).tolist():
        name, group, number = (int(values[row]) for values, _ in known)
        yield _NumberedCall(0, int(table.start[row]), table.names[name], table.names[group], number)


def _works(spans: _SummedSpans) -> Iterator[_Work]:
    named = spans.names.matching((), prefixes=_WORKS)
    rows = () if named is None else np.flatnonzero(named[spans.name] & (spans.trace_group >= 0)).tolist()
    for row in rows:
        name, start, end = (int(column[row]) for column in (spans.name, spans.start, spans.end))
        yield _Work(int(spans.trace_group[row]), start, spans.names[name].partition(":")[2], end)


# ---- Averages of what is left out ----

AVERAGES = "torch.averages"
MOST_BYTES = 1_279
"""Bytes of both texts, averages and collectives. A step with its phases then takes 3,000 (measured, docs/ranks.md). Tempo truncates
an attribute at 2,048."""
_LONGEST_NAME = 200


class _SummedSpans(NamedTuple):
    """Events or spans of which some are left out, one entry each."""

    names: Names
    name: Array
    start: Array
    end: Array
    self_time: npt.NDArray[np.int64]
    """ns"""
    trace_group: npt.NDArray[np.int32]
    """Number of the trace group; negative for those of none."""
    left: npt.NDArray[np.int32]
    """The same for those that are left out; -1 for others."""


def _said(
    spans: _SummedSpans,
    calls: Iterable[_NumberedCall],
    begins: Sequence[int],
    recorded: Sequence[int],
    counts: Array | None = None,
) -> list[dict[str, Any]]:
    """Returns the attributes of the root of each trace group.

    ``torch.averages`` is a JSON list of ``{"name", "count", "self"}``, the longest first, ``self`` in seconds, of at most
    1,279 bytes, less those of collectives. Events that ran while the loop waited for data have entries of their own, with ``"phase": "data"``.
    ``torch.collectives`` has the collectives whose end is known.

    ``begins``, ``recorded``: start and number of spans of each trace group. ``counts``: how many events each span stands for; default: 1.
    """
    collectives = _collective_texts(calls, _works(spans), begins)
    columns = {"group": spans.left, "name": spans.name, "start": spans.start, "self_time": spans.self_time}
    columns |= _waits(spans)
    if counts is not None:
        columns["calls"] = counts
    left = np.array([MOST_BYTES - len(text.encode("utf-8", "replace")) for text in collectives], dtype=np.int64)
    averages = encode_averages(columns, left, _LONGEST_NAME, spans.names)
    return [
        {RECORDED: count, AVERAGES: text, **({COLLECTIVES: own} if own else {})}
        for count, text, own in zip(recorded, averages, collectives, strict=True)
    ]


def _waits(spans: _SummedSpans) -> dict[str, Array]:
    """Returns when the loop waited for data, as columns of ``otp_averages``."""
    named = spans.names.matching((f"{PHASE_PREFIX}data",))
    waits = np.empty(0, dtype=np.int64) if named is None else np.flatnonzero(named[spans.name])
    waits = waits[np.argsort(spans.start[waits], kind="stable")]
    return {"wait_start": spans.start[waits], "wait_end": spans.end[waits]}


# ---- Trace groups that one drain brought whole ----


class _Root(NamedTuple):
    """The root of a trace group of which only that, and its phases, are sent."""

    span_id: int
    start: int
    is_event: bool
    """Whether it is an event; else it is synthetic."""


class LeftOut(NamedTuple):
    """The events of such trace groups that do not become spans, and what their roots say of them."""

    events: Mask
    """Of the events of the drain."""
    roots: npt.NDArray[np.uint64]
    """Ids of the roots."""
    said: Sequence[Mapping[str, Any]]
    """Attributes of each root."""
    moved: tuple[Array, Array, Array]
    """Ids of the events to which links of later drains may lead, those of their roots, and of their traces, shape (events, 16)."""
    size: int
    """Number of events."""


class Chosen(NamedTuple):
    """What tail sampling chose of the trace groups that ended in a drain."""

    sampled: Mapping[int, bool] = MappingProxyType({})
    """Of those with a synthetic root, whether they are sampled."""
    left_out: LeftOut | None = None
    """What is left out of trace groups that came whole; its events are no spans of the drain."""


def left_out(placed: Placed, steps: Sequence[StepSpan], keeps: Callable[[int, str, int, int], bool]) -> LeftOut | None:
    """Leaves out the events of whole trace groups; None if there are none. Costs some 20 ns per event, and 5 us per trace group.

    Args:
        placed: the events of a drain.
        steps: synthetic roots of which the events are left out.
        keeps: whether those of a root that is an event stay, from its span id, its name, its duration, ns, and its trace id.
    """
    plain = plain_names(placed.batch)
    numbers = {step.span_id: number for number, step in enumerate(steps)}
    of_group = [
        numbers.get(group.step.span_id, -1) if group.is_traced and group.step is not None else -1
        for group in placed.trace_groups
    ]
    trace_group = np.array(of_group, dtype=np.int32)[placed.trace_group]
    roots = [_Root(step.span_id, step.start, is_event=False) for step in steps]
    own = np.array([group.step is None and group.is_traced for group in placed.trace_groups], dtype=np.bool_)
    if own.any():
        events = np.flatnonzero(own[placed.trace_group])
        tops = _left_tops(placed, events, plain, keeps)
        number = positions_of(np.array([root.span_id for root in tops], dtype=np.uint64), placed.root[events])
        trace_group[events] = np.where(number >= 0, number + len(roots), -1)
        roots += tops
    return _left_out(placed, trace_group, roots, plain) if roots else None


def _left_tops(
    placed: Placed, events: Array, plain: tuple[Array, Names], keeps: Callable[[int, str, int, int], bool]
) -> list[_Root]:
    """Returns the top-level events among some, with something below them, whose events are left out."""
    batch, (name, names) = placed.batch, plain
    keys, counts = np.unique(placed.root[events], return_counts=True)
    count_of = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    tops = events[placed.span_id[events] == placed.root[events]]
    columns = (placed.root[tops], name[tops], batch["start"][tops], batch["end"][tops], placed.trace_group[tops])
    return [
        _Root(key, start, is_event=True)
        for key, index, start, end, group in zip(*(column.tolist() for column in columns), strict=True)
        if not keeps(key, names[index], end - start, placed.trace_groups[group].trace.trace_id) and count_of[key] > 1
    ]


def _left_out(placed: Placed, trace_group: Array, roots: Sequence[_Root], plain: tuple[Array, Names]) -> LeftOut:
    """``trace_group``: of each event the index in ``roots``, negative for those that become spans."""
    batch, (name, names) = placed.batch, plain
    columns = {key: batch[key] for key in ("parent", "kind", "sequence_nr", "name")}
    columns |= {"group": trace_group, "span_id": placed.span_id, "root": placed.root}
    columns["is_root"] = placed.is_root.view(np.uint8)
    left = leave_out(columns, phase_names(batch.names), len(roots))
    spans = _SummedSpans(names, name, batch["start"], batch["end"], placed.self_times(), trace_group, left.group)
    recorded = left.recorded + [not root.is_event for root in roots]
    calls = _calls_of_batch(batch, trace_group)
    said = _said(spans, calls, [root.start for root in roots], recorded.tolist())
    ids = np.array([root.span_id for root in roots], dtype=np.uint64)
    traces = b"".join(group.trace.trace_id.to_bytes(16, "big") for group in placed.trace_groups)
    trace_ids = np.frombuffer(traces, np.uint8).reshape(-1, 16)[placed.trace_group[left.linked]]
    moved = placed.span_id[left.linked], placed.root[left.linked], trace_ids
    return LeftOut(left.is_left, ids, said, moved, int(np.count_nonzero(left.is_left)))


def without_left_out(table: SpanTable, left: LeftOut) -> SpanTable:
    """Returns the spans of a drain without those left out, of which the roots have the attributes."""
    stays, events = np.ones(len(table), dtype=np.bool_), np.flatnonzero(table.row >= 0)
    stays[events] = ~left.events[table.row[events]]
    table = table if stays.all() else picked(table, np.flatnonzero(stays))
    return without_hidden(
        with_attributes(table, zip(rows_of_spans(table, left.roots).tolist(), left.said, strict=True))
    )


# ---- A trace group that several drains brought ----


def root_only(table: SpanTable, target: TargetTrace) -> SpanTable:
    """Returns the span of ``target`` and its phases, with what was left out; an empty table if that span is not in it."""
    at = np.flatnonzero(table.span_id == np.uint64(target.span_id))
    if not at.size:
        return taken(table, at)
    stays = table.span_id == np.uint64(target.span_id)
    waiting = np.flatnonzero(phases(table.names, table.name))
    parent = rows_of_spans(table, table.parent_span_id[waiting])
    waiting, parent = waiting[parent >= 0], parent[parent >= 0]
    while (below := stays[parent]).any():
        stays[waiting[below]] = True
        waiting, parent = waiting[~below], parent[~below]
    trace_group, left = np.zeros(len(table), dtype=np.int32), -stays.astype(np.int32)
    spans = _SummedSpans(table.names, table.name, table.start, table.end, _self_times(table), trace_group, left)
    counts = counts_of(table)
    recorded = int((counts + collapsed_of(table)).sum())
    [said] = _said(spans, _calls_of_table(table), [int(table.start[at[0]])], [recorded], counts)
    return without_hidden(taken(with_attributes(table, [(int(at[0]), said)]), np.flatnonzero(stays)))


def _self_times(table: SpanTable) -> npt.NDArray[np.int64]:
    """Self times in ns: the attribute of the spans, else computed from durations and children."""
    duration = table.end - table.start
    own = duration.copy()
    subtract_from_parents(own, rows_of_spans(table, table.parent_span_id), duration)
    reported = column_of(table, "torch.self_duration")
    if reported is not None:
        own = np.where(reported[1], np.rint(reported[0] * 1e9), own).astype(np.int64)
    computed: npt.NDArray[np.int64] = np.maximum(own, 0)
    return computed
