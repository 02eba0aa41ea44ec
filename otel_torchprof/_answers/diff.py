"""Compares two recordings of a program and reports which parts became slower or faster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files.reading import read_events
from otel_torchprof.errors import TorchProfError, printable

from .explanation import escaped
from .findings import DIFF_RULES, RULES, time
from .rank_reading import steps_of
from .tree_times import TreeTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.arrays import Flags, Floats
    from otel_torchprof._export.byte_stream import ByteStream

    from .step_list import StepList

# ---- Comparison of two recordings by name and path: changes beyond the common change and beyond chance ----

_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation."""
QUANTILE = 2.1
"""97.5 % of Student's t distribution with 18 degrees of freedom: blocks of two recordings, less one of each."""
_STEP = "(step)"
"""Name of the time of a step outside of all its spans."""


class DiffRow(NamedTuple):
    """Compared times: of one path, or of all events of one name."""

    name: str
    path: tuple[str, ...]
    """Empty for all events of the name."""
    before: Floats
    """Seconds of self time, by step."""
    after: Floats
    calls_before: float
    """Median number of events per step; NaN for aggregate spans."""
    calls_after: float


class ChangedRow(NamedTuple):
    """A row that changed; logarithms are natural."""

    row: DiffRow
    error: float
    """Standard error of the logarithm of the ratio; infinite if only one recording has it."""
    alike: float
    """Part of that logarithm that may be due to the machine."""


def rows_of(before: TreeTimes, after: TreeTimes) -> list[DiffRow]:
    """The rows with at least a minimal share of a step in either recording; by name only if either has no paths."""
    trees = before, after
    places = [{path: row for row, path in enumerate(tree.paths)} for tree in trees]
    least = [DIFF_RULES.least_share * float(np.median(tree.seconds)) for tree in trees]
    by_name = before.by_name or after.by_name
    groups: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[int]]] = {}
    for path in dict.fromkeys((*places[0], *places[1])):
        for key in _keys(path, by_name=by_name):
            for rows, row_of_path in zip(groups.setdefault(key, ([], [])), places, strict=True):
                rows.extend([row_of_path[path]] if path in row_of_path else [])
    compared = []
    for (name, path), both in groups.items():
        if not path and not by_name and max(map(len, both)) == 1:  # its only path has the same times
            continue
        times = [tree.times(rows) for tree, rows in zip(trees, both, strict=True)]
        if any(np.median(side) >= bound for side, bound in zip(times, least, strict=True)):
            calls = [tree.calls(rows) for tree, rows in zip(trees, both, strict=True)]
            compared.append(DiffRow(name, path, times[0], times[1], calls[0], calls[1]))
    return compared


def rare_share(tree: TreeTimes) -> float:
    """Share of the step time in paths that run in less than half of the steps, which are not compared."""
    times = np.stack([tree.times([row]) for row in range(len(tree.paths))]) if len(tree.paths) else np.zeros((0, 1))
    is_rare = (times > 0).sum(axis=-1) * 2 < times.shape[-1]
    return float(times[is_rare].sum() / tree.seconds.sum())


def judged(rows: list[DiffRow], step: float) -> tuple[float, list[ChangedRow]]:
    """The ratio of the common change of all names, and the rows that changed beyond it and beyond chance, largest first.

    Args:
        rows: rows of two recordings.
        step: duration of a step of the first, in seconds.
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
    """Selects logarithms of ratios beyond chance and beyond an effect of the machine; returns the mask, that effect, and the errors.

    A slower machine slows names down to different degrees. So a changed name is either outside of the range from no change to the
    common change, or much farther from the common change than other names are.
    """
    between = np.clip(ratios, min(0.0, common.ratio), max(0.0, common.ratio))
    outer, inner = np.hypot(errors, common.least_spread), np.hypot(errors, common.spread)
    is_outside = np.abs(ratios - between) > DIFF_RULES.deviations * outer
    is_apart = np.abs(ratios - common.ratio) > DIFF_RULES.deviations * inner
    return is_outside | is_apart, np.where(is_outside, between, common.ratio), np.where(is_outside, outer, inner)


def undisturbed(values: Floats) -> Floats:
    """For rows of times by step, the time in the fastest tenth of the steps in which it runs; 0 if it runs in less than half.

    If the machine is slow for half of a recording, medians change, but the fastest steps do not.
    """
    return np.where((values > 0).sum(axis=-1) * 2 < values.shape[-1], 0.0, _fastest(values))


def _fastest(values: Floats) -> Floats:
    idle = (values <= 0).sum(axis=-1, keepdims=True)
    place = idle + ((values.shape[-1] - 1 - idle) * DIFF_RULES.fastest).astype(np.int64)
    fastest: Floats = np.take_along_axis(np.sort(values, axis=-1), place.clip(0, values.shape[-1] - 1), axis=-1)[..., 0]
    return fastest


def log_and_error(values: Floats, typical: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """For rows of times by step, logarithms of the typical time, and their standard errors from blocks of consecutive steps.

    Neighbouring steps are correlated, so an error from single steps would be too small.
    """
    blocks = [typical(block) for block in np.array_split(values, DIFF_RULES.blocks, axis=-1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms, logs = np.log(typical(values)), np.log(np.stack(blocks))
        errors = np.std(logs, axis=0, ddof=1) / np.sqrt(len(blocks))
    return logarithms, np.where(np.isfinite(errors), errors, np.inf)


def _keys(path: tuple[str, ...], *, by_name: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The rows that a path belongs to: its own, and that of its name."""
    if by_name:
        return ((path[-1], ()),) if path and not path[-1].startswith(PHASE_PREFIX) else ()
    return ((path[-1], path), (path[-1], ())) if path else ((_STEP, (_STEP,)),)


def _stand_for_names(rows: list[DiffRow]) -> Flags:
    """A mask with one row per name: the row of the name, or its only path."""
    several = {row.name for row in rows if not row.path}
    return np.array([not row.path or row.name not in several for row in rows])


class _Common(NamedTuple):
    """The common change of all names, as a logarithm, and the standard deviation of names from it."""

    ratio: float
    spread: float
    least_spread: float
    """Least standard deviation of a name between two recordings of one program."""


def _common(ratios: Floats) -> _Common:
    if len(ratios) < DIFF_RULES.fewest_names:
        return _Common(0.0, DIFF_RULES.spread_of_few, DIFF_RULES.spread_of_few)
    ratio = float(np.median(ratios))
    spread = _NORMAL * float(np.median(np.abs(ratios - ratio)))
    return _Common(ratio, max(spread, DIFF_RULES.spread), DIFF_RULES.spread)


def _once(rows: list[DiffRow], changed: list[int], errors: Floats, difference: Floats) -> Iterator[int]:
    """Selects rows so that each change is reported once.

    For a name on several paths, either the row of the name, or the path with most of its change; not a path on which it is new
    or vanished while it exists on others.
    """
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
            is_reported = place == single.get(row.name, of_all[row.name])
        else:
            is_reported = bool(np.isfinite(errors[place])) or row.name not in several
        if is_reported:
            yield place


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None,
) -> Difference:
    """Compares two recordings of a program: which operators, labels and modules take more or less time in the second.

    Costs some 3 us per event of Chrome JSON, and 100 bytes. Thread-safe.

    Args:
        before: path of a trace file: Chrome JSON, of this package or of torch.profiler, or OTLP.
        after: path of another trace file of the same program.
        watch: called with the path and the byte stream of each file when it is opened, for a progress display. Default:
            none.

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
        side, problems_of_file = _read(os.fspath(path), watch)
        sides.append(side)
        problems += problems_of_file
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
        tuple(_change(changed, first.recording.median) for changed in compared),
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
    """Raises TorchProfError if one recording has operators and the other only steps and phases."""
    names = [{path[-1] for path in side.tree.paths if path} for side in (before, after)]
    has_more = [any(not name.startswith(PHASE_PREFIX) for name in of_side) for of_side in names]
    if all(names) and has_more[0] != has_more[1]:
        more, less = (before, after) if has_more[0] else (after, before)
        raise TorchProfError(
            f"{more.recording.path!r} has operators, labels or modules, {less.recording.path!r} steps and phases only, so that times of the two "
            "are not of the same: record both with one --detail"
        )


def _read(path: str, watch: Callable[[str, ByteStream], None]) -> tuple[_Side, list[str]]:
    events = read_events([path], watch)
    step_list = steps_of(path, events)
    tree = TreeTimes(events, step_list, DIFF_RULES.warm_up_steps)
    if len(tree.seconds) < DIFF_RULES.fewest_steps:
        raise TorchProfError(
            f"{path!r} has {len(tree.seconds)} training steps (the first {DIFF_RULES.warm_up_steps} left out), and "
            f"{DIFF_RULES.fewest_steps} are needed to compare it: record more steps"
        )
    rare = rare_share(tree)
    return _Side(
        ComparedRecording(path, len(tree.seconds), float(np.median(tree.seconds)), rare), tree, _doubts(path, step_list)
    ), events.problems


def _doubts(path: str, step_list: StepList) -> list[str]:
    """Returns the doubts that ``explain`` has too: dropped events, duplicate steps, a busy machine."""
    doubts = []
    for process in step_list.processes.values():
        steps = [step for step in process.steps if step.is_training][DIFF_RULES.warm_up_steps :]
        known = [step for step in steps if not math.isnan(step.runnable)]
        busy = math.fsum(step.runnable for step in known) / max(sum(step.duration for step in known) / 1e9, 1e-9)
        if busy > RULES.most_runnable:
            doubts.append(
                f"{path!r}: the loop's thread was ready to run for {busy:.0%} of the time, and other threads had the processors: record it "
                "while nothing else runs"
            )
        if process.dropped > RULES.most_dropped * (process.events + process.dropped):
            doubts.append(
                f"{path!r}: {process.dropped / (process.events + process.dropped):.1%} of the events were dropped: record with less detail"
            )
        if len({step.number for step in process.steps}) < len(process.steps):
            doubts.append(f"{path!r}: several steps have one number")
    return doubts


def _median(values: Floats) -> Floats:
    median: Floats = np.median(values, axis=-1)
    return median


def _change(changed: ChangedRow, step: float) -> Change:
    row = changed.row
    before, after = (float(undisturbed(side)) for side in (row.before, row.after))
    spread = math.exp(QUANTILE * changed.error) if math.isfinite(changed.error) else math.nan
    ratio = after / before if before else math.nan
    calls, share = (row.calls_before, row.calls_after), (after / math.exp(changed.alike) - before) / step
    return Change(row.name, row.path, before, after, ratio / spread, ratio * spread, *calls, share)


# ---- differences between two recordings ----


_LISTED = 20
_LEAST_RARE = 0.01
"""Least share of rare paths that is reported."""
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
        return math.fsum(change.share for change in self.changes)

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
        lines += [""]
    return "\n".join((*lines, *(f"- {escaped(line)}" for line in _steps(difference)))) + "\n"


def _changes(difference: Difference) -> Iterator[str]:
    if difference.changes:
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


def _steps(difference: Difference) -> Iterator[str]:
    yield _recording("before", difference.before)
    yield _recording("after", difference.after)
    yield f"step {difference.ratio - 1:+.1%}, 95 % interval {difference.low - 1:+.1%} to {difference.high - 1:+.1%}; the median name {difference.common - 1:+.1%}, taken for the machine's"
    for doubt in difference.doubts[1:]:
        yield f"cannot be judged: {doubt}"


def _recording(which: str, recording: ComparedRecording) -> str:
    rare = (
        f", {recording.rare:.0%} of it runs in less than half of the steps and is not compared"
        if recording.rare >= _LEAST_RARE
        else ""
    )
    return f"{which:<6} {recording.steps:,} steps, median {time(recording.median)}{rare}  {recording.path}"


def _where(change: Change) -> str:
    return " > ".join(("...", *change.path[-_SHOWN_NAMES:]) if len(change.path) > _SHOWN_NAMES else change.path)


def _signed(fraction: float) -> str:
    return f"{fraction:+.1%}"


def _json(change: Change) -> dict[str, Any]:
    """The fields of a change; None for NaN, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in change._asdict().items()
    }
