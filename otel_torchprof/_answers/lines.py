"""In which lines of the program a loop's thread was, and when: from samples of its stack, and from recorded calls."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.samples import COMPREHENSIONS, INSTALLED, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_torchprof._columns.arrays import Flags, Floats, Integers
    from otel_torchprof._columns.samples import Call

FEWEST_SAMPLES = 20
"""Fewest samples from which a line is named."""
_Z = 1.959964
"""Of the normal distribution, for 95 %."""


# ---- calls of the program's own code ----


def folder_of(files: Iterable[str]) -> str:
    """The folder that those of some files are in that are the program's own, with a separator; empty for none, and the root."""
    folders = {os.path.dirname(file) for file in files if os.path.isabs(file) and is_own(file)}  # noqa: PTH117, PTH120 - text
    folder = os.path.commonpath(folders) if folders else ""
    return "" if folder == os.path.dirname(folder) else os.path.join(folder, "")  # noqa: PTH118, PTH120


def text_of_call(call: Call, folder: str) -> str:
    """A call as text, its file without :func:`folder_of` or that of installed packages: ``train.py:5 log_metrics``."""
    file = INSTALLED.sub("", call.file).removeprefix(folder)
    return f"{file}:{call.line} {call.function}" if call.line else call.function


# ---- columns ----


@dataclass(eq=False)
class Lines:
    """Where a loop's thread was: a row for each sample, or for each recorded call and operator. Immutable."""

    time: Integers
    """Unix ns."""
    seconds: Floats
    """The time that it stands for: that of a sample, or the self time of a call or an operator."""
    step: Integers
    """Index of the step; -1 for none."""
    phase: Integers
    """Column of the innermost phase; -1 for none."""
    operator: Integers
    """The innermost operator in that phase, an index into :attr:`names`; -1 for none."""
    stack: Integers
    """Index into :attr:`stacks`."""
    stacks: Sequence[tuple[Call, ...]]
    """Innermost call first."""
    names: Sequence[str]
    has_operators: bool
    """Whether operators are known; otherwise none says nothing."""
    is_sampled: bool = True
    is_short: Flags | None = None
    """By index into :attr:`names`, whether it is of short operators; None if that is not known."""

    def __len__(self) -> int:
        return len(self.time)

    @cached_property
    def folder(self) -> str:
        """The folder that all files of the program are in, of :func:`folder_of`."""
        used = np.flatnonzero(np.bincount(self.stack)).tolist()
        return folder_of({call.file for at in used for call in self.stacks[at]})

    def within(self, calls: re.Pattern[str]) -> Flags:
        """A mask of the rows in calls of files that match."""
        of_stacks = np.array([any(calls.search(call.file) for call in stack) for stack in self.stacks], np.bool_)
        found: Flags = of_stacks[self.stack]
        return found

    @cached_property
    def in_short_operators(self) -> Flags:
        """A mask of the rows in short operators and in no phase: they are what a loop in Python calls."""
        if self.is_short is None:
            return np.zeros(len(self), np.bool_)
        found: Flags = (self.phase == -1) & (self.operator >= 0) & self.is_short[self.operator]
        return found

    def suffices(self, rows: Flags) -> bool:
        """Whether some rows are enough to name a line."""
        return int(rows.sum()) >= (FEWEST_SAMPLES if self.is_sampled else 1)


class LinePlace(NamedTuple):
    """A line in which a part of some time is."""

    text: str
    call: Call
    caller: str
    """The line that calls it; empty for none."""
    share: float
    """Of that time."""
    low: float
    high: float
    """Ends of the 95 % interval."""
    samples: int
    """Number of samples of that time; 0 for recorded calls."""


_MOST_OF = 0.5
"""Least part of a time that the function has which is named for it."""
_HOLDS_ALL = 0.9
"""Nearly all: part of the other time from which on a line that holds it too says nothing about a verdict, and part of a line's time from
which on a function that it calls is named instead."""
_MOST_LISTED = 3
_WORTH_LISTING = 0.1


def places(lines: Lines, rows: Flags, seconds: Floats | None = None, *, is_of_models: bool = False) -> list[LinePlace]:
    """The place where most of the time of some rows is, and more lines; none if it is not known.

    The first is the innermost function of the program with half of the time, in its line with the most of it; of a
    package that drives the program, if that line holds nearly all other time too. The others are innermost lines with
    a tenth of the time each.

    Args:
        lines: the lines.
        rows: a mask of the rows.
        seconds: what each row counts for, if not its own time.
        is_of_models: whether it is the time of models that are called, of which the line is that of the call.
    """
    weights = np.bincount(lines.stack[rows], (lines.seconds if seconds is None else seconds)[rows], len(lines.stacks))
    total, count = float(weights.sum()), int(rows.sum())
    if total <= 0 or not lines.suffices(rows):
        return []
    sums = _sums(lines, weights, calls_around_models if is_of_models else own_calls)
    found = sums.of_most(total)
    if found is not None and _holds_rest(lines, ~rows, found[0]):  # as fit() of a trainer does
        sums = _sums(lines, weights, calls_beside_torch)
        found = sums.of_most(total)
    of = _Total(lines, total, count)
    first = [of.place(*found)] if found else []
    innermost = sorted(sums.innermost.items(), key=lambda item: -item[1])[:_MOST_LISTED]
    named = {place.call for place in first}
    return first + [
        of.place(call, sums.caller(call), part)
        for call, part in innermost
        if part >= _WORTH_LISTING * total and call not in named
    ]


def _sums(lines: Lines, weights: Floats | Integers, chosen: Callable[[tuple[Call, ...]], tuple[Call, ...]]) -> _Sums:
    """Times of the chosen calls of all stacks."""
    sums = _Sums()
    for stack in np.flatnonzero(weights > 0).tolist():
        sums.add(chosen(lines.stacks[stack]), weights.item(stack))
    return sums


def _holds_rest(lines: Lines, rows: Flags, call: Call) -> bool:
    """Whether nearly all time of these rows is in a line of the program too."""
    weights = np.bincount(lines.stack[rows], lines.seconds[rows], len(lines.stacks))
    holding = [stack for stack in np.flatnonzero(weights > 0).tolist() if call in own_calls(lines.stacks[stack])]
    total = float(weights.sum())
    return total > 0 and float(weights[holding].sum()) >= _HOLDS_ALL * total


@lru_cache(maxsize=8192)
def own_calls(stack: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls of the program's own code, innermost first; of a program that is installed, those beside Python and torch."""
    return _without_comprehensions([call for call in stack if is_own(call.file)]) or calls_beside_torch(stack)


@lru_cache(maxsize=8192)
def calls_around_models(stack: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls of the program's own code around the outermost call of a module; all of them if there is none, or none of a module."""
    inside = max((place for place, call in enumerate(stack) if _CALLS_MODULE.search(call.file)), default=-1)
    around = stack[inside + 1 :]
    return own_calls(around if any(is_own(call.file) for call in around) else stack)


_CALLS_MODULE = re.compile(r"(^|[/\\])torch[/\\]nn[/\\]modules[/\\]module\.py\Z")


@lru_cache(maxsize=8192)
def calls_beside_torch(stack: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls that are not of Python or torch, innermost first."""
    return _without_comprehensions(
        [call for call in stack if not _OF_PYTHON_OR_TORCH.search(call.file) and not call.file.startswith("<")]
    )


def _without_comprehensions(calls: list[Call]) -> tuple[Call, ...]:
    """A comprehension, which has a frame of its own up to Python 3.11, is a line of the function that it is in."""
    found: list[Call] = []
    for call in reversed(calls):
        if call.function.rpartition(".")[2] in COMPREHENSIONS and found and found[-1].file == call.file:
            found[-1] = call._replace(function=found[-1].function)
        else:
            found.append(call)
    return tuple(found[::-1])


_OF_PYTHON_OR_TORCH = re.compile(
    r"[/\\]lib(64)?[/\\]python\d(\.\d+t?)?[/\\](?!(site|dist)-packages)|(^|[/\\])(torch|otel_torchprof)[/\\]"
    r"|(^|[/\\])(bin|Scripts)[/\\](torchrun|otel-torchprof)(\.exe[/\\]__main__\.py)?\Z"
)


class _Sums:
    """Times of the program's calls: by line where they are innermost, and by function and line with all that they call."""

    def __init__(self) -> None:
        self.innermost: dict[Call, float] = defaultdict(float)
        self._lines: dict[tuple[str, str], dict[Call, float]] = defaultdict(lambda: defaultdict(float))
        self._depths: dict[tuple[str, str], float] = defaultdict(float)
        self._callers: dict[Call, dict[Call | None, float]] = defaultdict(lambda: defaultdict(float))
        self._callees: dict[Call, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))

    def add(self, calls: Sequence[Call], seconds: float) -> None:
        """Adds a stack, innermost call first."""
        if calls:
            self.innermost[calls[0]] += seconds
        seen = set()
        for place, call in enumerate(calls):
            function = call.file, call.function
            if function in seen:
                continue
            seen.add(function)
            self._lines[function][call] += seconds
            self._depths[function] += seconds * (len(calls) - place)
            outer = calls[place + 1] if place + 1 < len(calls) else None
            self._callers[call][outer] += seconds
            if place:
                self._callees[call][calls[place - 1].file, calls[place - 1].function] += seconds

    def of_most(self, total: float) -> tuple[Call, Call | None, float] | None:
        """The innermost function with most of the time: its line with the most of it, the caller of that, and its time.

        A line that only hands its time on, nearly all of it to one function, is not where the time is: that function is.
        """
        times = {function: sum(of_lines.values()) for function, of_lines in self._lines.items()}
        function = max(
            (each for each in times if times[each] >= _MOST_OF * total),
            key=lambda each: self._depths[each] / times[each],
            default=None,
        )
        passed = set()
        while function is not None and function not in passed:
            passed.add(function)
            named, of_lines = function, self._lines[function]
            call = max(of_lines, key=lambda line: of_lines[line])
            callees = self._callees[call]
            function = next((each for each in callees if callees[each] >= _HOLDS_ALL * of_lines[call]), None)
        return (call, self.caller(call), times[named]) if passed else None

    def caller(self, call: Call) -> Call | None:
        """The line that calls it most of the time."""
        callers = self._callers[call]
        return max(callers, key=lambda caller: callers[caller])


class _Total(NamedTuple):
    """A time, and the number of rows that it is the sum of."""

    lines: Lines
    seconds: float
    rows: int

    def place(self, call: Call, caller: Call | None, seconds: float) -> LinePlace:
        """A line with a part of it."""
        lines, share = self.lines, seconds / self.seconds
        low, high = interval(share, self.rows) if lines.is_sampled else (share, share)
        text = text_of_call(caller, lines.folder) if caller is not None and caller.function != "<module>" else ""
        return LinePlace(
            text_of_call(call, lines.folder), call, text, share, low, high, self.rows if lines.is_sampled else 0
        )


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many samples."""
    square = _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def rows_in(intervals: Iterable[tuple[int, int]], times: Integers) -> Flags:
    """A mask of the times in some intervals, starts and durations in ns, that do not overlap."""
    pairs = sorted(intervals)
    if not pairs:
        return np.zeros(len(times), np.bool_)
    starts, durations = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    place = np.searchsorted(starts, times, side="right") - 1
    is_in: Flags = (place >= 0) & (times < (starts + durations)[place])
    return is_in
