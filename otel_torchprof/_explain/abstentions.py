"""Why there is no verdict: what a file lacks, or what makes it doubtful."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.distinct import distinct_values

from .findings import steady, trained, whole_time, with_runnable
from .rules import RULES

if TYPE_CHECKING:
    from .arrays import Floats
    from .steps import Rank


STRAGGLERS = "stragglers"


class Abstention(NamedTuple):
    """A reason."""

    subject: str
    """Of what there is none: a rank, or stragglers."""
    reason: str
    way_out: str
    of_levels_only: bool = False
    """Single steps can still be judged."""


def _busy(runnable: Floats, seconds: Floats) -> float:
    """Share of the time ready to run: of most steps, or of all together, as far as that is sure."""
    return max(float(np.median(runnable / seconds)), whole_time(runnable, seconds)[1])


def abstentions(rank: Rank) -> list[Abstention]:
    """All that hold for a rank."""
    chosen = steady(rank)
    count = int(chosen.sum())
    if count < RULES.fewest_steps:
        compiled = int(trained(rank).sum()) - count
        left_out = f"the first {RULES.warm_up_steps}" + (f" and {compiled} that compiled" if compiled else "")
        return [
            Abstention(
                rank.name,
                f"{count} steady training steps ({left_out} left out), and {RULES.fewest_steps} are needed",
                "record more steps",
            )
        ]
    found = []
    if rank.dropped > RULES.most_dropped * (rank.events + rank.dropped):
        share = rank.dropped / (rank.events + rank.dropped)
        found.append(Abstention(rank.name, f"{share:.1%} of the events were dropped", "record with less detail"))
    if rank.has_twin_steps or len(distinct_values(rank.revision[chosen])) > 1:
        reason = "the rule of steps is ambiguous: " + (
            "several steps have one number" if rank.has_twin_steps else "it changed while steps were steady"
        )
        found.append(Abstention(rank.name, reason, "say what a step is: instrument(steps=optimizer), or prof.step()"))
    if rank.lacks_device_times:
        found.append(
            Abstention(
                rank.name,
                "work was launched on a device, and the file does not say how long it took",
                "record with ProfilerActivity.CUDA, or use_device",
            )
        )
    known = with_runnable(rank, chosen)
    busy = _busy(rank.runnable[known], rank.seconds[known]) if known.any() else 0.0
    if busy > RULES.most_runnable:
        reason = f"machine busy: for {busy:.0%} of the time the loop's thread was ready to run, and did not"
        found.append(Abstention(rank.name, reason, "nothing else is judged; record while nothing else runs"))
    unknown = float(np.median(rank.share(rank.unattributed)[chosen]))
    if unknown > RULES.most_unattributed and not rank.is_derived:
        reason = f"{unknown:.0%} of step time is in no phase"
        found.append(Abstention(rank.name, reason, "record Python's calls (--detail frames)", of_levels_only=True))
    return found
