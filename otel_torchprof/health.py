"""Health reports: which sources are on, why others are off, and what was recorded, dropped and sent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


ON = "on"
NO_DEVICE = "no device is used"
"""Reason why no device is timed when none was requested."""
_NOT_REQUESTED = (f"off: {NO_DEVICE}", "off: not asked for")


@dataclass(frozen=True)
class ProfilerStats:
    """Durations of the parts of a profile, under torch's names; ``prof.health.stats`` has them.

    They describe the last recorded segment, as torch's do. Immutable.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> prof.health.stats.profiling_window_duration_sec > 0
        True
    """

    profiling_window_duration_sec: float = 0.0
    """Time from the start to the stop of the recording, in seconds."""
    number_of_events: int = 0
    """Length of the list of events; 0 until the events were read."""
    profiler_prepare_call_duration_us: int = 0
    profiler_enable_call_duration_us: int = 0
    profiler_disable_call_duration_us: int = 0
    parse_kineto_call_duration_us: int = 0
    """Time to convert the recorder's events to columns; 0 until something was read."""
    function_events_build_tree_call_duration_us: int = 0
    """Time to convert the columns to torch's order and tree; 0 until the events were read."""


@dataclass(frozen=True)
class Health:
    """State of one profile; ``print(prof.health)`` summarizes it in one or a few lines.

    A source is ``"on"`` or ``"off: "`` and the reason. Immutable.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> print(prof.health)
        operators on; labels on; ... events recorded, dropped: none; ... MiB of 512 MiB used
    """

    operators: str
    """State of the source of torch's operators."""
    labels: str
    """State of the source of this package's labels."""
    recorded: int
    """Recorded events, allocations and releases; 0 until the profile has ended. The total is this plus ``dropped``."""
    dropped: Mapping[str, int]
    """Dropped events by reason: ``budget`` (the memory limit), ``depth`` (more than 1024 open on a thread),
    ``no_memory`` (the system had none)."""
    memory_bytes: int
    """Peak memory of the recorder for this profile, in bytes."""
    memory_limit: int
    """Limit of that memory, in bytes."""
    start_ns: int = 0
    """Start of the profile, Unix ns; 0 before it."""
    stop_ns: int = 0
    """Stop of the profile, Unix ns; 0 before it."""
    notes: tuple[str, ...] = field(default=())
    """Further remarks on the numbers, one sentence each."""
    stats: ProfilerStats = field(default_factory=ProfilerStats)
    """Durations of the parts of the profile."""
    devices: str = f"off: {NO_DEVICE}"
    """State of the source of device times, for operators, labels and modules."""
    energy: str = "off: not asked for"
    """State of the source of GPU energy counters."""

    def __str__(self) -> str:
        lost = ", ".join(f"{count} ({reason})" for reason, count in self.dropped.items()) or "none"
        requested = "".join(
            f"; {name} {state}"
            for name, state in (("devices", self.devices), ("energy", self.energy))
            if state not in _NOT_REQUESTED
        )
        line = (
            f"operators {self.operators}; labels {self.labels}{requested}; {self.recorded} events recorded, dropped: {lost}; "
            f"{self.memory_bytes / 2**20:.1f} MiB of {self.memory_limit / 2**20:.0f} MiB used"
        )
        return "\n".join((line, *self.notes))

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None if that fails, so that the notebook displays the text."""
        return markup.attempt(self.to_html)

    def to_html(self) -> str:
        """Returns the report as an HTML table for a notebook."""
        states = {"operators": self.operators, "labels": self.labels, "devices": self.devices, "energy": self.energy}
        memory = f"{self.memory_bytes / 2**20:.1f} MiB of {self.memory_limit / 2**20:.0f} MiB"
        return _html(states, _recorded_rows(self.recorded, self.dropped), (("memory", memory),), notes=self.notes)


@dataclass(frozen=True)
class QueueStats:
    """Outcomes of the spans of an export queue: at any moment each span is exported, failed, dropped or waiting.

    Immutable.
    """

    exported_spans: int = 0
    """Spans for which the exporter returned SUCCESS; with this package's exporters, spans that the receiver
    accepted."""
    failed_spans: int = 0
    """Spans for which the exporter returned FAILURE or raised; with this package's exporters, spans that the
    receiver refused or rejected for good."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped spans by reason: ``queue_full`` (the exporter was slower than the spans came), ``outage`` (the queue
    was full while the receiver accepted nothing), ``already_shutdown`` (they came after the shutdown), ``shutdown``
    (its time was over) and ``no_response`` (dropped spans that had been sent, or were being sent, without a response:
    they may have arrived, and a later response changes no count)."""
    waiting_spans: int = 0
    """Spans in the queue, including those in a running export."""
    waiting_bytes: int = 0
    """Memory of the waiting spans, in bytes."""
    outage_seconds: float = 0.0
    """Seconds for which the receiver has accepted nothing and the queue has retried; 0 while it accepts spans."""
    last_error: str = ""
    """Error of the last attempt that was retried."""
    passed_spans: int = field(default=0, compare=False)
    """Spans that were passed to the exporter, whatever became of them; a span that is retried counts once."""
    dropped_passed: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Dropped spans that had been passed to the exporter before, as their export failed, by reason."""
    rejected_spans: int = field(default=0, compare=False)
    """Failed spans that the receiver rejected while it accepted others of their message."""

    @property
    def dropped_spans(self) -> int:
        """Number of dropped spans, over all reasons."""
        return sum(self.dropped.values())


@dataclass(frozen=True)
class ProcessorHealth:
    """State of a TorchSpanProcessor; ``print(processor.health)`` summarizes it in a few lines.

    A source is ``"on"`` or ``"off: "`` and the reason; ``steps`` is ``"on: "`` and the rule that ends a step.
    Immutable.

    Examples:
        >>> with otp.stream() as recording:
        ...     y = torch.ones(3) + 1
        >>> recording.health.sources["recording"], recording.health.dropped
        ('off: stopped', {})
    """

    sources: Mapping[str, str]
    """State of ``recording`` and, while it is on, of ``steps``, ``modules``, ``labels``, ``operators`` and
    ``frames``; also of ``ranks`` if the process is one of several ranks: whether other ranks can compute its span
    ids."""
    recorded: int
    """Events read from the recorder so far."""
    dropped: Mapping[str, int]
    """Dropped events by reason: ``evicted`` (the memory limit; the oldest first), ``depth`` (more than 1024 open on
    a thread), ``no_memory`` (the system had none), ``deadline`` (a stop ran out of time), ``failed`` (a logged
    error before they became spans), ``unseen_spans`` (application spans and batches of requests that ended
    faster than they could be read)."""
    exporters: Mapping[str, QueueStats]
    """Outcomes of the spans, by exporter."""
    notes: tuple[str, ...] = field(default=())
    """Further remarks on the numbers, one sentence each."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """Outcomes of the events on their way to the exporters. Events without a span: ``not_sampled``, ``filtered`` (of
    a step that is not traced in full, or shorter than the limit), ``failed`` (by a logged error after they were
    recorded). Spans without an event: ``added`` (steps, the job, roots of operators), ``parts`` (roots of the
    traces that others were split into), ``application``. Effects of the :class:`SpanPolicy`: spans that were
    ``aggregated``, ``collapsed``, or ``detail_dropped`` with the detail of their step; spans that are
    ``buffered`` until the decision; steps (or top-level spans where there are no steps) that were ``sampled`` in
    full or exported ``root_only``."""

    def __str__(self) -> str:
        lost = ", ".join(f"{count} ({reason})" for reason, count in self.dropped.items()) or "none"
        sources = "; ".join(f"{name} {state}" for name, state in self.sources.items())
        lines = [f"{sources}; {self.recorded} events recorded, dropped: {lost}"]
        lines += [f"{name}: {_queue_line(stats)}" for name, stats in self.exporters.items()]
        if self.spans:
            lines.append("spans: " + ", ".join(f"{count} {what}" for what, count in self.spans.items()))
        return "\n".join((*lines, *self.notes))

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None if that fails, so that the notebook displays the text."""
        return markup.attempt(self.to_html)

    def to_html(self) -> str:
        """Returns the report as an HTML table for a notebook."""
        exporters = ((name, _queue_line(stats)) for name, stats in self.exporters.items())
        spans = ", ".join(f"{count:,} {what}" for what, count in self.spans.items()) or "none"
        return _html(
            self.sources, _recorded_rows(self.recorded, self.dropped), (*exporters, ("spans", spans)), notes=self.notes
        )


def _recorded_rows(recorded: int, dropped: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    lost = ", ".join(f"{count:,} ({reason})" for reason, count in dropped.items()) or "none"
    return ("events recorded", f"{recorded:,}"), ("events dropped", lost)


def _html(states: Mapping[str, str], *rows: Iterable[tuple[str, str]], notes: Iterable[str] = ()) -> str:
    """Returns tables of states and of numbers, and the notes, as HTML."""
    figures = itertools.chain.from_iterable(rows)
    return markup.block(markup.pairs((*states.items(), *figures)), *map(markup.line, notes))


def _queue_line(stats: QueueStats) -> str:
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in stats.dropped.items()) or "0 dropped"
    line = (
        f"{stats.exported_spans} spans sent, {stats.waiting_spans} waiting ({stats.waiting_bytes / 2**20:.1f} MiB), "
        f"{stats.failed_spans} failed, {dropped}"
    )
    if stats.outage_seconds:
        line += f"; nothing was delivered for {stats.outage_seconds:.0f} s, it is tried again: {stats.last_error}"
    return line


@dataclass(frozen=True)
class GpuHealth:
    """State of :class:`GpuMetrics`; ``print(metrics.health)`` summarizes it in a few lines.

    A source is ``"on"`` or ``"off: "`` and the reason. Immutable.

    Examples:
        >>> otp.GpuMetrics().health.sources["nvml"]
        'off: not started'
    """

    sources: Mapping[str, str]
    """State of ``nvml``, the management library, and of each metric by name; a metric is on if any GPU has it."""
    devices: tuple[str, ...]
    """UUIDs of the observed GPUs."""
    notes: tuple[str, ...] = field(default=())
    """Metrics that single GPUs do not report, and why, one sentence each."""

    def __str__(self) -> str:
        if self.sources["nvml"] != ON:
            return f"nvml {self.sources['nvml']}"
        return "\n".join(("; ".join(f"{name} {state}" for name, state in self.sources.items()), *self.notes))

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None if that fails, so that the notebook displays the text."""
        return markup.attempt(
            lambda: _html(self.sources, (("cards", ", ".join(self.devices) or "none"),), notes=self.notes)
        )
