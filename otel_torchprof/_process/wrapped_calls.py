"""Functions of other packages, wrapped in place while they have users, and restored afterwards."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from . import threads
from .after_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class WrappedCall(Protocol):
    """A function that is to be wrapped."""

    @property
    def module(self) -> str:
        """The module in which the function is looked up."""

    @property
    def path(self) -> str:
        """The function's name in the module; a method's includes the class."""


class WrappedFunction(NamedTuple):
    """One of which nothing else is to be known."""

    module: str
    path: str


CallT = TypeVar("CallT", bound=WrappedCall)
Wrapper = tuple["Callable[..., Any]", "Callable[[], None]"]
"""A function's replacement, and a function that reduces the replacement to a plain call of the original."""


class WrappedCalls(Generic[CallT]):
    """Wraps functions, for any number of users in a process. Installing and removing is for any thread.

    Args:
        calls: which.
        wrap: makes the wrapper of one.
    """

    def __init__(self, calls: Sequence[CallT], wrap: Callable[[CallT, Callable[..., Any]], Wrapper]) -> None:
        self._calls = calls
        self._make = wrap
        self._users: set[object] = set()
        self._lock = threads.RLock()  # a signal handler may shut down in the middle
        self._awaits_imports = False
        self._wrapped: dict[CallT, _Wrapped] = {}

    @property
    def has_users(self) -> bool:
        """Whether the calls are wrapped for any user."""
        return bool(self._users)

    def install(self, user: object) -> None:
        """Wraps functions of imported modules now, the others once their modules are imported."""
        with self._lock:
            self._users.add(user)
            if not self._awaits_imports:  # once per process: these actions are never cancelled
                self._awaits_imports = True
                for call in self._calls:
                    when_imported(call.module, functools.partial(self._wrap, call))
            for call in self._calls:
                if (module := sys.modules.get(call.module)) is not None:
                    self._wrap(call, module)

    def remove(self, user: object) -> None:
        """Removes a user; after the last one, restores the original unless other code has replaced it since."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            for call, wrapped in list(self._wrapped.items()):
                owner, name = place(call, sys.modules.get(call.module))
                if owner is not None and vars(owner).get(name) is wrapped.now:
                    setattr(owner, name, wrapped.before)
                else:  # other code has replaced the wrapper, and may keep calling it
                    wrapped.retire()
                self._wrapped.pop(call, None)  # a finalizer in between may have removed all

    def after_fork_in_child(self) -> None:
        """Removes all users, which do not record in the child."""
        self.renew_lock()
        for user in list(self._users):
            self.remove(user)

    def renew_lock(self) -> None:
        """Replaces the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threads.RLock()

    def _wrap(self, call: CallT, module: Any) -> None:
        with self._lock:
            owner, name = place(call, module)
            function = None if owner is None else vars(owner).get(name)
            if not self._users or call in self._wrapped or not callable(function):
                return
            # A function with two places gets the same wrapper in both.
            known = (wrapped for wrapped in self._wrapped.values() if function in (wrapped.before, wrapped.now))
            wrapped = next(known, None) or self._made(call, function)
            self._wrapped[call] = wrapped
            setattr(owner, name, wrapped.now)

    def _made(self, call: CallT, function: Any) -> _Wrapped:
        is_static = isinstance(function, staticmethod)
        wrapper, retire = self._make(call, function.__func__ if is_static else function)
        return _Wrapped(function, staticmethod(wrapper) if is_static else wrapper, retire)


def place(call: WrappedCall, module: Any) -> tuple[Any, str]:
    """Returns the object that has the function as an attribute, or None, and the attribute's name."""
    *classes, name = call.path.split(".")
    for part in classes:
        module = getattr(module, part, None)
    return module, name


class _Wrapped(NamedTuple):
    """A function that is wrapped."""

    before: Any
    """The original attribute."""
    now: Any
    """The replacement."""
    retire: Callable[[], None]
    """The wrapper does nothing of its own any more."""
