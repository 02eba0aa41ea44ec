"""What was on, what was off and why, what was lost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


ON = "on"
NO_DEVICE = "no device is used"
"""Why no device is timed, where nobody asked for one."""
_NOT_ASKED = (f"off: {NO_DEVICE}", "off: not asked for")


@dataclass(frozen=True)
class ProfilerStats:
    """How long the parts of a profile took; the names are torch's.

    Those of the last segment that was recorded, as torch has them.
    """

    profiling_window_duration_sec: float = 0.0
    """From the start of the recording to its stop, in seconds."""
    number_of_events: int = 0
    """Events in the list of events; 0 until it was asked for."""
    profiler_prepare_call_duration_us: int = 0
    profiler_enable_call_duration_us: int = 0
    profiler_disable_call_duration_us: int = 0
    parse_kineto_call_duration_us: int = 0
    """Bringing the recorder's events into columns; 0 until something was read."""
    function_events_build_tree_call_duration_us: int = 0
    """Bringing the columns into torch's order and tree; 0 until the events were asked for."""


@dataclass(frozen=True)
class Health:
    """State of one profile. ``print(prof.health)`` says it in a line or a few.

    Sources are ``"on"`` or ``"off: "`` and the reason.
    """

    operators: str
    """Torch's operators."""
    labels: str
    """Labels of this package."""
    recorded: int
    """Events, allocations and releases that were kept; 0 until the profile has ended. With ``dropped``: all that there were."""
    dropped: Mapping[str, int]
    """What was not kept, by reason: ``budget`` (the memory limit), ``depth`` (over 1024 open on a thread),
    ``no_memory`` (the system gave none)."""
    memory_bytes: int
    """Most memory that was held for it in the recorder at a time."""
    memory_limit: int
    """What it may hold."""
    start_ns: int = 0
    """When it started, Unix ns; 0 before that."""
    stop_ns: int = 0
    """When it stopped, Unix ns; 0 before that."""
    notes: tuple[str, ...] = field(default=())
    """Anything else a reader of the figures should know, a sentence each."""
    stats: ProfilerStats = field(default_factory=ProfilerStats)
    """How long its parts took."""
    devices: str = f"off: {NO_DEVICE}"
    """Times of a device, for operators, labels and modules."""
    energy: str = "off: not asked for"
    """Readings of the energy counters of GPUs."""

    def __str__(self) -> str:
        lost = ", ".join(f"{count} ({reason})" for reason, count in self.dropped.items()) or "none"
        asked = "".join(
            f"; {name} {state}"
            for name, state in (("devices", self.devices), ("energy", self.energy))
            if state not in _NOT_ASKED
        )
        line = (
            f"operators {self.operators}; labels {self.labels}{asked}; {self.recorded} events recorded, dropped: {lost}; "
            f"{self.memory_bytes / 2**20:.1f} MiB of {self.memory_limit / 2**20:.0f} MiB used"
        )
        return "\n".join((line, *self.notes))

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None where that fails, and it shows the text."""
        return markup.attempt(self.to_html)

    def to_html(self) -> str:
        """Return the same as a table, for a notebook."""
        states = {"operators": self.operators, "labels": self.labels, "devices": self.devices, "energy": self.energy}
        memory = f"{self.memory_bytes / 2**20:.1f} MiB of {self.memory_limit / 2**20:.0f} MiB"
        return _html(states, _recorded_rows(self.recorded, self.dropped), (("memory", memory),), notes=self.notes)


@dataclass(frozen=True)
class QueueStats:
    """What became of the spans that were put into a queue: each is exported, failed, dropped or waiting, at any moment."""

    exported_spans: int = 0
    """The exporter answered SUCCESS; with our own: the receiver took them."""
    failed_spans: int = 0
    """The exporter answered FAILURE, or raised; with our own: the receiver refused or rejected them for good."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Spans that were given up, by reason: ``queue_full`` (the exporter was slower than they came), ``outage`` (full while the
    receiver took nothing), ``shutdown`` (came after it, or its time was over), and ``no_response``: those of them that were sent
    before, or were being sent, and had no response: they may have arrived, and a later response changes no count."""
    waiting_spans: int = 0
    """Those that the exporter has in its hands are among them."""
    waiting_bytes: int = 0
    """What these hold in memory."""
    outage_seconds: float = 0.0
    """For how long the receiver has taken nothing, and it has been tried again; 0 while it does."""
    last_error: str = ""
    """Why the last attempt failed that was tried again."""

    @property
    def dropped_spans(self) -> int:
        """Spans that were given up, whatever the reason."""
        return sum(self.dropped.values())


@dataclass(frozen=True)
class ProcessorHealth:
    """State of a TorchSpanProcessor. ``print(processor.health)`` says it in a few lines.

    Sources are ``"on"`` or ``"off: "`` and the reason; ``steps`` are ``"on: "`` and the rule by which they end.
    """

    sources: Mapping[str, str]
    """``recording``, and with it ``steps``, ``modules``, ``labels``, ``operators``, ``frames``; ``ranks`` where this is one of
    several: whether ids are derived that other ranks know."""
    recorded: int
    """Events taken from the recorder so far."""
    dropped: Mapping[str, int]
    """Events that were lost, by reason: ``evicted`` (the memory limit; the oldest go), ``depth`` (over 1024 open on a
    thread), ``no_memory`` (the system gave none), ``deadline`` (a stop had no time for them), ``failed`` (an error on the way to
    spans, which was logged), ``unseen_spans`` (spans of the application that came faster than they could be added up)."""
    exporters: Mapping[str, QueueStats]
    """What became of the spans, by exporter."""
    notes: tuple[str, ...] = field(default=())
    """Anything else a reader of the figures should know, a sentence each."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """What became of the events on their way to an exporter. Those that make no span: ``not_sampled``, ``filtered`` (a step told
    without its events, a call that was too short), ``failed`` (by an error after they were recorded, which was
    logged). Spans that are none of an event's: ``added`` (steps, the job, roots of operators), ``parts`` (roots of traces
    that others were split into), ``application``. What the :class:`SpanPolicy` did: spans that were ``aggregated``, ``collapsed``, or
    ``detail_dropped`` with the detail of their step; ``buffered`` until it is decided; steps (or what is a step where there are none)
    whose detail was ``sampled`` and that were ``root_only``."""

    def __str__(self) -> str:
        lost = ", ".join(f"{count} ({reason})" for reason, count in self.dropped.items()) or "none"
        sources = "; ".join(f"{name} {state}" for name, state in self.sources.items())
        lines = [f"{sources}; {self.recorded} events recorded, dropped: {lost}"]
        lines += [f"{name}: {_queue_line(stats)}" for name, stats in self.exporters.items()]
        if self.spans:
            lines.append("spans: " + ", ".join(f"{count} {what}" for what, count in self.spans.items()))
        return "\n".join((*lines, *self.notes))

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None where that fails, and it shows the text."""
        return markup.attempt(self.to_html)

    def to_html(self) -> str:
        """Return the same as a table, for a notebook."""
        exporters = ((name, _queue_line(stats)) for name, stats in self.exporters.items())
        spans = ", ".join(f"{count:,} {what}" for what, count in self.spans.items()) or "none"
        return _html(
            self.sources, _recorded_rows(self.recorded, self.dropped), (*exporters, ("spans", spans)), notes=self.notes
        )


def _recorded_rows(recorded: int, dropped: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    lost = ", ".join(f"{count:,} ({reason})" for reason, count in dropped.items()) or "none"
    return ("events recorded", f"{recorded:,}"), ("events dropped", lost)


def _html(states: Mapping[str, str], *rows: Iterable[tuple[str, str]], notes: Iterable[str] = ()) -> str:
    """Tables of states and of figures, and the notes."""
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
    """State of GpuMetrics. ``print(metrics.health)`` says it in a few lines.

    Sources are ``"on"`` or ``"off: "`` and the reason.
    """

    sources: Mapping[str, str]
    """``nvml``, the management library, and each metric by name; one is on where any GPU has it."""
    devices: tuple[str, ...]
    """UUIDs of the cards that are watched."""
    notes: tuple[str, ...] = field(default=())
    """What single GPUs do not tell, and why, a sentence each."""

    def __str__(self) -> str:
        if self.sources["nvml"] != ON:
            return f"nvml {self.sources['nvml']}"
        return "\n".join(("; ".join(f"{name} {state}" for name, state in self.sources.items()), *self.notes))

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None where that fails, and it shows the text."""
        return markup.attempt(
            lambda: _html(self.sources, (("cards", ", ".join(self.devices) or "none"),), notes=self.notes)
        )
