"""Time of the loop's threads by line of the program, from samples of their stacks: sums that only grow, of few lines."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._answers.lines import FEWEST_SAMPLES, own_calls
from otel_torchprof._columns.phases import PHASE_NAME, PHASES, UNATTRIBUTED
from otel_torchprof._model.averages import OTHER, NamedSums

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from otel_torchprof._answers.line_reading import TakenSamples
    from otel_torchprof._columns.samples import Call

    _Key = tuple[str, Call | None]
    """Phase, and innermost line of the program; None for all lines without a sum of their own."""

LINE_TIME = "torch.line.time"
MOST_LINES = 20
"""Lines, or parts of them by phase, with sums of their own."""
FILE, LINE, FUNCTION = "code.file.path", "code.line.number", "code.function.name"
_OTHER: _Key = ("", None)
_LEAST_SHARE = 0.01
_MOST_KNOWN = 4096
_MOST_THREADS = 1000


class LineSums:
    """Sums by phase and line. Not thread-safe.

    A line gets its sum once it has 20 samples and 1 % of all time so far, and keeps it, so that no sum ever decreases; its
    time before that stays with the other lines. Threads without steps count only while they are in a phase: those of a service
    wait for requests most of the time.
    """

    def __init__(self) -> None:
        self._sums: NamedSums[_Key] = NamedSums(_OTHER, self._gets_entry)
        self._loops: set[int] = set()
        self._total = 0
        self._without_entry: dict[_Key, tuple[int, int]] = {}

    def add(self, taken: TakenSamples | None, loops: Iterable[int]) -> None:
        """Adds the samples of a drain, in which steps of some threads ended. Costs a microsecond per stack and phase."""
        self._loops = {*loops, *(self._loops if len(self._loops) < _MOST_THREADS else ())}
        if taken is None:
            return
        is_counted = (taken.rows["phase"] >= 0) | np.isin(taken.rows["thread"], list(self._loops))
        rows = taken.rows[is_counted]
        pairs, of_rows = np.unique(rows[["phase", "stack"]], return_inverse=True)
        counts, times = np.bincount(of_rows), np.bincount(of_rows, rows["duration"])
        lines: dict[_Key, list[int]] = defaultdict(lambda: [0, 0])
        for (phase, stack), count, time in zip(pairs.tolist(), counts.tolist(), times.tolist(), strict=True):
            calls = own_calls(taken.stacks[stack])
            entry = lines[(UNATTRIBUTED if phase < 0 else PHASES[phase], calls[0]) if calls else _OTHER]
            entry[0], entry[1] = entry[0] + count, entry[1] + round(time)
        self._total += sum(time for _, time in lines.values())
        for key, amounts in lines.items():
            self._sums.add(key, amounts)

    def _gets_entry(self, key: _Key, amounts: Sequence[int]) -> bool:
        if key == _OTHER or len(self._sums) - (_OTHER in self._sums) >= MOST_LINES:
            return False
        before = self._without_entry.pop(key, (0, 0))
        count, time = before[0] + amounts[0], before[1] + amounts[1]
        if count >= FEWEST_SAMPLES and time >= _LEAST_SHARE * self._total:
            return True
        if len(self._without_entry) >= _MOST_KNOWN:
            self._without_entry.clear()
        self._without_entry[key] = count, time
        return False

    def read(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields the seconds of each line, and its attributes."""
        for (phase, call), amounts in self._sums:
            of_line: dict[str, Any] = {FUNCTION: OTHER}
            if call is not None:
                of_line = {FILE: call.file, LINE: call.line, FUNCTION: call.function, PHASE_NAME: phase}
            yield amounts[1] / 1e9, of_line
