"""The one table of span attributes: which field of an event becomes which attribute, of which type, and when it is there.

The native encoder, the ReadableSpan views and the documentation are all made from :data:`ATTRIBUTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._model.flops import flops_of
from otel_torchprof._model.input_words import InputKind, InputPart, has_inputs, text_ids
from otel_torchprof._model.inputs import concrete_inputs, input_dtypes, shape_keys, texts_of
from otel_torchprof._model.units import AttributeColumn, AttributeType, SpanTable, extend_names

from . import frame_attributes as frames
from .attribute_source import Array, Source, Values

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.memory import MovedMemory

_TYPE_NAMES = {
    AttributeType.INT64: "int",
    AttributeType.DOUBLE: "double",
    AttributeType.BOOL: "boolean",
    AttributeType.NAME: "string",
}


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


def add_attributes(
    table: SpanTable,
    batch: Batch,
    *,
    dropped_on: int | None = None,
    self_time: npt.NDArray[np.int64] | None = None,
    with_flops: bool = False,
    callers: npt.NDArray[np.uint32] | None = None,
) -> SpanTable:
    """The same spans with their attributes after those that they already have.

    ``table`` holds spans of events of ``batch`` (``table.row``) and synthetic ones (row -1) in any order; its names begin
    with those of the batch. ``dropped_on`` is the row of the table that says how many events were dropped; default: the
    last synthetic span, and no span where there is none. ``self_time`` are nanoseconds per row of the batch, for batches
    that do not hold all children of their events; default: computed from the batch. ``with_flops``: count operations too.
    ``callers``: per row the name of the call around it, see :class:`~otel_torchprof._model.frame_spans.Shown`.

    An attribute that no span has is left out, and one that ``OTEL_TORCHPROF_HIDDEN_ATTRIBUTES`` names; one that a span already has
    stays as it is. Costs a few numpy passes per
    attribute, and about 50 ns per event for each that comes from inputs, of which equal ones are formatted once. Thread-safe.
    """
    source = Source(batch, table, dropped_on=dropped_on, self_time=self_time, with_flops=with_flops, callers=callers)
    hidden = config.hidden_attributes()
    columns = list(table.attributes)
    for attribute in ATTRIBUTES:
        computed = None if attribute.key in hidden else attribute.compute(source)
        if computed is None:
            continue
        values, present = computed
        for column in [c for c in columns if c.key == attribute.key]:
            here = np.ones(len(table), dtype=bool) if column.present is None else column.present != 0
            if column.type is attribute.type:  # one column then, as readers of a column expect
                columns.remove(column)
                values, present = np.where(here, column.values, values), present | here
            else:
                present = present & ~here
        if not present.any():
            continue
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
    scope, kind = source.column("scope"), source.column("kind")
    known = scope < len(names)
    return names[np.where(known, scope, 0)], known & source.is_event & (kind != Kind.MODULE) & (kind != Kind.FRAME)


def _sequence_nr(source: Source) -> Values:
    values = source.column("sequence_nr")
    return values, (values >= 0) & source.is_event


def _forward_thread(source: Source) -> Values:
    values = source.column("fwd_thread")
    return values, (values != 0) & (source.column("kind") != Kind.FRAME) & source.is_event


def _texts(source: Source, numbered: tuple[Array, list[str]]) -> Values:
    """Texts by number, as the values of events; number 0 stands for no inputs at all. A label's args have a key of their own."""
    keys, texts = numbered
    present = (keys != 0) & (source.batch["kind"] != Kind.LABEL)
    return source.spread(source.add(texts)[keys]), source.spread(present) & source.is_event


def _input_shapes(source: Source) -> Values | None:
    return _texts(source, shape_keys(source.batch)) if has_inputs(source.batch) else None


def _input_dtypes(source: Source) -> Values | None:
    if not has_inputs(source.batch):
        return None
    return _texts(source, texts_of(source.batch, InputPart.DTYPES, input_dtypes))


def _values(batch: Batch, row: int) -> list[Any]:
    found = concrete_inputs(batch, row)
    return [] if all(value is None for value in found) else found


def _concrete_inputs(source: Source) -> Values | None:
    if not has_inputs(source.batch):
        return None
    return _texts(source, texts_of(source.batch, InputPart.VALUES, _values))


def _text(kind: InputKind) -> Callable[[Source], Values | None]:
    def compute(source: Source) -> Values | None:
        if not has_inputs(source.batch):
            return None
        ids = source.spread(text_ids(source.batch, kind))
        return ids, (ids != 0) & source.is_event

    return compute


def _flops(source: Source) -> Values | None:
    if not source.with_flops:
        return None
    # What torch counts of shapes that do not fit together may be beyond an attribute's numbers.
    flops = source.spread(np.minimum(flops_of(source.batch), np.uint64(np.iinfo(np.int64).max)).astype(np.int64))
    return flops, (flops != 0) & source.is_event


def _self_duration(source: Source) -> Values:
    batch, own = source.batch, source.self_time
    if own is None:
        duration = batch["end"] - batch["start"]
        own = duration.copy()
        child = np.flatnonzero(batch["parent"] >= 0)
        np.subtract.at(own, batch["parent"][child], duration[child])
    return source.spread(np.maximum(own, 0) / 1e9), source.is_event


def _memory(device: str, direction: str) -> Callable[[Source], Values | None]:
    def compute(source: Source) -> Values | None:
        moved: MovedMemory | None = getattr(source, device)
        if moved is None:
            return None
        values = source.spread(getattr(moved, direction))
        return values, (values != 0) & source.is_event

    return compute


def _thread_id(source: Source) -> Values:
    idents = np.array([thread.ident for thread in source.batch.threads], dtype=np.int64)
    return source.spread(idents[source.batch["thread"]]), source.is_event


def _thread_name(source: Source) -> Values:
    threads = source.batch.threads
    named = np.array([bool(thread.name) for thread in threads], dtype=bool)
    names = source.add([thread.name for thread in threads])
    thread = source.batch["thread"]
    return source.spread(names[thread]), source.spread(named[thread]) & source.is_event


def _flag(flag: Flag) -> Callable[[Source], Values]:
    def compute(source: Source) -> Values:
        return np.ones(len(source.table), dtype=np.uint8), (source.column("flags") & flag != 0) & source.is_event

    return compute


def _step(source: Source) -> Values:
    return source.table.step, source.table.step >= 0


def _captured(key: str) -> Callable[[Source], Values | None]:
    def compute(source: Source) -> Values | None:
        shares = source.captured()
        return None if shares is None else (shares.attributes()[key], shares.regions > 0)

    return compute


def _dropped_events(source: Source) -> Values | None:
    """On one span only, so that a sum over spans is right; a profile that is full drops at its end, hence the last root."""
    dropped = sum(source.batch.dropped.values())
    if not dropped:
        return None
    chosen = np.zeros(len(source.table), dtype=bool)
    chosen[np.flatnonzero(~source.is_event)[-1:] if source.dropped_on is None else source.dropped_on] = True
    return np.full(len(source.table), dropped), chosen


_IF_FUNCTION = "on calls; without spans of calls on what a Python function called directly, with `with_stack`"
_IF_COMPILED = "on roots (of steps) in which a compiled region ran"

_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "torch.module",
        _NAME,
        "full name of the module, `encoder.layers.2.linear1`",
        "on modules; on their calls where it is known",
        frames.module,
    ),
    Attribute(
        "code.function.name",
        _NAME,
        "full name of the Python function, `package.module.Class.method`",
        _IF_FUNCTION,
        frames.function(lambda fact: fact.qualified_name, is_text=True),
    ),
    Attribute(
        "code.file.path",
        _NAME,
        "the file of that function",
        _IF_FUNCTION,
        frames.function(lambda fact: fact.path, is_text=True),
    ),
    Attribute(
        "code.line.number",
        _INT64,
        "the first line of that function",
        _IF_FUNCTION,
        frames.function(lambda fact: fact.line, is_text=False),
    ),
    Attribute(
        "torch.frame.identity",
        _INT64,
        "which generator, coroutine or optimizer ran: all stretches of one have the same number",
        "on calls of these",
        frames.identity,
    ),
    Attribute(
        "cpython.gc.generation",
        _INT64,
        "the generation that was collected",
        "on collections of garbage",
        frames.generation,
    ),
    Attribute(
        "torch.op.scope",
        _NAME,
        "kind of RecordFunction: torch's `RecordScope` in lower case",
        "on operators and labels",
        _scope,
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
        "torch.op.input_dtypes",
        _NAME,
        "types of the inputs, as torch's profiler names them: `['float', 'Scalar', 'TensorList']`",
        "with `record_shapes`",
        _input_dtypes,
    ),
    Attribute(
        "torch.op.concrete_inputs",
        _NAME,
        "values of the inputs that are numbers or lists of them, `None` for all others: `[None, 2.5, [1, 1]]`",
        "with `record_shapes`, where an input has a value",
        _concrete_inputs,
    ),
    Attribute(
        "torch.op.overload",
        _NAME,
        "name of the operator's overload: `Tensor` of `aten::add.Tensor`",
        "where overloads were recorded and it is not the default one",
        _text(InputKind.OVERLOAD),
    ),
    Attribute(
        "torch.op.flops",
        _INT64,
        "floating-point operations, computed from the sizes of the inputs",
        "with `with_flops`, where there are any",
        _flops,
    ),
    Attribute(
        "torch.label.args",
        _NAME,
        "the label's `args`",
        "on labels that have some, with `record_shapes`",
        _text(InputKind.STRING),
    ),
    Attribute(
        "torch.self_duration",
        _DOUBLE,
        "seconds not spent in events that it called on its thread",
        "on events",
        _self_duration,
    ),
    Attribute(
        "torch.memory.allocated",
        _INT64,
        "bytes that it and what it called on its thread allocated on the CPU",
        "with `profile_memory`, where any",
        _memory("cpu_memory", "allocated"),
    ),
    Attribute(
        "torch.memory.released",
        _INT64,
        "bytes that they gave back there",
        "with `profile_memory`, where any",
        _memory("cpu_memory", "released"),
    ),
    Attribute(
        "torch.device.memory.allocated",
        _INT64,
        "bytes that it and what it called on its thread allocated on devices",
        "with `profile_memory`, where any",
        _memory("device_memory", "allocated"),
    ),
    Attribute(
        "torch.device.memory.released",
        _INT64,
        "bytes that they gave back there",
        "with `profile_memory`, where any",
        _memory("device_memory", "released"),
    ),
    Attribute("thread.id", _INT64, "`threading.get_ident()` of the thread where it began", "on events", _thread_id),
    Attribute(
        "thread.name", _NAME, "name of the thread where it began", "on events, if the thread has a name", _thread_name
    ),
    Attribute(
        "error.type",
        _NAME,
        "class of the exception that left it; `_OTHER` where it is not known, as of calls before Python 3.12",
        "where one did",
        frames.error_type,
    ),
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
        "torch.compile.captured_operators",
        _INT64,
        "outermost operators that ran in regions compiled by `torch.compile`",
        _IF_COMPILED,
        _captured("torch.compile.captured_operators"),
    ),
    Attribute(
        "torch.compile.captured_share",
        _DOUBLE,
        "the same as a fraction of all its outermost operators, 0 to 1",
        _IF_COMPILED,
        _captured("torch.compile.captured_share"),
    ),
    Attribute(
        "torch.compile.captured_duration_share",
        _DOUBLE,
        "the time of these operators as a fraction of that of all its outermost operators, 0 to 1",
        _IF_COMPILED,
        _captured("torch.compile.captured_duration_share"),
    ),
    Attribute(
        "torch.dropped_events",
        _INT64,
        "events of the recording that were dropped",
        "on the last root of what was recorded together, if any were dropped",
        _dropped_events,
    ),
)
"""Every attribute, in the order in which spans carry them."""
