"""The tracer of Python's calls, on and off."""

from __future__ import annotations

import atexit
import functools
import os
import site
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ffi import python_sources

if TYPE_CHECKING:
    import types

    from .recorder import Session

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_OPEN = tuple(_PACKAGE + name for name in ("labels.py", "dynamo.py", "_legacy_state.py"))
"""Files of this package that call functions of the program: decorators. All else that the package calls is its own affair."""
_EVERY_SESSION = (1 << 32) - 1
_all_threads: set[int] = set()
"""Sessions that want the threads to come."""
_lock = threading.Lock()


class FramesError(Exception):
    """Why calls cannot be recorded; says what is in the way."""


def path_prefixes() -> tuple[str, ...]:
    """What the paths of source files lose: the directories that Python imports from, of two within each other the inner first."""
    torch = sys.modules.get("torch")
    raw = [*site.getsitepackages(), *sys.path, site.getuserbase(), site.getusersitepackages()]
    raw += [str(Path(file).parent.parent)] if (file := getattr(torch, "__file__", None)) else []
    return tuple(path + os.sep for path in sorted({os.path.abspath(path) for path in raw}, reverse=True))  # noqa: PTH100 - must not resolve


def _module_call() -> types.CodeType | None:
    """What runs around every call of a module, once torch is there."""
    module: Any = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    code: types.CodeType | None = None if module is None else module.__call__.__code__
    return code


def _name_of(profiler: Any) -> str:
    """How to speak of somebody's profile function."""
    named = profiler if hasattr(profiler, "__qualname__") else type(profiler)
    return f"{named.__module__}.{named.__qualname__}"


def check() -> None:
    """Finds what is in the way of recording calls on this thread.

    Raises:
        FramesError: there is something; a profile function of another tool's is named, and never displaced.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED") or not python_sources.can_trace_frames:
        raise FramesError("this interpreter does not let calls be traced")
    other = sys.getprofile()
    if other is not None and not isinstance(other, python_sources.Frames):
        raise FramesError(f"sys.setprofile is in use by {_name_of(other)}")


class Tracing:
    """Calls as events of a session that is running: from now on, on every thread that there is, until :meth:`stop`.

    What is on the stack of the calling thread appears as begun now; on another thread's, with the first call or return there.
    Threads that start later are traced where the session has every thread. Costs what the interpreter needs to call a
    profile function, which is most of it, and what is done there.

    Raises:
        FramesError: see :func:`check`.
    """

    def __init__(self, session: Session) -> None:
        check()
        _at_process_changes()
        self._consumer = session.consumer
        self.new_threads_tool = _follow_new_threads(self._consumer) if session.all_threads else ""
        """What profiles the threads that start from now on, where that is another tool; it keeps them."""
        self.passed_over = _start(self._consumer)
        """Threads that have another tool's profile function, and keep it."""
        self.displaced = 0
        """Threads that another tool had taken by the time of the stop."""

    def stop(self) -> None:
        """Ends it, from any thread."""
        self.displaced = python_sources.stop_frames(self._consumer)
        _leave_new_threads({self._consumer})


def _start(consumer: int) -> int:
    try:
        passed_over: int = python_sources.start_frames(consumer, path_prefixes(), _PACKAGE, _OPEN, _module_call())
    except Exception as error:  # an audit hook may raise anything; the program is to go on without our stacks
        _leave_new_threads({consumer})
        raise FramesError(f"the interpreter refused: {error!r}") from error
    return passed_over


def _follow_new_threads(consumer: int) -> str:
    """Has threads traced that start later; the name of the tool that has them already, and keeps them."""
    with _lock:
        installed = threading.getprofile()
        if installed is not None and installed is not python_sources.trace_new_thread:
            return _name_of(installed)
        threading.setprofile(python_sources.trace_new_thread)
        _all_threads.add(consumer)
        return ""


def _leave_new_threads(consumers: set[int]) -> None:
    with _lock:
        if not _all_threads & consumers:
            return
        _all_threads.difference_update(consumers)
        if not _all_threads and threading.getprofile() is python_sources.trace_new_thread:
            threading.setprofile(None)


def _off() -> None:
    python_sources.stop_frames(_EVERY_SESSION)
    _leave_new_threads(set(_all_threads))


def _off_in_child() -> None:
    global _lock  # noqa: PLW0603 - whoever held it is not in this process
    _lock = threading.Lock()
    _off()


@functools.cache
def _at_process_changes() -> None:
    """Off in forked children, and before the interpreter is taken down."""
    os.register_at_fork(after_in_child=_off_in_child)
    atexit.register(_off)
