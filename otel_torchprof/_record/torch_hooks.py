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
"""Keys of this package's hooks in torch's dictionary. Torch's own keys count up from 0; negative ones do not collide with them."""


class OptimizerHooks:
    """Calls back after every step of an optimizer.

    Has one callback. Install and remove it in one thread; optimizers may step in others meanwhile. Torch calls it inside its
    label for the step (``Optimizer.step#...``), before that ends. All instances share one hook of torch: torch iterates over its
    dictionary of hooks while it calls them, so adding or removing one in another thread raises RuntimeError in the training
    loop, unless the last hook is running. Hence only the first instance adds the hook, and only the last removes it.
    """

    def __init__(self) -> None:
        self._hook: _Hook | None = None

    def install(self, callback: Callable[[Any], None]) -> None:
        """Registers ``callback(optimizer)``, replacing an earlier one. Its first exception is logged, later ones are ignored.

        Raises:
            ImportError: torch is not installed.
        """
        self.install_bare(_post_hook(callback))

    def install_bare(self, hook: _Hook) -> None:
        """Registers ``hook(optimizer, args, kwargs)``, replacing an earlier one. It must not raise: the training loop would get it.

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
    """The hook in torch for all optimizers; calls the hooks of all instances in the order of their installation."""

    def __init__(self) -> None:
        self._called: tuple[_Hook, ...] = ()
        self._lock = threads.RLock()  # a signal handler may shut down in the middle

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if python_sources.in_graph():  # compiled code cannot contain the hooks
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
