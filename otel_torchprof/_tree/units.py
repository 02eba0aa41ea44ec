"""Which trace each event belongs to, under which span, and by which ids: a batch becomes a table of spans.

A *unit* is what gets a synthetic root span: a step, or the whole recording where there are no steps. Whole trees go to one
unit, so that no span is separated from its parent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Batch, Names
from otel_torchprof._columns.schema import Flag

from .flows import forward_backward
from .forest import outermost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.trace import SpanContext

Array = npt.NDArray[Any]


class Step(NamedTuple):
    """One step of a training or inference loop."""

    number: int
    """Its number, from 0; the attribute ``torch.step`` of its span."""
    start: int
    """When it began, Unix ns."""
    end: int
    """When it ended, Unix ns."""


class AttributeType(enum.IntEnum):
    """How the values of an attribute are read; the numbers are those of ``otp_attribute_type`` in ``encode.h``."""

    INT64 = 1
    DOUBLE = 2
    BOOL = 3
    """One byte each, 0 or 1."""
    NAME = 4
    """Indices into :attr:`SpanTable.names`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of such values."""
        return _DTYPES[self]


_DTYPES: dict[AttributeType, np.dtype[Any]] = {
    AttributeType.INT64: np.dtype(np.int64),
    AttributeType.DOUBLE: np.dtype(np.float64),
    AttributeType.BOOL: np.dtype(np.uint8),
    AttributeType.NAME: np.dtype(np.uint32),
}


@dataclass(frozen=True, eq=False)
class AttributeColumn:
    """One attribute of all spans of a table (``otp_attribute`` in ``encode.h``)."""

    key: str
    type: AttributeType
    values: Array
    """Of ``type.dtype``, one per span."""
    present: npt.NDArray[np.uint8] | None = None
    """1 where the span has the attribute; None where all have it."""


LINK = np.dtype([("row", np.uint64), ("trace_id", np.uint8, 16), ("span_id", ">u8")])
"""``otp_link`` in ``encode.h``. The span that it points to may be in another table."""

STEP_NAME = "torch.step"
"""Name of the spans of steps: one for all, since the number is an attribute."""


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Spans of any number of traces as columns, laid out as ``otp_spans`` in ``encode.h``; one entry per span.

    Immutable, hence safe to share between threads.
    """

    name: npt.NDArray[np.uint32]
    """Index into ``names``."""
    start: npt.NDArray[np.int64]
    """Unix ns."""
    end: npt.NDArray[np.int64]
    """Unix ns."""
    trace: npt.NDArray[np.uint32]
    """Index into ``trace_ids`` and ``trace_states``."""
    trace_ids: npt.NDArray[np.uint8]
    """Shape (traces, 16): big-endian ids; one that occurs with several states has an entry for each."""
    span_id: npt.NDArray[np.uint64]
    parent_span_id: npt.NDArray[np.uint64]
    """0 for the root of a trace."""
    error: npt.NDArray[np.uint8]
    """1 where the status is ERROR."""
    row: npt.NDArray[np.int64]
    """Row in the batch, -1 for a synthetic span."""
    step: npt.NDArray[np.int64]
    """Number of the step that a synthetic span stands for, -1 elsewhere."""
    links: npt.NDArray[Any]
    """Array of :data:`LINK`, by rising row."""
    names: Names
    """The names of the batch, with those of synthetic spans and of attributes added to them."""
    attributes: tuple[AttributeColumn, ...] = ()
    trace_states: tuple[str, ...] = ()
    """The W3C tracestate of each entry of ``trace_ids``, as ``TraceState.to_header`` gives it; empty where all are."""
    parent_is_remote: npt.NDArray[np.uint8] | None = None
    """1 where the parent is a span of another process; None where none is."""
    dropped_attributes: npt.NDArray[np.uint32] | None = None
    """How many more attributes the span would have without a limit; None where none was dropped."""
    dropped_links: npt.NDArray[np.uint32] | None = None
    """Likewise for links."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, those that it shares with the batch or with other tables among them; not the recorder's names."""
        return sum(array.nbytes for array in self.arrays()) + self.names.nbytes

    def arrays(self) -> list[Array]:
        """All that it has, those of attributes too; one that is used twice is there once."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        for column in self.attributes:
            arrays += [column.values] if column.present is None else [column.values, column.present]
        return list({id(array): array for array in arrays}.values())

    def __len__(self) -> int:
        return len(self.name)


def extend_names(names: Names, extra: Sequence[str]) -> Names:
    """The same names at the same indices, with ``extra`` after them."""
    return names.followed_by(Names.of(extra)) if extra else names


def span_table(
    batch: Batch,
    *,
    start: int,
    end: int,
    name: str = "torch.profile",
    steps: Sequence[Step] = (),
    trace_ids: Callable[[], int],
    span_ids: Callable[[], int],
    parent: SpanContext | None = None,
) -> SpanTable:
    """Decides for every event of ``batch`` its trace, its parent and its ids.

    Without ``parent`` each step is a trace of its own: a synthetic root span ``torch.step`` that links to the root of the
    step before it. Without steps there is one trace under a root called ``name`` from ``start`` to ``end`` (Unix ns). With
    ``parent``, a valid SpanContext, all of it joins that trace with its trace state, and the roots are children of ``parent``.

    A tree of events goes where its outermost event began; one that began in no step goes to the nearest. A root's interval
    is widened to hold its events. A backward function links to its forward operator (see
    :func:`~otel_torchprof._tree.flows.forward_backward`).

    ``trace_ids`` and ``span_ids`` have the contract of ``generate_trace_id`` and ``generate_span_id`` of OpenTelemetry's
    IdGenerator. They are called for what is synthetic only, and once for the key of the events' own ids, which therefore do
    not depend on the steps.

    Raises ValueError when ``parent`` is not valid, a time runs backwards or steps overlap. Costs about 30 numpy passes over
    the events and no Python loop. Thread-safe.
    """
    _check(start, end, steps, parent)
    units = tuple(steps) or (Step(-1, start, end),)
    key = span_ids()
    root_ids = np.array([span_ids() for _ in units], dtype=np.uint64)
    ids = event_span_ids(batch["id"], key)
    unit = _units_of(batch, units)
    starts, ends = _intervals(batch, unit, units)
    traces = [parent.trace_id] if parent else [trace_ids() for _ in units]
    unit_trace = np.zeros(len(units), dtype=np.uint32) if parent else np.arange(len(units), dtype=np.uint32)

    # Trace by trace, its root first: the stable sort keeps the order of the batch within a unit. One unit needs no sort.
    alone = len(units) == 1
    order = (
        np.arange(len(batch) + 1) if alone else np.argsort(np.concatenate((np.arange(len(units)), unit)), kind="stable")
    )

    def column(roots: Any, events: Array) -> Array:
        whole = np.concatenate((np.broadcast_to(np.asarray(roots, dtype=events.dtype), len(units)), events))
        return whole if alone else whole[order]

    has_parent = batch["parent"] >= 0
    error = ((batch["error_type"] != 0) | (batch["flags"] & Flag.ERROR != 0)).astype(np.uint8)
    table = SpanTable(
        name=column(len(batch.names), batch["name"]),
        start=column(starts, batch["start"]),
        end=column(ends, batch["end"]),
        trace=column(unit_trace, unit_trace[unit]),
        trace_ids=np.frombuffer(b"".join(i.to_bytes(16, "big") for i in traces), dtype=np.uint8).reshape(-1, 16),
        span_id=column(root_ids, ids),
        parent_span_id=column(
            parent.span_id if parent else 0, np.where(has_parent, ids[batch["parent"]], root_ids[unit])
        ),
        error=column(0, error),
        row=np.maximum(order - len(units), -1),
        step=column([step.number for step in units], np.full(len(batch), -1, dtype=np.int64)),
        links=np.empty(0, dtype=LINK),
        names=extend_names(batch.names, [STEP_NAME if steps else name]),
        trace_states=(parent.trace_state.to_header(),) if parent else (),
        parent_is_remote=column(1, np.zeros(len(batch), dtype=np.uint8)) if parent and parent.is_remote else None,
    )
    return replace(table, links=_links(table, order, len(units), *forward_backward(batch)))


def event_span_ids(ids: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """The span ids of events: distinct for distinct event ids, never 0, and spread over all 64 bits.

    The id times an odd key, through the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
    Generators", 2014; constants: Stafford's mix 13). Each operation is a bijection that maps 0 to 0, and event ids are not 0;
    adding the key or XOR-ing with it instead would map one event to 0, OpenTelemetry's invalid id.
    """
    z = ids * np.uint64(key | 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _check(start: int, end: int, steps: Sequence[Step], parent: SpanContext | None) -> None:
    if parent is not None and not parent.is_valid:
        raise ValueError(f"parent {parent} is not a valid SpanContext; pass None where no span is current")
    if end < start:
        raise ValueError(f"end {end} is before start {start}; both are Unix nanoseconds")
    latest = None
    for step in steps:
        if step.end < step.start:
            raise ValueError(f"step {step.number} ends at {step.end}, before its start {step.start}")
        if latest is not None and step.start < latest.end:
            raise ValueError(
                f"step {step.number} starts at {step.start}, before the end of step {latest.number} at {latest.end}; "
                "steps must follow one another"
            )
        latest = step


def _units_of(batch: Batch, units: Sequence[Step]) -> npt.NDArray[np.int64]:
    """The unit of each event: that of its outermost ancestor."""
    if len(units) == 1:
        return np.zeros(len(batch), dtype=np.int64)
    return _unit_of(batch["start"][outermost(batch["parent"].astype(np.int64))], units)


def _unit_of(began: npt.NDArray[np.int64], units: Sequence[Step]) -> npt.NDArray[np.int64]:
    """The unit in which each time lies, or else the nearest one (the earlier of two equally near)."""
    starts = np.array([unit.start for unit in units], dtype=np.int64)
    ends = np.array([unit.end for unit in units], dtype=np.int64)
    this = np.maximum(np.searchsorted(starts, began, side="right") - 1, 0)
    following = np.minimum(this + 1, len(units) - 1)
    gap = began - ends[this]
    return np.where((gap > 0) & (starts[following] - began < gap), following, this)


def _intervals(batch: Batch, unit: Array, units: Sequence[Step]) -> tuple[Array, Array]:
    """When each unit starts and ends, widened to hold its events."""
    starts = np.array([step.start for step in units], dtype=np.int64)
    ends = np.array([step.end for step in units], dtype=np.int64)
    if len(units) == 1 and len(batch):
        return np.minimum(starts, batch["start"].min()), np.maximum(ends, batch["end"].max())
    np.minimum.at(starts, unit, batch["start"])
    np.maximum.at(ends, unit, batch["end"])
    return starts, ends


def _links(table: SpanTable, order: Array, roots: int, forward: Array, backward: Array) -> Array:
    """The links of roots to the root before, and of the batch's rows ``backward`` to its rows ``forward``."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    linking = np.concatenate((position[1:roots], position[roots + backward]))
    target = np.concatenate((position[: roots - 1], position[roots + forward]))
    links = np.zeros(len(linking), dtype=LINK)
    links["row"], links["span_id"] = linking, table.span_id[target]
    links["trace_id"] = table.trace_ids[table.trace[target]]
    return links[np.argsort(linking, kind="stable")]
