"""Sends messages to one receiver and counts the outcomes of their spans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from otel_torchprof._process import threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.quiet import LimitedLog, debug

from .otlp_wire import GRPC
from .response import CLOSED, Backoff, Outcome, Response, deliver, root_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from .settings import Settings


@dataclass(frozen=True)
class ExportStats:
    """Counts of an :class:`OTLPExporter`. Each finished span is accepted, rejected or failed, exactly once. Immutable.

    Spans that a :class:`TorchSpanProcessor` keeps for a retry are in none of the counts.

    Examples:
        >>> exporter = otp.OTLPExporter("http://localhost:4317")
        >>> exporter.stats.accepted_spans, exporter.stats.requests
        (0, 0)
        >>> exporter.shutdown()
    """

    accepted_spans: int = 0
    """Spans that the receiver accepted."""
    rejected_spans: int = 0
    """Spans that the receiver dropped, by its response, from messages that it accepted (OTLP's partial success)."""
    failed_spans: int = 0
    """Spans that never arrived: refused, out of time, exported after the shutdown, or impossible to encode."""
    requests: int = 0
    """Attempts to send a message."""
    retries: int = 0
    """Attempts that were not the first one of their message."""
    bytes_sent: int = 0
    """Bytes of all attempts, before compression."""
    last_error: str = ""
    """Text of the last error; empty if there was none."""


class Transport(Protocol):
    """A way to send messages. Thread-safe."""

    def prepare(self, message: bytes | memoryview) -> Any:
        """Returns the bytes to send, made once for all attempts. The message is valid until these have ended."""

    def send(self, body: Any, timeout: float) -> Response:
        """Sends the result of ``prepare`` once, within ``timeout`` seconds."""

    def close(self) -> None:
        """Closes the connections."""

    def after_fork_in_child(self) -> None:
        """Forgets the parent's connections without touching them."""


class SizeLimit:
    """Sends the messages of one batch or file, except messages as large as one with a single span that was too large.

    Otherwise each span with a resource that is too large by itself would cost a request.
    """

    def __init__(self, send: Callable[[bytes | memoryview], Response]) -> None:
        self._send = send
        self._refused = math.inf
        self._response = Response(Outcome.TOO_LARGE)

    def send(self, message: bytes | memoryview, spans: int) -> Response:
        """The response to a message with so many spans; TOO_LARGE also where it was not sent."""
        if len(message) >= self._refused:
            return self._response
        response = self._send(message)
        if response.outcome is Outcome.TOO_LARGE and spans == 1:
            self._refused, self._response = len(message), response
        return response


class Sender:
    """Sends messages to the receiver of some settings, and counts. Thread-safe.

    Args:
        settings: where to, and how.
        name: what sends, for the log.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.backoff = Backoff()
        """Waits between the attempts of one :meth:`deliver`."""
        self._transport = _transport(settings)
        self._stopping = threads.Event()
        self._counts = _Counts()
        self._log = LimitedLog()

    @property
    def stats(self) -> ExportStats:
        """A consistent copy of the figures so far."""
        return self._counts.snapshot()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._stopping.is_set()

    def attempt(self, message: bytes | memoryview, deadline: Deadline, *, again: bool = False) -> Response:
        """Sends once, within the settings' timeout and the deadline; ``again``: it is not the message's first time."""
        response = self._send(self._transport.prepare(message), len(message), self._timeout(deadline))
        if again:
            self._counts.add(retries=1)
        if response.outcome is Outcome.RETRY:  # others log it without redaction
            response = response._replace(reason=self.settings.redacted(response.reason))
            self._counts.add(last_error=response.text)
        return response

    def deliver(self, message: bytes | memoryview, deadline: Deadline) -> Response:
        """Sends until the response is final, within the settings' timeout and the deadline; never returns RETRY."""
        body = self._transport.prepare(message)
        return deliver(
            lambda timeout: self._send(body, len(message), timeout),
            deadline=Deadline.after(self._timeout(deadline)),
            wait=self._stopping.wait,
            backoff=self.backoff,
            retrying=self._retrying,
        )

    def count(self, response: Response, spans: int) -> bool:
        """Counts and logs the outcome of ``spans`` spans; returns whether their message was accepted."""
        reason = self.settings.redacted(response.text)
        if response.outcome is not Outcome.ACCEPTED:
            self._counts.add(failed_spans=spans, last_error=reason)
            self._log.warning("%s: %d spans were not delivered: %s", self.name, spans, reason)
            return False
        rejected = min(response.rejected_spans, spans)
        self._counts.add(accepted_spans=spans - rejected, rejected_spans=rejected, last_error=reason)
        if rejected or reason:
            self._log.warning(
                "%s: %d of %d spans were rejected: %s", self.name, rejected, spans, reason or "no reason given"
            )
        return True

    def close(self) -> None:
        """Stops sending, wakes threads that wait for a retry and closes the connections.

        A second call has no effect.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self._transport.close()

    def after_fork_in_child(self) -> None:
        """Renews connections, locks and counts in a forked child."""
        stopped = self._stopping.is_set()
        self._stopping = threads.Event()
        if stopped:
            self._stopping.set()
        self._counts = _Counts()
        self._log.after_fork_in_child()
        self._transport.after_fork_in_child()

    def _timeout(self, deadline: Deadline) -> float:
        return min(self.settings.timeout, deadline.remaining())

    def _send(self, body: Any, size: int, timeout: float) -> Response:
        self._counts.add(requests=1, bytes_sent=size)
        try:
            return self._transport.send(body, timeout)
        except Exception as error:  # noqa: BLE001 (a transport's surprise is a message that did not arrive)
            # A connection that is closed during its request raises any error.
            return Response(Outcome.REFUSED, CLOSED if self.is_closed else root_cause(error))

    def _retrying(self, response: Response, seconds: float) -> None:
        reason = self.settings.redacted(response.text)
        self._counts.add(retries=1, last_error=reason)
        debug("%s: %s; trying again in %.1f s", self.name, reason, seconds)


class _Counts:
    """ExportStats that grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self._stats = ExportStats()

    def add(self, *, last_error: str = "", **numbers: int) -> None:
        with self._lock:
            changed: dict[str, Any] = {name: getattr(self._stats, name) + number for name, number in numbers.items()}
            if last_error:
                changed["last_error"] = last_error
            self._stats = replace(self._stats, **changed)

    def snapshot(self) -> ExportStats:
        with self._lock:
            return self._stats


def _transport(settings: Settings) -> Transport:
    if settings.protocol == GRPC:
        from .grpc import GrpcTransport

        return GrpcTransport(settings)
    from .http import HttpTransport

    return HttpTransport(settings)
