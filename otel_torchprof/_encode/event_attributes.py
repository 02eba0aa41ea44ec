"""Attributes of events: what each is, its inputs, memory, thread and flags; its time on devices; the call that it is, or is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.devices import covered_between, device_name, drained_between, joules_between
from otel_torchprof._model.flops import flops_of
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.inputs import InputKind, has_inputs, may_have, text_ids, values_in
from otel_torchprof._model.memory import CPU_TYPES, DEVICE_TYPES, NO_PEAK, peaks_between, peaks_of_rows

from .attribute_source import chosen

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.frame_info import FunctionInfo
    from otel_torchprof._model.inputs import InputPart, Inputs
    from otel_torchprof._model.memory import MovedMemory

    from .attribute_source import Array, AttributeSource, Values


def usual(name: str) -> Callable[[AttributeSource], Values]:
    """Returns a function for an attribute that most events have, by its name in ``otp_event_attributes``."""
    return lambda source: source.of_events[name]


def inputs(parts: InputPart, make: Callable[[Inputs], Any]) -> Callable[[AttributeSource], Values | None]:
    """Something of the inputs, as text; of an empty list there is none. A label's args have a key of their own."""

    def compute(source: AttributeSource) -> Values | None:
        if not has_inputs(source.batch):
            return None
        codes, texts = source.inputs.texts(parts, make)
        code = codes[source.inputs.numbers]
        spans, rows = source.where((code != 0) & (source.batch["kind"] != int(Kind.LABEL)))
        return source.add(texts)[code[rows]], spans

    return compute


def values_of(inputs: Inputs) -> list[Any]:
    """The values of inputs; empty if no input has one."""
    values = values_in(inputs)
    return [] if all(value is None for value in values) else values


def string(source: AttributeSource) -> Values | None:
    """A string among the inputs: the args of a label."""
    if not has_inputs(source.batch):
        return None
    return source.nonzero(source.inputs.text_ids(InputKind.STRING)[source.inputs.numbers])


def overload(source: AttributeSource) -> Values | None:
    """The operator's overload."""
    if not may_have(source.batch, InputKind.OVERLOAD):
        return None
    return source.nonzero(text_ids(source.batch, InputKind.OVERLOAD))


def flops(source: AttributeSource) -> Values | None:
    """Floating-point operations."""
    if not source.with_flops:
        return None
    # For inconsistent shapes torch's count may exceed the range of an attribute.
    return source.nonzero(np.minimum(flops_of(source.batch), np.uint64(np.iinfo(np.int64).max)).astype(np.int64))


def flag(flag: Flag) -> Callable[[AttributeSource], Values | None]:
    """A bit of the column ``flags``."""

    def compute(source: AttributeSource) -> Values | None:
        if not source.any_flags & flag:
            return None
        spans, _ = source.where(source.batch["flags"] & int(flag) != 0)
        return np.ones(len(spans), dtype=np.uint8), spans

    return compute


def step(source: AttributeSource) -> Values:
    """Number of the step."""
    numbers = source.table.step[source.synthetic]
    return chosen((numbers, source.synthetic), numbers >= 0)


ITERATION = "dl.iteration"


def iteration(source: AttributeSource) -> Values | None:
    """Number of the step for :data:`ITERATION`, if it was asked for."""
    return None if config.ALIASES.read() is None else step(source)


def captured(key: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for the attribute ``key`` of roots about compiled regions."""

    def compute(source: AttributeSource) -> Values | None:
        shares = source.captured()
        if shares is None:
            return None
        spans = np.flatnonzero(shares.regions > 0)
        return shares.attributes()[key][spans], spans

    return compute


def dropped_events(source: AttributeSource) -> Values | None:
    """Number of dropped events: on one span only, so that sums over spans are right, and the last root, as a full profile drops its end."""
    dropped = sum(source.batch.dropped.values())
    if not dropped:
        return None
    spans = source.synthetic[-1:] if source.dropped_on is None else np.array([source.dropped_on])
    return np.full(len(spans), dropped), spans


def moved(device: str, direction: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for the bytes allocated or released (``direction``) by an event and its descendants on a device."""

    def compute(source: AttributeSource) -> Values | None:
        memory: MovedMemory | None = getattr(source, device)
        if memory is None:
            return None
        return source.nonzero(getattr(memory, direction))

    return compute


def cpu_peak(source: AttributeSource) -> Values | None:
    """The highest total of the CPU's allocator inside each event, or in the time of each synthetic span. Bytes."""
    return _peak(source, CPU_TYPES)


def device_peak(source: AttributeSource) -> Values | None:
    """The highest total of any device's allocator, likewise."""
    return _peak(source, DEVICE_TYPES)


def _peak(source: AttributeSource, types: tuple[int, ...]) -> Values | None:
    of_rows = peaks_of_rows(source.batch, types, source.memory_rows)
    if of_rows is None:
        return None
    roots = source.synthetic
    of_roots = peaks_between(source.batch, types, source.table.start[roots], source.table.end[roots])
    spans, rows = source.where(of_rows != NO_PEAK)
    return source.joined((of_rows[rows], spans), chosen((of_roots, roots), of_roots != NO_PEAK))


_NS_PER_S = 1e9

SHORTEST_WITH_ENERGY_NS = 100_000_000
"""Energy of shorter events is not known: they may lie between two readings of the counter."""


def device_duration(source: AttributeSource) -> Values | None:
    """Device time of the event's own timing events, else of those of its descendants; for a root, of all events in its time."""
    times = source.device_times
    if times is None:
        return None
    has_pair = times.pair >= 0
    own = _of_pairs(source, "duration", times.pair) if has_pair.any() else np.zeros_like(times.total)
    time = np.where(has_pair, own, np.maximum(times.total, 0))
    spans, rows = source.where(has_pair | (time > 0))
    roots = source.synthetic
    of_roots = covered_between(source.batch, source.table.start[roots], source.table.end[roots])
    return source.joined((time[rows] / _NS_PER_S, spans), chosen((of_roots / _NS_PER_S, roots), of_roots > 0))


def device_idle(source: AttributeSource) -> Values | None:
    """Time that devices waited for the host, seconds, for roots with device times."""
    if source.device_times is None:
        return None
    roots = source.synthetic
    time = drained_between(source.batch, source.table.start[roots], source.table.end[roots])
    return chosen((np.nan_to_num(time) / _NS_PER_S, roots), ~np.isnan(time))


def device_self_duration(source: AttributeSource) -> Values | None:
    """Device time of an event with timing events, outside of its child events."""
    times = source.device_times
    if times is None:
        return None
    spans, rows = source.where(times.pair >= 0)
    return np.maximum(times.own[rows], 0) / _NS_PER_S, spans


def device(source: AttributeSource) -> Values | None:
    """The name of the device's type."""
    device_types = of_pair("device_type")(source)
    if device_types is None:
        return None
    types, which = np.unique(device_types[0], return_inverse=True)
    names = source.add([device_name(number) for number in types.tolist()])
    return names[which.reshape(-1)], device_types[1]


def of_pair(column: str) -> Callable[[AttributeSource], Values | None]:
    """A column of the event's own timing events."""

    def compute(source: AttributeSource) -> Values | None:
        times = source.device_times
        if times is None:
            return None
        spans, rows = source.where(times.pair >= 0)
        return (_of_pairs(source, column, times.pair[rows]).astype(np.int64), spans) if spans.size else None

    return compute


def energy(source: AttributeSource) -> Values | None:
    """Energy of roots, and of labels and modules of at least :data:`SHORTEST_WITH_ENERGY_NS`."""
    table = source.table
    joules = joules_between(source.batch, table.start, table.end)
    if joules is None:
        return None
    long = table.end - table.start >= SHORTEST_WITH_ENERGY_NS
    kinds = (source.of_kind(kind)[0] for kind in (Kind.LABEL, Kind.MODULE))
    spans = np.sort(np.concatenate([source.synthetic, *(spans[long[spans]] for spans in kinds)]))
    return chosen((np.nan_to_num(joules)[spans], spans), ~np.isnan(joules[spans]))


def _of_pairs(source: AttributeSource, column: str, pair: Array) -> Array:
    """A column of the pair of each span, of any pair where it has none; some span has one."""
    values: Array = (source.batch.devices or {})[column][np.maximum(pair, 0)]
    return values


COLLECTION = "gc.collect: generation "
"""Prefix of the names of garbage collections."""

UNKNOWN_ERROR = "_OTHER"
"""``error.type`` of an error of unknown class, from OpenTelemetry's conventions."""


def function(value_of: Callable[[FunctionInfo], Any], *, is_text: bool) -> Callable[[AttributeSource], Values | None]:
    """A field of the function that was called, or that has called the event."""

    def compute(source: AttributeSource) -> Values | None:
        functions = source.functions
        if functions is None:
            return None
        info, which, spans = functions
        values = [value_of(info_field) for info_field in info]
        return (source.add(values) if is_text else np.array(values, dtype=np.int64))[which], spans

    return compute


def module(source: AttributeSource) -> Values:
    """Full names of modules: names of their events; for calls of modules, from the noted metadata."""
    spans, _ = source.of_kind(Kind.MODULE)
    modules = source.table.name[spans], spans
    info = source.batch.frame_info
    if info is None or source.frames is None:
        return modules
    calls, rows = source.frames
    parts = info.recordings or (info,)
    since = np.array([part.since for part in parts], dtype=np.int64)
    part_of = np.maximum(np.searchsorted(since, source.table.start[calls], side="right") - 1, 0)
    of_calls = []
    for number, part in enumerate(parts):
        used, which = distinct(source.batch["name"][rows[part_of == number]])
        known = [part.modules[name].qualified_name if name in part.modules else "" for name in used.tolist()]
        is_known = np.array([bool(name) for name in known], dtype=np.bool_)[which]
        of_calls.append(chosen((source.add(known)[which], calls[part_of == number]), is_known))
    return source.joined(modules, *of_calls)


def generation(source: AttributeSource) -> Values | None:
    """The generation of a garbage collection."""
    if source.frames is None:
        return None
    spans, rows = source.frames
    used, which = distinct(source.batch["name"][rows])
    values = np.array([_generation(source.batch.names[name]) for name in used.tolist()], dtype=np.int64)[which]
    return chosen((values, spans), values >= 0)


def identity(source: AttributeSource) -> Values | None:
    """Identity of the generator, coroutine or optimizer of a call."""
    if source.frames is None:
        return None
    spans, rows = source.frames
    values = source.batch["fwd_thread"][rows].astype(np.int64)
    return chosen((values, spans), values != 0)


def error_type(source: AttributeSource) -> Values | None:
    """The class of an exception; not known of every call."""
    if not source.any_flags & Flag.ERROR and not source.batch["error_type"].max(initial=0):
        return None
    values = source.batch["error_type"]
    unknown = (values == 0) & (source.batch["flags"] & int(Flag.ERROR) != 0)
    if unknown.any():
        values = np.where(unknown, source.add([UNKNOWN_ERROR])[0], values)
    return source.nonzero(values)


def _generation(name: str) -> int:
    number = name.removeprefix(COLLECTION)
    return int(number) if number != name and number.isdecimal() else -1
