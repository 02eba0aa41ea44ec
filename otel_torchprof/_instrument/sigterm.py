"""Flushes spans and metrics at SIGTERM in programs that do not handle it; then the signal ends the process."""

from __future__ import annotations

import functools
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

from otel_torchprof._export.sdk import suppressed
from otel_torchprof._native import sigterm
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.wrapped_calls import WrappedCalls, WrappedFunction
from otel_torchprof.errors import NativeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper

    from .processor import TorchSpanProcessor

_logger = logging.getLogger("otel_torchprof")

_SHARE_OF_SPANS = 0.8
"""Share of the time limit for spans; the rest is for metrics."""
_LONGEST_MS = (1 << 32) - 1
_STOP_SECONDS = 10.0
_NO_FLUSH = "SIGTERM ends the process without a flush"
_FIRST_PROCESS = 1
"""Pid of the first process of a container: the kernel ignores SIGTERM's default action for it, so it continues after the flush."""


class SigtermFlush:
    """Flushes at SIGTERM between :meth:`start` and :meth:`stop`, while the signal has its default action.

    Works while the main thread is blocked in a call, and leaves Python's signal handling alone. Native code ends the process
    after the flush, or after ``seconds`` even if Python hangs. A handler of the program's replaces it until ``signal.signal`` sets the
    default action again, as servers do that then raise the signal once more. A forked child has the default action.

    Args:
        seconds: time limit of the flush; 0: SIGTERM is left alone.
        processor: processor to shut down; None without spans.
        tracer_provider: flushed after it, since the application's spans are the parents of torch's; None: the global one.
        meter_provider: flushed last; None: the global one.
    """

    def __init__(
        self, seconds: float, processor: TorchSpanProcessor | None, tracer_provider: Any, meter_provider: Any
    ) -> None:
        self._seconds = seconds
        self.processor = processor
        """The processor to shut down; changes if the instrumentation moves to another."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._thread: threads.Thread | None = None

    def start(self) -> None:
        """Starts, at once or when the program no longer handles or ignores SIGTERM."""
        if self._seconds > 0:
            _started.add(self)
            _actions.install(self)
            self._watch()

    def stop(self) -> None:
        """Restores SIGTERM, also after an interrupted start; no effect once the signal has arrived."""
        _actions.remove(self)
        _started.discard(self)
        self._unwatch()

    def continue_after_program(self) -> None:
        """Handles the signal again: the program has set the default action."""
        if self._unwatch():
            self._watch()

    def _watch(self) -> None:
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

    def _unwatch(self) -> bool:
        """Returns False if the signal has arrived."""
        has_arrived = sigterm.unwatch()
        if not has_arrived and self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        return not has_arrived

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
        tracers = self._tracer_provider or trace.get_tracer_provider()
        for provider in (tracers, self._meter_provider or metrics.get_meter_provider()):
            if callable(flush := getattr(provider, "force_flush", None)) and not deadline.passed:
                _try_to(flush, round(deadline.remaining() * 1000))


def _try_to(flush: Any, milliseconds: int) -> None:
    try:
        flush(milliseconds)
    except Exception as error:  # noqa: BLE001 - the next one may do better
        _logger.warning("at SIGTERM %s failed: %s: %s", flush.__qualname__, type(error).__name__, error)


_started: set[SigtermFlush] = set()


def _setting_actions(_function: WrappedFunction, before: Callable[..., Any]) -> Wrapper:
    """Returns a ``signal.signal`` that continues the flushes, and a function that turns this off.

    When a program that had a handler takes it back: setting the default action instead of the default says that nothing is to be flushed.
    """
    is_on = True

    @functools.wraps(before)
    def set_action(signalnum: Any, handler: Any) -> Any:
        previous = before(signalnum, handler)
        if is_on and signalnum == signal.SIGTERM and handler == signal.SIG_DFL != previous:
            for flush in tuple(_started):
                flush.continue_after_program()
        return previous

    def retire() -> None:
        nonlocal is_on
        is_on = False

    return set_action, retire


_actions = WrappedCalls((WrappedFunction("signal", "signal"),), _setting_actions)


def _in_child() -> None:
    _started.clear()
    _actions.after_fork_in_child()


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)


def _end_of_the_signal() -> None:
    """Keeps the process from exiting by itself once SIGTERM has arrived: its exit status must be that of the signal."""
    while sigterm.unwatch():
        threads.sleep(0.01)


process_changes.at_exit(process_changes.Order.STATE, _end_of_the_signal)
