"""Attributes that come from an event's own columns: what it is, its inputs, memory, thread and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._native.loops import self_times
from otel_torchprof._tree.flops import flops_of
from otel_torchprof._tree.inputs import InputKind, has_inputs, may_have, text_ids, values_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._tree.inputs import InputPart, Inputs

    from .attribute_source import Source, Values


def scope(source: Source) -> Values:
    """Kind of RecordFunction."""
    names, scope = source.add([scope.name.lower() for scope in Scope]), source.batch["scope"]
    present = source.spread(scope < len(names)) & source.is_event
    for kind in (Kind.MODULE, Kind.FRAME, Kind.PHASE):
        present &= source.kind != kind
    return source.spread(scope, names), present


def sequence_nr(source: Source) -> Values:
    """Autograd's number."""
    values = source.column("sequence_nr")
    return values, (values >= 0) & (source.kind != Kind.PHASE) & source.is_event


def forward_thread(source: Source) -> Values:
    """Of backward functions."""
    values = source.spread(source.batch["fwd_thread"], dtype=np.int64)
    of_operators = (source.kind != Kind.FRAME) & (source.kind != Kind.PHASE)
    return values, (values != 0) & of_operators & source.is_event


def inputs(parts: InputPart, make: Callable[[Inputs], Any]) -> Callable[[Source], Values | None]:
    """Something of the inputs, as text; of an empty list there is none. A label's args have a key of their own."""

    def compute(source: Source) -> Values | None:
        if not has_inputs(source.batch):
            return None
        codes, texts = source.inputs.texts(parts, make)
        present = source.spread(source.inputs.numbers, codes != 0) & (source.kind != Kind.LABEL)
        return source.spread(source.inputs.numbers, source.add(texts)[codes]), present & source.is_event

    return compute


def values_of(inputs: Inputs) -> list[Any]:
    """The values of inputs; none where no input has one."""
    found = values_in(inputs)
    return [] if all(value is None for value in found) else found


def string(source: Source) -> Values | None:
    """A string among the inputs: the args of a label."""
    if not has_inputs(source.batch):
        return None
    ids = source.spread(source.inputs.numbers, source.inputs.text_ids(InputKind.STRING))
    return ids, (ids != 0) & source.is_event


def overload(source: Source) -> Values | None:
    """The operator's overload."""
    if not may_have(source.batch, InputKind.OVERLOAD):
        return None
    ids = source.spread(text_ids(source.batch, InputKind.OVERLOAD))
    return ids, (ids != 0) & source.is_event


def flops(source: Source) -> Values | None:
    """Floating-point operations."""
    if not source.with_flops:
        return None
    # What torch counts of shapes that do not fit together may be beyond an attribute's numbers.
    flops = source.spread(np.minimum(flops_of(source.batch), np.uint64(np.iinfo(np.int64).max)).astype(np.int64))
    return flops, (flops != 0) & source.is_event


def self_duration(source: Source) -> Values:
    """Time not spent in children on its thread, seconds."""
    batch, own = source.batch, source.self_time
    if own is None:
        own = self_times(batch["parent"], batch["start"], batch["end"])
    seconds = source.spread(own, dtype=np.float64)
    seconds /= 1e9
    return np.maximum(seconds, 0, out=seconds), source.is_event


def thread_id(source: Source) -> Values:
    """Where it began."""
    idents = np.array([thread.ident for thread in source.batch.threads], dtype=np.int64)
    return source.spread(source.batch["thread"], idents), source.is_event


def thread_name(source: Source) -> Values:
    """The name of that thread."""
    threads = source.batch.threads
    named = np.array([bool(thread.name) for thread in threads], dtype=bool)
    names = source.add([thread.name for thread in threads])
    thread = source.batch["thread"]
    return source.spread(thread, names), source.spread(thread, named) & source.is_event


def flag(flag: Flag) -> Callable[[Source], Values | None]:
    """A bit of the column ``flags``."""

    def compute(source: Source) -> Values | None:
        if not source.any_flags & flag:
            return None
        return np.ones(len(source.table), dtype=np.uint8), (source.column("flags") & flag != 0) & source.is_event

    return compute


def step(source: Source) -> Values:
    """Number of the step."""
    return source.table.step, source.table.step >= 0


def captured(key: str) -> Callable[[Source], Values | None]:
    """What of a root ran in compiled regions."""

    def compute(source: Source) -> Values | None:
        shares = source.captured()
        return None if shares is None else (shares.attributes()[key], shares.regions > 0)

    return compute


def dropped_events(source: Source) -> Values | None:
    """On one span only, so that a sum over spans is right; a profile that is full drops at its end, hence the last root."""
    dropped = sum(source.batch.dropped.values())
    if not dropped:
        return None
    chosen = np.zeros(len(source.table), dtype=bool)
    chosen[np.flatnonzero(~source.is_event)[-1:] if source.dropped_on is None else source.dropped_on] = True
    return np.full(len(source.table), dropped), chosen
