"""The steps of ranks as series for pictures: durations, phases, waits and lateness, with neighbouring steps put together if there are many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.phases import UNATTRIBUTED
from otel_torchprof._files.attribute_keys import MEMORY

from .explanation import SLOWER
from .findings import trained
from .steps import PLACE_OF
from .stragglers import arrivals

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Floats

    from .steps import Rank

MOST_BARS = 4000
"""About as many bars of all ranks together."""
_FEWEST_BARS = 40
"""Least number of bars of a rank with more steps."""
_US = 1e6


def step_series(ranks: list[Rank]) -> list[dict[str, Any]]:
    """A series for each rank, for the json module; times in us, bytes as they are.

    Each of ``phases`` is a mean of the steps of a bar, as is ``duration``; ``longest`` is the largest of them; ``late`` and
    ``early`` are the largest of how much a rank comes to a collective after the median of the others, and before the last;
    ``rates`` are per second. ``steps`` is the number of steps of each bar, but for the last one, which may have fewer.
    """
    arrived = arrivals(ranks)
    most = max(MOST_BARS // max(len(ranks), 1), _FEWEST_BARS)
    return [_series(rank, arrived[place] if arrived else None, most) for place, rank in enumerate(ranks)]


def _series(rank: Rank, arrived: tuple[Floats, Floats] | None, most: int) -> dict[str, Any]:
    count = len(rank.number)
    each = -(-count // most)
    firsts = np.arange(0, count, each)
    sizes = np.diff(np.append(firsts, count))

    def means(seconds: Floats) -> list[int]:
        return np.rint(np.add.reduceat(seconds, firsts) / sizes * _US).astype(np.int64).tolist()  # type: ignore[no-any-return]

    columns = {phase: rank.phases[:, place] for phase, place in PLACE_OF.items()}
    columns["not known" if rank.is_derived else UNATTRIBUTED] = rank.unattributed
    is_training = trained(rank)
    median = float(np.median(rank.seconds[is_training])) if is_training.any() else float(np.median(rank.seconds))
    is_slow = is_training & (rank.seconds > SLOWER * median)
    series: dict[str, Any] = {
        "name": rank.name,
        "count": count,
        "steps": each,
        "number": rank.number[firsts].tolist(),
        "start": ((rank.start[firsts] - rank.start[0]) // 1000).tolist(),
        "duration": means(rank.seconds),
        "longest": np.rint(np.maximum.reduceat(rank.seconds, firsts) * _US).astype(np.int64).tolist(),
        "phases": {name: means(column) for name, column in columns.items() if column.any()},
        "slow": np.add.reduceat(is_slow.astype(np.int64), firsts).tolist(),
        "median": round(median * _US),
        "pauses": _pauses(rank),
    }
    for name, seconds in zip(("late", "early"), arrived or (), strict=False):
        largest = np.fmax.reduceat(seconds, firsts)
        series[name] = [None if np.isnan(value) else round(value * _US) for value in largest.tolist()]
    rates = _rates(rank, firsts)
    if rates:
        series["rates"] = rates
    if (memory := _memory(rank, firsts)) is not None:
        series["memory"] = memory
    return series


def _pauses(rank: Rank) -> dict[str, list[int]]:
    """By kind of pause, how many there are and how long they take together."""
    sums: dict[str, list[int]] = {}
    for pause in rank.pauses:
        entry = sums.setdefault(pause.kind, [0, 0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + pause.duration // 1000
    return sums


def _rates(rank: Rank, firsts: np.ndarray) -> dict[str, list[float | None]]:
    """Tokens, samples and floating-point operations per second of the steps of each bar of which they are known, and MFU."""
    found, peak = {}, config.PEAK_FLOPS.read()
    *amounts, flops, share = rank.amounts.T
    reached = share * rank.seconds if peak is None else flops / peak
    for name, amount in zip(("tokens", "samples", "flops", "mfu"), (*amounts, flops, reached), strict=True):
        seconds = np.add.reduceat(np.where(np.isnan(amount), 0.0, rank.seconds), firsts)
        if seconds.any():
            sums = np.add.reduceat(np.nan_to_num(amount), firsts)
            found[name] = [round(n / s, 4) if s else None for n, s in zip(sums.tolist(), seconds.tolist(), strict=True)]
    return found


def _memory(rank: Rank, firsts: np.ndarray) -> dict[str, list[int | None]] | None:
    """The most bytes that the process, and its device, had in the steps of each bar; None if unknown."""
    found = {}
    for name, key in (("process", MEMORY[0]), ("device", MEMORY[2])):
        largest = np.fmax.reduceat(rank.memory[:, MEMORY.index(key)], firsts)
        if not np.isnan(largest).all():
            found[name] = [None if np.isnan(value) else int(value) for value in largest.tolist()]
    return found or None
