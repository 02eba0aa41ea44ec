"""Spans of a black box: what an instrumentation would have made of its events, with steps and phases, up to the end.

Their ids are the same whenever the box is read: a box that was half sent, or sent twice, is one trace at the receiver.
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
from otel_torchprof._model.averages import RunningAverages
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._native.recorder import SLICE_BYTES, SessionStats
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
"""Bytes of spans: a command has less memory than the program had."""


def recovered_spans(contents: Contents) -> Iterator[SpanList]:
    """The spans of an image, in pieces. What was open at the end has the attribute ``torch.unfinished``."""
    recording = Recording()
    recording.start(_BoxEvents(contents))
    ids, resource = _IdsOfBox(contents), _resource(contents.info, contents.pid)
    limits = span_limits_of_environment()
    found = LiveRecording(
        Provider(TracerProvider(ALWAYS_ON, resource, id_generator=ids, span_limits=limits), None),
        recording,
        contexts=ContextTable(),
        averages=RunningAverages(),
        expects_steps=lambda: True,
        now=lambda: contents.last_ns,  # the last that is known of the process
        id_key=ids.generate_span_id(),
        step_rule=_UnendedRule(),
        most_buffered=_MOST_BUFFERED,
    )
    recording.stop()
    while True:
        drained = found.finish()
        if len(drained.spans):
            yield drained.spans
        if drained.watermark == NEVER:
            return


class _BoxEvents:
    """The events of an image, which is all there is: batches of a recording."""

    def __init__(self, contents: Contents) -> None:
        self._batches = contents.events(SLICE_BYTES)
        self._rest: Batch
        self._recorded = 0

    def start(self) -> None:
        """They were recorded long ago."""

    def stop(self) -> None:
        """As the start."""

    def drain(self, max_bytes: int = 0) -> Batch:  # noqa: ARG002 - all slices are of one size
        found = next(self._batches, None)
        if found is None:  # asked once more, after something has failed
            return self._rest
        self._recorded += len(found)
        context = np.zeros(len(found), np.uint32)  # spans of the application are not known here
        columns = {**found.columns, "context": context}
        self._rest = replace(
            found,
            columns={name: column[:0] for name, column in columns.items()},
            outer_rows=found.outer_rows[:0],
            outer_parents=found.outer_parents[:0],
        )
        return replace(found, columns=columns)

    def discard(self) -> None:
        """The file keeps them."""

    def stats(self) -> SessionStats:
        return SessionStats(self._recorded, {}, 0, 0, 0, 0)

    def reserve(self, reserved: bool) -> None:
        """Nobody knows it by a number."""

    def after_fork_in_child(self) -> None:
        """It has no locks."""


class _UnendedCycle(StepCycle):
    """Of a process that died: nobody knows that its loop had ended, so what it did last is in a step that had not."""

    def finish(self, end: int) -> list[Boundary]:  # noqa: ARG002 - it is no end
        return self.settle()


class _UnendedRule(StepRule):
    def cycle(self) -> StepCycle:
        return _UnendedCycle()


class _IdsOfBox(IdGenerator):
    """The same ones for the same box. Another has others: of one process there is one at a time."""

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
    rank, program = info.get("rank"), info.get("program")
    attributes: dict[str, Any] = {"process.pid": pid}
    if isinstance(info.get("host"), str):
        attributes["host.name"] = info["host"]
    if isinstance(program, str) and program and "service.name" not in OTELResourceDetector().detect().attributes:
        attributes["service.name"] = program
    if isinstance(rank, int):
        attributes["torch.distributed.rank"] = rank
    return Resource.create(attributes)
