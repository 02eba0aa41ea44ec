"""Which rank hung, and where: compares the black boxes of all ranks of a run, living and dead.

All ranks of a group call its collectives in the same order and with the same numbers. So the first incomplete collective shows which
ranks wait and which are absent, and different calls with the same number show that a rank skipped or swapped one. Nothing is guessed:
in a black box, only gloo's collectives are known to be complete.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from otel_torchprof._files.rank_state import GroupKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from otel_torchprof._files.rank_state import RankState
    from otel_torchprof._native.blackbox import Collective

_OF_SAME_SIZE = frozenset(("all_reduce", "broadcast", "reduce", "all_gather_base", "reduce_scatter_base"))
"""Collectives to which every rank brings as many bytes."""
_SPELLED = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_MOST_RANKS = 1 << 17
"""Limit of the size of a group; a larger one is a sign of a damaged box."""


class Wait(NamedTuple):
    """A collective that some ranks of its group have called, and others have not."""

    group: GroupKey
    sequence_nr: int
    call: str
    status: Literal["pending", "failed", "enqueued"]
    """Its status on the ranks that have called it; ``enqueued``: the backend does not report more."""
    waiting: tuple[int, ...]
    """Ranks that have called it."""
    absent: tuple[int, ...]
    """Ranks with a box that have not called it."""
    since_ns: int
    """Unix ns of the first call; 0: unknown."""
    started: tuple[int, ...] = ()
    """Ranks on whose device it is known to have started."""


class Transfer(NamedTuple):
    """The oldest send or receive of a rank that is incomplete or failed."""

    rank: int
    peer: int
    """Global rank; -1: any, or unknown."""
    call: Collective
    more: int
    """Number of further such transfers of the rank."""


class Mismatch(NamedTuple):
    """Different collectives that ranks of a group called with the same number."""

    group: GroupKey
    sequence_nr: int
    calls: Sequence[tuple[str, tuple[int, ...]]]
    """Each call, and its ranks; the most frequent first."""
    kind: str
    """Deviation of the ranks of the second call: ``skipped`` or ``added`` a collective, ``reordered`` two; else ``mismatched``."""


class Autopsy(NamedTuple):
    """Result of comparing the boxes of a run."""

    ranks: Sequence[RankState]
    waits: Sequence[Wait]
    transfers: Sequence[Transfer]
    mismatches: Sequence[Mismatch]
    cycle: Sequence[int]
    """Ranks of which each waits for the next one, and the last for the first; empty without a cycle."""
    culprits: Sequence[int]
    """Ranks that others wait for, and that wait for no rank themselves."""
    missing: Sequence[int]
    """Ranks of the run without a box."""
    ambiguous: Sequence[int]
    """Ranks with several living processes: the boxes are of several runs."""

    @property
    def dead(self) -> list[RankState]:
        """Ranks that have ended without closing their box."""
        return [state for state in self.ranks if state.is_dead]


def autopsy(states: Iterable[RankState]) -> Autopsy:
    """Compares the ranks of a run. Of several boxes of one rank, uses the latest that is not of a child process."""
    latest, ambiguous = _latest(states)
    ranks = [latest[rank] for rank in sorted(latest)]
    members = _members(ranks)
    transfers = [transfer for state in ranks if (transfer := _transfer(state, members)) is not None]
    callers: dict[GroupKey, list[RankState]] = defaultdict(list)
    for state in ranks:
        for key in state.calls:
            callers[key].append(state)
    mismatches = [mismatch for key in sorted(callers) for mismatch in _mismatches(key, _comparable(callers[key]))]
    different = {(mismatch.group, mismatch.sequence_nr) for mismatch in mismatches}
    waits = [wait for key in sorted(members) for wait in _waits(key, sorted(members[key].values()), latest)]
    waits = [wait for wait in waits if wait.absent or (wait.group, wait.sequence_nr) not in different]
    edges = _edges(waits, transfers)
    blocked = _edges([wait for wait in waits if wait.status == "pending"], [t for t in transfers if t.call.is_pending])
    awaited = {other for others in edges.values() for other in others}
    return Autopsy(
        ranks,
        sorted(waits, key=lambda wait: -len(wait.waiting)),
        transfers,
        mismatches,
        _cycle(blocked),
        sorted((awaited - edges.keys()) & latest.keys()),
        sorted(_all_ranks(ranks, members) - latest.keys()),
        sorted(ambiguous),
    )


def spelled(call: Collective) -> str:
    """The name of a collective in torch.distributed: ``all_reduce`` for ``c10d::allreduce_``."""
    return _spelled(call.name)


def described(call: Collective) -> str:
    """The name of a collective with the type, size and root on which all ranks have to agree."""
    return _described(call.name, call.reduce_op, call.dtype, call.bytes_in, call.root)


@functools.lru_cache(4096)
def _spelled(operator: str) -> str:
    name = operator.rpartition("::")[2].strip("_")
    for short, long in _SPELLED.items():
        name = name.replace(short, long)
    return name


@functools.lru_cache(4096)  # boxes of 2,000 ranks have a million collectives, few of them different
def _described(operator: str, reduce_op: str, dtype: str, bytes_in: int, root: int) -> str:
    name = _spelled(operator)
    details = [detail for detail in (reduce_op, dtype) if detail]
    details += [f"{bytes_in:,} bytes"] if name in _OF_SAME_SIZE and bytes_in else []
    details += [f"root {root}"] if root >= 0 else []
    return f"{name}({', '.join(details)})" if details else name


def _latest(states: Iterable[RankState]) -> tuple[dict[int, RankState], set[int]]:
    """The latest box of each rank, and ranks with several living processes that communicate."""
    latest: dict[int, RankState] = {}
    ambiguous = set()
    for state in sorted(states, key=lambda state: state.begin_ns):
        before = latest.setdefault(state.rank, state)
        if before is state:
            continue
        is_next = state.begin_ns > before.last_ns
        is_child = not state.has_groups
        if is_next or (not is_child and (not before.has_groups or (state.is_alive and not before.is_alive))):
            latest[state.rank] = state
        elif not is_child and state.is_alive:
            ambiguous.add(state.rank)
    return latest, ambiguous


def _members(ranks: Sequence[RankState]) -> dict[GroupKey, dict[int, int]]:
    """For each group, the known global ranks by rank in the group."""
    sizes: dict[GroupKey, int] = {}
    own: dict[GroupKey, dict[int, int]] = defaultdict(dict)
    for state in ranks:
        sizes.update(dict.fromkeys(state.calls.keys() - sizes.keys(), 0))
        for key, group in (*state.groups.items(), *state.transfer_groups.items()):
            sizes[key] = group.size
            own[key][group.rank] = state.rank
    world = max((*sizes.values(), *(state.run.world_size for state in ranks)), default=0)
    members = {}
    for key, size in sizes.items():
        listed = key.listed
        if not listed and size == world <= _MOST_RANKS:
            listed = list(range(world))
        members[key] = dict(enumerate(listed)) if listed else own[key]
    return members


def _all_ranks(ranks: Sequence[RankState], members: Mapping[GroupKey, Mapping[int, int]]) -> set[int]:
    world = max((state.run.world_size for state in ranks), default=0)
    return {rank for group in members.values() for rank in group.values()}.union(
        range(world if world <= _MOST_RANKS else 0)
    )


def _waits(key: GroupKey, members: Sequence[int], states: Mapping[int, RankState]) -> list[Wait]:
    """Waits in the first pending and in the first failed collective of a group; empty if all are complete."""
    present = [states[rank] for rank in members if rank in states]
    pending = _wait(key, "pending", {state.rank: state.pending(key) for state in present}, present)
    failed = _wait(key, "failed", {state.rank: state.failed(key) for state in present}, present)
    return [*pending, *failed] or _behind(key, present)


def _wait(
    key: GroupKey,
    status: Literal["pending", "failed"],
    calls: Mapping[int, Collective | None],
    present: Sequence[RankState],
) -> list[Wait]:
    """The wait in the call with the lowest number; empty without calls."""
    first = min((call.sequence_nr for call in calls.values() if call is not None), default=-1)
    first_calls = {rank: call for rank, call in calls.items() if call is not None and call.sequence_nr == first}
    if not first_calls:
        return []
    earliest = min(first_calls.values(), key=lambda call: call.enqueued_ns)
    absent = tuple(state.rank for state in present if state.last_number(key) < first)
    started = tuple(rank for rank, call in first_calls.items() if call.started_ns > 0)
    return [Wait(key, first, described(earliest), status, tuple(first_calls), absent, earliest.enqueued_ns, started)]


def _behind(key: GroupKey, present: Sequence[RankState]) -> list[Wait]:
    """Ranks that have enqueued fewer collectives than others, for a backend without known completion: these ranks may be late."""
    if all(state.groups[key].is_tracked for state in present if key in state.groups):
        return []
    last = {state.rank: state.last_number(key) for state in present}
    lowest = min(last.values())
    ahead = [state for state in present if last[state.rank] > lowest]
    if not ahead:
        return []
    first = max(lowest, 0) + 1
    calls = [call for state in ahead if (call := state.calls.get(key, {}).get(first)) is not None]
    name = described(calls[0]) if calls else "a collective"
    since = min((call.enqueued_ns for call in calls), default=0)
    absent = tuple(rank for rank, number in last.items() if number == lowest)
    return [Wait(key, first, name, "enqueued", tuple(state.rank for state in ahead), absent, since)]


def _comparable(callers: Sequence[RankState]) -> Sequence[RankState]:
    """The ranks with boxes, else all: flight recorders do not have reduce operations and roots."""
    return [state for state in callers if state.has_box] or callers


def _mismatches(key: GroupKey, callers: Sequence[RankState]) -> list[Mismatch]:
    """The first mismatch: the lowest number with which ranks called different collectives."""
    called = {state.rank: state.calls[key] for state in callers}
    repeated = {number for state in callers for number in state.repeated.get(key, ())}
    by_number: dict[int, dict[str, list[int]]] = defaultdict(dict)
    for rank, calls in called.items():
        for number, call in calls.items():
            by_number[number].setdefault(described(call), []).append(rank)
    different = (number for number, calls in by_number.items() if len(calls) > 1 and number not in repeated)
    number = min(different, default=-1)
    if number < 0:
        return []
    different_calls = sorted(
        ((call, tuple(ranks)) for call, ranks in by_number[number].items()), key=lambda item: -len(item[1])
    )
    shown = [(f"{call}{_of_shapes(called[ranks[0]][number])}", ranks) for call, ranks in different_calls]
    return [Mismatch(key, number, shown, _kind(different_calls, number, called))]


def _of_shapes(call: Collective) -> str:
    return f" of {call.shapes}" if call.shapes else ""


def _kind(
    different_calls: Sequence[tuple[str, tuple[int, ...]]], number: int, called: Mapping[int, Mapping[int, Collective]]
) -> str:
    """The kind of mismatch that explains all later calls of the ranks of the two most frequent calls."""
    many, few = (_calls_from(number, [called[rank] for rank in ranks]) for _, ranks in different_calls[:2])
    agreeing = {
        "skipped": _agreeing(few, many, lambda other: other + 1),
        "added": _agreeing(many, few, lambda other: other + 1),
        "reordered": _agreeing(few, many, lambda other: 2 * number + 1 - other if other <= number + 1 else other),
    }
    best = max(agreeing, key=lambda kind: agreeing[kind])
    if not agreeing[best]:
        return "mismatched"
    is_even = len(different_calls[0][1]) == len(different_calls[1][1])  # then either of the two may be right
    return "skipped" if best == "added" and is_even else best


def _calls_from(number: int, calls: Sequence[Mapping[int, Collective]]) -> dict[int, str]:
    return {later: described(call) for own in calls for later, call in own.items() if later >= number}


def _agreeing(calls: Mapping[int, str], others: Mapping[int, str], place: Callable[[int], int]) -> int:
    """Number of calls that equal the others' call at ``place(number)``; 0 if any of them differs."""
    pairs = [(call, others[place(number)]) for number, call in calls.items() if place(number) in others]
    return len(pairs) if all(call == other for call, other in pairs) else 0


def _transfer(state: RankState, members: Mapping[GroupKey, Mapping[int, int]]) -> Transfer | None:
    if not state.transfers:
        return None
    call = min(state.transfers, key=lambda call: (not call.is_pending, call.enqueued_ns))
    peer = members.get(GroupKey(call.group, call.ranks), {}).get(call.peer, -1)
    return Transfer(state.rank, peer, call, len(state.transfers) - 1)


def _edges(waits: Iterable[Wait], transfers: Iterable[Transfer]) -> dict[int, set[int]]:
    """For each rank that waits, the ranks that it waits for."""
    edges: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        for rank in wait.waiting if wait.absent else ():
            edges[rank].update(wait.absent)
    for transfer in transfers:
        if transfer.peer >= 0:
            edges[transfer.rank].add(transfer.peer)
    return edges


def _cycle(edges: Mapping[int, set[int]]) -> list[int]:
    """The first cycle that a depth-first search finds, from its lowest rank on."""
    done: set[int] = set()
    for begin in sorted(edges):
        path: dict[int, None] = {}
        stack = [iter([begin])]  # then, for each rank of the path, its remaining neighbours
        while stack:
            rank = next(stack[-1], None)
            if rank is None:
                stack.pop()
                if path:
                    done.add(path.popitem()[0])
            elif rank in path:
                ranks = list(path)
                cycle = ranks[ranks.index(rank) :]
                lowest = cycle.index(min(cycle))
                return cycle[lowest:] + cycle[:lowest]
            elif rank not in done:
                path[rank] = None
                stack.append(iter(sorted(edges.get(rank, ()))))
    return []
