"""The rank for which others wait, and what it does meanwhile."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASES
from otel_torchprof._files.alignment import fit

from .advice import ADVICE, fitting, loader_of
from .causes import with_late_line
from .findings import BY_PHASE, RULES, STRAGGLERS, Abstention, Leaves, finding_for, steady, time, trained, with_runnable
from .judging import blocked_elsewhere, busy_caveat
from .steps import LOADERS, PLACE_OF, is_operator

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Floats
    from otel_torchprof._files.collectives import Collectives

    from .findings import Finding
    from .steps import OperatorTime, Rank

_NUMBERED = (
    "record all ranks with this package, detail ops; or the same steps of all with torch.profiler, of gloo only jobs in which "
    "each group has all ranks"
)


class LateRank(NamedTuple):
    """The rank for which others wait."""

    finding: Finding
    cause: str
    """Its own verdict; empty if none covers what it does meanwhile."""
    share: float
    """Share of step time: the wait of the others, or the cause in its own steps, whichever is larger."""


def straggler(ranks: list[Rank]) -> tuple[LateRank | None, list[Abstention]]:
    """The rank for which others wait, if there is one; or the reason why stragglers cannot be judged."""
    if not ranks[1:]:
        return None, []
    common = _common(ranks)
    count = len(common[0].key)
    if count < RULES.fewest_collectives:
        reason = f"{count} collectives with the same number on all ranks, and {RULES.fewest_collectives} are needed"
        return None, [Abstention(STRAGGLERS, reason, _NUMBERED, Leaves.SINGLE_STEPS)]
    starts, error, is_ambiguous = _aligned(common)
    if is_ambiguous:
        reason = "clocks differ by more than half a step, so that the order of collectives does not number them"
        return None, [Abstention(STRAGGLERS, reason, _NUMBERED, Leaves.SINGLE_STEPS)]
    waited = _waits(starts) > RULES.alignment_errors * error
    if int(waited.sum()) < RULES.fewest_collectives:
        return None, []
    common, starts = [collectives.chosen(waited) for collectives in common], starts[waited]
    last = starts.argmax(axis=1)
    late = int(np.bincount(last, minlength=len(ranks)).argmax())
    others = np.delete(starts, late, axis=1)
    lateness = starts[:, late] - np.median(others, axis=1)
    share_last, median = float(np.mean(last == late)), float(np.median(lateness[last == late]))
    step_time = float(np.sum(ranks[late].seconds[trained(ranks[late])]))
    cost = _cost(ranks[late], common[late].chosen(last == late), lateness[last == late])
    share = cost / step_time if step_time else 0.0
    if share_last < RULES.last_share or share < RULES.lateness_share:
        return None, []
    evidence = (
        f"{share:.0%} of the others' step time waits for it",
        f"it comes last to {share_last:.0%} of those {len(last)} of {count} collectives that others wait in",
        f"it comes {time(median)} later than the others, as a median",
        f"the clocks are aligned to {time(error)}",
    )
    return _explained(ranks, late, share, cost, evidence), []


def _explained(ranks: list[Rank], late: int, share: float, cost: float, evidence: tuple[str, ...]) -> LateRank:
    """The finding on a late rank, with what it does while others wait as its cause."""
    rank, cause = ranks[late], _cause(ranks, late)
    count = min(int(steady(each).sum()) for each in ranks)
    finding = finding_for("straggler", share, cost, evidence, steps=count, advice=ADVICE["straggler"])
    finding = finding._replace(ranks=(rank.name,), statement=f"{rank.name} is late: {finding.statement}")
    chosen = [steady(each) for each in ranks]
    if cause is None:
        return LateRank(with_late_line(finding, ranks, late, chosen), "", share)
    caveat = busy_caveat(cause.busy_share) if cause.busy_share >= RULES.lateness_share else ""
    finding = finding._replace(
        statement=f"{rank.name} is late: {cause.share:.0%} of its step {cause.what}{caveat}",
        busy_share=cause.busy_share,
        evidence=(
            *evidence,
            f"before that it spends {time(cause.excess)} a step more than the others in {cause.where}",
        ),
    )
    if cause.verdict:
        finding = finding._replace(next_action=fitting(cause.verdict, rank, steady(rank)).next_action)
    return LateRank(with_late_line(finding, ranks, late, chosen), cause.verdict, max(share, cause.share))


def arrivals(ranks: list[Rank]) -> list[tuple[Floats, Floats]]:
    """For each rank, the most seconds in each step by which it comes to a collective after the median of the others, and before the last one.

    NaN in steps without a collective of all. Empty if the ranks have too few in common, or their clocks cannot be aligned.
    """
    common = _common(ranks) if ranks[1:] else []
    if not common or len(common[0].key) < RULES.fewest_collectives:
        return []
    starts, _, is_ambiguous = _aligned(common)
    if is_ambiguous:
        return []
    found = []
    for place, (rank, collectives) in enumerate(zip(ranks, common, strict=True)):
        late = starts[:, place] - np.median(np.delete(starts, place, axis=1), axis=1)
        step = np.searchsorted(rank.start, collectives.start, side="right") - 1
        longest = np.full((2, len(rank.start) + 1), -np.inf)  # the last is of what comes before the first step
        for column, seconds in zip(longest, (late, starts.max(axis=1) - starts[:, place]), strict=True):
            np.maximum.at(column, step, seconds)
        longest[np.isinf(longest)] = np.nan
        found.append((longest[0, :-1], longest[1, :-1]))
    return found


def _waits(starts: Floats) -> Floats:
    """For each collective, seconds from the median start of the other ranks to that of the last rank."""
    waits: Floats = starts.max(axis=1) - np.median(np.sort(starts, axis=1)[:, :-1], axis=1)
    return waits


def _cost(rank: Rank, late: Collectives, lateness: Floats) -> float:
    """Total seconds that others wait: the longest wait of each step, since collectives of a step may overlap."""
    steps = np.searchsorted(rank.start, late.start, side="right")
    longest = np.zeros(len(rank.start) + 1)
    np.maximum.at(longest, steps, lateness)
    return float(longest.sum())


def _common(ranks: list[Rank]) -> list[Collectives]:
    """For each rank, the collectives after the warm-up that all ranks have, in the same order."""
    by_rank = [_after_warm_up(rank) for rank in ranks]
    keys = reduce(np.intersect1d, (collectives.key for collectives in by_rank))
    return [collectives.chosen(np.isin(collectives.key, keys)) for collectives in by_rank]


def _after_warm_up(rank: Rank) -> Collectives:
    chosen = np.flatnonzero(trained(rank))
    begin = int(rank.start[chosen[0]]) if len(chosen) else 1 << 62
    return rank.collectives.chosen(rank.collectives.start >= begin)


def _aligned(common: list[Collectives]) -> tuple[Floats, float, bool]:
    """Starts of each collective on each rank, in seconds on the first rank's clock; the largest error, and if one is ambiguous."""
    first, *others = common
    begin = int(first.start.min())
    starts, errors, is_ambiguous = [(first.start - begin) / 1e9], [], False
    for collectives in others:
        _, clock_fit = fit(collectives, first)
        if clock_fit is not None:  # always: explain needs more collectives than a fit does
            starts.append(clock_fit.line.seconds(collectives.start, begin))
            errors.append(clock_fit.error / 1e9)
            is_ambiguous |= clock_fit.is_ambiguous
    return np.stack(starts, axis=1), max(errors), is_ambiguous


class _Cause(NamedTuple):
    """What a late rank does while others wait."""

    verdict: str
    share: float
    """Median share of its steps."""
    what: str
    where: str
    excess: float
    """Seconds a step more than on other ranks."""
    busy_share: float
    """Share of its step in which it had no processor, beyond that of other ranks."""


_MOSTLY = 0.5
"""Least part of the excess of a phase that is explained by one operator, or by time without a processor."""


def _cause(ranks: list[Rank], late: int) -> _Cause | None:
    """What takes longer on the late rank than on others, as medians of steady steps; None if nothing does."""
    if not all(steady(rank).any() for rank in ranks):
        return None
    excess = _excess(np.array([_medians(rank) for rank in ranks]), late)
    excess[PLACE_OF["collective"]] = 0
    place = int(excess.argmax())
    most, rank, phase = float(excess[place]), ranks[late], (*PHASES, "")[place]
    if most <= 0:
        return None
    columns = np.column_stack((rank.phases, rank.unattributed))[:, place]
    runnable = max(float(_excess(np.array([_median(each, each.runnable) for each in ranks]), late)), 0.0)
    busy = min(runnable, most) / _median(rank, rank.seconds)
    if runnable >= _MOSTLY * most and most - runnable < RULES.lateness_share * _median(rank, rank.seconds):
        what, share = "has no processor: others on its machine have them", _median(rank, rank.share(rank.runnable))
        return _Cause("machine-busy", share, what, "time ready to run", runnable, 0.0)
    share, where = _median(rank, rank.share(columns)), phase or "no phase"
    if phase in BY_PHASE:
        what = ADVICE[BY_PHASE[phase]].meaning.replace("of step time ", "").replace("of the time ", "")
        label = loader_of(rank, steady(rank)) if phase == "data" else ""
        what += f" ({LOADERS[label].partition(':')[0]})" if label else ""
        return _Cause(BY_PHASE[phase], share, what, where, most, busy)
    name, seconds = _longer_operator(ranks, late)
    if seconds >= _MOSTLY * most:
        of_steps = np.array([_in(operators, name) for operators in rank.operators])
        return _Cause(
            "operator-bound", _median(rank, rank.share(of_steps)), f"is the operator {name}", name, seconds, busy
        )
    is_blocked = not phase and _median(rank, blocked_elsewhere(rank)) >= _MOSTLY * _median(rank, columns)
    what = f"is {phase}" if phase else "is in no phase" + (", where its thread is blocked" if is_blocked else "")
    return _Cause("", share, what, where, most, busy)


def _excess(medians: Floats, late: int) -> Floats:
    """Medians of the late rank, less the median of those of the others."""
    excess: Floats = medians[late] - np.median(np.delete(medians, late, axis=0), axis=0)
    return excess


def _medians(rank: Rank) -> Floats:
    """Median seconds per step of each phase, and last of the time outside of all phases."""
    medians: Floats = np.median(np.column_stack((rank.phases, rank.unattributed))[steady(rank)], axis=0)
    return medians


def _median(rank: Rank, column: Floats) -> float:
    """The median of steady steps, of those in which the time without a processor is known if there are such."""
    chosen = steady(rank)
    known = with_runnable(rank, chosen)
    return float(np.median(np.nan_to_num(column[known if known.any() else chosen])))


def _in(operators: list[OperatorTime], name: str) -> float:
    return sum(operator.seconds for operator in operators if operator.name == name)


def _longer_operator(ranks: list[Rank], late: int) -> tuple[str, float]:
    """The operator that takes longest beyond what it takes on other ranks, and these seconds per step."""
    chosen = [np.flatnonzero(steady(rank)).tolist() for rank in ranks]
    names = {operator.name for step in chosen[late] for operator in ranks[late].operators[step]}
    times = {
        name: np.array(
            [
                sum(_in(rank.operators[step], name) for step in steps) / len(steps)
                for rank, steps in zip(ranks, chosen, strict=True)
            ]
        )
        for name in names
        if is_operator(name)
    }
    excess = {name: float(_excess(means, late)) for name, means in times.items()}
    name = max(excess, key=lambda each: excess[each], default="")
    return name, excess.get(name, 0.0)
