"""``KinetoStepTracker``: the step of the training loop, as those who count it agree on it.

There is one truth. Once torch's profiler is imported it is torch's own tracker, which torch's hooks drive as well and which
tells Kineto (and so a daemon that profiles on demand) of every new step. Before that, and without torch, it is kept here;
what was counted by then is handed over, without telling Kineto of steps that were over before it was there.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from typing import Any, ClassVar

from otel_torchprof._sources.step_counter import StepTracker
from otel_torchprof._sources.torch_hooks import OptimizerHooks

__all__ = ["KinetoStepTracker", "OptimizerSteps", "ProfilerSteps"]

_PROFILER_STEP = "ProfilerStep"
"""The requester under which torch counts the steps of profiles."""

_numbers = itertools.count(1)

_OPTIMIZER = "Optimizer"
"""The requester under which torch counts the steps of optimizers."""


class _OwnTracker:
    """Counts where torch does not: the same methods as torch's class."""

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
        """Leaves to torch's tracker what was counted here, and begins at zero again."""
        for requester, count in self._step_dict.items():
            torchs._step_dict[requester] = max(torchs._step_dict.get(requester, 0), count)  # noqa: SLF001
        torchs._current_step = max(torchs._current_step, self._current_step)  # noqa: SLF001
        self._current_step, self._step_dict = 0, {}


class KinetoStepTracker:
    """The global step: every requester counts its own steps, and the largest count is the step.

    So a program that calls ``profile.step()`` and whose optimizer is counted too is not counted twice. A requester that is
    new begins at the current step. All calls may come from any thread; they take a lock and about a microsecond. Torch's
    own hooks do not take that lock, only Python's.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _own: ClassVar[_OwnTracker] = _OwnTracker()

    @classmethod
    def init_step_count(cls, requester: str) -> None:
        """Lets a requester begin at the current step, also one that has counted before."""
        with cls._lock:
            cls._tracker().init_step_count(requester)

    @classmethod
    def erase_step_count(cls, requester: str) -> bool:
        """Forgets a requester; whether there was one. The current step stays."""
        with cls._lock:
            return bool(cls._tracker().erase_step_count(requester))

    @classmethod
    def increment_step(cls, requester: str) -> int:
        """Counts a step of a requester, and returns the current step.

        Kineto is notified of every new step. A step that jumps by more than one is warned of (UserWarning).
        """
        with cls._lock:
            return int(cls._tracker().increment_step(requester))

    @classmethod
    def current_step(cls) -> int:
        """The largest count so far."""
        with cls._lock:
            return int(cls._tracker().current_step())

    @classmethod
    def _tracker(cls) -> Any:
        """Torch's tracker where its profiler is imported, else the one kept here."""
        torchs = getattr(sys.modules.get("torch.autograd.profiler"), "KinetoStepTracker", None)
        if torchs is None:
            return cls._own
        if cls._own.current_step() or cls._own._step_dict:  # noqa: SLF001 - of this module
            cls._own.hand_over(torchs)
        return torchs


class ProfilerSteps:
    """The steps that a program marks by ``step()``.

    They count where Kineto's daemon follows steps, as torch's do: where ``KINETO_USE_DAEMON`` is set. Each profile is a
    requester of its own, while torch's profiles share one name, so that two profiles over one loop count its steps once.
    """

    def __init__(self) -> None:
        self._requester = f"{_PROFILER_STEP} otel_torchprof {next(_numbers)}"

    def begin(self) -> None:
        """The profile starts: it counts from the current step."""
        KinetoStepTracker.init_step_count(self._requester)

    def step(self) -> None:
        """The loop's next step begins."""
        if os.environ.get("KINETO_USE_DAEMON", ""):
            KinetoStepTracker.increment_step(self._requester)

    def end(self) -> None:
        """The profile stops; a second call does nothing."""
        KinetoStepTracker.erase_step_count(self._requester)


class OptimizerSteps:
    """Lets the program's optimizers count steps, under the requester ``Optimizer``.

    Two optimizers that take turns make one step per round (torch's own hook, which counts every call of either, makes two).
    Where torch's hook is there (``KINETO_USE_DAEMON`` was set when torch was imported) that one counts and this one does
    not. Installing and removing is for one thread. A call of an optimizer costs about a microsecond more.
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
        """Takes the hook out of torch; without effect where there is none."""
        self._hooks.remove()


def _optimizers_stepped(_number: int, _time: int) -> None:
    if not _torch_counts_optimizers():
        KinetoStepTracker.increment_step(_OPTIMIZER)


def _torch_counts_optimizers() -> bool:
    torchs = getattr(sys.modules.get("torch.profiler"), "_optimizer_post_hook", None)
    hooks = getattr(sys.modules.get("torch.optim.optimizer"), "_global_optimizer_post_hooks", None)
    return torchs is not None and any(hook is torchs for hook in (hooks or {}).values())


def _in_child() -> None:
    KinetoStepTracker._lock = threading.RLock()  # noqa: SLF001 - another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)
