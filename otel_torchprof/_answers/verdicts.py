"""Why training is slow: what steady steps are bound by, and which rank the others wait for. Reads trace files, returns findings."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof._files.alignment import fit
from otel_torchprof.errors import TorchProfError

from .explanation import Explanation, PhaseRow, slowest
from .findings import (
    BY_PHASE,
    COMPUTING,
    RULES,
    STRAGGLERS,
    WAITING,
    Abstention,
    Leaves,
    abstentions,
    busy_share,
    finding,
    median_share,
    steady,
    time,
    trained,
    whole_time,
    with_runnable,
)
from .rank_reading import read_ranks
from .spikes import pauses, spikes
from .steps import COUNTERS, DERIVED, LOADERS, PLACE_OF, is_operator, is_what_models_do

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from otel_torchprof._columns.arrays import Flags, Floats
    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._files.collectives import Collectives

    from .findings import Finding
    from .steps import Rank

# ---- what steady steps are bound by ----


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
        found = [_finding(rank, each, ordinary & known) for each in _waits_of_busy(rank, chosen)]
    else:
        found = [
            _finding(rank, each, ordinary if each.comes_in_bursts else chosen) for each in _candidates(rank, chosen)
        ]
    if int(known.sum()) >= RULES.fewest_steps:
        evidence = _blocked(rank, known)
        found.append(_finding(rank, _Candidate("machine-busy", rank.runnable, evidence, comes_in_bursts=True), known))
    kept = [each for each in found if each is not None]
    if any(each.verdict == "gil" and not each.is_note for each in kept):
        kept = [each for each in kept if each.verdict not in _WITH_LOCK]
    return kept


def _finding(rank: Rank, candidate: _Candidate, chosen: Flags) -> Finding | None:
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


# ---- which rank the others wait for ----


def straggler(ranks: list[Rank]) -> tuple[list[Finding], list[Abstention]]:
    """The late rank, if there is one; or why that cannot be told."""
    if not ranks[1:]:
        return [], []
    common = _common(ranks)
    count = len(common[0].key)
    if count < RULES.fewest_collectives:
        reason = f"{count} collectives with the same number on all ranks, and {RULES.fewest_collectives} are needed"
        way_out = "record all ranks with this package, detail ops; Kineto's traces do not number collectives"
        return [], [Abstention(STRAGGLERS, reason, way_out, Leaves.SINGLE_STEPS)]
    starts, error = _aligned(common)
    waited = _waits(starts) > RULES.alignment_errors * error
    if int(waited.sum()) < RULES.fewest_collectives:
        return [], []
    common, starts = [each.chosen(waited) for each in common], starts[waited]
    last = starts.argmax(axis=1)
    late = int(np.bincount(last, minlength=len(ranks)).argmax())
    others = np.delete(starts, late, axis=1)
    lateness = starts[:, late] - np.median(others, axis=1)
    share_last, median = float(np.mean(last == late)), float(np.median(lateness[last == late]))
    step_time = float(np.sum(ranks[late].seconds[trained(ranks[late])]))
    cost = _cost(ranks[late], common[late].chosen(last == late), lateness[last == late])
    share = cost / step_time if step_time else 0.0
    if share_last < RULES.last_share or share < RULES.lateness_share:
        return [], []
    evidence = (
        f"{ranks[late].name} comes last to {share_last:.0%} of those {len(last)} of {count} collectives that others wait in",
        f"it comes {time(median)} later than the others, as a median",
        f"the clocks are aligned to {time(error)}",
        *_phase_before(ranks, late),
    )
    found = finding(
        "straggler", share, cost, evidence, steps=min(int(steady(rank).sum()) for rank in ranks), is_note=False
    )
    return [found._replace(ranks=(ranks[late].name,))], []


def _waits(starts: Floats) -> Floats:
    """How much later than most the last rank came to each collective: none waits long in those that follow at once on another."""
    found: Floats = starts.max(axis=1) - np.median(np.sort(starts, axis=1)[:, :-1], axis=1)
    return found


def _cost(rank: Rank, late: Collectives, lateness: Floats) -> float:
    """Seconds that the others wait: of each step the longest wait, since collectives of a step overlap."""
    steps = np.searchsorted(rank.start, late.start, side="right")
    longest = np.zeros(len(rank.start) + 1)
    np.maximum.at(longest, steps, lateness)
    return float(longest.sum())


def _common(ranks: list[Rank]) -> list[Collectives]:
    """By rank, the collectives that all have after the warm-up; the same ones in the same order."""
    found = [_after_warm_up(rank) for rank in ranks]
    keys = reduce(np.intersect1d, (each.key for each in found))
    return [each.chosen(np.isin(each.key, keys)) for each in found]


def _after_warm_up(rank: Rank) -> Collectives:
    chosen = np.flatnonzero(trained(rank))
    begin = int(rank.start[chosen[0]]) if len(chosen) else 1 << 62
    return rank.collectives.chosen(rank.collectives.start >= begin)


def _aligned(common: list[Collectives]) -> tuple[Floats, float]:
    """When each rank came to each collective, in seconds on the first one's clock, and the largest error of the others' clocks."""
    first, *others = common
    begin = int(first.start.min())
    starts, errors = [(first.start - begin) / 1e9], []
    for each in others:
        _, found = fit(each, first)
        if found is not None:  # as it is: explain wants more collectives than a clock does
            starts.append(found.line.seconds(each.start, begin))
            errors.append(found.error / 1e9)
    return np.stack(starts, axis=1), max(errors)


def _phase_before(ranks: list[Rank], late: int) -> tuple[str, ...]:
    """The phase that takes longer on the late rank than on the others."""
    medians = np.array([_medians(rank) for rank in ranks if steady(rank).any()])
    if len(medians) < len(ranks):
        return ()
    excess = medians[late] - np.median(np.delete(medians, late, axis=0), axis=0)
    excess[PLACE_OF["collective"]] = 0
    longest = int(excess.argmax())
    if excess[longest] <= 0:
        return ()
    return (
        f"before that it spends {time(float(excess[longest]))} a step more than the others in {(*PHASES, 'no phase')[longest]}",
    )


def _medians(rank: Rank) -> Floats:
    """Seconds of each phase in a step, and last of what is in none."""
    found: Floats = np.median(np.column_stack((rank.phases, rank.unattributed))[steady(rank)], axis=0)
    return found


# ---- all ranks together ----


_OF_THE_REST = frozenset(("gil", "machine-busy", "operator-bound", "python-gap"))
"""Verdicts that do not depend on the unattributed time, and may be about it."""
NOT_KNOWN = "not known"
"""Name of the time outside of all phases if phases come from names of operators."""


def explain(
    *paths: str | os.PathLike[str], watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None
) -> Explanation:
    """Explains why training is slow, with the evidence for each verdict.

    Needs at least 25 steps for a verdict. Reads each file twice, as a stream. Thread-safe. ``docs/verdicts.md``
    describes the verdicts.

    Args:
        paths: paths of trace files, one or more per rank: Chrome JSON, of this package or of torch.profiler, or OTLP.
        watch: called with the path and the byte stream of each file when it is opened, twice per file, for a progress
            display. Default: none.

    Returns:
        The verdicts, or the reasons why there are none.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.

    Examples:
        >>> with otp.profile() as prof:
        ...     for _ in range(40):
        ...         y = torch.ones(3) + 1
        ...         prof.step()
        >>> prof.export_chrome_trace("trace.json")
        >>> found = otp.explain("trace.json")
        >>> isinstance(found.headline, str), found.problems
        (True, ())
    """
    if not paths:
        raise TorchProfError("there is no file to explain: name one, or one for each rank")
    return explained(*read_ranks([os.fspath(path) for path in paths], watch))


def explained(ranks: list[Rank], problems: Sequence[str] = ()) -> Explanation:
    """Judges the steps of some ranks; ``problems`` are the parts of files that could not be read."""
    reasons = [reason for rank in ranks for reason in abstentions(rank)]
    is_doubtful = any(reason.leaves is not Leaves.SINGLE_STEPS for reason in reasons)
    late, cannot_tell = ([], []) if is_doubtful else straggler(ranks)
    found = [*late, *_of_ranks(ranks)]
    of_waits = max((each.recoverable_seconds for each in found if each.verdict == "communication-bound"), default=0.0)
    # A rank that comes late is the cause of waits, and stands before them.
    found.sort(key=lambda each: -max(each.recoverable_seconds, of_waits if each.verdict == "straggler" else 0.0))
    chosen = [steady(rank) for rank in ranks]
    steps = np.concatenate([rank.seconds[each] for rank, each in zip(ranks, chosen, strict=True)])
    return Explanation(
        ranks=tuple(rank.name for rank in ranks),
        steps=sum(len(rank.number) for rank in ranks),
        steady_steps=len(steps),
        findings=tuple(each for each in found if not each.is_note),
        notes=tuple(each for each in found if each.is_note and each.severity != "none"),
        abstentions=(*reasons, *cannot_tell),
        phases=_phases(ranks),
        step_median=float(np.median(steps)) if len(steps) else 0.0,
        slow_steps=slowest(ranks),
        problems=tuple(problems),
        knows_runnable=all(with_runnable(rank, each).any() for rank, each in zip(ranks, chosen, strict=True)),
    )


def _of_ranks(ranks: list[Rank]) -> list[Finding]:
    """Returns the findings of all ranks.

    A verdict of several ranks is reported once, from the rank with the largest share.
    """
    by_verdict: dict[tuple[str, bool], list[tuple[str, Finding]]] = defaultdict(list)
    for rank in ranks:
        for each in _judged(rank):
            key = each.evidence[-1] if each.verdict == "operator-bound" else ""
            by_verdict[each.verdict + key, each.is_note].append((rank.name, each))
    found = []
    for same in by_verdict.values():
        largest = max((each for _, each in same), key=lambda each: each.share)
        names = tuple(dict.fromkeys(name for name, _ in same)) if len(ranks) > 1 else ()
        evidence = largest.evidence
        if len(names) > 1:
            where = next(name for name, each in same if each is largest)
            evidence = (
                *evidence,
                f"these are the figures of {where}, which has the largest share of {len(names)} ranks",
            )
        found.append(largest._replace(ranks=names, evidence=evidence))
    return found


def _judged(rank: Rank) -> list[Finding]:
    """Returns the findings of a rank that its abstentions allow."""
    reasons = abstentions(rank)
    if not reasons:
        return [*levels(rank), *spikes(rank), *pauses(rank)]
    found = [each for each in levels(rank) if not each.is_note]
    left = {each.leaves for each in reasons}
    if left == {Leaves.SINGLE_STEPS}:
        return [*(each for each in found if each.verdict in _OF_THE_REST), *spikes(rank), *pauses(rank)]
    if left == {Leaves.WAITS}:  # and there are no other levels where a machine is busy
        return [*found, *spikes(rank, only_waits=True)]
    return [each for each in found if each.verdict == "machine-busy"]


def _phases(ranks: list[Rank]) -> tuple[PhaseRow, ...]:
    chosen = [steady(rank) for rank in ranks]
    if not any(each.any() for each in chosen):
        chosen = [trained(rank) for rank in ranks]
    if not any(each.any() for each in chosen):
        return ()
    columns = {
        phase: ([rank.phases[each, place] for rank, each in zip(ranks, chosen, strict=True)])
        for phase, place in PLACE_OF.items()
    }
    rest = NOT_KNOWN if any(rank.is_derived for rank in ranks) else UNATTRIBUTED
    columns[rest] = [rank.unattributed[each] for rank, each in zip(ranks, chosen, strict=True)]
    steps = np.concatenate([rank.seconds[each] for rank, each in zip(ranks, chosen, strict=True)])
    rows = []
    for phase in (*PHASES, rest):
        seconds = np.concatenate(columns[phase])
        if seconds.any():
            median, high = np.median(seconds), np.percentile(seconds, 95)
            rows.append(PhaseRow(phase, float(median), float(high), float(seconds.sum() / steps.sum())))
    return tuple(rows)
