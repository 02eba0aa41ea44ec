"""Makes one story of the findings: those that follow from another are folded into it, and become its evidence."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .findings import BY_PHASE, RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .findings import Finding
    from .stragglers import LateRank

_FOLLOWS = {
    "gil": ("python-gap", "optimizer-bound"),
    "device-wait-bound": ("host-bound",),
}
"""By verdict, those that are its consequences: Python code that waits for the lock runs no operator; a device has nothing left after the
host has waited for it."""
_FRESH = frozenset(("clone", "contiguous", "copy_", "fill_", "full", "ones", "uniform_", "normal_", "zero_", "zeros"))
"""Operators that are the first to touch memory."""
_OF_WAITING_RANKS = frozenset(("communication-bound", "compute-bound", "device-bound", "device-wait-bound"))
"""Verdicts on a rank that may consist of waits for another one."""


def one_story(findings: list[Finding]) -> list[Finding]:
    """Folds findings on one rank that follow from others into these."""
    verdicts = {finding.verdict for finding in findings if not finding.is_note}
    if "host-bound" not in verdicts:  # a device that always has work is what the host waits for
        findings = _folded(findings, "device-bound", lambda finding: finding.verdict == "device-wait-bound")
    for cause, following in _FOLLOWS.items():
        findings = _folded(findings, cause, lambda finding, names=following: finding.verdict in names)  # type: ignore[misc]
    for of_phase in [each for each in findings if each.verdict in BY_PHASE.values() and each.line and _is_fault(each)]:
        findings = _folded(findings, of_phase.verdict, lambda finding, whole=of_phase: _is_in(finding, whole))  # type: ignore[misc]
    findings = _folded(findings, "allocation-churn", lambda finding: finding.name.removeprefix("aten::") in _FRESH)
    return _with_machine(findings)


def _is_in(finding: Finding, of_phase: Finding) -> bool:
    """Whether a gap or an operator is in the line of a phase that takes as long or longer."""
    is_same = finding.line == of_phase.line and finding.share <= of_phase.share
    return is_same and finding.verdict in ("python-gap", "operator-bound")


def _folded(findings: list[Finding], cause: str, follows: Callable[[Finding], bool]) -> list[Finding]:
    """Folds what follows from a verdict into it, if there is that verdict."""
    place = next((at for at, each in enumerate(findings) if each.verdict == cause and not each.is_note), None)
    if place is None:
        return findings
    parts = [each for each in findings if follows(each)]
    most = max((findings[place], *parts), key=lambda each: each.recoverable_seconds)
    is_fault = findings[place].severity != "none"
    whole = findings[place]._replace(
        evidence=(*findings[place].evidence, *(f"{each.sentence}, which follows from this" for each in parts)),
        recoverable_seconds=most.recoverable_seconds if is_fault else 0.0,
        step_seconds=most.step_seconds if is_fault else 0.0,
    )
    return [whole if each is findings[place] else each for each in findings if each not in parts]


def _with_machine(findings: list[Finding]) -> list[Finding]:
    """Leaves a busy machine to the caveat of a fault that costs as much."""
    faults = [each for each in findings if _is_fault(each) and each.verdict != "machine-busy"]
    largest = max(faults, key=lambda finding: finding.share, default=None)
    busy = [each for each in findings if each.verdict == "machine-busy"]
    if largest is None or any(each.share > largest.share for each in busy):
        return findings
    besides = () if largest.busy_share else tuple(f"besides, {each.sentence}" for each in busy)
    return [
        each._replace(evidence=(*each.evidence, *besides)) if each is largest else each
        for each in findings
        if each.verdict != "machine-busy"
    ]


def _is_fault(finding: Finding) -> bool:
    return finding.severity != "none" and not finding.is_note


def merged(by_rank: dict[str, list[Finding]]) -> list[Finding]:
    """The findings of all ranks; a verdict of several ranks is reported once, from the rank with the largest share."""
    by_verdict: dict[tuple[str, str, bool], list[tuple[str, Finding]]] = defaultdict(list)
    for rank, findings in by_rank.items():
        for finding in findings:
            by_verdict[finding.verdict, finding.name, finding.is_note].append((rank, finding))
    return [_of_several(same, len(by_rank)) for same in by_verdict.values()]


def _of_several(same: Sequence[tuple[str, Finding]], count: int) -> Finding:
    where, largest = max(same, key=lambda item: item[1].share)
    names = tuple(dict.fromkeys(name for name, _ in same)) if count > 1 else ()
    evidence = largest.evidence
    if len(names) > 1:
        evidence = (
            *evidence,
            f"these are the figures of {where}, which has the largest share of {len(names)} ranks",
        )
    return largest._replace(ranks=names, evidence=evidence)


def with_late_rank(by_rank: dict[str, list[Finding]], late: LateRank) -> list[Finding]:
    """The findings of all ranks beside a straggler: what waits for it, and its own cause, are folded into its finding."""
    evidence, folded, machine, remaining = late.finding.evidence, [], [], {}
    for rank, findings in by_rank.items():
        is_late = rank in late.finding.ranks
        parts = [each for each in findings if _is_part(each, late, is_late=is_late)]
        remaining[rank] = [each for each in findings if each not in parts]
        machine += [each for each in parts if each.verdict == "machine-busy"]
        folded += [(rank, each) for each in parts if not is_late and _is_fault(each) and each.verdict != "machine-busy"]
    if folded:
        names, share = ", ".join(dict.fromkeys(rank for rank, _ in folded)), max(each.share for _, each in folded)
        evidence = *evidence, f"waits of other ranks follow from it: up to {share:.0%} of step time on {names}"
    if machine and late.cause != "machine-busy":
        evidence = *evidence, f"besides, {max(machine, key=lambda each: each.share).sentence}"
    return [late.finding._replace(evidence=evidence), *merged(remaining)]


def _is_part(finding: Finding, late: LateRank, *, is_late: bool) -> bool:
    """Whether a finding follows from a straggler, or is what makes it late."""
    if finding.verdict == "machine-busy":
        return late.cause == "machine-busy" or finding.share <= late.share
    if is_late:
        return finding.verdict == late.cause or finding.severity == "none"
    is_its_own = finding.severity != "none" and finding.share - late.finding.share >= RULES.bound_share
    return finding.verdict in _OF_WAITING_RANKS and not is_its_own
