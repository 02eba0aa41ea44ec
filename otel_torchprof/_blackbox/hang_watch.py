"""Says when a thread of the training loop hangs: its stacks go into the black box, and one log record to whoever has an exporter."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from opentelemetry import trace

from otel_torchprof._native import hang_watch
from otel_torchprof._native.blackbox import STACKS_BYTES
from otel_torchprof._native.recorder import living_threads
from otel_torchprof.version import __version__

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable

    from opentelemetry.trace import SpanContext

_LONG_SECONDS = 900.0
"""What compilations, checkpoints and setup may take."""
_EVENT_NAME = "torch.hang"

_logger = logging.getLogger("otel_torchprof")


class HangWatch:
    """Watches from :meth:`start` to :meth:`stop`, while a black box is open. Costs a look at the threads a second, natively.

    Args:
        seconds: without an event from which on a thread of the loop hangs.
        hides_code: whether files and functions are not to stand in the box.
        running_step: the span that the log record belongs to; None: there is none.
    """

    def __init__(self, seconds: float, *, hides_code: bool, running_step: Callable[[], SpanContext | None]) -> None:
        self._seconds = seconds
        self._hides_code = hides_code
        self._running_step = running_step
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins.

        Raises:
            NativeError: it is watched already, or the system gave no thread.
        """
        dump = 0 if self._hides_code else _address_of_dump()
        hang_watch.start(self._seconds, max(self._seconds, _LONG_SECONDS), dump)
        self._thread = threading.Thread(target=self._wait, name="otel-torchprof-hang-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends; again without effect. Any thread."""
        hang_watch.stop()

    def _wait(self) -> None:
        while os_tid := hang_watch.wait():
            self._report(os_tid)

    def _report(self, os_tid: int) -> None:
        try:
            hang_watch.report("" if self._hides_code else stacks_text(living_threads()))
            self._say(os_tid)
        except Exception:  # the program continues
            _logger.exception("a thread hangs, and its stacks could not be written")

    def _say(self, os_tid: int) -> None:
        body = (
            f"thread {os_tid} has begun and ended nothing for {self._seconds:.0f} s or more; "
            "all stacks are in the black box: otel-torchprof recover prints them, autopsy compares ranks"
        )
        _logger.warning("%s", body)
        _emit(body, os_tid, self._running_step())


def stacks_text(threads: Iterable[threading.Thread]) -> str:
    """Python's stacks, one thread after another, the innermost call first; at most as much as a box keeps."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way
    parts = [_stack_of(thread, frames[thread.ident]) for thread in threads if thread.ident in frames]
    return "\n".join(parts).encode()[:STACKS_BYTES].decode("utf-8", "ignore")


def _stack_of(thread: threading.Thread, frame: types.FrameType) -> str:
    calls = reversed(traceback.extract_stack(frame))
    lines = [f'  File "{call.filename}", line {call.lineno} in {call.name}' for call in calls]
    return "\n".join((f"Thread {thread.native_id} {thread.name} (most recent call first):", *lines))


def _address_of_dump() -> int:
    """Of what :mod:`faulthandler` writes stacks with where Python's lock is not to be had; 0 where this Python has none."""
    function = getattr(ctypes.pythonapi, "_Py_DumpTracebackThreads", None)
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _emit(body: str, os_tid: int, step: SpanContext | None) -> None:
    """As a log record of OpenTelemetry in the span of the step; nothing happens where no LoggerProvider is set."""
    try:
        from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
    except ImportError:  # an earlier API
        return
    span = trace.INVALID_SPAN if step is None else trace.NonRecordingSpan(step)
    with trace.use_span(span):  # a record takes its ids from the current span, in every version of the API
        record = LogRecord(
            severity_text="WARN",
            severity_number=SeverityNumber.WARN,
            body=body,
            attributes={"thread.id": os_tid},
            event_name=_EVENT_NAME,
        )
        get_logger("otel_torchprof", __version__).emit(record)
