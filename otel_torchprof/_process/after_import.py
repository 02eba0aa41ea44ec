"""Runs actions when a module is imported, without importing it: torch is optional, heavy, and may come later or never."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import process_changes, threads

if TYPE_CHECKING:
    import types
    from importlib.machinery import ModuleSpec

_logger = logging.getLogger("otel_torchprof")

Action = Callable[[Any], None]


def when_imported(module_name: str, action: Action) -> Callable[[], None]:
    """Runs ``action(module)`` once: now if the module is imported, else in the thread that imports it, right after.

    Registering a waiting action again has no effect.

    Exceptions of the action are logged, and reach neither the import nor the caller. Waits for a module that another thread
    is importing. Thread-safe. While an action waits, every other import costs one dictionary lookup more.

    Args:
        module_name: dotted, ``torch._dynamo``.
        action: gets the module.

    Returns:
        A function that cancels the action; without effect once the action has begun.
    """
    with _lock:
        entry = _added(module_name, action)
        # Never removed: another thread's import that iterates over the list would skip a finder.
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    module = _imported(module_name)
    if module is not None:
        _run_waiting(module_name, module)
    return entry.call_off


def _added(module_name: str, action: Action) -> _AwaitedModule:
    # Removes cancelled entries here: a finalizer may cancel at any moment, so cancelling must not take the lock.
    entries = [awaited for awaited in _waiting.get(module_name, ()) if awaited.action is not None]
    # A caller that was interrupted here could not cancel, and may register the same action again.
    entry = next((awaited for awaited in entries if awaited.action == action), None) or _AwaitedModule(action)
    _waiting[module_name] = [*(awaited for awaited in entries if awaited is not entry), entry]
    return entry


class _AwaitedModule:
    """A waiting action; None after it was cancelled or called."""

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def call_off(self) -> None:
        self.action = None


_lock = threads.Lock()
_waiting: dict[str, list[_AwaitedModule]] = {}
_never_done: set[str] = set()
"""Modules that another thread was importing at the fork: their locks are never released in this process."""


def _imported(name: str) -> types.ModuleType | None:
    module = sys.modules.get(name)
    if module is None or not _is_initializing(module):
        return module
    if name in _never_done:
        return None
    try:
        return importlib.import_module(name)  # waits for the importing thread
    except Exception:  # noqa: BLE001 - the importing thread gets it too
        return None


def _is_initializing(module: types.ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.Lock()
    # From the locks of running imports: a loop over a thousand modules costs 6 ms, as it writes to their memory pages.
    names = getattr(sys.modules["_frozen_importlib"], "_module_locks", sys.modules).copy()
    _never_done.update(name for name in names if _is_initializing(sys.modules.get(name)))


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)


def _run_waiting(name: str, module: types.ModuleType) -> None:
    with _lock:
        entries = _waiting.pop(name, [])
    for entry in entries:
        action, entry.action = entry.action, None
        if action is None:
            continue
        try:
            action(module)
        except Exception:  # must not reach the program's import
            _logger.warning("what was to be done once %s is imported was not: %r", name, action, exc_info=True)


class _Finder:
    """Wraps the loaders of awaited modules, to learn when they are done; does not affect other imports."""

    def __init__(self) -> None:
        self._asking = threads.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        # While it calls the other finders, one of them may do the same, and call this one again.
        if fullname not in _waiting or getattr(self._asking, "name", None) == fullname:
            return None
        self._asking.name = fullname
        try:
            spec = spec_of(fullname, path, target, besides=self)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # importing importlib.abc for the type would load eight modules
        return spec


class _Loader:
    """A module's own loader, followed by the actions that wait for the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        created: types.ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        # Not in find_spec: importlib.util.find_spec finds a module without importing it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run_waiting(module.__name__, module)


_finder = _Finder()


# ---- Finding modules without importing them ----


def spec_of(
    name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None, *, besides: object = None
) -> ModuleSpec | None:
    """Finds a spec as the import system does: asks each finder on ``sys.meta_path``, except ``besides`` and those without specs.

    ``importlib.util.find_spec`` takes the global import lock; an interrupt may leave it taken, and every later import hangs.
    """
    for finder in sys.meta_path.copy():
        find = None if finder is besides else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def is_there(name: str) -> bool:
    """Whether a top-level module is imported, or can be found."""
    return name in sys.modules or spec_of(name) is not None
