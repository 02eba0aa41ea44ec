"""Events of ``torch.compile``: each compilation, and each graph break with its reason."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import Part
from otel_torchprof._model.compiled import BREAK_PREFIX, COMPILATION_PREFIX
from otel_torchprof._native import frames, python_sources
from otel_torchprof._process import threads
from otel_torchprof._process.after_import import when_imported

from .labels import record_function
from .source import Source

if TYPE_CHECKING:
    from otel_torchprof._native.recorder import Session

_logger = logging.getLogger("otel_torchprof")


class CompileEvents(Source):
    """Compilations and graph breaks as labels, while one of these is installed.

    A compilation is a label ``TorchDynamo Compile: 0/0`` with dynamo's number of frame and compilation, as in the name of
    the compiled region; operators run by the compilation are inside it. A graph break is a label of no length at the end of the
    compilation that met it: ``TorchDynamo Graph Break: `` and the first line of dynamo's reason, with the place in the program
    and the whole reason as its arguments. Every recording of labels contains them.

    Dynamo calls this code only when it compiles, which takes a thousand times as long. After ``torch._dynamo.reset()``,
    which removes all callbacks, nothing is recorded until the next installation.

    A process may have any number of instances. Any thread may install and remove them.
    """

    def start(self, _session: Session | None = None) -> None:
        """Starts recording now, or when dynamo is imported."""
        _shared.install(self)

    @classmethod
    def forked(cls) -> None:
        """Ends it."""
        _shared.after_fork_in_child()

    def stop(self) -> None:
        """Removes the callbacks from dynamo after the last user; without effect if there are none."""
        _shared.remove(self)


class _SharedCallbacks:
    """The callbacks registered with dynamo, and their users."""

    def __init__(self) -> None:
        self._users: set[CompileEvents] = set()
        self._lock = threads.RLock()  # a signal handler may shut down in the middle
        self._awaits_dynamo = False
        self._open: record_function | None = None
        self._breaks = 0

    def install(self, user: CompileEvents) -> None:
        with self._lock:
            self._users.add(user)
            if handler := _handler():
                self._register_with(handler)
            elif not self._awaits_dynamo:  # once per process: the action is never cancelled
                self._awaits_dynamo = True
                when_imported("torch._dynamo.callback", self._register)

    def remove(self, user: CompileEvents) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and (handler := _handler()):
                _take_out(handler.start_callbacks, self._begin)
                if self._open is None:  # else the end callback must still resume the compiling thread
                    _take_out(handler.end_callbacks, self._end)

    def after_fork_in_child(self) -> None:
        self._lock = threads.RLock()
        for user in list(self._users):
            self.remove(user)

    def _register(self, module: Any) -> None:
        with self._lock:
            if self._users:
                self._register_with(module.callback_handler)

    def _register_with(self, handler: Any) -> None:
        for callbacks, callback in ((handler.start_callbacks, self._begin), (handler.end_callbacks, self._end)):
            if callback not in callbacks:
                callbacks.append(callback)

    def _begin(self, *reported: Any) -> None:
        """Callback of dynamo at the start of a top-level compilation; older versions pass no id."""
        python_sources.phase_begin(Part.COMPILATION, None)
        self._breaks = len(_reasons())
        self._open = record_function(
            f"{COMPILATION_PREFIX}{getattr(reported[0], 'compile_id', '?') if reported else '?'}"
        )
        self._open.__enter__()
        frames.pause()  # a compilation makes thousands of calls, none of them the program's

    def _end(self, *_reported: Any) -> None:
        compilation, self._open = self._open, None
        if compilation is None:
            return  # it began before the callbacks were registered
        frames.resume()
        reasons = _reasons()
        try:
            for reason in reasons[min(self._breaks, len(reasons)) :]:
                _record_break(reason)
        except Exception:  # the program's compilation continues
            _logger.warning("graph breaks were not recorded", exc_info=True)
        compilation.__exit__(None, None, None)
        python_sources.phase_end(Part.COMPILATION, None, None)


def _record_break(reason: Any) -> None:
    text = str(reason.reason)
    place = reason.user_stack[-1] if reason.user_stack else None
    at = f"{place.filename}:{place.lineno}: " if place is not None else ""
    with record_function(f"{BREAK_PREFIX}{text.strip().partition(chr(10))[0]}", f"{at}{text}"):
        pass


def _handler() -> Any | None:
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def _reasons() -> list[Any]:
    """Dynamo's list of all graph breaks since its last reset."""
    reasons: list[Any] = getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", [])
    return reasons


def _take_out(callbacks: list[Any], callback: Any) -> None:
    if callback in callbacks:
        callbacks.remove(callback)


_shared = _SharedCallbacks()
