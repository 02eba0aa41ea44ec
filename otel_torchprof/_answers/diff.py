"""Compares two recordings of a program and reports which parts became slower or faster."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files.reading import read_events
from otel_torchprof.errors import TorchProfError

from .difference import Change, ComparedRecording, Difference
from .findings import DIFF_RULES, RULES
from .rank_reading import steps_of
from .tree_times import TreeTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from otel_torchprof._columns.arrays import Flags, Floats, Integers
    from otel_torchprof._export.byte_stream import ByteStream

    from .step_list import StepList

# ---- Comparison of two recordings by name and path: changes beyond the common change and beyond chance ----

_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation."""
QUANTILE = 2.1
"""97.5 % of Student's t distribution with 18 degrees of freedom: blocks of two recordings, less one of each."""
STEP = "(step)"
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


def undisturbed(values: Floats, fastest: float = DIFF_RULES.fastest) -> Floats:
    """For rows of times by step, the time in the fastest part of the steps in which it runs; 0 if it runs in less than half.

    If the machine is slow for half of a recording, medians change, but the fastest steps do not.
    """
    return np.where((values > 0).sum(axis=-1) * 2 < values.shape[-1], 0.0, _fastest(values, fastest))


def _fastest(values: Floats, part: float) -> Floats:
    idle = (values <= 0).sum(axis=-1, keepdims=True)
    place = idle + ((values.shape[-1] - 1 - idle) * part).astype(np.int64)
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
    return ((path[-1], path), (path[-1], ())) if path else ((STEP, (STEP,)),)


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
        TorchProfError: a file cannot be read, has too few steps or none with a processor, or was recorded with another level of detail.

    Examples:
        >>> with otp.profile() as prof:
        ...     for _ in range(40):
        ...         y = torch.ones(3) + 1
        ...         prof.step()
        >>> prof.export_chrome_trace("before.json")
        >>> otp.diff("before.json", "before.json").is_slower_by(0.05)
        False
    """
    first, second = sides = [read_side([os.fspath(path)], watch) for path in (before, after)]
    check_alike(first, second)
    rows, step = rows_of(first.tree, second.tree), first.recording.median
    common, compared = judged(rows, step)
    times = [side.tree.seconds for side in sides]
    changes, unsure = compared, list[ChangedRow]()
    if busy := [side for side in sides if side.recording.runnable > RULES.most_runnable]:
        times = [_own_times(side) for side in sides]
        common, calm = judged(_calm_rows(rows, first.tree, second.tree), step)
        changes, unsure = _agreeing(calm, compared)
    (before_log, error), (after_log, other) = (log_and_error(side, _median) for side in times)
    ratio, spread = math.exp(after_log - before_log), math.exp(QUANTILE * math.hypot(error, other))
    median = math.exp(before_log)
    return Difference(
        first.recording._replace(median=median),
        second.recording._replace(median=math.exp(after_log)),
        ratio,
        ratio / spread,
        ratio * spread,
        common,
        tuple(_change(changed, median) for changed in changes),
        tuple(problem for side in sides for problem in side.problems),
        tuple(doubt for side in sides for doubt in side.doubts),
        tuple(_busy(side.recording) for side in busy),
        tuple(_change(changed, median) for changed in unsure),
    )


# ---- busy machines: what holds of all steps, and of those in which the loop waited least for a processor ----


def _busy(recording: ComparedRecording) -> str:
    return (
        f"{recording.path!r}: the loop's thread was ready to run for {recording.runnable:.0%} of the time, and other threads had the "
        "processors; steps are compared without that time, and changes are listed that the calmest half of the steps has too: "
        "--interleave finds more"
    )


def with_processor(tree: TreeTimes) -> Floats:
    """Durations of the steps without the time in which the loop's thread waited for a processor."""
    seconds: Floats = np.maximum(tree.seconds - np.nan_to_num(tree.runnable), 0)
    return seconds


def _own_times(side: Side) -> Floats:
    """Those of a recording.

    Raises:
        TorchProfError: most steps have no other time.
    """
    seconds = with_processor(side.tree)
    if not np.median(seconds) > 0:
        raise TorchProfError(
            f"{side.recording.path!r}: the loop waited for a processor throughout most steps: record on a machine with fewer "
            "neighbours, or with longer steps"
        )
    return seconds


def _calm_rows(rows: list[DiffRow], before: TreeTimes, after: TreeTimes) -> list[DiffRow]:
    """The rows with the half of the steps that waited least, and only the part of each step's time in which it had a processor.

    What needs none, such as a sleep, has all of its time: it varies less than half as much as in proportion to that part.
    """
    (first, part), (second, other) = (_calm(tree) for tree in (before, after))
    calm = []
    for row in rows:
        whole = row.before[first], row.after[second]
        parts = whole[0] * part, whole[1] * other
        is_apart = sum(map(_variation, whole)) < sum(map(_variation, parts)) / 2
        calm.append(row._replace(before=(whole if is_apart else parts)[0], after=(whole if is_apart else parts)[1]))
    return calm


def _variation(times: Floats) -> float:
    """Median absolute deviation of the logarithms of those that are not 0."""
    logs = np.log(times[times > 0])
    return float(np.median(np.abs(logs - np.median(logs)))) if len(logs) else 0.0


def _calm(tree: TreeTimes) -> tuple[Integers, Floats]:
    """The steps that waited least, in their order, at least as many as a comparison needs; and the part with a processor of each."""
    part = with_processor(tree) / tree.seconds
    count = max(len(part) // 2, DIFF_RULES.fewest_steps)
    rows = (
        np.sort(np.argsort(-part, kind="stable")[:count]) if np.isfinite(tree.runnable).any() else np.arange(len(part))
    )
    return rows, part[rows]


def _agreeing(calm: list[ChangedRow], whole: list[ChangedRow]) -> tuple[list[ChangedRow], list[ChangedRow]]:
    """The changes of names that both have, in the same direction, and the others."""
    common = {_direction(changed) for changed in calm} & {_direction(changed) for changed in whole}
    agreed = {name for name, _ in common}
    both = [changed for changed in calm if _direction(changed) in common]
    return both, [changed for changed in (*calm, *whole) if changed.row.name not in agreed]


def _direction(changed: ChangedRow) -> tuple[str, bool]:
    """The name, and whether it takes more time."""
    return changed.row.name, bool(undisturbed(changed.row.after) > undisturbed(changed.row.before))


# ---- reading ----


class Side(NamedTuple):
    """A recording, read."""

    recording: ComparedRecording
    tree: TreeTimes
    doubts: list[str]
    """Reasons why its times are not the program's."""
    problems: list[str]
    """What could not be read."""


def check_alike(before: Side, after: Side) -> None:
    """Raises TorchProfError if one recording has operators and the other only steps and phases."""
    names = [{path[-1] for path in side.tree.paths if path} for side in (before, after)]
    has_more = [any(not name.startswith(PHASE_PREFIX) for name in of_side) for of_side in names]
    if all(names) and has_more[0] != has_more[1]:
        more, less = (before, after) if has_more[0] else (after, before)
        raise TorchProfError(
            f"{more.recording.path!r} has operators, labels or modules, {less.recording.path!r} steps and phases only, so that times of the two "
            "are not of the same: record both with one --detail"
        )


def read_side(paths: Sequence[str], watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None) -> Side:
    """Reads a recording of one or several files.

    Raises:
        TorchProfError: a file cannot be read, or has too few steps.
    """
    events = read_events(list(paths), watch)
    step_list = steps_of(paths[0], events)
    tree = TreeTimes(events, step_list, DIFF_RULES.warm_up_steps)
    if len(tree.seconds) < DIFF_RULES.fewest_steps:
        raise TorchProfError(
            f"{paths[0]!r} has {len(tree.seconds)} training steps (the first {DIFF_RULES.warm_up_steps} of a program left out), and "
            f"{DIFF_RULES.fewest_steps} are needed to compare it: record more steps"
        )
    is_known = np.isfinite(tree.runnable)
    runnable = tree.runnable[is_known].sum() / max(tree.seconds[is_known].sum(), 1e-9)
    recording = ComparedRecording(
        paths[0], len(tree.seconds), float(np.median(tree.seconds)), rare_share(tree), float(runnable)
    )
    return Side(recording, tree, _doubts(paths[0], step_list), events.problems)


def _doubts(path: str, step_list: StepList) -> list[str]:
    """Returns doubts that ``explain`` has too: dropped events, duplicate steps."""
    doubts = []
    for process in step_list.processes.values():
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
