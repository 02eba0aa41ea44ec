"""Steps of a loop whose trace marks none, from what repeats in it: steps of an optimizer, else batches of a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Array

_OPTIMIZER, _LOADER = "Optimizer.step#", "enumerate(DataLoader)#"
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


def may_repeat(name: str) -> bool:
    """Whether events of this name may be those between which steps are."""
    return name.startswith((_OPTIMIZER, _LOADER))


def repeating_steps(names: Sequence[str], events: EventTimes, among: Array) -> RepeatingSteps | None:
    """Returns the steps between the optimizer's steps, or between the batches of a loader if there is no optimizer; None if neither repeats.

    What is before the first of these events and after the last is in no step. Of several optimizers, the one with the fewest steps
    counts, and of those with as many the one that is last.

    Args:
        names: the names.
        events: of one process or several.
        among: the events of one process whose names :func:`may_repeat`.
    """
    for prefix, times, edge in ((_OPTIMIZER, events.end, "end"), (_LOADER, events.start, "begin")):
        is_mark = np.array([names[number].startswith(prefix) for number in events.name[among].tolist()], np.bool_)
        own = _repeated(events, among[is_mark])
        if own.size:
            name, thread = (column[own[0]].item() for column in (events.name, events.thread))
            rule = f"no step is marked: each is from the {edge} of one {names[name]} to that of the next"
            return RepeatingSteps(times[own][:-1], times[own][1:], thread, rule)
    return None


def _repeated(events: EventTimes, marks: Array) -> Array:
    """The events of the name that repeats, by start, on the thread with the most of them; none if no name does."""
    if not marks.size:
        return marks
    marks = marks[events.thread[marks] == np.bincount(events.thread[marks]).argmax()]
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    latest = np.maximum.accumulate(events.end[marks])
    marks = marks[np.append([True], events.start[marks[1:]] >= latest[:-1])]  # not those inside another
    numbers, first, counts = np.unique(events.name[marks], return_index=True, return_counts=True)
    repeats = np.flatnonzero(counts >= _FEWEST)
    if not repeats.size:
        return marks[:0]
    chosen = numbers[repeats[np.lexsort((-first[repeats], counts[repeats]))[0]]]
    repeated: Array = marks[events.name[marks] == chosen]
    return repeated
