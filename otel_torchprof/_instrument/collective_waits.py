"""How long a rank waits in collectives, per training step and group: the rank that arrives last waits least."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._model.averages import OTHER
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import current_names
from otel_torchprof.errors import TorchLibraryError
from otel_torchprof.health import ON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from otel_torchprof._model.step_spans import StepSpan
    from otel_torchprof._native.torch_library import CollectiveTiming

MOST_GROUPS = 16
"""Groups with series of their own; the time in all others is one sum."""
_NOT_BUILT = (
    "the library that reports collectives is not built; build it once per machine: otel-torchprof build, or record "
    "with detail='ops'"
)


def _timing() -> CollectiveTiming:
    """Begins to time collectives; builds nothing, since a build takes the processors of a running job.

    Raises:
        TorchLibraryError: the library is not there.
    """
    torch = torch_library.installed_torch()
    if torch is None or not torch_library.is_built(torch):
        raise TorchLibraryError(_NOT_BUILT)
    return torch_library.load().time_collectives()


class CollectiveWaits:
    """Collectives of one recording, drain after drain. Not thread-safe; memory is bounded.

    Begins with the first step of a process that has a process group; other processes load nothing.

    Args:
        begin: begins to time collectives.
    """

    def __init__(self, begin: Callable[[], CollectiveTiming] = _timing) -> None:
        self._begin = begin
        self._timing: CollectiveTiming | None = None
        self._times: npt.NDArray[Any] = np.empty(0, torch_library.COLLECTIVE_TIME)
        self._groups: dict[int, str] = {}
        self._state = ""

    @property
    def state(self) -> str:
        """For the health report; empty without a process group."""
        return self._state

    def of_steps(self, steps: Sequence[StepSpan]) -> Iterator[tuple[StepSpan, str, float]]:
        """Yields for steps that have ended, each group that had collectives in them: step, name of the group, seconds.

        The seconds in which at least one collective of the group was called and not complete; overlapping ones count once.
        """
        timing = self._running() if steps else None
        if timing is None:
            return
        self._times = np.concatenate((self._times, timing.take()))[-torch_library.MOST_COLLECTIVES :]
        bounds = np.array([(step.start, step.end) for step in steps], dtype=np.int64)
        groups = np.array([self._group(group) for group in self._times["group"].tolist()], dtype=np.object_)
        for name in sorted(set(groups.tolist())):
            covered = _covered(self._times[groups == name], bounds)
            for at in np.flatnonzero(covered).tolist():
                yield steps[at], name, float(covered[at]) / 1e9
        self._times = self._times[self._times["end"] > bounds.max()]

    def _running(self) -> CollectiveTiming | None:
        if not self._state and _has_process_group():
            try:
                self._timing, self._state = self._begin(), ON
            except TorchLibraryError as error:
                self._state = f"off: {error}"
        return self._timing

    def _group(self, name: int) -> str:
        if name not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                return OTHER
            self._groups[name] = current_names()[name]
        return self._groups[name]

    def stop(self) -> None:
        """Ends the timing; a later step begins it again."""
        timing, self._timing, self._state = self._timing, None, ""
        if timing is not None:
            timing.stop()
        self._times = self._times[:0]


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _covered(times: npt.NDArray[Any], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each pair of bounds, ns between them that are in at least one of the intervals."""
    times = times[np.argsort(times["start"], kind="stable")]
    latest = np.maximum.accumulate(times["end"])
    first = np.flatnonzero(np.concatenate(([True], times["start"][1:] > latest[:-1])))
    start = times["start"][first]
    end = latest[np.concatenate((first[1:] - 1, [len(times) - 1]))]
    before = np.concatenate(([0], np.cumsum(end - start)))
    at = np.searchsorted(start, bounds, side="right") - 1
    inside = np.where(at >= 0, np.minimum(bounds, end[at]) - start[at], 0)
    until: npt.NDArray[np.int64] = np.where(at >= 0, before[at], 0) + inside
    covered: npt.NDArray[np.int64] = until[:, 1] - until[:, 0]
    return covered
