"""Why training is slow: findings on what binds the steady steps of each rank, and the answer on all ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof.errors import TorchProfError

from .causes import with_lines
from .explanation import Explanation, PhaseRow, slowest
from .findings import (
    BY_PHASE,
    COMPUTING,
    RULES,
    WAITING,
    Abstention,
    Finding,
    Leaves,
    abstentions,
    steady,
    time,
    trained,
    with_runnable,
)
from .judging import Candidate, blocked_elsewhere, judged
from .memory_growth import MEMORY_GROWTH, memory_growth
from .rank_reading import read_ranks
from .spikes import pauses, spikes
from .steps import COUNTERS, DERIVED, LOADERS, PLACE_OF, is_operator, is_what_models_do
from .story import merged, one_story, with_late_rank
from .stragglers import straggler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from otel_torchprof._columns.arrays import Flags, Floats
    from otel_torchprof._export.byte_stream import ByteStream

    from .steps import Rank

# ---- findings on steady steps ----


_MOST_LISTED = 3
"""Most operators that are named as evidence."""
_SMALL = 0.01
"""Least share of an operator that is named."""
_FAULTS = COUNTERS.index("minor page faults")
_LOOKED_AT = 10
"""Most operators that are examined: no more can have a share of 10 %."""


def levels(rank: Rank, of_other_ranks: Floats | None = None) -> tuple[list[Finding], list[Abstention]]:
    """All verdicts that apply to steady steps, and notes; and verdicts that depend on a busy machine, with the reason.

    Args:
        rank: the rank.
        of_other_ranks: seconds of each step in which other ranks had no processor. Default: as this rank, if it communicates.
    """
    chosen = steady(rank)
    if int(chosen.sum()) < RULES.fewest_steps:
        return [], []
    known = with_runnable(rank, chosen)
    ordinary = chosen & (rank.seconds <= RULES.spike_ratio * np.median(rank.seconds[chosen]))  # spikes are separate
    answers = [
        judged(rank, candidate, ordinary if candidate.comes_in_bursts else chosen)
        for candidate in _candidates(rank, chosen, rank.runnable if of_other_ranks is None else of_other_ranks)
    ]
    if int(known.sum()) >= RULES.fewest_steps:
        evidence = _blocked(rank, known)
        answers.append(judged(rank, Candidate("machine-busy", rank.runnable, evidence, comes_in_bursts=True), known))
    return (
        [with_lines(rank, answer, chosen) for answer in answers if isinstance(answer, Finding)],
        [answer for answer in answers if isinstance(answer, Abstention)],
    )


def _blocked(rank: Rank, known: Flags) -> tuple[str, ...]:
    """Evidence on the time in which the thread was blocked, in total and outside of phases that wait."""
    total, blocked = (float(column[known].sum()) for column in (rank.seconds, rank.blocked))
    if not (total and blocked >= RULES.note_share * total):
        return ()
    elsewhere = float(blocked_elsewhere(rank)[known].sum())
    return (
        f"the loop's thread was blocked for {blocked / total:.0%} of the time, {elsewhere / total:.0%} in no phase that waits",
    )


def _candidates(rank: Rank, chosen: Flags, of_other_ranks: Floats) -> Iterator[Candidate]:
    for phase in BY_PHASE:
        if phase != "compile":  # steps that compile are not steady
            candidate = _of_phase(rank, chosen, phase)
            if phase == "collective":
                waits = np.minimum(np.nan_to_num(of_other_ranks), candidate.seconds)
                candidate = candidate._replace(of_other_ranks=waits)
            yield candidate
    if int((chosen & ~np.isnan(rank.device)).sum()) >= RULES.fewest_steps:
        yield Candidate("device-bound", rank.device)
        if not np.isnan(rank.drained).all():
            yield _host_bound(rank, chosen)
    elif not rank.lacks_device_times:
        yield _computing(rank, chosen)
        if pages := _pages(rank, chosen):
            seconds = rank.counters[:, _FAULTS] * RULES.page_seconds
            yield Candidate(
                "allocation-churn", seconds, pages, blocked=seconds
            )  # a count has no time without a processor
        yield from _operators(rank, chosen)
        if (rank.gap_is_own or not rank.communicates) and not np.isnan(rank.gap).all():
            yield Candidate("python-gap", rank.gap, blocked=np.minimum(rank.gap, blocked_elsewhere(rank)))
            yield _gil(rank, chosen)


def _host_bound(rank: Rank, chosen: Flags) -> Candidate:
    """Seconds in which a device has no work while the loop waits for nothing else; it has work while the loop waits for it."""
    waits = rank.phases[:, [PLACE_OF[phase] for phase in WAITING if phase != "device_wait"]].sum(axis=1)
    evidence = _longest(rank, chosen, in_data=False)
    return Candidate("host-bound", np.maximum(rank.drained - waits, 0), evidence, is_busy_itself=True)


def _computing(rank: Rank, chosen: Flags) -> Candidate:
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
    return Candidate("compute-bound", seconds, evidence)


def _gil(rank: Rank, chosen: Flags) -> Candidate:
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
    seconds = np.where(is_lock, seconds, 0.0)
    return Candidate("gil", seconds, (evidence,), blocked=seconds)


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


def _operators(rank: Rank, chosen: Flags) -> Iterator[Candidate]:
    for name, _ in _totals(rank, chosen, in_data=False):
        if not is_what_models_do(name):
            of_steps = (
                sum(operator.seconds for operator in operators if operator.name == name and not operator.in_data)
                for operators in rank.operators
            )
            yield Candidate("operator-bound", np.array([*of_steps], np.float64), name=name)


def _of_phase(rank: Rank, chosen: Flags, phase: str) -> Candidate:
    evidence: tuple[str, ...] = ()
    if phase == "data":
        names = {name for name, _ in _totals(rank, chosen, in_data=True)}
        evidence = (
            *(text for name, text in LOADERS.items() if name in names),
            *_longest(rank, chosen, in_data=True),
            *_collected(rank, chosen),
        )
    seconds = rank.seconds_of(phase)
    if phase == "optimizer" and rank.needed:
        share = rank.needed * float(seconds[chosen].sum() / rank.seconds[chosen].sum())
        evidence = (f"besides, {share:.0%} is what an update needs at least: the longest of its operators",)
        seconds = seconds * (1 - rank.needed)
    blocked = np.minimum(seconds, np.nan_to_num(rank.blocked)) if phase in WAITING else None
    return Candidate(BY_PHASE[phase], seconds, evidence, comes_in_bursts=True, blocked=blocked)


def _collected(rank: Rank, chosen: Flags) -> tuple[str, ...]:
    """Evidence on collections of garbage that are a part of making batches."""
    seconds = rank.seconds_of("data") - rank.phases[:, PLACE_OF["data"]]
    share = float(seconds[chosen].sum() / rank.seconds[chosen].sum())
    return (f"{share:.0%} of step time are garbage collections that making batches sets off",) if share > _SMALL else ()


def _longest(rank: Rank, chosen: Flags, *, in_data: bool) -> tuple[str, ...]:
    total = float(rank.seconds[chosen].sum())
    longest = _totals(rank, chosen, in_data=in_data)[:_MOST_LISTED]
    text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest if seconds > _SMALL * total)
    return (f"longest by self time: {text}",) if text else ()


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
    late, cannot_tell = (None, []) if is_doubtful else straggler(ranks)
    by_rank, withheld = {}, []
    for rank, of_other_ranks in zip(ranks, _without_processor(ranks), strict=True):
        found, depending = _judged(rank, of_other_ranks)
        by_rank[rank.name] = [*one_story(found), *memory_growth(rank)]
        withheld += depending
    findings = with_late_rank(by_rank, late) if late else merged(by_rank)
    findings.sort(key=lambda finding: (-finding.recoverable_seconds, finding.severity == "none"))
    if late:
        withheld = [reason for reason in withheld if reason.verdict != "communication-bound"]
        findings.sort(
            key=lambda finding: finding.verdict != late.finding.verdict
        )  # it causes waits, and comes before them
    has_fault = any(_costs_time(finding) for finding in findings)
    chosen = [steady(rank) for rank in ranks]
    steps = np.concatenate([rank.seconds[is_chosen] for rank, is_chosen in zip(ranks, chosen, strict=True)])
    return Explanation(
        ranks=tuple(rank.name for rank in ranks),
        steps=sum(len(rank.number) for rank in ranks),
        left_out_steps=sum(rank.left_out for rank in ranks),
        steady_steps=len(steps),
        findings=tuple(
            finding for finding in findings if not finding.is_note and (finding.severity != "none" or not has_fault)
        ),
        notes=tuple(finding for finding in findings if finding.is_note and finding.severity != "none"),
        abstentions=(*reasons, *cannot_tell, *withheld),
        phases=_phases(ranks),
        step_median=float(np.median(steps)) if len(steps) else 0.0,
        slow_steps=slowest(ranks),
        problems=tuple(problems),
        knows_runnable=all(with_runnable(rank, is_chosen).any() for rank, is_chosen in zip(ranks, chosen, strict=True)),
        step_rule=next((rank.step_rule for rank in ranks if rank.step_rule), ""),
    )


def _costs_time(finding: Finding) -> bool:
    return finding.severity != "none" and not finding.is_note and finding.verdict != MEMORY_GROWTH


def _without_processor(ranks: list[Rank]) -> list[Floats | None]:
    """For each step of each rank, the longest time that another rank was ready to run without a processor; None for a single rank."""
    if not ranks[1:]:
        return [None]
    count = [len(rank.number) for rank in ranks]
    number, owner = np.concatenate([rank.number for rank in ranks]), np.repeat(np.arange(len(ranks)), count)
    runnable = np.nan_to_num(np.concatenate([rank.runnable for rank in ranks]))
    order = np.lexsort((-runnable, number))
    number, owner, runnable = number[order], owner[order], runnable[order]
    first = np.searchsorted(number, number)  # the longest of each number; the next is that of another rank
    after = np.minimum(first + 1, len(number) - 1)
    second = np.where(number[after] == number, runnable[after], 0.0)
    longest = np.empty(len(number))
    longest[order] = np.where(owner[first] == owner, second, runnable[first])
    return [*np.split(longest, np.cumsum(count)[:-1])]


def _judged(rank: Rank, of_other_ranks: Floats | None) -> tuple[list[Finding], list[Abstention]]:
    """Returns the findings of a rank that its abstentions allow, and the verdicts that depend on a busy machine."""
    reasons = abstentions(rank)
    found, withheld = levels(rank, of_other_ranks)
    if not reasons:
        return [*found, *spikes(rank), *pauses(rank)], withheld
    found = [finding for finding in found if not finding.is_note]
    if all(reason.leaves is Leaves.SINGLE_STEPS for reason in reasons):
        independent = [finding for finding in found if finding.verdict in _OF_THE_REST]
        return [*independent, *spikes(rank), *pauses(rank)], []
    return [finding for finding in found if finding.verdict == "machine-busy"], []


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
