"""Ends of steps and changes of segments: noted by the thread of the loop at little cost, read by another thread."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context as otel_context

from otel_torchprof._columns.phases import Segment
from otel_torchprof._native.python_sources import usage_now
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.context import Context

    from otel_torchprof._columns.phases import Usage

_MOST = 100_000
"""Most buffered changes; beyond it the oldest are dropped, and their steps merge with the next."""


class SegmentChange(NamedTuple):
    """End of a segment and begin of the next one, reported by the program or its framework."""

    begins: Segment | None = Segment.STEP
    """The new segment; None for none until the next change."""
    ends_step: bool = True
    """Whether a step ends here; if no segment is known yet, it is the first."""
    replaces_step: bool = False
    """Whether the current step is not a step but the new segment, from its start on."""
    attributes: Mapping[str, Any] | None = None
    """Attributes of the span that ends."""
    is_of_loop: bool = False
    """Whether a framework reports its own loop; steps are learned before that loop begins and after it has ended."""
    ends_loop: bool = False
    """Whether that loop ends here."""
    is_evaluation: bool = False
    """Whether that loop is only this evaluation, in a program whose own loop may be inside a step."""


NEXT_STEP = SegmentChange()
"""Ends a step and begins the next one."""
LOOP_END = SegmentChange(None, ends_step=False, is_of_loop=True, ends_loop=True)
"""Ends the loop of a framework and its current segment."""


class StepMark(NamedTuple):
    """One change with its time and thread."""

    time_ns: int
    """Unix ns of the recorder's clock, the clock of events."""
    context: Context
    """OpenTelemetry context of the loop."""
    thread: int
    """``threading.get_ident()`` of the loop."""
    usage: Usage | None
    """Operating system counters of that thread."""
    change: SegmentChange


class StepMarks:
    """Buffered changes. Thread-safe.

    Inside a model a line of Python costs ten times what it costs in a loop of its own, since a training step leaves no
    cache warm: calling the sampler, creating ids and looking up the span took 170 us there, 9 us alone (measured, 2
    cores). So the loop's thread makes five calls into C and one tuple; everything else happens when the recorder is
    drained.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, Context, int, Usage | None, SegmentChange]] = deque(maxlen=_MOST)
        self.note = _noting(self._marks.append)
        """``note(change)``; by default :data:`NEXT_STEP`."""

    def take(self) -> Iterator[StepMark]:
        """Returns the buffered changes, in order."""
        ahead = recorder_ahead_ns()
        while True:
            try:
                at, context, thread, usage, change = self._marks.popleft()
            except IndexError:  # not asked before: a signal handler may take some in between
                return
            yield StepMark(at + ahead, context, thread, usage, change)

    def __len__(self) -> int:
        return len(self._marks)


class RawMarks:
    """Marks that wait, as they were noted: ``(optimizer, monotonic ns, context, thread)``. Thread-safe.

    Args:
        ask: called in the loop's thread, after its mark was noted, with the time of that, once :attr:`ask_at` has come. It must
            not raise.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._marks: deque[tuple[Any, int, Context, int]] = deque(maxlen=_MOST)
        self._ask = ask
        self._ask_at = [float("inf")]
        self.note = self._noting()
        """``note(optimizer, args, kwargs)``, a post-hook of torch's optimizers; ``note(None)`` for the program's own steps."""

    @property
    def ask_at(self) -> float:
        """Monotonic ns."""
        return self._ask_at[0]

    @ask_at.setter
    def ask_at(self, time_ns: float) -> None:
        self._ask_at[0] = time_ns

    def take(self) -> Iterator[tuple[Any, int, Context, int]]:
        """Those that wait now, in order, and not what comes meanwhile: a loop may be as fast as who takes."""
        with contextlib.suppress(IndexError):  # a signal handler may take some in between
            for _ in range(len(self._marks)):
                yield self._marks.popleft()

    def __len__(self) -> int:
        return len(self._marks)

    def clear(self) -> None:
        """Forgets what waits."""
        self._marks.clear()
        self.ask_at = float("inf")

    def _noting(self) -> Callable[..., None]:
        append, ask, ask_at = self._marks.append, self._ask, self._ask_at
        clock, ident, current = time.monotonic_ns, threads.get_ident, _current_context()

        def note(optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
            now = clock()
            append((optimizer, now, current(), ident()))
            if now >= ask_at[0]:
                ask(now)

        return note


def recorder_ahead_ns() -> int:
    """How far the recorder's clock is ahead of the monotonic one: of a few readings the one that took the shortest."""
    readings = []
    for _ in range(3):
        before, recorder, after = time.monotonic_ns(), now_ns(), time.monotonic_ns()
        readings.append((after - before, recorder - (before + after) // 2))
    return min(readings)[1]


def _noting(append: Callable[[Any], None]) -> Callable[..., None]:
    # Not the wall clock: that may be set back, which the recorder's does not follow, and every event would be in the last step.
    clock, ident, current, usage = time.monotonic_ns, threads.get_ident, _current_context(), usage_now

    def note(change: SegmentChange = NEXT_STEP) -> None:
        append((clock(), current(), ident(), usage(), change))

    return note


def _current_context() -> Callable[[], Context]:
    """What asks for OpenTelemetry's current context; straight from the context variable where that is where it is."""
    runtime = getattr(otel_context, "_RUNTIME_CONTEXT", None)
    variable = getattr(runtime, "_current_context", None)
    return variable.get if isinstance(variable, ContextVar) else otel_context.get_current
