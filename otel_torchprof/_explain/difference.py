"""Differences between two recordings: as data, as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._process.printable import printable

from .explanation import escaped
from .findings import time
from .rules import DIFF_RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

_LISTED = 20
_LEAST_RARE = 0.01
"""Smaller shares are not mentioned."""
_SHOWN_NAMES = 4
"""Displayed names of a path, counted from its end."""


class Change(NamedTuple):
    """An operator, label or module that takes more or less time in the second recording.

    Seconds are self time per step, in the fastest tenth of the steps that contain it.
    """

    name: str
    path: tuple[str, ...]
    """Path from the step down; empty if several paths have the same change."""
    before: float
    after: float
    low: float
    high: float
    """``low`` and ``high`` are the 95 % interval of ``after / before``; NaN if it is new or vanished."""
    calls_before: float
    calls_after: float
    """Calls per step, as medians; NaN if spans are aggregates."""
    share: float
    """Difference beyond the machine's own change, as a fraction of the first recording's step."""

    @property
    def is_new(self) -> bool:
        """Whether no step of the first recording contains it."""
        return self.calls_before == 0

    @property
    def is_vanished(self) -> bool:
        """Whether no step of the second recording contains it."""
        return self.calls_after == 0

    @property
    def moved(self) -> str:
        """The change as a signed percentage, ``new`` or ``vanished``."""
        if self.is_new or self.is_vanished:
            return "new" if self.is_new else "vanished"
        return _signed(self.after / self.before - 1)

    @property
    def sentence(self) -> str:
        """The change in one line."""
        times = f"{time(self.before)} -> {time(self.after)} a step"
        calls = "" if self._same_calls else f", {self.calls_before:g} -> {self.calls_after:g} calls"
        return f"{self.name}: {self.moved}, {times}{calls}, {_signed(self.share)} of the step"

    @property
    def _same_calls(self) -> bool:
        return self.calls_before == self.calls_after or math.isnan(self.calls_before + self.calls_after)


class Recording(NamedTuple):
    """The compared steps of one file."""

    path: str
    steps: int
    median: float
    """Median duration of a step in seconds."""
    rare: float
    """Fraction of it in spans that fewer than half of the steps contain, which are not compared."""


@dataclass(frozen=True)
class Difference:
    """Difference between two recordings of one program: the result of :func:`diff`. Immutable.

    ``print()`` writes the text of ``otel-torchprof diff``; a notebook displays Markdown.

    Examples:
        >>> with otp.profile() as prof:
        ...     for _ in range(40):
        ...         y = torch.ones(3) + 1
        ...         prof.step()
        >>> prof.export_chrome_trace("trace.json")
        >>> found = otp.diff("trace.json", "trace.json")
        >>> found.ratio, found.changes
        (1.0, ())
    """

    before: Recording
    after: Recording
    ratio: float
    """Ratio of the median step durations: 1.05 is 5 % slower."""
    low: float
    high: float
    """``low`` and ``high`` are its 95 % interval."""
    common: float
    """Ratio by which everything changed alike: the machine, its clock, or a cost that all operators share."""
    changes: tuple[Change, ...]
    """Changes beyond that and beyond chance, largest first."""
    problems: tuple[str, ...]
    """Parts of the files that could not be read."""
    doubts: tuple[str, ...] = ()
    """Reasons why the times of a recording are not the program's; with any, nothing is judged."""

    @property
    def is_common(self) -> bool:
        """Whether everything changed alike by more than machines vary from one recording to the next."""
        return abs(math.log(self.common)) > math.log1p(DIFF_RULES.common_change)

    @property
    def headline(self) -> str:
        """The difference in one line."""
        step = f"a step took {time(self.before.median)}, now {time(self.after.median)} ({_signed(self.ratio - 1)})"
        if self.doubts:
            return f"cannot be judged: {self.doubts[0]}"
        if self.changes:
            more = f" (and {len(self.changes) - 1} more)" if len(self.changes) > 1 else ""
            return f"{self.changes[0].sentence}{more}; {step}"
        if self.is_common:
            return f"everything changed alike, by {_signed(self.common - 1)}: the machine, or what all operators share; {step}"
        return f"no difference that is more than chance; {step}"

    def is_slower_by(self, fraction: float) -> bool:
        """Whether the changes make a step longer by more than a fraction.

        A change that everything shares does not count: it is the speed of the machine, which varies from minute to
        minute.

        Args:
            fraction: limit of :attr:`slowdown`, 0.05 for 5 %.

        Returns:
            False if there are :attr:`doubts`.
        """
        return not self.doubts and self.slowdown > fraction

    @property
    def slowdown(self) -> float:
        """Time that the changes add to a step, as a fraction of the first recording's step.

        Negative if steps are faster.
        """
        return math.fsum(each.share for each in self.changes)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_markdown_(self) -> str:
        """Markdown for a notebook."""
        return as_markdown(self)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, and the thresholds of the rules, as a dictionary for the json module."""
        return {
            "verdict": self.headline,
            "before": self.before._asdict(),
            "after": self.after._asdict(),
            "ratio": self.ratio,
            "interval": [self.low, self.high],
            "common": self.common,
            "slowdown": self.slowdown,
            "changes": [_json(each) for each in self.changes],
            "problems": list(self.problems),
            "doubts": list(self.doubts),
            "rules": DIFF_RULES._asdict(),
        }


def as_text(found: Difference) -> str:
    """Formats a difference for a terminal."""
    blocks = ([found.headline], _changes(found), _steps(found))
    texts = ("\n".join(map(printable, lines)) for lines in blocks)  # a name with a line feed forges no line
    return "\n\n".join(text for text in texts if text) + "\n"


def as_markdown(found: Difference) -> str:
    """Formats a difference for a pull request."""
    lines = [f"**{escaped(found.headline)}**", ""]
    if found.changes:
        lines += [
            "| What | Before | After | Change | Of the step | Where |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        lines += [
            f"| {escaped(each.name)} | {time(each.before)} | {time(each.after)} | {each.moved} | {each.share:+.1%} | {escaped(_where(each))} |"
            for each in found.changes[:_LISTED]
        ]
        lines += [""]
    return "\n".join((*lines, *(f"- {escaped(line)}" for line in _steps(found)))) + "\n"


def _changes(found: Difference) -> Iterator[str]:
    if found.changes:
        yield f"{'Before':>10}{'After':>12}{'Change':>10}{'95 % interval':>22}{'Of step':>9}{'Calls a step':>16}  What"
    for each in found.changes[:_LISTED]:
        between = "" if each.is_new or each.is_vanished else f"{each.low - 1:+.1%} to {each.high - 1:+.1%}"
        calls = (
            "" if math.isnan(each.calls_before + each.calls_after) else f"{each.calls_before:g} -> {each.calls_after:g}"
        )
        yield (
            f"{time(each.before):>10}{time(each.after):>12}{each.moved:>10} {between:>21}{each.share:>+9.1%}{calls:>16}  "
            f"{_where(each) or each.name}"
        )
    if len(found.changes) > _LISTED:
        yield f"and {len(found.changes) - _LISTED} more: --json"


def _steps(found: Difference) -> Iterator[str]:
    yield _recording("before", found.before)
    yield _recording("after", found.after)
    yield f"step {found.ratio - 1:+.1%}, 95 % interval {found.low - 1:+.1%} to {found.high - 1:+.1%}; the median name {found.common - 1:+.1%}, taken for the machine's"
    for doubt in found.doubts[1:]:
        yield f"cannot be judged: {doubt}"


def _recording(which: str, each: Recording) -> str:
    rare = (
        f", {each.rare:.0%} of it runs in less than half of the steps and is not compared"
        if each.rare >= _LEAST_RARE
        else ""
    )
    return f"{which:<6} {each.steps:,} steps, median {time(each.median)}{rare}  {each.path}"


def _where(each: Change) -> str:
    return " > ".join(("...", *each.path[-_SHOWN_NAMES:]) if len(each.path) > _SHOWN_NAMES else each.path)


def _signed(fraction: float) -> str:
    return f"{fraction:+.1%}"


def _json(change: Change) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in change._asdict().items()
    }
