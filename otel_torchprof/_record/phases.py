"""Phases of a training loop as events of kind PHASE: data, forward, backward, optimizer, etc."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.phases import GENERATES, Part
from otel_torchprof._columns.schema import Kind
from otel_torchprof._native import python_sources
from otel_torchprof._native.module_names import full_name
from otel_torchprof._process import threads
from otel_torchprof.health import ON

from . import continuous_batching, module_calls, phase_calls
from .compiled_code import leave_out_of_graphs, leave_uncompiled
from .generations import shared as generations
from .source import Source
from .torch_hooks import PHASES

if TYPE_CHECKING:
    import types

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import Session

leave_out_of_graphs(python_sources.optimizer_begin, python_sources.optimizer_end)

_MOST_NAMES = 1024
_root_names: dict[int, str] = {}
"""Names of root modules by ``id()``; some may have been freed since."""
_OPTIMIZERS = "torch.optim.optimizer"


class Phases(Source):
    """The phases of every thread; not in a forked child.

    A phase begins and ends where torch does: see :mod:`~otel_torchprof._record.phase_calls`, torch's hooks of optimizers, and
    :mod:`~otel_torchprof._record.module_calls`. Recording one costs 0.3 us.
    """

    def __init__(self) -> None:
        self._is_on = False

    def start(self, _session: Session) -> None:
        """Installs the hooks. Torch must be imported."""
        core = sys.modules["torch"]
        names = {part: part.event_name for part in Part}
        python_sources.follow_phases(
            tuple(names.get(number, "") for number in range(max(Part) + 1)),  # type: ignore[call-overload]
            core.is_grad_enabled,
            core._C._current_graph_task_id,  # noqa: SLF001 - as torch's checkpointing does
            _running,
            name_root,
        )
        phase_calls.shared.install(self)
        continuous_batching.shared.install(self)
        _hooks.install(self)
        module_calls.shared.install(self, as_events=False)
        self._is_on = True

    @classmethod
    def forked(cls) -> None:
        """Ends it; calls of ``generate`` are forgotten."""
        phase_calls.shared.after_fork_in_child()
        _hooks.after_fork_in_child()
        generations.after_fork_in_child()
        continuous_batching.after_fork_in_child()

    def stop(self) -> None:
        """Removes hooks and wrappers."""
        module_calls.shared.remove(self)
        _hooks.remove(self)
        continuous_batching.shared.remove(self)
        phase_calls.shared.remove(self)

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with the names of root modules and facts about calls of ``generate``."""
        rows = batch.of_kind(Kind.PHASE)
        rows = rows[np.isin(batch["fwd_thread"][rows], GENERATES)]
        known = generations.known_among(batch["id"][rows].tolist())
        return replace(batch, roots=_root_names.copy(), generations=known)

    def states(self) -> dict[str, str]:
        """Under ``phases``."""
        return {"phases": ON if self._is_on else "off: not started"}

    def notes(self) -> list[str]:
        """A note if calls of root modules cannot be observed; else none."""
        return module_calls.shared.notes()


class _Hooks:
    """Torch's hooks of all optimizers' steps and Python's hook of the garbage collector, installed while there are users."""

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._lock = threads.RLock()  # a signal handler may shut down in the middle

    def install(self, user: object) -> None:
        from torch.optim import optimizer

        with self._lock:
            self._users.add(user)
            optimizer._global_optimizer_pre_hooks[PHASES] = python_sources.optimizer_begin  # noqa: SLF001
            optimizer._global_optimizer_post_hooks[PHASES] = python_sources.optimizer_end  # noqa: SLF001
            if python_sources.phase_collection not in gc.callbacks:
                gc.callbacks.append(python_sources.phase_collection)

    def remove(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            with contextlib.suppress(ValueError):  # not in the list, which other code may have cleared
                gc.callbacks.remove(python_sources.phase_collection)
            module = sys.modules.get(_OPTIMIZERS)
            if module is None:
                return
            for hooks in (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks):  # noqa: SLF001
                hooks.pop(PHASES, None)

    def after_fork_in_child(self) -> None:
        self._lock = threads.RLock()
        for user in list(self._users):
            self.remove(user)


def name_root(module: Any) -> None:
    """Makes phases of this module contain its name, when it is called at top level."""
    if len(_root_names) >= _MOST_NAMES:
        _root_names.clear()
    _root_names[id(module)] = full_name(module)


def _running() -> list[int]:
    """Ids of the optimizers whose steps are running on this thread, innermost first."""
    optimizers = []
    frame: types.FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public API
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _optimizer_file():
            optimizers.append(id(next(itertools.chain(frame.f_locals.get("args", ()), (None,)))))
        frame = frame.f_back
    return optimizers


def _optimizer_file() -> str | None:
    module: Any = sys.modules.get(_OPTIMIZERS)
    return getattr(getattr(module, "Optimizer", None), "profile_hook_step", _running).__code__.co_filename


leave_uncompiled(__name__)
_hooks = _Hooks()
