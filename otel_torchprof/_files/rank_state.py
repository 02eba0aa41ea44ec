"""The state of one rank from its black box: its collectives, its place in the program, and the last moments of its threads."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.blackbox import THREAD_AT
from otel_torchprof._native.recorder import SLICE_BYTES
from otel_torchprof._process.threads import NAME

from .box_file import is_held, kills_for_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from otel_torchprof._columns.batch import Array, Batch, RecordedThread
    from otel_torchprof._native.blackbox import Collective, Contents, Group


# ---- the last moments of threads ----


class OpenEvent(NamedTuple):
    """An event that had not ended."""

    name: str
    kind: Kind
    seconds: float
    """Seconds since its start."""


class LastMoment(NamedTuple):
    """State of a thread at the end of the recording."""

    name: str
    os_tid: int
    open: Sequence[OpenEvent]
    """Open events, the root first."""
    last_ended: str
    """Name of the event that ended last; empty if none did."""
    idle_seconds: float
    """Seconds since the thread last began or ended an event."""


def last_moments(contents: Contents) -> tuple[list[LastMoment], int]:
    """The last moments of all threads but this package's own, the most recently active first; and the number of events."""
    threads: dict[int, _ThreadState] = {}
    count = 0
    for batch in contents.events(SLICE_BYTES):
        count += len(batch)
        for index in distinct_values(batch["thread"]).tolist():
            rows = np.flatnonzero(batch["thread"] == index)
            thread = int(batch["id"][rows[0]]) >> THREAD_AT  # the recorder's id, since the system reuses thread ids
            threads.setdefault(thread, _ThreadState(batch.threads[index])).add(batch, rows, contents)
    moments = [thread.moment(contents) for thread in threads.values() if not thread.is_own]
    return sorted(moments, key=lambda moment: moment.idle_seconds), count


class _ThreadState:
    """The state of a thread after the events read so far."""

    def __init__(self, thread: RecordedThread) -> None:
        self._thread = thread
        self._open: list[OpenEvent] = []
        self._last_ended = ""
        self._ended, self._active = -1, 0

    @property
    def is_own(self) -> bool:
        """Whether it is a thread of this package."""
        return self._thread.name.startswith(NAME)

    def add(self, batch: Batch, rows: Array, contents: Contents) -> None:
        is_open = (batch["flags"][rows] & Flag.UNFINISHED) != 0
        ended, opened = rows[~is_open], rows[is_open]
        if len(ended):
            last = int(ended[np.argmax(batch["end"][ended])])
            if (end := int(batch["end"][last])) > self._ended:
                self._ended, self._last_ended = end, batch.names[batch["name"][last]]
        self._active = max(self._active, self._ended, int(batch["start"][opened].max(initial=0)))
        self._open += (
            OpenEvent(
                batch.names[batch["name"][row]], Kind(batch["kind"][row]), _seconds(contents, batch["start"][row])
            )
            for row in opened.tolist()
        )

    def moment(self, contents: Contents) -> LastMoment:
        name = "main" if self._thread.os_tid == contents.pid else self._thread.name
        idle = _seconds(contents, self._active)
        return LastMoment(name, self._thread.os_tid, self._open, self._last_ended, idle)


def python_line(contents: Contents, os_tid: int) -> str:
    """Returns the Python line of a thread when a hang was detected: ``train.py:41 load_batch``; empty if unknown."""
    parts = re.split(r"^Thread ", contents.stacks, flags=re.MULTILINE)[1:]
    own = [part for part in parts if part.startswith(f"{os_tid} ")]
    for path, line, function in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[0] if own else "", re.MULTILINE):
        if not path.startswith("<") and "/site-packages/" not in path and "/lib/python" not in path:
            return f"{PurePath(path).name}:{line} {function}"
    return ""


def stacks_of_program(stacks: str) -> list[str]:
    """Lines of Python's stacks, without threads that run only this package."""
    parts = re.split(r"^(?=(?:Current t|T)hread )", stacks, flags=re.MULTILINE)
    return [line for part in parts if not _is_own(part) for line in part.splitlines()]


def _is_own(stack: str) -> bool:
    paths = re.findall(r'^  File "(.*?)", line', stack, re.MULTILINE)
    others = [
        path
        for path in paths
        if not path.startswith("<") and not re.search(r"/lib/python[\d.]+/(?!site-packages)", path)
    ]
    return bool(others) and all("/otel_torchprof/" in path for path in others)


def _seconds(contents: Contents, since: int) -> float:
    return max(contents.last_ns - int(since), 0) / 1e9


# ---- the state of a rank ----


_DEFAULT_NAME = "0"
"""Name of the group of all ranks: torch numbers groups from 0."""
_MOST_DIGITS = 10
_JITTER_NS = 10**7
"""Tolerance between two clocks."""
_SLACK_NS = 60 * 10**9
"""Time within which the ranks of one run start."""


class GroupKey(NamedTuple):
    """A process group, the same on all of its ranks."""

    name: str
    ranks: str
    """Global ranks, separated by commas; empty for the group of all ranks, and for all groups if this torch does not report them."""

    @property
    def text(self) -> str:
        """The group's name in messages."""
        return "the default group" if self.is_default else f"group {self.name}"

    @property
    def is_default(self) -> bool:
        """Whether it is known to be the group of all ranks."""
        return self.name == _DEFAULT_NAME and not self.ranks

    @property
    def listed(self) -> list[int]:
        """The global ranks, in the group's order; empty if unknown."""
        texts = self.ranks.split(",")
        is_sound = all(text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS for text in texts)
        return [int(text) for text in texts] if is_sound else []


class RunKey(NamedTuple):
    """Distinguishes runs whose boxes are in the same folder."""

    run_id: str
    """The launcher's name of the run, else address and port of its master; empty: unknown."""
    restart: int
    world_size: int
    """0: unknown."""


class RankState(NamedTuple):
    """State of one rank from its box, without events."""

    rank: int
    """Negative: unknown."""
    pid: int
    host: str
    run: RunKey
    is_alive: bool
    is_closed: bool
    """Whether the process has ended its box."""
    opened_ns: int
    """Unix ns; 0: unknown."""
    last_ns: int
    """Unix ns: now for a living process, else the time of its last event."""
    place: str
    """Open events of the thread of the training loop; empty if unknown."""
    last_ended: str
    """The event that ended last on that thread; empty if none did."""
    since_ns: int
    """Unix ns since when the thread is there; 0: unknown."""
    groups: Mapping[GroupKey, Group]
    transfer_groups: Mapping[GroupKey, Group]
    """Groups with counts of sends and receives only."""
    calls: Mapping[GroupKey, Mapping[int, Collective]]
    """The last collectives, by number."""
    repeated: Mapping[GroupKey, frozenset[int]]
    """Numbers that several collectives share, such as coalesced ones."""
    transfers: Sequence[Collective]
    """Incomplete sends and receives, and those that failed after the last complete one."""
    has_box: bool = True
    """False for a rank that is only known from a flight recorder; whether it still runs is then unknown."""
    active_ns: int = 0
    """Unix ns of the last begin or end on that thread, else of the opening of the box; 0: unknown."""
    is_hung: bool = False
    """Whether its own hang watch has noticed that the thread does nothing."""
    is_held: bool = False
    """Whether the process is stopped, or in a debugger."""
    killed: int = 0
    """Processes of its cgroup that the kernel has killed for lack of memory since it began, if the process is dead."""

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended without closing its box."""
        return self.has_box and not self.is_alive and not self.is_closed

    @property
    def has_groups(self) -> bool:
        """Whether it has process groups; child processes of a rank have none."""
        return bool(self.groups or self.transfer_groups)

    @property
    def begin_ns(self) -> int:
        """When it opened its box, Unix ns; if unknown, its last time."""
        return self.opened_ns or self.last_ns

    def last_number(self, key: GroupKey) -> int:
        """Number of the last enqueued collective of a group; -1 for none."""
        group = self.groups.get(key)
        last = -1 if group is None else group.last_enqueued
        numbers = self.calls.get(key, {})
        return max(last, *numbers, -1)

    def pending(self, key: GroupKey) -> Collective | None:
        """The first collective of a group that is known to be incomplete; None if there is none."""
        pending = [call for call in self.calls.get(key, {}).values() if call.is_pending]
        return min(pending, key=lambda call: call.sequence_nr, default=None)

    def failed(self, key: GroupKey) -> Collective | None:
        """The first collective of a group that failed after the last complete one; None if there is none."""
        calls = self.calls.get(key, {}).values()
        complete = max((call.sequence_nr for call in calls if _is_complete(call)), default=-1)
        failed = [call for call in calls if call.has_failed and call.sequence_nr > complete]
        return min(failed, key=lambda call: call.sequence_nr, default=None)


def state_of(contents: Contents, *, is_alive: bool, now_ns: int, number: int) -> RankState:
    """The state of a rank from an image; ``number``, a negative one, is used if the rank is unknown."""
    info, rank = contents.info, rank_of(contents)
    moment = _moment_of_loop(contents)
    calls, repeated = by_number(contents.collectives)
    keys = [GroupKey(group.name, group.ranks) for group in contents.groups]
    return RankState(
        number if rank is None else rank,
        contents.pid,
        _text(info.get("host")),
        run_of(info),
        is_alive,
        contents.is_closed,
        _count(info.get("opened")),
        now_ns if is_alive else contents.last_ns,
        "" if moment is None else _place(moment, _line(contents, moment)),
        "" if moment is None else moment.last_ended,
        0 if moment is None else contents.last_ns - round(_open_seconds(moment) * 1e9),
        {key: group for key, group in zip(keys, contents.groups, strict=True) if not group.is_transfers},
        {key: group for key, group in zip(keys, contents.groups, strict=True) if group.is_transfers},
        calls,
        repeated,
        _open_transfers([call for call in contents.collectives if call.is_transfer]),
        active_ns=_count(info.get("opened")) if moment is None else _last_active(contents, moment),
        is_hung=moment is not None and _is_hung(contents, moment),
        is_held=is_alive and is_held(info),
        killed=0 if is_alive or contents.is_closed else kills_for_memory(info),
    )


def of_one_run(states: Sequence[RankState]) -> tuple[list[RankState], list[RankState]]:
    """Splits states into those of the living or else the latest run, and those of other runs.

    Boxes of dead processes remain in the folder for days.
    """
    runs: dict[RunKey, list[RankState]] = defaultdict(list)
    for state in states:
        runs[state.run].append(state)
    best = max(runs.values(), key=lambda run: max(map(_relevance, run)), default=[])
    living = [state.opened_ns for state in best if state.is_alive]
    begin = min(living) if living else max(best, key=_relevance).opened_ns if best else 0
    chosen = {id(state) for state in best if state.last_ns >= begin - _SLACK_NS}
    return [state for state in states if id(state) in chosen], [state for state in states if id(state) not in chosen]


def _relevance(state: RankState) -> tuple[bool, bool, int]:
    return state.is_alive, state.has_groups or state.run.world_size > 1, state.last_ns


def run_of(info: Mapping[str, Any]) -> RunKey:
    """The run of a process, from what is known of the process."""
    name = _text(info.get("run_id")) or _text(info.get("master"))
    return RunKey(name, _count(info.get("restart")), _count(info.get("world_size")))


def rank_of(contents: Contents) -> int | None:
    """The rank from the launcher, else from a process group, since a program that starts its own ranks may set no variables."""
    rank = contents.info.get("rank")
    if isinstance(rank, int) and rank >= 0:
        return rank
    for group in contents.groups:
        key = GroupKey(group.name, group.ranks)
        if group.rank >= 0 and key.is_default:
            return group.rank
        if 0 <= group.rank < len(key.listed):
            return key.listed[group.rank]
    return None


def by_number(
    collectives: Iterable[Collective],
) -> tuple[dict[GroupKey, dict[int, Collective]], dict[GroupKey, frozenset[int]]]:
    """Collectives by number, and numbers that several share; these have the first incomplete collective, else the first."""
    calls: dict[GroupKey, dict[int, Collective]] = defaultdict(dict)
    repeated: dict[GroupKey, set[int]] = defaultdict(set)
    for call in collectives:
        if call.is_transfer or call.sequence_nr < 0:
            continue
        key = GroupKey(call.group, call.ranks)
        before = calls[key].setdefault(call.sequence_nr, call)
        if before is not call:
            repeated[key].add(call.sequence_nr)
            if call.is_pending and not before.is_pending:
                calls[key][call.sequence_nr] = call
    return dict(calls), {key: frozenset(numbers) for key, numbers in repeated.items()}


def _open_transfers(transfers: Sequence[Collective]) -> list[Collective]:
    complete = max((at for at, call in enumerate(transfers) if _is_complete(call)), default=-1)
    return [call for at, call in enumerate(transfers) if call.is_pending or (call.has_failed and at > complete)]


def _is_complete(call: Collective) -> bool:
    return bool(call.completed_ns) and not call.has_failed


def _moment_of_loop(contents: Contents) -> LastMoment | None:
    """The last moment of the training loop's thread: the main thread, a hung one, or that of the last collective, with open events.

    In a service, the thread that has been in the call of a model for longest. Other threads, such as those that prefetch, are used only if
    none of these has events.
    """
    loop = {contents.pid, contents.hang_os_tid, *(call.os_tid for call in contents.collectives[-1:])}

    def importance(moment: LastMoment) -> tuple[bool, bool, bool, float, int, float]:
        is_open = bool(moment.open)
        is_main = is_open and moment.os_tid == contents.pid
        calls = [] if contents.groups else [event.seconds for event in moment.open if event.kind is Kind.PHASE]
        is_loop = moment.os_tid in loop or bool(calls)
        return is_loop, is_open, is_main, max(calls, default=0.0), len(moment.open), -moment.idle_seconds

    moments = [moment for moment in last_moments(contents)[0] if moment.open or moment.last_ended]
    return max(moments, key=importance, default=None)


def _open_seconds(moment: LastMoment) -> float:
    return moment.open[-1].seconds if moment.open else moment.idle_seconds


def _line(contents: Contents, moment: LastMoment) -> str:
    """The line of Python on the thread, if it has been idle since its stack was written; else empty."""
    return python_line(contents, moment.os_tid) if _is_hung(contents, moment) else ""


def _is_hung(contents: Contents, moment: LastMoment) -> bool:
    """Whether the thread has done nothing since a hang was noticed in its process."""
    return _last_active(contents, moment) <= contents.hang_since_ns + _JITTER_NS


def _last_active(contents: Contents, moment: LastMoment) -> int:
    return contents.last_ns - round(moment.idle_seconds * 1e9)


def _place(moment: LastMoment, line: str) -> str:
    """The line of Python and the innermost events."""
    inside = " > ".join(event.name for event in moment.open[-3:])
    return f"{line}, in {inside}" if line and inside else line or inside


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
