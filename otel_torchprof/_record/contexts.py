"""Numbers the application's current spans, so that events can refer to the span in which they ran.

The recorder stores a number per event. A thread whose context has changed gets a number here; the thread that drains the
recorder maps numbers back to spans.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native import python_sources
from otel_torchprof._native.recorder import CONTEXT_MUTED, expect_contexts, now_ns
from otel_torchprof._process import process_changes, threads

from .step_marks import recorder_ahead_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NONE = 0
"""No span is current."""
MUTED = CONTEXT_MUTED
"""Number for "do not record": the trace is not sampled, or instrumentation is suppressed."""

SUPPRESSION_KEYS: tuple[str, ...] = (
    otel_context._SUPPRESS_INSTRUMENTATION_KEY,  # noqa: SLF001 - the key that the SDK sets while it exports
    "suppress_instrumentation",  # older key, which instrumentations still set too
)
_SUPPRESSED, _SUPPRESSED_BEFORE = SUPPRESSION_KEYS
(_SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, otel_context.Context())
"""Key of the current span in a context: ``get_current_span`` takes four calls, and a microsecond, for one look into a dictionary."""

# While the interpreter shuts down, threads must not run Python.
process_changes.at_exit(process_changes.Order.STATE, functools.partial(python_sources.set_context_resolver, None))


_MOST_ENDED = 100_000
"""Ends of spans that may wait for a drain; of more the oldest are not known."""

_following: list[ContextTable] = []
"""Tables of the running recordings; the recorder calls the last one, which shares new spans with all of them."""


def _runtime_context() -> object:
    return getattr(otel_context, "_RUNTIME_CONTEXT", None)


class _FirstSpan:
    """Notifies the recorder when the first span becomes current, while any recording follows contexts.

    Until then, operators of steps that are not traced in full are skipped at once. For this the ``attach`` of the runtime context, through
    which every span becomes current, is replaced, and takes a microsecond more. A span that is already current on another
    thread, which has run no operator since, is not noticed.
    """

    def __init__(self) -> None:
        self._runtime: Any = None
        self._attach: Callable[[otel_context.Context], object] | None = None

    def watch(self) -> None:
        """Starts watching; repeated calls have no effect."""
        if self._attach is not None:
            return
        self._runtime = _runtime_context()
        if not isinstance(self._runtime, ContextVarsRuntimeContext) or _has_span(otel_context.get_current()):
            expect_contexts()
            return
        attach = self._runtime.attach

        def noticing(context: otel_context.Context) -> object:
            if _has_span(context):
                expect_contexts()
                self.stop()
            return attach(context)

        self._attach = noticing
        vars(self._runtime)["attach"] = noticing

    def stop(self) -> None:
        """Restores the runtime context, unless other code has replaced the function; repeated calls have no effect."""
        if self._attach is not None and vars(self._runtime).get("attach") is self._attach:
            vars(self._runtime).pop("attach", None)  # another thread may do the same
            self._attach = None


def _has_span(context: otel_context.Context) -> bool:
    return trace.get_current_span(context) is not trace.INVALID_SPAN


_first_span = _FirstSpan()

_StoredSpan = tuple[int, int, bool, int, trace.TraceState | None, int | None]
"""A :class:`CurrentSpan` as stored: its values, with None for an empty trace state. There may be thousands between two drains,
and the garbage collector stops tracking a tuple of plain values."""


class CurrentSpan(NamedTuple):
    """A span that was current when events began, and becomes their parent."""

    span_context: trace.SpanContext
    """Its ids, flags and trace state; ``is_remote`` for a parent in another process."""
    start_ns: int | None
    """Start, Unix ns; None if the span object does not have it (a remote parent)."""


class ContextTable:
    """Assigns numbers, from 1, to current spans.

    A span object has one number, unique while anything may refer to it: an entry is removed when its span has been garbage
    collected and a later drain has ended, so the table grows only with living spans. Thread-safe. A known span costs half a
    microsecond, a new one three: there is one per request, so that each call of Python counts.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that runs while it is held may run operators, which ask for the number.
        self._lock = threads.RLock()
        self._get_current: Callable[[], otel_context.Context] = otel_context.get_current
        self._numbers: dict[int, _Numbered] = {}
        self._spans: dict[int, _StoredSpan] = {}
        self._last = 0
        self._collected: deque[int] = deque()
        self._leaving: dict[int, int] = {}
        self._just_ended: deque[tuple[int, int]] = deque(maxlen=_MOST_ENDED)
        self._ends: dict[int, int] = {}

    def resolve(self, current: otel_context.Context | None = None) -> int:
        """Returns the number of the current span in a context, :data:`NONE` or :data:`MUTED`.

        Args:
            current: the context. Default: None, that of the calling thread or task.
        """
        if current is None:
            current = self._get_current()
        if current.get(_SUPPRESSED) or current.get(_SUPPRESSED_BEFORE):
            return MUTED
        span: Any = current.get(_SPAN_KEY)
        if span is None:
            return NONE
        known = self._numbers.get(id(span))
        # Ids of freed objects are reused; the weak reference shows whether it is the same span.
        if known is not None and known() is span:
            return known.number
        return self._resolve_new(span)

    def get(self, number: int) -> CurrentSpan | None:
        """Returns the span with a number; None for 0, :data:`MUTED` and removed entries."""
        entry = self._spans.get(number)
        if entry is None:
            return None
        trace_id, span_id, is_remote, flags, state, start = entry
        return CurrentSpan(trace.SpanContext(trace_id, span_id, is_remote, trace.TraceFlags(flags), state), start)

    def start_of(self, number: int) -> int | None:
        """Returns the start of the span with a number, Unix ns; None if unknown, or if there is no such span."""
        entry = self._spans.get(number)
        return None if entry is None else entry[-1]

    def note_end(self, span_id: int) -> None:
        """Records that the span ends now. Any thread; 0.1 us. Without it the next drain learns the end, if the span still exists.

        Uses this package's clock: the SDK's wall clock may be set back, and then events inside the span would seem to follow it.
        """
        self._just_ended.append((span_id, time.monotonic_ns()))

    def ended(self, number: int) -> int | None:
        """Returns the end of the span with a number, or a later time, Unix ns of the recorder's clock; None while it is open."""
        return self._ends.get(number)

    def begin_drain(self, now: int = 0) -> None:
        """Begins a drain; call it on the draining thread. Spans collected before ``now`` (Unix ns) may be removed after the drain."""
        while self._collected:
            self._leaving[self._collected.popleft()] = now
        self._learn_ends()

    def _learn_ends(self) -> None:
        """Stores ends of spans: a context may outlive its span, as in a task or thread that was started inside it."""
        if self._just_ended:
            ahead = recorder_ahead_ns()
            number_of = {entry[1]: number for number, entry in self._spans.copy().items()}
            for _ in range(len(self._just_ended)):
                span_id, end = self._just_ended.popleft()
                if span_id in number_of:
                    self._ends.setdefault(number_of[span_id], end + ahead)
        for known in list(self._numbers.values()):
            if getattr(known(), "end_time", None) is not None:
                self._ends.setdefault(known.number, now_ns())  # not the drain's time: it may have ended since

    def end_drain(self, watermark: int = NEVER, still_open: Iterable[int] = ()) -> None:
        """Ends a drain after the spans of its events were looked up.

        Args:
            watermark: time up to which events were drained, Unix ns; a span that was collected later stays, since a later drain may
                have events of it.
            still_open: numbers of open events; their entries stay, for the same reason.
        """
        stay = self._leaving.keys() & still_open
        for number, since in self._leaving.copy().items():
            if since <= watermark and number not in stay:
                del self._leaving[number]
                self._spans.pop(number, None)
                self._ends.pop(number, None)

    def follow(self) -> bool:
        """Makes this the table that numbers current spans for the recorder. Earlier tables still learn all spans.

        All these tables have the same numbers, since an event has one number, which is valid for all its recordings.

        Returns:
            Whether the recorder can detect an unchanged context by itself. If not (an unknown interpreter, OpenTelemetry
            contexts other than contextvars), every top-level event costs a call into Python.
        """
        if _following and self not in _following:
            self._join(_following[-1])
        if self not in _following:
            _following.append(self)
        _first_span.watch()
        return self._become_resolver()

    def unfollow(self) -> None:
        """Makes the previous table number spans again. Without one, new events have no current span."""
        if self in _following:
            _following.remove(self)
        if _following:
            _following[-1]._become_resolver()  # noqa: SLF001 - same class
        else:
            _first_span.stop()
            python_sources.set_context_resolver(None)

    def _become_resolver(self) -> bool:
        runtime = _runtime_context()
        variable = getattr(runtime, "_current_context", None) if type(runtime) is ContextVarsRuntimeContext else None
        self._get_current = variable.get if isinstance(variable, ContextVar) else otel_context.get_current
        return python_sources.set_context_resolver(self.resolve, isinstance(runtime, ContextVarsRuntimeContext))

    def _join(self, other: ContextTable) -> None:
        """Copies another table's entries, and shares its lock; later each of the two learns the spans of the other."""
        self._lock = other._lock
        with self._lock:
            self._last = max(self._last, other._last)
            self._numbers |= other._numbers
            self._spans |= other._spans
            self._ends |= other._ends

    @property
    def size(self) -> int:
        """Number of stored spans."""
        return len(self._spans)

    def _resolve_new(self, span: Any) -> int:
        # To ask whether it is a Span, an abstract class, takes half a microsecond; its context is a tuple.
        get = getattr(span, "get_span_context", None)
        found = None if get is None else get()
        if not isinstance(found, trace.SpanContext):
            return NONE
        # Unpacked, since each property would be a Python call, and this runs once per request.
        trace_id, span_id, is_remote, flags, state, is_valid = found
        if not is_valid:
            return NONE
        if not flags & trace.TraceFlags.SAMPLED:
            return MUTED
        start = getattr(span, "start_time", None)
        current = trace_id, span_id, is_remote, int(flags), state or None, start if isinstance(start, int) else None
        has_ended = getattr(span, "end_time", None) is not None
        with self._lock:
            known = self._numbers.get(id(span))
            if known is not None and known() is span:  # added by another thread meanwhile
                return known.number
            # After four billion spans it starts again, and skips numbers in use.
            number = self._last % (MUTED - 1) + 1
            while number in self._spans:
                number = number % (MUTED - 1) + 1
            known = _Numbered(span, _forget)
            known.key, known.number, known.table = id(span), number, self
            for table in _following if self in _following else (self,):
                table.learn(known, current, has_ended=has_ended)
        return number

    def learn(self, known: _Numbered, current: _StoredSpan, *, has_ended: bool) -> None:
        """Adds a span, which another table may have numbered."""
        self._last = number = known.number
        if has_ended:
            self._ends[number] = 0
        self._spans[number] = current
        self._numbers[known.key] = known

    def forget(self, known: _Numbered) -> None:
        """Marks the number of a collected span for removal: no new event gets it, but recorded ones may have it."""
        # Without the lock: the garbage collector may run this anywhere.
        if self._numbers.get(known.key) is known:  # else it is an entry of another recording with its own numbers
            del self._numbers[known.key]
            self._collected.append(known.number)


class _Numbered(weakref.ref[Any]):
    """A living span of a table, and its number."""

    __slots__ = ("key", "number", "table")

    key: int
    """The id of the object."""
    number: int
    table: ContextTable
    """The one that gave the number."""


def _forget(known: _Numbered) -> None:
    known.table.forget(known)
    for table in _following:  # repeated calls have no effect
        table.forget(known)


process_changes.at_fork(process_changes.Order.STATE, in_child=_following.clear)
