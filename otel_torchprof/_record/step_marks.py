"""Ends of steps and changes of segments: recorded cheaply on the loop's thread, read by another thread.

Every recording with steps gets what frameworks report about their loops.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from opentelemetry import context as otel_context

from otel_torchprof._columns.phases import LOOP_END, NEXT_STEP, SegmentChange
from otel_torchprof._native.python_sources import usage_now
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._native.stacks import sample_loop
from otel_torchprof._process import process_changes, threads

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_torchprof._columns.phases import Usage

_MOST = 100_000
"""Most buffered changes; beyond it the oldest are dropped, and their steps merge with the next."""


class StepMark(NamedTuple):
    """A step boundary or change of segment, with its time and thread."""

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

    In a training step, a line of Python costs ten times what it costs in a loop of its own, since no cache is warm: calling the
    sampler, creating ids and looking up the span took 170 us there, 9 us alone (measured, 2 cores). So the loop's thread
    makes five calls into C and one tuple; everything else is done when the recorder is drained.
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
            except IndexError:  # a length check before would not do: a signal handler may take some in between
                return
            yield StepMark(at + ahead, context, thread, usage, change)

    def __len__(self) -> int:
        return len(self._marks)


class RawMarks:
    """Buffered ends of steps: ``(optimizer, monotonic ns, context, thread)``, with None for the program's own steps. Thread-safe.

    Args:
        ask: called in the loop's thread with the time of an added entry, if it is not before :attr:`ask_at`. Must not raise.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._marks: deque[tuple[Any, int, Context, int]] = deque(maxlen=_MOST)
        self._ask = ask
        self._ask_at = [float("inf")]
        self.note = self._noting()
        """``note(optimizer, args, kwargs)``, a post-hook of torch's optimizers; ``note(None)`` for the program's own steps."""

    @property
    def ask_at(self) -> float:
        """Monotonic ns from which on entries call ``ask``."""
        return self._ask_at[0]

    @ask_at.setter
    def ask_at(self, time_ns: float) -> None:
        self._ask_at[0] = time_ns

    def take(self) -> Iterator[tuple[Any, int, Context, int]]:
        """Returns the entries buffered so far, in order; not those added meanwhile, as a fast loop would add them endlessly."""
        with contextlib.suppress(IndexError):  # a signal handler may take some in between
            for _ in range(len(self._marks)):
                yield self._marks.popleft()

    def __len__(self) -> int:
        return len(self._marks)

    def clear(self) -> None:
        """Drops all entries."""
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
    """Returns the recorder's clock minus the monotonic one, ns; from the fastest of a few readings."""
    readings = []
    for _ in range(3):
        before, recorder, after = time.monotonic_ns(), now_ns(), time.monotonic_ns()
        readings.append((after - before, recorder - (before + after) // 2))
    return min(readings)[1]


def _noting(append: Callable[[Any], None]) -> Callable[..., None]:
    # Not the wall clock: if it is set back, the recorder's clock is not, and every event would be in the last step.
    clock, ident, current, usage = time.monotonic_ns, threads.get_ident, _current_context(), usage_now

    def note(change: SegmentChange = NEXT_STEP) -> None:
        sample_loop()
        append((clock(), current(), ident(), usage(), change))

    return note


def _current_context() -> Callable[[], Context]:
    """Returns a function that gets OpenTelemetry's current context, directly from the context variable if it is there."""
    runtime = getattr(otel_context, "_RUNTIME_CONTEXT", None)
    variable = getattr(runtime, "_current_context", None)
    return variable.get if isinstance(variable, ContextVar) else otel_context.get_current


# ---- Steps of a training loop, numbered once per process, by the program or by its optimizers ----


Boundary = Callable[[int, int], None]


class StepTracker:
    """Detects the boundaries between steps.

    Step 0 runs from the start of the program to the first boundary. The program marks boundaries with :meth:`step`. Until its first call,
    the optimizers mark them: each counts its own steps, and a new step begins when a count exceeds the number of the running step. So two
    alternating optimizers (GAN) make one step per round, and gradient accumulation makes one per call of the optimizer. An optimizer
    that is new or behind joins the running step, unless the optimizer that began it is freed: a program may create one per step.

    Thread-safe. A boundary costs about a microsecond plus ``on_boundary``.

    Args:
        on_boundary: called with the number of the next step and the time, Unix ns of the recorder's clock, in the thread of the
            boundary, one call at a time. Its exceptions reach the caller of :meth:`step` or :meth:`optimizer_stepped`.
        clock: returns the time, Unix ns.
    """

    def __init__(self, on_boundary: Boundary, *, clock: Callable[[], int] = now_ns) -> None:
        self._on_boundary = on_boundary
        self._clock = clock
        self._lock = threads.RLock()
        self._number = 0
        self._explicit = False
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._beginner: weakref.ref[Any] | None = None

    @property
    def number(self) -> int:
        """Number of the running step."""
        return self._number

    def step(self) -> None:
        """Ends the running step; after the first call, optimizers begin no more steps."""
        with self._lock:
            self._explicit = True
            self._begin_next()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Counts a step of an optimizer. Keeps only a weak reference to it."""
        with self._lock:
            if self._explicit:
                return
            count = max(self._counts.get(optimizer, 0) + 1, self._number)
            if count == self._number and self._beginner is not None and self._beginner() is None:
                count += 1
            self._counts[optimizer] = count
            if count > self._number:
                self._beginner = weakref.ref(optimizer)
                self._begin_next()

    def expects_steps(self) -> bool:
        """Whether the program trains: a step ended, or an optimizer was ever created."""
        return self._number > 0 or optimizers_were_made()

    def _begin_next(self) -> None:
        self._number += 1
        self._on_boundary(self._number, self._clock())


def optimizers_were_made() -> bool:
    """Whether an optimizer was ever created. Imports nothing; costs microseconds, as it checks every class of optimizer."""
    return any(_has_instances(kind) for kind in _optimizer_classes())


def _optimizer_classes() -> Iterator[type]:
    module = sys.modules.get("torch.optim.optimizer")
    classes = [getattr(module, "Optimizer", None)]
    while classes:
        kind = classes.pop()
        if kind is not None:
            yield kind
            classes.extend(kind.__subclasses__())


def _has_instances(kind: type) -> bool:
    # When the first optimizer of a class is created, torch wraps the step function of the class, to call hooks, and marks it.
    return getattr(vars(kind).get("step"), "hooked", False) is True


class Listener(Protocol):
    """A recording that has steps."""

    def change_segment(self, change: SegmentChange) -> None:
        """Called in the thread of the loop; must not raise."""


class LoopMarks:
    """Passes changes of segments that frameworks report to all recordings that have steps. Thread-safe without a lock.

    A change takes some microseconds per recording.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, None] = {}
        self._thread: threading.Thread | None = None
        """The thread of the running loop; None if none runs."""

    @property
    def has_listeners(self) -> bool:
        """Whether any recording has steps."""
        return bool(self._listeners)

    def add(self, listener: Listener) -> None:
        """Registers a listener for changes."""
        self._listeners[listener] = None

    def remove(self, listener: Listener) -> None:
        """Removes a listener; without effect if it is not registered."""
        self._listeners.pop(listener, None)

    def change(self, change: SegmentChange) -> None:
        """Reports a change of segment in a framework's loop, or its start. While the loop runs, changes in other threads are ignored."""
        own = threading.current_thread()
        if self._thread not in {None, own} and self._thread.is_alive():
            return
        self._thread = own
        self._tell(change)

    def end(self) -> None:
        """Ends the loop of this thread and its current segment; without effect if none runs."""
        if self._thread is threading.current_thread():
            self._thread = None
            self._tell(LOOP_END)

    def _tell(self, change: SegmentChange) -> None:
        for listener in tuple(self._listeners):
            listener.change_segment(change)

    def after_fork_in_child(self) -> None:
        """Forgets the parent's running loop."""
        self._thread = None


loop_marks = LoopMarks()
"""The process-wide instance."""
process_changes.at_fork(process_changes.Order.STATE, in_child=loop_marks.after_fork_in_child)
