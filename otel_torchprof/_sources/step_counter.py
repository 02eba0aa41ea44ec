"""Steps of a training loop: numbered once for the process, by the program itself or by its optimizers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads

Boundary = Callable[[int, int], None]


class StepTracker:
    """Tells where a step ends and the next one begins.

    Step 0 runs from the start of the program to the first boundary. The program marks boundaries itself by
    :meth:`step`; until it does so for the first time, its optimizers do: each counts its own calls, and a new step begins
    when one of them gets beyond the step that is running. So two optimizers that take turns (GAN) make one step per round,
    and gradient accumulation makes one per call of the optimizer. An optimizer that is new, or has fallen behind, joins
    the step that is running, unless the optimizer that began it is freed: a program may make a new one for every step.

    Thread-safe. A boundary costs about a microsecond and what ``on_boundary`` costs.

    Args:
        on_boundary: called with the number of the step that begins and the time, Unix nanoseconds of the recorder's clock,
            in the thread that came upon the boundary, one call at a time. What it raises goes to the caller of
            :meth:`step` or :meth:`optimizer_stepped`.
        clock: what tells the time.
    """

    def __init__(self, on_boundary: Boundary, *, clock: Callable[[], int] = now_ns) -> None:
        self._on_boundary = on_boundary
        self._clock = clock
        self._lock = threads.RLock()
        self._number = 0
        self._explicit = False
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._beginner: weakref.ref[Any] | None = None

    @property
    def number(self) -> int:
        """The step that is running."""
        return self._number

    def step(self) -> None:
        """Ends the running step; from the first call on, optimizers begin no steps any more."""
        with self._lock:
            self._explicit = True
            self._begin_next()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has finished a step of its own. Keeps no reference to it that holds it alive."""
        with self._lock:
            if self._explicit:
                return
            count = max(self._counts.get(optimizer, 0) + 1, self._number)
            if count == self._number and self._beginner is not None and self._beginner() is None:
                count += 1
            self._counts[optimizer] = count
            if count > self._number:
                self._beginner = weakref.ref(optimizer)
                self._begin_next()

    def expects_steps(self) -> bool:
        """Whether the program trains: a boundary has come, or an optimizer was ever made, by which one may come."""
        return self._number > 0 or optimizers_were_made()

    def _begin_next(self) -> None:
        self._number += 1
        self._on_boundary(self._number, self._clock())


def optimizers_were_made() -> bool:
    """Whether an optimizer was ever made. Imports nothing; microseconds, since it looks at every class of optimizer."""
    return any(_has_instances(kind) for kind in _optimizer_classes())


def _optimizer_classes() -> Iterator[type]:
    module = sys.modules.get("torch.optim.optimizer")
    found = [getattr(module, "Optimizer", None)]
    while found:
        kind = found.pop()
        if kind is not None:
            yield kind
            found.extend(kind.__subclasses__())


def _has_instances(kind: type) -> bool:
    # Torch wraps the step function of a class, and marks it, when the first optimizer of that class is made: the hooks of
    # optimizers are called in the wrapper.
    return getattr(vars(kind).get("step"), "hooked", False) is True
