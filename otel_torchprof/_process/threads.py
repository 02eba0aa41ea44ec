"""The system's threads, locks and waits, even if gevent or eventlet replaces Python's with greenlets, at any time.

A greenlet that waits in native code blocks its whole thread, and locks of greenlets do not work between threads. So this
module creates a second copy of the built-in module of threads, which no one patches and whose locks no one replaces. The
classes have the code of Python's own; threads appear in ``threading.enumerate()`` as any other.
"""

from __future__ import annotations

import _queue
import ctypes
import importlib.util
import os
import sys
import threading
import types
from importlib.machinery import BuiltinImporter
from typing import TYPE_CHECKING, Any

NAME = "otel-torchprof"
"""Name of all threads of this package for the system, by which readers of a black box omit them."""
_SET_NAME = 15
"""Option of ``prctl``."""


def name_thread(name: str) -> None:
    """Names the calling thread for the system, and those that it starts from now on if nobody names them; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, os.fsencode(name), 0, 0, 0)


def _fresh_module(name: str) -> types.ModuleType:
    """A fresh, unpatched copy of a built-in module."""
    spec = BuiltinImporter.find_spec(name)
    assert spec is not None  # noqa: S101 - for mypy
    module = importlib.util.module_from_spec(spec)
    BuiltinImporter.exec_module(module)
    return module


def _original(name: str) -> Any:
    """Returns an unpatched class of ``threading``."""
    if monkey := sys.modules.get("gevent.monkey"):
        return monkey.get_original("threading", name)
    patcher: Any = sys.modules.get("eventlet.patcher")
    is_patched = patcher is not None and patcher.is_monkey_patched("thread")
    return getattr(patcher.original("threading") if is_patched else threading, name)


_thread = _fresh_module("_thread")


_FUNCTIONS = {
    "_allocate_lock": "allocate_lock",
    "_CRLock": "RLock",
    "_make_thread_handle": "_make_thread_handle",
    "_set_sentinel": "_set_sentinel",
    "_start_joinable_thread": "start_joinable_thread",
    "_start_new_thread": "start_new_thread",
    "_ThreadHandle": "_ThreadHandle",
    "get_ident": "get_ident",
    "get_native_id": "get_native_id",
    "Lock": "allocate_lock",
    "RLock": "RLock",
}
"""Functions that ``threading`` uses from ``_thread``, by their name in ``threading``."""
_globals: dict[str, Any] = {
    **vars(threading),
    **{own: getattr(_thread, name) for own, name in _FUNCTIONS.items() if hasattr(_thread, name)},
    "__name__": __name__,
}
"""Globals for the classes below: Python's own table of threads, and unpatched functions."""


def _anew(name: str) -> Any:
    """A class of ``threading`` whose methods have these globals."""
    original: Any = _original(name)

    def with_globals(member: Any) -> Any:
        if isinstance(member, property):
            return property(
                with_globals(member.fget), with_globals(member.fset), with_globals(member.fdel), member.__doc__
            )
        if not isinstance(member, types.FunctionType):
            return member
        function = types.FunctionType(
            member.__code__, _globals, member.__name__, member.__defaults__, member.__closure__
        )
        function.__kwdefaults__ = member.__kwdefaults__
        return function

    own = {key: with_globals(value) for key, value in vars(original).items() if key not in {"__dict__", "__weakref__"}}
    made = _globals[name] = type(name, (original,), own)
    return made


if TYPE_CHECKING:
    from _queue import Empty as Empty  # noqa: PLC0414 - re-exported
    from _queue import SimpleQueue as SimpleQueue  # noqa: PLC0414 - re-exported
    from _thread import RLock as RLock  # noqa: PLC0414 - re-exported
    from threading import Condition as Condition  # noqa: PLC0414 - re-exported
    from threading import Event as Event  # noqa: PLC0414 - re-exported
    from threading import Lock as Lock  # noqa: PLC0414 - re-exported
    from threading import Thread as Thread  # noqa: PLC0414 - re-exported
    from threading import get_ident as get_ident  # noqa: PLC0414 - re-exported
    from threading import get_native_id as get_native_id  # noqa: PLC0414 - re-exported
    from threading import local as local  # noqa: PLC0414 - re-exported
    from time import sleep as sleep  # noqa: PLC0414 - re-exported
else:
    Empty, SimpleQueue = _queue.Empty, _queue.SimpleQueue
    Lock, RLock = _globals["Lock"], _globals["RLock"]
    get_ident, get_native_id = _globals["get_ident"], _globals["get_native_id"]
    local, sleep = _thread._local, _fresh_module("time").sleep  # noqa: SLF001 - as threading does
    Condition, Event = _anew("Condition"), _anew("Event")

    class Thread(_anew("Thread")):
        """A thread named :data:`NAME` for the system, which Python does itself only since 3.14.

        Make it a daemon, or join it: since Python 3.13 the interpreter does not wait for it at exit.
        """

        def run(self) -> None:
            name_thread(NAME)
            super().run()


TIMEOUT_MAX = threading.TIMEOUT_MAX


def get_greenlet_ident() -> int:
    """Ident of the running greenlet if threads are greenlets, else of the thread."""
    return threading.get_ident()


def let_greenlets_run() -> None:
    """Other greenlets of this thread have their turn, for a hundredth of a second."""
    threading.Event().wait(0.01)


def after_fork_in_child() -> None:
    """Renews the lock of the table of threads: another thread of the parent may have held it."""
    _globals["_active_limbo_lock"] = RLock()


after_fork_in_child()  # that of ``threading`` may be a patched lock of greenlets
