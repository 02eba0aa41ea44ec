"""Tail sampling: which steps are traced in full, once they have ended: those that were slow, that failed, or that somebody asked for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from otel_torchprof._tree.span_table import STEP_NAME

from .decisions import SlowOnes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from otel_torchprof._spans.steps import StepSpan

    from .decisions import Rules


class TailSampler:
    """The tail sampler of one recording. For one thread at a time, but for :meth:`ask`."""

    def __init__(self, rules: Rules) -> None:
        self._keeps_all = rules.keep_all
        self._slow = SlowOnes(rules.quantile, rules.limit_ns)
        self._asked: set[int] = set()
        self.figures: Counter[str] = Counter()
        """Trace groups by decision: ``sampled``, ``root_only``."""

    def ask(self, step: int) -> None:
        """The detail of a step is to be kept, whatever it turns out to be. Any thread."""
        if not self._keeps_all:  # else nobody would ever look at what was asked for
            self._asked.add(step)

    def of_steps(self, ended: Sequence[StepSpan], failed: Collection[int]) -> dict[int, bool]:
        """Whether each ended step, and each ended root of operators, keeps its detail, by trace group. ``failed``: where something did.

        One decision for all spans of a step, by the duration that its own loop gave it. How long operators share a root says
        nothing about them: there it is the longest operator that is compared with those of other roots.
        """
        steps = [span for span in ended if span.is_step]
        sampled = dict.fromkeys([span.number for span in steps], False)
        for span in steps:
            slow = span.thread is not None and self._slow.takes(STEP_NAME, span.end - span.start)
            sampled[span.number] |= slow or span.span_id in failed or span.number in self._asked
        self._asked.difference_update(sampled)  # and not -=, which would lose what is asked for meanwhile
        for is_sampled in sampled.values():
            self.figures["sampled" if is_sampled else "root_only"] += 1
        found = {span.span_id: sampled[span.number] for span in steps}
        for span in ended:
            if not span.is_step:
                found[span.span_id] = self.of_trace_group(span.name, span.longest, failed=span.span_id in failed)
        return found

    def of_trace_group(self, name: str, duration_ns: int, *, failed: bool) -> bool:
        """The same for what is no step."""
        slow = self._slow.takes(name, duration_ns)
        self.figures["sampled" if slow or failed else "root_only"] += 1
        return slow or failed
