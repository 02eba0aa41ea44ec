"""``OTLPFileExporter``: writes spans to files that can be sent later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from otel_torchprof import config, parsers
from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES, RECEIVERS_MAX_BYTES, message_size
from otel_torchprof._encode.otlp_json import is_json
from otel_torchprof.errors import checked

from .file_exporter import FileSpanExporter, Rotation
from .messages import import_encoders, messages
from .otlp_wire import common_size, parts

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .file_exporter import FileSeries
    from .otlp_reading import Piece


class OTLPFileExporter(FileSpanExporter):
    """Writes spans to files in an OTLP format, for ``otel-torchprof send FILE``, an OTLP receiver or a Collector.

    A name that ends in ``.json`` or ``.jsonl`` selects OTLP/JSON: one ``ExportTraceServiceRequest`` per line, the
    format of the specification's file exporter, which a Collector's file receiver reads. Any other name selects
    protobuf: messages back to back, which together are one valid message. ``.gz`` after either compresses the file.

    Works with :class:`TorchSpanProcessor`, with any other span processor and as ``OTEL_TRACES_EXPORTER=otlp_file``. The
    first export creates the file and replaces an older file of that name. The file is complete after each export; if
    the process is killed during one, a partial message remains at the end, and everything before it can be read.
    Exporters of one process with the same path share the file, with the limits of the first; the last one to shut down
    closes it. A forked child writes to its own file, and so does a process whose file another process already writes:
    the process id is inserted before the suffix.

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

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        max_files: int | None = None,
    ) -> None:
        size = None if max_bytes is None else checked("max_bytes", max_bytes, parsers.byte_size)
        keep = None if max_files is None else checked("max_files", max_files, parsers.whole_number)
        if keep is not None and size is None:
            raise ValueError(f"max_files is {max_files!r}; it needs max_bytes, which says when the next file begins")
        super().__init__(path, config.OTLP_FILE, Rotation(size, max_files=keep))

    def _writer(self, path: str) -> _MessageWriter:
        return _MessageWriter(self._series(path), json=is_json(self._template))


class _MessageWriter:
    """Writes concatenated messages, or one per line. Not thread-safe."""

    def __init__(self, series: FileSeries, *, json: bool) -> None:
        import_encoders(json=json)
        self.series = series
        self._json = json

    def write(self, spans: Sequence[ReadableSpan]) -> Iterator[int]:
        """Writes each message whole; yields the number of its spans."""
        series, most = self.series, self.series.rotation.max_bytes
        for message, count in messages(spans, min(DEFAULT_MAX_BYTES, most or DEFAULT_MAX_BYTES), json=self._json):
            if most and series.size and series.size + len(message) > most:
                series.begin_next()
            series.append((message,))
            yield count


# ---- pieces of files as requests of a size that receivers take ----


@dataclass(frozen=True)
class FileRequest:
    """A serialized request, and what of a file is in it."""

    body: bytes
    spans: int
    offset: int
    """Begin of the first piece in it."""
    end: int
    """End of the last piece; for a piece sent in several requests, its begin until the last of them."""


def requests_of(pieces: Iterable[Piece], max_bytes: int) -> Iterator[FileRequest]:
    """Joins small pieces and splits large ones, in order. Exceptions of ``pieces`` are raised after all requests before them."""
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
    """Splits a request into requests of at most ``max_bytes``; a larger span is alone in one."""
    last: FileRequest | None = None
    for body, spans in parts(request.body, max_bytes):
        if last is not None:
            yield last
        last = FileRequest(body, spans, request.offset, request.offset)
    if last is not None:
        yield replace(last, end=request.end)
