"""``ChromeTraceExporter``: writes spans to a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._encode.chrome_spans import CLOSING, ChromeSpans
from otel_torchprof._encode.spans import SpanList, SpanParts, step_ends

from .file_exporter import FileSpanExporter, Rotation

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .file_exporter import FileSeries


class ChromeTraceExporter(FileSpanExporter):
    """Writes spans to Chrome JSON files for https://ui.perfetto.dev or chrome://tracing.

    Works with any span processor (``BatchSpanProcessor(ChromeTraceExporter("trace.json"))``), with
    :class:`TorchSpanProcessor` and as ``OTEL_TRACES_EXPORTER=chrome``; it writes torch's spans and all others. The
    first export creates the file and replaces an older file of that name. The file is a complete document after each
    export, even if the process is killed.

    Spans with a ``thread.id`` lie on one track per thread. Other spans lie on further tracks ("spans 1", ...), on which
    a span contains another only if it is its parent. Ids, attributes, status and links become arguments of a slice;
    span events become instants.

    Exporters of one process with the same path share the file, with the limits of the first; the last one to shut down
    closes it. A forked child writes to its own file, and so does a process whose file another process already writes:
    the process id is inserted before the suffix.

    ``max_bytes`` and ``steps_per_file`` rotate the file: ``trace.000000.json``, ``trace.000001.json`` and so on, or the
    number in place of ``{part}``. Each file is a complete document with thread names, and the timestamps of all files
    have one origin. A tree of spans is never split: the next file begins after a step has ended or, without steps, at a
    top-level span. A step larger than ``max_bytes`` gets its own file, which exceeds the limit. Files of an earlier run
    are replaced if the names match and are never deleted otherwise. A path that is not a regular file never rotates by
    size.

    Thread-safe. Memory does not grow with the number of spans. Costs about 0.3 µs per torch span in a
    :class:`TorchSpanProcessor` and 30 µs per span object of the SDK.

    Args:
        path: path of the file. ``{pid}`` is replaced by the process id and ``{rank}`` by the rank from the launcher (0
            without one); a name that ends in ``.gz`` is compressed. Default: ``OTEL_TORCHPROF_CHROME_TRACE``, else
            ``trace-{pid}.json`` in the working directory.
        max_bytes: size on disk, after compression, at which the next file begins: an int of bytes or a str such as
            ``"100M"``. Default: ``OTEL_TORCHPROF_CHROME_TRACE=PATH,max_bytes=...``, else no limit.
        steps_per_file: number of steps after which the next file begins. Default: ``steps_per_file=`` of the same
            variable, else no limit.
        max_files: number of files to keep; the oldest are deleted. Default: ``max_files=`` of the same variable, else
            all.

    Raises:
        ExportError: ``path`` cannot be written, for example because its folder does not exist. A path from the
            environment is logged as a warning instead, so that the application starts.
        TypeError: ``path`` is not a str or path-like.
        ValueError: another argument is not an allowed number; the message names it.

    Examples:
        >>> exporter = otp.ChromeTraceExporter("trace.json")
        >>> with otp.stream(exporter):
        ...     y = torch.ones(3) + 1
        >>> [path.rpartition("/")[2] for path in exporter.files]
        ['trace.json']
    """

    takes_whole_traces = True
    """A file has no trace size limit: it gets every recorded span, before a policy drops any."""
    takes_application_spans = True
    """Without them, the file would be half a picture."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        steps_per_file: int | None = None,
        max_files: int | None = None,
    ) -> None:
        rotation = Rotation(
            config.CHROME_MAX_BYTES.given(max_bytes),
            config.CHROME_STEPS_PER_FILE.given(steps_per_file),
            config.CHROME_MAX_FILES.given(max_files),
        )
        super().__init__(path, config.CHROME_TRACE, rotation)

    def _writer(self, path: str) -> _ChromeWriter:
        return _ChromeWriter(self._series(path, CLOSING))


class _ChromeWriter:
    """Writes a series of complete documents. Not thread-safe."""

    def __init__(self, series: FileSeries) -> None:
        self.series = series
        self._encoder = ChromeSpans()
        self._steps = 0

    def write(self, spans: Sequence[ReadableSpan]) -> Iterator[int]:
        """Writes spans, and begins the next file when it is due, without splitting a tree."""
        count, most = len(spans), self.series.rotation.steps_per_file
        if most is None:
            self._append_fitting(spans)
        else:
            self._append_steps(spans, most)
        yield count

    def _append_steps(self, spans: Sequence[ReadableSpan], most: int) -> None:
        ends = step_ends(spans)
        while isinstance(spans, SpanList) and self._steps + len(ends) >= most:
            cut = int(ends[most - self._steps - 1])
            parts = SpanParts(spans)
            if len(before := parts.between(-math.inf, cut)):
                self._append_fitting(before)
            self._begin_next()
            spans = parts.between(cut, math.inf)
            ends = step_ends(spans)
        if len(spans):
            self._append_fitting(spans)
        self._steps += len(ends)

    def _append_fitting(self, spans: Sequence[ReadableSpan]) -> None:
        """Appends all spans to this file, or as many as fit, without splitting a tree."""
        most = self.series.rotation.max_bytes
        if most is None:
            self._append(spans, None)
        elif not self._append(spans, most):
            first, second = _halves(spans)
            if len(first) and len(second):
                self._append_fitting(first)
                self._append_fitting(second)
                return
            if self.series.size:
                self._begin_next()
            self._append(spans, None)

    def _append(self, spans: Sequence[ReadableSpan], most: int | None) -> bool:
        """Appends spans to this file; returns whether they fitted."""
        encoder = self._encoder if most is None else self._encoder.copied()
        try:
            fits = self.series.append(encoder.encode(spans, begin=not self.series.size), most)
        except BaseException:
            self._encoder.report_again()
            raise
        if fits:
            self._encoder = encoder
        return fits

    def _begin_next(self) -> None:
        self.series.begin_next()
        self._steps = 0


def _halves(spans: Sequence[ReadableSpan]) -> tuple[Sequence[ReadableSpan], Sequence[ReadableSpan]]:
    """Splits spans into two halves of whole steps or trees; one is empty if there is only one step or tree."""
    if not isinstance(spans, SpanList):
        return spans[: len(spans) // 2], spans[len(spans) // 2 :]
    parts = SpanParts(spans)
    cuts = parts.cuts()
    if not len(cuts):
        return spans, ()
    middle = int(cuts[len(cuts) // 2])
    return parts.between(-math.inf, middle), parts.between(middle, math.inf)
