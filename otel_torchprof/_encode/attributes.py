"""The one table of span attributes: which field of an event becomes which attribute, of which type, and when it is there.

The native encoder, the ReadableSpan views and the documentation are all made from :data:`ATTRIBUTES`; what only reduced
traces have is in :data:`~otel_torchprof._encode.reduction_attributes.REDUCTIONS`, what only segments of a job have in
:data:`~otel_torchprof._encode.phase_attributes.SEGMENTS`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.schema import Flag
from otel_torchprof._tree.input_words import InputPart
from otel_torchprof._tree.inputs import shapes_in, types_in
from otel_torchprof._tree.span_table import AttributeColumn, AttributeType, SpanTable, extend_names

from . import collective_attributes as collectives
from . import device_attributes as devices
from . import event_attributes as events
from . import frame_attributes as frames
from . import generate_attributes as generations
from . import memory_attributes as memory
from . import phase_attributes as phases
from .attribute_source import Attribute, Source
from .reduction_attributes import REDUCTIONS

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.devices import DeviceTimes

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
    self_time: npt.NDArray[np.int64] | None = None,
    with_flops: bool = False,
    callers: npt.NDArray[np.uint32] | None = None,
    device_times: DeviceTimes | None = None,
) -> SpanTable:
    """The same spans with their attributes after those that they already have, but for what tells steps apart: that comes first.

    ``table`` holds spans of events of ``batch`` (``table.row``) and synthetic ones (row -1) in any order; its names begin
    with those of the batch. ``dropped_on`` is the row of the table that says how many events were dropped; default: the
    last synthetic span, and no span where there is none. ``self_time`` are nanoseconds per row of the batch, for batches
    that do not hold all children of their events; default: computed from the batch. ``with_flops``: count operations too.
    ``callers``: per row the name of the call around it, see :class:`~otel_torchprof._spans.frame_spans.Displayed`. ``device_times``
    are those of the rows of the batch, for batches from which events were left out; default: computed from the batch.

    An attribute that no span has is left out, and one that ``OTEL_TORCHPROF_HIDDEN_ATTRIBUTES`` names; one that a span already has
    stays as it is. Costs a few numpy passes per
    attribute that any event has, and about 40 ns per event for inputs, of which equal ones are read and formatted once. Thread-safe.
    """
    source = Source(
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
    return replace(
        table, attributes=tuple(sorted(columns, key=_place)), names=extend_names(table.names, source.strings)
    )


def _place(column: AttributeColumn) -> int:
    """What tells steps apart in a list, whose first attributes are all that it shows: number, kind and phases come first."""
    return phases.PLACES.get(column.key, len(phases.PLACES))


def attributes_markdown() -> str:
    """The table of attributes for the documentation."""
    lines = ["| Attribute | Type | Present | Meaning |", "| --- | --- | --- | --- |"]
    rows = [(a.key, a.type, a.present, a.meaning) for a in ATTRIBUTES]
    lines += [
        f"| `{key}` | {_TYPE_NAMES[kind]} | {present} | {meaning} |"
        for key, kind, present, meaning in (*rows, *phases.SEGMENTS, *REDUCTIONS)
    ]
    return "\n".join(lines) + "\n"


_IF_FUNCTION = "on calls; without spans of calls on what a Python function called directly, with `with_stack`"
_IF_ALLOCATED = (
    "with `profile_memory`, where one allocated and the allocator tells its total; on roots, where it told any"
)
_IF_COMPILED = "on roots (of steps) in which a compiled region ran"

_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "torch.module",
        _NAME,
        "full name of the module, `encoder.layers.2.linear1`",
        "on modules; on their calls where it is known; on the [phase](#phases) of a model's call its class",
        phases.module,
    ),
    Attribute(
        "code.function.name",
        _NAME,
        "full name of the Python function, `package.module.Class.method`",
        _IF_FUNCTION,
        frames.function(lambda info_field: info_field.qualified_name, is_text=True),
    ),
    Attribute(
        "code.file.path",
        _NAME,
        "the file of that function",
        _IF_FUNCTION,
        frames.function(lambda info_field: info_field.path, is_text=True),
    ),
    Attribute(
        "code.line.number",
        _INT64,
        "the first line of that function",
        _IF_FUNCTION,
        frames.function(lambda info_field: info_field.line, is_text=False),
    ),
    Attribute(
        "torch.frame.identity",
        _INT64,
        "which generator, coroutine or optimizer ran: all segments of one have the same number",
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
        "torch.phase.name",
        _NAME,
        "which [phase](#phases) it is, `backward`",
        "on phases",
        phases.name,
    ),
    *generations.ATTRIBUTES,
    Attribute(
        "torch.op.scope",
        _NAME,
        "kind of RecordFunction: torch's `RecordScope` in lower case",
        "on operators and labels",
        events.scope,
    ),
    Attribute(
        "torch.op.sequence_nr",
        _INT64,
        "autograd's sequence number, which a forward operator shares with its backward function",
        "where torch gave one",
        events.sequence_nr,
    ),
    Attribute(
        "torch.op.forward_thread",
        _INT64,
        "torch's id of the thread that ran the forward operator",
        "on backward functions",
        events.forward_thread,
    ),
    Attribute(
        "torch.op.input_shapes",
        _NAME,
        "sizes of the inputs, `[]` for what is no tensor, as torch prints them: `[[2, 3], [], [4]]`",
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
        "values of the inputs that are numbers or lists of them, `None` for all others: `[None, 2.5, [1, 1]]`",
        "with `record_shapes`, where an input has a value",
        events.inputs(InputPart.VALUES, events.values_of),
    ),
    Attribute(
        "torch.op.overload",
        _NAME,
        "name of the operator's overload: `Tensor` of `aten::add.Tensor`",
        "where overloads were recorded and it is not the default one",
        events.overload,
    ),
    Attribute(
        "torch.op.flops",
        _INT64,
        "floating-point operations, computed from the sizes of the inputs",
        "with `with_flops`, where there are any",
        events.flops,
    ),
    *collectives.ATTRIBUTES,
    Attribute(
        "torch.label.args",
        _NAME,
        "the label's `args`",
        "on labels that have some, with `record_shapes`",
        events.string,
    ),
    Attribute(
        "torch.self_duration",
        _DOUBLE,
        "seconds not spent in events that it called on its thread",
        "on events",
        events.self_duration,
    ),
    Attribute(
        "torch.device.duration",
        _DOUBLE,
        "seconds from the mark at its begin to the one at its end on its device's stream; without marks of its own, those "
        "that events inside of it took",
        "with times of devices, where any",
        devices.duration,
    ),
    Attribute(
        "torch.device.self_duration",
        _DOUBLE,
        "seconds of that outside its child events",
        "with times of devices, where it has marks",
        devices.self_duration,
    ),
    Attribute(
        "torch.device.drained_duration",
        _DOUBLE,
        "seconds in which devices had done all that they had been given, at most: they waited for the host",
        "with times of devices, on roots in which one was timed",
        devices.drained,
    ),
    Attribute(
        "torch.device.type",
        _NAME,
        "type of the device that the marks are on, as `torch.device` names it: `cuda`",
        "with times of devices, where it has marks",
        devices.device,
    ),
    Attribute(
        "torch.device.index",
        _INT64,
        "which device of its type",
        "with times of devices, where it has marks",
        devices.of_pair("device_index"),
    ),
    Attribute(
        "torch.device.stream",
        _INT64,
        "torch's `stream_id` of the stream that the marks are on",
        "with times of devices, where it has marks",
        devices.of_pair("stream"),
    ),
    Attribute(
        "torch.device.energy",
        _DOUBLE,
        "joules that the devices in use consumed meanwhile, whatever they worked for; of all that the process sees where no "
        "device was timed",
        "with `energy`, on roots, and on labels and modules that took a tenth of a second",
        devices.energy,
    ),
    Attribute(
        "torch.memory.allocated",
        _INT64,
        "bytes that it and what it called on its thread allocated on the CPU",
        "with `profile_memory`, where any",
        memory.moved("cpu_memory", "allocated"),
    ),
    Attribute(
        "torch.memory.released",
        _INT64,
        "bytes that they freed there",
        "with `profile_memory`, where any",
        memory.moved("cpu_memory", "released"),
    ),
    Attribute(
        "torch.memory.peak",
        _INT64,
        "most bytes in use on the CPU, as torch told it when it or what it called allocated; on roots, at any moment",
        _IF_ALLOCATED,
        memory.cpu_peak,
    ),
    Attribute(
        "torch.device.memory.allocated",
        _INT64,
        "bytes that it and what it called on its thread allocated on devices",
        "with `profile_memory`, where any",
        memory.moved("device_memory", "allocated"),
    ),
    Attribute(
        "torch.device.memory.released",
        _INT64,
        "bytes that they freed there",
        "with `profile_memory`, where any",
        memory.moved("device_memory", "released"),
    ),
    Attribute(
        "torch.device.memory.peak",
        _INT64,
        "the same of a device, of several the one with the most",
        _IF_ALLOCATED,
        memory.device_peak,
    ),
    Attribute(
        "thread.id",
        _INT64,
        "`threading.get_ident()` of the thread where it began; of a step, where the loop runs",
        "on events, steps and `torch.operators`",
        events.thread_id,
    ),
    Attribute(
        "thread.name",
        _NAME,
        "name of the thread where it began; of a step, where the loop runs",
        "on events, steps and `torch.operators`, if the thread has a name",
        events.thread_name,
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
        events.flag(Flag.UNFINISHED),
    ),
    Attribute("torch.async", _BOOL, "true: may have ended on another thread", "where true", events.flag(Flag.ASYNC)),
    Attribute(
        "torch.dropped_before",
        _BOOL,
        "true: events of its thread were dropped between the one before it and this one",
        "where true",
        events.flag(Flag.LOSS_BEFORE),
    ),
    Attribute("torch.step", _INT64, "number of the step", "on roots of steps", events.step),
    Attribute(
        "torch.compile.captured_operators",
        _INT64,
        "top-level operators that ran in regions compiled by `torch.compile`",
        _IF_COMPILED,
        events.captured("torch.compile.captured_operators"),
    ),
    Attribute(
        "torch.compile.captured_share",
        _DOUBLE,
        "the same as a fraction of all its top-level operators, 0 to 1",
        _IF_COMPILED,
        events.captured("torch.compile.captured_share"),
    ),
    Attribute(
        "torch.compile.captured_duration_share",
        _DOUBLE,
        "the time of these operators as a fraction of that of all its top-level operators, 0 to 1",
        _IF_COMPILED,
        events.captured("torch.compile.captured_duration_share"),
    ),
    Attribute(
        "torch.dropped_events",
        _INT64,
        "events of the recording that were dropped",
        "on the last root of what was recorded together, if any were dropped",
        events.dropped_events,
    ),
)
"""Every attribute, in the order in which spans carry them."""
