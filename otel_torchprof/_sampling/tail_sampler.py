"""Tail sampling: which steps are traced in full, once they have ended: those that were slow for what they are, that failed, or that somebody asked for."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Segment

from .decisions import SlowOnes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from otel_torchprof._spans.step_spans import StepSpan

    from .decisions import Rules

_MOST_ASKED = 1 << 12
"""Moments that are remembered until a segment has ended in which they are; where there are no segments, the latest."""


class TailSampler:
    """The tail sampler of one recording. For one thread at a time, but for :meth:`ask`."""

    def __init__(self, rules: Rules) -> None:
        self._keeps_all = rules.keep_all
        self._slow = SlowOnes(rules.quantile, rules.limit_ns)
        self._asked: deque[int] = deque(maxlen=_MOST_ASKED)  # Unix ns
        self.figures: Counter[str] = Counter()
        """Trace groups by decision: ``sampled``, ``root_only``."""

    def ask(self, now: int) -> None:
        """The segment that runs now (Unix ns) keeps its detail, whatever it turns out to be. Any thread."""
        if not self._keeps_all:  # else nobody would ever look at what was asked for
            self._asked.append(now)

    def of_steps(self, ended: Sequence[StepSpan], failed: Collection[int]) -> dict[int, bool]:
        """Whether each ended segment, and each ended root of operators, keeps its detail, by trace group. ``failed``: where something did.

        One decision for all spans of a segment, by the duration that its own loop gave it, compared with those of its kind: steps with
        steps, evaluations with evaluations. Set-up is kept. How long operators share a root says nothing about them: there it is
        the longest operator that is compared with those of other roots.
        """
        segments = [span for span in ended if span.segment is not None]
        sampled, asked = dict.fromkeys(map(_segment_of, segments), False), tuple(self._asked)
        for span in segments:
            slow = span.thread is not None and self._slow.takes(span.name, span.end - span.start)
            is_asked = any(span.start <= time <= span.end for time in asked)
            has_to_be = span.segment is Segment.SETUP or span.span_id in failed or is_asked
            sampled[_segment_of(span)] |= slow or has_to_be
        latest = max((span.end for span in segments), default=0)
        while self._asked and self._asked[0] <= latest:
            self._asked.popleft()
        for is_sampled in sampled.values():
            self.figures["sampled" if is_sampled else "root_only"] += 1
        found = {span.span_id: sampled[_segment_of(span)] for span in segments}
        for span in ended:
            if span.segment is None:
                found[span.span_id] = self.of_trace_group(span.name, span.longest, failed=span.span_id in failed)
        return found

    def of_trace_group(self, name: str, duration_ns: int, *, failed: bool) -> bool:
        """The same for what is no step."""
        slow = self._slow.takes(name, duration_ns)
        self.figures["sampled" if slow or failed else "root_only"] += 1
        return slow or failed


def _segment_of(span: StepSpan) -> tuple[int, tuple[int, int] | None]:
    """The same for the spans of one segment: steps are numbered, and of the others each links to another one before."""
    return span.number, span.link if span.number < 0 else None
