"""Why training is slow: findings on what binds steady steps, and on the rank for which others wait."""

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
    finding_for,
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

# ---- findings on steady steps ----


_MOST_LISTED = 3
"""Most operators that are named as evidence."""
_WITH_LOCK = frozenset(("python-gap", "optimizer-bound"))
"""Verdicts on Python code between operators; a verdict on the GIL replaces them."""
_SMALL = 0.01
"""Least share of an operator that is named."""
_FAULTS = COUNTERS.index("minor page faults")
_LOOKED_AT = 10
"""Most operators that are examined: no more can have a share of 10 %."""


class _Candidate(NamedTuple):
    """A possible verdict, and its seconds in each step."""

    verdict: str
    seconds: Floats
    evidence: tuple[str, ...] = ()
    comes_in_bursts: bool = False
    """Whether some steps have much of it and others none: with four workers of a loader, every fourth step waits for data."""


def levels(rank: Rank) -> list[Finding]:
    """All verdicts that apply to steady steps, and notes."""
    chosen = steady(rank)
    if int(chosen.sum()) < RULES.fewest_steps:
        return []
    known = with_runnable(rank, chosen)
    ordinary = chosen & (rank.seconds <= RULES.spike_ratio * np.median(rank.seconds[chosen]))  # spikes are separate
    if busy_share(rank, chosen) > RULES.most_runnable:
        findings = [_finding(rank, candidate, ordinary & known) for candidate in _waits_of_busy(rank, chosen)]
    else:
        findings = [
            _finding(rank, candidate, ordinary if candidate.comes_in_bursts else chosen)
            for candidate in _candidates(rank, chosen)
        ]
    if int(known.sum()) >= RULES.fewest_steps:
        evidence = _blocked(rank, known)
        findings.append(
            _finding(rank, _Candidate("machine-busy", rank.runnable, evidence, comes_in_bursts=True), known)
        )
    applicable = [finding for finding in findings if finding is not None]
    if any(finding.verdict == "gil" and not finding.is_note for finding in applicable):
        applicable = [finding for finding in applicable if finding.verdict not in _WITH_LOCK]
    return applicable


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
    result = finding_for(candidate.verdict, share, float(seconds.sum()), evidence, steps=count, is_note=not is_bound)
    return result._replace(recoverable_seconds=0.0) if result.severity == "none" else result


def _waits_of_busy(rank: Rank, chosen: Flags) -> Iterator[_Candidate]:
    """Candidates on a busy machine: phases that wait, for the time in which the thread was blocked, not ready to run."""
    for phase in WAITING:
        candidate = _of_phase(rank, chosen, phase)
        how = "only time in which the loop's thread was blocked, not ready to run"
        yield candidate._replace(
            seconds=np.minimum(candidate.seconds, rank.blocked), evidence=(how, *candidate.evidence)
        )


def _blocked(rank: Rank, known: Flags) -> tuple[str, ...]:
    """Evidence on the time in which the thread was blocked, in total and outside of phases that wait."""
    total, blocked = (float(column[known].sum()) for column in (rank.seconds, rank.blocked))
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
    """Seconds in which a device has no work while the loop is in no phase that waits."""
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

    A thread that holds the GIL yields it after 5 ms on request, so waits for it are many and of about that length. A wait for the work
    of a native thread is a single long one.
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
    """Evidence on fresh pages of memory per step; empty if unknown or few."""
    pages = float(np.median(rank.counters[chosen, _FAULTS]))
    if not pages >= RULES.fewest_pages:
        return ()
    return (f"{pages:,.0f} pages of memory a step are taken anew; each costs {RULES.page_seconds * 1e6:g} us at least",)


def _totals(rank: Rank, chosen: Flags, *, in_data: bool) -> list[tuple[str, float]]:
    """Names and seconds of the operators with the most self time in the chosen steps, the longest first."""
    totals: dict[str, float] = defaultdict(float)
    for step in np.flatnonzero(chosen).tolist():
        for operator in rank.operators[step]:
            if operator.in_data is in_data and (in_data or is_operator(operator.name)):
                totals[operator.name] += operator.seconds
    return sorted(totals.items(), key=lambda item: -item[1])[:_LOOKED_AT]


def _operators(rank: Rank, chosen: Flags) -> Iterator[_Candidate]:
    for name, _ in _totals(rank, chosen, in_data=False):
        if not is_what_models_do(name):
            of_steps = (
                sum(operator.seconds for operator in operators if operator.name == name and not operator.in_data)
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
    longest = _totals(rank, chosen, in_data=in_data)[:_MOST_LISTED]
    text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest if seconds > _SMALL * total)
    return (f"longest by self time: {text}",) if text else ()


# ---- the rank for which others wait ----


_NUMBERED = (
    "record all ranks with this package, detail ops; or the same steps of all with torch.profiler, of gloo only jobs in which "
    "each group has all ranks"
)


def straggler(ranks: list[Rank]) -> tuple[list[Finding], list[Abstention]]:
    """The finding on a late rank, if there is one; or the reason why stragglers cannot be judged."""
    if not ranks[1:]:
        return [], []
    common = _common(ranks)
    count = len(common[0].key)
    if count < RULES.fewest_collectives:
        reason = f"{count} collectives with the same number on all ranks, and {RULES.fewest_collectives} are needed"
        return [], [Abstention(STRAGGLERS, reason, _NUMBERED, Leaves.SINGLE_STEPS)]
    starts, error, is_ambiguous = _aligned(common)
    if is_ambiguous:
        reason = "clocks differ by more than half a step, so that the order of collectives does not number them"
        return [], [Abstention(STRAGGLERS, reason, _NUMBERED, Leaves.SINGLE_STEPS)]
    waited = _waits(starts) > RULES.alignment_errors * error
    if int(waited.sum()) < RULES.fewest_collectives:
        return [], []
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
        return [], []
    evidence = (
        f"{ranks[late].name} comes last to {share_last:.0%} of those {len(last)} of {count} collectives that others wait in",
        f"it comes {time(median)} later than the others, as a median",
        f"the clocks are aligned to {time(error)}",
        *_phase_before(ranks, late),
    )
    late_rank = finding_for(
        "straggler", share, cost, evidence, steps=min(int(steady(rank).sum()) for rank in ranks), is_note=False
    )
    return [late_rank._replace(ranks=(ranks[late].name,))], []


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


def _phase_before(ranks: list[Rank], late: int) -> tuple[str, ...]:
    """Evidence on the phase that is longer on the late rank than on others."""
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
    """Median seconds per step of each phase, and last of the time outside of all phases."""
    medians: Floats = np.median(np.column_stack((rank.phases, rank.unattributed))[steady(rank)], axis=0)
    return medians


# ---- findings on all ranks ----


_OF_THE_REST = frozenset(("gil", "machine-busy", "operator-bound", "python-gap"))
"""Verdicts that do not depend on phases, and may explain unattributed time."""
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
        >>> explanation = otp.explain("trace.json")
        >>> isinstance(explanation.headline, str), explanation.problems
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
    findings = [*late, *_of_ranks(ranks)]
    of_waits = max(
        (finding.recoverable_seconds for finding in findings if finding.verdict == "communication-bound"), default=0.0
    )
    # A straggler causes waits, and comes before them.
    findings.sort(
        key=lambda finding: -max(finding.recoverable_seconds, of_waits if finding.verdict == "straggler" else 0.0)
    )
    chosen = [steady(rank) for rank in ranks]
    steps = np.concatenate([rank.seconds[is_chosen] for rank, is_chosen in zip(ranks, chosen, strict=True)])
    return Explanation(
        ranks=tuple(rank.name for rank in ranks),
        steps=sum(len(rank.number) for rank in ranks),
        steady_steps=len(steps),
        findings=tuple(finding for finding in findings if not finding.is_note),
        notes=tuple(finding for finding in findings if finding.is_note and finding.severity != "none"),
        abstentions=(*reasons, *cannot_tell),
        phases=_phases(ranks),
        step_median=float(np.median(steps)) if len(steps) else 0.0,
        slow_steps=slowest(ranks),
        problems=tuple(problems),
        knows_runnable=all(with_runnable(rank, is_chosen).any() for rank, is_chosen in zip(ranks, chosen, strict=True)),
        step_rule=next((rank.step_rule for rank in ranks if rank.step_rule), ""),
    )


def _of_ranks(ranks: list[Rank]) -> list[Finding]:
    """Returns the findings of all ranks.

    A verdict of several ranks is reported once, from the rank with the largest share.
    """
    by_verdict: dict[tuple[str, bool], list[tuple[str, Finding]]] = defaultdict(list)
    for rank in ranks:
        for finding in _judged(rank):
            key = finding.evidence[-1] if finding.verdict == "operator-bound" else ""
            by_verdict[finding.verdict + key, finding.is_note].append((rank.name, finding))
    merged = []
    for same in by_verdict.values():
        largest = max((finding for _, finding in same), key=lambda finding: finding.share)
        names = tuple(dict.fromkeys(name for name, _ in same)) if len(ranks) > 1 else ()
        evidence = largest.evidence
        if len(names) > 1:
            where = next(name for name, finding in same if finding is largest)
            evidence = (
                *evidence,
                f"these are the figures of {where}, which has the largest share of {len(names)} ranks",
            )
        merged.append(largest._replace(ranks=names, evidence=evidence))
    return merged


def _judged(rank: Rank) -> list[Finding]:
    """Returns the findings of a rank that its abstentions allow."""
    reasons = abstentions(rank)
    if not reasons:
        return [*levels(rank), *spikes(rank), *pauses(rank)]
    findings = [finding for finding in levels(rank) if not finding.is_note]
    left = {reason.leaves for reason in reasons}
    if left == {Leaves.SINGLE_STEPS}:
        independent = [finding for finding in findings if finding.verdict in _OF_THE_REST]
        return [*independent, *spikes(rank), *pauses(rank)]
    if left == {Leaves.WAITS}:  # on a busy machine, levels() only returns waits
        return [*findings, *spikes(rank, only_waits=True)]
    return [finding for finding in findings if finding.verdict == "machine-busy"]


def _phases(ranks: list[Rank]) -> tuple[PhaseRow, ...]:
    chosen = [steady(rank) for rank in ranks]
    if not any(is_chosen.any() for is_chosen in chosen):
        chosen = [trained(rank) for rank in ranks]
    if not any(is_chosen.any() for is_chosen in chosen):
        return ()
    columns = {
        phase: ([rank.phases[is_chosen, place] for rank, is_chosen in zip(ranks, chosen, strict=True)])
        for phase, place in PLACE_OF.items()
    }
    rest = NOT_KNOWN if any(rank.is_derived for rank in ranks) else UNATTRIBUTED
    columns[rest] = [rank.unattributed[is_chosen] for rank, is_chosen in zip(ranks, chosen, strict=True)]
    steps = np.concatenate([rank.seconds[is_chosen] for rank, is_chosen in zip(ranks, chosen, strict=True)])
    rows = []
    for phase in (*PHASES, rest):
        seconds = np.concatenate(columns[phase])
        if seconds.any():
            median, high = np.median(seconds), np.percentile(seconds, 95)
            rows.append(PhaseRow(phase, float(median), float(high), float(seconds.sum() / steps.sum())))
    return tuple(rows)
