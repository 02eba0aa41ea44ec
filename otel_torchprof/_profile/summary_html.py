"""What a notebook shows of a profile: how much was recorded, and where the time went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof import markup
from otel_torchprof._encode.table import format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._events.events import EventList
    from otel_torchprof._spans.step_spans import RecordedStep
    from otel_torchprof.health import Health

_TOP_ROWS = 10


def summary_html(
    title: str, health: Health, steps: Sequence[RecordedStep] = (), averages: EventList | None = None
) -> str:
    """A title with figures, the averages with the most self time, the state of the recording."""
    figures = [title]
    if health.stop_ns:
        figures.append(format_time((health.stop_ns - health.start_ns) / 1000))
    if steps:
        durations = sorted(step.end - step.start for step in steps)
        figures.append(f"{len(steps):,} steps, median {format_time(durations[len(durations) // 2] / 1000)}")
    if lost := sum(health.dropped.values()):
        figures.append(f"{lost:,} events dropped")
    parts = [markup.line(", ".join(figures))]
    if averages:
        by = "self_device_time_total" if averages[0].use_device else "self_cpu_time_total"
        parts.append(markup.details("Most self time", averages.to_html(by, _TOP_ROWS), is_open=True))
    parts.append(markup.details("Health", health.to_html()))
    return markup.block(*parts)
