"""``OTLPExporter``: spans to a collector, by gRPC or HTTP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES
from otel_torchprof._process import fork
from otel_torchprof._process.deadline import Deadline

from .delivery import Delivery
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

    Spans of this package go as bytes from the native encoder; any other span as OpenTelemetry encodes it, so the exporter
    serves every span processor. What is not given is read from the standard ``OTEL_EXPORTER_OTLP_*`` variables.

    ``export`` blocks until the receiver has answered, and retries what may pass: with growing waits, or as long as the
    receiver asks for, all within ``timeout``. In a :class:`TorchSpanProcessor` what may pass is retried for as long as it fits
    into the queue, so that an outage loses nothing that does. It never raises and never logs a header's value. Its own
    traffic is not traced. Thread-safe; in a forked child it makes connections of its own.

    Args:
        endpoint: gRPC: ``http://host:port``, ``https://host:port`` or ``host:port``. HTTP: the URL as it is, with ``/v1/traces``.
        protocol: ``grpc`` (the default) or ``http/protobuf``.
        headers: to send along: a mapping, pairs, or ``"name=value,name=value"`` with percent-encoded values. They are added to those of the
            variables.
        timeout: seconds per message of up to ``max_request_bytes``, with its retries; in a TorchSpanProcessor per attempt. By default 10.
        compression: ``gzip`` or ``none``; members of grpc's and OpenTelemetry's enums too.
        insecure: gRPC: False asks for TLS whatever the endpoint's scheme; True for none where the endpoint has no scheme.
        certificate_file: PEM file with the certificates to trust instead of the system's.
        client_key_file: PEM file with the key of the client certificate.
        client_certificate_file: PEM file with the client certificate, and its key where that has no file of its own.
        max_request_bytes: size of a message, before compression. By default 1 MiB; gRPC receivers refuse more than 4 MiB unless told otherwise.
            With a resource above 512 KiB, which each message has again, up to 4 MiB; with one above 4 MiB nothing can be sent.

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
        fork.watch(self)

    @property
    def displayed_endpoint(self) -> str:
        """Where it sends to, without a password that may be in the URL."""
        return self._sender.settings.displayed_endpoint

    @property
    def stats(self) -> ExportStats:
        """What it did so far, at one moment."""
        return self._sender.stats

    def export(self, spans: Sequence[ReadableSpan], timeout_millis: float | None = None) -> SpanExportResult:
        """Sends the spans; SUCCESS when the receiver took every message.

        A message that is refused does not stop those after it. ``timeout_millis`` bounds the whole call; without it, it lasts at
        most ``timeout`` for each message.
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
        """Sends the spans, each message once, until the receiver says, or shows, that it can take no more now.

        For a queue that keeps the rest and tries again; it is notified of each message before it is sent and after. Raises nothing.
        ``timeout_millis`` bounds the whole of it; ``again``: the first message was sent before, and was not taken.
        """
        deadline = Deadline.after(timeout_millis / 1000)
        first = True

        def send(message: bytes) -> Response:
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
        """True: nothing is kept here, ``export`` returns when everything has been sent."""
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:  # noqa: ARG002 (as OpenTelemetry's exporters have it)
        """Sends no more, wakes whoever waits to try again, and closes the connections. Does not block; a second call does nothing."""
        self._sender.close()

    def __repr__(self) -> str:
        return self._sender.name

    def after_fork_in_child(self) -> None:
        """In a forked child: connections, locks and counts of its own. Called by itself."""
        self._sender.after_fork_in_child()

    # ---- within ----

    def _export(
        self, spans: Sequence[ReadableSpan], send: Callable[[bytes, int], Response], deadline: Deadline
    ) -> Iterator[Delivery]:
        """Sends message after message until one answers RETRY, or there is no time left."""
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
        except Exception as error:  # noqa: BLE001 (an exporter never raises; whatever it was is told)
            left = len(spans) - settled
            reason = f"cannot be encoded: {type(error).__name__}: {error}"
            self._sender.count(Response(Outcome.REFUSED, reason), left)
            yield Delivery(failed=left)

    def _delivered(
        self,
        spans: Sequence[ReadableSpan],
        response: Response,
        send: Callable[[bytes, int], Response],
        deadline: Deadline,
    ) -> Iterator[Delivery]:
        """What became of the spans of a message with that response; of one that is too large each half is sent."""
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
