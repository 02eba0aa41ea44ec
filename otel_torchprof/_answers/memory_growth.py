"""Memory that grows from step to step: by how much, by a robust slope with its interval, and when there is no more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._files import attribute_keys

from .advice import ADVICE
from .findings import RULES, Finding, time
from .kept_memory import byte_text

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Flags, Floats

    from .steps import KeptMemory, Rank

MEMORY_GROWTH = "memory-growth"
_RESIDENT, _FREE, _ALLOCATED, _DEVICE_FREE = range(len(attribute_keys.MEMORY))
_SECONDS_A_DAY = 86_400.0
_NORMAL_95 = 1.96
_UNFINISHED = 2
"""Last steps whose memory may be in use until the next."""


class Growth(NamedTuple):
    """Bytes a step, and the 95 % interval; ``total``: of all steps together."""

    slope: float
    low: float
    high: float
    total: float
    steps: int


def growth(step: Floats, size: Floats) -> Growth | None:
    """How much memory grows from step to step; None if it does not do so all the time, or by little.

    The first steps are left out. The others make 13 blocks, of each of which the lowest value counts: what is allocated and freed within a block
    is no growth. The slope is the median of the slopes between all pairs of blocks, its interval that of Kendall's tau. In each third it must
    grow by a fifth of the whole: memory that is filled once, or ever more slowly, does not.

    Args:
        step: numbers of steps, rising.
        size: bytes at the end of each.
    """
    first = max(RULES.warm_up_steps, int(RULES.growth_warm_up * len(step)))
    step, size = step[first:], size[first:]
    blocks = RULES.growth_blocks
    if len(step) < RULES.growth_steps:
        return None
    parts = np.array_split(np.arange(len(step)), blocks)
    lowest = [part[np.argmin(size[part])] for part in parts]
    x, y = step[lowest], size[lowest]
    if (np.diff(x) <= 0).any():
        return None
    above, below = np.triu_indices(blocks, 1)
    slopes = np.sort((y[below] - y[above]) / (x[below] - x[above]))
    reach = _NORMAL_95 * np.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    low, high = (round((len(slopes) + sign * reach) / 2) for sign in (-1, 1))
    found = Growth(
        float(np.median(slopes)),
        float(slopes[max(low, 0)]),
        float(slopes[min(high, len(slopes) - 1)]),
        float(y[-1] - y[0]),
        int(step[-1] - step[0]) + 1,
    )
    thirds = np.diff(y[:: (blocks - 1) // 3])
    is_lasting = bool((thirds >= RULES.growth_third * found.total).all())
    is_large = found.total >= max(RULES.growth_bytes, RULES.growth_share * float(y[0]))
    return found if is_lasting and is_large and found.low > 0 else None


def memory_growth(rank: Rank) -> list[Finding]:
    """The findings on memory of the process and of a device that grows."""
    chosen = rank.is_training
    findings = []
    for column, free, where in ((_RESIDENT, _FREE, "the process"), (_ALLOCATED, _DEVICE_FREE, "the device")):
        known = chosen & ~np.isnan(rank.memory[:, column])
        if known.any():
            found = growth(rank.number[known].astype(np.float64), rank.memory[known, column])
            if found is None:
                continue
            kept = _kept(rank, found, known)
            if column != _RESIDENT or _is_the_programs(rank, found, known, kept):
                finding, listed = _finding(rank, found, known, (column, free), where), kept[:_MOST_LISTED]
                texts = (_kept_text(*each) for each in listed if each[0] >= _LEAST_SHARE * found.slope)
                findings.append(finding._replace(evidence=(*finding.evidence, *texts)))
    return findings


def _is_the_programs(rank: Rank, found: Growth, known: Flags, kept: list[tuple[float, KeptMemory]]) -> bool:
    """Whether it is more than the recording itself may have taken: its buffers, and what waits to be written, fill in the first minutes."""
    operators = float(np.nansum(rank.operations[known][-found.steps :]))
    if not operators:
        return True
    own = min(RULES.growth_recording + RULES.growth_operator * operators, RULES.growth_most_recording)
    return found.low * found.steps >= own or sum(size for size, _ in kept) >= found.slope / 2


def _finding(rank: Rank, found: Growth, known: Flags, columns: tuple[int, int], where: str) -> Finding:
    size, free = (rank.memory[:, column] for column in columns)
    advice, low, high = ADVICE[MEMORY_GROWTH], byte_text(found.low), byte_text(found.high)
    slope = byte_text(found.slope)
    first, last = (float(size[known][at]) for at in (0, -1))
    evidence = f"{where} has {byte_text(last)} at the end, {byte_text(first)} at the beginning of the recording"
    statement, seconds = f"{slope} more a step ({low} to {high}) over {found.steps:,} steps", np.inf
    has_free = np.flatnonzero(known & ~np.isnan(free))
    if has_free.size:
        at = has_free[-1]
        left = max(float(free[at]) - (last - float(size[at])), 0.0)
        steps = left / found.slope
        seconds = steps * _period(rank, known)
        statement += f"; the {byte_text(left)} that are free are full in {steps:,.0f} steps, {_long(seconds)}"
    return Finding(
        MEMORY_GROWTH,
        "high" if seconds <= _SECONDS_A_DAY else "medium",
        "firm" if int(known.sum()) >= RULES.firm_steps * 2 else "tentative",
        is_note=False,
        share=0.0,
        recoverable_seconds=0.0,
        evidence=(evidence,),
        next_action=advice.next_action,
        check=advice.check,
        statement=statement,
    )


_MOST_LISTED = 3
_LEAST_SHARE = 0.1


def _kept(rank: Rank, found: Growth, known: Flags) -> list[tuple[float, KeptMemory]]:
    """Bytes a step, by where memory was allocated that is still in use: in the steps of the growth but for the last two, whose own memory is."""
    places = np.flatnonzero(known)[-found.steps :]
    if rank.kept is None or len(places) <= _UNFINISHED:
        return []
    count = len(places) - _UNFINISHED
    end = int(rank.start[places[-1]] + 1e9 * rank.seconds[places[-1]])
    kept = rank.kept(int(rank.start[places[0]]), int(rank.start[places[count]]), end)
    return [(each.bytes / count, each) for each in kept]


def _kept_text(size: float, kept: KeptMemory) -> str:
    where = ", ".join(part for part in kept[:3] if part) or "no operator"
    return f"{byte_text(size)} a step stay of what is allocated in {where}, {kept.blocks:,} blocks"


def _period(rank: Rank, known: Flags) -> float:
    """Seconds from the begin of a step to that of the next, with what is between them."""
    start, number = rank.start[known], rank.number[known]
    return float(start[-1] - start[0]) / 1e9 / max(int(number[-1] - number[0]), 1)


def _long(seconds: float) -> str:
    """A duration that may be days."""
    for unit, name in ((_SECONDS_A_DAY, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return time(seconds)
