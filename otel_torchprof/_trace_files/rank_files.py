"""The first reading of files that are to be merged: which ranks they hold, and the collectives of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof.errors import TorchProfError

from . import wanted as w
from .collectives import OF_COLLECTIVES, WORKS, CollectiveList, Collectives
from .reading import MERGED_RANKS, Interpreted, process_of
from .records import BASE_TIME, RecordReading, check_can_be_read_twice
from .values import LARGEST_NUMBER, key_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

MOST_RANKS = 1024
"""Viewers show no more, and so many bound what is kept of each."""
FIRST_OTHER_PID = 1_000_000
"""Process ids of what is no rank begin here: devices."""
_MOST_KEPT = 2_000_000
"""Collectives of all ranks together: 24 bytes each."""
_MOST_COLLECTIVES = 400_000
"""Of a file, with the work of backends, on the way."""
_MOST_NAMES = 100
"""Of other processes in a file, such as devices."""
_LONGEST_NAME = 200


@dataclass
class Process:
    """What the first reading finds of a process that may be a rank."""

    rank: int | None = None
    instance: Any = None
    service: str = ""
    calls: CollectiveList = field(default_factory=CollectiveList)


class Calls:
    """Takes the events of a file, of which it keeps the collectives by process; those on clocks that cannot be are left out."""

    wanted = OF_COLLECTIVES

    def __init__(self) -> None:
        self.processes: dict[Hashable, Process] = {}
        self.rank: int | None = None
        self._events = self._kept = 0

    def __len__(self) -> int:
        return self._events

    def name_rank(self, process: Hashable, rank: int) -> None:
        """The rank of a process, or of the file."""
        if process is None:
            self.rank = rank
        else:
            self.process(process).rank = rank

    def add_span(
        self,
        name: str,
        start: int,
        duration: int,
        _ids: tuple[int, int, Hashable],
        attributes: Mapping[str, Any],
        *,
        process: Hashable,
    ) -> None:
        """A span, maybe of a collective, or of the work of one."""
        self._events += 1
        if w.COLLECTIVES in attributes and self._kept < _MOST_COLLECTIVES:
            self._kept += len(attributes[w.COLLECTIVES])
            self.process(process).calls.add_step(start, attributes)
        is_call, is_work = w.COLLECTIVE in attributes, name.startswith(WORKS)
        if (is_call or is_work) and self._kept < _MOST_COLLECTIVES:
            self._kept += 1
            if is_call:
                self.process(process).calls.add_call(start, duration, attributes)
            else:
                self.process(process).calls.add_work(name, start, duration)

    def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool) -> None:  # noqa: ARG002 - a protocol
        """Without effect: slices do not say which collective they are."""
        self._events += 1

    def add_step(self, name: str, start: int, duration: int, process: Hashable) -> None:
        """Without effect."""

    def process(self, key: Hashable) -> Process:
        """The process of that key. Raises TorchProfError where there are too many."""
        found = self.processes.get(key)
        if found is None:
            if len(self.processes) == MOST_RANKS:
                raise TorchProfError(f"more than {MOST_RANKS:,} processes in one file: merge those that matter")
            found = self.processes[key] = Process()
        return found


class FileOutline(Interpreted):
    """Takes the records of a file: its ranks, their collectives, and what is needed to write them anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = Calls()
        super().__init__(self.calls)
        self.base = 0
        """Of the times of a Chrome trace, Unix ns."""
        self.main: Hashable = None
        """Of a Chrome trace, the process that is the rank."""
        self.is_chrome = False
        self.names: dict[Hashable, str] = {}
        """Of processes of a Chrome trace."""
        self._labels: dict[Hashable, str] = {}
        self._of_file = Process()
        self.problems: list[str] = []
        """What could not be read."""

    def add_member(self, name: str, value: Any) -> None:
        """The times' base, and which rank it is."""
        super().add_member(name, value)
        if name == BASE_TIME:
            self.base = whole(value, name)
        resource = value.get("resource") if isinstance(value, dict) else None
        if isinstance(resource, dict):
            self._of_file.instance = key_of(resource.get(w.INSTANCE))
        if isinstance(value, dict) and MERGED_RANKS in value:
            raise TorchProfError(f"{self.path!r} was merged already: give the files of its ranks")

    def add_event(self, event: dict[str, Any]) -> None:
        """An event: a collective, the name of a process, or another."""
        self.is_chrome = True
        args = event.get("args")
        if event.get("ph") == "M" and isinstance(args, dict) and len(self.names) < _MOST_NAMES:
            pid, kind = key_of(event.get("pid")), event.get("name")
            if kind == "process_name" and isinstance(args.get("name"), str):
                self.names.setdefault(pid, args["name"][:_LONGEST_NAME])
            elif kind == "process_labels" and isinstance(args.get("labels"), str):
                self._labels.setdefault(pid, args["labels"][:_LONGEST_NAME])
        super().add_event(event)

    def begin_resource(self, attributes: dict[str, Any]) -> None:
        """The process of the spans that follow."""
        super().begin_resource(attributes)
        process, service = self.calls.process(process_of(attributes)), attributes.get(w.SERVICE)
        process.instance = key_of(attributes.get(w.INSTANCE))
        process.service = service[:_LONGEST_NAME] if isinstance(service, str) else ""

    def settle(self) -> dict[Hashable, Process]:
        """The file has been read: its ranks, by process; that of a Chrome trace is the process None.

        Raises:
            TorchProfError: a Chrome trace has collectives of several processes.
        """
        if not self.is_chrome:
            return self.calls.processes
        pids = [pid for pid, each in self.calls.processes.items() if each.calls.count]
        if len(pids) > 1:
            raise TorchProfError(
                f"{self.path!r} has collectives of {len(pids)} processes: it was merged already; give the files of its ranks"
            )
        self.main = pids[0] if pids else next(iter(self.names), None)
        found = self._of_file
        found.service = self.names.get(self.main, "")
        self.names |= {pid: label for pid, label in self._labels.items() if pid != self.main}
        if pids:
            found.calls = self.calls.processes[pids[0]].calls
        found.rank = self.calls.rank
        return {None: found}


@dataclass
class RankFiles:
    """A rank, and where it is."""

    rank: int | None
    name: str
    """``rank 3``, or the name of its file."""
    service: str
    instance: Any
    parts: list[tuple[FileOutline, Hashable]]
    """Files, and its process in each."""
    collectives: Collectives
    pid: int = 0
    """In the merged trace."""


def read_rank_files(
    paths: Sequence[str], watch: Callable[[str, ByteStream], None]
) -> tuple[list[FileOutline], list[RankFiles]]:
    """The files, and the ranks that they hold, by rank.

    Raises:
        TorchProfError: a file cannot be read, two are the same rank's, or are of too many ranks.
    """
    outlines, ranks = [], list[RankFiles]()
    for path in paths:
        check_can_be_read_twice(path)
        outline = FileOutline(path)
        reading = RecordReading(path, outline, partial(watch, path))
        for _ in reading:
            pass
        outline.problems = reading.problems
        outlines.append(outline)
        for key, process in outline.settle().items():
            _add(ranks, outline, key, process, _MOST_KEPT // max(len(paths), 1))
        outline.calls.processes = {}
    _number(ranks)
    return outlines, sorted(ranks, key=lambda each: each.pid)


def _add(ranks: list[RankFiles], outline: FileOutline, key: Hashable, process: Process, most: int) -> None:
    """A rank of its own, or the continuation of one."""
    rank = process.calls.rank if process.rank is None else process.rank
    found = _thinned(_on_unix_clock(process.calls.settled(), outline.base), most)
    twin = next((each for each in ranks if rank is not None and each.rank == rank), None)
    if twin is None:
        if len(ranks) == MOST_RANKS:
            raise TorchProfError(f"there are more than {MOST_RANKS:,} ranks: merge those that matter")
        name = Path(outline.path).name if rank is None else f"rank {rank}"
        ranks.append(RankFiles(rank, name, process.service, process.instance, [(outline, key)], found))
        return
    other = twin.parts[-1][0].path
    if process.instance is None or process.instance != twin.instance:
        raise TorchProfError(f"{other!r} and {outline.path!r} are both of rank {rank}: give files of one run")
    if np.isin(found.key, twin.collectives.key).any():
        raise TorchProfError(
            f"{other!r} and {outline.path!r} hold the same collectives of rank {rank}: give one of them"
        )
    twin.parts.append((outline, key))
    columns = (np.concatenate(pair) for pair in zip(twin.collectives, found, strict=True))
    twin.collectives = _thinned(Collectives(*columns), most)


def _on_unix_clock(found: Collectives, base: int) -> Collectives:
    """Times that count from a base, which may stand behind the events; without those that no clock says."""
    moved = found._replace(start=found.start + base, end=found.end + base)
    return moved.chosen(np.abs(moved.start) <= LARGEST_NUMBER)


def _thinned(found: Collectives, most: int) -> Collectives:
    """At most so many, the same ones on every rank: those whose keys are the smallest after they are mixed."""
    if len(found.key) <= most:
        return found
    mixed = (found.key ^ (found.key >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return found.chosen(np.sort(np.argpartition(mixed, most)[:most]))


def _number(ranks: list[RankFiles]) -> None:
    """A process id for each: its rank, where that is known and one that viewers take."""
    taken = {each.rank for each in ranks}
    free = (number for number in range(2 * MOST_RANKS) if number not in taken)
    for each in ranks:
        is_small = each.rank is not None and each.rank < FIRST_OTHER_PID
        each.pid = each.rank if is_small and each.rank is not None else next(free)
