"""The memory timeline as a page: a drawing and its legend in one file, which needs nothing else to be shown."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._tree.memory_changes import Action, Category

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._tree.memory_changes import Changes

Array = npt.NDArray[Any]

_COLUMNS = 1000
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))

_COLOURS = {
    Category.PARAMETER: "darkgreen",
    Category.OPTIMIZER_STATE: "goldenrod",
    Category.INPUT: "black",
    Category.TEMPORARY: "mediumpurple",
    Category.ACTIVATION: "red",
    Category.GRADIENT: "mediumblue",
    Category.AUTOGRAD_DETAIL: "royalblue",
    Category.UNKNOWN: "grey",
}
"""Torch's, in the order in which they are stacked, from below."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Memory timeline of {device}</title></head>
<body style="font-family: sans-serif">
<h1 style="font-size: 1.2em">Memory timeline of {device}</h1>
<p>Most in use: {most} {unit}, {blocks} blocks allocated, {before} {unit} there before.</p>
{notes}<svg viewBox="-90 -10 1270 470" width="100%" role="img" aria-label="bytes in use over time, by category">
{areas}
<path d="M0 0V400H1000" fill="none" stroke="black"/>
{marks}
<text x="500" y="445" text-anchor="middle">Time (ms)</text>
<text x="-70" y="200" text-anchor="middle" transform="rotate(-90 -70 200)">Memory ({unit})</text>
{legend}
</svg>
</body></html>
"""


def page(changes: Changes, time: Array, used: Array, device: str, notes: Sequence[str]) -> str:
    """The page.

    Args:
        changes: what happened on the device.
        time: us, rising, and ...
        used: ... for each the bytes in use by category.
        device: its name.
        notes: what a reader should know.
    """
    begin, span = (int(time[0]), max(int(time[-1] - time[0]), 1)) if len(time) else (0, 1)
    most = int(used.sum(axis=1).max(initial=0))
    unit, size = next(((name, size) for name, size in _UNITS if most >= size), _UNITS[-1])
    return _PAGE.format(
        device=html.escape(device),
        most=f"{most / size:.3f}",
        unit=unit,
        blocks=int((changes.action == Action.CREATE).sum()),
        before=f"{int(changes.bytes[changes.action == Action.PREEXISTING].sum()) / size:.3f}",
        notes="".join(f"<p>{html.escape(note)}</p>\n" for note in notes),
        areas="\n".join(_areas((time - begin) / span, used / max(most, 1))),
        marks="\n".join(_marks(span / 1000, most / size)),
        legend="\n".join(_legend(used, unit, size)),
    )


def _areas(across: Array, up: npt.NDArray[np.float64]) -> Iterator[str]:
    """One staircase upon the other; of the changes within one column of the picture the highest is drawn."""
    column = (across * _COLUMNS).astype(np.int64)
    first = np.flatnonzero(np.append(True, column[1:] != column[:-1])) if len(column) else np.empty(0, dtype=np.int64)
    highest = _highest(up.sum(axis=1), first)
    edges = np.concatenate((np.zeros((len(first), 1)), np.cumsum(up[highest], axis=1)), axis=1)
    x = np.append(column[first], _COLUMNS).tolist()
    for category, colour in _COLOURS.items():
        lower, upper = (400 - 400 * edges[:, category + side] for side in (0, 1))
        if (lower > upper).any():
            yield f'<path d="{_outline(x, lower, upper)}" fill="{colour}" fill-opacity="0.7" stroke="none"/>'


def _highest(total: Array, first: Array) -> npt.NDArray[np.int64]:
    """Of each run that begins at one of the places, the place of its highest value."""
    if not len(first):
        return first
    run = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(total))))
    order = np.lexsort((total, run))
    last: npt.NDArray[np.int64] = order[np.append(first[1:], len(total)) - 1]
    return last


def _outline(x: list[int], lower: Array, upper: Array) -> str:
    forth = [f"V{y:.1f}H{end}" for y, end in zip(upper.tolist(), x[1:], strict=True)]
    back = [f"V{y:.1f}H{begin}" for y, begin in zip(lower[::-1].tolist(), x[-2::-1], strict=True)]
    return f"M{x[0]} {lower[0]:.1f}{''.join(forth)}{''.join(back)}Z"


def _marks(width: float, height: float) -> Iterator[str]:
    for part in range(5):
        x, y = 250 * part, 400 - 100 * part
        yield f'<text x="{x}" y="420" text-anchor="middle">{width * part / 4:.2f}</text>'
        yield f'<text x="-8" y="{y + 4}" text-anchor="end">{height * part / 4:.2f}</text>'


def _legend(used: npt.NDArray[np.int64], unit: str, size: int) -> Iterator[str]:
    """A line for each category that is there, the upper ones first, with the most that it ever had."""
    displayed = [category for category in reversed(_COLOURS) if used[:, category].any()]
    for line, category in enumerate(displayed):
        y, most = 10 + 34 * line, int(used[:, category].max()) / size
        yield f'<rect x="1015" y="{y}" width="14" height="14" fill="{_COLOURS[category]}" fill-opacity="0.7"/>'
        yield f'<text x="1035" y="{y + 12}" font-size="13">{category.name}<tspan x="1035" dy="15" font-size="11">'
        yield f"most {most:.3f} {unit}</tspan></text>"
