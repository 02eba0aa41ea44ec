"""Says when a thread of the training loop hangs: its stacks go into the black box, and one log record to whoever has an exporter."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from opentelemetry import trace

from otel_torchprof._native import hang_watch, stacks
from otel_torchprof._process import threads
from otel_torchprof.errors import NativeError
from otel_torchprof.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._thread: threads.Thread | None = None
        self.without_stacks = ""
        """Why Python's stacks cannot be read here; empty where they can, or are not to be."""

    def start(self) -> None:
        """Begins.

        Raises:
            NativeError: it is watched already, or the system gave no thread.
        """
        hang_watch.start(self._seconds, max(self._seconds, _LONG_SECONDS), 0 if self._hides_code else self._writer())
        self._thread = threads.Thread(target=self._wait, name="otel-torchprof-hang-watch", daemon=True)
        self._thread.start()

    def _writer(self) -> int:
        try:
            return stacks.writer()
        except NativeError as error:
            self.without_stacks = str(error)
            return 0

    def stop(self) -> None:
        """Ends; again without effect. Any thread."""
        hang_watch.stop()

    def _wait(self) -> None:
        while os_tid := hang_watch.wait():
            self._report(os_tid)

    def _report(self, os_tid: int) -> None:
        try:
            self._say(os_tid)
        except Exception:  # the program continues
            _logger.exception("a thread hangs, and it could not be reported")

    def _say(self, os_tid: int) -> None:
        has_stacks = not (self._hides_code or self.without_stacks)
        kept = "all stacks are in the black box: otel-torchprof recover prints them, autopsy compares ranks"
        body = (
            f"thread {os_tid} has begun and ended nothing for {self._seconds:.0f} s or more; "
            f"{kept if has_stacks else 'what it had begun is in the black box: see otel-torchprof recover and autopsy'}"
        )
        _logger.warning("%s", body)
        _emit(body, os_tid, self._running_step())


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
