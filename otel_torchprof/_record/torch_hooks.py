"""Torch's hooks after the steps of all optimizers."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._native import python_sources
from otel_torchprof._process import process_changes, threads

if TYPE_CHECKING:
    from collections.abc import Callable

    _Hook = Callable[[Any, Any, Any], None]

_logger = logging.getLogger("otel_torchprof")

_TORCHS_OPTIMIZERS = "torch.optim.optimizer"
AFTER_STEPS, PHASES = -1, -2
"""Keys of our hooks among torch's. Those that torch gives count up from 0, and are in what a program saves with hooks of its own."""


class OptimizerHooks:
    """Calls back after every step of an optimizer.

    One callback at a time; installing and removing is for one thread, optimizers may step in others meanwhile. Called by torch inside
    its own label for the step (``Optimizer.step#...``), before that ends. Torch has one hook for any number of these: it reads its
    dictionary of them while it calls them, and one that is put in or taken out by another thread meanwhile raises RuntimeError in
    the training loop, unless the last is running. So only the first of these puts one in, and only the last takes it out.
    """

    def __init__(self) -> None:
        self._hook: _Hook | None = None

    def install(self, callback: Callable[[Any], None]) -> None:
        """Registers ``callback(optimizer)``, in place of one registered before. What it raises is logged, once.

        Raises:
            ImportError: torch is not installed.
        """
        self.install_bare(_post_hook(callback))

    def install_bare(self, hook: _Hook) -> None:
        """Registers ``hook(optimizer, args, kwargs)`` with nothing around it, in place of one registered before.

        For one that cannot raise: what it raises would reach the training loop.

        Raises:
            ImportError: torch is not installed.
        """
        before, self._hook = self._hook, hook
        _after_steps.replace(before, hook)

    def remove(self) -> None:
        """Removes the callback; without effect if there is none."""
        hook = self._hook
        if hook is not None:
            _after_steps.replace(hook, None)
        self._hook = None


class _AfterSteps:
    """The hook that torch has for all optimizers, and whom it calls, in the order in which they came."""

    def __init__(self) -> None:
        self._called: tuple[_Hook, ...] = ()
        self._lock = threads.RLock()  # a signal handler may shut down in the middle

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if python_sources.in_graph():  # a graph of a step has no place for what they do
            return
        for hook in self._called:
            hook(optimizer, args, kwargs)

    def replace(self, before: _Hook | None, hook: _Hook | None) -> None:
        with self._lock:
            others = tuple(known for known in self._called if known is not before)
            called = others if hook is None else (*others, hook)
            if called:
                importlib.import_module(_TORCHS_OPTIMIZERS)
            self._called, module = called, sys.modules.get(_TORCHS_OPTIMIZERS)
            hooks = getattr(module, "_global_optimizer_post_hooks", {})
            if called:
                hooks.setdefault(AFTER_STEPS, self)
            else:
                hooks.pop(AFTER_STEPS, None)

    def after_fork_in_child(self) -> None:
        self._lock = threads.RLock()


_after_steps = _AfterSteps()
process_changes.at_fork(process_changes.Order.STATE, in_child=_after_steps.after_fork_in_child)


def _post_hook(callback: Callable[[Any], None]) -> _Hook:
    failed = False

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal failed
        try:
            callback(optimizer)
        except Exception:  # the training loop continues
            if not failed:
                _logger.warning("the step of an optimizer was not taken as a step", exc_info=True)
            failed = True

    return after_step
