"""The flag that code reads before it labels: true while a profile of this package runs.

``torch.autograd.profiler._is_profiler_enabled`` is a flag, ``torch.autograd._profiler_enabled`` a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import process_changes, threads
from .after_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable


class _ProfilerFlag:
    """Counts the running profiles of this package, and keeps torch's flag true meanwhile. Thread-safe.

    Torch has one flag, which each of its profilers sets, and the first one that stops clears. So the function that sets it is replaced
    while a profile of this package runs; it stores the value that torch sets, for the time after.
    """

    def __init__(self) -> None:
        self._lock = threads.RLock()
        self._users: set[object] = set()
        self._holding = False
        self._torchs = False
        self._module: Any = None
        self._original: Callable[[bool], None] | None = None
        """The function that was replaced; None while none is."""
        self._call_off: Callable[[], None] = lambda: None
        self._question = _Question()

    def up(self, user: object) -> None:
        """Reports that a profile begins to record."""
        with self._lock:
            first = not self._users
            self._users.add(user)
        # Not under the lock: an import in another thread may hold the module's lock and wait for this one.
        if first:
            self._call_off = when_imported("torch.autograd.profiler", self._take)
            self._question.take()

    def down(self, user: object) -> None:
        """Reports that a profile has stopped; repeated calls have no effect."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._call_off()
                self._question.give_back()
                self._give_back()

    def forget(self) -> None:
        """Forgets all running profiles (in a forked child, which records nothing)."""
        self._lock = threads.RLock()
        self._users.clear()
        self._question.give_back()
        self._give_back()

    def _take(self, module: Any) -> None:
        with self._lock:
            if not self._users or self._holding:
                return
            self._holding = True
            self._torchs = bool(module._is_profiler_enabled)  # noqa: SLF001 - torch's name
            if self._original is None:
                self._module, self._original = module, module._set_is_profiler_enabled  # noqa: SLF001
                module._set_is_profiler_enabled = self._set  # noqa: SLF001
            module._is_profiler_enabled = True  # noqa: SLF001

    def _set(self, enable: bool) -> None:
        """Replaces torch's function. Torch's profilers may still call it after the last profile of this package stopped."""
        with self._lock:
            self._torchs = enable
            self._module._is_profiler_enabled = enable or self._holding  # noqa: SLF001

    def _give_back(self) -> None:
        if not self._holding:
            return
        module = self._module
        module._is_profiler_enabled = self._torchs  # noqa: SLF001
        # If other code has wrapped it since, it stays, and does what torch's function does.
        if module._set_is_profiler_enabled == self._set:  # noqa: SLF001
            module._set_is_profiler_enabled = self._original  # noqa: SLF001
            self._original = None
        self._holding = False  # last: an interrupted call is repeated


class _Question:
    """Makes ``torch.autograd._profiler_enabled``, which data pipes call, return True between :meth:`take` and :meth:`give_back`."""

    def __init__(self) -> None:
        self._module: Any = None
        self._original: Callable[[], bool] | None = None
        self._call_off: Callable[[], None] = lambda: None

    def take(self) -> None:
        """Replaces torch's function, now or when torch is imported."""
        self._call_off = when_imported("torch.autograd", self._put)

    def _put(self, module: Any) -> None:
        self._module, self._original = module, module._profiler_enabled  # noqa: SLF001 - torch's name
        module._profiler_enabled = _yes  # noqa: SLF001

    def give_back(self) -> None:
        """Restores torch's function, unless other code has replaced it since."""
        self._call_off()
        module = self._module
        if module is not None and module._profiler_enabled is _yes:  # noqa: SLF001
            module._profiler_enabled = self._original  # noqa: SLF001
        self._module = None


def _yes() -> bool:
    return True


profiler_flag = _ProfilerFlag()
"""The process-wide instance."""

# No profile runs in a forked child, and a lock that another thread held would never be released.
process_changes.at_fork(process_changes.Order.STATE, in_child=profiler_flag.forget)
