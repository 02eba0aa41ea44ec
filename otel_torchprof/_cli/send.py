"""``otel-torchprof send``: OTLP files to an endpoint."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES
from otel_torchprof._export.otlp_reading import pieces
from otel_torchprof._export.requests_of_files import requests_of, split
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.sdk import suppressed
from otel_torchprof._export.sending import Sender, SizeLimit
from otel_torchprof._export.settings import Settings
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.errors import TorchProfError

from .progress import Reading
from .terminal import say

if TYPE_CHECKING:
    import argparse
    from typing import Any

    from otel_torchprof._export.requests_of_files import FileRequest

_SECONDS_BETWEEN_LINES = 0.5
_INTERRUPTED = 130


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``otel-torchprof``."""
    parser = commands.add_parser(
        "send",
        help="deliver OTLP files to a collector",
        description="Delivers spans from files to an OTLP endpoint: what OTLPFileExporter and export_otlp wrote, or an OpenTelemetry "
        "Collector's file exporter; protobuf or lines of JSON, maybe compressed with gzip. What is not given here is read from the "
        "OTEL_EXPORTER_OTLP_* variables. Exit status: 0 when every span was taken, 1 otherwise, 130 after Ctrl-C.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--endpoint", help="gRPC: http://host:port; HTTP: the URL as it is, with /v1/traces")
    parser.add_argument("--protocol", help="grpc or http/protobuf")
    parser.add_argument("--headers", help="name=value,name=value, percent-encoded")
    parser.add_argument("--compression", help="gzip or none")
    parser.add_argument("--timeout", help="seconds for one request with its retries")
    parser.add_argument(
        "--max-request-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="size of a request (default: 1 MiB)",
    )
    parser.add_argument(
        "--from",
        type=int,
        default=0,
        dest="offset",
        metavar="OFFSET",
        help="where to begin in the first file, as the last run said",
    )


def run(options: argparse.Namespace) -> int:
    """Sends; returns the exit status."""
    try:
        settings = Settings.from_environment(
            endpoint=options.endpoint,
            protocol=options.protocol,
            headers=options.headers,
            compression=options.compression,
            timeout=options.timeout,
            max_request_bytes=options.max_request_bytes,
        )
    except ValueError as error:
        raise TorchProfError(str(error)) from error
    if options.offset < 0:
        raise TorchProfError(f"--from is {options.offset}: allowed is a number of bytes, 0 or above")
    delivery = _Delivery(settings)
    with suppressed():
        status = delivery.deliver_all(options.files, options.offset)
    delivery.say_what_became_of_it()
    return status


class _Delivery:
    """Files on their way."""

    def __init__(self, settings: Settings) -> None:
        self._sender = Sender(settings, "otel-torchprof send")
        self._limit = SizeLimit(lambda message: self._sender.deliver(message, Deadline.after(math.inf)))
        self._max_bytes = settings.max_request_bytes
        self._where = settings.displayed_endpoint
        self._shows_progress = sys.stderr is not None and sys.stderr.isatty()
        self._next_line = 0.0

    def deliver_all(self, files: list[str], offset: int) -> int:
        """The exit status. A file that cannot be read does not stop those after it; a receiver that cannot be reached does."""
        fine, read = True, Reading(files, 1)
        for number, path in enumerate(files):
            at = offset if number == 0 else 0
            try:
                for request in requests_of(pieces(path, at, partial(read.watch, path)), self._max_bytes):
                    at = request.offset
                    if not self._deliver(request):
                        say(_again(at, files[number:]))
                        return 1
                    at = request.end
                    self._show(read)
            except TorchProfError as error:
                self._show_no_more()
                say(str(error))
                fine = False
            except KeyboardInterrupt:
                self._show_no_more()
                say(_again(at, files[number:]))
                return _INTERRUPTED
            finally:
                self._show_no_more()
        return 0 if fine and not self._has_lost else 1

    @property
    def _has_lost(self) -> bool:
        stats = self._sender.stats
        return stats.failed_spans > 0 or stats.rejected_spans > 0

    def _deliver(self, request: FileRequest) -> bool:
        """Whether it makes sense to continue: also where the receiver refused this one."""
        response = self._limit.send(request.body, request.spans)
        if response.outcome is Outcome.TOO_LARGE and request.spans > 1:
            parts = list(split(request, len(request.body) // 2))
            if len(parts) > 1:
                return all(self._deliver(part) for part in parts)
        if response.may_pass:
            self._show_no_more()
            say(f"{self._where}: {self._sender.settings.redacted(response.text)}")
            return False
        self._sender.count(response, request.spans)
        return True

    def say_what_became_of_it(self) -> None:
        """One line with exact counts; closes the connections."""
        stats = self._sender.stats
        self._sender.close()
        say(
            f"{stats.accepted_spans} spans sent to {self._where}, {stats.rejected_spans} rejected, {stats.failed_spans} failed; "
            f"{stats.requests} requests, {stats.bytes_sent / 2**20:.1f} MiB"
        )

    def _show(self, read: Reading) -> None:
        if self._shows_progress and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            sys.stderr.write(f"\r\x1b[K{read.line()}, {self._sender.stats.accepted_spans:,} spans sent")
            sys.stderr.flush()

    def _show_no_more(self) -> None:
        if self._shows_progress and self._next_line:
            self._next_line = 0.0
            sys.stderr.write("\r\x1b[K")


def _again(offset: int, files: list[str]) -> str:
    end_of_options = "-- " if any(path.startswith("-") for path in files) else ""
    command = f"otel-torchprof send --from {offset} {end_of_options}{' '.join(map(_quoted, files))}"
    return f"not all was sent; continue with: {command}"


def _quoted(path: str) -> str:
    """A word for a shell; one that a terminal cannot show as bash's escapes."""
    if path.isprintable():
        return shlex.quote(path)
    plain = set(range(0x20, 0x7F)) - set(b"'\\")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path)) + "'"
