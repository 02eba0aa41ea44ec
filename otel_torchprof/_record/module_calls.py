"""Calls of modules: events for recordings that request modules; top-level calls are phases, too."""

from __future__ import annotations

import types
from typing import NamedTuple

from otel_torchprof._native import python_sources
from otel_torchprof._native.module_names import ModuleNames
from otel_torchprof._process import threads

from .compiled_code import leave_uncompiled


class ModuleCalls:
    """Observes the calls of all modules, for any number of users in a process. Any thread may call it while modules run in others.

    Torch calls every module through one function, ``Module._call_impl``, whose entry point in the interpreter is replaced. The
    program is not affected: no hook is registered, classes and objects are unchanged, and so are torch's paths for modules
    without hooks and its compiled code. A nested module costs 20 ns if modules are not events.

    An event has the full name of the module within the root (``encoder.layers.2.linear1``), the top-level module of the thread's current
    call; the root has the name of its class. Wrappers of torch (``torch.compile``, ``DataParallel``, ``DistributedDataParallel``)
    and the wrapped module are one module, named as if it were not wrapped. An event includes the module's own hooks. If the module
    raises an Exception, the event has its class; if it ends otherwise (KeyboardInterrupt), the event is unfinished. A
    compiled graph contains no module calls: only the compiled module itself is an event. TorchScript's inner modules are no events.
    """

    def __init__(self) -> None:
        self.names = ModuleNames()
        """Names of the modules called while a user requests them as events."""
        self.is_possible = True
        """Whether calls can be observed in this interpreter."""
        self._users: dict[object, _ModuleRequest] = {}
        self._lock = threads.RLock()  # a signal handler may shut down in the middle

    def install(self, user: object, *, as_events: bool, survives_fork: bool = False) -> None:
        """Starts observing for a user.

        Args:
            user: the object to pass to :meth:`remove`.
            as_events: whether each call is an event; else only top-level calls are phases, for sessions with phases.
            survives_fork: whether it continues in a forked child; else the user need not remove it there.

        Raises:
            ImportError: torch is not installed.
        """
        from torch.nn.modules.module import Module

        with self._lock:
            self._users[user] = _ModuleRequest(as_events, survives_fork)
            if as_events:
                python_sources.follow_modules(self.names.tables, self.names.find)
            function = vars(Module).get("_call_impl")
            self.is_possible = isinstance(function, types.FunctionType) and python_sources.follow_calls(function)

    def remove(self, user: object) -> None:
        """Removes a user, and stops observing after the last one; without effect for others. Open calls still end normally."""
        with self._lock:
            if self._users.pop(user, None) is None and self._users:
                return
            if not any(request.as_events for request in self._users.values()):
                python_sources.leave_modules()
                self.names = ModuleNames()
            if not self._users:
                python_sources.follow_calls(None)

    def notes(self) -> list[str]:
        """A note if this interpreter does not allow observing modules; else none."""
        if self.is_possible:
            return []
        return ["calls of modules are not recorded: this interpreter has no way to follow the calls of a function"]

    def after_fork_in_child(self) -> None:
        """Removes users that do not survive a fork; replaces the lock, which another thread may have held."""
        self._lock = threads.RLock()
        for user in [user for user, request in self._users.items() if not request.survives_fork]:
            self.remove(user)


class _ModuleRequest(NamedTuple):
    """A user's arguments of :meth:`ModuleCalls.install`."""

    as_events: bool
    survives_fork: bool


shared = ModuleCalls()
"""The module calls of the process."""
leave_uncompiled(__name__)
