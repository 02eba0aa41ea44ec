"""``otel-torchprof send``: trace files, and the black boxes of processes that have died, to an endpoint."""

from __future__ import annotations

import math
import os
import shlex
import sys
import tempfile
import time
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES
from otel_torchprof._export.otlp_file import requests_of, split
from otel_torchprof._export.otlp_reading import pieces
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.sdk import suppressed
from otel_torchprof._export.sending import Sender, SizeLimit
from otel_torchprof._export.settings import Settings
from otel_torchprof._files.box_file import is_of_the_living, mark_sent, sole_sender, unsent
from otel_torchprof._files.box_reading import is_box, problems_of, read_box
from otel_torchprof._files.trace_columns import is_chrome
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.private_folder import default_folder
from otel_torchprof.errors import TorchProfError

from .convert import write_as
from .recover import write
from .terminal import ReadingProgress, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from otel_torchprof._export.otlp_file import FileRequest

_SECONDS_BETWEEN_LINES = 0.5
_INTERRUPTED = 130


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``otel-torchprof``."""
    parser = commands.add_parser(
        "send",
        help="send trace files to a receiver",
        description="Sends spans from files to an OTLP endpoint. Reads files of OTLPFileExporter, export_otlp and an "
        "OpenTelemetry Collector's file exporter, as protobuf or JSON lines; Chrome traces of this package or of "
        "torch.profiler, and black boxes, are converted first, as by convert; compressed or not. With --recovered, sends the traces of dead processes. The OTEL_EXPORTER_OTLP_* variables "
        "set the defaults of the options. Exit status: 0 if every span was accepted, 1 otherwise, 130 "
        "after Ctrl-C.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="trace file or black box; with --recovered, black box or folder of black boxes",
    )
    parser.add_argument(
        "--recovered",
        action="store_true",
        help="send the contents of the black boxes of dead processes (default: those in the user's folder), and "
        "rename each to .sent.otpbox; run it before the program starts again",
    )
    parser.add_argument("--endpoint", help="for gRPC http://host:port; for HTTP the complete URL, including /v1/traces")
    parser.add_argument("--protocol", help="grpc or http/protobuf")
    parser.add_argument("--headers", help="request headers as name=value,name=value, percent-encoded")
    parser.add_argument("--compression", help="gzip or none")
    parser.add_argument("--timeout", help="timeout per request including its retries, in seconds")
    parser.add_argument(
        "--max-request-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="maximum size of a request in bytes (default: 1 MiB)",
    )
    parser.add_argument(
        "--from",
        type=int,
        default=0,
        dest="offset",
        metavar="OFFSET",
        help="byte offset in the first file to continue from, as the previous run printed it",
    )


def run(options: argparse.Namespace) -> int:
    """Sends the files or boxes; returns the exit status."""
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
    _check(options)
    delivery = _Delivery(settings)
    with suppressed():
        if options.recovered:
            status = _send_recovered(delivery, options.files)
        else:
            status = _send_files(delivery, options.files, options.offset)
    delivery.finish()
    return status


def _check(options: argparse.Namespace) -> None:
    if options.offset < 0:
        raise TorchProfError(f"--from is {options.offset}: allowed is a number of bytes, 0 or above")
    if options.recovered and options.offset:
        raise TorchProfError("--from continues one file, and --recovered sends whole black boxes: use one of them")
    if not options.files and not options.recovered:
        raise TorchProfError("no FILE is given: name trace files, or use --recovered")


def _send_files(delivery: _Delivery, files: Sequence[str], offset: int) -> int:
    """Sends files in their order: OTLP as it is, others as whole traces."""
    if offset and _is_converted(files[0]):
        raise TorchProfError(f"--from continues an OTLP file, and {files[0]!r} is converted as a whole: leave it out")
    status, done = 0, 0
    for is_converted, together in groupby(files, _is_converted):
        paths = list(together)
        done += len(paths)
        if not delivery.can_continue:
            break
        if is_converted:
            for place, path in enumerate(paths, done - len(paths)):
                if delivery.can_continue:
                    status = max(status, _send_converted(delivery, path, files[place:]))
        else:
            text = partial(_text_with, rest=files[done:])
            status = max(status, delivery.deliver_all(paths, offset, text))
        offset = 0
    return status


def _text_with(offset: int, left: Sequence[str], *, rest: Sequence[str]) -> str:
    return _continue_text(offset, [*left, *rest])


def _is_converted(path: str) -> bool:
    """Whether it is a Chrome trace or a black box; what cannot be read is left to the reader of OTLP, which says so."""
    try:
        return Path(path).is_file() and (is_box(path) or is_chrome(path))
    except (OSError, TorchProfError):
        return False


def _send_converted(delivery: _Delivery, path: str, left: Sequence[str]) -> int:
    from otel_torchprof._profile.loaded import load

    try:
        prof = load(path)
        with tempfile.TemporaryDirectory(prefix="otel-torchprof-") as folder:
            trace = f"{folder}/trace.otlp"
            write_as(prof, trace, "otlp")
            status = delivery.deliver_all([trace], 0, lambda _offset, _files: _continue_text(0, left))
    except TorchProfError as error:
        say(str(error))
        return 1
    return status or int(prof.is_partial)


def _send_recovered(delivery: _Delivery, paths: Sequence[str]) -> int:
    """Sends the box of each dead process. A box that was not delivered in full is sent again by the next call."""
    status = 0
    for path in map(Path, paths or [str(default_folder())]):
        if not path.exists():  # no process has had a box yet
            say(f"{str(path)!r} does not exist: there is nothing to send")
        elif delivery.can_continue:
            status = max(status, _send_from(delivery, path))
    return status


def _send_from(delivery: _Delivery, path: Path) -> int:
    """Sends all boxes of a folder, or one box; returns the exit status."""
    is_one = path.is_file()
    folder = path.parent if is_one else path
    status = 0
    try:
        with sole_sender(folder) as is_alone:
            if not is_alone:
                say(f"another process is sending the boxes of {str(folder)!r}")
                return 0
            for box in [path] if is_one else unsent(path):
                if delivery.can_continue:
                    status = max(status, _send_box(delivery, box))
    except OSError as error:
        say(f"cannot read {str(path)!r}: {error.strerror}")
        return 1
    return status


def _send_box(delivery: _Delivery, path: Path) -> int:
    try:
        if is_of_the_living(path):
            say(f"{str(path)!r} is not sent: its process still runs")
            return 0
        if not os.access(path.parent, os.W_OK):  # it could not be renamed, and would be sent by every call
            say(f"{str(path)!r} is not sent, since its folder cannot be written to: its name says whether it was")
            return 1
        return _send_dead(delivery, path)
    except OSError as error:  # removed meanwhile, or another user's
        say(f"{str(path)!r} was left out: {error.strerror}")
    except TorchProfError as error:  # no box, or of another version
        say(str(error))
    return 1


def _send_dead(delivery: _Delivery, path: Path) -> int:
    contents = read_box(str(path))
    problems, status = problems_of(contents), 0
    with tempfile.TemporaryDirectory(prefix="otel-torchprof-") as folder:
        trace = f"{folder}/{path.name}.otlp"
        if write(contents, trace):
            status = delivery.deliver_all([trace], 0, _resend_text)
    for problem in problems:
        say(f"{str(path)!r}: {problem}")
    if delivery.can_continue:  # also with refused spans: they would be refused again
        mark_sent(path)
    return status or int(bool(problems))


class _Delivery:
    """Sends files one after the other and counts their spans."""

    def __init__(self, settings: Settings) -> None:
        self._sender = Sender(settings, "otel-torchprof send")
        self._limit = SizeLimit(lambda message: self._sender.deliver(message, Deadline.after(math.inf)))
        self._max_bytes = settings.max_request_bytes
        self._where = settings.displayed_endpoint
        self._shows_progress = sys.stderr is not None and sys.stderr.isatty()
        self._next_line = 0.0
        self.can_continue = True
        """False: the receiver cannot be reached, or the user has interrupted."""

    def deliver_all(self, files: list[str], offset: int, early_end_text: Callable[[int, list[str]], str]) -> int:
        """Sends files; returns the exit status. An unreadable file is skipped; an unreachable receiver ends the delivery.

        Args:
            files: paths of OTLP files.
            offset: byte offset in the first file.
            early_end_text: gives the message for an early end, from the offset of the first request that was not sent and the files left.
        """
        fine, read, lost = True, ReadingProgress(files, 1), self._lost_spans
        for number, path in enumerate(files):
            at = offset if number == 0 else 0
            try:
                for request in requests_of(pieces(path, at, partial(read.watch, path)), self._max_bytes):
                    at = request.offset
                    if not self._deliver(request):
                        say(early_end_text(at, files[number:]))
                        self.can_continue = False
                        return 1
                    at = request.end
                    self._show(read)
            except TorchProfError as error:
                self._show_no_more()
                say(str(error))
                fine = False
            except KeyboardInterrupt:
                self._show_no_more()
                say(early_end_text(at, files[number:]))
                self.can_continue = False
                return _INTERRUPTED
            finally:
                self._show_no_more()
        return 0 if fine and self._lost_spans == lost else 1

    @property
    def _lost_spans(self) -> int:
        return self._sender.stats.failed_spans + self._sender.stats.rejected_spans

    def _deliver(self, request: FileRequest) -> bool:
        """Sends a request; returns False if the receiver cannot be reached. A refused request is counted."""
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

    def finish(self) -> None:
        """Prints one line with exact counts and closes the connections."""
        stats = self._sender.stats
        self._sender.close()
        say(
            f"{stats.accepted_spans} spans sent to {self._where}, {stats.rejected_spans} rejected, {stats.failed_spans} failed; "
            f"{stats.requests} requests, {stats.bytes_sent / 2**20:.1f} MiB"
        )

    def _show(self, read: ReadingProgress) -> None:
        if self._shows_progress and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            sys.stderr.write(f"\r\x1b[K{read.line()}, {self._sender.stats.accepted_spans:,} spans sent")
            sys.stderr.flush()

    def _show_no_more(self) -> None:
        if self._shows_progress and self._next_line:
            self._next_line = 0.0
            sys.stderr.write("\r\x1b[K")


def _resend_text(_offset: int, _files: list[str]) -> str:
    return "not all was sent; the same command sends this box again, as a whole"


def _continue_text(offset: int, files: Sequence[str]) -> str:
    end_of_options = "-- " if any(path.startswith("-") for path in files) else ""
    command = f"otel-torchprof send --from {offset} {end_of_options}{' '.join(map(_quoted, files))}"
    return f"not all was sent; continue with: {command}"


def _quoted(path: str) -> str:
    """A path as a word for a shell; unprintable characters as bash's escapes."""
    if path.isprintable():
        return shlex.quote(path)
    plain = set(range(0x20, 0x7F)) - set(b"'\\")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path)) + "'"
