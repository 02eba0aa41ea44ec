"""The report of a program that runs out of memory: what was requested and where, and where the memory in use was allocated.

An exception is seen when it leaves a phase, module or label, a profile, or the program; nothing is done until then. Nothing here raises, changes an
exception or keeps one, and the program's frames with it, alive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import platform
import re
import select
import sys
import time
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._columns.phases import DEVICE_ALLOCATED, RESIDENT
from otel_torchprof._columns.schema import Kind
from otel_torchprof._files.box import boxes_folder, emit
from otel_torchprof._files.box_file import failure, private_file
from otel_torchprof._native import python_sources
from otel_torchprof._native.recorder import CHUNK_BYTES, SLICE_BYTES, Session
from otel_torchprof._native.torch_library import Requested
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.free_memory import free_memory
from otel_torchprof._process.private_folder import made_folder
from otel_torchprof._ranks.ranks import identity_in
from otel_torchprof._record.process_memory import allocators, resident_memory
from otel_torchprof._record.recording import Recording
from otel_torchprof._record.source import Memory, Operators
from otel_torchprof.errors import TorchProfError, printable, printable_lines
from otel_torchprof.health import ON

from .kept_memory import DeviceMemory, MemoryInUse, byte_text

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from opentelemetry.trace import SpanContext

    from otel_torchprof._model.step_spans import RecordedStep
    from otel_torchprof._native.torch_library import TorchLibrary

    from .steps import KeptMemory

# ---- What is in use, while a recording runs ----

_SESSION_BYTES = 64 << 20
_DUE_BYTES = 1 << 20
_LONGEST_WAIT = 0.3
_KINDS = (Kind.PHASE, Kind.MODULE, Kind.OPERATOR, Kind.FRAME)
"""Kinds of events that name a place, where other recordings have them; operators are always recorded."""


class Allocations:
    """Follows torch's allocations and releases, on the thread that starts it and where torch carries its state. Thread-safe.

    A recording of its own: it has what is in use from steps and contexts, too, that the one of spans leaves out.
    """

    def __init__(self, memory_limit: int) -> None:
        self._recording = Recording()
        self._limit = max(min(memory_limit, _SESSION_BYTES), CHUNK_BYTES)
        self._lock = threads.RLock()
        self._in_use = MemoryInUse()
        self.state = "off: torch is not imported"
        """``on``, or ``off: `` and the reason."""

    def start(self, library: TorchLibrary) -> None:
        """Starts it; :attr:`state` says if that is not possible."""
        session = Session(self._limit, keep_newest=True, all_threads=True, memory=True, kinds=_KINDS)
        try:
            self._recording.start(session, [Operators(library, Requested(0)), Memory(library, all_threads=False)])
        except TorchProfError as error:
            self.state = f"off: {error}"
            return
        self.state = ON

    def look(self) -> None:
        """Takes the records so far, if they are many."""
        if self.state == ON and self._recording.batches.stats().bytes_buffered >= _DUE_BYTES:
            with self._lock:
                self._in_use.add(self._recording.drain(SLICE_BYTES))

    def by_device(self) -> list[DeviceMemory]:
        """What is in use now."""
        if self.state != ON or not self._lock.acquire(timeout=_LONGEST_WAIT):
            return []
        try:
            self._in_use.add(self._recording.drain())
            return self._in_use.by_device()
        finally:
            self._lock.release()

    def notes(self) -> list[str]:
        """Notes if torch's profiler has ended it, or if records are missing; else none."""
        dropped = sum(self._recording.batches.stats().dropped.values()) if self.state == ON else 0
        missing = f"memory: {dropped:,} events were dropped, so memory that was freed may count as in use"
        return [*self._recording.notes(), *([missing] if dropped else [])]

    def stop(self) -> None:
        """Stops it; repeated calls have no effect."""
        if self.state == ON:
            self.state = "off: stopped"
            self._recording.stop()

    def leave(self) -> None:
        """Forgets it in a forked child, whose allocations are not followed."""
        self._lock = threads.RLock()
        if self.state == ON:
            self.state = "off: this process was forked"
            self._recording.leave()


# ---- Which exceptions say that there is no memory ----

_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "bad_alloc")
_SIZE = re.compile(r"[Tt]ri(?:ed|es) to allocate ([0-9.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MESSAGE = 2000


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated, of a device or of the process."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    text = str(error)[:_MESSAGE] if isinstance(error, RuntimeError) else ""
    return any(part in text for part in _TEXTS)


def requested_bytes(message: str) -> int | None:
    """The size of the allocation that failed, of torch's message; None if it has none."""
    found = _SIZE.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


# ---- Who notices ----

_EVERY_SECONDS = 60.0
_EVENT_NAME = "torch.out_of_memory"
_clock = time.monotonic


class _Noticed:
    """What was reported last; one report at a time."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Forgets what the parent has reported."""
        self.lock: Any = threads.Lock()
        self.reported: dict[bool, float] = {}
        """When, by whether it had what a profile has recorded."""
        self.last: tuple[int, str] = (0, "")
        """Id of the exception, and its message: no reference."""


_noticed = _Noticed()
process_changes.watch(_noticed)
_watches: list[MemoryWatch] = []


class MemoryWatch:
    """Reports an exception that says that there is no memory, from :meth:`start` to :meth:`stop`, once a minute at most.

    Args:
        running_step: returns the span for the log record; None for none.
        steps: returns the latest ended steps.
        allocations: what is in use, if that is followed.
    """

    def __init__(
        self,
        running_step: Callable[[], SpanContext | None],
        steps: Callable[[], Sequence[RecordedStep]],
        allocations: Allocations,
    ) -> None:
        self.running_step, self.steps, self.allocations = running_step, steps, allocations
        self._call_off: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts it; costs nothing until a MemoryError or RuntimeError leaves a phase, module or label."""
        if self._call_off is None:
            self._call_off = process_changes.before_exit(functools.partial(notice_failure))
            _watches.append(self)
        python_sources.show_errors(notice)

    def stop(self) -> None:
        """Ends it; repeated calls have no effect."""
        self.allocations.stop()
        if self._call_off is not None:
            self._call_off()
            self._call_off = None
            _watches.remove(self)
        if not _watches:
            python_sources.show_errors(None)


def notice_failure(error: BaseException | None = None) -> None:
    """Reports the exception that ends the program, unless that was done when it was on its way. Default: at exit, the unhandled one."""
    error = error or failure()
    if _watches and error is not None:
        with contextlib.suppress(Exception):
            if _identity(error) != _noticed.last:
                _noticed.reported.clear()
                notice(error)


def _identity(error: BaseException) -> tuple[int, str]:
    return id(error), str(error)[:_MESSAGE]


def notice(
    error: BaseException,
    traceback: types.TracebackType | None = None,
    in_use: Callable[[], Sequence[DeviceMemory]] | None = None,
    *,
    is_profile: bool = False,
) -> None:
    """Reports an exception if it says that there is no memory. Never raises an Exception.

    Args:
        error: the exception; it may be on its way.
        traceback: of its frames so far. Default: its own.
        in_use: returns what a profile has recorded. Default: what the watch follows.
        is_profile: whether it leaves a profile, and is to be reported without a watch, too.
    """
    watch = next(iter(_watches[-1:]), None)
    with contextlib.suppress(Exception):
        if (
            (watch is None and not is_profile)
            or not is_out_of_memory(error)
            or not _noticed.lock.acquire(blocking=False)
        ):
            return
        try:
            now = _clock()
            has_own = in_use is not None and _IN_WORKER not in str(error)[:_MESSAGE]
            if now - _noticed.reported.get(has_own, -_EVERY_SECONDS) >= _EVERY_SECONDS:
                _noticed.reported[has_own] = now
                _noticed.last = _identity(error)
                _Report(error, traceback or error.__traceback__, watch, in_use).write()
        finally:
            _noticed.lock.release()


# ---- The report ----

_MOST_TEXT = 64 << 10
_MOST_SNAPSHOT = 16 << 20
_MOST_SNAPSHOT_BLOCKS = 100_000
_MOST_ROWS = 100
_MOST_FRAMES = 100
_NAMED = 3
_STDERR_MS = 1000
_NOT_RECORDED = (
    "What is in use was not recorded. For a table of it by phase, module and operator: OTEL_TORCHPROF_DETAIL=ops,memory=true, "
    "otel-torchprof run --memory, or otp.profile(profile_memory=True, with_modules=True)\n"
)
_IN_WORKER = "in DataLoader worker process"
"""What torch puts before an error of a worker that it raises again; what this process has recorded says nothing of it."""
_CUDA_STATS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "inactive_split_bytes.all.current",
    "requested_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
)


class _Report:
    """A report on stderr, as a log record and in a file; whatever part fails is left out."""

    def __init__(
        self,
        error: BaseException,
        traceback: types.TracebackType | None,
        watch: MemoryWatch | None,
        in_use: Callable[[], Sequence[DeviceMemory]] | None,
    ) -> None:
        self._watch = watch
        self._message = printable_lines(str(error)[:_MESSAGE])
        self._kind = type(error).__name__
        self._requested = requested_bytes(self._message)
        hidden = config.HIDDEN_ATTRIBUTES.read()
        self._hides_code = bool(hidden & config.CODE)
        self._is_of_worker = _IN_WORKER in self._message
        self._stack = [] if self._hides_code or self._is_of_worker else list(_stack(traceback))
        self._hides_modules = "torch.module" in hidden
        self._allocators = allocators()
        if in_use is None and watch is not None:
            in_use = watch.allocations.by_device
        self._in_use: Sequence[DeviceMemory] = ()
        if in_use is not None and not self._is_of_worker:
            with contextlib.suppress(Exception):
                totals = {f"cuda:{each.device}": each.allocated for each in self._allocators}
                self._in_use = [each._replace(total=totals.get(each.device, each.total)) for each in in_use()]

    def write(self) -> None:
        """Writes everything, torch's snapshot last."""
        path, snapshot = None, None
        with contextlib.suppress(Exception):
            folder = boxes_folder() or made_folder("")
            path = folder / f"otel-torchprof-memory.{platform.node()}.{os.getpid()}.txt"
            snapshot = path.with_suffix(".pickle")
            with private_file(path) as file:
                for part in self._parts():
                    file.write(part[: _MOST_TEXT - file.tell()])
        line = self._line(path)
        _to_stderr(f"otel-torchprof: {line}\n")
        with contextlib.suppress(Exception):
            emit(_EVENT_NAME, line, None if self._watch is None else self._watch.running_step())
        if snapshot is not None:
            _write_snapshot(snapshot)

    def _line(self, path: Path | None) -> str:
        size = "a request failed" if self._requested is None else f"{byte_text(self._requested)} requested"
        own = (frame for frame in reversed(self._stack) if "site-packages" not in frame)
        where = next((f" at {frame}" for frame in (*own, *self._stack[-1:])), "")
        where = " in a worker of a DataLoader" if self._is_of_worker else where
        parts = [f"out of memory: {size}{where}"]
        with contextlib.suppress(Exception):
            parts += [
                f"{byte_text(each.total)} in use on {each.device}: "
                + ", ".join(f"{byte_text(kept.bytes)} of {self._place(kept)}" for kept in each.kept[:_NAMED])
                for each in self._in_use
                if each.kept
            ]
        return printable("; ".join([*parts, *([f"see {path}"] if path else [])]))

    def _parts(self) -> Iterator[bytes]:
        own = () if self._is_of_worker else (self._process, self._devices, self._steps, self._tables, self._frames)
        for part in (self._head, *own):
            with contextlib.suppress(Exception):
                yield part().encode(errors="backslashreplace")

    def _head(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        rank = identity_in(os.environ).get("rank")
        who = f"process {os.getpid()}" + ("" if rank is None else f", rank {rank},")
        return f"{who} ran out of memory at {at}\n{self._kind}: {self._message}\n\n"

    def _process(self) -> str:
        resident = resident_memory()
        known = "" if resident is None else f"{byte_text(resident)} resident, "
        return f"process: {known}{byte_text(free_memory())} free for it\n"

    def _devices(self) -> str:
        lines = []
        for each in self._allocators:
            lines.append(
                f"cuda:{each.device}: {byte_text(each.allocated)} allocated, {byte_text(each.reserved)} reserved, at most "
                f"{byte_text(each.peak)} allocated, of {byte_text(each.total)}"
            )
            stats = sys.modules["torch.cuda"].memory_stats(each.device)
            lines += [f"    {name}: {stats[name]:,}" for name in _CUDA_STATS if name in stats]
        return "".join(f"{line}\n" for line in lines)

    def _steps(self) -> str:
        steps = [] if self._watch is None else list(self._watch.steps())
        lines = []
        for name, what in ((RESIDENT, "resident memory"), (DEVICE_ALLOCATED, "allocated on the device")):
            known = [(step.number, size) for step in steps if (size := (step.attributes or {}).get(name)) is not None]
            if known:
                (first, before), (last, after) = known[0], known[-1]
                lines.append(f"steps {first} to {last}: {what} from {byte_text(before)} to {byte_text(after)}\n")
        return "".join(lines)

    def _tables(self) -> str:
        return "\n" + ("".join(map(self._table, self._in_use)) or _NOT_RECORDED)

    def _table(self, memory: DeviceMemory) -> str:
        rows = [("bytes", "blocks", "where it was allocated")]
        rows += [(f"{kept.bytes:,}", f"{kept.blocks:,}", self._place(kept)) for kept in memory.kept[:_MOST_ROWS]]
        if others := memory.kept[_MOST_ROWS:]:
            size, blocks = sum(kept.bytes for kept in others), sum(kept.blocks for kept in others)
            rows.append((f"{size:,}", f"{blocks:,}", f"{len(others):,} other places"))
        known = sum(kept.bytes for kept in memory.kept)
        total = max(memory.total, known)
        if total > known:
            rows.append((f"{total - known:,}", "", "not recorded: allocated earlier, or on other threads"))
        rows.append((f"{total:,}", "", "total"))
        lines = [f"{size:>20} {blocks:>10}  {place}\n" for size, blocks, place in rows]
        return f"in use on {memory.device}:\n{''.join(lines)}\n"

    def _place(self, kept: KeptMemory) -> str:
        parts = (kept.phase, "" if self._hides_modules else kept.module, kept.operator)
        lines = "" if self._hides_code else kept.line
        return printable(", ".join(part for part in (*parts, lines) if part)) or "no operator"

    def _frames(self) -> str:
        frames = self._stack[-_MOST_FRAMES:]
        return "".join(["the exception's stack, the innermost call last:\n", *(f"  {frame}\n" for frame in frames)])


def _stack(traceback: types.TracebackType | None) -> Iterator[str]:
    """File, line and function of the calls around an exception, outermost first. Reads no local variables: that would keep them."""
    outer: list[str] = []
    frame = sys._getframe() if traceback is None else traceback.tb_frame.f_back  # noqa: SLF001 - there is no public API
    while frame is not None and len(outer) < _MOST_FRAMES:
        outer.append(_at(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    yield from reversed(outer)
    while traceback is not None:
        yield _at(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next


def _at(code: types.CodeType, line: int) -> str:
    return printable(f"{code.co_filename}:{line} {code.co_name}")


def _to_stderr(line: str) -> None:
    """Writes a line without waiting for a reader; nothing if the program has no stderr."""
    with contextlib.suppress(Exception):
        if sys.__stderr__ is not None:
            ready = select.poll()
            ready.register(2, select.POLLOUT)
            if ready.poll(_STDERR_MS):
                os.write(2, line.encode(errors="backslashreplace"))


class _Limited:
    """A file that refuses to be longer than a snapshot may be."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, _MOST_SNAPSHOT

    def write(self, data: Any) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"the snapshot has more than {_MOST_SNAPSHOT} bytes")
        self._file.write(data)


def _write_snapshot(path: Path) -> None:
    """Writes torch's own snapshot of its CUDA allocators, for its viewer; nothing if it is too large, or CUDA is not in use."""
    try:
        found = allocators()
        memory = sys.modules.get("torch.cuda.memory")
        if not found or memory is None:
            return
        cuda = sys.modules["torch.cuda"]
        blocks = sum(cuda.memory_stats(each.device).get("allocation.all.current", 0) for each in found)
        if blocks <= _MOST_SNAPSHOT_BLOCKS:
            with private_file(path) as file:
                pickle.dump(memory._snapshot(), _Limited(file))  # noqa: SLF001 - torch's documents name it
    except Exception:  # noqa: BLE001 - it is too large, or there is no memory for it
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
