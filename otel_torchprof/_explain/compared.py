"""Two recordings, name by name and path by path: what changed beyond what all changed by, and beyond chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX

from .rules import DIFF_RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrays import Flags, Floats
    from .tree_times import TreeTimes

_NORMAL = 1.4826
"""A median deviation as a standard deviation."""
QUANTILE = 2.1
"""97.5 % of Student's t distribution with 18 degrees of freedom: blocks of two recordings, less one of each."""
_STEP = "(step)"
"""What is in no span of a step."""


class Row(NamedTuple):
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


class Compared(NamedTuple):
    """A row that changed."""

    row: Row
    error: float
    """Standard error of the logarithm of the ratio; infinite where it was not in both recordings."""


def rows_of(before: TreeTimes, after: TreeTimes) -> list[Row]:
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
            kept.append(Row(name, path, times[0], times[1], calls[0], calls[1]))
    return kept


def judged(rows: list[Row], step: float) -> tuple[float, list[Compared]]:
    """By what all names changed alike, as a ratio, and the rows that changed beyond that and beyond chance, the largest first.

    Args:
        rows: of two recordings.
        step: seconds of a step of the first.
    """
    if not rows:
        return 1.0, []
    (before, error), (after, other) = (
        log_medians(np.stack(side)) for side in ([row.before for row in rows], [row.after for row in rows])
    )
    is_both = np.isfinite(before) & np.isfinite(after)
    ratios = np.where(is_both, after, 0) - np.where(is_both, before, 0)
    common, spread = _common(ratios[is_both & _stand_for_names(rows)])
    errors = np.where(is_both, np.sqrt(error**2 + other**2 + spread**2), np.inf)
    beyond = np.abs(ratios - common)
    is_changed = is_both & (beyond > np.log1p(DIFF_RULES.least_change)) & (beyond > DIFF_RULES.deviations * errors)
    is_changed |= ~is_both & np.array([0 in {row.calls_before, row.calls_after} for row in rows])
    difference = np.array([np.median(row.after) - np.median(row.before) for row in rows])
    is_changed &= np.abs(difference) > DIFF_RULES.least_share * step
    order = np.argsort(-np.abs(difference), kind="stable")
    return float(np.exp(common)), [*_once(rows, order[is_changed[order]].tolist(), errors, difference)]


def log_medians(values: Floats) -> tuple[Floats, Floats]:
    """Of rows of steps, or of one: logarithms of the medians, and their standard errors, from blocks of steps that follow one another.

    Steps near one another are alike, so that an error from single steps would be too small.
    """
    blocks = [np.median(block, axis=-1) for block in np.array_split(values, DIFF_RULES.blocks, axis=-1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        found, logs = np.log(np.median(values, axis=-1)), np.log(np.stack(blocks))
        errors = np.std(logs, axis=0, ddof=1) / np.sqrt(len(blocks))
    return found, np.where(np.isfinite(errors), errors, np.inf)


def _keys(path: tuple[str, ...], *, by_name: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a path counts for: itself, and all of its name."""
    if by_name:
        return ((path[-1], ()),) if path and not path[-1].startswith(PHASE_PREFIX) else ()
    return ((path[-1], path), (path[-1], ())) if path else ((_STEP, (_STEP,)),)


def _stand_for_names(rows: list[Row]) -> Flags:
    """One row of each name: all of it, or its one path."""
    several = {row.name for row in rows if not row.path}
    return np.array([not row.path or row.name not in several for row in rows])


def _common(ratios: Floats) -> tuple[float, float]:
    """By what all names changed alike, and how far they are from that: as far as two recordings of one program are apart."""
    if len(ratios) < DIFF_RULES.fewest_names:
        return 0.0, DIFF_RULES.spread
    common = float(np.median(ratios))
    return common, max(_NORMAL * float(np.median(np.abs(ratios - common))), DIFF_RULES.least_spread)


def _once(rows: list[Row], changed: list[int], errors: Floats, difference: Floats) -> Iterator[Compared]:
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
            yield Compared(row, float(errors[place]))
