"""The span of the job: what holds the steps of a run together, ended and begun anew every so often.

A span is sent when it ends. One for the whole run would be seen when the run is over, and never if it crashed. So it comes in
sections, each a trace of its own that links to the one before; a step links to the section that it began in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._process import threads

from .step_spans import StepSpan, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

JOB_NAME = "torch.job"


class Job:
    """The sections of one recording. For one thread at a time, but for :meth:`link` and :meth:`begin`.

    Args:
        interval_ns: after which a section ends; 0: there is no such span.
        new_trace: asked once per section: its name, -1, and the section that it links to.
        new_span_id: as ``generate_span_id`` of OpenTelemetry's IdGenerator.
    """

    def __init__(
        self,
        interval_ns: int,
        new_trace: Callable[[str, int, tuple[int, int] | None], Trace],
        new_span_id: Callable[[], int],
    ) -> None:
        self._interval_ns = interval_ns
        self._new_trace = new_trace
        self._new_span_id = new_span_id
        self._lock = threads.RLock()  # a signal handler may shut down in the middle of a boundary
        self._section: StepSpan | None = None
        self._number = 0
        self._is_linked = False
        self._steps = 0
        self._first_step = self._last_step = -1

    def link(self) -> tuple[int, int] | None:
        """Trace and span id of the running section, once there is one that is sent. Any thread."""
        section = self._section
        return (section.trace.trace_id, section.span_id) if section is not None and section.trace.exported else None

    def begin(self, now: int) -> None:
        """The first step began then (Unix ns); without effect later. Any thread."""
        with self._lock:
            if self._section is None and self._interval_ns:
                self._section = self._begun(now, None)

    def note(self, steps: Iterable[StepSpan]) -> None:
        """Steps have ended. Those inside spans of the application count not: these are their job."""
        link = self.link()
        for step in steps:
            self._is_linked |= step.trace.exported and step.job is not None and step.job == link
            if step.number >= 0 and step.thread is not None and not step.is_enclosed:
                if self._section is not None and not self._number:
                    self._section.start = min(self._section.start, step.start)
                self._steps += 1
                self._first_step = step.number if self._first_step < 0 else self._first_step
                self._last_step = max(self._last_step, step.number)

    def ended(self, now: int, *, final: bool) -> list[StepSpan]:
        """The section that ends now (Unix ns), if it is time; ``final``: the running one, unless nothing was in it or links to it.

        The first one lasts until there was a step in it.
        """
        section = self._section
        is_due = final or (section is not None and now - section.start >= self._interval_ns)
        is_empty = not self._steps and not self._is_linked
        if section is None or not is_due or (is_empty and (final or not self._number)):
            return []
        section.end = max(now, section.start)
        section.attributes |= {"torch.job.section": self._number, "torch.job.steps": self._steps}
        if self._steps:
            section.attributes |= {"torch.job.first_step": self._first_step, "torch.job.last_step": self._last_step}
        link = self.link()
        self._number += 1
        self._is_linked, self._steps, self._first_step, self._last_step = False, 0, -1, -1
        self._section = None if final else self._begun(section.end, link)
        return [section]

    def _begun(self, now: int, link: tuple[int, int] | None) -> StepSpan:
        trace = self._new_trace(JOB_NAME, -1, link)
        return StepSpan(-1, trace, self._new_span_id(), now, now, None, link, name=JOB_NAME)
