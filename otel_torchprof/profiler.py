"""``profile``: torch's profiler, by a change of import."""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from ._encode import chrome, otlp
from ._encode.attributes import add_attributes
from ._encode.spans import SpanList
from ._export import file, sdk
from ._model.limits import limited
from ._model.units import SpanTable, Step, span_table
from ._native.recorder import now_ns
from ._recording import Recording
from .errors import TorchProfError
from .events import EventList

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext
    from typing_extensions import Self

    from ._columns.batch import Array, Batch, Names, Thread
    from .function_event_avg import FunctionEventAvg
    from .health import Health

_logger = logging.getLogger("otel_torchprof")

Path = str | os.PathLike[str]


class profile:  # noqa: N801 - torch's name
    """Records what runs between its start and its stop: torch's operators and labels, as averages, traces and spans.

    A context manager, or ``start()`` and ``stop()``. Records the calling thread and what torch carries on for it (autograd's
    threads, ``jit.fork``), as torch does; ``all_threads=True`` records every thread. Several may run at the same time, on
    any threads and in any order; each operator is recorded once. May be stopped and read from any thread.

    Inside a span of the application, its spans join that trace (see ``docs/spans.md``).

    Costs some 25 ns per operator while it runs, over what torch needs to call any observer (40 to 70), and more where caches
    are cold; nothing before and after. Reading costs some 30 ns per event the first time, whatever is read (see
    ``docs/benchmarks.md``).

    Args:
        enabled: False: nothing is recorded, everything else works.
        activities: accepted as torch.profiler has it; must contain the CPU. Others are not recorded yet, and say so once.
        record_shapes: keep the shapes of the operators' inputs.
        all_threads: every thread of the process.
        operators: True: an error where operators cannot be recorded; None (default): labels alone where torch is not
            installed; False: labels alone.
        memory_limit: bytes that may be held in the recorder, by default 512 MiB (``OTEL_TORCHPROF_MEMORY_LIMIT``). What comes
            after is dropped and counted: see :attr:`health`.

    Raises:
        TorchLibraryError: operators are wanted and cannot be recorded (no compiler); the message names the fix.
        ValueError: a bad argument.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        activities: Iterable[Any] | None = None,
        record_shapes: bool = False,
        all_threads: bool = False,
        operators: bool | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.enabled = enabled
        self.record_shapes = record_shapes
        self.all_threads = all_threads
        self._step_starts: list[tuple[int, int]] = []
        self._events: EventList | None = None
        self._spans: SpanTable | None = None
        self._recording: Recording | None = None
        self._entered = False
        self._reading = threading.Lock()
        self._parent: SpanContext | None = None
        self.step_num = 0
        if activities is not None:
            _check_activities(activities)
        if enabled:
            self._recording = Recording(
                operators=operators, inputs=record_shapes, all_threads=all_threads, memory_limit=memory_limit
            )

    # ---- recording ----

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # A child that was forked within the block leaves it too, with sys.exit() perhaps: its parent records, not it.
        if not self._require().is_parents:
            self.stop()

    def start(self) -> None:
        """Starts recording.

        Raises:
            RuntimeError: started before; a profile is for one recording.
            NativeError: 16 recordings run already.
        """
        if not self.enabled:
            return
        if self._entered:
            raise TorchProfError(
                "Profiler context manager is not reentrant: make a new profile() for another recording"
            )
        self._parent = sdk.ambient_span()
        self._require().start()
        self._entered = True

    def stop(self) -> None:
        """Stops recording; a second call does nothing. Events still open end now and are marked unfinished.

        Raises:
            RuntimeError: not started, or this process was forked from one that recorded.
        """
        if not self.enabled:
            return
        if not self._entered:
            raise TorchProfError("the profile cannot be stopped: it was not started; use `with profile():` or start()")
        self._require().stop()

    def step(self) -> None:
        """Says that the next step of the loop begins: each step becomes a trace of its own, and a slice in Chrome JSON.

        The first step begins at the start of the recording. Costs a microsecond.

        Raises:
            RuntimeError: the profile is not recording.
        """
        if self.enabled:
            if not self._require().running:
                raise TorchProfError("step() belongs between the start and the stop of a profile")
            self._step_starts.append((self.step_num + 1, now_ns()))
        self.step_num += 1

    @property
    def health(self) -> Health:
        """What was on, what was off and why, what was dropped; at any time."""
        return self._require().health()

    # ---- events and averages ----

    @property
    def columns(self) -> Mapping[str, Array]:
        """Every recorded event as numpy arrays by name, without an object per event.

        ``id``, ``start`` and ``end`` (Unix ns), ``name`` (index into :attr:`names`), ``parent`` (row or -1), ``thread`` (index into :attr:`threads`),
        ``sequence_nr``, ``scope`` and the others of ``docs/columns.md``. Read-only; valid as long as they are held.
        """
        return self._batch().columns

    @property
    def names(self) -> Names:
        """The names that :attr:`columns` points to."""
        return self._batch().names

    @property
    def threads(self) -> Sequence[Thread]:
        """The threads that :attr:`columns` points to."""
        return self._batch().threads

    def events(self) -> EventList:
        """The events as torch shows them: a list whose ``FunctionEvent`` objects are made when they are looked at."""
        with self._reading:
            if self._events is None:
                start, _ = self._require().times()
                self._events = EventList.of(self._batch(), origin_ns=start)
            return self._events

    @property
    def function_events(self) -> EventList:
        """As :meth:`events`, under the name that torch.autograd.profiler has for it."""
        return self.events()

    def key_averages(
        self, group_by_input_shape: bool = False, group_by_stack_n: int = 0, group_by_overload_name: bool = False
    ) -> EventList:
        """Sums and counts by name (and by shapes, stack, overload), as torch's. Needs no object per event."""
        return self.events().key_averages(group_by_input_shape, group_by_stack_n, group_by_overload_name)

    def total_average(self) -> FunctionEventAvg:
        """Sums over all events, under the key ``Total``."""
        return self.events().total_average()

    @property
    def self_cpu_time_total(self) -> float:
        """Sum of all self times on the CPU, in microseconds."""
        return self.events().self_cpu_time_total

    def table(self, **arguments: Any) -> str:
        """All events as text; the arguments are those of :meth:`EventList.table`."""
        return self.events().table(**arguments)

    def __str__(self) -> str:
        return self.table() if self._is_finished() else repr(self)

    def __repr__(self) -> str:
        return (
            f"<profile of {len(self.events())} events>"
            if self._is_finished()
            else "<unfinished otel_torchprof.profile>"
        )

    # ---- traces and spans ----

    def export_chrome_trace(self, path: Path, metadata: Mapping[str, Any] | None = None) -> None:
        """Writes a Chrome JSON trace, gzipped where the name ends in ``.gz``.

        For ui.perfetto.dev, chrome://tracing and tools that read torch's own traces. ``metadata`` is added at its top level. Streamed: memory does not grow with the trace.

        Raises:
            ExportError: the file cannot be written; a file that was there before is still whole.
            ValueError: metadata that is no JSON.
        """
        steps = [(step.number, step.start, step.end) for step in self._steps()]
        file.write(path, chrome.encode(self._batch(), steps=steps, metadata=metadata))

    def export_otlp(self, path: Path, *, resource: Resource | None = None) -> None:
        """Writes the spans as one OTLP protobuf message, gzipped where the name ends in ``.gz``.

        It is what an OTLP/HTTP receiver takes as the body of a POST to ``/v1/traces``, and what ``TracesData`` of opentelemetry-proto reads.

        Raises:
            ExportError: the file cannot be written.
        """
        file.write(path, self.to_otlp(resource=resource))

    def to_otlp(self, *, resource: Resource | None = None, max_bytes: int = otlp.DEFAULT_MAX_BYTES) -> Iterator[bytes]:
        """The spans as serialized ``ExportTraceServiceRequest`` messages, each under 4 MiB (or ``max_bytes``).

        ``resource`` defaults to that of the TracerProvider in use.
        """
        found = resource or sdk.current_resource()
        return otlp.encode(self._span_table(), resource=found, scope=sdk.instrumentation_scope(), max_bytes=max_bytes)

    def spans(self, *, resource: Resource | None = None) -> Sequence[ReadableSpan]:
        """The spans as a sequence of OpenTelemetry's ``ReadableSpan``, each made when it is looked at (some 30 us)."""
        found = resource or sdk.current_resource()
        return SpanList(self._span_table(), resource=found, scope=sdk.instrumentation_scope())

    def export(self, exporter: SpanExporter, *, batch_size: int = 512) -> int:
        """Sends all spans to a SpanExporter; returns their number. The exporter stays open.

        :class:`OTLPExporter` and :class:`ChromeTraceExporter` take them as columns, any other as objects, ``batch_size`` at a time.

        Raises:
            ExportError: the exporter answered FAILURE; the message says how many spans had been taken.
        """
        return sdk.export(self.spans(), exporter, batch_size=batch_size)

    # ---- within ----

    def _require(self) -> Recording:
        if self._recording is None:
            self._recording = Recording(operators=False, inputs=False, all_threads=False, memory_limit=None)
        return self._recording

    def _is_finished(self) -> bool:
        return not self.enabled or (self._entered and not self._require().running)

    def _batch(self) -> Batch:
        if self.enabled and not self._entered:
            raise TorchProfError("nothing was recorded: use `with profile() as prof:`, or start() and stop()")
        return self._require().batch()

    def _steps(self) -> list[Step]:
        """The steps, from the start to the stop; none where step() was never called."""
        if not self._step_starts:
            return []
        start, stop = self._require().times()
        starts = [(self._step_starts[0][0] - 1, start), *self._step_starts]
        ends = [begin for _, begin in self._step_starts] + [max(stop, self._step_starts[-1][1])]
        steps = [Step(number, begin, end) for (number, begin), end in zip(starts, ends, strict=True)]
        # A loop that ends with step() opens a last step in which nothing happens.
        began = self._batch()["start"]
        return steps if len(began) and (began >= steps[-1].start).any() else steps[:-1]

    def _span_table(self) -> SpanTable:
        # The ids are made here: two threads that read at the same time have to get the same ones.
        with self._reading:
            if self._spans is None:
                self._spans = self._made_span_table()
            return self._spans

    def _made_span_table(self) -> SpanTable:
        batch = self._batch()
        start, stop = self._require().times()
        ids = sdk.id_generator()
        table = span_table(
            batch,
            start=start,
            end=stop,
            steps=self._steps(),
            parent=self._parent,
            trace_ids=ids.generate_trace_id,
            span_ids=ids.generate_span_id,
        )
        limits = sdk.span_limits()
        return limited(
            add_attributes(table, batch),
            max_attributes=limits.max_span_attributes,
            max_links=limits.max_links,
            max_attribute_length=limits.max_span_attribute_length,
        )


def _check_activities(activities: Iterable[Any]) -> None:
    names = {getattr(activity, "name", str(activity)) for activity in activities}
    if "CPU" not in names:
        raise ValueError(f"activities is {sorted(names)}; it must contain ProfilerActivity.CPU")
    for name in sorted(names - {"CPU"}):
        _say_not_recorded(name)


@functools.cache
def _say_not_recorded(name: str) -> None:
    _logger.warning("activity %s is not recorded by this version: the profile has the CPU's events only", name)
