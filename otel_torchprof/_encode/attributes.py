"""The table of span attributes: the field of an event, the attribute it becomes, its type, and when a span has it.

The native encoder, the ReadableSpan views and the documentation are all made from :data:`ATTRIBUTES`; what only reduced
traces have is in :data:`REDUCTIONS`, what only segments of a job have in
:data:`~otel_torchprof._encode.phase_attributes.SEGMENTS`, what only requests and batches have in
:data:`~otel_torchprof._model.request_spans.REQUESTS`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.phases import PHASE_NAME
from otel_torchprof._columns.schema import Flag
from otel_torchprof._model.inputs import InputPart, shapes_in, types_in
from otel_torchprof._model.request_spans import REQUESTS
from otel_torchprof._model.span_table import STEP_NUMBER, AttributeColumn, AttributeType, SpanTable, extend_names
from otel_torchprof._process.give_way import give_way

from . import collective_attributes as collectives
from . import event_attributes as events
from . import phase_attributes as phases
from .attribute_source import Attribute, AttributeSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.devices import DeviceTimes
    from otel_torchprof._process.heap import Arena

_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME
_IF_REDUCED = "on roots (of steps) whose spans were aggregated, collapsed or split off"

REDUCTIONS: tuple[tuple[str, AttributeType, str, str], ...] = (
    (
        "torch.aggregated.count",
        _INT64,
        "on aggregate spans",
        "number of spans that the aggregate span replaces, including itself",
    ),
    (
        "torch.aggregated.duration",
        _DOUBLE,
        "on aggregate spans",
        "total duration of these spans in seconds; the aggregate span itself may last longer",
    ),
    (
        "torch.collapsed.count",
        _INT64,
        "on spans with collapsed descendants",
        "number of collapsed spans below the span, at any depth, including all spans of collapsed aggregate spans",
    ),
    (
        "torch.collapsed.duration",
        _DOUBLE,
        "on spans with collapsed descendants",
        "total duration in seconds of the top-level collapsed spans, which includes the spans inside them",
    ),
    (
        "torch.recorded_spans",
        _INT64,
        f"{_IF_REDUCED}; on steps without detail",
        "number of recorded spans, including the root: sent, aggregated and collapsed spans together",
    ),
    (
        "torch.aggregated_spans",
        _INT64,
        _IF_REDUCED,
        "number of spans that are not sent because aggregate spans replace them",
    ),
    (
        "torch.collapsed_spans",
        _INT64,
        _IF_REDUCED,
        "number of spans that are left out and counted in `torch.collapsed.count`",
    ),
    ("torch.parts", _INT64, _IF_REDUCED, "number of further traces with the other spans, linked in both directions"),
    ("torch.part", _INT64, "on the roots of these traces", "number of the part, from 1"),
    (
        "torch.averages",
        _NAME,
        "on steps without detail",
        (
            'names by self time, the longest first: `[{"name":"aten::mm","count":12,"self":0.0123}]`, `self` in '
            'seconds, with `"phase":"data"` for events during the wait for data; at most 1,279 bytes together with '
            "`torch.collectives` (Tempo cuts attributes at 2,048 bytes)"
        ),
    ),
    (
        "torch.collectives",
        _NAME,
        "on steps without detail, if a backend of `torch.distributed` worked on its own threads",
        (
            '`[["0",123,5000.1,5200.7]]`: group, `torch.collective.sequence_nr`, arrival of this rank and of the '
            "last rank, in µs since the step began; at most 511 bytes"
        ),
    ),
)
"""Key, type, when a span has it, and meaning; in the order of the documentation page."""


_TYPE_NAMES = {
    AttributeType.INT64: "int",
    AttributeType.DOUBLE: "double",
    AttributeType.BOOL: "boolean",
    AttributeType.NAME: "string",
}


def add_attributes(
    table: SpanTable,
    batch: Batch,
    *,
    dropped_on: int | None = None,
    self_time: Callable[[Arena], npt.NDArray[np.int64]] | None = None,
    with_flops: bool = False,
    callers: npt.NDArray[np.uint32] | None = None,
    device_times: DeviceTimes | None = None,
) -> SpanTable:
    """Adds attributes to the spans after those that they have; number, kind and phases of steps come first.

    ``table`` has spans of events of ``batch`` (``table.row``) and synthetic ones (row -1) in any order; its names begin
    with those of the batch. ``dropped_on``: row of the table for the number of dropped events; default: the
    last synthetic span, if there is one. ``self_time``: returns ns per row of the batch, for batches without all children of their
    events; default: computed from the batch. ``with_flops``: count floating-point operations too. ``callers``: per row the name of
    the enclosing call, see :class:`~otel_torchprof._model.frame_spans.Displayed`. ``device_times``: of the rows of the batch, for
    batches from which events were removed; default: computed from the batch.

    Attributes that no span has, and those in ``OTEL_TORCHPROF_HIDDEN_ATTRIBUTES``, are left out; existing ones are unchanged. Costs one
    pass for the attributes that most events have, some ns per span that has one of the others, and about 40 ns per event for inputs; equal
    inputs are formatted once. Thread-safe.
    """
    source = AttributeSource(
        batch,
        table,
        dropped_on=dropped_on,
        self_time=self_time,
        with_flops=with_flops,
        callers=callers,
        device_times=device_times,
    )
    hidden = config.HIDDEN_ATTRIBUTES.read()
    columns = [column for column in table.attributes if column.key not in hidden]
    for attribute in ATTRIBUTES:
        give_way()
        computed = None if attribute.key in hidden else attribute.compute(source)
        if computed is None:
            continue
        values, spans = computed
        for column in [c for c in columns if c.key == attribute.key]:
            if column is source.threads_before.get(attribute.key):
                columns.remove(column)
            elif column.type is attribute.type:  # merged: readers expect one column per attribute
                columns.remove(column)
                values, spans = source.joined((column.values, column.spans(len(table))), (values, spans))
            else:
                is_free = ~np.isin(spans, column.spans(len(table)))
                values, spans = values[is_free], spans[is_free]
        if len(spans):
            rows = None if len(spans) == len(table) else spans
            columns.append(AttributeColumn(attribute.key, attribute.type, values, rows))
    name = phases.span_names(source, hidden)
    return replace(
        table,
        name=name,
        attributes=tuple(sorted(columns, key=_place)),
        names=extend_names(table.names, source.strings),
    )


def _place(column: AttributeColumn) -> int:
    """Sort key: a step's number, kind and phases come first, since lists of spans display only the first attributes."""
    return phases.PLACES.get(column.key, len(phases.PLACES))


def attributes_markdown() -> str:
    """Returns the table of attributes for the documentation."""
    lines = ["| Attribute | Type | Present | Meaning |", "| --- | --- | --- | --- |"]
    rows = [(a.key, a.type, a.present, a.meaning) for a in ATTRIBUTES]
    lines += [
        f"| `{key}` | {_TYPE_NAMES[kind]} | {present} | {meaning} |"
        for key, kind, present, meaning in (*rows, *phases.SEGMENTS, *REDUCTIONS, *REQUESTS)
    ]
    return "\n".join(lines) + "\n"


_IF_FUNCTION = (
    "on function calls; with `with_stack` and no spans of calls, on events that a Python function called directly"
)
_IF_ALLOCATED = (
    "with `profile_memory`, if the event or a descendant allocated and the allocator reports its total; on roots, if "
    "it reported any"
)
_IF_COMPILED = "on roots (of steps) with a compiled region"


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "torch.module",
        _NAME,
        "full name of the module, such as `encoder.layers.2.linear1`",
        "on modules; on their function calls, if known; on the [phase](#phases) of a model's call: its class",
        phases.module,
    ),
    Attribute(
        "code.function.name",
        _NAME,
        "full name of the Python function, such as `package.module.Class.method`",
        _IF_FUNCTION,
        events.function(lambda info_field: info_field.qualified_name, is_text=True),
    ),
    Attribute(
        "code.file.path",
        _NAME,
        "file of the function",
        _IF_FUNCTION,
        events.function(lambda info_field: info_field.path, is_text=True),
    ),
    Attribute(
        "code.line.number",
        _INT64,
        "first line of the function",
        _IF_FUNCTION,
        events.function(lambda info_field: info_field.line, is_text=False),
    ),
    Attribute(
        "torch.frame.identity",
        _INT64,
        "number of the generator, coroutine or optimizer, the same on all its segments",
        "on calls of generators, coroutines and optimizers",
        events.identity,
    ),
    Attribute(
        "cpython.gc.generation",
        _INT64,
        "collected generation",
        "on garbage collections",
        events.generation,
    ),
    Attribute(
        PHASE_NAME,
        _NAME,
        "name of the [phase](#phases), such as `backward`",
        "on phases",
        phases.name,
    ),
    *phases.GENERATE_ATTRIBUTES,
    Attribute(
        "torch.op.scope",
        _NAME,
        "scope of the RecordFunction: torch's `RecordScope` in lower case",
        "on operators and labels",
        events.usual("op_scope"),
    ),
    Attribute(
        "torch.op.sequence_nr",
        _INT64,
        "autograd's sequence number, the same on a forward operator and its backward function",
        "if torch assigned one",
        events.usual("op_sequence_nr"),
    ),
    Attribute(
        "torch.op.forward_thread",
        _INT64,
        "torch's id of the thread that ran the forward operator",
        "on backward functions",
        events.usual("op_forward_thread"),
    ),
    Attribute(
        "torch.op.input_shapes",
        _NAME,
        "shapes of the inputs, as torch prints them, `[]` for other inputs than tensors: `[[2, 3], [], [4]]`",
        "with `record_shapes`",
        events.inputs(InputPart.SHAPES, shapes_in),
    ),
    Attribute(
        "torch.op.input_dtypes",
        _NAME,
        "types of the inputs, as torch's profiler names them: `['float', 'Scalar', 'TensorList']`",
        "with `record_shapes`",
        events.inputs(InputPart.DTYPES, types_in),
    ),
    Attribute(
        "torch.op.concrete_inputs",
        _NAME,
        "values of inputs that are numbers or lists of numbers, `None` for all others: `[None, 2.5, [1, 1]]`",
        "with `record_shapes`, if an input has a value",
        events.inputs(InputPart.VALUES, events.values_of),
    ),
    Attribute(
        "torch.op.overload",
        _NAME,
        "name of the operator's overload: `Tensor` for `aten::add.Tensor`",
        "if overloads were recorded and it is not the default overload",
        events.overload,
    ),
    Attribute(
        "torch.op.flops",
        _INT64,
        "number of floating-point operations, computed from the shapes of the inputs",
        "with `with_flops`, if there are any",
        events.flops,
    ),
    *collectives.ATTRIBUTES,
    Attribute(
        "torch.label.args",
        _NAME,
        "`args` of the label",
        "with `record_shapes`, on labels with `args`",
        events.string,
    ),
    Attribute(
        "torch.self_duration",
        _DOUBLE,
        "self time in seconds: the duration without child events on its thread",
        "on events",
        events.usual("self_duration"),
    ),
    Attribute(
        "torch.device.duration",
        _DOUBLE,
        "device time in seconds, between the timing events at the event's start and end on the device's stream; "
        "without timing events, the device time of the events inside it",
        "with device times, if there are any",
        events.device_duration,
    ),
    Attribute(
        "torch.device.self_duration",
        _DOUBLE,
        "device self time in seconds: the device time without child events",
        "with device times, on events with timing events",
        events.device_self_duration,
    ),
    Attribute(
        "torch.device.drained_duration",
        _DOUBLE,
        "upper bound, in seconds, of the time in which devices had finished all queued work and waited for the host",
        "with device times, on roots with timing events",
        events.device_idle,
    ),
    Attribute(
        "torch.device.type",
        _NAME,
        "type of the timed device, as `torch.device` names it, such as `cuda`",
        "with device times, on events with timing events",
        events.device,
    ),
    Attribute(
        "torch.device.index",
        _INT64,
        "index of the timed device within its type",
        "with device times, on events with timing events",
        events.of_pair("device_index"),
    ),
    Attribute(
        "torch.device.stream",
        _INT64,
        "torch's `stream_id` of the timed stream",
        "with device times, on events with timing events",
        events.of_pair("stream"),
    ),
    Attribute(
        "torch.device.energy",
        _DOUBLE,
        "joules that the timed devices consumed during the span, for any work; without timed devices, all devices "
        "visible to the process",
        "with `energy`, on roots, and on labels and modules of at least 0.1 s",
        events.energy,
    ),
    Attribute(
        "torch.memory.allocated",
        _INT64,
        "bytes allocated on the CPU in the event and its descendants on the same thread",
        "with `profile_memory`, if above 0",
        events.moved("cpu_memory", "allocated"),
    ),
    Attribute(
        "torch.memory.released",
        _INT64,
        "bytes freed on the CPU in the event and its descendants on the same thread",
        "with `profile_memory`, if above 0",
        events.moved("cpu_memory", "released"),
    ),
    Attribute(
        "torch.memory.peak",
        _INT64,
        "highest number of bytes in use on the CPU that torch reported at an allocation in the event or its "
        "descendants; on roots, at any time",
        _IF_ALLOCATED,
        events.cpu_peak,
    ),
    Attribute(
        "torch.device.memory.allocated",
        _INT64,
        "bytes allocated on devices in the event and its descendants on the same thread",
        "with `profile_memory`, if above 0",
        events.moved("device_memory", "allocated"),
    ),
    Attribute(
        "torch.device.memory.released",
        _INT64,
        "bytes freed on devices in the event and its descendants on the same thread",
        "with `profile_memory`, if above 0",
        events.moved("device_memory", "released"),
    ),
    Attribute(
        "torch.device.memory.peak",
        _INT64,
        "highest number of bytes in use on a device, likewise; the highest of several devices",
        _IF_ALLOCATED,
        events.device_peak,
    ),
    Attribute(
        "thread.id",
        _INT64,
        "`threading.get_ident()` of the thread where the span began; on steps, of the loop's thread",
        "on events, steps and `torch.operators`",
        events.usual("thread_id"),
    ),
    Attribute(
        "thread.name",
        _NAME,
        "name of the thread where the span began; on steps, of the loop's thread",
        "on events, steps and `torch.operators`, if the thread has a name",
        events.usual("thread_name"),
    ),
    Attribute(
        "error.type",
        _NAME,
        "class of the exception that left the event; `_OTHER` if unknown, as for function calls before Python 3.12",
        "if an exception left it",
        events.error_type,
    ),
    Attribute(
        "torch.unfinished",
        _BOOL,
        "true: the event was open when the recording stopped, and ends there",
        "if true",
        events.flag(Flag.UNFINISHED),
    ),
    Attribute(
        "torch.async",
        _BOOL,
        "true: the event may have ended on another thread, or is the wait of a request; no self time",
        "if true",
        events.flag(Flag.ASYNC),
    ),
    Attribute(
        "torch.dropped_before",
        _BOOL,
        "true: events of its thread were dropped between the previous event and this one",
        "if true",
        events.flag(Flag.LOSS_BEFORE),
    ),
    Attribute(STEP_NUMBER, _INT64, "number of the step", "on roots of steps", events.step),
    Attribute(
        events.ITERATION,
        _INT64,
        "`torch.step.number` under the name of NVIDIA's NeMo Lens",
        "on roots of steps, with `OTEL_TORCHPROF_RANKS=aliases=nemo_lens`",
        events.iteration,
    ),
    Attribute(
        "torch.compile.captured_operators",
        _INT64,
        "number of top-level operators in regions compiled by `torch.compile`",
        _IF_COMPILED,
        events.captured("torch.compile.captured_operators"),
    ),
    Attribute(
        "torch.compile.captured_share",
        _DOUBLE,
        "fraction of the top-level operators in compiled regions, 0 to 1",
        _IF_COMPILED,
        events.captured("torch.compile.captured_share"),
    ),
    Attribute(
        "torch.compile.captured_duration_share",
        _DOUBLE,
        "fraction of the time of top-level operators in compiled regions, 0 to 1",
        _IF_COMPILED,
        events.captured("torch.compile.captured_duration_share"),
    ),
    Attribute(
        "torch.dropped_events",
        _INT64,
        "number of dropped events of the recording",
        "on the last root of the spans recorded together, if events were dropped",
        events.dropped_events,
    ),
)
"""Every attribute, in the order in which spans carry them."""
