"""The black box of this process: its latest events in memory that outlives it."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from otel_torchprof import config
from otel_torchprof._columns.schema import Kind
from otel_torchprof._native import torch_library
from otel_torchprof._native.blackbox import (
    BoxSession,
    HangOptions,
    ImageReader,
    hang_was_logged,
    is_lost,
    next_hang,
    set_info,
    stacks_writer,
    start_hang_watch,
    stop_hang_watch,
)
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.cleanup import without_waiting
from otel_torchprof._record.collective_source import CollectiveSource
from otel_torchprof._record.recording import Recording
from otel_torchprof._record.source import Operators
from otel_torchprof.errors import NativeError, TorchProfError, warn_once
from otel_torchprof.health import ON
from otel_torchprof.version import __version__

from .box_file import BoxFile, named_file, owner_info, report_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.trace import SpanContext

    from otel_torchprof._native.blackbox import Contents
    from otel_torchprof.parsers import BlackBoxOptions


# ---- The hang watch: reports when a thread of the training loop hangs ----
# Native code writes the stacks into the black box, has all boxes of the folder compared by a process of its own, and writes the
# line to stderr, without the GIL. Python emits the log record, if it can run.

EXIT_STATUS = os.EX_TEMPFAIL
"""Exit status of a process that ends itself because it hangs."""
_EVENT_NAME = "torch.hang"
_REPORT = (
    "import sys; sys.path[:] = sys.argv[3:]; from otel_torchprof._cli.autopsy import report_hang; "
    "report_hang(sys.argv[1], float(sys.argv[2]))"
)
_FLUSH_MS = 2000
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file whose message torchrun prints for a rank that failed."""

_logger = logging.getLogger("otel_torchprof")


class HangWatch:
    """Watches from :meth:`start` to :meth:`stop`, while a black box is open. Native code checks the threads once a second.

    Args:
        options: the options of the box, with ``hang``.
        box: its file; None: boxes cannot be compared.
        hides_code: whether to omit files and functions from the box.
        running_step: returns the span for the log record; None for none.
    """

    def __init__(
        self,
        options: BlackBoxOptions,
        box: Path | None,
        *,
        hides_code: bool,
        running_step: Callable[[], SpanContext | None],
    ) -> None:
        self._seconds = options.hang or 0.0
        self._exits = options.exits
        self._box = box
        self._hides_code = hides_code
        self._running_step = running_step
        self._thread: threads.Thread | None = None
        self.without_stacks = ""
        """Why Python's stacks cannot be read here; empty if they can, or are not requested."""

    def start(self) -> None:
        """Starts the watch.

        Raises:
            NativeError: a watch runs already, or the system has no thread left.
        """
        options = HangOptions(
            self._seconds,
            0 if self._hides_code else self._writer(),
            exit_status=EXIT_STATUS if self._exits else 0,
        )
        if self._box is not None and sys.executable:
            box = self._box.absolute()
            command = [sys.executable, "-s", "-S", "-c", _REPORT, str(box), str(self._seconds), *sys.path]
            command.append(str(Path(__file__).parents[2]))  # an editable install may not be in the path
            report = os.fsencode(report_file(box.parent))
            options = options._replace(command=list(map(os.fsencode, command)), report=report)
        start_hang_watch(options)
        self._thread = threads.Thread(target=self._wait, name="otel-torchprof-hang-watch", daemon=True)
        self._thread.start()

    def _writer(self) -> int:
        try:
            return stacks_writer()
        except NativeError as error:
            self.without_stacks = str(error)
            return 0

    def stop(self) -> None:
        """Ends the watch; may be called repeatedly, from any thread."""
        stop_hang_watch()

    def _wait(self) -> None:
        while (found := next_hang())[0]:
            try:
                self._log(*found)
            except Exception:  # the program continues
                _logger.exception("a thread hangs, and it could not be logged")
            hang_was_logged()

    def _log(self, os_tid: int, line: str) -> None:
        if self._exits:
            _give_reason(line)
        emit(_EVENT_NAME, line, self._running_step(), os_tid)
        if self._exits:
            _flush_logs()


def _give_reason(line: str) -> None:
    """Writes the file that torchrun reads after a rank has failed, as ``torch.distributed.elastic`` does."""
    if path := os.environ.get(_ERROR_FILE):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))


def _flush_logs() -> None:
    with suppress(ImportError):
        from opentelemetry._logs import get_logger_provider

        if callable(flush := getattr(get_logger_provider(), "force_flush", None)):
            flush(_FLUSH_MS)


def emit(event_name: str, body: str, step: SpanContext | None, os_tid: int | None = None) -> None:
    """Emits a log record of OpenTelemetry in the span of the step, of a thread (the calling one); no effect without a LoggerProvider."""
    try:
        from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
    except ImportError:  # an earlier API
        return
    span = trace.INVALID_SPAN if step is None else trace.NonRecordingSpan(step)
    with trace.use_span(span):  # a record takes its ids from the current span, in every version of the API
        record = LogRecord(
            severity_text="WARN",
            severity_number=SeverityNumber.WARN,
            body=body,
            attributes={"thread.id": os_tid or threads.get_native_id()},
            event_name=event_name,
        )
        get_logger("otel_torchprof", __version__).emit(record)


KINDS = {"steps": (Kind.PHASE,), "ops": (Kind.PHASE, Kind.MODULE, Kind.LABEL, Kind.OPERATOR)}
"""Kinds of events of each level of detail; phases and modules are recorded only while torch is instrumented."""
_NAMES = config.CODE | {"error.type", "torch.module"}
"""Attributes whose values are names of functions, modules and exceptions, which are one kind of names in the recorder."""
_TEXTS = frozenset(("torch.label.args", "torch.op.concrete_inputs"))
"""Attributes whose values are texts of arguments, which other recordings of the process may add to the names."""
_THREAD_NAME = "thread.name"
_NOT_STARTED = "off: not started"
_CUT = "off: another process has cut its file; what is recorded since can be read by nobody"


_boxes: weakref.WeakSet[BlackBox] = weakref.WeakSet()


def latest_events() -> Contents | None:
    """What the open black box of this process has last: see :meth:`BlackBox.latest`; None without one."""
    return next((found for box in list(_boxes) if (found := box.latest()) is not None), None)


def boxes_folder() -> Path | None:
    """The folder of the open black box of this process, or of the one that forked it; None without one, or if it is in memory."""
    return next((box.folder for box in list(_boxes) if box.folder is not None), None)


class BlackBox:
    """Records the latest events from :meth:`start` to :meth:`stop`, of all threads; a forked child has none.

    A process that is killed in between leaves the file, and so does one that an unhandled exception ends: ``otel-torchprof recover``
    reads it. One that stops removes it. Nothing that goes wrong here stops the program, not even that
    another one cuts the file: :attr:`state` says it.

    Args:
        options: what is recorded, and where.
        identity: what is known of the process: its ``rank``, ``world_size`` and the like; ``local_world_size`` divides the room.
        file: that it lies in; by default one is made.
        running_step: the span of the step that runs, for the log record of a hang.
    """

    def __init__(
        self,
        options: BlackBoxOptions,
        identity: Mapping[str, Any] | None = None,
        file: BoxFile | None = None,
        running_step: Callable[[], SpanContext | None] = lambda: None,
    ) -> None:
        self._options = options
        self._identity = dict(identity or {})
        self._file = file
        self._running_step = running_step
        self._recording = Recording()
        self._state = _NOT_STARTED
        self.folder: Path | None = None
        """Its folder; None if it is not open, or in memory. A forked child has it, too."""

    @property
    def state(self) -> str:
        """``on``, followed by what is missing; or ``off: `` and the reason."""
        return _CUT if self._state.startswith(ON) and is_lost() else self._state

    @property
    def path(self) -> Path | None:
        """Path of the file, if it is open and has one."""
        return None if self._file is None else self._file.path

    @without_waiting
    def start(self) -> None:
        """Opens the box; operators are recorded as soon as torch is imported. Takes some milliseconds to touch its memory."""
        with self._recording.lock:
            try:
                self._open()
            except TorchProfError as error:
                self._state = f"off: {error}"
                warn_once(f"no black box is kept: {error}")
                return
            self._state = ON
            self._watch()
        self._recording.when_torch(self._on_torch)

    def _open(self) -> None:
        place, options = self._identity, self._options
        if self._file is None:
            rank = place.get("rank")
            name = f"{'' if rank is None else f'rank{rank}.'}{os.getpid()}.{time.time_ns()}"
            self._file = named_file(name, options.directory, options.size, place.get("local_world_size") or 1)
        labels = config.BLACK_BOX_LABELS.read()
        hidden_attributes = config.HIDDEN_ATTRIBUTES.read()
        hidden = [
            *(() if labels is None else ("labels", "texts")),
            *(("functions",) if hidden_attributes & _NAMES else ()),
            *(("texts",) if hidden_attributes & _TEXTS else ()),
        ]
        session = BoxSession(
            self._file.descriptor,
            self._file.size,
            [kind for kind in KINDS[options.detail] if kind != Kind.MODULE or "torch.module" not in hidden_attributes],
            hidden=hidden,
            shown=sorted(labels or ()),
            hides_shapes="torch.op.input_shapes" in hidden_attributes,
            hides_threads=_THREAD_NAME in hidden_attributes,
        )
        self._recording.cleanup.at_exit = self._file.keep_if_failed
        self._recording.cleanup.push(self._file.remove)
        try:
            self._recording.start(session)
        except NativeError:
            self._file = None
            raise
        process_changes.watch(self)
        set_info(self._info())
        self.folder = None if self.path is None else self.path.parent
        _boxes.add(self)

    def _watch(self) -> None:
        if self._options.hang is None:
            return
        hides_code = bool(config.HIDDEN_ATTRIBUTES.read() & (config.CODE | {_THREAD_NAME}))  # stacks have both
        watch = HangWatch(self._options, self.path, hides_code=hides_code, running_step=self._running_step)
        self._recording.cleanup.push(watch.stop)
        try:
            watch.start()
        except NativeError as error:
            self._state += f", without a watch for hangs: {error}"
        if watch.without_stacks:
            self._state += f", without Python's stacks of hangs: {watch.without_stacks}"

    def latest(self) -> Contents | None:
        """What is open now and was recorded last, read from the file; None if the box is off. A millisecond."""
        file = self._file
        if file is None or not self.state.startswith(ON):
            return None
        try:
            return ImageReader(file.descriptor, b"", file.size).read(time.time_ns())
        except NativeError:  # it was closed just now
            return None

    def _info(self) -> dict[str, Any]:
        return {
            "program": Path(sys.argv[0]).name if sys.argv else "",
            **{key: value for key, value in self._identity.items() if value is not None},
            "host": platform.node(),
            "detail": self._options.detail,
            "opened": time.time_ns(),
            "python": platform.python_version(),
            "otel_torchprof": __version__,
            **owner_info(),
        }

    def _on_torch(self, _torch: Any) -> None:
        try:
            library = torch_library.load()
            if self._options.detail == "ops":
                self._recording.add(Operators(library, torch_library.Requested(0)))
            self._recording.add(CollectiveSource(library, most=0))
        except TorchProfError as error:
            self._state += f", without operators: {error}"

    def stop(self) -> None:
        """Closes the box and removes the file; may be called repeatedly, from any thread."""
        with self._recording.lock:
            self._recording.stop()
            self._file = self.folder = None
            if self._state.startswith(ON):
                self._state = "off: stopped"

    def after_fork_in_child(self) -> None:
        """Detaches a forked child from the file, which remains the parent's. Called automatically."""
        self._recording.leave()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._state.startswith(ON):
            self._state = "off: this process was forked from the one that has it"
