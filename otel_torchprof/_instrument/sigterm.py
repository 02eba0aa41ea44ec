"""SIGTERM in an instrumented program that does not handle it: what was recorded is sent, then the process ends of the signal."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics

from otel_torchprof._export.sdk import suppressed
from otel_torchprof._native import sigterm
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.errors import NativeError

if TYPE_CHECKING:
    from .processor import TorchSpanProcessor

_logger = logging.getLogger("otel_torchprof")

_SHARE_OF_SPANS = 0.8
"""Of the time, where metrics are to be sent too."""
_LONGEST_MS = (1 << 32) - 1
_STOP_SECONDS = 10.0
_NO_FLUSH = "SIGTERM ends the process without a flush"
_FIRST_PROCESS = 1
"""Of a container: the kernel ignores the default action of SIGTERM for it, so it continues after the flush."""


class SigtermFlush:
    """A flush at SIGTERM, from :meth:`start` to :meth:`stop`, where the signal has its default action at the start.

    Needs neither the main thread, which may be in a call that does not return, nor Python's signal handling, of which it
    changes nothing. Native code ends the process when the flush is done, or after ``seconds`` whatever Python does. A handler
    that the program sets later takes its place; a forked child has the default action.

    Args:
        seconds: for all of the flush; 0: SIGTERM is left alone.
        processor: to be shut down; None: there are no spans.
        tracer_provider: flushed after it: the application's spans are the parents of torch's.
        meter_provider: flushed after that; None: the global one.
    """

    def __init__(
        self, seconds: float, processor: TorchSpanProcessor | None, tracer_provider: Any, meter_provider: Any
    ) -> None:
        self._seconds = seconds
        self.processor = processor
        """The one to be shut down; the instrumentation may move to another."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._thread: threads.Thread | None = None

    def start(self) -> None:
        """Begins, unless the program handles or ignores SIGTERM."""
        milliseconds = min(round(self._seconds * 1000), _LONGEST_MS)
        try:
            is_watched = milliseconds > 0 and sigterm.watch(milliseconds)
        except NativeError:
            _logger.warning("%s: the system gave no thread", _NO_FLUSH)
            return
        if is_watched:
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threads.Thread(target=self._run, name="otel-torchprof-sigterm", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            sigterm.unwatch()
            _logger.warning("%s: %s", _NO_FLUSH, error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Leaves SIGTERM alone; without effect once it has come. Also where the start was interrupted."""
        if not sigterm.unwatch() and self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with suppressed():
            while sigterm.wait():
                self._flush_or_log()
                sigterm.flushed()

    def _flush_or_log(self) -> None:
        try:
            self._flush(Deadline.after(self._seconds))
        except Exception:
            _logger.exception("the flush at SIGTERM failed")

    def _flush(self, deadline: Deadline) -> None:
        if self.processor is not None:
            seconds = deadline.remaining() * _SHARE_OF_SPANS
            if os.getpid() == _FIRST_PROCESS:
                self.processor.force_flush(round(seconds * 1000))
            else:
                self.processor.shutdown_within(seconds)
        for provider in (self._tracer_provider, self._meter_provider or metrics.get_meter_provider()):
            if callable(flush := getattr(provider, "force_flush", None)) and not deadline.passed:
                _try_to(flush, round(deadline.remaining() * 1000))


def _try_to(flush: Any, milliseconds: int) -> None:
    try:
        flush(milliseconds)
    except Exception as error:  # noqa: BLE001 - the next one may do better
        _logger.warning("at SIGTERM %s failed: %s: %s", flush.__qualname__, type(error).__name__, error)


def _end_of_the_signal() -> None:
    """Once SIGTERM has come, the process ends of it, and not meanwhile of its own accord with another exit status."""
    while sigterm.unwatch():
        threads.sleep(0.01)


process_changes.at_exit(process_changes.Order.STATE, _end_of_the_signal)
