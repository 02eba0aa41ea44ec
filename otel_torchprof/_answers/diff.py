"""Compares two recordings of a program and reports which parts became slower or faster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof.errors import TorchProfError, printable

from .explanation import escaped
from .findings import DIFF_RULES, RULES, time
from .rank_reading import read_steps
from .tree_times import TreeTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.arrays import Flags, Floats
    from otel_torchprof._export.byte_stream import ByteStream

    from .step_list import StepList

# ---- Two recordings, name by name and path by path: what changed beyond what all changed by, and beyond chance ----

_NORMAL = 1.4826
"""A median deviation as a standard deviation."""
QUANTILE = 2.1
"""97.5 % of Student's t distribution with 18 degrees of freedom: blocks of two recordings, less one of each."""
_STEP = "(step)"
"""What is in no span of a step."""


class DiffRow(NamedTuple):
    """What is compared: one path, or all events of one name."""

    name: str
    path: tuple[str, ...]
    """Empty for all events of the name."""
    before: Floats
    """Seconds of self time, by step."""
    after: Floats
    calls_before: float
    """Events a step, as medians; NaN where spans stand for several."""
    calls_after: float


class ChangedRow(NamedTuple):
    """A row that changed; logarithms are natural."""

    row: DiffRow
    error: float
    """Standard error of the logarithm of the ratio; infinite where it was not in both recordings."""
    alike: float
    """As much of that logarithm as the machine may have changed."""


def rows_of(before: TreeTimes, after: TreeTimes) -> list[DiffRow]:
    """Those with a share of a step in either that is worth looking at; by name only where either has nothing else."""
    trees = before, after
    places = [{path: row for row, path in enumerate(tree.paths)} for tree in trees]
    least = [DIFF_RULES.least_share * float(np.median(tree.seconds)) for tree in trees]
    by_name = before.by_name or after.by_name
    groups: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[int]]] = {}
    for path in dict.fromkeys((*places[0], *places[1])):
        for key in _keys(path, by_name=by_name):
            for rows, found in zip(groups.setdefault(key, ([], [])), places, strict=True):
                rows.extend([found[path]] if path in found else [])
    kept = []
    for (name, path), both in groups.items():
        if not path and not by_name and max(map(len, both)) == 1:  # its one path says it
            continue
        times = [tree.times(rows) for tree, rows in zip(trees, both, strict=True)]
        if any(np.median(each) >= bound for each, bound in zip(times, least, strict=True)):
            calls = [tree.calls(rows) for tree, rows in zip(trees, both, strict=True)]
            kept.append(DiffRow(name, path, times[0], times[1], calls[0], calls[1]))
    return kept


def rare_share(tree: TreeTimes) -> float:
    """Share of the time of all steps in paths that run in less than half of them, and so are not compared."""
    times = np.stack([tree.times([row]) for row in range(len(tree.paths))]) if len(tree.paths) else np.zeros((0, 1))
    is_rare = (times > 0).sum(axis=-1) * 2 < times.shape[-1]
    return float(times[is_rare].sum() / tree.seconds.sum())


def judged(rows: list[DiffRow], step: float) -> tuple[float, list[ChangedRow]]:
    """By what all names changed alike, as a ratio, and the rows that changed beyond that and beyond chance, the largest first.

    Args:
        rows: of two recordings.
        step: seconds of a step of the first.
    """
    if not rows:
        return 1.0, []
    sides = np.stack([row.before for row in rows]), np.stack([row.after for row in rows])
    (before, error), (after, other) = (log_and_error(side, undisturbed) for side in sides)
    is_both = np.isfinite(before) & np.isfinite(after)
    ratios = np.where(is_both, after, 0) - np.where(is_both, before, 0)
    common = _common(ratios[is_both & _stand_for_names(rows)])
    is_changed, alike, errors = _beyond_machine(ratios, np.hypot(error, other), common)
    errors, alike = np.where(is_both, errors, np.inf), np.where(is_both, alike, 0.0)
    has_begun_or_ended = np.array([0 in {row.calls_before, row.calls_after} for row in rows])
    difference = np.exp(after - alike) - np.exp(before)
    is_changed = np.where(is_both, is_changed, has_begun_or_ended) & (
        np.abs(difference) > DIFF_RULES.least_share * step
    )
    order = np.argsort(-np.abs(difference), kind="stable")
    chosen = _once(rows, order[is_changed[order]].tolist(), errors, difference)
    return float(np.exp(common.ratio)), [ChangedRow(rows[at], float(errors[at]), float(alike[at])) for at in chosen]


def _beyond_machine(ratios: Floats, errors: Floats, common: _Common) -> tuple[Flags, Floats, Floats]:
    """Which logarithms of ratios are beyond chance and beyond what the machine may have done; how much of them that is, and their errors.

    A machine that has become slower slows names down by different parts of that. So either a name is outside of all that is between no
    change and the common one, or it is far from the common one beside how far other names are from it.
    """
    between = np.clip(ratios, min(0.0, common.ratio), max(0.0, common.ratio))
    outer, inner = np.hypot(errors, common.least_spread), np.hypot(errors, common.spread)
    is_outside = np.abs(ratios - between) > DIFF_RULES.deviations * outer
    is_apart = np.abs(ratios - common.ratio) > DIFF_RULES.deviations * inner
    return is_outside | is_apart, np.where(is_outside, between, common.ratio), np.where(is_outside, outer, inner)


def undisturbed(values: Floats) -> Floats:
    """Of rows of steps: the fastest tenth of those in which it runs; 0 where these are less than half of the steps.

    A machine that is slow for half of a recording changes medians; the fastest steps stay as they are.
    """
    return np.where((values > 0).sum(axis=-1) * 2 < values.shape[-1], 0.0, _fastest(values))


def _fastest(values: Floats) -> Floats:
    idle = (values <= 0).sum(axis=-1, keepdims=True)
    place = idle + ((values.shape[-1] - 1 - idle) * DIFF_RULES.fastest).astype(np.int64)
    found: Floats = np.take_along_axis(np.sort(values, axis=-1), place.clip(0, values.shape[-1] - 1), axis=-1)[..., 0]
    return found


def log_and_error(values: Floats, typical: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Of rows of steps: logarithms of what is typical, and their standard errors, from blocks of steps that follow one another.

    Steps near one another are alike, so that an error from single steps would be too small.
    """
    blocks = [typical(block) for block in np.array_split(values, DIFF_RULES.blocks, axis=-1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        found, logs = np.log(typical(values)), np.log(np.stack(blocks))
        errors = np.std(logs, axis=0, ddof=1) / np.sqrt(len(blocks))
    return found, np.where(np.isfinite(errors), errors, np.inf)


def _keys(path: tuple[str, ...], *, by_name: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a path counts for: itself, and all of its name."""
    if by_name:
        return ((path[-1], ()),) if path and not path[-1].startswith(PHASE_PREFIX) else ()
    return ((path[-1], path), (path[-1], ())) if path else ((_STEP, (_STEP,)),)


def _stand_for_names(rows: list[DiffRow]) -> Flags:
    """One row of each name: all of it, or its one path."""
    several = {row.name for row in rows if not row.path}
    return np.array([not row.path or row.name not in several for row in rows])


class _Common(NamedTuple):
    """What all names changed by alike, as a logarithm, and how far they are from that, as a standard deviation."""

    ratio: float
    spread: float
    least_spread: float
    """By which a name differs in two recordings of one program at least."""


def _common(ratios: Floats) -> _Common:
    if len(ratios) < DIFF_RULES.fewest_names:
        return _Common(0.0, DIFF_RULES.spread_of_few, DIFF_RULES.spread_of_few)
    ratio = float(np.median(ratios))
    spread = _NORMAL * float(np.median(np.abs(ratios - ratio)))
    return _Common(ratio, max(spread, DIFF_RULES.spread), DIFF_RULES.spread)


def _once(rows: list[DiffRow], changed: list[int], errors: Floats, difference: Floats) -> Iterator[int]:
    """Of a name on several paths either all of it, or the one path that makes its change; none that is new or vanished on one path only."""
    of_all = {rows[place].name: place for place in changed if not rows[place].path}
    several = {row.name for row in rows if not row.path}
    single = {}
    for name, whole in of_all.items():
        paths = [place for place in changed if rows[place].path and rows[place].name == name]
        if len(paths) == 1 and difference[paths[0]] / difference[whole] >= DIFF_RULES.path_share:
            single[name] = paths[0]
    for place in changed:
        row = rows[place]
        if row.name in of_all:
            is_told = place == single.get(row.name, of_all[row.name])
        else:
            is_told = bool(np.isfinite(errors[place])) or row.name not in several
        if is_told:
            yield place


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None,
) -> Difference:
    """Compares two recordings of a program: which operators, labels and modules take more or less time in the second.

    Reads each file twice, as a stream. Thread-safe.

    Args:
        before: path of a trace file: Chrome JSON, of this package or of torch.profiler, or OTLP.
        after: path of another trace file of the same program.
        watch: called with the path and the byte stream of each file when it is opened, twice per file, for a progress
            display. Default: none.

    Returns:
        The changes beyond chance, the intervals and the reasons for doubt.

    Raises:
        TorchProfError: a file cannot be read, has too few steps, or was recorded with another level of detail.

    Examples:
        >>> with otp.profile() as prof:
        ...     for _ in range(40):
        ...         y = torch.ones(3) + 1
        ...         prof.step()
        >>> prof.export_chrome_trace("before.json")
        >>> otp.diff("before.json", "before.json").is_slower_by(0.05)
        False
    """
    sides, problems = [], []
    for path in (before, after):
        side, said = _read(os.fspath(path), watch)
        sides.append(side)
        problems += said
    first, second = sides
    _check_alike(first, second)
    (before_log, error), (after_log, other) = (log_and_error(side.tree.seconds, _median) for side in (first, second))
    ratio, spread = math.exp(after_log - before_log), math.exp(QUANTILE * math.hypot(error, other))
    common, compared = judged(rows_of(first.tree, second.tree), first.recording.median)
    return Difference(
        first.recording,
        second.recording,
        ratio,
        ratio / spread,
        ratio * spread,
        common,
        tuple(_change(each, first.recording.median) for each in compared),
        tuple(problems),
        tuple(doubt for side in sides for doubt in side.doubts),
    )


# ---- reading ----


class _Side(NamedTuple):
    recording: ComparedRecording
    tree: TreeTimes
    doubts: list[str]
    """Reasons why its times are not the program's."""


def _check_alike(before: _Side, after: _Side) -> None:
    """Raises TorchProfError where one recording has operators and the other steps and phases only."""
    names = [{path[-1] for path in side.tree.paths if path} for side in (before, after)]
    has_more = [any(not name.startswith(PHASE_PREFIX) for name in each) for each in names]
    if all(names) and has_more[0] != has_more[1]:
        more, less = (before, after) if has_more[0] else (after, before)
        raise TorchProfError(
            f"{more.recording.path!r} has operators, labels or modules, {less.recording.path!r} steps and phases only, so that times of the two "
            "are not of the same: record both with one --detail"
        )


def _read(path: str, watch: Callable[[str, ByteStream], None]) -> tuple[_Side, list[str]]:
    found, problems, read_again = read_steps([path], watch)
    tree = TreeTimes(found, DIFF_RULES.warm_up_steps)
    read_again(tree)
    tree.settle()
    if len(tree.seconds) < DIFF_RULES.fewest_steps:
        raise TorchProfError(
            f"{path!r} has {len(tree.seconds)} training steps (the first {DIFF_RULES.warm_up_steps} left out), and "
            f"{DIFF_RULES.fewest_steps} are needed to compare it: record more steps"
        )
    rare = rare_share(tree)
    return _Side(
        ComparedRecording(path, len(tree.seconds), float(np.median(tree.seconds)), rare), tree, _doubts(path, found)
    ), problems


def _doubts(path: str, found: StepList) -> list[str]:
    """Returns the doubts that ``explain`` has too: dropped events, duplicate steps, a busy machine."""
    doubts = []
    for each in found.processes.values():
        steps = [step for step in each.steps if step.is_training][DIFF_RULES.warm_up_steps :]
        known = [step for step in steps if not math.isnan(step.runnable)]
        busy = math.fsum(step.runnable for step in known) / max(sum(step.duration for step in known) / 1e9, 1e-9)
        if busy > RULES.most_runnable:
            doubts.append(
                f"{path!r}: the loop's thread was ready to run for {busy:.0%} of the time, and other threads had the processors: record it "
                "while nothing else runs"
            )
        if each.dropped > RULES.most_dropped * (each.events + each.dropped):
            doubts.append(
                f"{path!r}: {each.dropped / (each.events + each.dropped):.1%} of the events were dropped: record with less detail"
            )
        if len({step.number for step in each.steps}) < len(each.steps):
            doubts.append(f"{path!r}: several steps have one number")
    return doubts


def _median(values: Floats) -> Floats:
    found: Floats = np.median(values, axis=-1)
    return found


def _change(found: ChangedRow, step: float) -> Change:
    row = found.row
    before, after = (float(undisturbed(side)) for side in (row.before, row.after))
    spread = math.exp(QUANTILE * found.error) if math.isfinite(found.error) else math.nan
    ratio = after / before if before else math.nan
    calls, share = (row.calls_before, row.calls_after), (after / math.exp(found.alike) - before) / step
    return Change(row.name, row.path, before, after, ratio / spread, ratio * spread, *calls, share)


# ---- differences between two recordings ----


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


class ComparedRecording(NamedTuple):
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

    before: ComparedRecording
    after: ComparedRecording
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


def _recording(which: str, each: ComparedRecording) -> str:
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
