"""What steady steps are bound by."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .advice import BY_PHASE, COMPUTING, WAITING
from .findings import busy_share, finding, median_share, steady, time, whole_time, with_runnable
from .known_names import DERIVED, LOADERS, is_operator, is_what_models_do
from .rules import RULES
from .steps import COUNTERS, PLACE_OF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrays import Flags, Floats
    from .findings import Finding
    from .steps import Rank

_SHOWN = 3
"""Operators that are named as evidence,"""
_WITH_LOCK = frozenset(("python-gap", "optimizer-bound"))
"""Made of Python's code between operators: what takes the time there is the lock, where that is known."""
_SMALL = 0.01
"""with more than this share."""
_FAULTS = COUNTERS.index("minor page faults")
_LOOKED_AT = 10
"""Operators that may bind a step: those with a share of 10 % are no more."""


class _Candidate(NamedTuple):
    """What may bind steps: seconds of each of them."""

    verdict: str
    seconds: Floats
    evidence: tuple[str, ...] = ()
    comes_in_bursts: bool = False
    """Some steps have much of it and others none: four workers of a loader have their batches at one time, and every fourth step waits."""


def levels(rank: Rank) -> list[Finding]:
    """All that hold, and notes."""
    chosen = steady(rank)
    if int(chosen.sum()) < RULES.fewest_steps:
        return []
    known = with_runnable(rank, chosen)
    ordinary = chosen & (rank.seconds <= RULES.spike_ratio * np.median(rank.seconds[chosen]))  # spikes are told apart
    if busy_share(rank, chosen) > RULES.most_runnable:
        found = [_judged(rank, each, ordinary & known) for each in _waits_of_busy(rank, chosen)]
    else:
        found = [
            _judged(rank, each, ordinary if each.comes_in_bursts else chosen) for each in _candidates(rank, chosen)
        ]
    if int(known.sum()) >= RULES.fewest_steps:
        evidence = _blocked(rank, known)
        found.append(_judged(rank, _Candidate("machine-busy", rank.runnable, evidence, comes_in_bursts=True), known))
    kept = [each for each in found if each is not None]
    if any(each.verdict == "gil" and not each.is_note for each in kept):
        kept = [each for each in kept if each.verdict not in _WITH_LOCK]
    return kept


def _judged(rank: Rank, candidate: _Candidate, chosen: Flags) -> Finding | None:
    chosen = chosen & ~np.isnan(candidate.seconds)
    if not chosen.any():
        return None
    seconds, of_steps = candidate.seconds[chosen], rank.seconds[chosen]
    interval, typical = (whole_time, np.mean) if candidate.comes_in_bursts else (median_share, np.median)
    share, low, high = interval(seconds, of_steps)
    if not share >= RULES.note_share:
        return None
    is_bound = share >= RULES.bound_share and low >= RULES.bound_lower
    count = int(chosen.sum())
    evidence = (
        f"{share:.0%} of {count} steady steps, 95 % interval {low:.0%} to {high:.0%}",
        f"{time(float(typical(seconds)))} of {time(float(typical(of_steps)))} a step",
        *candidate.evidence,
    )
    result = finding(candidate.verdict, share, float(seconds.sum()), evidence, steps=count, is_note=not is_bound)
    return result._replace(recoverable_seconds=0.0) if result.severity == "none" else result


def _waits_of_busy(rank: Rank, chosen: Flags) -> Iterator[_Candidate]:
    """Where the thread was often ready to run and did not, phases that wait count as far as it was blocked: that is no lack of processors."""
    for phase in WAITING:
        found = _of_phase(rank, chosen, phase)
        how = "only time in which the loop's thread was blocked, not ready to run"
        yield found._replace(seconds=np.minimum(found.seconds, rank.blocked), evidence=(how, *found.evidence))


def _blocked(rank: Rank, known: Flags) -> tuple[str, ...]:
    """How long the thread neither ran nor was ready to, and how much of that is in no phase that waits."""
    total, blocked = (float(each[known].sum()) for each in (rank.seconds, rank.blocked))
    if not (total and blocked >= RULES.note_share * total):
        return ()
    waits = np.minimum(rank.phases[:, [PLACE_OF[phase] for phase in WAITING]].sum(axis=1), rank.blocked)
    elsewhere = blocked - float(waits[known].sum())
    return (
        f"the loop's thread was blocked for {blocked / total:.0%} of the time, {elsewhere / total:.0%} in no phase that waits",
    )


def _candidates(rank: Rank, chosen: Flags) -> Iterator[_Candidate]:
    for phase in BY_PHASE:
        if phase != "compile":  # steps that compile are not steady
            yield _of_phase(rank, chosen, phase)
    if int((chosen & ~np.isnan(rank.device)).sum()) >= RULES.fewest_steps:
        yield _Candidate("device-bound", rank.device)
        if not np.isnan(rank.drained).all():
            yield _host_bound(rank, chosen)
    elif not rank.lacks_device_times:
        yield _computing(rank, chosen)
        if pages := _pages(rank, chosen):
            yield _Candidate("allocation-churn", rank.counters[:, _FAULTS] * RULES.page_seconds, pages)
        yield from _operators(rank, chosen)
        if not rank.communicates and not np.isnan(rank.gap).all():
            yield _Candidate("python-gap", rank.gap)
            yield _gil(rank, chosen)


def _host_bound(rank: Rank, chosen: Flags) -> _Candidate:
    """Seconds in which a device waits while the loop is in no phase that waits itself."""
    waits = rank.phases[:, [PLACE_OF[phase] for phase in WAITING]].sum(axis=1)
    evidence = _longest(rank, chosen, in_data=False)
    return _Candidate("host-bound", np.maximum(rank.drained - waits, 0), evidence)


def _computing(rank: Rank, chosen: Flags) -> _Candidate:
    known = [phase for phase in COMPUTING if not rank.is_derived or phase in DERIVED]
    shares = {phase: float(np.median(rank.share(rank.phases[:, PLACE_OF[phase]])[chosen])) for phase in known}
    parts = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share)
    unknown = [
        *(["what the forward pass takes is not known"] if rank.is_derived else []),
        *(["waits for other ranks in the backward pass are part of it"] if rank.communicates else []),
    ]
    seconds = rank.phases[:, [PLACE_OF[phase] for phase in known]].sum(axis=1)
    blocked = _blocked(rank, chosen & ~np.isnan(rank.blocked))
    evidence = parts, *unknown, *blocked, *_longest(rank, chosen, in_data=False), *_pages(rank, chosen)
    return _Candidate("compute-bound", seconds, evidence)


def _gil(rank: Rank, chosen: Flags) -> _Candidate:
    """Seconds in which the loop's thread was blocked outside of operators and of phases that wait, while other threads ran.

    Whoever holds Python's lock gives it up after 5 ms when another thread asks, so that waits for it are many and of about that length.
    A wait for a native thread that works is one long one.
    """
    waits = rank.counters[:, COUNTERS.index("voluntary context switches")]
    elsewhere = rank.phases[:, [PLACE_OF[phase] for phase in WAITING]].sum(axis=1)
    blocked = np.minimum(rank.blocked - elsewhere, rank.seconds - rank.operating - elsewhere)
    seconds = np.maximum(np.minimum(blocked, rank.other_threads), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        length = rank.blocked / waits
        is_lock = (waits >= RULES.fewest_waits) & (length >= RULES.shortest_wait) & (length <= RULES.longest_wait)
    median = [float(np.median(column[chosen])) for column in (waits, length)]
    evidence = f"the loop's thread waits {median[0]:.0f} times a step, {time(median[1])} each, while other threads run"
    return _Candidate("gil", np.where(is_lock, seconds, 0.0), (evidence,))


def _pages(rank: Rank, chosen: Flags) -> tuple[str, ...]:
    """How much memory a step takes anew, where that is known and worth a word."""
    pages = float(np.median(rank.counters[chosen, _FAULTS]))
    if not pages >= RULES.fewest_pages:
        return ()
    return (f"{pages:,.0f} pages of memory a step are taken anew; each costs {RULES.page_seconds * 1e6:g} us at least",)


def _totals(rank: Rank, chosen: Flags, *, in_data: bool) -> list[tuple[str, float]]:
    """The operators with the most self time, the longest first: seconds in all steady steps."""
    found: dict[str, float] = defaultdict(float)
    for step in np.flatnonzero(chosen).tolist():
        for each in rank.operators[step]:
            if each.in_data is in_data and (in_data or is_operator(each.name)):
                found[each.name] += each.seconds
    return sorted(found.items(), key=lambda each: -each[1])[:_LOOKED_AT]


def _operators(rank: Rank, chosen: Flags) -> Iterator[_Candidate]:
    for name, _ in _totals(rank, chosen, in_data=False):
        if not is_what_models_do(name):
            of_steps = (
                sum(each.seconds for each in operators if each.name == name and not each.in_data)
                for operators in rank.operators
            )
            yield _Candidate("operator-bound", np.array([*of_steps], np.float64), (f"operator {name}",))


def _of_phase(rank: Rank, chosen: Flags, phase: str) -> _Candidate:
    evidence: tuple[str, ...] = ()
    if phase == "data":
        names = {name for name, _ in _totals(rank, chosen, in_data=True)}
        evidence = (
            *(text for name, text in LOADERS.items() if name in names),
            *_longest(rank, chosen, in_data=True),
        )
    return _Candidate(BY_PHASE[phase], rank.phases[:, PLACE_OF[phase]], evidence, comes_in_bursts=True)


def _longest(rank: Rank, chosen: Flags, *, in_data: bool) -> tuple[str, ...]:
    total = float(rank.seconds[chosen].sum())
    longest = _totals(rank, chosen, in_data=in_data)[:_SHOWN]
    text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest if seconds > _SMALL * total)
    return (f"longest by self time: {text}",) if text else ()
