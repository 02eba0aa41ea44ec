"""Steps of a loop whose trace marks none, from what repeats in it: steps of an optimizer, else batches of a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Array

_FEWEST = 3
"""Fewest events of a name that repeats."""


class EventTimes(NamedTuple):
    """Columns of events."""

    name: Array
    """Index into the names."""
    start: Array
    end: Array
    thread: Array
    """Numbers of threads, from 0."""


class RepeatingSteps(NamedTuple):
    """Steps that follow each other; times as in the trace."""

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    thread: int
    """Number of the thread of the events between which they are."""
    rule: str
    """Where a step begins and ends, in words."""


def repeating_steps(names: Sequence[str], events: EventTimes, among: Array) -> RepeatingSteps | None:
    """Returns the steps between the optimizer's steps, or between the batches of a loader if there is no optimizer; None if neither repeats.

    What is before the first of these events and after the last is in no step. Of several optimizers, the one with the fewest steps
    counts, and of those with as many the one that is last.

    Args:
        names: the names.
        events: of one process or several.
        among: the events to look at.
    """
    own = _repeated(names, events, among, "Optimizer.step#")
    if own is not None:
        return _between(
            names, events, own, events.end[own], "no step is marked: each is from the end of one {} to that of the next"
        )
    own = _repeated(names, events, among, "enumerate(DataLoader)#")
    rule = "no step is marked: each is from the begin of one {} to that of the next"
    return None if own is None else _between(names, events, own, events.start[own], rule)


def _between(names: Sequence[str], events: EventTimes, own: Array, times: Array, rule: str) -> RepeatingSteps:
    name, thread = (int(column[own[0]]) for column in (events.name, events.thread))
    return RepeatingSteps(times[:-1], times[1:], thread, rule.format(names[name]))


def _repeated(names: Sequence[str], events: EventTimes, among: Array, prefix: str) -> Array | None:
    """The events of the name with this prefix that repeats, by start, on the thread with the most of these events."""
    used = distinct_values(events.name[among]).tolist()
    is_mark = np.zeros(len(names), np.bool_)
    is_mark[[number for number in used if names[number].startswith(prefix)]] = True
    marks = among[is_mark[events.name[among]]]
    if not marks.size:
        return None
    marks = marks[events.thread[marks] == np.bincount(events.thread[marks]).argmax()]
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    latest = np.maximum.accumulate(events.end[marks])
    marks = marks[np.append([True], events.start[marks[1:]] >= latest[:-1])]  # not those inside another
    numbers, first, counts = np.unique(events.name[marks], return_index=True, return_counts=True)
    repeats = np.flatnonzero(counts >= _FEWEST)
    if not repeats.size:
        return None
    chosen = numbers[repeats[np.lexsort((-first[repeats], counts[repeats]))[0]]]
    repeated: Array = marks[events.name[marks] == chosen]
    return repeated
