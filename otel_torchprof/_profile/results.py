"""Results of a profile: events, averages, tables, traces and spans."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import markup
from otel_torchprof._answers.kept_memory import kept_memory
from otel_torchprof._answers.rank_reading import rank_of_spans, read_ranks
from otel_torchprof._answers.verdicts import explained
from otel_torchprof._encode import arrow, otlp, otlp_json
from otel_torchprof._encode.page import page
from otel_torchprof._encode.spans import SpanList, drained_spans, within_limits
from otel_torchprof._encode.table import brief_time
from otel_torchprof._export import file, sdk
from otel_torchprof._export.aggregating import with_reductions
from otel_torchprof._export.formats import ENDINGS, FORMATS, FormatInput, format_of
from otel_torchprof._export.span_buffer import bounded
from otel_torchprof._export.span_policy import checked_policy
from otel_torchprof._files.attribute_keys import RANK
from otel_torchprof._model.devices import remaining_times
from otel_torchprof._model.event_info import EventInfo
from otel_torchprof._model.event_table import EventTable
from otel_torchprof._model.file_ids import with_file_ids
from otel_torchprof._model.frame_spans import check_detail, displayed
from otel_torchprof._model.live import placed_recording
from otel_torchprof._model.live_table import Flows
from otel_torchprof._model.step_spans import PROFILE_NAME, RecordedStep
from otel_torchprof.errors import TorchProfError, warn_caller
from otel_torchprof.health import ProfilerStats

from .events import EventList, export_sampled
from .kineto_event import ProfilerResult, displayed_devices, displayed_events
from .options import of_config
from .recorded_columns import RecordedColumns
from .report import ExplainedSteps, RecordingSums, Summed, report_of
from .steps import ProfileSteps, without_step_labels
from .trace_metadata import TraceMetadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Protocol

    import pandas as pd
    import pyarrow as pa
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

    from otel_torchprof._answers.explanation import Explanation
    from otel_torchprof._answers.steps import Rank
    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._export.span_policy import SpanPolicy
    from otel_torchprof._model.limits import Budget
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof.health import Health

    from .function_event import FunctionEvent
    from .function_event_avg import FunctionEventAvg
    from .kineto_event import ProfilerActivity

    class Recorded(Protocol):
        """A recording that is over, or the segments of one that may go on."""

        @property
        def reading(self) -> AbstractContextManager[Any]:
            """Lock that is held while results are computed."""

        def batch(self) -> Batch:
            """Returns all events."""

        def times(self) -> tuple[int, int]:
            """Returns start and end, Unix ns."""

        def health(self) -> Health:
            """Returns states of sources and figures."""


Path = str | os.PathLike[str]


class ProfileResults(RecordedColumns):
    """Base of :class:`profile` that reads the recording. Thread-safe once the recording has stopped."""

    def __init__(self, segments: Recorded) -> None:
        self.enabled = True
        self.record_shapes = False
        self.profile_memory = False
        self.with_stack = False
        self.with_flops = False
        self.use_device: str | None = None
        self.use_cpu, self.use_cuda = True, False
        self.experimental_config: Any = None
        self.activities: frozenset[ProfilerActivity] = frozenset()
        self.activity_filters: Mapping[ProfilerActivity, set[str]] = {}
        self.trace_id = ""
        self._segments: Recorded = segments
        self._marks = ProfileSteps()
        self._metadata = TraceMetadata()
        self._labels_steps = False
        self._learned_steps = ""  # file of a stream that detected the steps of the loop, in a notebook
        self._trace_only = False
        self._has_modules = False  # among the events
        self._started = False
        self._prepared = False
        self._tracing = False
        self._parent: SpanContext | None = None
        self._pid: int | None = None  # of the process that was recorded; None: this one
        self._events: EventList[FunctionEvent] | None = None
        self._result: ProfilerResult | None = None
        self._spans: dict[str, tuple[SpanTable, Array]] = {}
        self._ids = sdk.SameIds()
        self._figures = ProfilerStats()
        self.profiling_start_time_ns = self.profiling_end_time_ns = 0
        self._kind = "KINETO"

    # ---- events and averages ----

    def events(self) -> EventList[FunctionEvent]:
        """Returns the events as torch shows them: a list that creates ``FunctionEvent`` objects on access.

        Raises:
            RuntimeError: the profile has not finished, or has ``trace_only``.
        """
        if self._trace_only:
            raise TorchProfError(
                "events() is not available when trace_only=True in ExperimentalConfig. "
                "Use export_chrome_trace() instead."
            )
        with self._segments.reading:
            if self._events is None:
                self._events = self._made_events()
            return self._events

    @property
    def function_events(self) -> EventList[FunctionEvent]:
        """The result of :meth:`events`, under its name in torch.autograd.profiler."""
        return self.events()

    @property
    def kineto_results(self) -> ProfilerResult | None:
        """The recording in the form of torch's profiler; ``experimental_event_tree()`` returns all of it as one tree.

        For torch's analyses, such as ``torch.profiler._pattern_matcher``, which read ``prof.profiler.kineto_results``.
        None before the profile has finished. See ``docs/profile.md``.
        """
        if not self._is_finished():
            return None
        with self._segments.reading:
            if self._result is None:
                start, _ = self._segments.times()
                self._result = ProfilerResult(
                    self._batch(), start, self.export_chrome_trace, with_flops=self.with_flops
                )
            return self._result

    def _memory_profile(self) -> Any:
        """Torch's ``MemoryProfile`` of the recording, much slower than :meth:`export_memory_timeline`.

        Imports torch.
        """
        from torch.profiler._memory_profiler import MemoryProfile

        from . import memory_timeline

        memory_timeline.check(self)
        return MemoryProfile(self.kineto_results)

    def key_averages(
        self,
        group_by_input_shape: bool = False,
        group_by_stack_n: int = 0,
        group_by_overload_name: bool = False,
        include_python_functions: bool | None = None,
        *,
        group_by_module: bool = False,
    ) -> EventList[FunctionEventAvg]:
        """Returns sums and counts by name (and by shapes, stack, overload), as torch's, or by module. Makes no events.

        The arguments are those of :meth:`EventList.key_averages`; times are in microseconds.
        """
        return self.events().key_averages(
            group_by_input_shape,
            group_by_stack_n,
            group_by_overload_name,
            include_python_functions,
            group_by_module=group_by_module,
        )

    def total_average(self) -> FunctionEventAvg:
        """Returns sums over all events, under the key ``Total``."""
        return self.events().total_average()

    @property
    def self_cpu_time_total(self) -> float:
        """Sum of the self CPU times of all events, in microseconds."""
        return self.events().self_cpu_time_total

    def to_pandas(self) -> pd.DataFrame:
        """Returns all events as a DataFrame, one row each: see :meth:`EventList.to_pandas`.

        Times are in us, sizes in bytes. Creates no event objects. Raises ImportError if pandas is not installed.
        """
        return self.events().to_pandas()

    def to_arrow(self, table: str = "events") -> pa.Table:
        """Returns the events as a table of pyarrow: ``docs/columns.md`` has its columns. Costs some 0.5 us per event.

        Args:
            table: ``"events"``, or one of the other tables there: ``"steps"``, ``"collectives"``, ``"samples"``, ``"memory"``.

        Raises:
            ImportError: pyarrow is not installed.
            ValueError: there is no such table.
        """
        return arrow.table_of(self._event_table(), table)

    def table(self, **arguments: Any) -> str:
        """Returns all events as a text table; the arguments are those of :meth:`EventList.table`."""
        return self.events().table(**arguments)

    def export_stacks(self, path: Path, metric: str = "self_cpu_time_total", *, merged: bool = False) -> None:
        """Writes one line per event with a stack, or per stack (``merged``): see :meth:`EventList.export_stacks`.

        Without ``with_stack``, ``self_cpu_time_total`` is that of sampled stacks: the time that samples stand for, a line per stack.

        Raises:
            AssertionError: recorded without ``with_stack``, and no stack was sampled or the metric is another one; torch's error.
            RuntimeError: the profile has not finished.
            ValueError: the metric is not one of ``supported_export_stacks_metrics()``.
        """
        events, samples = self.events(), self.samples
        if not self.with_stack and samples is not None and metric == "self_cpu_time_total":
            export_sampled(samples, path)
            return
        if not self.with_stack:
            raise AssertionError("export_stacks() requires with_stack=True")
        events.export_stacks(path, metric, merged=merged)

    def export_memory_timeline(self, path: str, device: str | None = None) -> None:
        """Writes memory use over time by category, as ``.html``, ``.json``, ``.json.gz`` or ``.raw.json.gz``.

        The formats are torch's; ``docs/measurements.md`` describes the categories. Deprecated in torch, with its
        FutureWarning. ``device`` defaults to the device of the profile, else ``cuda:0`` if there is one, else ``cpu``.

        Raises:
            ValueError: recorded without ``record_shapes``, ``profile_memory`` or ``with_stack``; torch's error.
        """
        warn_caller(
            "`export_memory_timeline` is deprecated and will be removed in a future version. Please use "
            "`torch.cuda.memory._record_memory_history` and `torch.cuda.memory._export_memory_snapshot` instead.",
            FutureWarning,
        )
        from . import memory_timeline

        memory_timeline.check(self)
        memory_timeline.export(self._batch(), path, device, self.use_device)

    def __str__(self) -> str:
        return self.table() if self._is_finished() and not self._trace_only else repr(self)

    def __repr__(self) -> str:
        if not self._is_finished():
            return "<unfinished otel_torchprof.profile>"
        return f"<profile of {len(self._batch() if self._trace_only else self.events())} events>"

    def _repr_html_(self) -> str | None:
        """Summary for a notebook: counts, averages by self time, health; None if that fails."""
        return markup.attempt(self._html)

    def _html(self) -> str:
        health = self._segments.health()
        if not self._is_finished():
            return summary_html("unfinished profile", health)
        title = f"profile of {len(self._batch()):,} events"
        if self._trace_only:
            return summary_html(title, health, self._steps())
        return summary_html(title, health, self._steps(), self.key_averages())

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """The recorded steps: ``number``, ``start`` and ``end`` in Unix ns, and ``thread``, the ``threading.get_ident()``, if known.

        Empty without steps of :meth:`step` or of a schedule.
        """
        return tuple(step for step in self._steps() if step.number >= 0)

    # ---- traces and spans ----

    def add_metadata(self, key: str, value: str) -> None:
        """Adds a text to the top level of the Chrome trace."""
        self._metadata.add(key, value)

    def add_metadata_json(self, key: str, value: str) -> None:
        """Adds a value, given as JSON, to the top level of the Chrome trace.

        Raises:
            ValueError: the value is not JSON.
        """
        self._metadata.add_json(key, value)

    def preset_metadata_json(self, key: str, value: str) -> None:
        """Like :meth:`add_metadata_json`, from the next start on.

        Raises:
            ValueError: the value is not JSON.
        """
        self._metadata.add_preset(key, value)

    def wait_for_exports(self) -> None:
        """Returns at once: exports write before they return. Torch 2.14 has a backend that writes later."""

    def take_pending_cupti_export(self) -> None:
        """Returns None: no export is pending here. Torch 2.14 has pending exports of the same backend."""
        return

    def get_trace_id(self) -> str | None:
        """Returns the trace id, which the Chrome trace has at its top level; None before a trace has begun."""
        return self.trace_id if self._prepared else None

    def export_chrome_trace(
        self,
        path: Path,
        metadata: Mapping[str, Any] | None = None,
        use_python_export: bool = False,  # noqa: ARG002 - of torch's signature
    ) -> None:
        """Writes a Chrome JSON trace for ui.perfetto.dev, chrome://tracing and tools for torch's traces.

        A name that ends in ``.gz`` is compressed. ``metadata`` is added at the top level, after the values of
        :meth:`add_metadata`. Streams the file: memory does not grow with the trace. ``use_python_export`` selects one
        of torch's writers and has no effect here.

        Raises:
            ExportError: the file cannot be written; an older file stays complete.
            ValueError: ``metadata`` is not JSON.
        """
        self.export_as(path, "chrome", metadata=metadata)

    def export_as(
        self,
        path: Path,
        format_name: str | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        resource: Resource | None = None,
        detail: str = "ops",
    ) -> None:
        """Writes a file in a format, compressed if its name ends in ``.gz``.

        The formats are ``chrome``, ``otlp``, ``otlp_json``, ``perfetto``, ``pprof``, ``otlp_profiles`` and ``parquet``; the default is that of the name: ``trace.json``, ``trace.pftrace``, ``profile.pb.gz``, ``events.parquet``. Perfetto's own format has what Chrome JSON of
        spans has, in half of the bytes, and curves of memory. Parquet has the table of
        :meth:`to_arrow`; pprof's format has sums by stack, labelled with the step, the phase and the rank; OTLP profiles (``.otlp-profiles``, in development: the format may change) have
        the same sums, with links to the spans of steps. Streams traces: memory
        does not grow with the file. Arguments as in :meth:`export_chrome_trace` and
        :meth:`export_otlp`; a format ignores those that it does not use.

        Raises:
            ExportError: the file cannot be written; an older file stays complete.
            ImportError: Parquet needs pyarrow, which is not installed.
            ValueError: the format or detail is unknown, or ``metadata`` is not JSON.
        """
        check_detail(detail)
        chosen = format_of(os.fspath(path)) if format_name is None else format_name
        if chosen is None:
            raise ValueError(f"path is {str(path)!r}; its name must end in {', '.join(ENDINGS)}, or give the format")
        if chosen not in FORMATS:
            raise ValueError(f"the format is {chosen!r}; it must be one of {', '.join(map(repr, FORMATS))}")
        file.write(path, self._encoded(chosen, metadata, resource, detail))

    def _encoded(
        self,
        format_name: str,
        metadata: Mapping[str, Any] | None = None,
        resource: Resource | None = None,
        detail: str = "ops",
    ) -> Iterable[bytes | memoryview]:
        """Returns the pieces of a file; arguments as in :meth:`export_as`."""
        batch = self._batch()
        recorded = FormatInput(
            displayed_events(batch, self.activity_filters),
            # With a schedule the steps are labels among the events.
            [] if self._labels_steps else self._steps(),
            lambda: self._limited("frames" if FORMATS[format_name].reader == "Perfetto" else detail),
            lambda: resource or self._resource(),
            sdk.instrumentation_scope,
            partial(self._event_table, resource),
            displayed_devices(batch, self.activity_filters),
            {**self._metadata.entries, **(metadata or {})},
            bool(of_config(self.experimental_config, "verbose")),
            self._segments.times(),
            self._pid,
            self._step_span_ids,
        )
        return FORMATS[format_name].encode(recorded)

    def explain(self) -> Explanation:
        """Explains the steps, with evidence, as :func:`otel_torchprof.explain` explains a file.

        Needs steps of :meth:`step`, of a schedule, or between those of an optimizer or batches of a loader, at least 25 for
        a verdict; ``%%torchprof`` finds those of a training loop by itself. Costs about 1 us per event.
        ``print(prof.explain())`` writes the text of ``otel-torchprof explain``.

        Raises:
            TorchProfError: nothing was recorded, or there are no steps.
        """
        return explained(*self._ranks())

    def report(self, path: Path) -> None:
        """Writes an HTML page with what :meth:`explain` answers, the steps, the calls, the averages and the memory.

        One file that needs no network, for a browser or a mail: ``docs/profile.md`` has a picture. Costs some 2 us per
        event.

        Raises:
            ExportError: the file cannot be written.
            TorchProfError: nothing was recorded, or the events were edited.
        """
        recording = RecordingSums("this profile")
        recording.add(self._summed())
        file.write(path, [page(report_of(recording, ExplainedSteps.of(self._ranks)))])

    def _summed(self) -> Summed:
        """The parts of the profile that a report sums."""
        batch = self._batch()
        return Summed(self.events(), len(batch), self.steps, batch.samples, self._segments.times())

    def _ranks(self) -> tuple[list[Rank], list[str]]:
        """The steps of this process, and problems of reading them. Raises TorchProfError if there are none."""
        if not self._steps() and os.path.exists(self._learned_steps):  # noqa: PTH110 - Path is a type here
            return read_ranks([self._learned_steps])
        spans = self.spans()
        try:
            rank, problems = rank_of_spans("the profile", spans)
        except TorchProfError as error:
            raise self._no_steps() from error
        rank.kept = partial(kept_memory, self._batch())
        return [rank], problems

    def export_otlp(self, path: Path, *, resource: Resource | None = None, detail: str = "ops") -> None:
        """Writes the spans as one OTLP protobuf message, or as OTLP/JSON lines to a name in ``.json`` or ``.jsonl``.

        ``.gz`` after either compresses the file. ``otel-torchprof send`` sends both. The message can be the body of a
        POST to ``/v1/traces``; ``TracesData`` of opentelemetry-proto parses it. ``detail`` as in :meth:`spans`.

        Raises:
            ExportError: the file cannot be written.
            ValueError: the detail is unknown.
        """
        format_name = "otlp_json" if otlp_json.is_json(os.fspath(path)) else "otlp"
        self.export_as(path, format_name, resource=resource, detail=detail)

    def to_otlp(
        self, *, resource: Resource | None = None, max_bytes: int = otlp.DEFAULT_MAX_BYTES, detail: str = "ops"
    ) -> Iterator[bytes]:
        """Iterates over serialized ``ExportTraceServiceRequest`` messages, each below ``max_bytes`` (1 MiB).

        ``resource`` defaults to that of the TracerProvider in use; ``detail`` as in :meth:`spans`.

        Raises:
            ValueError: the detail is unknown, or ``max_bytes`` is not allowed.
        """
        chosen_resource = resource or self._resource()
        table = self._limited(detail)
        return otlp.encode(table, resource=chosen_resource, scope=sdk.instrumentation_scope(), max_bytes=max_bytes)

    def spans(self, *, resource: Resource | None = None, detail: str = "ops") -> SpanList:
        """Returns the spans as a sequence of OpenTelemetry's ``ReadableSpan``, created on access (about 30 us each).

        ``detail`` selects the events that become spans: ``"modules"``, modules and labels; ``"ops"``, also operators;
        ``"frames"``, also Python calls, most of a recording with ``with_stack``. Children of an omitted event are below
        its nearest parent with a span. Ids do not depend on the detail.

        Raises:
            ValueError: the detail is unknown.
        """
        chosen_resource = resource or self._resource()
        return SpanList(self._limited(detail), resource=chosen_resource, scope=sdk.instrumentation_scope())

    def export(
        self,
        exporter: SpanExporter,
        *,
        batch_size: int = 512,
        detail: str = "ops",
        policy: SpanPolicy | None = None,
    ) -> int:
        """Sends the spans to a SpanExporter and returns their number.

        0 with ``OTEL_SDK_DISABLED=true``. The exporter stays open. Reduces each trace to the trace size limit of
        ``policy`` (default: the environment's, else 5,000 spans and 4 MB; ``docs/spans.md``), whose other options do
        not apply to a profile. Exporters that take whole traces, such as :class:`ChromeTraceExporter`, get all spans.
        They and :class:`OTLPExporter` take spans as columns, others as objects, ``batch_size`` at a time. ``detail`` as
        in :meth:`spans`.

        Raises:
            ExportError: the exporter returned FAILURE; the message has the number of spans accepted before, ``reason``
                the error of an :class:`OTLPExporter`.
            ValueError: the detail is unknown.
        """
        budget = None if sdk.takes_whole_traces(exporter) else checked_policy(policy).rules().budget
        table = self._limited(detail, budget)
        spans = SpanList(table, resource=self._resource(), scope=sdk.instrumentation_scope())
        return sdk.export(spans, exporter, batch_size=batch_size)

    # ---- within ----

    def _event_table(self, resource: Resource | None = None) -> EventTable:
        devices = bool(self.use_device)
        info = EventInfo.of(self._batch(), modules=True, with_flops=self.with_flops, with_devices=devices)
        rank = (resource or self._resource()).attributes.get(RANK)
        return EventTable(info, self.steps, rank if isinstance(rank, int) else None)

    def _resource(self) -> Resource:
        return sdk.current_resource()

    def _no_steps(self) -> TorchProfError:
        return TorchProfError("the profile has no steps: call prof.step() at the end of each, or give it a schedule")

    def _why_nothing(self) -> str:
        if not self._started:
            return "nothing was recorded: use `with profile() as prof:`, or start() and stop()"
        return (
            "nothing was recorded: the schedule came to no step that is recorded; call prof.step() at the end of each step "
            "of the loop, and run more steps than it waits and warms up"
        )

    def _is_finished(self) -> bool:
        return not self.enabled or (self._prepared and not self._tracing)

    def _batch(self) -> Batch:
        if not self.enabled:
            return self._segments.batch()
        if not self._prepared:
            raise TorchProfError(self._why_nothing())
        if self._tracing:
            raise TorchProfError(
                "Profiler didn't finish running: it is still recording; read it after its `with` block, or after stop()"
            )
        begun = perf_counter_ns()
        batch = self._segments.batch()
        if not self._figures.parse_kineto_call_duration_us:
            self._note(parse_kineto_call_duration_us=us_since(begun))
        return batch

    def _note(self, **figures: Any) -> None:
        self._figures = replace(self._figures, **figures)

    def _made_events(self) -> EventList[FunctionEvent]:
        batch, (start, _) = self._batch(), self._segments.times()
        begun = perf_counter_ns()
        events = EventList.of(
            batch,
            origin_ns=start,
            use_device=self.use_device,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
            has_modules=self._has_modules,
            pid=self._pid,
        )
        self._note(function_events_build_tree_call_duration_us=us_since(begun), number_of_events=len(events))
        return events

    def _forget_results(self) -> None:
        """Drops cached results, which no longer cover the whole recording."""
        with self._segments.reading:
            self._events, self._result, self._spans, self._ids = None, None, {}, sdk.SameIds()

    def _steps(self) -> list[RecordedStep]:
        return self._marks.steps(self._batch()["start"], labelled=self._labels_steps)

    def _limited(self, detail: str, budget: Budget | None = None) -> SpanTable:
        """The spans to send: traces within the size limit, if any, and spans within OpenTelemetry's limits."""
        check_detail(detail)
        # Under the lock: two threads that read at the same time must get the same ids.
        with self._segments.reading:
            if detail not in self._spans:
                self._spans[detail] = self._made_spans(detail)
            table, root = self._spans[detail]
        if budget is not None:
            new = sdk.id_generator()
            table = bounded(table, root, budget, new_trace_id=new.generate_trace_id, new_span_id=new.generate_span_id)
        return within_limits(table, sdk.span_limits())

    def _step_span_ids(self) -> Mapping[int, tuple[bytes, bytes]]:
        """Trace and span id of the span of each step by its number; -1: of the span of a profile without steps."""
        table = self._limited("modules")  # ids do not depend on the detail
        rows = np.flatnonzero((table.step >= 0) if self._steps() else (table.row < 0))
        columns = table.step[rows].tolist(), table.trace[rows].tolist(), table.span_id[rows].tolist()
        return {
            number: (table.trace_ids[trace].tobytes(), span.to_bytes(8, "big"))
            for number, trace, span in zip(*columns, strict=True)
        }

    def _made_spans(self, detail: str) -> tuple[SpanTable, Array]:
        """All spans with their attributes, and for each the id of the root of its trace."""
        whole = self._batch()
        batch, callers = displayed(without_step_labels(whole) if self._labels_steps else whole, detail)
        new_trace_id, new_span_id = self._ids.from_start()
        placed, roots = placed_recording(
            batch,
            self._marks.with_memory(self._steps()) or [RecordedStep(-1, *self._segments.times(), name=PROFILE_NAME)],
            new_trace_id=new_trace_id,
            new_span_id=new_span_id,
            parent=self._parent,
            device_times=remaining_times(whole, batch),
        )
        table = drained_spans(placed, roots, Flows(), with_flops=self.with_flops, callers=callers, final=True)
        table = with_reductions(table, placed.batch)
        return with_file_ids(table, np.concatenate((table.span_id[: len(roots)], placed.root)), placed.batch)


def us_since(begun: int) -> int:
    """Whole microseconds since a time of ``perf_counter_ns``."""
    return (perf_counter_ns() - begun) // 1000


# ---- summary of a profile for notebooks ----


_TOP_ROWS = 10


def summary_html(
    title: str, health: Health, steps: Sequence[RecordedStep] = (), averages: EventList | None = None
) -> str:
    """Summary as HTML: a title with figures, the averages with the most self time, and the health report."""
    figures = [title]
    if health.stop_ns:
        figures.append(brief_time((health.stop_ns - health.start_ns) / 1000))
    if steps:
        durations = sorted(step.end - step.start for step in steps)
        figures.append(f"{len(steps):,} steps, median {brief_time(durations[len(durations) // 2] / 1000)}")
    if lost := sum(health.dropped.values()):
        figures.append(f"{lost:,} events dropped")
    parts = [markup.line(", ".join(figures))]
    if averages:
        by = "self_device_time_total" if averages[0].use_device else "self_cpu_time_total"
        parts.append(markup.details("Most self time", averages.to_html(by, _TOP_ROWS), is_open=True))
    parts.append(markup.details("Health", health.to_html()))
    return markup.block(*parts)
