"""Writes the events of ranks' Chrome traces as those of the merged trace: with corrected times, process ids and unique ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otel_torchprof._encode.chrome_json import process_events
from otel_torchprof._encode.chrome_spans import json_value
from otel_torchprof._export.byte_stream import opened
from otel_torchprof._native.trace_files import IDS, LARGEST
from otel_torchprof.errors import TorchProfError

from .event_columns import key_in
from .reading import ranks_of_member
from .records import MEMBERS, MalformedError, object_of
from .trace_columns import ChromeReading, begins_chrome
from .values import nanoseconds, text_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._native.trace_files import TraceRewriter

    from .alignment import Clock

PIECE = 1 << 20
"""Bytes of a merged trace that are written at a time."""


@dataclass
class MergeTarget:
    """A rank in the merged trace."""

    place: int
    """Its index among the ranks."""
    pid: int
    name: str
    clock: Clock
    base: int
    """Time base of the merged trace, Unix ns."""
    pids: dict[Hashable, int] = field(default_factory=dict)
    """Process ids in the merged trace, by process of its files."""

    def time(self, time: int) -> int:
        """Unix ns of the rank's clock, as ns of the merged trace."""
        return self.clock.corrected(time) - self.base

    def name_lines(self, label: str) -> list[str]:
        """The metadata of the rank's process: name and sort index."""
        return process_events(self.pid, json_value(f"{self.name}: {label}" if label else self.name), self.place)


class Processes:
    """Gives ids to the processes of one file, and names to those that are no ranks.

    Args:
        target: the rank.
        main: the process of the file that is the rank.
        names: names of its other processes.
        free: process ids for these.
    """

    def __init__(self, target: MergeTarget, main: Hashable, names: Mapping[Hashable, str], free: Iterator[int]) -> None:
        self._target, self._names, self._free = target, names, free
        self.main = json.dumps(main, default=float).encode()
        """The rank's process as JSON."""
        target.pids[main] = target.pid

    def named(self, process: bytes) -> tuple[int, str]:
        """Returns the id of a process, given as JSON, and its metadata if it is new, each event after a comma."""
        pids, key = self._target.pids, key_in(process.decode("utf-8", "surrogateescape"))
        if key in pids:
            return pids[key], ""
        pid = pids[key] = next(self._free)
        name = self._names.get(key) or (key if key and isinstance(key, str) else f"process {key}")
        lines = process_events(pid, json_value(f"{self._target.name} {name}"), self._target.place)
        return pid, "".join(f",\n{line}" for line in lines)


class MergedEvents(ChromeReading):
    """Writes the events of one file.

    Args:
        path: path of the file.
        base: time base of the file, Unix ns.
        target: the rank.
        processes: gives ids to its processes.
        rewriter: writes the events of all files, one after the other.
    """

    def __init__(
        self, path: str, base: int, target: MergeTarget, processes: Processes, rewriter: TraceRewriter
    ) -> None:
        super().__init__(path, LARGEST, reader=rewriter)
        self._rewriter = rewriter
        rewriter.begin(base, target.base, target.clock.lines, (target.place * IDS, target.pid), processes.named)
        rewriter.add_process(processes.main)

    def pieces(self, watch: Callable[[ByteStream], None]) -> Iterator[bytes]:
        """Yields the events as bytes, each after a comma; then the problems are complete. Raises TorchProfError if there is none."""
        try:
            with opened(self._path) as stream:
                watch(stream)
                begins_chrome(stream)
                for _ in self.steps(stream):
                    if self._rewriter.size >= PIECE:
                        yield self._rewriter.taken()
        except TorchProfError as error:
            if not self.counted():
                raise
            self.problems.append(f"{error}; what comes before that is counted")
        self.figures()
        self._check_members()
        yield self._rewriter.taken()

    def _check_members(self) -> None:
        unread = {name: reason for name, reason in self._unread.items() if name in MEMBERS}
        for name, value in self._members.items():
            try:
                for _ in ranks_of_member(name, value):
                    pass
            except MalformedError as error:  # noqa: PERF203 - one that cannot be read does not stop the others
                unread[name] = str(error)
        self.problems += (f"{self._path!r}: {name} cannot be read ({reason})" for name, reason in unread.items())

    @staticmethod
    def _check(event: Any) -> None:
        event = object_of(event, "event")
        phase = text_in(event.get("ph"), "ph")
        if phase == "M":
            text_in(event.get("name"), "name")
            return
        nanoseconds(event.get("ts"), "ts")
        if event.get("dur") is not None:
            nanoseconds(event["dur"], "dur")
        if not event.keys() & {"id", "id2"}:
            raise MalformedError(f"an event of phase {phase!r} has no id, expected one")
