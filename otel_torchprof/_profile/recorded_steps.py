"""Where the steps of a profile begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import Kind
from otel_torchprof._process import threads
from otel_torchprof._spans.step_spans import RecordedStep
from otel_torchprof._tree.tree import STEP_PREFIX

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Array, Batch


def step_labels(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which events are the labels of steps, which have spans of their own (of one name for all, as spans should)."""
    found = np.zeros(len(batch), dtype=np.bool_)
    labels = np.flatnonzero(batch["kind"] == Kind.LABEL)
    names = batch["name"][labels]
    steps = [name for name in distinct_values(names).tolist() if batch.names[name].startswith(STEP_PREFIX)]
    found[labels[np.isin(names, steps)]] = True
    return found


class StepMarks:
    """Marks between steps, in windows of time in which they are recorded. For one thread at a time."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []

    def open(self, number: int, at: int) -> None:
        """A window opens, within a step."""
        self._windows.append(_Window(number, at))

    def mark(self, number: int, at: int) -> None:
        """The next step begins within the window that is open, if one is; it may be the one that the window opened in."""
        window = self._windows[-1] if self._windows else None
        if window is not None and window.end is None and window.marks[-1][0] != number:
            window.marks.append((number, at))
            window.thread = threads.get_ident()

    def close(self, at: int) -> None:
        """The window that is open ends."""
        if self._windows and self._windows[-1].end is None:
            self._windows[-1].end = at

    def clear(self) -> None:
        """Forgets all windows."""
        self._windows.clear()

    def steps(self, began: Array, *, labelled: bool) -> list[RecordedStep]:
        """The steps of all windows, which are closed; none where no step was ever marked, unless they are ``labelled``.

        ``began`` are the starts of the events: a loop that ends with a mark opens a last step in which nothing happens,
        and a schedule may end with a window in which nothing does; both are left out.
        """
        if not labelled and all(len(window.marks) == 1 for window in self._windows):
            return []
        found = []
        for window in self._windows:
            steps = window.steps()
            last = steps[-1]
            if (labelled or len(steps) > 1) and not ((began >= last.start) & (began <= last.end)).any():
                steps.pop()
            found += steps
        return found


class _Window:
    def __init__(self, number: int, at: int) -> None:
        self.marks = [(number, at)]
        self.end: int | None = None
        self.thread = threads.get_ident()

    def steps(self) -> list[RecordedStep]:
        ends = [at for _, at in self.marks[1:]] + [max(self.end or 0, self.marks[-1][1])]
        return [RecordedStep(number, at, end, self.thread) for (number, at), end in zip(self.marks, ends, strict=True)]
