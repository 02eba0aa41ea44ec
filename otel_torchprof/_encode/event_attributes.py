"""Attributes of events: what each is, its inputs, memory, thread and flags; its time on devices; the call that it is, or is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._model.devices import covered_between, device_name, drained_between, joules_between
from otel_torchprof._model.flops import flops_of
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.inputs import InputKind, has_inputs, may_have, text_ids, values_in
from otel_torchprof._model.memory import CPU_TYPES, DEVICE_TYPES, NO_PEAK, peaks_between, peaks_of_rows
from otel_torchprof._model.reductions import own_times

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.frame_info import FunctionInfo
    from otel_torchprof._model.inputs import InputPart, Inputs
    from otel_torchprof._model.memory import MovedMemory

    from .attribute_source import Array, AttributeSource, Values


def scope(source: AttributeSource) -> Values:
    """Kind of RecordFunction."""
    names, scope = source.add([scope.name.lower() for scope in Scope]), source.batch["scope"]
    present = source.spread(scope < len(names)) & source.is_event
    for kind in (Kind.MODULE, Kind.FRAME, Kind.PHASE):
        present &= source.kind != kind
    return source.spread(scope, names), present


def sequence_nr(source: AttributeSource) -> Values:
    """Autograd's number."""
    values = source.column("sequence_nr")
    return values, (values >= 0) & (source.kind != Kind.PHASE) & source.is_event


def forward_thread(source: AttributeSource) -> Values:
    """Thread of the forward call, for backward functions."""
    values = source.spread(source.batch["fwd_thread"], dtype=np.int64)
    of_operators = (source.kind != Kind.FRAME) & (source.kind != Kind.PHASE)
    return values, (values != 0) & of_operators & source.is_event


def inputs(parts: InputPart, make: Callable[[Inputs], Any]) -> Callable[[AttributeSource], Values | None]:
    """Something of the inputs, as text; of an empty list there is none. A label's args have a key of their own."""

    def compute(source: AttributeSource) -> Values | None:
        if not has_inputs(source.batch):
            return None
        codes, texts = source.inputs.texts(parts, make)
        present = source.spread(source.inputs.numbers, codes != 0) & (source.kind != Kind.LABEL)
        return source.spread(source.inputs.numbers, source.add(texts)[codes]), present & source.is_event

    return compute


def values_of(inputs: Inputs) -> list[Any]:
    """The values of inputs; empty if no input has one."""
    values = values_in(inputs)
    return [] if all(value is None for value in values) else values


def string(source: AttributeSource) -> Values | None:
    """A string among the inputs: the args of a label."""
    if not has_inputs(source.batch):
        return None
    ids = source.spread(source.inputs.numbers, source.inputs.text_ids(InputKind.STRING))
    return ids, (ids != 0) & source.is_event


def overload(source: AttributeSource) -> Values | None:
    """The operator's overload."""
    if not may_have(source.batch, InputKind.OVERLOAD):
        return None
    ids = source.spread(text_ids(source.batch, InputKind.OVERLOAD))
    return ids, (ids != 0) & source.is_event


def flops(source: AttributeSource) -> Values | None:
    """Floating-point operations."""
    if not source.with_flops:
        return None
    # For inconsistent shapes torch's count may exceed the range of an attribute.
    flops = source.spread(np.minimum(flops_of(source.batch), np.uint64(np.iinfo(np.int64).max)).astype(np.int64))
    return flops, (flops != 0) & source.is_event


def self_duration(source: AttributeSource) -> Values:
    """Time not spent in children on its thread, seconds."""
    batch, own = source.batch, source.self_time
    if own is None:
        own = own_times(batch)
    seconds = source.spread(own, dtype=np.float64)
    seconds /= 1e9
    return np.maximum(seconds, 0, out=seconds), source.is_event


def thread_id(source: AttributeSource) -> Values:
    """The thread on which the event began."""
    idents = np.array([thread.ident for thread in source.batch.threads], dtype=np.int64)
    return source.spread(source.batch["thread"], idents), source.is_event


def thread_name(source: AttributeSource) -> Values:
    """The name of that thread."""
    threads = source.batch.threads
    named = np.array([bool(thread.name) for thread in threads], dtype=bool)
    names = source.add([thread.name for thread in threads])
    thread = source.batch["thread"]
    return source.spread(thread, names), source.spread(thread, named) & source.is_event


def flag(flag: Flag) -> Callable[[AttributeSource], Values | None]:
    """A bit of the column ``flags``."""

    def compute(source: AttributeSource) -> Values | None:
        if not source.any_flags & flag:
            return None
        return np.ones(len(source.table), dtype=np.uint8), (source.column("flags") & flag != 0) & source.is_event

    return compute


def step(source: AttributeSource) -> Values:
    """Number of the step."""
    return source.table.step, source.table.step >= 0


ITERATION = "dl.iteration"


def iteration(source: AttributeSource) -> Values | None:
    """Number of the step for :data:`ITERATION`, if it was asked for."""
    return None if config.ALIASES.read() is None else step(source)


def captured(key: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for the attribute ``key`` of roots about compiled regions."""

    def compute(source: AttributeSource) -> Values | None:
        shares = source.captured()
        return None if shares is None else (shares.attributes()[key], shares.regions > 0)

    return compute


def dropped_events(source: AttributeSource) -> Values | None:
    """Number of dropped events: on one span only, so that sums over spans are right, and the last root, as a full profile drops its end."""
    dropped = sum(source.batch.dropped.values())
    if not dropped:
        return None
    chosen = np.zeros(len(source.table), dtype=bool)
    chosen[np.flatnonzero(~source.is_event)[-1:] if source.dropped_on is None else source.dropped_on] = True
    return np.full(len(source.table), dropped), chosen


def moved(device: str, direction: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for the bytes allocated or released (``direction``) by an event and its descendants on a device."""

    def compute(source: AttributeSource) -> Values | None:
        memory: MovedMemory | None = getattr(source, device)
        if memory is None:
            return None
        values = source.spread(getattr(memory, direction))
        return values, (values != 0) & source.is_event

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
    peaks, roots = source.spread(of_rows), np.flatnonzero(~source.is_event)
    peaks[roots] = peaks_between(source.batch, types, source.table.start[roots], source.table.end[roots])
    return peaks, peaks != NO_PEAK


_NS_PER_S = 1e9

SHORTEST_WITH_ENERGY_NS = 100_000_000
"""Energy of shorter events is not known: they may lie between two readings of the counter."""


def device_duration(source: AttributeSource) -> Values | None:
    """Device time of the event's own timing events, else of those of its descendants; for a root, of all events in its time."""
    pairs = _pairs(source)
    if pairs is None or source.device_times is None:
        return None
    pair, has_pair = pairs
    total = source.spread(source.device_times.total)
    own = _of_pairs(source, "duration", pair) if has_pair.any() else np.zeros_like(total)
    time = np.where(has_pair, own, np.maximum(total, 0))
    roots = np.flatnonzero(~source.is_event)
    time[roots] = covered_between(source.batch, source.table.start[roots], source.table.end[roots])
    return time / _NS_PER_S, has_pair | (time > 0)


def device_idle(source: AttributeSource) -> Values | None:
    """Time that devices waited for the host, seconds, for roots with device times."""
    if source.device_times is None:
        return None
    roots = ~source.is_event
    time = np.full(len(roots), np.nan)
    time[roots] = drained_between(source.batch, source.table.start[roots], source.table.end[roots])
    return np.nan_to_num(time) / _NS_PER_S, ~np.isnan(time)


def device_self_duration(source: AttributeSource) -> Values | None:
    """Device time of an event with timing events, outside of its child events."""
    pairs = _pairs(source)
    if pairs is None or source.device_times is None:
        return None
    return np.maximum(source.spread(source.device_times.own), 0) / _NS_PER_S, pairs[1]


def device(source: AttributeSource) -> Values | None:
    """The name of the device's type."""
    pairs = _pairs(source)
    if pairs is None or not pairs[1].any():
        return None
    types, which = np.unique(_of_pairs(source, "device_type", pairs[0]), return_inverse=True)
    names = source.add([device_name(number) for number in types.tolist()])
    return names[which.reshape(-1)], pairs[1]


def of_pair(column: str) -> Callable[[AttributeSource], Values | None]:
    """A column of the event's own timing events."""

    def compute(source: AttributeSource) -> Values | None:
        pairs = _pairs(source)
        if pairs is None or not pairs[1].any():
            return None
        return _of_pairs(source, column, pairs[0]).astype(np.int64), pairs[1]

    return compute


def energy(source: AttributeSource) -> Values | None:
    """Energy of roots, and of labels and modules of at least :data:`SHORTEST_WITH_ENERGY_NS`."""
    table = source.table
    joules = joules_between(source.batch, table.start, table.end)
    if joules is None:
        return None
    kind, length = source.kind, table.end - table.start
    reported = ((kind == Kind.LABEL) | (kind == Kind.MODULE)) & (length >= SHORTEST_WITH_ENERGY_NS)
    return np.nan_to_num(joules), (reported | ~source.is_event) & ~np.isnan(joules)


def _of_pairs(source: AttributeSource, column: str, pair: Array) -> Array:
    """A column of the pair of each span, of any pair where it has none; some span has one."""
    values: Array = (source.batch.devices or {})[column][np.maximum(pair, 0)]
    return values


def _pairs(source: AttributeSource) -> tuple[Array, Array] | None:
    """Per span the place of its pair, and whether it has one."""
    times = source.device_times
    if times is None:
        return None
    pair = source.spread(times.pair)
    return pair, (pair >= 0) & source.is_event


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
        info, which = functions
        values = [value_of(info_field) for info_field in info]
        column = source.add(values) if is_text else np.array(values, dtype=np.int64)
        return np.append(column, column[:1])[which], which >= 0

    return compute


def module(source: AttributeSource) -> Values | None:
    """Full names of modules: names of their events; for calls of modules, from the noted metadata."""
    is_module = (source.kind == Kind.MODULE) & source.is_event
    if source.frames is None and not is_module.any():
        return None
    values = np.where(is_module, source.table.name, np.uint32(0))
    info = source.batch.frame_info
    if info is None or source.frames is None:
        return values, is_module
    present = is_module.copy()
    parts = info.recordings or (info,)
    since = np.array([part.since for part in parts], dtype=np.int64)
    part_of = np.maximum(np.searchsorted(since, source.table.start[source.frames], side="right") - 1, 0)
    for number, part in enumerate(parts):
        spans = source.frames[part_of == number]
        used, which = distinct(source.frame_names(spans))
        known = [part.modules[name].qualified_name if name in part.modules else "" for name in used.tolist()]
        names = source.add(known)
        is_known = np.array([bool(name) for name in known], dtype=np.bool_)[which]
        values[spans[is_known]] = names[which[is_known]]
        present[spans[is_known]] = True
    return values, present


def generation(source: AttributeSource) -> Values | None:
    """The generation of a garbage collection."""
    if source.frames is None:
        return None
    used, which = distinct(source.frame_names(source.frames))
    generations = np.array([_generation(source.batch.names[name]) for name in used.tolist()], dtype=np.int64)
    values = np.full(len(source.table), -1, dtype=np.int64)
    values[source.frames] = generations[which]
    return values, values >= 0


def identity(source: AttributeSource) -> Values | None:
    """Identity of the generator, coroutine or optimizer of a call."""
    if source.frames is None:
        return None
    values = np.zeros(len(source.table), dtype=np.int64)
    values[source.frames] = source.column("fwd_thread")[source.frames]
    return values, values != 0


def error_type(source: AttributeSource) -> Values | None:
    """The class of an exception; not known of every call."""
    if not source.any_flags & Flag.ERROR and not source.batch["error_type"].max(initial=0):
        return None
    values = source.column("error_type")
    unknown = (values == 0) & (source.column("flags") & Flag.ERROR != 0)
    if unknown.any():
        values = np.where(unknown, source.add([UNKNOWN_ERROR])[0], values)
    return values, (values != 0) & source.is_event


def _generation(name: str) -> int:
    number = name.removeprefix(COLLECTION)
    return int(number) if number != name and number.isdecimal() else -1
