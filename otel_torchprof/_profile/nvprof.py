"""Reads files of nvprof (``nvprof -o trace_name.prof``): ranges of ``emit_nvtx`` with their kernels."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof.errors import TorchProfError

from .events import EventList
from .function_event import FunctionEvent, demangle

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator

_logger = logging.getLogger("otel_torchprof")

_MARKERS = "CUPTI_ACTIVITY_KIND_MARKER"
_LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS = "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
_STRINGS = "StringTable"

_LAUNCH_CALLS = {
    13: "cudaLaunch",
    211: "cudaLaunchKernel",
    213: "cudaLaunch_ptsz",
    214: "cudaLaunchKernel_ptsz",
    269: "cudaLaunchCooperativeKernel",
}
"""CUPTI's numbers (``cbid``) of the calls that launch a kernel; a program of CUDA 9.2 or later shows 211."""

_RANGE_START = 2
"""Bit of a marker's ``flags`` that begins a range. An instant has another bit, and no end."""

_THREAD = 2
"""Value of a marker's ``objectKind``: its ``objectId`` is a process and a thread."""


class EnforceUnique:
    """Detects duplicate keys. Not thread-safe. Mirrors torch's class of that name.

    Examples:
        >>> unique = otp.EnforceUnique()
        >>> unique.see("kernel", 1)
        >>> unique.see("kernel", 1)
        Traceback (most recent call last):
            ...
        RuntimeError: duplicate key: ('kernel', 1)
    """

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def see(self, *key: Any) -> None:
        """Records a key.

        Raises:
            RuntimeError: the key was recorded before.
        """
        if key in self.seen:
            raise RuntimeError(f"duplicate key: {key}")
        self.seen.add(key)


def load_nvprof(path: str | os.PathLike[str]) -> EventList[FunctionEvent]:
    """Reads a file of nvprof as an EventList; otherwise like :func:`parse_nvprof_trace`, including its errors.

    Mirrors ``torch.autograd.profiler.load_nvprof``.

    Examples:
        >>> events = otp.load_nvprof("trace_name.prof")  # doctest: +SKIP
    """
    return EventList(parse_nvprof_trace(path))


def parse_nvprof_trace(path: str | os.PathLike[str]) -> list[FunctionEvent]:
    """Returns the ranges in a file of nvprof, ordered by start, each with the kernels launched inside it.

    Mirrors torch's function of that name. A kernel belongs to every range that encloses its launch, on the launching
    thread if the file has threads. Names are demangled, also those of kernels (torch shows their number in the file).
    Times are in microseconds from nvprof's own zero (torch shows nvprof's nanoseconds as microseconds). Instants are
    not events. Costs some microseconds per row, grows with n log n, and reads nothing but the file. Thread-safe.

    Raises:
        OSError: the file cannot be opened.
        TorchProfError: the file is not SQLite, not of nvprof, or damaged; the message has its path and the reason.

    Examples:
        >>> events = otp.parse_nvprof_trace("trace_name.prof")  # doctest: +SKIP
    """
    import sqlite3

    file = Path(path)
    with file.open("rb") as start:
        if start.read(16) != b"SQLite format 3\0":
            raise TorchProfError(f"{file} is no SQLite file: nvprof writes one with `nvprof -o {file.name} -- command`")
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return _NvprofReader(file, connection).events()
    except sqlite3.Error as error:
        raise TorchProfError(f"{file} cannot be read as SQLite: {error}") from error


class _Launch(NamedTuple):
    id: int
    call: int
    start: int
    end: int
    thread: int | None
    correlation: int


class _Kernel(NamedTuple):
    start: int
    end: int
    name: int
    device: int
    correlation: int


@dataclass
class _Range:
    id: int
    start: int
    end: int
    thread: int | None
    event: FunctionEvent


class _NvprofReader:
    """Reads one file."""

    def __init__(self, file: Path, connection: sqlite3.Connection) -> None:
        self._file = file
        self._connection = connection
        connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")

    def events(self) -> list[FunctionEvent]:
        """All ranges, with their kernels."""
        strings = dict(self._rows(_STRINGS, ("_id_", "value"), text=("value",)))
        name = functools.cache(lambda number: demangled(self._string(strings, number)))
        ranges = self._ranges(name)
        launches = self._launches()
        kernels = defaultdict(list)
        for row in self._rows(_KERNELS, ("start", "end", "name", "correlationId"), optional=("deviceId",)):
            start, end, number, correlation, device = row
            kernels[correlation].append(_Kernel(start, end, number, device or 0, correlation))
        unique = EnforceUnique()
        for enclosing, launch in _inside(ranges, [launch for launch in launches if launch.correlation in kernels]):
            self._require_launch(launch)
            for kernel in kernels[launch.correlation]:
                self._once(unique, enclosing.id, launch.id, kernel.start)
                enclosing.event.append_kernel(name(kernel.name), kernel.device, (kernel.end - kernel.start) / 1000)
        return [marked.event for marked in ranges]

    def _ranges(self, name: Callable[[int], str]) -> list[_Range]:
        """Pairs the begins of ranges with their ends; ordered by start."""
        columns = ("id", "timestamp", "name")
        optional = ("flags", "objectKind")
        begins, ends = {}, {}
        unique = EnforceUnique()
        for marker, time, number, flags, kind, place in self._rows(_MARKERS, columns, optional, blob="objectId"):
            if number == 0:
                self._once(unique, "end", marker)
                ends[marker] = time
            elif flags is None or flags & _RANGE_START:
                self._once(unique, "begin", marker)
                begins[marker] = time, number, flags, _thread_of(kind, place)
        self._require_pairs(begins, ends)
        ranges = []
        for marker, (start, number, _flags, thread) in begins.items():
            if marker in ends:
                end = ends[marker]
                event = FunctionEvent(
                    id=marker,
                    node_id=0,
                    name=name(number),
                    start_us=start / 1000,
                    end_us=end / 1000,
                    thread=thread or 0,
                )
                ranges.append(_Range(marker, start, end, thread, event))
        return sorted(ranges, key=attrgetter("start"))

    def _require_pairs(self, begins: dict[int, Any], ends: dict[int, int]) -> None:
        """Raises if an end has no begin, or if no begin has an end, as in a truncated file.

        Ranges that were open when nvprof stopped have no end and are omitted with a warning. In a file without flags, a begin
        without an end may also be an instant.
        """
        alone = [marker for marker, begin in begins.items() if marker not in ends and begin[2] is not None]
        if alone and not ends:
            raise self._broken(f"marker {alone[0]} in {_MARKERS} has no end{_others(alone)}")
        if alone:
            _logger.warning("%s: %d ranges were open at its end and are left out", self._file, len(alone))
        alone = [marker for marker in ends if marker not in begins]
        if alone:
            raise self._broken(f"marker {alone[0]} in {_MARKERS} has no begin{_others(alone)}")

    def _launches(self) -> list[_Launch]:
        rows = self._rows(_LAUNCHES, ("_id_", "cbid", "start", "end", "correlationId"), ("threadId",))
        return [
            _Launch(number, call, start, end, None if thread is None else thread & 0xFFFFFFFF, correlation)
            for number, call, start, end, correlation, thread in rows
        ]

    def _require_launch(self, launch: _Launch) -> None:
        if launch.call not in _LAUNCH_CALLS:
            known = ", ".join(f"{number} ({name})" for number, name in _LAUNCH_CALLS.items())
            raise self._broken(
                f"call {launch.id} in {_LAUNCHES} started a kernel; expected its cbid to be one of {known}, but got {launch.call}"
            )

    def _once(self, unique: EnforceUnique, *key: Any) -> None:
        try:
            unique.see(*key)
        except RuntimeError as error:
            raise self._broken(str(error)) from error

    def _string(self, strings: dict[int, str], number: int) -> str:
        try:
            return strings[number]
        except KeyError as error:
            raise self._broken(f"{_STRINGS} has no string {number}, which a name refers to") from error

    def _rows(
        self,
        table: str,
        columns: tuple[str, ...],
        optional: tuple[str, ...] = (),
        *,
        text: tuple[str, ...] = (),
        blob: str | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of a table; None for missing optional columns.

        Values are checked to be int, or str in the columns of ``text``; the column ``blob`` may have any type.
        """
        present = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        if not present:
            raise self._broken(f"it has no table {table}: it is no file of nvprof's, or it was not written to its end")
        missing = [column for column in columns if column not in present]
        if missing:
            raise self._broken(f"its table {table} has no column {', '.join(missing)}")
        requested = [*columns, *optional, *([blob] if blob else [])]
        query = ", ".join(f'"{column}"' if column in present else "NULL" for column in requested)
        for row in self._connection.execute(f"SELECT {query} FROM {table} ORDER BY rowid"):  # noqa: S608 - our own names
            for column, value in zip(requested, row, strict=True):
                is_valid = value is None and column not in columns
                is_valid = is_valid or column == blob or isinstance(value, str if column in text else int)
                if not is_valid:
                    raise self._broken(f"column {column} of its table {table} has the value {value!r}")
            yield row

    def _broken(self, what: str) -> TorchProfError:
        return TorchProfError(f"{self._file}: {what}")


def _others(alone: list[int]) -> str:
    return f", nor have {len(alone) - 1} others" if len(alone) > 1 else ""


def _thread_of(kind: int | None, place: Any) -> int | None:
    """The thread of a marker: its ``objectId`` is a process in 4 bytes and a thread behind it, little-endian."""
    size = 8
    if kind != _THREAD or not isinstance(place, bytes) or len(place) < size:
        return None
    return int.from_bytes(place[4:size], "little")


def _inside(ranges: list[_Range], launches: Iterable[_Launch]) -> Iterator[tuple[_Range, _Launch]]:
    """Yields every launch with every range that encloses it: launches by start, for each the top-level range first.

    One pass over time per thread. A range or launch without a thread may belong to any thread.
    """
    ranges_of: dict[int | None, list[_Range]] = defaultdict(list)
    for marked in ranges:
        ranges_of[marked.thread].append(marked)
    by_start = sorted(launches, key=attrgetter("start"))
    launches_of: dict[int | None, list[_Launch]] = defaultdict(list)
    for launch in by_start:
        launches_of[launch.thread].append(launch)
    for thread, ranges_of_thread in ranges_of.items():
        both = [*launches_of[thread], *launches_of[None]]
        yield from _sweep(ranges_of_thread, by_start if thread is None else sorted(both, key=attrgetter("start")))


def _sweep(ranges: list[_Range], launches: list[_Launch]) -> Iterator[tuple[_Range, _Launch]]:
    waiting = iter(ranges)
    upcoming = next(waiting, None)
    # Ordered by end, the latest first: ended ranges are at the back and are removed, ranges around a launch are in front.
    begun: list[_Range] = []
    for launch in launches:
        while upcoming is not None and upcoming.start < launch.start:
            bisect.insort(begun, upcoming, key=lambda marked: -marked.end)
            upcoming = next(waiting, None)
        while begun and begun[-1].end <= launch.start:
            begun.pop()
        for enclosing in itertools.takewhile(lambda marked, end=launch.end: marked.end > end, begun):  # type: ignore[misc]
            yield enclosing, launch


def demangled(name: str) -> str:
    """A mangled C++ symbol in readable form; any other name unchanged."""
    return demangle(name) if name.startswith("_Z") else name
