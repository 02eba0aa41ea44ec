"""``OTLPExporter``: sends spans to a Collector by gRPC or HTTP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES
from otel_torchprof._process import process_changes
from otel_torchprof._process.deadline import Deadline

from .ledger import Delivery
from .messages import import_encoders, messages
from .response import CLOSED, Outcome, Response
from .sdk import suppressed
from .sending import ExportStats, Sender, SizeLimit
from .settings import Settings

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .settings import HeadersArgument

__all__ = ["ExportStats", "OTLPExporter"]


class OTLPExporter(SpanExporter):
    """Sends spans to an OpenTelemetry Collector or any OTLP receiver, by gRPC or HTTP.

    Works with every span processor: torch's spans are encoded by the native encoder, other spans by OpenTelemetry's.
    Arguments that are not given are read from the standard ``OTEL_EXPORTER_OTLP_*`` variables.

    ``export`` blocks until the receiver has responded. It retries temporary errors, with growing waits or after the
    time that the receiver asks for, all within ``timeout``. In a :class:`TorchSpanProcessor` the queue retries for as
    long as its limits allow, so an outage loses only spans that do not fit into the queue. ``export`` never raises and
    never logs the value of a header. Its own requests are not traced. Thread-safe; a forked child opens its own
    connections.

    Args:
        endpoint: for gRPC ``http://host:port``, ``https://host:port`` or ``host:port``; for HTTP the complete URL,
            including ``/v1/traces``.
        protocol: ``grpc`` (default) or ``http/protobuf``.
        headers: headers to send: a mapping, pairs, or ``"name=value,name=value"`` with percent-encoded values. They are
            added to those of the variables.
        timeout: seconds per message of up to ``max_request_bytes``, including its retries; in a TorchSpanProcessor,
            seconds per attempt. Default: 10.
        compression: ``gzip`` or ``none``, or a member of the enum of grpc or OpenTelemetry.
        insecure: for gRPC. False uses TLS whatever the scheme of the endpoint; True uses none if the endpoint has no
            scheme.
        certificate_file: path of a PEM file with the certificates to trust. Default: those of the system.
        client_key_file: path of a PEM file with the key of the client certificate.
        client_certificate_file: path of a PEM file with the client certificate and, without ``client_key_file``, its
            key.
        max_request_bytes: size limit of a message in bytes, before compression. Default: 1 MiB; gRPC receivers refuse
            more than 4 MiB unless configured otherwise. Every message repeats the resource: with one above 512 KiB
            messages have up to 4 MiB, and with one above 4 MiB nothing can be sent.

    Raises:
        ValueError: an argument is not allowed; the message has its name, its value (never that of a header) and the
            allowed values.

    Examples:
        >>> exporter = otp.OTLPExporter("http://localhost:4317", timeout=5)
        >>> exporter
        <OTLPExporter grpc to localhost:4317>
        >>> exporter.shutdown()
    """

    takes_span_lists = True
    """Span processors may pass a whole ``SpanList`` of any length."""

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
        settings = Settings.from_environment(
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
        import_encoders()
        self._sender = Sender(settings, f"<OTLPExporter {settings.protocol} to {settings.displayed_endpoint}>")
        process_changes.watch(self)

    @property
    def displayed_endpoint(self) -> str:
        """The endpoint, without a password in its URL."""
        return self._sender.settings.displayed_endpoint

    @property
    def stats(self) -> ExportStats:
        """Counts of spans, requests and bytes so far, as one consistent :class:`ExportStats`."""
        return self._sender.stats

    def export(self, spans: Sequence[ReadableSpan], timeout_millis: float | None = None) -> SpanExportResult:
        """Sends spans and waits for the responses.

        A refused message does not stop the messages after it.

        Args:
            spans: the spans, of torch or of the SDK.
            timeout_millis: limit of the whole call in milliseconds. Default: ``timeout`` for each message.

        Returns:
            SUCCESS if the receiver accepted every message, else FAILURE.
        """
        deadline = Deadline.after(math.inf if timeout_millis is None else timeout_millis / 1000)
        with suppressed():
            limit = SizeLimit(lambda message: self._sender.deliver(message, deadline))
            done = list(self._export(spans, limit.send, deadline))
        left = len(spans) - sum(delivery.settled for delivery in done)
        if left:
            over = CLOSED if self._sender.is_closed else "there was no time left for them"
            self._sender.count(Response(Outcome.REFUSED, over), left)
        failed = left or any(delivery.failed for delivery in done)
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def export_some(
        self, spans: Sequence[ReadableSpan], timeout_millis: float, *, again: bool = False
    ) -> Iterator[Delivery]:
        """Sends each message once, until the receiver asks to retry later or stops responding.

        For a queue, which keeps the remaining spans and retries. Raises nothing.

        Args:
            spans: the spans, of torch or of the SDK.
            timeout_millis: limit of the whole call in milliseconds.
            again: whether the first message is a retry of one that was not accepted.

        Yields:
            A ``Delivery`` before each message is sent, and one with its outcome.
        """
        deadline = Deadline.after(timeout_millis / 1000)
        first = True

        def send(message: bytes | memoryview) -> Response:
            nonlocal first
            with suppressed():
                response = self._sender.attempt(message, deadline, again=again and first)
            first = False
            return response

        settled = 0
        for delivery in self._export(spans, SizeLimit(send).send, deadline):
            settled += delivery.settled
            yield delivery
        if self._sender.is_closed and settled < len(spans):
            left = len(spans) - settled
            self._sender.count(Response(Outcome.REFUSED, CLOSED), left)
            yield Delivery(failed=left)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 (the base's signature)
        """Returns True: the exporter buffers nothing, since ``export`` returns after everything was sent."""
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:  # noqa: ARG002 (as OpenTelemetry's exporters have it)
        """Stops sending, wakes threads that wait for a retry and closes the connections.

        Does not block; a second call has no effect.
        """
        self._sender.close()

    def __repr__(self) -> str:
        return self._sender.name

    def after_fork_in_child(self) -> None:
        """Gives a forked child its own connections, locks and counts. Called automatically."""
        self._sender.after_fork_in_child()

    # ---- within ----

    def _export(
        self, spans: Sequence[ReadableSpan], send: Callable[[bytes | memoryview, int], Response], deadline: Deadline
    ) -> Iterator[Delivery]:
        """Sends messages until one gets the outcome RETRY or the time is over."""
        settled = 0
        try:
            for message, count in messages(spans, self._sender.settings.max_request_bytes):
                if deadline.passed or self._sender.is_closed:
                    return
                yield Delivery(sending=count)
                response = send(message, count)
                if response.outcome is Outcome.RETRY:
                    yield Delivery(stopped_by=response, stopped_at=count)
                    return
                before = settled
                for delivery in self._delivered(spans[before : before + count], response, send, deadline):
                    settled += delivery.settled
                    yield delivery
                if settled < before + count:
                    return
        except Exception as error:  # noqa: BLE001 (an exporter never raises; the error is reported)
            left = len(spans) - settled
            reason = f"cannot be encoded: {type(error).__name__}: {error}"
            self._sender.count(Response(Outcome.REFUSED, reason), left)
            yield Delivery(failed=left)

    def _delivered(
        self,
        spans: Sequence[ReadableSpan],
        response: Response,
        send: Callable[[bytes | memoryview, int], Response],
        deadline: Deadline,
    ) -> Iterator[Delivery]:
        """Yields the outcome of the spans of a message.

        A message that is too large is split into halves, which are sent.
        """
        count = len(spans)
        if response.outcome is Outcome.TOO_LARGE and count > 1:
            settled = 0
            for half in (spans[: count // 2], spans[count // 2 :]):
                for delivery in self._export(half, send, deadline):
                    settled += delivery.settled
                    yield delivery
                if settled < len(half):
                    return
                settled = 0
        elif self._sender.count(response, count):
            rejected = min(response.rejected_spans, count)
            yield Delivery(count - rejected, rejected=rejected)
        else:
            yield Delivery(failed=count)
