"""Spans of a black box: those that an instrumentation makes of the same events, with steps and phases.

Their ids are the same at every reading, so that a box that is sent partly or twice is one trace at the receiver.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._export.provider import Provider
from otel_torchprof._export.sdk import span_limits_of_environment
from otel_torchprof._files.attribute_keys import SERVICE
from otel_torchprof._files.box_reading import resource_of
from otel_torchprof._model.averages import RunningAverages
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._native.recorder import SLICE_BYTES, SessionStats
from otel_torchprof._ranks.ranks import with_aliases
from otel_torchprof._record.contexts import ContextTable
from otel_torchprof._record.recording import Recording

from .live_recording import LiveRecording
from .step_segments import StepRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._encode.spans import SpanList
    from otel_torchprof._model.step_rules import Boundary
    from otel_torchprof._native.blackbox import Contents


_MOST_BUFFERED = 32 << 20
"""Limit of the span buffer in bytes: a command has less memory than the program had."""


def recovered_spans(contents: Contents) -> Iterator[SpanList]:
    """Yields the spans of an image in pieces. Spans that were open at the end have the attribute ``torch.unfinished``."""
    recording = Recording()
    recording.start(_BoxEvents(contents))
    ids, resource = _IdsOfBox(contents), _resource(contents.info, contents.pid)
    limits = span_limits_of_environment()
    live = LiveRecording(
        Provider(TracerProvider(ALWAYS_ON, resource, id_generator=ids, span_limits=limits), None),
        recording,
        contexts=ContextTable(),
        averages=RunningAverages(),
        expects_steps=lambda: True,
        now=lambda: contents.last_ns,  # the time of the last event
        id_key=ids.generate_span_id(),
        step_rule=_UnendedRule(),
        most_buffered=_MOST_BUFFERED,
    )
    recording.stop()
    while True:
        drained = live.finish()
        if len(drained.spans):
            yield drained.spans
        if drained.watermark == NEVER:
            return


class _BoxEvents:
    """The events of an image in the form of a session of the recorder."""

    def __init__(self, contents: Contents) -> None:
        self._batches = contents.events(SLICE_BYTES)
        self._rest: Batch
        self._recorded = 0

    def start(self) -> None:
        """Does nothing: the events are complete."""

    def stop(self) -> None:
        """Does nothing."""

    def drain(self, max_bytes: int = 0) -> Batch:  # noqa: ARG002 - all slices are of one size
        batch = next(self._batches, None)
        if batch is None:  # a repeated call, after a failure
            return self._rest
        self._recorded += len(batch)
        context = np.zeros(len(batch), np.uint32)  # spans of the application are not known here
        columns = {**batch.columns, "context": context}
        self._rest = replace(
            batch,
            columns={name: column[:0] for name, column in columns.items()},
            outer_rows=batch.outer_rows[:0],
            outer_parents=batch.outer_parents[:0],
        )
        return replace(batch, columns=columns)

    def discard(self) -> None:
        """Does nothing: the events stay in the file."""

    def stats(self) -> SessionStats:
        return SessionStats(self._recorded, {}, 0, 0, 0, 0)

    def reserve(self, reserved: bool) -> None:
        """Does nothing: no recorder has this session."""

    def after_fork_in_child(self) -> None:
        """Does nothing: there are no locks."""


class _UnendedCycle(StepCycle):
    """A cycle whose last step stays unfinished: whether the loop of a dead process had ended is not known."""

    def finish(self, end: int) -> list[Boundary]:  # noqa: ARG002 - it is no end
        return self.settle()


class _UnendedRule(StepRule):
    def cycle(self) -> StepCycle:
        return _UnendedCycle()


class _IdsOfBox(IdGenerator):
    """Generates the same ids for the same box, and different ids for other boxes, by process and time of opening."""

    def __init__(self, contents: Contents) -> None:
        self._box = f"{contents.pid} {contents.info.get('opened', contents.last_ns)}"
        self._numbers = itertools.count()

    def generate_trace_id(self) -> int:
        return self._next(16)

    def generate_span_id(self) -> int:
        return self._next(8)

    def _next(self, size: int) -> int:
        seed = f"{self._box} {next(self._numbers)}"
        return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=size).digest(), "big") or 1


def _resource(info: Mapping[str, Any], pid: int) -> Resource:
    attributes = resource_of(info, pid)
    if SERVICE in OTELResourceDetector().detect().attributes:
        attributes.pop(SERVICE, None)
    return Resource.create(with_aliases(attributes))
