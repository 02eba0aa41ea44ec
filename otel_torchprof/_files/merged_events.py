"""Converts events of one rank's Chrome trace to events of the merged trace: with corrected times, process ids and unique ids."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otel_torchprof._encode.chrome_json import compact, microseconds, process_events
from otel_torchprof._encode.chrome_spans import json_value

from .records import MalformedError, malformed
from .values import key_of, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from .alignment import Clock

_OF_PROCESSES = frozenset(("process_name", "process_sort_index"))
_FLOWS, _ASYNCHRONOUS = frozenset("stf"), frozenset("bneSTFpNOD")
LARGEST_ID = 1 << 40
"""Number of ids per rank; combined with the rank, they are exact in a double, as viewers store them."""
_MOST_PROCESSES = 1000
"""Most other processes of a file; further ones share the last one."""
_MOST_NAMED = 100_000
"""Most tracks and processes that are stored as named."""
_LARGE_INTEGER = re.compile(r"[:,\[]-?\d{19}")


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
    named: set[Hashable]
    """Tracks and processes of all ranks that are named already."""
    pids: dict[Hashable, int] = field(default_factory=dict)
    """Process ids in the merged trace, by process of its files."""

    def time(self, time: int) -> int:
        """Unix ns of the rank's clock, as ns of the merged trace."""
        return self.clock.corrected(time) - self.base


class MergedEvents:
    """Converts the events of one file to lines of JSON.

    Args:
        target: the rank.
        base: time base of the file, Unix ns.
        main: the process of the file that is the rank.
        names: names of its other processes.
        free: process ids for these.
    """

    def __init__(
        self, target: MergeTarget, base: int, main: Hashable, names: Mapping[Hashable, str], free: Iterator[int]
    ) -> None:
        self._target, self._base, self._main, self._names, self._free = target, base, main, names, free
        target.pids[main] = target.pid

    def lines(self, event: dict[str, Any]) -> Iterator[str]:
        """Yields the event, after metadata of its process if that is new. Changes the event. Raises MalformedError."""
        phase, name, ts, dur = event.get("ph"), event.get("name"), event.pop("ts", None), event.pop("dur", None)
        if not isinstance(phase, str):
            raise malformed(phase, "ph", "a text")
        pid = key_of(event.get("pid"))
        if phase == "M":
            if not isinstance(name, str):
                raise malformed(name, "name", "a text")
            is_said = name in _OF_PROCESSES or (name == "process_labels" and pid != self._main)
            if is_said or not self._is_new((name, pid, key_of(event.get("tid")))):
                return
            times = ""
        else:
            times = self._times(ts, dur)
            self._change_ids(event, phase)
        yield from self._settle_process(event, pid)
        yield f",\n{text_of(event)[:-1]}{times}}}"

    def _times(self, ts: Any, dur: Any) -> str:
        start = self._base + nanoseconds(ts, "ts")
        begin = self._target.time(start)
        if dur is None:
            return f',"ts":{microseconds(begin)}'
        end = self._target.time(start + max(0, nanoseconds(dur, "dur")))
        return f',"ts":{microseconds(begin)},"dur":{microseconds(end - begin)}'

    def _change_ids(self, event: dict[str, Any], phase: str) -> None:
        if phase in _FLOWS or phase in _ASYNCHRONOUS:
            if "id" in event:
                event["id"] = self._id(event["id"])
            elif "id2" not in event:
                raise MalformedError(f"an event of phase {phase!r} has no id, expected one")
            if isinstance(event.get("id2"), dict) and "global" in event["id2"]:
                event["id2"] = {**event["id2"], "global": self._id(event["id2"]["global"])}
        if "bind_id" in event:
            event["bind_id"] = self._id(event["bind_id"])

    def _id(self, value: Any) -> int:
        """An id that no other rank has; texts and large numbers are hashed."""
        if type(value) is int and 0 <= value < LARGEST_ID:
            return self._target.place * LARGEST_ID + value
        digest = hashlib.blake2s(repr(value).encode("utf-8", "replace"), digest_size=5).digest()
        return self._target.place * LARGEST_ID + int.from_bytes(digest, "big")

    def _settle_process(self, event: dict[str, Any], pid: Hashable) -> Iterator[str]:
        pids = self._target.pids
        known = pid if pid in pids or len(pids) < _MOST_PROCESSES else next(reversed(pids))
        if known not in pids:
            pids[known] = next(self._free)
            name = self._names.get(pid) or (pid if pid and isinstance(pid, str) else f"process {pid}")
            for line in process_events(pids[known], json_value(f"{self._target.name} {name}"), self._target.place):
                yield f",\n{line}"
        event["pid"] = pids[known]

    def _is_new(self, what: Hashable) -> bool:
        named = self._target.named
        what = self._target.place, what
        is_new = what not in named
        if is_new and len(named) < _MOST_NAMED:
            named.add(what)
        return is_new


def process_lines(target: MergeTarget, label: str) -> Iterator[str]:
    """Yields the metadata of a rank's process: name and sort index."""
    yield from process_events(target.pid, json_value(f"{target.name}: {label}" if label else target.name), target.place)


def text_of(event: dict[str, Any]) -> str:
    """An event as JSON that viewers accept, whatever the file contained. Raises MalformedError."""
    try:
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=float)
        text.encode()
        if _LARGE_INTEGER.search(text) is None:
            return text
    except (ValueError, RecursionError):
        pass
    try:
        return compact(json_value(json.loads(json.dumps(event, default=float))))
    except (ValueError, RecursionError) as error:
        raise MalformedError("an event that is nested too deeply") from error
