"""The tracer of Python's calls, on and off."""

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
from .frame_book import ObjectNotes
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
"""Files of this package that call functions of the program. All else that the package calls is its own affair."""
_TORCHS_TRACER = "builtins", "TraceContext"
"""What ``sys.getprofile()`` gives on threads that torch.profiler traces with ``with_stack``: a type without a module."""
_TORCHS_REFUSAL = "There is already an active Python tracer. Refusing to register profile functions."
"""What torch's own tracer says where another one of torch's is active: logs are searched for it."""
_QUIET = ("torch._dynamo.convert_frame.__call__",)
"""What ``torch.compile`` compiles with, ten thousand calls at a time: that it is called is shown, and not what it calls."""
_EVERY_SESSION = (1 << 32) - 1
_all_threads: set[int] = set()
"""Sessions that want the threads to come."""
_lock = threads.RLock()  # what is collected while it is held may stop a recording, which takes it again
_book_of_run: weakref.ref[ObjectNotes] | None = None
"""The book that all sessions of the tracer's run share; as long as one of them, or the tracer, has it."""


class FramesError(Exception):
    """Why calls cannot be recorded; says what is in the way."""


def path_prefixes() -> tuple[str, ...]:
    """What the paths of source files lose: the directories that Python imports from, of two within each other the inner first."""
    torch = sys.modules.get("torch")
    raw = [*site.getsitepackages(), *sys.path, site.getuserbase(), site.getusersitepackages()]
    raw += [str(Path(file).parent.parent)] if (file := getattr(torch, "__file__", None)) else []
    return tuple(path + os.sep for path in sorted({os.path.abspath(path) for path in raw}, reverse=True))  # noqa: PTH100 - must not resolve


def _torchs_code(path: str) -> types.CodeType | None:
    """The code of a function of torch's, once torch is there."""
    code: types.CodeType | None = None
    with contextlib.suppress(AttributeError):
        code = operator.attrgetter(path)(sys.modules.get("torch")).__code__
    return code


def _name_of(profiler: Any) -> str:
    """How to speak of somebody's profile function."""
    if (type(profiler).__module__, type(profiler).__name__) == _TORCHS_TRACER:
        return "torch.profiler"
    named = profiler if hasattr(profiler, "__qualname__") else type(profiler)
    return f"{named.__module__}.{named.__qualname__}"


def check() -> None:
    """Finds what is in the way of recording calls on this thread.

    Raises:
        FramesError: there is something; a profile function of another tool's is named, and never displaced.
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
    """Whether this package is one of the tools of ``sys.monitoring``, or can be: beside a profile function, and any other tool."""
    monitoring: Any = vars(sys)["monitoring"]
    names = [monitoring.get_tool(number) for number in (1, 2, 3, 4, 5)]
    if None not in names and "otel_torchprof" not in names:
        raise FramesError(f"every tool of sys.monitoring is in use: {', '.join(names)}")


class Tracing:
    """Calls as events of a session, on every thread, from :meth:`start` to :meth:`stop`.

    What is on the stack of a thread appears as begun now, once there is a first call or return on it; where there is none
    see :meth:`waiting`. Costs what the interpreter needs to report a call, which is most of it, and what is done there.
    """

    def __init__(self, session: Session) -> None:
        self._consumer = session.consumer
        self._begun = False
        self._book: ObjectNotes | None = _shared_book()
        self._info = FrameInfo()
        self.new_threads_tool = ""
        """What profiles the threads that start from now on, where that is another tool; it keeps them."""
        self.passed_over = 0
        """Threads that have another tool's profile function, and keep it."""
        self.displaced = 0
        """Threads that another tool had taken by the time of the stop."""

    def start(self, session: Session, filtering: Filtering | None = None) -> None:
        """Begins it, once the session runs. To be stopped also where this is interrupted.

        Raises:
            FramesError: see :func:`check`; nothing has begun then.
        """
        check()
        self._begun = True
        self.new_threads_tool = _follow_new_threads(self._consumer)
        self.passed_over = _start(session, filtering, self._book or _shared_book())

    def waiting(self) -> list[WaitingStack]:
        """The stacks of the threads that have made no call and no return since the start: they are what they were then.

        To be asked for before the session stops, while a thread that continues still is recorded. Costs some microseconds per thread.
        """
        stacks = []
        for ident, os_tid, calls in python_sources.waiting_stacks(self._consumer):
            thread = thread_known_by(ident, os_tid)
            if thread is not None and calls:
                stacks.append(WaitingStack(thread, *zip(*calls, strict=True)))
        return stacks

    def stop(self) -> None:
        """Ends it, from any thread; where this is interrupted, a second call does the rest."""
        if self._begun:
            self.displaced = python_sources.stop_frames(self._consumer)
            _leave_new_threads({self._consumer})
            self._begun = False
        if self._book is not None:
            self._info = self._book.finish()
            self._book = None

    def info(self) -> FrameInfo:
        """What is known of what was called: so far, or at the stop."""
        book = self._book
        return self._info if book is None else book.info()


class Filtering(Protocol):
    """What a session leaves out; see ``FrameFilter``."""

    @property
    def max_depth(self) -> int | None:
        """Of calls around each other."""

    @property
    def c_functions(self) -> bool:
        """Whether there are any of these."""

    @property
    def modules_only(self) -> bool:
        """Whether there is nothing but calls of modules."""

    @property
    def judges_code(self) -> bool:
        """Whether :meth:`decide` has anything to say."""

    def decide(self, code: types.CodeType, module_name: str | None, /) -> bool:
        """Whether calls of that code are wanted."""


def pause() -> None:
    """The calling thread begins no calls until as many :func:`resume`; those that are open continue, and end. Takes 0.1 us."""
    if python_sources.can_trace_frames:
        python_sources.pause_frames()


def resume() -> None:
    """The calling thread begins calls again. Without effect where it was not paused."""
    if python_sources.can_trace_frames:
        python_sources.resume_frames()


def _shared_book() -> ObjectNotes:
    global _book_of_run  # noqa: PLW0603 - one tracer per process
    with _lock:
        book = None if _book_of_run is None else _book_of_run()
        if book is None:
            book = ObjectNotes()
            _book_of_run = weakref.ref(book)
        return book


def _start(session: Session, filtering: Filtering | None, book: ObjectNotes) -> int:
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
            book,
            opcode.opmap.get("RETURN_GENERATOR", -1),
            filtering.decide if filtering is not None and filtering.judges_code else None,
            0 if filtering is None else filtering.max_depth or 0,
            filtering is None or filtering.c_functions,
            filtering is not None and filtering.modules_only,
            session.contexts,
        )
    except Exception as error:  # an audit hook may raise anything; the program is to continue without our stacks
        _leave_new_threads({consumer})
        raise FramesError(f"the interpreter refused: {error!r}") from error
    return passed_over


def _follow_new_threads(consumer: int) -> str:
    """Has threads traced that start later; the name of the tool that has them already, and keeps them."""
    if python_sources.monitors_calls:
        return ""  # they are anyway
    with _lock:
        installed = threading.getprofile()
        if installed is not None and installed is not python_sources.trace_new_thread:
            return _name_of(installed)
        _all_threads.add(consumer)  # first: whatever interrupts this, the session's stop takes the function away
        threading.setprofile(python_sources.trace_new_thread)
        return ""


def _leave_new_threads(consumers: set[int]) -> None:
    with _lock:
        _all_threads.difference_update(consumers)
        if not _all_threads and threading.getprofile() is python_sources.trace_new_thread:
            threading.setprofile(None)


def off() -> None:
    """Off, whoever began it: in forked children, and before the interpreter is taken down."""
    python_sources.stop_frames(_EVERY_SESSION)
    _leave_new_threads(set(_all_threads))


def off_in_child() -> None:
    """In a forked child: off, as it is in a process that has not begun it."""
    global _lock  # noqa: PLW0603 - whoever held it is not in this process
    _lock = threads.RLock()
    off()


process_changes.at_exit(process_changes.Order.SOURCES, off)
