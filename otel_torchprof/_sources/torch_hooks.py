"""What torch calls for us: hooks of modules, which become events, and of optimizers, which mark steps."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from otel_torchprof._native import python_sources
from otel_torchprof._native.module_names import ModuleNames
from otel_torchprof._process import threads

from .compiled_code import leave_out_of_graphs

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

    _Hook = Callable[[Any, Any, Any], None]

_logger = logging.getLogger("otel_torchprof")

_TORCHS_MODULES = "torch.nn.modules.module"
_TORCHS_OPTIMIZERS = "torch.optim.optimizer"
_FIRES_TWICE = "Using `torch.compile(module)` when there are global hooks on modules"
"""What torch warns of: the hooks are called for the wrapper too. These two calls are one event here."""

leave_out_of_graphs(python_sources.module_begin, python_sources.module_end)


class ModuleHooks:
    """Calls of modules as events (kind MODULE), from before a module's own forward hooks to after them.

    An event has the full name of the module in the top-level one that its thread is in, the root
    (``encoder.layers.2.linear1``); the root has the name of its class. Wrappers of torch's (``torch.compile``,
    ``DataParallel``, ``DistributedDataParallel``) and what they wrap are one module, named as if it were not wrapped. A
    module that raises an Exception is marked with its class; one that something else leaves (KeyboardInterrupt) ends,
    unfinished, when the next module of the thread begins. Inside a compiled graph there are no modules any more, so there are no
    events: the module that was compiled is one. TorchScript's inner modules are none either. A model that was compiled with
    the hooks there is compiled once more when it is called without them. Torch cannot ``export(strict=True)`` while there
    are hooks of this kind, whoever's they are.

    There may be any number of these in a process: torch has its hooks while one is installed. Installing and removing is for
    any thread; modules may run in others meanwhile. A call of a module costs 1.4 us for torch's way to call hooks, and 0.25 us
    more while a session requests modules (measured).

    Args:
        survives_fork: whether they stay installed in a forked child; else nobody there has to take them out.
    """

    def __init__(self, *, survives_fork: bool = True) -> None:
        self.survives_fork = survives_fork

    @property
    def names(self) -> ModuleNames:
        """Names of the modules that were called since there are hooks."""
        return _shared.names

    def install(self) -> None:
        """Registers the hooks.

        Raises:
            ImportError: torch is not installed.
        """
        _shared.install(self)

    def remove(self) -> None:
        """Takes the hooks out of torch, if nobody else has them; without effect where there are none.

        Modules that are open then end no more.
        """
        _shared.remove(self)


def without_warning() -> Callable[[], None]:
    """Torch warns no more of global hooks and compiled modules, until what this returns is called."""
    warnings.filterwarnings("ignore", re.escape(_FIRES_TWICE), UserWarning)
    ours = warnings.filters[0]

    def warn_again() -> None:
        # Not there where the program has put other filters in place since then.
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

    return warn_again


class _SharedHooks:
    """The hooks that torch has, and for whom."""

    def __init__(self) -> None:
        self.names = ModuleNames()
        self._users: set[ModuleHooks] = set()
        self._warns_again: Callable[[], None] | None = None
        self._lock = threads.RLock()  # a signal handler may shut down in the middle

    def install(self, user: ModuleHooks) -> None:
        from torch.nn.modules import module as torch_modules

        with self._lock:
            self._users.add(user)
            python_sources.follow_modules(self.names.tables, self.names.find, enclosing_modules)
            if self._are_there():
                return
            self._take_out()  # what an interrupted call of this left
            torch_modules.register_module_forward_pre_hook(python_sources.module_begin)
            torch_modules.register_module_forward_hook(python_sources.module_end, always_call=True)
            self._warns_again = without_warning()

    def remove(self, user: ModuleHooks) -> None:
        with self._lock:
            was_user = user in self._users
            self._users.discard(user)
            if self._users:
                return
            if not self._take_out() and not was_user:
                return
            if self._warns_again is not None:
                self._warns_again()
                self._warns_again = None
            python_sources.leave_modules()
            self.names = ModuleNames()

    def after_fork_in_child(self) -> None:
        self._lock = threads.RLock()
        for user in [user for user in self._users if not user.survives_fork]:
            self.remove(user)

    def _are_there(self) -> bool:
        return all(hook in hooks.values() for hooks, hook in _hooks_of_torch())

    def _take_out(self) -> bool:
        """Not by the handles that torch gives: an interrupt may come before they are kept. Whether there were any.

        Each hook goes last: what an interrupted call has left of it is found by it.
        """
        found = [
            (hooks, key) for hooks, ours in _hooks_of_torch() for key, hook in hooks.copy().items() if hook is ours
        ]
        for hooks, key in found:
            getattr(sys.modules[_TORCHS_MODULES], "_global_forward_hooks_always_called", {}).pop(key, None)
            hooks.pop(key, None)
        return bool(found)


def _hooks_of_torch() -> list[tuple[dict[int, Any], Any]]:
    """Where torch keeps its hooks for all modules, each with what is ours among them; none where torch is not there."""
    module = sys.modules.get(_TORCHS_MODULES)
    if module is None:
        return []
    ours = {"pre_hooks": python_sources.module_begin, "hooks": python_sources.module_end}
    return [(getattr(module, f"_global_forward_{name}"), hook) for name, hook in ours.items()]


def enclosing_modules() -> list[int]:
    """Ids of the modules in whose calls this thread is, top-level first, without the innermost, which has not begun yet."""
    found = []
    frame: types.FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            found.append(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return found[:0:-1]


_shared = _SharedHooks()
os.register_at_fork(after_in_child=_shared.after_fork_in_child)


class OptimizerHooks:
    """Tells of every optimizer that has finished a step.

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
        """Has it called no more; without effect where there is none."""
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
        for hook in self._called:
            hook(optimizer, args, kwargs)

    def replace(self, before: _Hook | None, hook: _Hook | None) -> None:
        with self._lock:
            others = tuple(known for known in self._called if known is not before)
            called = others if hook is None else (*others, hook)
            if called:
                importlib.import_module(_TORCHS_OPTIMIZERS)
            self._called, module = called, sys.modules.get(_TORCHS_OPTIMIZERS)
            # Not by the handle that torch gives: an interrupt may come before it is kept.
            hooks = getattr(module, "_global_optimizer_post_hooks", {})
            there = [key for key, known in hooks.copy().items() if known is self]
            if called and module is not None and not there:
                module.register_optimizer_step_post_hook(self)
            for key in there[1:] if called else there:
                hooks.pop(key, None)

    def after_fork_in_child(self) -> None:
        self._lock = threads.RLock()


_after_steps = _AfterSteps()
os.register_at_fork(after_in_child=_after_steps.after_fork_in_child)


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
