"""The result of a comparison: what takes more or less time, as text, Markdown and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof.errors import printable

from .explanation import escaped
from .findings import DIFF_RULES, RULES, time

if TYPE_CHECKING:
    from collections.abc import Iterator


_LISTED = 20
_LEAST_RARE = 0.01
"""Least share of rare paths that is reported."""
_NOTHING = "no difference that is more than chance"
_TELLS = "`otel-torchprof diff --interleave 10 -o DIR -- COMMAND -- COMMAND` tells which"
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


class ComparedRecording(NamedTuple):
    """The compared steps of one file, or of all runs of one command."""

    path: str
    """The file, or the command."""
    steps: int
    median: float
    """Median duration of a step in seconds, on a busy machine without waits for a processor; of runs, the geometric mean of theirs."""
    rare: float
    """Fraction of it in spans that fewer than half of the steps contain, which are not compared."""
    runnable: float = 0.0
    """Fraction of the time in which the loop's thread was ready to run, and other threads had the processors; 0 if unknown."""


class Rounds(NamedTuple):
    """What is known of runs by turns only."""

    pairs: int
    """Number of compared pairs of runs."""
    machine: float
    """Ratio of the times of a fixed calculation beside the runs: 1.07 is a machine that was 7 % slower at the second command."""
    beyond: float
    """Ratio of the durations of steps, or of all names alike, beyond the machine's own; 1.0 if it may be chance."""
    detectable: float
    """Least change of a typical operator that would have been found, as a fraction: half of its interval."""


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
        >>> difference = otp.diff("trace.json", "trace.json")
        >>> difference.ratio, difference.changes
        (1.0, ())
    """

    before: ComparedRecording
    after: ComparedRecording
    ratio: float
    """Ratio of the median step durations: 1.05 is 5 % slower."""
    low: float
    high: float
    """``low`` and ``high`` are its 95 % interval."""
    common: float
    """Ratio of the times of a typical operator, the median of all names: the machine, its clock, or a cost that all operators share."""
    changes: tuple[Change, ...]
    """Changes beyond that and beyond chance, largest first."""
    problems: tuple[str, ...]
    """Parts of the files that could not be read."""
    doubts: tuple[str, ...] = ()
    """Reasons why the times of a recording are not the program's; with any, nothing is judged."""
    caveats: tuple[str, ...] = ()
    """Reasons to trust the changes less, none of which would alter them."""
    unsure: tuple[Change, ...] = ()
    """Changes that only one way of measuring has: in all steps, or in those with the fewest waits for a processor."""
    rounds: Rounds | None = None
    """Of runs by turns, else None."""

    @property
    def is_common(self) -> bool:
        """Whether everything changed alike by more than machines vary from one recording to the next, or from run to run."""
        if self.rounds is not None:
            return self.rounds.beyond != 1
        return abs(math.log(self.common)) > math.log1p(DIFF_RULES.common_change)

    @property
    def headline(self) -> str:
        """The difference in one line."""
        step = (
            f"a median step took {time(self.before.median)}, now {time(self.after.median)} ({_signed(self.ratio - 1)})"
        )
        if self.doubts:
            return f"cannot be judged: {self.doubts[0]}"
        if not self.can_judge(0.0) and self._is_machine_or_program:
            return f"cannot be judged from two files: {self._of_everything}; {step}: {_TELLS}"
        if not self.can_judge(0.0):
            which = "all steps, or only those in which the loop had a processor, are counted"
            return f"cannot be judged: it depends on whether {which}: {self.unsure[0].sentence}"
        if self.changes and self._names_explain:
            more = f" (and {len(self.changes) - 1} more)" if len(self.changes) > 1 else ""
            return f"{self.changes[0].sentence}{more}; {step}"
        return f"{self._of_everything}; {step}"

    @property
    def _of_everything(self) -> str:
        """What is said where no name changed by itself."""
        if self.rounds is None:
            whose = f"a typical operator is {_faster(self.common)}, by the machine or by the program"
            return whose if self.is_common else _NOTHING
        machine = _faster(self.rounds.machine)
        if self.is_common:
            return f"everything {_faster(self.common)}; the machine itself was {machine}"
        if not self.low <= 1 <= self.high:
            return f"steps were {_faster(self.ratio)}, and the machine itself {machine}: no difference beyond that"
        return _NOTHING

    def is_slower_by(self, fraction: float) -> bool:
        """Whether the changes make a step longer by more than a fraction.

        Between two files, a small change that everything shares does not count: it is the speed of the machine, which varies
        from minute to minute. A large one may be the machine's or the program's: only what holds of both is judged. Between
        runs by turns, what the machine does not explain counts.

        Args:
            fraction: limit of :attr:`slowdown`, 0.05 for 5 %.

        Returns:
            False if it cannot be judged.
        """
        return not self.doubts and self._range[0] > fraction

    def can_judge(self, fraction: float) -> bool:
        """Whether it is known if the changes make a step longer by more than a fraction.

        Not with a doubt, nor if an unsure change decides it, nor if that is whether a common change is the machine's.
        """
        low, high = self._range
        return not self.doubts and (low > fraction or high <= fraction)

    @property
    def slowdown(self) -> float:
        """Time that the changes add to a step, as a fraction of the first recording's step.

        Negative if steps are faster.
        """
        if self.rounds is not None and self.rounds.beyond != 1:
            return self.rounds.beyond - 1
        return math.fsum(change.share for change in self.changes)

    @property
    def _names_explain(self) -> bool:
        """Whether the changed names are most of the change of a step."""
        if self.rounds is None or self.rounds.beyond == 1:
            return True
        return 2 * abs(math.fsum(change.share for change in self.changes)) >= abs(self.rounds.beyond - 1)

    @property
    def _range(self) -> tuple[float, float]:
        """The slowdown without and with the unsure changes, and a common change of two files as the machine's and as the program's."""
        unsure = [change.share for change in self.unsure]
        least = self.slowdown + math.fsum(min(share, 0) for share in unsure)
        most = self.slowdown + math.fsum(max(share, 0) for share in unsure)
        if self._is_machine_or_program:
            of_program = self.ratio - 1, self.slowdown + self.common - 1
            least, most = min(least, *of_program), max(most, *of_program)
            # Steps that became faster while all operators became slower did so by the program, and the other way round.
            if self.common > 1 > self.high:
                most = min(most, self.high - 1)
            elif self.common < 1 < self.low:
                least = max(least, self.low - 1)
        return least, most

    @property
    def _is_machine_or_program(self) -> bool:
        """Whether two files have a common change that may be of either."""
        return self.rounds is None and self.is_common

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
            "changes": [_json(change) for change in self.changes],
            "problems": list(self.problems),
            "doubts": list(self.doubts),
            "caveats": list(self.caveats),
            "unsure": [_json(change) for change in self.unsure],
            "rounds": None if self.rounds is None else self.rounds._asdict(),
            "rules": DIFF_RULES._asdict(),
        }


def as_text(difference: Difference) -> str:
    """Formats a difference for a terminal."""
    blocks = ([difference.headline], _changes(difference), _steps(difference))
    texts = ("\n".join(map(printable, lines)) for lines in blocks)  # a name with a line feed forges no line
    return "\n\n".join(text for text in texts if text) + "\n"


def as_markdown(difference: Difference) -> str:
    """Formats a difference for a pull request."""
    lines = [f"**{escaped(difference.headline)}**", ""]
    if difference.changes:
        lines += [
            "| What | Before | After | Change | Of the step | Where |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        lines += [
            f"| {escaped(change.name)} | {time(change.before)} | {time(change.after)} | {change.moved} | {change.share:+.1%} | {escaped(_where(change))} |"
            for change in difference.changes[:_LISTED]
        ]
        lines += [f"| {what} | | | | {share:+.1%} | |" for share, what in _rest(difference)]
        lines += [""]
    return "\n".join((*lines, *(f"- {escaped(line)}" for line in _steps(difference)))) + "\n"


def _changes(difference: Difference) -> Iterator[str]:
    if not difference.changes:
        return
    yield f"{'Before':>10}{'After':>12}{'Change':>10}{'95 % interval':>22}{'Of step':>9}{'Calls a step':>16}  What"
    for change in difference.changes[:_LISTED]:
        between = "" if change.is_new or change.is_vanished else f"{change.low - 1:+.1%} to {change.high - 1:+.1%}"
        calls = (
            ""
            if math.isnan(change.calls_before + change.calls_after)
            else f"{change.calls_before:g} -> {change.calls_after:g}"
        )
        yield (
            f"{time(change.before):>10}{time(change.after):>12}{change.moved:>10} {between:>21}{change.share:>+9.1%}{calls:>16}  "
            f"{_where(change) or change.name}"
        )
    if len(difference.changes) > _LISTED:
        yield f"and {len(difference.changes) - _LISTED} more: --json"
    for share, what in _rest(difference):
        yield f"{'':54}{share:>+9.1%}{'':16}  {what}"
    yield (
        f"Of step: beyond what a typical operator changed ({_signed(difference.common - 1)}), of a median step before, "
        f"{time(difference.before.median)}"
    )


def _rest(difference: Difference) -> Iterator[tuple[float, str]]:
    """What the listed shares leave of the change of a median step, and that change: the lines add up to it."""
    step = difference.ratio - 1
    yield (
        step - math.fsum(change.share for change in difference.changes[:_LISTED]),
        "the rest: what all share, and other names",
    )
    yield step, "a median step"


def _steps(difference: Difference) -> Iterator[str]:
    rounds = difference.rounds
    yield _recording("before", difference.before)
    yield _recording("after", difference.after)
    step = (
        f"a median step {_between(difference.ratio, difference.low, difference.high)}; a typical operator (the median of all names, "
        f"each in its fastest steps) {_signed(difference.common - 1)}"
    )
    if rounds is None:
        yield f"{step}, {'by the machine or by the program' if difference.is_common else 'which may be the machine'}"
    else:
        yield f"{step}; the machine itself {_signed(rounds.machine - 1)}"
        yield f"{rounds.pairs} pairs of runs; a typical operator that is {rounds.detectable:.1%} slower would have been found"
    for change in difference.unsure:
        yield f"not judged: {change.sentence}"
    for caveat in difference.caveats:
        yield f"caveat: {caveat}"
    for doubt in difference.doubts[1:]:
        yield f"cannot be judged: {doubt}"


def _recording(which: str, recording: ComparedRecording) -> str:
    rare = (
        f", {recording.rare:.0%} of it runs in less than half of the steps and is not compared"
        if recording.rare >= _LEAST_RARE
        else ""
    )
    waits = " without waits for a processor" if recording.runnable > RULES.most_runnable else ""
    return f"{which:<6} {recording.steps:,} steps, median {time(recording.median)}{waits}{rare}  {recording.path}"


def _where(change: Change) -> str:
    return " > ".join(("...", *change.path[-_SHOWN_NAMES:]) if len(change.path) > _SHOWN_NAMES else change.path)


def _signed(fraction: float) -> str:
    return f"{fraction:+.1%}"


def _between(ratio: float, low: float, high: float) -> str:
    return f"{_signed(ratio - 1)}, 95 % interval {_signed(low - 1)} to {_signed(high - 1)}"


def _faster(ratio: float) -> str:
    """The ratio of two times in words."""
    return f"{abs(ratio - 1):.1%} {'slower' if ratio >= 1 else 'faster'}"


def _json(change: Change) -> dict[str, Any]:
    """The fields of a change; None for NaN, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in change._asdict().items()
    }
