"""Cost per event of every stage, from 10^4 events to 10^7: it should not grow with their number."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peers
from harness import Budget, Row, Settings, no_collections, rows, timed
from recorders import ours

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZES = {"10^4": 10_000, "10^5": 100_000, "10^6": 1_000_000, "10^7": 10_000_000}
_EVENTS_PER_ROUND = 1_000_000
"""A small size takes as many rounds as make up so many events, within limits."""
_MOST_ROUNDS, _LEAST_ROUNDS = 20, 3
_BYTES_PER_EVENT = 1_200
"""Room that must be there: the most that the stages held at a time, and a half more."""
_BASE = "10^5"
_GROWTH = 1.3
"""Flat means: at most so many times the cost at the base."""
_ZEROS = "writing zeros to as much new memory as the drain's"
"""What the system itself takes for memory, more and more of which is not in a cache."""


def measure(settings: Settings) -> list[Row]:
    """Every stage at every size, one after another on the same recording."""
    sizes = {name: count for name, count in _SIZES.items() if _fits(count) and not (settings.quick and name == "10^7")}
    found = {name: _rounds(count, settings) for name, count in sizes.items()}
    table: list[Row] = []
    for stage in _STAGES:
        costs = {f"{name} events": [each[stage] for each in results] for name, results in found.items()}
        largest = list(costs)[-1]
        budgets = {} if stage == _ZEROS else {largest: Budget(f"{_BASE} events", _GROWTH)}
        table += rows(f"{stage}, per event", "ns", costs, budgets)
    return table


def _fits(count: int) -> bool:
    """Whether the machine has room for so many events."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return count < _SIZES["10^7"]
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return count * _BYTES_PER_EVENT < available


def _rounds(count: int, settings: Settings) -> list[dict[str, float]]:
    usual = min(max(_EVENTS_PER_ROUND // count, _LEAST_ROUNDS), _MOST_ROUNDS)
    with no_collections():
        # A virtual machine gets memory that nobody has touched yet from its host, at 100 ns and more per event.
        _once(count)
        found = []
        for _ in range(settings.rounds_or(usual)):
            found.append(_once(count))
            gc.collect()
    return found


def _once(count: int) -> dict[str, float]:
    # Recording takes 16 + 32 bytes an event; chunks are never quite full.
    with ours(memory_limit=max(count * 64, 1 << 20)) as prof:
        took = {"record": timed(lambda: peers.load().peers_groups(count), count)}
    took |= {stage: timed(lambda read=read: read(prof), count) for stage, read in _READERS.items()}
    dropped = sum(prof.health.dropped.values())
    if dropped:
        raise RuntimeError(f"{dropped} of {count} events were dropped: the memory limit of the benchmark is too low")
    return took


def _otlp(prof: Any) -> None:
    deque(prof.to_otlp(), maxlen=0)


def _touch(prof: Any) -> None:
    np.empty(sum(column.nbytes for column in prof.columns.values()), np.uint8).fill(0)


_READERS: dict[str, Callable[[Any], object]] = {
    "drain": lambda prof: prof.columns,
    _ZEROS: _touch,
    "averages": lambda prof: prof.key_averages(),
    "Chrome JSON": lambda prof: prof.export_chrome_trace("/dev/null"),
    "OTLP": _otlp,
}
_STAGES = ("record", *_READERS)
