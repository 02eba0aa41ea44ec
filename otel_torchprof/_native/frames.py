"""Starts and stops the tracer of Python's calls."""

from __future__ import annotations

import contextlib
import opcode
import operator
import os
import site
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from otel_torchprof._columns.batch import WaitingStack
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._process import process_changes, threads

from .ffi import python_sources
from .object_notes import ObjectNotes
from .recorder import thread_known_by

if TYPE_CHECKING:
    import types

    from .recorder import Session

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_WRAPPERS = (
    "_record/labels.py",
    "_record/phase_calls.py",
    "_profile/dynamo.py",
    "_profile/legacy_state.py",
)
_RUNS_SCRIPTS = ("__main__.py", "_cli/main.py", "_cli/run.py", "_cli/run_program.py")
_OPEN = tuple(_PACKAGE + name for name in (*_WRAPPERS, *_RUNS_SCRIPTS))
"""Files of this package that call functions of the program; calls from the other files are not recorded."""
_TORCHS_TRACER = "builtins", "TraceContext"
"""Module and name of the type of ``sys.getprofile()`` on threads that torch.profiler traces with ``with_stack``."""
_TORCHS_REFUSAL = "There is already an active Python tracer. Refusing to register profile functions."
"""Message of torch's own tracer if another one of torch's is active; repeated since users search logs for it."""
_QUIET = ("torch._dynamo.convert_frame.__call__",)
"""Functions recorded without their callees: the compiler of ``torch.compile`` makes ten thousand calls each time."""
_EVERY_SESSION = (1 << 32) - 1
_all_threads: set[int] = set()
"""Sessions that trace threads started later."""
_lock = threads.RLock()  # reentrant: a finalizer that runs while it is held may stop a recording, which takes it
_notes_of_run: weakref.ref[ObjectNotes] | None = None
"""The notes that all sessions of the tracer's run share; they live as long as a session or the tracer uses them."""


class FramesError(Exception):
    """Calls cannot be recorded; the message has the reason."""


def path_prefixes() -> tuple[str, ...]:
    """Returns the prefixes to remove from paths of source files: Python's import directories, inner ones first."""
    torch = sys.modules.get("torch")
    raw = [*site.getsitepackages(), *sys.path, site.getuserbase(), site.getusersitepackages()]
    raw += [str(Path(file).parent.parent)] if (file := getattr(torch, "__file__", None)) else []
    return tuple(path + os.sep for path in sorted({os.path.abspath(path) for path in raw}, reverse=True))  # noqa: PTH100 - must not resolve


def _torchs_code(path: str) -> types.CodeType | None:
    """Returns the code of a function of torch; None before torch is imported."""
    code: types.CodeType | None = None
    with contextlib.suppress(AttributeError):
        code = operator.attrgetter(path)(sys.modules.get("torch")).__code__
    return code


def _name_of(profiler: Any) -> str:
    """Returns the name of a profile function for messages."""
    if (type(profiler).__module__, type(profiler).__name__) == _TORCHS_TRACER:
        return "torch.profiler"
    named = profiler if hasattr(profiler, "__qualname__") else type(profiler)
    return f"{named.__module__}.{named.__qualname__}"


def check() -> None:
    """Checks that calls on this thread can be recorded.

    Raises:
        FramesError: they cannot; the message names the profile function of another tool, which is never replaced.
    """
    if not python_sources.can_trace_frames:
        raise FramesError("this interpreter does not let calls be traced")
    if python_sources.monitors_calls:
        _check_tools()
        return
    other = sys.getprofile()
    if other is not None and not isinstance(other, python_sources.Frames):
        name = _name_of(other)
        refusal = f"{_TORCHS_REFUSAL} " if name == "torch.profiler" else ""
        raise FramesError(f"{refusal}sys.setprofile is in use by {name}")


def _check_tools() -> None:
    """Raises FramesError if this package is no tool of ``sys.monitoring``, and no tool id is free."""
    monitoring: Any = vars(sys)["monitoring"]
    names = [monitoring.get_tool(number) for number in (1, 2, 3, 4, 5)]
    if None not in names and "otel_torchprof" not in names:
        raise FramesError(f"every tool of sys.monitoring is in use: {', '.join(names)}")


class Tracing:
    """Records the calls on all threads as events of a session, from :meth:`start` to :meth:`stop`.

    Calls that are open on a thread at the start are recorded as begun then, at its first call or return; for threads without one
    see :meth:`waiting`. Most of the cost is the interpreter's own for reporting a call.
    """

    def __init__(self, session: Session) -> None:
        self._consumer = session.consumer
        self._begun = False
        self._notes: ObjectNotes | None = _shared_notes()
        self._info = FrameInfo()
        self.new_threads_tool = ""
        """Name of another tool that profiles threads started later, and keeps them; empty for none."""
        self.passed_over = 0
        """Number of threads that have another tool's profile function, and keep it."""
        self.displaced = 0
        """Number of threads whose profile function another tool had replaced by the stop."""

    def start(self, session: Session, filtering: Filtering | None = None) -> None:
        """Starts it; the session must be running. Call :meth:`stop` even if this is interrupted.

        Raises:
            FramesError: see :func:`check`; then nothing was started.
        """
        check()
        self._begun = True
        self.new_threads_tool = _follow_new_threads(self._consumer)
        self.passed_over = _start(session, filtering, self._notes or _shared_notes())

    def waiting(self) -> list[WaitingStack]:
        """Returns the stacks of threads without a call or return since the start.

        Call it before the session stops, so that a thread that continues is still recorded. Costs some microseconds per thread.
        """
        stacks = []
        for ident, os_tid, calls in python_sources.waiting_stacks(self._consumer):
            thread = thread_known_by(ident, os_tid)
            if thread is not None and calls:
                stacks.append(WaitingStack(thread, *zip(*calls, strict=True)))
        return stacks

    def stop(self) -> None:
        """Stops it. Thread-safe; if it is interrupted, a second call does the rest."""
        if self._begun:
            self.displaced = python_sources.stop_frames(self._consumer)
            _leave_new_threads({self._consumer})
            self._begun = False
        if self._notes is not None:
            self._info = self._notes.finish()
            self._notes = None

    def info(self) -> FrameInfo:
        """Returns the metadata of the called objects, so far or as of the stop."""
        notes = self._notes
        return self._info if notes is None else notes.info()


class Filtering(Protocol):
    """Calls that a session leaves out; see ``FrameFilter``."""

    @property
    def max_depth(self) -> int | None:
        """Limit of nested recorded calls per thread."""

    @property
    def c_functions(self) -> bool:
        """Whether C functions are recorded."""

    @property
    def modules_only(self) -> bool:
        """Whether only calls of modules are recorded."""

    @property
    def judges_code(self) -> bool:
        """Whether :meth:`decide` can return False."""

    def decide(self, code: types.CodeType, module_name: str | None, /) -> bool:
        """Whether calls of that code are recorded."""


def pause() -> None:
    """Stops recording new calls of this thread until as many calls of :func:`resume`; open ones continue, and end. Takes 0.1 us."""
    if python_sources.can_trace_frames:
        python_sources.pause_frames()


def resume() -> None:
    """Records new calls of this thread again; without effect if it is not paused."""
    if python_sources.can_trace_frames:
        python_sources.resume_frames()


def _shared_notes() -> ObjectNotes:
    global _notes_of_run  # noqa: PLW0603 - one tracer per process
    with _lock:
        notes = None if _notes_of_run is None else _notes_of_run()
        if notes is None:
            notes = ObjectNotes()
            _notes_of_run = weakref.ref(notes)
        return notes


def _start(session: Session, filtering: Filtering | None, notes: ObjectNotes) -> int:
    consumer = session.consumer
    try:
        passed_over: int = python_sources.start_frames(
            consumer,
            path_prefixes(),
            _PACKAGE,
            _OPEN,
            _torchs_code("nn.Module.__call__"),
            _torchs_code("optim.Optimizer._optimizer_step_code"),
            _QUIET,
            notes,
            opcode.opmap.get("RETURN_GENERATOR", -1),
            filtering.decide if filtering is not None and filtering.judges_code else None,
            0 if filtering is None else filtering.max_depth or 0,
            filtering is None or filtering.c_functions,
            filtering is not None and filtering.modules_only,
            session.contexts,
        )
    except Exception as error:  # an audit hook may raise anything; the program continues without calls
        _leave_new_threads({consumer})
        raise FramesError(f"the interpreter refused: {error!r}") from error
    return passed_over


def _follow_new_threads(consumer: int) -> str:
    """Traces threads that start later; if another tool already does, returns its name and leaves them to it."""
    if python_sources.monitors_calls:
        return ""  # sys.monitoring includes them
    with _lock:
        installed = threading.getprofile()
        if installed is not None and installed is not python_sources.trace_new_thread:
            return _name_of(installed)
        _all_threads.add(consumer)  # first: if this is interrupted, the session's stop removes the function
        threading.setprofile(python_sources.trace_new_thread)
        return ""


def _leave_new_threads(consumers: set[int]) -> None:
    with _lock:
        _all_threads.difference_update(consumers)
        if not _all_threads and threading.getprofile() is python_sources.trace_new_thread:
            threading.setprofile(None)


def off() -> None:
    """Stops it for all sessions: in forked children, and at interpreter exit."""
    python_sources.stop_frames(_EVERY_SESSION)
    _leave_new_threads(set(_all_threads))


def off_in_child() -> None:
    """Stops it in a forked child."""
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threads.RLock()
    off()


process_changes.at_exit(process_changes.Order.SOURCES, off)
