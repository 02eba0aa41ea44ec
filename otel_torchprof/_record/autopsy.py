"""Which rank hung, and where: a roll call over the black boxes of a run, of the dead and of the living.

Collectives of a group come in one order on all ranks, and have the same number there. So the first that is not complete says who
waits, and who has not come; what the others called by that number says whether they mean the same. What a box does not know is not
guessed: backends other than gloo do not say what is complete.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from .last_moments import last_moments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from otel_torchprof._native.blackbox import Collective, Contents, Group

    from .last_moments import LastMoment

_OF_SAME_SIZE = frozenset(("all_reduce", "broadcast", "reduce", "all_gather_base", "reduce_scatter_base"))
"""Collectives to which every rank brings as many bytes."""
_SPELLED = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class GroupKey(NamedTuple):
    """A process group, the same on all of its ranks."""

    name: str
    ranks: str

    @property
    def text(self) -> str:
        """What to call it."""
        return f"group {self.name}" if self.ranks else "the default group"

    def members(self, size: int) -> tuple[int, ...]:
        """Global ranks."""
        texts = self.ranks.split(",") if self.ranks else []
        return tuple(int(text) for text in texts if text.isdecimal()) or tuple(range(size))


class RankState(NamedTuple):
    """What the box of one rank says, without its events."""

    rank: int
    pid: int
    host: str
    is_alive: bool
    last_ns: int
    """Unix ns: now for the living, else the last that is known."""
    place: str
    """What its busiest thread was doing."""
    since_ns: int
    """Unix ns from which on it did; 0: unknown."""
    groups: Mapping[GroupKey, Group]
    calls: Mapping[GroupKey, Mapping[int, Collective]]
    """The last collectives, by their numbers."""
    transfers: Sequence[Collective]
    """Sends and receives that are not complete."""


class Wait(NamedTuple):
    """Ranks that wait in one collective for others."""

    group: GroupKey
    sequence_nr: int
    call: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks of the group that have not come to it."""
    since_ns: int


class Mismatch(NamedTuple):
    """Ranks that called something else by the same number."""

    group: GroupKey
    sequence_nr: int
    calls: Sequence[tuple[str, tuple[int, ...]]]
    """What was called, and by which ranks; most first."""
    kind: str
    """``mismatched``, ``skipped`` or ``reordered``."""


class Autopsy(NamedTuple):
    """What the boxes of a run say."""

    ranks: Sequence[RankState]
    waits: Sequence[Wait]
    mismatches: Sequence[Mismatch]
    cycle: Sequence[int]
    """Ranks each of which waits for the next, and the last for the first; none where there is no cycle."""
    culprits: Sequence[int]
    """Ranks that others wait for, and that wait for nobody."""
    missing: Sequence[int]
    """Ranks of groups of which there is no box."""

    @property
    def dead(self) -> list[RankState]:
        """Ranks that do not run any more and have not ended their box."""
        return [state for state in self.ranks if not state.is_alive]


def state_of(contents: Contents, *, is_alive: bool, now_ns: int, number: int) -> RankState:
    """What an image says of its rank; ``number`` stands for a rank that it does not tell."""
    rank = contents.info.get("rank")
    host = contents.info.get("host")
    until = now_ns if is_alive else contents.last_ns
    moments = [moment for moment in last_moments(contents) if moment.open or moment.last_ended]
    busiest = max(moments, key=_importance, default=None)
    calls: dict[GroupKey, dict[int, Collective]] = defaultdict(dict)
    for call in contents.collectives:
        if not call.is_transfer and call.sequence_nr >= 0:
            calls[GroupKey(call.group, call.ranks)][call.sequence_nr] = call
    return RankState(
        rank if isinstance(rank, int) and rank >= 0 else number,
        contents.pid,
        host if isinstance(host, str) else "",
        is_alive,
        until,
        "nothing recorded" if busiest is None else _place(busiest),
        0 if busiest is None else contents.last_ns - round(_open_seconds(busiest) * 1e9),
        {GroupKey(group.name, group.ranks): group for group in contents.groups if not group.is_transfers},
        dict(calls),
        [call for call in contents.collectives if call.is_transfer and call.is_pending],
    )


def autopsy(states: Iterable[RankState]) -> Autopsy:
    """Compares the ranks; of several boxes of one rank the latest counts."""
    latest: dict[int, RankState] = {}
    for state in sorted(states, key=lambda each: each.last_ns):
        latest[state.rank] = state
    ranks = [latest[rank] for rank in sorted(latest)]
    keys = {key: group.size for state in ranks for key, group in state.groups.items()}
    waits = [wait for key, size in sorted(keys.items()) for wait in _waits(key, key.members(size), latest)]
    mismatches = [found for key in sorted(keys) for found in _mismatches(key, ranks)]
    odd = {(each.group, each.sequence_nr) for each in mismatches}
    waits = [wait for wait in waits if wait.absent or (wait.group, wait.sequence_nr) not in odd]
    edges = _edges(waits, ranks)
    waiting = {rank for rank, others in edges.items() if others}
    awaited = {other for others in edges.values() for other in others}
    missing = {rank for key, size in keys.items() for rank in key.members(size)} - latest.keys()
    return Autopsy(
        ranks,
        sorted(waits, key=lambda wait: -len(wait.waiting)),
        mismatches,
        _cycle(edges),
        sorted(awaited - waiting),
        sorted(missing),
    )


def spelled(call: Collective) -> str:
    """The name of a collective as torch.distributed has it: ``all_reduce`` for ``c10d::allreduce_``."""
    name = call.name.rpartition("::")[2].strip("_")
    for short, long in _SPELLED.items():
        name = name.replace(short, long)
    return name


def described(call: Collective) -> str:
    """With its type and size, as far as all ranks have to agree on them."""
    name = spelled(call)
    details = [call.reduce_op] if call.reduce_op else []
    details += [call.dtype] if call.dtype else []
    details += [f"{call.bytes_in:,} bytes"] if name in _OF_SAME_SIZE and call.bytes_in else []
    details += [f"root {call.root}"] if call.root >= 0 else []
    return f"{name}({', '.join(details)})" if details else name


def _waits(key: GroupKey, members: Sequence[int], states: Mapping[int, RankState]) -> list[Wait]:
    """One, of the first number that somebody waits in; none where all is complete or nothing is known of it."""
    pending = {
        rank: min((number for number, call in state.calls.get(key, {}).items() if call.is_pending), default=None)
        for rank, state in states.items()
        if rank in members
    }
    numbers = [number for number in pending.values() if number is not None]
    if not numbers:
        return _behind(key, members, states)
    first = min(numbers)
    waiting = tuple(sorted(rank for rank, number in pending.items() if number == first))
    calls = [states[rank].calls[key][first] for rank in waiting]
    absent = tuple(
        rank
        for rank in members
        if rank in states and (key not in states[rank].groups or states[rank].groups[key].last_enqueued < first)
    )
    return [Wait(key, first, described(calls[0]), waiting, absent, min(call.enqueued_ns for call in calls))]


def _behind(key: GroupKey, members: Sequence[int], states: Mapping[int, RankState]) -> list[Wait]:
    """Where nobody knows what is complete: those who have enqueued more than others, who are late at least."""
    last = {rank: states[rank].groups[key].last_enqueued for rank in members if key in states.get(rank, _NOBODY).groups}
    if not last or min(last.values()) == max(last.values()) or states[next(iter(last))].groups[key].is_tracked:
        return []
    first = min(last.values()) + 1
    ahead = tuple(rank for rank, number in last.items() if number >= first)
    calls = [call for rank in ahead if (call := states[rank].calls.get(key, {}).get(first)) is not None]
    since = min((call.enqueued_ns for call in calls), default=0)
    return [
        Wait(key, first, described(calls[0]) if calls else "a collective", ahead, tuple(set(last) - set(ahead)), since)
    ]


def _mismatches(key: GroupKey, ranks: Sequence[RankState]) -> list[Mismatch]:
    """The first number by which ranks called different things."""
    called = {state.rank: state.calls[key] for state in ranks if key in state.calls}
    for number in sorted({number for calls in called.values() for number in calls}):
        by_call: dict[str, list[int]] = defaultdict(list)
        for rank, calls in called.items():
            if number in calls:
                by_call[described(calls[number])].append(rank)
        if len(by_call) > 1:
            found = sorted(((call, tuple(who)) for call, who in by_call.items()), key=lambda each: -len(each[1]))
            return [Mismatch(key, number, found, _kind(found, number, called))]
    return []


def _kind(
    found: Sequence[tuple[str, tuple[int, ...]]], number: int, called: Mapping[int, Mapping[int, Collective]]
) -> str:
    """Of a mismatch: by what the ranks called next, as far as they came to it."""
    (usual, many), (other, few) = found[0], found[1]
    next_of_few = {described(called[rank][number + 1]) for rank in few if number + 1 in called[rank]}
    next_of_many = {described(called[rank][number + 1]) for rank in many if number + 1 in called[rank]}
    if usual in next_of_few:
        return "reordered"
    return "skipped" if other in next_of_many else "mismatched"


def _edges(waits: Iterable[Wait], ranks: Sequence[RankState]) -> dict[int, set[int]]:
    """Which ranks each rank waits for."""
    edges: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        for rank in wait.waiting:
            edges[rank] |= set(wait.absent)
    for state in ranks:
        for call in state.transfers:
            size = max((group.size for group in state.groups.values()), default=0)
            members = GroupKey(call.group, call.ranks).members(size)
            if 0 <= call.peer < len(members):
                edges[state.rank].add(members[call.peer])
    return edges


def _cycle(edges: Mapping[int, set[int]]) -> list[int]:
    """The first cycle that is found, from its lowest rank on."""
    done: set[int] = set()
    for begin in sorted(edges):
        path: list[int] = []
        stack = [iter([begin])]
        while stack:
            rank = next(stack[-1], None)
            if rank is None:
                stack.pop()
                done.update(path[len(stack) :])
                del path[max(len(stack) - 1, 0) :]
            elif rank in path:
                found = path[path.index(rank) :]
                lowest = found.index(min(found))
                return found[lowest:] + found[:lowest]
            elif rank not in done:
                path.append(rank)
                stack.append(iter(sorted(edges.get(rank, ()))))
    return []


def places(found: Autopsy) -> list[tuple[str, list[RankState]]]:
    """What the ranks do, those in the same place together, most first."""
    together: dict[str, list[RankState]] = defaultdict(list)
    for state in found.ranks:
        pending = [(key, call) for key, calls in state.calls.items() for call in calls.values() if call.is_pending]
        text = f"in {state.place}"
        if pending:
            key, first = min(pending, key=lambda item: item[1].enqueued_ns)
            text = f"in {described(first)} #{first.sequence_nr} of {key.text}, not complete"
        elif state.transfers:
            call = state.transfers[0]
            text = f"in {spelled(call)} with rank {call.peer} of group {call.group}, tag {call.tag}, not complete"
        together[text if state.is_alive else f"not running any more, last {text}"].append(state)
    return sorted(together.items(), key=lambda item: -len(item[1]))


def _importance(moment: LastMoment) -> tuple[bool, int, float]:
    """The main thread first; of others the one that has most open, and did anything last."""
    return moment.name == "main", len(moment.open), -moment.idle_seconds


def _open_seconds(moment: LastMoment) -> float:
    return moment.open[-1].seconds if moment.open else moment.idle_seconds


def _place(moment: LastMoment) -> str:
    """The innermost events, and the last that ended."""
    names = [event.name for event in moment.open[-3:]]
    last = f", the last to end was {moment.last_ended}" if moment.last_ended else ""
    return f"{' > '.join(names)}{last}" if names else f"no recorded event{last}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2-7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]  # noqa: PLR2004
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts)}"


_NOBODY = RankState(-1, 0, "", False, 0, "", 0, {}, {}, ())
