"""Attributes that come from an event's own columns: what it is, its inputs, memory, thread and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._native.loops import self_times
from otel_torchprof._tree.flops import flops_of
from otel_torchprof._tree.input_words import InputKind, InputPart, has_inputs, text_ids
from otel_torchprof._tree.inputs import concrete_inputs as values_of
from otel_torchprof._tree.inputs import input_dtypes as types_of
from otel_torchprof._tree.inputs import shape_keys, texts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

    from .attribute_source import Array, Source, Values


def scope(source: Source) -> Values:
    """Kind of RecordFunction."""
    names = source.add([scope.name.lower() for scope in Scope])
    scope, kind = source.column("scope"), source.column("kind")
    known = scope < len(names)
    return names[np.where(known, scope, 0)], known & source.is_event & (kind != Kind.MODULE) & (kind != Kind.FRAME)


def sequence_nr(source: Source) -> Values:
    """Autograd's number."""
    values = source.column("sequence_nr")
    return values, (values >= 0) & source.is_event


def forward_thread(source: Source) -> Values:
    """Of backward functions."""
    values = source.column("fwd_thread")
    return values, (values != 0) & (source.column("kind") != Kind.FRAME) & source.is_event


def _texts(source: Source, numbered: tuple[Array, list[str]]) -> Values:
    """Texts by number, as the values of events; number 0 stands for no inputs at all. A label's args have a key of their own."""
    keys, texts = numbered
    present = (keys != 0) & (source.batch["kind"] != Kind.LABEL)
    return source.spread(source.add(texts)[keys]), source.spread(present) & source.is_event


def input_shapes(source: Source) -> Values | None:
    """Sizes of inputs, as text."""
    return _texts(source, shape_keys(source.batch)) if has_inputs(source.batch) else None


def input_dtypes(source: Source) -> Values | None:
    """Types of inputs, as text."""
    if not has_inputs(source.batch):
        return None
    return _texts(source, texts_of(source.batch, InputPart.DTYPES, types_of))


def _values(batch: Batch, row: int) -> list[Any]:
    found = values_of(batch, row)
    return [] if all(value is None for value in found) else found


def concrete_inputs(source: Source) -> Values | None:
    """Values of inputs, as text."""
    if not has_inputs(source.batch):
        return None
    return _texts(source, texts_of(source.batch, InputPart.VALUES, _values))


def text(kind: InputKind) -> Callable[[Source], Values | None]:
    """A text among the inputs: an overload, the args of a label."""

    def compute(source: Source) -> Values | None:
        if not has_inputs(source.batch):
            return None
        ids = source.spread(text_ids(source.batch, kind))
        return ids, (ids != 0) & source.is_event

    return compute


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
    seconds = own / 1e9
    return source.spread(np.maximum(seconds, 0, out=seconds)), source.is_event


def thread_id(source: Source) -> Values:
    """Where it began."""
    idents = np.array([thread.ident for thread in source.batch.threads], dtype=np.int64)
    return source.spread(idents[source.batch["thread"]]), source.is_event


def thread_name(source: Source) -> Values:
    """The name of that thread."""
    threads = source.batch.threads
    named = np.array([bool(thread.name) for thread in threads], dtype=bool)
    names = source.add([thread.name for thread in threads])
    thread = source.batch["thread"]
    return source.spread(names[thread]), source.spread(named[thread]) & source.is_event


def flag(flag: Flag) -> Callable[[Source], Values]:
    """A bit of the column ``flags``."""

    def compute(source: Source) -> Values:
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
