"""Explains why training is slow: reads trace files and returns verdicts with their evidence."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof.errors import TorchProfError

from .abstentions import Leaves, abstentions
from .explanation import Explanation, PhaseRow
from .findings import steady, trained, with_runnable
from .levels import levels
from .rank_reading import read_ranks
from .slow_steps import slowest
from .spikes import pauses, spikes
from .steps import PLACE_OF
from .stragglers import straggler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

    from .findings import Finding
    from .steps import Rank

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
