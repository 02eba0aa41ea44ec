"""``ChromeTraceExporter``: spans into a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof import config
from otel_torchprof._process import fork
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof.errors import ExportError

from .file import check_writable, naming
from .own_path import PID, own_path
from .rotation import RotatedTrace, Rotation, before_suffix, part_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

_log = LimitedLog()
fork.watch(_log)


class _Trace:
    """One trace of this process: shared by the exporters that write to it."""

    def __init__(self, path: str, rotation: Rotation) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.files = RotatedTrace(path, rotation, _log)

    def append(self, spans: Sequence[ReadableSpan]) -> None:
        if len(spans) == 0:
            return
        with self.lock:
            self.files.append(spans)


class _Traces:
    """The trace files of this process by their real path."""

    def __init__(self) -> None:
        self._begin()
        self._exporters: weakref.WeakSet[ChromeTraceExporter] = weakref.WeakSet()
        fork.watch(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[str, _Trace] = {}

    def join(self, exporter: ChromeTraceExporter, path: str, rotation: Rotation) -> _Trace:
        """The file that the exporter shares with all others of that path, whose rotation is that of the first."""
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
        """The last one to leave closes the file. Without effect for one that has left; raises OSError."""
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
        """The files are the parent's; the child's exporters join files of its own, which are made when they export."""
        for trace in self._traces.values():
            trace.files.abandon()
        self._begin()
        for exporter in list(self._exporters):
            exporter._join_as_child()  # noqa: SLF001 - one file, one secret


_TRACES = _Traces()


class ChromeTraceExporter(SpanExporter):
    """Writes spans, torch's and all others, to a Chrome JSON file for https://ui.perfetto.dev or chrome://tracing.

    For any span processor (``BatchSpanProcessor(ChromeTraceExporter("trace.json"))``), for :class:`TorchSpanProcessor`, and
    for ``OTEL_TRACES_EXPORTER=chrome``. The file is complete after each export, also when the process is killed; it is made
    by the first one, and an older file of that name is replaced. What is in it: one track per thread for spans with a
    ``thread.id``, further tracks ("spans 1", ...) for spans without, on which a span lies inside another only if that is
    its parent. Ids, attributes, status and links are the arguments of a slice, span events are instants.

    Exporters of one process with the same file share it; the last one to be shut down closes it. A forked child writes to a
    file of its own, and so does a process whose file another one writes to: the process id goes before the suffix.

    With ``max_bytes`` or ``steps_per_file`` there are several files, each a whole document with the names of its threads, whose
    times count from the same moment: ``trace.000000.json``, ``trace.000001.json`` and so on, or the number in place of
    ``{part}``. No tree of spans is torn: the next file begins where a step has ended; where there are no steps, at an
    top-level span. A step that is larger than ``max_bytes`` has a file of its own, which then is as well. Files of an earlier
    run are replaced where the names are the same, and never deleted otherwise. What is no regular file never rotates by size.

    Memory does not grow with the number of spans. Costs about 0.3 µs per span for those of torch in
    :class:`TorchSpanProcessor` and 30 µs for objects of the SDK. Safe from any thread.

    Args:
        path: the file; ``{pid}`` in it is replaced by the process id, ``{rank}`` by the rank that the launcher gave it (0 without one), and a name that ends in ``.gz`` is compressed.
            Default: ``OTEL_TORCHPROF_CHROME_TRACE``, else ``trace-{pid}.json`` in the working directory.
        max_bytes: of a file on the disk, so compressed where it is, beyond which the next begins. A number, or ``"100M"``.
            Default: ``OTEL_TORCHPROF_CHROME_TRACE=PATH,max_bytes=...``, else one file of any size.
        steps_per_file: after which the next begins. Default: its ``steps_per_file=``, else any number.
        max_files: that are kept; the oldest go. Default: its ``max_files=``, else all.

    Raises:
        ExportError: ``path`` cannot be written, for instance because its folder does not exist. One from the environment is
            warned of instead, so that the application starts.
        TypeError: ``path`` is not a str or path-like.
        ValueError: another argument is no such number; the message names it.
    """

    takes_span_lists = True
    """Batches of torch's spans are welcome whole."""
    takes_whole_traces = True
    """A file has no budget: it gets all that was recorded, before a policy leaves anything out."""

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
        """Where this process writes now."""
        return self._trace.files.file.path

    @property
    def files(self) -> tuple[str, ...]:
        """What is there of the trace, the oldest file first; nothing before the first export."""
        return self._trace.files.files

    @property
    def bytes_written(self) -> int:
        """On the disk so far, files that were deleted since then among them."""
        return self._trace.files.bytes_written

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Appends the spans to the file. Never raises: FAILURE, with a warning once a minute, when they could not be written."""
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
        """Waits for an export that another thread is in; each export hands all it has to the system. False after the timeout."""
        if not self._trace.lock.acquire(timeout=max(timeout_millis, 0) / 1000):
            return False
        self._trace.lock.release()
        return True

    def shutdown(self) -> None:
        """Closes the file if no other exporter uses it. Nothing is written after this; a second call has no effect."""
        self._down = True
        try:
            _TRACES.leave(self, self._trace)
        except OSError as error:
            _log.warning("Chrome trace %r could not be ended: %s", self.path, error)

    def shared(self) -> ChromeTraceExporter:
        """One more exporter that writes to the same file, which the last of them to be shut down closes."""
        return ChromeTraceExporter(self._template, **self._rotation._asdict())

    def _join_as_child(self) -> None:
        path = own_path(self._template)
        own = path if PID in self._template else before_suffix(path, str(os.getpid()))
        self._trace = _TRACES.join(self, own, self._rotation)
