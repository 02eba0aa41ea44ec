"""``KinetoStepTracker``: the global step of the training loop, on which all counters agree.

There is one tracker. Once torch's profiler is imported it is torch's, which torch's hooks drive as well and which
notifies Kineto (and so a daemon that profiles on demand) of every new step. Before that, and without torch, it is kept
here; its counts are handed over later, without notifying Kineto of steps before the import.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.joined import without
from otel_torchprof._columns.phases import PEAK, RESIDENT
from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._model.steps import memory_of
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.python_sources import usage_now
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._process import process_changes, threads
from otel_torchprof._record.step_marks import StepTracker
from otel_torchprof._record.torch_hooks import OptimizerHooks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Array, Batch

__all__ = ["KinetoStepTracker", "OptimizerSteps", "ProfilerSteps"]

_PROFILER_STEP = "ProfilerStep"
"""Requester under which torch counts the steps of profiles."""

_numbers = itertools.count(1)

_OPTIMIZER = "Optimizer"
"""Requester under which torch counts the steps of optimizers."""


class _OwnTracker:
    """The methods of torch's class, without torch."""

    def __init__(self) -> None:
        self._current_step = 0
        self._step_dict: dict[str, int] = {}

    def init_step_count(self, requester: str) -> None:
        self._step_dict[requester] = self._current_step

    def erase_step_count(self, requester: str) -> bool:
        return self._step_dict.pop(requester, None) is not None

    def increment_step(self, requester: str) -> int:
        self._step_dict[requester] = self._step_dict.get(requester, self._current_step) + 1
        latest = max(self._step_dict.values())
        if latest - self._current_step > 1:
            warnings.warn(
                "Profiler step count has increased more than 1 - "
                f"current_step = {self._current_step} step dict =  {self._step_dict}",
                stacklevel=3,
            )
        self._current_step = max(latest, self._current_step)
        return self._current_step

    def current_step(self) -> int:
        return self._current_step

    def hand_over(self, torchs: Any) -> None:
        """Moves the counts to torch's tracker, and restarts at zero."""
        for requester, count in self._step_dict.items():
            torchs._step_dict[requester] = max(torchs._step_dict.get(requester, 0), count)  # noqa: SLF001
        torchs._current_step = max(torchs._current_step, self._current_step)  # noqa: SLF001
        self._current_step, self._step_dict = 0, {}


class KinetoStepTracker:
    """The global step: each requester counts its own steps, and the maximum is the global step. Mirrors torch's class.

    A program that calls ``profile.step()`` and whose optimizer is counted too is therefore counted once. A new
    requester begins at the current step. Thread-safe: calls take a lock and about a microsecond. Torch's own hooks do
    not take that lock, only the GIL.

    Examples:
        >>> step = otp.KinetoStepTracker.current_step()
        >>> otp.KinetoStepTracker.increment_step("loader") - step
        1
        >>> otp.KinetoStepTracker.erase_step_count("loader")
        True
    """

    _lock: ClassVar[threads.RLock] = threads.RLock()
    _own: ClassVar[_OwnTracker] = _OwnTracker()

    @classmethod
    def init_step_count(cls, requester: str) -> None:
        """Sets the count of a requester to the current step, even if it has counted before."""
        with cls._lock:
            cls._tracker().init_step_count(requester)

    @classmethod
    def erase_step_count(cls, requester: str) -> bool:
        """Removes a requester and returns whether it existed. The current step stays."""
        with cls._lock:
            return bool(cls._tracker().erase_step_count(requester))

    @classmethod
    def increment_step(cls, requester: str) -> int:
        """Counts a step of a requester and returns the current step.

        Notifies Kineto of every new step. Warns (UserWarning) if the step increases by more than one.
        """
        with cls._lock:
            return int(cls._tracker().increment_step(requester))

    @classmethod
    def current_step(cls) -> int:
        """Returns the largest count so far."""
        with cls._lock:
            return int(cls._tracker().current_step())

    @classmethod
    def _tracker(cls) -> Any:
        """Torch's tracker if its profiler is imported, else the one kept here."""
        torchs = getattr(sys.modules.get("torch.autograd.profiler"), "KinetoStepTracker", None)
        if torchs is None:
            return cls._own
        if cls._own.current_step() or cls._own._step_dict:  # noqa: SLF001 - of this module
            cls._own.hand_over(torchs)
        return torchs


class ProfilerSteps:
    """The steps that a program reports by ``step()``.

    They count if Kineto's daemon follows steps, as torch's do: if ``KINETO_USE_DAEMON`` is set. Each profile is a
    requester of its own, while torch's profiles share one name, so that two profiles of one loop count its steps once.
    """

    def __init__(self) -> None:
        self._requester = f"{_PROFILER_STEP} otel_torchprof {next(_numbers)}"

    def begin(self) -> None:
        """Starts counting at the current step."""
        KinetoStepTracker.init_step_count(self._requester)

    def step(self) -> None:
        """Counts the next step of the loop."""
        if os.environ.get("KINETO_USE_DAEMON", ""):
            KinetoStepTracker.increment_step(self._requester)

    def end(self) -> None:
        """Stops counting; a second call has no effect."""
        KinetoStepTracker.erase_step_count(self._requester)


class OptimizerSteps:
    """Counts the steps of the program's optimizers, under the requester ``Optimizer``.

    Two optimizers that alternate make one step per round (torch's own hook, which counts every call of either, makes
    two). If torch's hook is installed (``KINETO_USE_DAEMON`` was set when torch was imported), only that one counts.
    Install and remove on one thread. A call of an optimizer costs about a microsecond more.
    """

    def __init__(self) -> None:
        self._hooks = OptimizerHooks()
        self._steps = StepTracker(_optimizers_stepped)

    def install(self) -> None:
        """Registers the hook.

        Raises:
            ImportError: torch is not installed.
        """
        self._hooks.install(self._steps.optimizer_stepped)

    def remove(self) -> None:
        """Removes the hook; no effect if there is none."""
        self._hooks.remove()


def _optimizers_stepped(_number: int, _time: int) -> None:
    if not _torch_counts_optimizers():
        KinetoStepTracker.increment_step(_OPTIMIZER)


def _torch_counts_optimizers() -> bool:
    torchs = getattr(sys.modules.get("torch.profiler"), "_optimizer_post_hook", None)
    hooks = getattr(sys.modules.get("torch.optim.optimizer"), "_global_optimizer_post_hooks", None)
    return torchs is not None and any(hook is torchs for hook in (hooks or {}).values())


def _in_child() -> None:
    KinetoStepTracker._lock = threads.RLock()  # noqa: SLF001 - another thread of the parent may have held it


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)


# ---- begins and ends of the steps of a profile ----


def step_labels(batch: Batch) -> npt.NDArray[np.bool_]:
    """A mask of the events that are labels of steps. Steps have spans of their own, all of the same name."""
    is_step = np.zeros(len(batch), dtype=np.bool_)
    labels = batch.of_kind(Kind.LABEL)
    names = batch["name"][labels]
    steps = [name for name in distinct_values(names).tolist() if batch.names[name].startswith(STEP_PREFIX)]
    is_step[labels[np.isin(names, steps)]] = True
    return is_step


def without_step_labels(batch: Batch) -> Batch:
    """The batch without labels of steps; what was collapsed into these stays, without an event."""
    is_step, reductions = step_labels(batch), batch.reductions
    rest = without(batch, is_step)
    if reductions is None:
        return rest
    event = np.where(np.isin(reductions["event"], batch["id"][is_step]), np.uint64(0), reductions["event"])
    return replace(rest, reductions={**reductions, "event": event})


def _memory() -> tuple[int, int]:
    """Resident memory of the process, now, without the buffers of recordings, which grow with every event; the most so far; -1: unknown."""
    memory = memory_of(usage_now())
    if not memory:
        return -1, -1
    return max(memory[RESIDENT] - recorder_stats().chunk_bytes, 0), memory[PEAK]


class ProfileSteps:
    """Begins of steps, in windows of time in which the profile records. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []

    def open(self, number: int, at: int) -> None:
        """Opens a window, inside step ``number``; ``at`` in Unix ns."""
        self._windows.append(_Window(number, at))

    def mark(self, number: int, at: int) -> None:
        """Notes that a step begins. No effect without an open window, or if the step is the current one."""
        window = self._windows[-1] if self._windows else None
        if window is not None and window.end is None and window.numbers[-1] != number:
            window.numbers.append(number)
            window.starts.append(at)
            window.memory.extend(_memory())
            window.thread = threads.get_ident()

    def close(self, at: int) -> None:
        """Closes the open window, if there is one."""
        if self._windows and self._windows[-1].end is None:
            self._windows[-1].end = at
            self._windows[-1].memory.extend(_memory())

    def clear(self) -> None:
        """Removes all windows."""
        self._windows.clear()

    def steps(self, began: Array, *, labelled: bool) -> list[RecordedStep]:
        """The steps of all windows, which must be closed. Empty if no step was marked, unless steps are ``labelled``.

        Omits the last step of a window if no event started in it, according to the starts ``began``: a loop that ends with
        ``step()`` begins a last step without events, and the last window of a schedule may have none.
        """
        if not labelled and all(len(window.starts) == 1 for window in self._windows):
            return []
        all_steps = []
        for window in self._windows:
            steps = window.steps()
            last = steps[-1]
            if (labelled or len(steps) > 1) and not ((began >= last.start) & (began <= last.end)).any():
                steps.pop()
            all_steps += steps
        return all_steps

    def with_memory(self, steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """The steps with the attributes of the memory of the process at their ends, for their spans."""
        known: dict[int, Mapping[str, Any]] = {}
        for window in self._windows:
            ends = zip(window.starts, window.memory[::2], window.memory[1::2], strict=False)
            known |= {at: {RESIDENT: now, PEAK: most} for at, now, most in ends if now >= 0}
        return [step._replace(attributes=known.get(step.start) or step.attributes) for step in steps]


class _Window:
    def __init__(self, number: int, at: int) -> None:
        # Arrays, of a few bytes per step: what a profile keeps of steps is memory of the process, which it looks at.
        self.numbers, self.starts = array("q", [number]), array("q", [at])
        self.memory = array("q")
        """Two numbers at the end of each step, of :func:`_memory`."""
        self.end: int | None = None
        self.thread = threads.get_ident()

    def steps(self) -> list[RecordedStep]:
        ends = [*self.starts[1:], max(self.end or 0, self.starts[-1])]
        times = zip(self.numbers, self.starts, ends, strict=True)
        return [RecordedStep(number, at, end, self.thread) for number, at, end in times]
