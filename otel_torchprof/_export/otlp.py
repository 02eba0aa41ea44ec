"""``OTLPExporter``: spans to a collector, by gRPC or HTTP."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES

from . import fork
from .answer import Answer, Verdict, root_cause
from .deadline import Deadline
from .messages import messages
from .quiet import LimitedLog, debug
from .retry import Backoff, deliver
from .sdk import suppressed
from .settings import GRPC, Settings

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .settings import HeadersArgument


@dataclass(frozen=True)
class ExportStats:
    """What an exporter did so far. Every span it was given is accepted, rejected or failed in the end, and only once."""

    accepted_spans: int = 0
    """The receiver took them."""
    rejected_spans: int = 0
    """The receiver took their message and said that it dropped them."""
    failed_spans: int = 0
    """Never arrived: refused, out of time, after the shutdown, or not to be encoded."""
    requests: int = 0
    """Attempts to send a message."""
    retries: int = 0
    """Those of them that were not the message's first."""
    bytes_sent: int = 0
    """Bytes of all attempts, before compression."""
    last_error: str = ""
    """What went wrong last, in words."""


class Transport(Protocol):
    """A way to send messages; all of it thread-safe."""

    def prepare(self, message: bytes) -> bytes:
        """What to send, made once for all attempts."""

    def send(self, message: bytes, timeout: float) -> Answer:
        """Sends what ``prepare`` returned, once, within ``timeout`` seconds."""

    def close(self) -> None:
        """Frees the connections."""

    def after_fork_in_child(self) -> None:
        """Lets go of the parent's connections without touching them."""


class OTLPExporter(SpanExporter):
    """Sends spans to an OpenTelemetry Collector or any OTLP receiver, by gRPC or HTTP.

    Spans of this package go as bytes from the native encoder; any other span as OpenTelemetry encodes it, so the exporter
    serves every span processor. What is not given is read from the standard ``OTEL_EXPORTER_OTLP_*`` variables.

    ``export`` blocks until the receiver has answered, and retries what may pass: with growing waits, or as long as the
    receiver asks for, all within ``timeout``. It never raises and never logs a header's value. Its own traffic is not traced.
    Thread-safe; in a forked child it makes connections of its own.

    Args:
        endpoint: gRPC: ``http://host:port``, ``https://host:port`` or ``host:port``. HTTP: the URL as it is, with ``/v1/traces``.
        protocol: ``grpc`` (the default) or ``http/protobuf``.
        headers: to send along: a mapping, pairs, or ``"name=value,name=value"`` with percent-encoded values. They are added to those of the
            variables.
        timeout: seconds per message of up to ``max_request_bytes``, with its retries. By default 10.
        compression: ``gzip`` or ``none``; members of grpc's and OpenTelemetry's enums too.
        insecure: gRPC: False asks for TLS whatever the endpoint's scheme; True for none where the endpoint has no scheme.
        certificate_file: PEM file with the certificates to trust instead of the system's.
        client_key_file: PEM file with the key of the client certificate.
        client_certificate_file: PEM file with the client certificate, and its key where that has no file of its own.
        max_request_bytes: size of a message, before compression. By default 1 MiB; gRPC receivers refuse more than 4 MiB unless told otherwise.

    Raises:
        ValueError: a bad argument, with its name, its value (never that of a header) and what is allowed.
    """

    takes_span_lists = True
    """Whoever batches spans may hand over a whole SpanList of any length."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        protocol: str | None = None,
        headers: HeadersArgument | None = None,
        timeout: float | None = None,
        compression: Any = None,
        insecure: bool | None = None,
        certificate_file: str | os.PathLike[str] | None = None,
        client_key_file: str | os.PathLike[str] | None = None,
        client_certificate_file: str | os.PathLike[str] | None = None,
        max_request_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._settings = Settings.from_environment(
            endpoint=endpoint,
            protocol=protocol,
            headers=headers,
            timeout=timeout,
            compression=compression,
            insecure=insecure,
            certificate_file=certificate_file,
            client_key_file=client_key_file,
            client_certificate_file=client_certificate_file,
            max_request_bytes=max_request_bytes,
        )
        self._transport = _transport(self._settings)
        self._backoff = Backoff()
        self._stopping = threading.Event()
        self._counts = _Counts()
        self._log = LimitedLog()
        fork.watch(self)

    @property
    def stats(self) -> ExportStats:
        """What it did so far, at one moment."""
        return self._counts.snapshot()

    def export(self, spans: Sequence[ReadableSpan], timeout_millis: float | None = None) -> SpanExportResult:
        """Sends the spans; SUCCESS when the receiver took every message.

        A message that is refused does not stop those after it. ``timeout_millis`` bounds the whole call; without it, it lasts at
        most ``timeout`` for each message.
        """
        deadline = Deadline.after(math.inf if timeout_millis is None else timeout_millis / 1000)
        with suppressed():
            sent = self._export(spans, deadline)
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 (the base's signature)
        """True: nothing is kept here, ``export`` returns when everything has been sent."""
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:  # noqa: ARG002 (as OpenTelemetry's exporters have it)
        """Sends no more, wakes whoever waits to try again, and closes the connections. Does not block; a second call does nothing."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._transport.close()

    def __repr__(self) -> str:
        return f"<OTLPExporter {self._settings.protocol} to {self._settings.shown_endpoint}>"

    def after_fork_in_child(self) -> None:
        """In a forked child: connections, locks and counts of its own. Called by itself."""
        stopped = self._stopping.is_set()
        self._stopping = threading.Event()
        if stopped:
            self._stopping.set()
        self._counts = _Counts()
        self._log.after_fork_in_child()
        self._transport.after_fork_in_child()

    # ---- within ----

    def _export(self, spans: Sequence[ReadableSpan], deadline: Deadline) -> bool:
        done, fine = 0, True
        try:
            for message, count in messages(spans, self._settings.max_request_bytes):
                if over := self._over(deadline):
                    return self._count(Answer(Verdict.REFUSED, over), len(spans) - done)
                answer = self._deliver(message, deadline)
                if answer.verdict is Verdict.TOO_LARGE and count > 1:
                    middle, end = done + count // 2, done + count
                    for half in (spans[done:middle], spans[middle:end]):
                        fine = self._export(half, deadline) and fine
                else:
                    fine = self._count(answer, count) and fine
                done += count
        except Exception as error:  # noqa: BLE001 (an exporter never raises; whatever it was is told)
            self._count(
                Answer(Verdict.REFUSED, f"cannot be encoded: {type(error).__name__}: {error}"), len(spans) - done
            )
            return False
        return fine

    def _over(self, deadline: Deadline) -> str:
        """Why nothing more is to be sent, if so."""
        if self._stopping.is_set():
            return "the exporter is shut down"
        return "there was no time left for them" if deadline.passed else ""

    def _deliver(self, message: bytes, deadline: Deadline) -> Answer:
        body = self._transport.prepare(message)

        def attempt(timeout: float) -> Answer:
            self._counts.add(requests=1, bytes_sent=len(message))
            try:
                return self._transport.send(body, timeout)
            except Exception as error:  # noqa: BLE001 (a transport's surprise is a message that did not arrive)
                return Answer(Verdict.REFUSED, root_cause(error))

        return deliver(
            attempt,
            deadline=Deadline.after(min(self._settings.timeout, deadline.remaining())),
            wait=self._stopping.wait,
            backoff=self._backoff,
            retrying=self._retrying,
        )

    def _retrying(self, answer: Answer, seconds: float) -> None:
        reason = self._settings.redacted(answer.reason)
        self._counts.add(retries=1, last_error=reason)
        debug("%r: %s; trying again in %.1f s", self, reason, seconds)

    def _count(self, answer: Answer, spans: int) -> bool:
        """Counts and logs what became of so many spans; whether their message was taken."""
        reason = self._settings.redacted(answer.reason)
        if answer.verdict is not Verdict.ACCEPTED:
            self._counts.add(failed_spans=spans, last_error=reason)
            self._log.warning("%r: %d spans were not delivered: %s", self, spans, reason)
            return False
        rejected = min(answer.rejected_spans, spans)
        self._counts.add(accepted_spans=spans - rejected, rejected_spans=rejected, last_error=reason)
        if rejected or reason:
            self._log.warning(
                "%r: %d of %d spans were rejected: %s", self, rejected, spans, reason or "no reason given"
            )
        return True


class _Counts:
    """ExportStats that grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
