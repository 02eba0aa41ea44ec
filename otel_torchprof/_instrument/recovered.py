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

from otel_torchprof._averages.running import RunningAverages
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._export.provider import Provider
from otel_torchprof._export.sdk import span_limits_of_environment
from otel_torchprof._native.recorder import SLICE_BYTES, Session, SessionStats
from otel_torchprof._record.recording import Recording
from otel_torchprof._sources.contexts import ContextTable
from otel_torchprof._spans.step_cycle import StepCycle

from .live_recording import LiveRecording
from .step_segments import StepRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._encode.spans import SpanList
    from otel_torchprof._native.blackbox import Contents
    from otel_torchprof._spans.step_cycle import Boundary


_MOST_BUFFERED = 32 << 20
"""Bytes of spans: a command has less memory than the program had."""


def recovered_spans(contents: Contents) -> Iterator[SpanList]:
    """The spans of an image, in pieces. What was open at the end has the attribute ``torch.unfinished``."""
    recording = _Recovered(contents)
    while True:
        drained = recording.finish()
        if len(drained.spans):
            yield drained.spans
        if drained.watermark == NEVER:
            return


class _ReadSession(Session):
    """Hands out the events of an image."""

    def __init__(self, contents: Contents) -> None:
        self._batches = contents.events(SLICE_BYTES)
        self._rest: Batch
        self._recorded = 0
        self.all_threads, self.contexts, self.inputs = True, True, False

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

    def stats(self) -> SessionStats:
        return SessionStats(self._recorded, {}, 0, 0, 0, 0)

    def start(self) -> None:
        """It has begun long ago."""

    def mute_roots(self, muted: bool) -> None:
        """Nothing begins any more."""

    def stop(self) -> None:
        """It does not run."""


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


class _Recovered(LiveRecording):
    def __init__(self, contents: Contents) -> None:
        self._last_ns = contents.last_ns
        ids, resource = _IdsOfBox(contents), _resource(contents.info, contents.pid)
        limits = span_limits_of_environment()
        super().__init__(
            Provider(TracerProvider(ALWAYS_ON, resource, id_generator=ids, span_limits=limits), None),
            recording := Recording(),
            detail="ops",
            contexts=ContextTable(),
            averages=RunningAverages(),
            expects_steps=lambda: True,
            before_drain=_nothing,
            take_marks=_nothing,
            budget_bytes=0,
            inputs=False,
            session=_ReadSession(contents),
            id_key=ids.generate_span_id(),
            step_rule=_UnendedRule(),
        )
        recording.start(self.session)
        self._buffer.max_bytes = _MOST_BUFFERED

    def now(self) -> int:
        """The last that is known of the process."""
        return self._last_ns


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


def _nothing() -> None:
    """Nobody says anything of steps any more."""
