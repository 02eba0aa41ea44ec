"""``ChromeTraceExporter``: writes spans to a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof import config
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof.errors import ExportError

from .file import check_writable, naming
from .own_path import PID, own_path
from .rotation import RotatedTrace, Rotation, before_suffix, part_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

_log = LimitedLog()
process_changes.watch(_log)


class _Trace:
    """The trace of one path in this process, shared by the exporters that write to it."""

    def __init__(self, path: str, rotation: Rotation) -> None:
        self.lock = threads.Lock()
        self.users = 0
        self.files = RotatedTrace(path, rotation, _log)

    def append(self, spans: Sequence[ReadableSpan]) -> None:
        if len(spans) == 0:
            return
        with self.lock:
            self.files.append(spans)


class _Traces:
    """The traces of this process, by real path."""

    def __init__(self) -> None:
        self._begin()
        self._exporters: weakref.WeakSet[ChromeTraceExporter] = weakref.WeakSet()
        process_changes.watch(self)

    def _begin(self) -> None:
        self._lock = threads.Lock()
        self._traces: dict[str, _Trace] = {}

    def join(self, exporter: ChromeTraceExporter, path: str, rotation: Rotation) -> _Trace:
        """Registers the exporter for a path and returns the trace of that path.

        The first exporter of a path sets its rotation.
        """
        real = (
            os.path.realpath(path) if Path(path).is_absolute() else path
        )  # relative: where there is no working directory
        with self._lock:
            trace = self._traces.get(real)
            if trace is None:
                trace = self._traces[real] = _Trace(path, rotation)
            elif trace.files.rotation != rotation:
                _log.warning("Chrome trace %r: another exporter has begun it with %s", path, trace.files.rotation)
            trace.users += 1
            self._exporters.add(exporter)
        return trace

    def leave(self, exporter: ChromeTraceExporter, trace: _Trace) -> None:
        """Removes an exporter and closes the file with the last one. A second call has no effect. Raises OSError."""
        with self._lock:
            if exporter not in self._exporters:
                return
            self._exporters.discard(exporter)
            trace.users -= 1
            if trace.users:
                return
            self._traces = {path: other for path, other in self._traces.items() if other is not trace}
        with trace.lock:
            trace.files.close()

    def after_fork_in_child(self) -> None:
        """Moves the child's exporters to files of their own, which their next export creates.

        The open files are the parent's.
        """
        for trace in self._traces.values():
            trace.files.abandon()
        self._begin()
        for exporter in list(self._exporters):
            exporter._join_as_child()  # noqa: SLF001 - one file, one secret


_TRACES = _Traces()


class ChromeTraceExporter(SpanExporter):
    """Writes spans to Chrome JSON files for https://ui.perfetto.dev or chrome://tracing.

    Works with any span processor (``BatchSpanProcessor(ChromeTraceExporter("trace.json"))``), with
    :class:`TorchSpanProcessor` and as ``OTEL_TRACES_EXPORTER=chrome``; it writes torch's spans and all others. The
    first export creates the file and replaces an older file of that name. The file is a complete document after each
    export, even if the process is killed.

    Spans with a ``thread.id`` lie on one track per thread. Other spans lie on further tracks ("spans 1", ...), on which
    a span contains another only if it is its parent. Ids, attributes, status and links become arguments of a slice;
    span events become instants.

    Exporters of one process with the same path share the file; the last one to shut down closes it. A forked child
    writes to its own file, and so does a process whose file another process already writes: the process id is inserted
    before the suffix.

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

    takes_span_lists = True
    """Span processors may pass a ``SpanList`` of torch's spans as it is."""
    takes_whole_traces = True
    """A file has no trace size limit: it gets every recorded span, before a policy drops any."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        steps_per_file: int | None = None,
        max_files: int | None = None,
    ) -> None:
        self._rotation = Rotation.of(max_bytes, steps_per_file, max_files)
        given = config.CHROME_TRACE.read() if path is None else os.fspath(path)
        if not isinstance(given, str):
            raise TypeError(f"path is {path!r} of type {type(path).__name__}: give a str or a pathlib.Path")
        self._template = given
        self._down = False
        try:
            with naming(given):
                self._template = os.path.join(os.getcwd(), given)  # noqa: PTH109, PTH118 - the empty name stays a folder
            own = own_path(self._template)
            check_writable(part_path(own, 0) if self._rotation.rotates else own)
        except ExportError as error:
            if path is not None:
                raise
            _log.warning("%s; until then spans are lost (%s names another file)", error, config.CHROME_TRACE)
        self._trace = _TRACES.join(self, own_path(self._template), self._rotation)

    @property
    def path(self) -> str:
        """Absolute path of the file that this process is writing."""
        return self._trace.files.file.path

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files of the trace that exist, oldest first; empty before the first export."""
        return self._trace.files.files

    @property
    def bytes_written(self) -> int:
        """Bytes written to disk so far, including files that were deleted since."""
        return self._trace.files.bytes_written

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Appends spans to the file.

        Never raises: returns FAILURE, with a warning once a minute, if they cannot be written.
        """
        if self._down:
            _log.warning("ChromeTraceExporter is shut down: %d spans are not written to %r", len(spans), self.path)
            return SpanExportResult.FAILURE
        try:
            with naming(self.path):
                self._trace.append(spans)
        except Exception as error:  # noqa: BLE001 - an exporter must not harm the application
            _log.warning("Chrome trace: %d spans are not written: %s", len(spans), error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Waits for a running export on another thread; exports leave nothing buffered here.

        Args:
            timeout_millis: longest wait in milliseconds.

        Returns:
            False after the timeout, else True.
        """
        if not self._trace.lock.acquire(timeout=max(timeout_millis, 0) / 1000):
            return False
        self._trace.lock.release()
        return True

    def shutdown(self) -> None:
        """Closes the file unless another exporter uses it.

        Later exports return FAILURE; a second call has no effect.
        """
        self._down = True
        try:
            _TRACES.leave(self, self._trace)
        except OSError as error:
            _log.warning("Chrome trace %r could not be ended: %s", self.path, error)

    def shared(self) -> ChromeTraceExporter:
        """Returns another exporter for the same file; the last of them to shut down closes it."""
        return ChromeTraceExporter(self._template, **self._rotation._asdict())

    def _join_as_child(self) -> None:
        path = own_path(self._template)
        own = path if PID in self._template else before_suffix(path, str(os.getpid()))
        self._trace = _TRACES.join(self, own, self._rotation)
