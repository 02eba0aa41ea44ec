"""The one table of span attributes: which field of an event becomes which attribute, of which type, and when it is there.

The native encoder, the ReadableSpan views and the documentation are all made from :data:`ATTRIBUTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Flag, Scope
from otel_torchprof._model.inputs import shape_keys
from otel_torchprof._model.units import AttributeColumn, AttributeType, SpanTable, extend_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]
Values = tuple[Array, Array]
"""The values of an attribute and where they are present, both one per span."""

_TYPE_NAMES = {
    AttributeType.INT64: "int",
    AttributeType.DOUBLE: "double",
    AttributeType.BOOL: "boolean",
    AttributeType.NAME: "string",
}


class Source:
    """What attributes are computed from: a batch, its span table, and strings added on the way."""

    def __init__(self, batch: Batch, table: SpanTable) -> None:
        self.batch = batch
        self.table = table
        self.is_event: npt.NDArray[np.bool_] = table.row >= 0
        self.strings: list[str] = []
        # One root, then the events as they are in the batch: the usual recording without steps. Copying is then a third of
        # the cost of gathering.
        rows = np.arange(-1, len(batch))
        self._in_order = len(batch) > 0 and np.array_equal(table.row, rows)

    def spread(self, per_event: Array) -> Array:
        """One value per row of the batch as one per span; synthetic spans get any of them."""
        if self._in_order:
            return np.concatenate((per_event[:1], per_event))
        return per_event[self.table.row] if len(per_event) else np.zeros(len(self.table), dtype=per_event.dtype)

    def column(self, name: str) -> Array:
        """A column of the batch, one value per span."""
        return self.spread(self.batch[name])

    def add(self, strings: Sequence[str]) -> npt.NDArray[np.uint32]:
        """Adds strings to the names of the table and returns their indices."""
        first = len(self.table.names) + len(self.strings)
        self.strings.extend(strings)
        return np.arange(first, first + len(strings), dtype=np.uint32)


@dataclass(frozen=True)
class Attribute:
    """One line of the table."""

    key: str
    type: AttributeType
    meaning: str
    present: str
    """When it is there, in words."""
    compute: Callable[[Source], Values | None]
    """Its values and where they are present; None when no span can have it."""


def add_attributes(table: SpanTable, batch: Batch) -> SpanTable:
    """The same spans with their attributes; ``table`` is what :func:`span_table` made of ``batch``.

    An attribute that no span has is left out. Costs a few numpy passes per attribute, and about 0.3 µs per event for
    shapes, of which equal ones are formatted once. Thread-safe.
    """
    source = Source(batch, table)
    columns = []
    for attribute in ATTRIBUTES:
        computed = attribute.compute(source)
        if computed is None or not computed[1].any():
            continue
        values, present = computed
        columns.append(
            AttributeColumn(
                attribute.key,
                attribute.type,
                np.ascontiguousarray(values, dtype=attribute.type.dtype),
                None if present.all() else present.view(np.uint8),
            )
        )
    return replace(table, attributes=tuple(columns), names=extend_names(table.names, source.strings))


def attributes_markdown() -> str:
    """The table of attributes for the documentation."""
    lines = ["| Attribute | Type | Present | Meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{a.key}` | {_TYPE_NAMES[a.type]} | {a.present} | {a.meaning} |" for a in ATTRIBUTES]
    return "\n".join(lines) + "\n"


def _scope(source: Source) -> Values:
    names = source.add([scope.name.lower() for scope in Scope])
    scope = source.column("scope")
    known = scope < len(names)
    return names[np.where(known, scope, 0)], known & source.is_event


def _sequence_nr(source: Source) -> Values:
    values = source.column("sequence_nr")
    return values, (values >= 0) & source.is_event


def _forward_thread(source: Source) -> Values:
    values = source.column("fwd_thread")
    return values, (values != 0) & source.is_event


def _input_shapes(source: Source) -> Values | None:
    batch = source.batch
    if batch.inputs is None or "inputs" not in batch.columns:
        return None
    keys, texts = shape_keys(batch)
    return source.spread(source.add(texts)[keys]), source.spread(batch["inputs"] >= 0) & source.is_event


def _self_duration(source: Source) -> Values:
    batch = source.batch
    duration = batch["end"] - batch["start"]
    own = duration.copy()
    child = np.flatnonzero(batch["parent"] >= 0)
    np.subtract.at(own, batch["parent"][child], duration[child])
    return source.spread(np.maximum(own, 0) / 1e9), source.is_event


def _thread_id(source: Source) -> Values:
    idents = np.array([thread.ident for thread in source.batch.threads], dtype=np.int64)
    return idents[source.column("thread")], source.is_event


def _thread_name(source: Source) -> Values:
    threads = source.batch.threads
    named = np.array([bool(thread.name) for thread in threads])
    names = source.add([thread.name for thread in threads])
    thread = source.column("thread")
    return names[thread], named[thread] & source.is_event


def _error_type(source: Source) -> Values:
    values = source.column("error_type")
    return values, (values != 0) & source.is_event


def _flag(flag: Flag) -> Callable[[Source], Values]:
    def compute(source: Source) -> Values:
        return np.ones(len(source.table), dtype=np.uint8), (source.column("flags") & flag != 0) & source.is_event

    return compute


def _step(source: Source) -> Values:
    return source.table.step, source.table.step >= 0


def _dropped_events(source: Source) -> Values | None:
    """On the last root only, so that a sum over roots is right; a profile that is full drops at its end."""
    dropped = sum(source.batch.dropped.values())
    last_root = np.zeros(len(source.table), dtype=bool)
    last_root[np.flatnonzero(~source.is_event)[-1:]] = True
    return (np.full(len(source.table), dropped), last_root) if dropped else None


_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "torch.op.scope", _NAME, "kind of RecordFunction: torch's `RecordScope` in lower case", "on events", _scope
    ),
    Attribute(
        "torch.op.sequence_nr",
        _INT64,
        "autograd's sequence number, which a forward operator shares with its backward function",
        "where torch gave one",
        _sequence_nr,
    ),
    Attribute(
        "torch.op.forward_thread",
        _INT64,
        "torch's id of the thread that ran the forward operator",
        "on backward functions",
        _forward_thread,
    ),
    Attribute(
        "torch.op.input_shapes",
        _NAME,
        "sizes of the inputs, `[]` for what is no tensor, as torch prints them: `[[2, 3], [], [4]]`",
        "with `record_shapes`",
        _input_shapes,
    ),
    Attribute(
        "torch.self_duration",
        _DOUBLE,
        "seconds not spent in events that it called on its thread",
        "on events",
        _self_duration,
    ),
    Attribute("thread.id", _INT64, "`threading.get_ident()` of the thread where it began", "on events", _thread_id),
    Attribute(
        "thread.name", _NAME, "name of the thread where it began", "on events, if the thread has a name", _thread_name
    ),
    Attribute("error.type", _NAME, "class of the exception that left it", "where one did", _error_type),
    Attribute(
        "torch.unfinished",
        _BOOL,
        "true: still open when the recording stopped, and ended there",
        "where true",
        _flag(Flag.UNFINISHED),
    ),
    Attribute("torch.async", _BOOL, "true: may have ended on another thread", "where true", _flag(Flag.ASYNC)),
    Attribute(
        "torch.dropped_before",
        _BOOL,
        "true: events of its thread were dropped between the one before it and this one",
        "where true",
        _flag(Flag.LOSS_BEFORE),
    ),
    Attribute("torch.step", _INT64, "number of the step", "on roots of steps", _step),
    Attribute(
        "torch.dropped_events",
        _INT64,
        "events of the recording that were dropped",
        "on the last root, if any were dropped",
        _dropped_events,
    ),
)
"""Every attribute, in the order in which spans carry them."""
