"""Reasons for no verdict: missing or doubtful data in a file."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values

from .findings import busy_share, steady, trained
from .rules import RULES

if TYPE_CHECKING:
    from .steps import Rank


STRAGGLERS = "stragglers"


class Leaves(str, Enum):
    """Verdicts that remain possible."""

    NOTHING = "nothing"
    SINGLE_STEPS = "single steps"
    """Also verdicts that do not depend on the unattributed time."""
    WAITS = "waits"
    """Waits in which the thread was blocked."""


class Abstention(NamedTuple):
    """A reason for no verdict."""

    subject: str
    """The subject without a verdict: a rank, or stragglers."""
    reason: str
    way_out: str
    leaves: Leaves = Leaves.NOTHING


def abstentions(rank: Rank) -> list[Abstention]:
    """Returns all reasons that apply to a rank."""
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
    busy = busy_share(rank, chosen)
    if busy > RULES.most_runnable:
        reason = f"machine busy: for {busy:.0%} of the time the loop's thread was ready to run, and other threads had the processors"
        way_out = "record while nothing else runs; only waits in which the thread was blocked are judged"
        found.append(Abstention(rank.name, reason, way_out, Leaves.WAITS))
    unknown = float(np.median(rank.share(rank.unattributed)[chosen]))
    if unknown > RULES.most_unattributed and not rank.is_derived:
        reason = f"{unknown:.0%} of step time is in no phase"
        found.append(Abstention(rank.name, reason, "record Python's calls (--detail frames)", Leaves.SINGLE_STEPS))
    return found
