"""What can be asked of a profile that has recorded: events, averages, tables, traces and spans."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import markup
from otel_torchprof._columns.joined import without
from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.drained_spans import drained_spans, within_limits
from otel_torchprof._encode.formats import FORMATS, Recorded
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._events.displayed_activities import displayed_devices, displayed_events
from otel_torchprof._events.events import EventList
from otel_torchprof._events.profiler_result import ProfilerResult
from otel_torchprof._explain.verdicts import explain
from otel_torchprof._export import file, sdk
from otel_torchprof._process.caller_warnings import warn_caller
from otel_torchprof._sampling.bounded import bounded
from otel_torchprof._sampling.span_policy import checked_policy
from otel_torchprof._spans.frame_spans import check_detail, displayed
from otel_torchprof._spans.live_table import Flows
from otel_torchprof._spans.recorded import placed_recording
from otel_torchprof._spans.step_spans import RecordedStep
from otel_torchprof._tree.displayed_devices import remaining_times
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ProfilerStats

from .columns import RecordedColumns
from .options import of_config
from .recorded_steps import StepMarks, step_labels
from .summary_html import summary_html
from .trace_metadata import TraceMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._events.activities import ProfilerActivity
    from otel_torchprof._events.function_event import FunctionEvent
    from otel_torchprof._events.function_event_avg import FunctionEventAvg
    from otel_torchprof._explain.explanation import Explanation
    from otel_torchprof._record.segments import Segments
    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._spans.budget import Budget
    from otel_torchprof._tree.span_table import SpanTable

Path = str | os.PathLike[str]


class ProfileResults(RecordedColumns):
    """The half of :class:`profile` that reads. Thread-safe once the recording has stopped."""

    def __init__(self, segments: Segments) -> None:
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
        self._segments = segments
        self._marks = StepMarks()
        self._metadata = TraceMetadata()
        self._labels_steps = False
        self._trace_only = False
        self._started = False
        self._prepared = False
        self._tracing = False
        self._parent: SpanContext | None = None
        self._events: EventList[FunctionEvent] | None = None
        self._result: ProfilerResult | None = None
        self._spans: dict[str, tuple[SpanTable, Array]] = {}
        self._ids = sdk.SameIds()
        self._figures = ProfilerStats()
        self.profiling_start_time_ns = self.profiling_end_time_ns = 0
        self._kind = "KINETO"

    # ---- events and averages ----

    def events(self) -> EventList[FunctionEvent]:
        """The events as torch shows them: a list whose ``FunctionEvent`` objects are made when they are looked at.

        Raises:
            RuntimeError: not finished, or ``trace_only`` was asked for.
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
        """As :meth:`events`, under the name that torch.autograd.profiler has for it."""
        return self.events()

    @property
    def kineto_results(self) -> ProfilerResult | None:
        """What was recorded as torch's profiler keeps it: ``experimental_event_tree()`` gives everything as one tree.

        For torch's own analyses, such as ``torch.profiler._pattern_matcher``, which read ``prof.profiler.kineto_results``.
        None before it has finished. See ``docs/events.md``.
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
        """Torch's ``MemoryProfile`` of it, which :meth:`export_memory_timeline` is much faster than; imports torch."""
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
    ) -> EventList[FunctionEventAvg]:
        """Sums and counts by name (and by shapes, stack, overload), as torch's. Needs no object per event.

        The arguments are those of :meth:`EventList.key_averages`.
        """
        return self.events().key_averages(
            group_by_input_shape, group_by_stack_n, group_by_overload_name, include_python_functions
        )

    def total_average(self) -> FunctionEventAvg:
        """Sums over all events, under the key ``Total``."""
        return self.events().total_average()

    @property
    def self_cpu_time_total(self) -> float:
        """Sum of all self times on the CPU, in microseconds."""
        return self.events().self_cpu_time_total

    def to_pandas(self) -> pd.DataFrame:
        """All events as a DataFrame, a row each, as :meth:`EventList.to_pandas`: times in us, sizes in bytes.

        Makes no event. Raises ImportError where pandas is not installed.
        """
        return self.events().to_pandas()

    def table(self, **arguments: Any) -> str:
        """All events as text; the arguments are those of :meth:`EventList.table`."""
        return self.events().table(**arguments)

    def export_stacks(self, path: Path, metric: str = "self_cpu_time_total", *, merged: bool = False) -> None:
        """Writes one line per event with a stack, or per stack (``merged``): see :meth:`EventList.export_stacks`.

        Raises:
            AssertionError: recorded without ``with_stack``, as torch's.
            RuntimeError: not finished.
            ValueError: another metric than those of ``supported_export_stacks_metrics()``.
        """
        events = self.events()
        if not self.with_stack:
            raise AssertionError("export_stacks() requires with_stack=True")
        events.export_stacks(path, metric, merged=merged)

    def export_memory_timeline(self, path: str, device: str | None = None) -> None:
        """Writes what memory was used for over time, in torch's formats: ``.html``, ``.json``, ``.json.gz``, ``.raw.json.gz``.

        Told by category, as ``docs/memory.md`` says. Deprecated by torch, with a FutureWarning. ``device`` defaults to the
        device of the profile, else ``cuda:0`` where there is one, else ``cpu``.

        Raises:
            ValueError: recorded without ``record_shapes``, ``profile_memory`` or ``with_stack``, as torch's.
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
        """What a notebook shows: figures, the averages with the most self time, the health; None where that fails."""
        return markup.attempt(self._html)

    def _html(self) -> str:
        health = self._segments.health()
        if not self._is_finished():
            return summary_html("unfinished profile", health)
        title = f"profile of {len(self._batch()):,} events"
        if self._trace_only:
            return summary_html(title, health, self._steps())
        return summary_html(title, health, self._steps(), self.key_averages())

    # ---- traces and spans ----

    def add_metadata(self, key: str, value: str) -> None:
        """Adds a text to the top level of the Chrome trace."""
        self._metadata.add(key, value)

    def add_metadata_json(self, key: str, value: str) -> None:
        """Adds what a JSON text stands for to the top level of the Chrome trace.

        Raises:
            ValueError: the value is no JSON.
        """
        self._metadata.add_json(key, value)

    def preset_metadata_json(self, key: str, value: str) -> None:
        """As :meth:`add_metadata_json`, from the next start on.

        Raises:
            ValueError: the value is no JSON.
        """
        self._metadata.add_preset(key, value)

    def wait_for_exports(self) -> None:
        """Returns at once: each file is written when its export returns. Torch 2.14 writes those of one of its backends later."""

    def take_pending_cupti_export(self) -> None:
        """None: there is no export that waits. Torch 2.14 has some, of the same backend."""
        return

    def get_trace_id(self) -> str | None:
        """The id of the trace, as it stands at the top level of the Chrome trace; None before one was begun."""
        return self.trace_id if self._prepared else None

    def export_chrome_trace(
        self,
        path: Path,
        metadata: Mapping[str, Any] | None = None,
        use_python_export: bool = False,  # noqa: ARG002 - of torch's signature
    ) -> None:
        """Writes a Chrome JSON trace, gzipped where the name ends in ``.gz``.

        For ui.perfetto.dev, chrome://tracing and tools that read torch's own traces. ``metadata`` is added at its top level, after what
        :meth:`add_metadata` and its like were given. Streamed: memory does not grow with the trace. ``use_python_export``
        chooses between two writers of torch's and has no meaning here.

        Raises:
            ExportError: the file cannot be written; a file that was there before is still whole.
            ValueError: metadata that is no JSON.
        """
        self.export_as(path, "chrome", metadata=metadata)

    def export_as(
        self,
        path: Path,
        format_name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        resource: Resource | None = None,
        detail: str = "ops",
    ) -> None:
        """Writes a file in one of the formats ``chrome``, ``otlp`` and ``otlp_json``, gzipped where the name ends in ``.gz``.

        Streamed: memory does not grow with the file. ``metadata`` as in :meth:`export_chrome_trace`, ``resource`` and ``detail`` as in
        :meth:`export_otlp`; a format that has no use for one ignores it.

        Raises:
            ExportError: the file cannot be written; a file that was there before is still whole.
            ValueError: another format or detail, or metadata that is no JSON.
        """
        check_detail(detail)
        if format_name not in FORMATS:
            raise ValueError(f"the format is {format_name!r}; it must be one of {', '.join(map(repr, FORMATS))}")
        batch = self._batch()
        recorded = Recorded(
            displayed_events(batch, self.activity_filters),
            # With a schedule the steps are labels among the events.
            [] if self._labels_steps else self._steps(),
            lambda: self._limited(detail),
            lambda: resource or sdk.current_resource(),
            sdk.instrumentation_scope,
            displayed_devices(batch, self.activity_filters),
            {**self._metadata.entries, **(metadata or {})},
            bool(of_config(self.experimental_config, "verbose")),
            self._segments.times(),
        )
        file.write(path, FORMATS[format_name](recorded))

    def explain(self) -> Explanation:
        """What the steps were bound by, with the evidence: as :func:`otel_torchprof.explain` of a file.

        Steps are those that :meth:`step` or a schedule told; at least 25 are needed for a verdict. Writes the spans to a temporary file
        and reads it: some 30 us an event. Print ``prof.explain()`` for the text of ``otel-torchprof explain``.

        Raises:
            TorchProfError: nothing was recorded, or there are no steps.
            ExportError: the temporary file cannot be written.
        """
        if not self._steps():
            raise TorchProfError("the profile has no steps: call prof.step() at the end of each, or give it a schedule")
        with tempfile.TemporaryDirectory(prefix="otel_torchprof-") as folder:
            path = os.path.join(folder, "profile.otlp")  # noqa: PTH118 - Path is a type here
            self.export_otlp(path)
            return explain(path)

    def export_otlp(self, path: Path, *, resource: Resource | None = None, detail: str = "ops") -> None:
        """Writes the spans as one OTLP protobuf message, or as lines of OTLP/JSON where the name ends in ``.json`` or ``.jsonl``.

        Gzipped where ``.gz`` comes after that. ``otel-torchprof send`` delivers either form. The message is what an OTLP/HTTP receiver takes as the body of a POST to ``/v1/traces``, and what ``TracesData`` of opentelemetry-proto reads.
        ``detail``: as in :meth:`spans`.

        Raises:
            ExportError: the file cannot be written.
            ValueError: another detail.
        """
        format_name = "otlp_json" if otlp_json.is_json(os.fspath(path)) else "otlp"
        self.export_as(path, format_name, resource=resource, detail=detail)

    def to_otlp(
        self, *, resource: Resource | None = None, max_bytes: int = otlp.DEFAULT_MAX_BYTES, detail: str = "ops"
    ) -> Iterator[bytes]:
        """The spans as serialized ``ExportTraceServiceRequest`` messages, each under 1 MiB (or ``max_bytes``).

        ``resource`` defaults to that of the TracerProvider in use. ``detail``: as in :meth:`spans`.

        Raises:
            ValueError: another detail, or a bad ``max_bytes``.
        """
        found = resource or sdk.current_resource()
        table = self._limited(detail)
        return otlp.encode(table, resource=found, scope=sdk.instrumentation_scope(), max_bytes=max_bytes)

    def spans(self, *, resource: Resource | None = None, detail: str = "ops") -> SpanList:
        """The spans as a sequence of OpenTelemetry's ``ReadableSpan``, each made when it is looked at (some 30 us).

        ``detail`` says how much of what was recorded becomes spans, as that of the instrumentation: ``"modules"``: modules and
        labels; ``"ops"``: operators too; ``"frames"``: Python's calls too, which are most of all that ``with_stack`` records.
        What is left out has no span of its own, and what ran inside of it is below the nearest span around it. An event has the
        same ids at every detail.

        Raises:
            ValueError: another detail.
        """
        found = resource or sdk.current_resource()
        return SpanList(self._limited(detail), resource=found, scope=sdk.instrumentation_scope())

    def export(
        self,
        exporter: SpanExporter,
        *,
        batch_size: int = 512,
        detail: str = "ops",
        policy: SpanPolicy | None = None,
    ) -> int:
        """Sends the spans to a SpanExporter; returns how many. The exporter stays open.

        Each trace is brought within the budget of ``policy`` first (5,000 spans and 4 MB by default, or as the environment says;
        ``docs/spans.md``), of which nothing else applies to a profile; all are sent to an exporter that takes whole traces, as
        :class:`ChromeTraceExporter` does. :class:`OTLPExporter` and that one take them as columns, any other as objects,
        ``batch_size`` at a time. ``detail``: as in :meth:`spans`.
        With ``OTEL_SDK_DISABLED=true`` none are sent, and the answer is 0.

        Raises:
            ExportError: the exporter answered FAILURE; the message says how many spans had been taken, and ``reason`` what the transport
                of an :class:`OTLPExporter` said.
            ValueError: another detail.
        """
        budget = None if sdk.takes_whole_traces(exporter) else checked_policy(policy).rules().budget
        table = self._limited(detail, budget)
        spans = SpanList(table, resource=sdk.current_resource(), scope=sdk.instrumentation_scope())
        return sdk.export(spans, exporter, batch_size=batch_size)

    # ---- within ----

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
        )
        self._note(function_events_build_tree_call_duration_us=us_since(begun), number_of_events=len(events))
        return events

    def _forget_results(self) -> None:
        """What was read no longer is all that there is."""
        with self._segments.reading:
            self._events, self._result, self._spans, self._ids = None, None, {}, sdk.SameIds()

    def _steps(self) -> list[RecordedStep]:
        return self._marks.steps(self._batch()["start"], labelled=self._labels_steps)

    def _limited(self, detail: str, budget: Budget | None = None) -> SpanTable:
        """The spans as they are sent: each trace within the budget, if there is one, and then each span within OpenTelemetry's limits."""
        check_detail(detail)
        # The ids are made here: two threads that read at the same time have to get the same ones.
        with self._segments.reading:
            if detail not in self._spans:
                self._spans[detail] = self._made_spans(detail)
            table, root = self._spans[detail]
        if budget is not None:
            new = sdk.id_generator()
            table = bounded(table, root, budget, new_trace_id=new.generate_trace_id, new_span_id=new.generate_span_id)
        return within_limits(table, sdk.span_limits())

    def _made_spans(self, detail: str) -> tuple[SpanTable, Array]:
        """Every span with its attributes, and the id of the synthetic root of each."""
        whole = self._batch()
        batch, callers = displayed(without(whole, step_labels(whole)) if self._labels_steps else whole, detail)
        new_trace_id, new_span_id = self._ids.again()
        placed, roots = placed_recording(
            batch,
            self._steps() or [RecordedStep(-1, *self._segments.times(), name="torch.profile")],
            new_trace_id=new_trace_id,
            new_span_id=new_span_id,
            parent=self._parent,
            device_times=remaining_times(whole, batch),
        )
        table = drained_spans(placed, roots, Flows(), with_flops=self.with_flops, callers=callers, final=True)
        return table, np.concatenate((table.span_id[: len(roots)], placed.root))


def us_since(begun: int) -> int:
    """Whole microseconds since a time of ``perf_counter_ns``."""
    return (perf_counter_ns() - begun) // 1000
