"""Which rank hung, and where: compares the black boxes of all ranks of a run, living and dead.

Collectives of a group come in the same order on all its ranks and have the same numbers there. So the first one that is not complete
tells which ranks wait and which have not come, and a difference between calls of the same number tells that a rank skipped or
swapped one. Nothing is guessed: only gloo says which collectives are complete.
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
"""A larger group is a sign of a damaged box."""


class Wait(NamedTuple):
    """A collective that some ranks of its group have come to, and others have not."""

    group: GroupKey
    sequence_nr: int
    call: str
    status: Literal["pending", "failed", "enqueued"]
    """On the ranks that have come; ``enqueued``: the backend does not say more."""
    waiting: tuple[int, ...]
    """Ranks that have come."""
    absent: tuple[int, ...]
    """Ranks that have not, as far as there are boxes of them."""
    since_ns: int
    """Unix ns at which the first rank came; 0: not known."""
    started: tuple[int, ...] = ()
    """Ranks on whose device it is known to have started."""


class Transfer(NamedTuple):
    """The oldest send or receive of a rank that is not complete, or that failed."""

    rank: int
    peer: int
    """Global rank; -1: any, or not known."""
    call: Collective
    more: int
    """How many other transfers of the rank are like that."""


class Mismatch(NamedTuple):
    """Different collectives that ranks of a group called by the same number."""

    group: GroupKey
    sequence_nr: int
    calls: Sequence[tuple[str, tuple[int, ...]]]
    """Each call, and its ranks; the most frequent first."""
    kind: str
    """What the ranks of the second call did: ``skipped`` or ``added`` a collective, ``reordered`` two; else ``mismatched``."""


class Autopsy(NamedTuple):
    """What the boxes of a run tell."""

    ranks: Sequence[RankState]
    waits: Sequence[Wait]
    transfers: Sequence[Transfer]
    mismatches: Sequence[Mismatch]
    cycle: Sequence[int]
    """Ranks that wait each for the next one, and the last for the first; empty where there is no cycle."""
    culprits: Sequence[int]
    """Ranks that others wait for, and that wait for no rank themselves."""
    missing: Sequence[int]
    """Ranks of the run without a box."""
    ambiguous: Sequence[int]
    """Ranks with several living processes: the boxes are of several runs."""

    @property
    def dead(self) -> list[RankState]:
        """Ranks that do not run any more and have not ended their box."""
        return [state for state in self.ranks if state.is_dead]


def autopsy(states: Iterable[RankState]) -> Autopsy:
    """Compares the ranks of a run. Of several boxes of one rank the latest counts, unless it is a child process's."""
    latest, ambiguous = _latest(states)
    ranks = [latest[rank] for rank in sorted(latest)]
    members = _members(ranks)
    transfers = [found for state in ranks if (found := _transfer(state, members)) is not None]
    callers: dict[GroupKey, list[RankState]] = defaultdict(list)
    for state in ranks:
        for key in state.calls:
            callers[key].append(state)
    mismatches = [found for key in sorted(callers) for found in _mismatches(key, _comparable(callers[key]))]
    different = {(each.group, each.sequence_nr) for each in mismatches}
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
    """The name with type and size, as far as all ranks have to agree on them."""
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
    """The box of each rank, and ranks of which several processes run that communicate."""
    latest: dict[int, RankState] = {}
    ambiguous = set()
    for state in sorted(states, key=lambda each: each.begin_ns):
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
    """Of each group the global rank by the rank in the group, as far as they are known."""
    sizes: dict[GroupKey, int] = {}
    own: dict[GroupKey, dict[int, int]] = defaultdict(dict)
    for state in ranks:
        sizes.update(dict.fromkeys(state.calls.keys() - sizes.keys(), 0))
        for key, group in (*state.groups.items(), *state.transfer_groups.items()):
            sizes[key] = group.size
            own[key][group.rank] = state.rank
    world = max((*sizes.values(), *(state.run.world_size for state in ranks)), default=0)
    found = {}
    for key, size in sizes.items():
        listed = key.listed
        if not listed and size == world <= _MOST_RANKS:
            listed = list(range(world))
        found[key] = dict(enumerate(listed)) if listed else own[key]
    return found


def _all_ranks(ranks: Sequence[RankState], members: Mapping[GroupKey, Mapping[int, int]]) -> set[int]:
    world = max((state.run.world_size for state in ranks), default=0)
    return {rank for group in members.values() for rank in group.values()}.union(
        range(world if world <= _MOST_RANKS else 0)
    )


def _waits(key: GroupKey, members: Sequence[int], states: Mapping[int, RankState]) -> list[Wait]:
    """In the group's first pending collective, and in its first that failed; none where all are complete."""
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
    """In the lowest number of these calls; none where there are no calls."""
    found = {rank: call for rank, call in calls.items() if call is not None}
    first = min((call.sequence_nr for call in found.values()), default=-1)
    found = {rank: call for rank, call in found.items() if call.sequence_nr == first}
    if not found:
        return []
    call = min(found.values(), key=lambda each: each.enqueued_ns)
    absent = tuple(state.rank for state in present if state.last_number(key) < first)
    started = tuple(rank for rank, each in found.items() if each.started_ns > 0)
    return [Wait(key, first, described(call), status, tuple(found), absent, call.enqueued_ns, started)]


def _behind(key: GroupKey, present: Sequence[RankState]) -> list[Wait]:
    """Ranks that enqueued less than others, where the backend does not say what is complete: they may be late, no more is known."""
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
    """Those with boxes, where there are any: a flight recorder does not say what was reduced how, or from where."""
    return [state for state in callers if state.has_box] or callers


def _mismatches(key: GroupKey, callers: Sequence[RankState]) -> list[Mismatch]:
    """The first number by which ranks called different collectives."""
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
    found = sorted(((call, tuple(who)) for call, who in by_number[number].items()), key=lambda each: -len(each[1]))
    shown = [(f"{call}{_of_shapes(called[who[0]][number])}", who) for call, who in found]
    return [Mismatch(key, number, shown, _kind(found, number, called))]


def _of_shapes(call: Collective) -> str:
    return f" of {call.shapes}" if call.shapes else ""


def _kind(
    found: Sequence[tuple[str, tuple[int, ...]]], number: int, called: Mapping[int, Mapping[int, Collective]]
) -> str:
    """What explains all that the ranks of the two most frequent calls called from there on."""
    many, few = (_calls_from(number, [called[rank] for rank in who]) for _, who in found[:2])
    agreeing = {
        "skipped": _agreeing(few, many, lambda each: each + 1),
        "added": _agreeing(many, few, lambda each: each + 1),
        "reordered": _agreeing(few, many, lambda each: 2 * number + 1 - each if each <= number + 1 else each),
    }
    best = max(agreeing, key=lambda kind: agreeing[kind])
    if not agreeing[best]:
        return "mismatched"
    is_even = len(found[0][1]) == len(found[1][1])  # then it is not known which of the two is right
    return "skipped" if best == "added" and is_even else best


def _calls_from(number: int, calls: Sequence[Mapping[int, Collective]]) -> dict[int, str]:
    return {each: described(call) for own in calls for each, call in own.items() if each >= number}


def _agreeing(calls: Mapping[int, str], others: Mapping[int, str], place: Callable[[int], int]) -> int:
    """How many calls the others have at another place; 0 where they have a different one at any of these."""
    pairs = [(call, others[place(number)]) for number, call in calls.items() if place(number) in others]
    return len(pairs) if all(call == other for call, other in pairs) else 0


def _transfer(state: RankState, members: Mapping[GroupKey, Mapping[int, int]]) -> Transfer | None:
    if not state.transfers:
        return None
    call = min(state.transfers, key=lambda each: (not each.is_pending, each.enqueued_ns))
    peer = members.get(GroupKey(call.group, call.ranks), {}).get(call.peer, -1)
    return Transfer(state.rank, peer, call, len(state.transfers) - 1)


def _edges(waits: Iterable[Wait], transfers: Iterable[Transfer]) -> dict[int, set[int]]:
    """The ranks that each rank waits for; only of ranks that wait for any."""
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
        stack = [iter([begin])]  # the rest of the neighbours: of the path's ranks, behind this first one
        while stack:
            rank = next(stack[-1], None)
            if rank is None:
                stack.pop()
                if path:
                    done.add(path.popitem()[0])
            elif rank in path:
                ranks = list(path)
                found = ranks[ranks.index(rank) :]
                lowest = found.index(min(found))
                return found[lowest:] + found[:lowest]
            elif rank not in done:
                path[rank] = None
                stack.append(iter(sorted(edges.get(rank, ()))))
    return []
