"""Findings on single steps that are much longer than others, and on pauses between steps."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from .advice import fitting
from .causes import with_lines
from .findings import BY_PHASE, COMPUTING, RULES, finding_for, steady, time, trained, with_runnable
from .steps import PLACE_OF, is_operator, is_what_models_do

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Floats, Integers

    from .findings import Finding
    from .steps import Rank

_MOST_LISTED = 5
"""Most listed numbers of steps."""
_MOST_SPIKES = 500
"""Most spikes that are examined, the longest first."""
_MOST_COMPARED = 2000
"""Most steps with which a spike is compared; of more, every n-th."""


def spikes(rank: Rank) -> list[Finding]:
    """Findings on the causes of slow single steps; without a cause, a note."""
    places = np.flatnonzero(trained(rank))
    if len(places) < RULES.fewest_steps:
        return []
    seconds = rank.seconds[places]
    median, high = float(np.median(seconds)), float(np.percentile(seconds, 99))
    slow = places[seconds > RULES.spike_ratio * median]
    if high <= RULES.spike_ratio * median or not len(slow):
        return []
    findings = []
    for cause, steps in _causes(rank, places, slow).items():
        what = f"{cause} covers {RULES.spike_cause_share:.0%} or more of the excess in {len(steps)} of {len(slow)}"
        of_phase = BY_PHASE.get(cause, "machine-busy" if cause == _RUNNABLE else "spikes")
        findings.append(_finding(rank, places, steps, of_phase, what))
        slow = np.setdiff1d(slow, steps)
    if len(slow):
        findings.append(_finding(rank, places, slow, "spikes", "cause unknown")._replace(is_note=True))
    return findings


_RUNNABLE = "time runnable but not running"


def _phases_of_time(rank: Rank) -> dict[str, Floats]:
    """Seconds by step and cause; time without a processor is the first, since it is a part of the other causes."""
    columns: dict[str, Floats] = {}
    known = with_runnable(rank, trained(rank))
    if known.any():
        columns[_RUNNABLE] = np.where(np.isnan(rank.runnable), float(np.median(rank.runnable[known])), rank.runnable)
    return columns | {phase: rank.seconds_of(phase) for phase in PLACE_OF if phase not in COMPUTING}


def _causes(rank: Rank, places: Integers, slow: Integers) -> dict[str, Integers]:
    """By cause, the slow steps whose excess it covers, in order; a step has one cause.

    Other causes than a busy machine cover what is left of the excess without the time ready to run, all of which may be theirs.
    """
    columns = _phases_of_time(rank)
    usual = _UsualTimes(rank, places)
    for name, column in columns.items():
        usual.add(name, float(np.median(column[places])))
    median = float(np.median(rank.seconds[places]))
    covered: dict[str, list[int]] = {}
    for step in slow[np.argsort(-rank.seconds[slow], kind="stable")][:_MOST_SPIKES].tolist():
        excess = float(rank.seconds[step]) - median
        times = {name: float(column[step]) for name, column in columns.items()} | _slow_operator(rank, step)
        more = {name: seconds - usual.median(name) for name, seconds in times.items()}
        runnable = max(more.get(_RUNNABLE, 0.0), 0.0)
        if runnable >= RULES.spike_cause_share * excess:
            covered.setdefault(_RUNNABLE, []).append(step)
            continue
        least = RULES.spike_cause_share * (excess - runnable)
        cause = next((name for name in more if name != _RUNNABLE and more[name] - runnable >= least), None)
        if cause:
            covered.setdefault(cause, []).append(step)
    # A random delay most often hits what takes most of a step.
    by_chance = {cause: usual.median(cause) / median * len(slow) for cause in covered}
    return {
        cause: np.array(sorted(steps))
        for cause, steps in covered.items()
        if len(steps) >= max(RULES.fewest_spikes, RULES.spike_chance_ratio * by_chance[cause])
    }


class _UsualTimes:
    """Median times of phases and operators over steps; each operator is computed once."""

    def __init__(self, rank: Rank, places: Integers) -> None:
        self._operators = [rank.operators[step] for step in places[:: -(-len(places) // _MOST_COMPARED)].tolist()]
        self._medians: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Sets the median of a phase."""
        self._medians[name] = seconds

    def median(self, name: str) -> float:
        """The median time of an operator or a phase, in seconds."""
        if name not in self._medians:
            times = [sum(operator.seconds for operator in step if operator.name == name) for step in self._operators]
            self._medians[name] = float(np.median(times))
        return self._medians[name]


def _slow_operator(rank: Rank, step: int) -> dict[str, float]:
    """The operator with the most self time, unless models are expected to spend time there: a delay hits these most often."""
    of_step: dict[str, float] = defaultdict(float)
    for operator in rank.operators[step]:
        if is_operator(operator.name):
            of_step[operator.name] += operator.seconds
    name = max(of_step, key=lambda operator_name: of_step[operator_name], default="")
    return {name: of_step[name]} if name and not is_what_models_do(name) else {}


def _finding(rank: Rank, places: Integers, slow: Integers, verdict: str, what: str) -> Finding:
    median = float(np.median(rank.seconds[places]))
    excess = float(rank.seconds[slow].sum()) - median * len(slow)
    evidence = (
        f"{len(slow)} of {len(places)} steps took more than {RULES.spike_ratio:g} x the median of {time(median)}: {what}",
        f"steps {_listed(rank.number[slow])}; the longest {time(float(rank.seconds[slow].max()))}",
    )
    share = excess / float(rank.seconds[places].sum())
    is_slow = np.zeros(len(rank.number), np.bool_)
    is_slow[slow] = True
    finding = finding_for(verdict, share, excess, evidence, steps=len(places), advice=fitting(verdict, rank, is_slow))
    return with_lines(rank, finding, is_slow)


def pauses(rank: Rank) -> list[Finding]:
    """Findings on checkpoints and evaluations between steps, by their share of the time."""
    places = np.flatnonzero(trained(rank))
    if len(places) < RULES.fewest_steps:
        return []
    first = int(rank.start[places[0]])
    median, total = float(np.median(rank.seconds[places])), float(rank.seconds[places].sum())
    inside = [pause for pause in rank.pauses if pause.start >= first]
    total += sum(pause.duration for pause in inside) / 1e9
    findings = []
    for kind in dict.fromkeys(pause.kind for pause in inside):
        mine = np.array([pause.duration for pause in inside if pause.kind == kind]) / 1e9
        after = np.searchsorted(rank.start, [pause.start for pause in inside if pause.kind == kind]) - 1
        share = float(mine.sum()) / total
        if share < RULES.note_share:
            continue
        is_note = share < RULES.bound_share or len(mine) < RULES.fewest_spikes
        evidence = (
            f"{len(mine)} {kind}{'s' * (len(mine) > 1)} between {len(places)} steps",
            f"each takes {time(float(np.median(mine)))} as a median, a step {time(median)}",
            f"after steps {_listed(rank.number[after])}",
        )
        advice = fitting(f"{kind}-bound", rank, trained(rank))
        seconds = float(mine.sum())
        finding = finding_for(
            f"{kind}-bound", share, seconds, evidence, steps=len(places), advice=advice, is_note=is_note
        )
        findings.append(with_lines(rank, finding, steady(rank)))
    return findings


def _listed(numbers: Integers) -> str:
    """The first numbers of steps, and their distance if that is constant."""
    text = ", ".join(map(str, numbers[:_MOST_LISTED].tolist())) + (" ..." if len(numbers) > _MOST_LISTED else "")
    distances = set(np.diff(numbers).tolist())
    return text + (f" (every {distances.pop()})" if len(distances) == 1 and len(numbers) > 2 else "")  # noqa: PLR2004 - two make no rhythm
