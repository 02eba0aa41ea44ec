"""Findings: the rules for verdicts, their evidence and advice, and reasons for giving no verdict."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._encode.table import brief_time

from .steps import PLACE_OF, after_warm_up

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Flags, Floats, Integers

    from .steps import Rank


class VerdictRules(NamedTuple):
    """Thresholds; shares are fractions of the duration of a step."""

    version: int = 10
    """Raised whenever a number or its meaning changes."""
    warm_up_steps: int = 5
    """First training steps that are left out, unless a recording begins with a later step of the program."""
    recompiling_share: float = 0.01
    """Largest share of compilation in a steady step."""
    fewest_steps: int = 20
    """Fewest steady steps for a verdict."""
    firm_steps: int = 50
    """Fewest steady steps for a firm verdict; with fewer it is tentative."""
    bound_share: float = 0.20
    """Least share for a verdict: for phases, of all steps together; for anything else, as a median."""
    bound_lower: float = 0.15
    """Least lower end of the 95 % interval of that share."""
    note_share: float = 0.10
    """Least share for a note."""
    page_seconds: float = 0.5e-6
    """Least cost of a page of fresh memory, for the cost of memory that is freed and allocated again."""
    fewest_pages: int = 1000
    """Fewest pages per step that are reported."""
    fewest_waits: int = 5
    """Fewest waits per step that count as waits for the GIL."""
    shortest_wait: float = 0.5e-3
    """Shortest average of such waits."""
    longest_wait: float = 8e-3
    """Longest average of such waits: another thread yields the GIL after 5 ms."""
    resamples: int = 1000
    """Number of bootstrap resamples."""
    seed: int = 0
    """Seed of the bootstrap's random numbers."""
    most_unattributed: float = 0.15
    """Largest share of time outside of all phases; above it, verdicts that depend on phases are withheld."""
    most_dropped: float = 0.01
    """Largest fraction of dropped events; above it there is no verdict."""
    most_runnable: float = 0.10
    """Largest share of time in which the loop's thread was ready to run without a processor; above it, shares are also judged without
    that time."""
    spike_ratio: float = 3.0
    """There are spikes if the 99th percentile is above this many medians; each step above as many is one."""
    spike_cause_share: float = 0.80
    """Least part of a spike's excess that a cause covers."""
    fewest_spikes: int = 3
    """Fewest spikes with the same cause."""
    spike_chance_ratio: float = 3.0
    """Least ratio of the spikes with a cause to those that its usual share of a step would explain by chance."""
    alignment_errors: float = 3.0
    """Ranks wait in a collective if the last rank is later by this many times the alignment error of the clocks."""
    last_share: float = 0.60
    """Least fraction of these collectives in which a straggler is the last rank."""
    fewest_collectives: int = 20
    """Fewest such collectives."""
    lateness_share: float = 0.05
    """Least share of step time that a straggler costs."""
    growth_warm_up: float = 0.2
    """Part of the steps, the first, whose memory is left out."""
    growth_steps: int = 39
    """Fewest steps after these."""
    growth_blocks: int = 13
    """Number of blocks of steps whose lowest memory is compared."""
    growth_third: float = 0.2
    """Least part of the growth in each third of these."""
    growth_bytes: float = 2 * 2.0**20
    """Least growth in all of them, in bytes."""
    growth_share: float = 0.005
    """The same, as a part of the memory."""
    growth_recording: float = 32 * 2.0**20
    """Least growth of a process whose operators are recorded: what a recording takes meanwhile."""
    growth_operator: float = 256.0
    """The same, for each operator: 180 bytes were measured beside a busy process."""
    growth_most_recording: float = 320 * 2.0**20
    """The most of both: its buffers and its queue have limits."""


class DiffRules(NamedTuple):
    """Thresholds for differences between two recordings."""

    version: int = 5
    """Raised whenever a number or its meaning changes."""
    warm_up_steps: int = 5
    """First training steps that are left out, unless a recording begins with a later step of the program."""
    fewest_steps: int = 20
    """Fewest steps of each recording."""
    fastest: float = 0.10
    """Fraction of the steps in which a name runs, the fastest, whose times are compared."""
    blocks: int = 10
    """Number of blocks of steps from which errors are computed."""
    least_share: float = 0.005
    """Least share of a step: smaller times are not compared, and smaller differences not reported."""
    deviations: float = 4.0
    """A change is this many standard deviations, of its own times and of the distance of names from the common change."""
    path_share: float = 0.80
    """A path with this fraction of a name's difference is reported instead of the name."""
    fewest_names: int = 5
    """Fewest names from which the common change is computed."""
    spread_of_few: float = 0.05
    """Standard deviation of names if there are fewer."""
    spread: float = 0.015
    """Least standard deviation of a name between two recordings of one program, also beyond the common change."""
    common_change: float = 0.10
    """Least common change of which two files do not tell whether it is the machine's or the program's; a smaller one is the machine's."""


RULES = VerdictRules()
DIFF_RULES = DiffRules()


_HIGH, _MEDIUM = 0.4, 0.2
_MOST_RESAMPLED = 2000
"""Most resampled steps; of more, every n-th is used."""


class Advice(NamedTuple):
    """Advice for a verdict."""

    meaning: str
    """Behaviour of the loop, as the end of a sentence that begins with the verdict."""
    next_action: str
    check: str
    """Observation that would refute the verdict."""


class Finding(NamedTuple):
    """One verdict."""

    verdict: str
    severity: str
    """Cost of the fault: ``high``, ``medium``, ``low``, or ``none`` for a verdict that is not a fault."""
    confidence: str
    """``firm`` or ``tentative``."""
    is_note: bool
    """Whether it is too small for a verdict."""
    share: float
    """Share of the examined time."""
    recoverable_seconds: float
    """Upper limit of the seconds that the recording would be shorter without the cause."""
    evidence: tuple[str, ...]
    next_action: str
    check: str
    """Observation that would refute the verdict."""
    statement: str
    """What the loop does, with the share."""
    name: str = ""
    """The operator, if the verdict is on one."""
    busy_share: float = 0.0
    """Part of the share in which the loop's thread was ready to run, and other threads had the processors."""
    ranks: tuple[str, ...] = ()
    """Ranks with this verdict; empty if there is one rank."""
    line: str = ""
    """Line of the program in which most of that time is: ``train.py:5 log_metrics``; empty if unknown."""
    cause: str = ""
    """Name of the cause; empty if unknown."""
    step_seconds: float = 0.0
    """Upper limit of the seconds that a typical step would be shorter; 0 for what few steps have."""

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        return f"{self.verdict}: {self.statement}"


def finding_for(
    verdict: str,
    share: float,
    recoverable: float,
    evidence: tuple[str, ...],
    *,
    steps: int,
    advice: Advice,
    is_note: bool = False,
) -> Finding:
    """Returns the finding for a verdict; severity depends on the share, confidence on the number of steps."""
    severity = "high" if share >= _HIGH else "medium" if share >= _MEDIUM else "low"
    is_harmless = verdict in HARMLESS
    return Finding(
        verdict,
        "none" if is_harmless else severity,
        "firm" if steps >= RULES.firm_steps else "tentative",
        is_note,
        share,
        0.0 if is_harmless else recoverable,
        evidence,
        advice.next_action,
        advice.check,
        f"{share:.0%} {advice.meaning}",
    )


def trained(rank: Rank) -> Flags:
    """The training steps after the warm-up."""
    return after_warm_up(rank.is_training, rank.number, RULES.warm_up_steps)


def steady(rank: Rank) -> Flags:
    """Selects the training steps after the warm-up that did not compile."""
    return trained(rank) & (rank.phases[:, PLACE_OF["compile"]] <= RULES.recompiling_share * rank.seconds)


def with_runnable(rank: Rank, chosen: Flags) -> Flags:
    """Selects the chosen steps whose runnable time is known; none if that is less than half of them."""
    known = chosen & ~np.isnan(rank.runnable)
    return known if 2 * int(known.sum()) >= int(chosen.sum()) else np.zeros_like(chosen)


def busy_share(rank: Rank, chosen: Flags) -> float:
    """Returns the share of time ready to run: of most steps, or the lower limit for all together; 0 if unknown."""
    known = with_runnable(rank, chosen)
    if not known.any():
        return 0.0
    runnable, seconds = rank.runnable[known], rank.seconds[known]
    return max(float(np.median(runnable / seconds)), whole_time(runnable, seconds)[1])


def median_share(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """Returns the median share of steps and its 95 % bootstrap interval."""
    thinned = (seconds / of_steps)[:: _thinning(seconds)]
    low, high = np.percentile(np.median(thinned[_drawn(len(thinned))], axis=1), (2.5, 97.5))
    return float(np.median(seconds / of_steps)), float(low), float(high)


def whole_time(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """Returns the share of all steps together and its interval, for times that few steps have.

    A median says little of these.
    """
    part, whole = (column[:: _thinning(seconds)] for column in (seconds, of_steps))
    drawn = _drawn(len(part))
    low, high = np.percentile(part[drawn].sum(axis=1) / whole[drawn].sum(axis=1), (2.5, 97.5))
    return float(seconds.sum() / of_steps.sum()), float(low), float(high)


def _thinning(seconds: Floats) -> int:
    return -(-len(seconds) // _MOST_RESAMPLED)


def _drawn(count: int) -> Integers:
    return np.random.default_rng(RULES.seed).integers(0, count, (RULES.resamples, count))


def time(seconds: float) -> str:
    """Formats a duration with three digits."""
    return brief_time(seconds * 1e6)


def span(low: float, high: float) -> str:
    """Formats an interval of shares: one number if its ends are one."""
    return " to ".join(dict.fromkeys((f"{low:.0%}", f"{high:.0%}")))


STRAGGLERS = "stragglers"


class Leaves(str, Enum):
    """Verdicts that remain possible."""

    NOTHING = "nothing"
    SINGLE_STEPS = "single steps"
    """Also verdicts that do not depend on the unattributed time."""
    OTHERS = "others"
    """All but the verdict that is its subject."""


class Abstention(NamedTuple):
    """A reason for no verdict."""

    subject: str
    """The subject without a verdict: a rank, or stragglers."""
    reason: str
    way_out: str
    leaves: Leaves = Leaves.NOTHING
    verdict: str = ""
    """The verdict that is withheld, if it is one."""


def abstentions(rank: Rank) -> list[Abstention]:
    """Returns all reasons that apply to a rank."""
    chosen = steady(rank)
    count = int(chosen.sum())
    if count < RULES.fewest_steps:
        warm = trained(rank)
        compiled, first = int(warm.sum()) - count, int(rank.is_training.sum() - warm.sum())
        parts = (f"the first {first}" if first else "", f"{compiled} that compiled" if compiled else "")
        left_out = " and ".join(filter(None, parts))
        return [
            Abstention(
                rank.name,
                f"{count} steady training steps{f' ({left_out} left out)' if left_out else ''}, and {RULES.fewest_steps} are needed",
                "record more steps",
            )
        ]
    reasons = []
    if rank.dropped > RULES.most_dropped * (rank.events + rank.dropped):
        share = rank.dropped / (rank.events + rank.dropped)
        reasons.append(Abstention(rank.name, f"{share:.1%} of the events were dropped", "record with less detail"))
    if rank.has_twin_steps or len(distinct_values(rank.revision[chosen])) > 1:
        reason = "the rule of steps is ambiguous: " + (
            "several steps have one number" if rank.has_twin_steps else "it changed while steps were steady"
        )
        reasons.append(Abstention(rank.name, reason, "say what a step is: instrument(steps=optimizer), or prof.step()"))
    if rank.lacks_device_times:
        reasons.append(
            Abstention(
                rank.name,
                "work was launched on a device, and the file does not say how long it took",
                "record with ProfilerActivity.CUDA, or use_device",
            )
        )
    unknown = float(np.median(rank.share(rank.unattributed)[chosen]))
    if unknown > RULES.most_unattributed and not (rank.is_derived or rank.rest_has_lines):
        reason = f"{unknown:.0%} of step time is in no phase"
        reasons.append(Abstention(rank.name, reason, "record Python's calls (--detail frames)", Leaves.SINGLE_STEPS))
    return reasons


BY_PHASE = {
    "data": "input-bound",
    "optimizer": "optimizer-bound",
    "collective": "communication-bound",
    "checkpoint": "checkpoint-bound",
    "evaluation": "evaluation-bound",
    "compile": "compile-bound",
    "gc": "gc-bound",
    "device_wait": "device-wait-bound",
}
"""Verdicts by phase; the computing phases are missing, which have one verdict together."""
COMPUTING = ("forward", "backward", "inference", "generate", "prefill", "decode")
WAITING = ("data", "checkpoint", "collective", "device_wait")
HARMLESS = frozenset(("compute-bound", "device-bound"))
"""Verdicts that are no fault."""
