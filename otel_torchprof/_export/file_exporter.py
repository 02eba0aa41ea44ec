"""Base of exporters that write files: paths, series of files, sharing inside of a process, and forks."""

from __future__ import annotations

import glob
import os
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._ranks.ranks import place_in
from otel_torchprof.errors import ExportError, warn_once

from .file import check_writable, naming
from .ledger import Delivery
from .stream import StreamedFile, is_held

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from typing_extensions import Self

    from otel_torchprof import config

PID = "{pid}"
RANK = "{rank}"
PART = "{part}"


# ---- names of files ----


def own_path(template: str) -> str:
    """The path for this process: ``{pid}`` is its id, ``{rank}`` its rank from the launcher, 0 without one."""
    path = template.replace(PID, str(os.getpid()))
    if RANK in path:
        place = place_in(os.environ)
        path = path.replace(RANK, str(0 if place is None else place.rank))
    return path


def part_path(path: str, part: int) -> str:
    """The name of a part: its number in place of ``{part}``, else before the suffix; six digits, so that names sort."""
    return path.replace(PART, f"{part:06}") if PART in path else _before_suffix(path, f"{part:06}")


def _before_suffix(path: str, text: str) -> str:
    """The same name with a text before its suffix: ``trace.json.gz`` becomes ``trace.4711.json.gz``."""
    plain = path.removesuffix(".gz")
    stem, suffix = os.path.splitext(plain)  # noqa: PTH122 - Path would lose a trailing slash
    return f"{stem}.{text}{suffix}{path[len(plain) :]}"


def _beside(path: str) -> str:
    """The same name with the process id in it."""
    return _before_suffix(path, str(os.getpid()))


def _own_series(path: str) -> str:
    """The path, with the process id if another process writes a series of that name, whose finished files must stay too."""
    digits = "[0-9]" * 6
    escaped = glob.escape(path)
    pattern = escaped.replace(PART, digits) if PART in path else _before_suffix(escaped, digits)
    return _beside(path) if any(map(is_held, glob.glob(pattern))) else path  # noqa: PTH207 (of a text)


# ---- Series of files ----


class Rotation(NamedTuple):
    """Limits of a file, beyond which the next one begins, and number of files to keep; None: no limit."""

    max_bytes: int | None = None
    """Bytes on the disk."""
    steps_per_file: int | None = None
    max_files: int | None = None

    @property
    def rotates(self) -> bool:
        """Whether there can be a second file."""
        return self.max_bytes is not None or self.steps_per_file is not None


class FileSeries:
    """The current file and the earlier ones. Not thread-safe.

    Args:
        path: common path; see :func:`part_path`. Without rotation it is the path of the file.
        rotation: limits of a file, applied by the writer, and number of files to keep.
        closing: bytes that complete the document at the end of each file.
        log: called with each failure.
        name: name of the exporter in the log.
    """

    def __init__(self, path: str, rotation: Rotation, closing: bytes, log: LimitedLog, name: str) -> None:
        self.rotation = rotation
        self._path = path
        self._closing = closing
        self._log = log
        self._name = name
        self._part = 0
        self._claimed = False
        self._whole: deque[str] = deque()
        self._bytes_of_whole = 0
        self._file = self._new_file()
        self.files: tuple[str, ...] = ()
        """Existing files, oldest first. Thread-safe: replaced as a whole after each append, as is :attr:`bytes_written`."""
        self.bytes_written = 0
        """Bytes on the disk, including deleted files."""

    @property
    def path(self) -> str:
        """Path of the current file."""
        return self._file.path

    @property
    def size(self) -> int:
        """Size of the current file on disk, in bytes."""
        return self._file.size

    def append(self, pieces: Iterable[bytes | memoryview], most: int | None = None) -> bool:
        """As :meth:`StreamedFile.append`; then deletes the oldest files, so that there is always one."""
        if self.rotation.rotates and not self._claimed:
            self._claimed = True
            if (path := _own_series(self._path)) != self._path:
                self._say_moved(self._path, path)
                self._path = path
                self._file = self._new_file()
        requested = self._file.path
        fits = self._file.append(pieces, most)
        if self._file.path != requested:
            self._say_moved(requested, self._file.path)
            self._path = _beside(self._path)
        if fits:
            self._delete_oldest()
            self.files, self.bytes_written = (*self._whole, self._file.path), self._bytes_of_whole + self._file.size
        return fits

    def begin_next(self) -> None:
        """Ends the file; later spans are written to the next one."""
        self._file.close()
        self._whole.append(self._file.path)
        self._bytes_of_whole += self._file.size
        self._part += 1
        self._file = self._new_file()

    def close(self) -> None:
        """Ends the file. Raises OSError when the system refuses."""
        self._file.close()

    def abandon(self) -> None:
        """Closes the file in a forked child without writing: it is the parent's."""
        self._file.abandon()

    def _say_moved(self, requested: str, path: str) -> None:
        self._log.warning("%s: another writer has %r, this one writes to %r", self._name, requested, path)

    def _delete_oldest(self) -> None:
        keep = self.rotation.max_files
        while keep is not None and len(self._whole) >= keep:
            oldest = self._whole.popleft()
            try:
                Path(oldest).unlink(missing_ok=True)
            except OSError as error:
                self._log.warning("%s: the old file %r could not be deleted: %s", self._name, oldest, error)

    def _new_file(self) -> StreamedFile:
        path = part_path(self._path, self._part) if self.rotation.rotates else self._path
        return StreamedFile(path, beside=_beside(path), closing=self._closing)


# ---- exporters ----


class SpanWriter(Protocol):
    """Writes spans of one format to a series of files. Not thread-safe."""

    @property
    def series(self) -> FileSeries:
        """The files."""

    def write(self, spans: Sequence[ReadableSpan]) -> Iterator[int]:
        """Appends spans (at least one); yields the number of newly written spans after each write."""


class _OpenFiles:
    """State that exporters of the same path share in this process."""

    def __init__(self, writer: SpanWriter, log: LimitedLog) -> None:
        self._lock = threads.RLock()  # a signal handler may export, or shut an exporter down, in the middle of a write
        self._is_written = self._ends = False
        self.users = 0
        self.writer = writer
        self.log = log

    def write(self, spans: Sequence[ReadableSpan]) -> Iterator[int]:
        """Writes spans with the writer, one call at a time.

        Raises:
            ExportError: a signal handler exports in the middle of a write of its own thread, which would deadlock.
        """
        with self._lock:
            if self._is_written:
                raise ExportError(
                    f"a signal handler exports to {self.writer.series.path!r} while its thread writes there"
                )
            self._is_written = True
            try:
                yield from self.writer.write(spans)
            finally:
                self._is_written = False
                if self._ends:
                    self._close()

    def close(self) -> None:
        """Closes the file; if called by a signal handler in the middle of a write of its thread, at the end of that write."""
        with self._lock:
            self._ends = True
            if not self._is_written:
                self._close()

    def _close(self) -> None:
        try:
            self.writer.series.close()
        except OSError as error:
            self.log.warning("%r could not be closed: %s", self.writer.series.path, error)

    def is_idle_within(self, seconds: float) -> bool:
        """Whether no other thread is writing within this time."""
        is_idle = self._lock.acquire(timeout=seconds)
        if is_idle:
            self._lock.release()
        return is_idle

    def after_fork_in_child(self) -> None:
        """Renews the lock, and forgets a write of another thread of the parent."""
        self._lock = threads.RLock()
        self._is_written = False


class FileSpanExporter(SpanExporter):
    """Base of exporters that write files; a subclass provides the format (:meth:`_writer`).

    The first export creates the file and replaces an older one of that name. Exporters of one process with the same path share the
    file, with the limits of the first; the last one to shut down closes it. A forked child writes to its own file, and so does a process
    whose file another process already writes: the process id is inserted before the suffix. Thread-safe.

    Args:
        path: path of the file; ``{pid}`` and ``{rank}`` as in :func:`own_path`.
        option: option with the default path. If that cannot be written, this is only logged, so that the application starts.
        rotation: when the next file begins.

    Raises:
        ExportError: ``path`` cannot be written.
        TypeError: ``path`` is not a str or path-like.
    """

    takes_span_lists = True
    """Span processors may pass a ``SpanList`` of torch's spans as it is."""
    takes_whole_traces = False
    """Whether it gets every recorded span, before a policy drops any; a file has no trace size limit, but a backend may have one."""
    takes_application_spans = False
    """Whether a TorchSpanProcessor also passes it application spans, which other processors export elsewhere."""

    _log: LimitedLog
    """Log of the files' errors."""
    _lock = threads.RLock()  # a signal handler may create one while another is created
    _open_files: ClassVar[dict[tuple[object, ...], _OpenFiles]] = {}
    """By :meth:`_key` of the requested path, even if the files are elsewhere."""
    _living: ClassVar[weakref.WeakSet[FileSpanExporter]] = weakref.WeakSet()

    def __init__(self, path: str | os.PathLike[str] | None, option: config.Option | None, rotation: Rotation) -> None:
        asked: Any = option.read() if path is None and option is not None else path
        given = os.fspath(asked)
        if not isinstance(given, str):
            raise TypeError(f"path is {path!r} of type {type(path).__name__}: give a str or a pathlib.Path")
        self._template = given
        self._rotation = rotation
        self._down = False
        try:
            with naming(given):
                self._template = os.path.join(os.getcwd(), given)  # noqa: PTH109, PTH118 - the empty name stays a folder
            own = own_path(self._template)
            check_writable(part_path(own, 0) if rotation.rotates else own)
        except ExportError as error:
            if path is not None:
                raise
            warn_once(f"{error}; until then spans are lost ({option} names another file)")
        own = own_path(self._template)
        self._join(own, own)

    def _writer(self, path: str) -> SpanWriter:
        """Returns a writer of a series of files in the exporter's format."""
        raise NotImplementedError

    def _series(self, path: str, closing: bytes = b"") -> FileSeries:
        """Creates a series of files with this path for a writer; each file ends with ``closing``."""
        return FileSeries(path, self._rotation, closing, self._log, type(self).__name__)

    @property
    def path(self) -> str:
        """Absolute path of the file that this process is writing."""
        return self._files.writer.series.path

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that exist, oldest first; empty before the first export."""
        return self._files.writer.series.files

    @property
    def bytes_written(self) -> int:
        """Bytes written to disk so far, including files that were deleted since."""
        return self._files.writer.series.bytes_written

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
        written, why = 0, f"the exporter of {self.path!r} is shut down"
        if not self._down:
            try:
                with naming(self.path):
                    for count in self._files.write(spans) if len(spans) else ():
                        written += count
            except Exception as error:  # noqa: BLE001 - an exporter must not harm the application
                why = str(error)
        if lost := len(spans) - written:
            where = "" if self.path in why else f" to {self.path!r}"
            self._log.warning("%s: %d spans are not written%s: %s", type(self).__name__, lost, where, why)
        yield Delivery(written, lost)

    def force_flush(self, timeout_millis: float = 30_000) -> bool:
        """Waits for a running export on another thread; exports leave nothing buffered here.

        Args:
            timeout_millis: longest wait in milliseconds.

        Returns:
            False after the timeout, else True.
        """
        return self._files.is_idle_within(max(timeout_millis, 0) / 1000)

    def shutdown(self) -> None:
        """Closes the file unless another exporter uses it.

        Later exports return FAILURE; a second call has no effect.
        """
        self._down = True
        self._leave()

    def shared(self) -> Self:
        """Returns another exporter for the same file; the last of them to shut down closes it. One that is shut down shares nothing."""
        other = object.__new__(type(self))
        with FileSpanExporter._lock:
            vars(other).update(vars(self))
            self._files.users += self._shares
            self._living.add(other)
        return other

    __copy__ = shared

    def _key(self, path: str) -> tuple[object, ...]:
        """Returns a key, equal for exporters of the same file and format; a link may have another suffix than its target."""
        # A relative path: where there is no working directory.
        real = os.path.realpath(path) if Path(path).is_absolute() else path
        return type(self)._writer, real, *Path(path).suffixes[-2:]  # noqa: SLF001 - its own class

    def _join(self, path: str, written: str) -> None:
        """Shares the files of exporters with the same path; the first one sets their location and limits."""
        key = self._key(path)
        with FileSpanExporter._lock:
            files = self._open_files.get(key)
            if files is None:
                self._log = LimitedLog()
                files = self._open_files[key] = _OpenFiles(self._writer(written), self._log)
            rotation = files.writer.series.rotation
            if rotation != self._rotation:
                limits = ", ".join(f"{name}={value}" for name, value in rotation._asdict().items() if value)
                name, known = type(self).__name__, limits or "no limits"
                files.log.warning("%s: another one has begun %r, with %s, and these hold", name, path, known)
            files.users += 1
            self._files, self._log, self._rotation, self._shares = files, files.log, rotation, True
            self._living.add(self)

    def _leave(self) -> None:
        with FileSpanExporter._lock:
            if not self._shares:
                return
            self._shares = False
            self._files.users -= 1
            if self._files.users:
                return
            for key in [key for key, files in self._open_files.items() if files is self._files]:
                del self._open_files[key]
        self._files.close()

    @classmethod
    def after_fork_in_child(cls) -> None:
        """Moves the child's exporters to files of their own, which their next export creates: the open ones are the parent's."""
        FileSpanExporter._lock = threads.RLock()
        for files in cls._open_files.values():
            files.writer.series.abandon()
        cls._open_files.clear()
        for exporter in list(cls._living):
            exporter._begin_in_child()  # noqa: SLF001 - its own class

    def _begin_in_child(self) -> None:
        self._log.after_fork_in_child()
        self._files.after_fork_in_child()
        self._files.writer.series.abandon()  # also where its last exporter is shut down, and a write was to close it
        if self._shares:
            path = own_path(self._template)
            self._join(path, path if PID in self._template else _beside(path))


process_changes.watch(FileSpanExporter)
