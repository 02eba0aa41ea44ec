"""Compares two recordings of a program and reports which parts became slower or faster."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof.errors import TorchProfError

from .compared import QUANTILE, judged, log_and_error, rare_share, rows_of, undisturbed
from .difference import Change, Difference, Recording
from .rank_reading import read_steps
from .rules import DIFF_RULES, RULES
from .tree_times import TreeTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._export.byte_stream import ByteStream

    from .arrays import Floats
    from .compared import Compared
    from .step_list import StepList


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
    recording: Recording
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
        Recording(path, len(tree.seconds), float(np.median(tree.seconds)), rare), tree, _doubts(path, found)
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


def _change(found: Compared, step: float) -> Change:
    row = found.row
    before, after = (float(undisturbed(side)) for side in (row.before, row.after))
    spread = math.exp(QUANTILE * found.error) if math.isfinite(found.error) else math.nan
    ratio = after / before if before else math.nan
    calls, share = (row.calls_before, row.calls_after), (after / math.exp(found.alike) - before) / step
    return Change(row.name, row.path, before, after, ratio / spread, ratio * spread, *calls, share)
