"""Spans that stand for several events: how many, and for how long, by their attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values

from .attribute_keys import AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION, FLOPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.arrays import Integers

_NS = 1e9
REDUCTION_KEYS = (AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION)
"""Attributes of such spans, which have numbers of operations too."""


class Reductions(NamedTuple):
    """The spans with such attributes, one entry each; times in ns."""

    row: npt.NDArray[np.int64]
    calls: npt.NDArray[np.int64]
    """Number of events that an aggregate span replaces; 1 for other spans."""
    duration: npt.NDArray[np.int64]
    """Of an aggregate span the sum over these events."""
    collapsed: npt.NDArray[np.int64]
    collapsed_duration: npt.NDArray[np.int64]
    flops: npt.NDArray[np.int64]
    """Of an aggregate span the sum over these events; -1 if it is not in the file."""


def reductions_of(attributes: Mapping[str, tuple[Integers, Sequence[Any]]], duration: Integers) -> Reductions:
    """The spans that stand for several events.

    Args:
        attributes: by key, rising rows and the value of each.
        duration: of each row.
    """
    given = {key: attributes.get(key, (np.empty(0, np.int64), ())) for key in (*REDUCTION_KEYS, FLOPS)}
    rows = distinct_values(np.concatenate([known for known, _ in given.values()]))
    (is_counted, calls), (is_timed, sums), (_, collapsed), (_, collapsed_sums), (has_flops, flops) = (
        _on_rows(rows, known, [round(value * _NS) for value in values] if key.endswith("duration") else values)
        for key, (known, values) in given.items()
    )
    return Reductions(
        rows,
        np.where(is_counted, calls, 1),
        np.where(is_counted & is_timed, sums, duration[rows]),
        collapsed,
        collapsed_sums,
        np.where(has_flops, flops, -1),
    )


def _on_rows(
    rows: Integers, known: Integers, values: Sequence[int]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which of the rows have a value, and the values, 0 for none."""
    present, of_rows = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.int64)
    places = np.searchsorted(rows, known)
    present[places], of_rows[places] = True, values
    return present, of_rows
