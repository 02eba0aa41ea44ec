"""``OTLPFileExporter``: writes spans to files that can be sent later."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof import config, parsers
from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES, RECEIVERS_MAX_BYTES, message_size
from otel_torchprof._encode.otlp_json import is_json
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof.errors import ExportError, checked

from .file import check_writable, naming
from .ledger import Delivery
from .messages import import_encoders, messages
from .otlp_wire import common_size, parts
from .own_path import PID, own_path
from .rotation import before_suffix, own_series, part_path
from .stream import StreamedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .otlp_reading import Piece


class OTLPFileExporter(SpanExporter):
    """Writes spans to files in an OTLP format, for ``otel-torchprof send FILE``, an OTLP receiver or a Collector.

    A name that ends in ``.json`` or ``.jsonl`` selects OTLP/JSON: one ``ExportTraceServiceRequest`` per line, the
    format of the specification's file exporter, which a Collector's file receiver reads. Any other name selects
    protobuf: messages back to back, which together are one valid message. ``.gz`` after either compresses the file.

    Works with :class:`TorchSpanProcessor`, with any other span processor and as ``OTEL_TRACES_EXPORTER=otlp_file``. The
    first export creates the file and replaces an older file of that name. The file is complete after each export; if
    the process is killed during one, a partial message remains at the end, and everything before it can be read. A
    forked child writes to its own file, and so does a process whose file another process already writes: the process id
    is inserted before the suffix.

    Thread-safe. Memory does not grow with the number of spans. Costs about 0.1 µs per torch span as protobuf and 0.2 µs
    as JSON, more with ``.gz``, and 25 to 75 µs per span object of the SDK.

    Args:
        path: path of the file. ``{pid}`` is replaced by the process id and ``{rank}`` by the rank from the launcher (0
            without one). Default: ``OTEL_TORCHPROF_OTLP_FILE``, else ``trace-{pid}.otlp`` in the working directory.
        max_bytes: size of one file on disk, an int of bytes or a str with K, M or G; further spans go to the next file:
            ``trace.000000.otlp``, ``trace.000001.otlp`` and so on, or the number in place of ``{part}``. A single
            larger span gets its own file. Default: one file without a limit.
        max_files: with ``max_bytes``, the number of files to keep; the oldest are deleted. Default: all.

    Raises:
        ExportError: ``path`` cannot be written, for example because its folder does not exist. A path from the
            environment is logged as a warning instead, so that the application starts.
        TypeError: ``path`` is not a str or path-like.
        ValueError: a limit is not allowed; the message has the allowed values.

    Examples:
        >>> exporter = otp.OTLPFileExporter("trace.jsonl")
        >>> with otp.stream(exporter):
        ...     y = torch.ones(3) + 1
        >>> [path.rpartition("/")[2] for path in exporter.files]
        ['trace.jsonl']
    """

    takes_span_lists = True
    """Span processors may pass a ``SpanList`` of torch's spans as it is."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        max_files: int | None = None,
    ) -> None:
        given = config.OTLP_FILE.read() if path is None else os.fspath(path)
        if not isinstance(given, str):
            raise TypeError(f"path is {path!r} of type {type(path).__name__}: give a str or a pathlib.Path")
        self._max_bytes = None if max_bytes is None else checked("max_bytes", max_bytes, parsers.byte_size)
        self._max_files = None if max_files is None else checked("max_files", max_files, parsers.whole_number)
        if self._max_files is not None and self._max_bytes is None:
            raise ValueError(f"max_files is {max_files!r}; it needs max_bytes, which says when the next file begins")
        self._log = LimitedLog()
        self._template = given
        self._json = is_json(given)
        import_encoders(json=self._json)
        self._down = False
        self._users = 1
        try:
            with naming(given):
                self._template = os.path.join(os.getcwd(), given)  # noqa: PTH109, PTH118 - the empty name stays a folder
            check_writable(self._part_path(own_path(self._template), 0))
        except ExportError as error:
            if path is not None:
                raise
            self._log.warning("%s; spans are lost (%s names another file)", error, config.OTLP_FILE)
        self._begin(own_path(self._template))
        process_changes.watch(self)

    @property
    def path(self) -> str:
        """Absolute path of the file that this process is writing."""
        return self._file.path

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that were written and not deleted, oldest first."""
        with self._lock:
            return (*self._whole, *(() if self._file.is_empty else (self._file.path,)))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Appends spans to the file.

        Never raises: returns FAILURE, with a warning once a minute, if any cannot be written.
        """
        failed = sum(delivery.failed for delivery in self.export_some(spans, 0.0))
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def export_some(
        self,
        spans: Sequence[ReadableSpan],
        timeout_millis: float,  # noqa: ARG002 (for a queue)
        *,
        again: bool = False,  # noqa: ARG002 (for a queue)
    ) -> Iterator[Delivery]:
        """Like :meth:`export`, for a queue: yields the number of written and failed spans.

        Never waits for a receiver.
        """
        yield Delivery(sending=len(spans))
        written, why = 0, "it is shut down"
        if not self._down:
            try:
                with self._lock, naming(self.path):
                    size = min(DEFAULT_MAX_BYTES, self._max_bytes or DEFAULT_MAX_BYTES)
                    for message, count in messages(spans, size, json=self._json):
                        self._append(message)
                        written += count
            except Exception as error:  # noqa: BLE001 - an exporter must not harm the application
                why = str(error)
        if lost := len(spans) - written:
            self._log.warning("OTLPFileExporter: %d spans are not written to %r: %s", lost, self.path, why)
        yield Delivery(written, lost)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Waits for a running export on another thread; exports leave nothing buffered here.

        Args:
            timeout_millis: longest wait in milliseconds.

        Returns:
            False after the timeout, else True.
        """
        if not self._lock.acquire(timeout=max(timeout_millis, 0) / 1000):
            return False
        self._lock.release()
        return True

    def shutdown(self) -> None:
        """Closes the file. Later exports return FAILURE; a second call has no effect."""
        self._users -= 1
        if self._users > 0:
            return
        self._down = True
        try:
            with self._lock:
                self._file.close()
        except OSError as error:
            self._log.warning("OTLPFileExporter: %r could not be closed: %s", self.path, error)

    def after_fork_in_child(self) -> None:
        """Gives a forked child its own file, which its first export creates. Called automatically."""
        self._log.after_fork_in_child()
        self._file.abandon()
        path = own_path(self._template)
        self._begin(path if PID in self._template else before_suffix(path, str(os.getpid())))

    def shared(self) -> OTLPFileExporter:
        """Returns this exporter for one more user; the last of them to shut it down closes the file."""
        self._users += 1
        return self

    # ---- within ----

    def _begin(self, path: str) -> None:
        self._lock = threads.Lock()
        self._path = path
        self._part = 0
        self._claimed = False
        self._whole: deque[str] = deque()
        self._file = self._new_file()

    def _append(self, message: bytes) -> None:
        if self._max_bytes and not self._claimed:
            self._claimed = True
            self._claim(own_series(self._path))
        if self._max_bytes and not self._file.is_empty and self._file.size + len(message) > self._max_bytes:
            self._next_file()
        requested = self._file.path
        self._file.append((message,))
        if self._file.path != requested:
            self._log.warning("OTLPFileExporter: another process writes to %r, this one to %r", requested, self.path)
            self._path = before_suffix(self._path, str(os.getpid()))
        if self._max_files:
            self._delete_oldest(self._max_files)

    def _claim(self, path: str) -> None:
        if path != self._path:
            self._log.warning("OTLPFileExporter: another process writes to %r, this one to %r", self._path, path)
            self._path = path
            self._file = self._new_file()

    def _next_file(self) -> None:
        self._file.close()
        self._whole.append(self._file.path)
        self._part += 1
        self._file = self._new_file()

    def _delete_oldest(self, keep: int) -> None:
        """Deletes the oldest files, once the file after them has spans."""
        while len(self._whole) >= keep:
            oldest = self._whole.popleft()
            try:
                Path(oldest).unlink(missing_ok=True)
            except OSError as error:
                self._log.warning("OTLPFileExporter: the old file %r could not be deleted: %s", oldest, error)

    def _new_file(self) -> StreamedFile:
        path = self._part_path(self._path, self._part)
        return StreamedFile(path, beside=before_suffix(path, str(os.getpid())), closing=b"")

    def _part_path(self, path: str, part: int) -> str:
        if self._max_bytes is None:
            return path
        return part_path(path, part)


# ---- pieces of files as requests of a size that receivers take ----


@dataclass(frozen=True)
class FileRequest:
    """A serialized request, and what of a file is in it."""

    body: bytes
    spans: int
    offset: int
    """Where the first piece in it begins."""
    end: int
    """Where the last one ends; of one that is sent in several requests, where it begins until the last of them."""


def requests_of(pieces: Iterable[Piece], max_bytes: int) -> Iterator[FileRequest]:
    """Small pieces together and large ones apart, in order. What ``pieces`` raises is raised once all before it went."""
    waiting: list[Piece] = []
    size = 0
    try:
        for piece in pieces:
            if not piece.spans:
                continue
            if waiting and size + len(piece.body) > max_bytes:
                yield _joined(waiting)
                waiting, size = [], 0
            if len(piece.body) > max_bytes:
                yield from split(_joined([piece]), _size(piece.body, max_bytes))
            else:
                waiting.append(piece)
                size += len(piece.body)
    except Exception:
        if waiting:
            yield _joined(waiting)
        raise
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[Piece]) -> FileRequest:
    """Messages end to end are one."""
    body = b"".join(piece.body for piece in pieces)
    return FileRequest(body, sum(piece.spans for piece in pieces), pieces[0].offset, pieces[-1].end)


def _size(body: bytes, max_bytes: int) -> int:
    common = common_size(body)
    # Whether a resource alone is too large is the receiver's to say: it may take more than others do.
    return message_size(max_bytes, common) if common < RECEIVERS_MAX_BYTES else len(body)


def split(request: FileRequest, max_bytes: int) -> Iterator[FileRequest]:
    """The same spans in requests of at most so many bytes; one that alone is larger goes alone."""
    last: FileRequest | None = None
    for body, spans in parts(request.body, max_bytes):
        if last is not None:
            yield last
        last = FileRequest(body, spans, request.offset, request.offset)
    if last is not None:
        yield replace(last, end=request.end)
