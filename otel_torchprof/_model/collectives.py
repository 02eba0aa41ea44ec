"""Collectives: names, span ids on every rank, and links between ranks.

Several ranks take part in a collective, each with a span for its part. The span ids are computed from data that all ranks have (group, number,
step), so that each rank can link to the others without communication.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import CollectiveFlag

from .forest import at_nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.placing import Trees

    from .placed import Placed, TraceGroup

_REMEMBERED = 1 << 16
"""Collectives whose ids are remembered, for children that come in later drains."""
_STEPS = 8
"""Steps with counts of sends and receives at a time; some are drained after their step has ended."""

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "monitored_barrier": "barrier",
    "recv_any_source": "recv",
}


@functools.lru_cache(maxsize=256)
def collective_name(operator: str) -> str:
    """Common name of a c10d operator: ``all_reduce`` for ``c10d::allreduce_``."""
    plain = operator.removeprefix("c10d::").strip("_")
    return _NAMES.get(plain, plain)


@functools.lru_cache(maxsize=256)
def ranks_in(text: str, size: int) -> tuple[int, ...]:
    """The global ranks of a group, in its order, as the column ``ranks`` has them."""
    return tuple(map(int, text.split(","))) if text else tuple(range(size))


class GroupRanks(Protocol):
    """The other ranks, as known to a process."""

    def collective_span(
        self, group: str, sequence: int, rank: int, step: int, operation: str = ""
    ) -> tuple[int, int] | None:
        """Trace and span id of any rank's part in a collective; None where the ranks have no ids in common."""

    def linked_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks of a group to which this rank's part in a collective links: not itself, and only exporting ranks."""


class _OpenCollective(NamedTuple):
    """One row of :attr:`Batch.collectives` as an object."""

    event: int
    name: str
    number: int
    repeat: int
    group: str
    """Name and backend of the group: each backend counts separately."""
    ranks: tuple[int, ...]
    rank: int
    peer: int
    tag: int
    is_transfer: bool

    @property
    def way(self) -> str:
        """Source rank, destination rank and tag within the group: the same text at both ends."""
        source, target = (self.rank, self.peer) if self.name == "send" else (self.peer, self.rank)
        return f"{source}>{target}#{self.tag}"


def _entry(batch: Batch, reported: Mapping[str, npt.NDArray[Any]], at: int, operator: str) -> _OpenCollective:
    def number(name: str) -> int:
        return int(reported[name][at])

    names = batch.names
    return _OpenCollective(
        event=number("event"),
        name=collective_name(operator),
        number=number("sequence_nr"),
        repeat=number("repeat"),
        group=f"{names[number('group')]}/{names[number('backend')]}",
        ranks=ranks_in(names[number("ranks")], number("group_size")),
        rank=number("rank"),
        peer=number("peer"),
        tag=number("tag"),
        is_transfer=bool(number("flags") & CollectiveFlag.TRANSFER),
    )


class _Part(NamedTuple):
    """One rank's part of a collective."""

    trace_id: int
    span_id: int
    peers: tuple[tuple[int, int], ...]
    """Trace and span ids of the others' parts."""


class _Links(NamedTuple):
    """Rows of a batch and what each links to."""

    row: npt.NDArray[np.int64]
    trace_id: npt.NDArray[np.uint8]
    span_id: npt.NDArray[np.uint64]


class LiveCollectives:
    """The collectives of one recording, drain after drain. Not thread-safe; memory is bounded.

    Args:
        ranks: of the run; None: every process is on its own.
    """

    def __init__(self, ranks: GroupRanks | None = None) -> None:
        self._ranks = ranks
        self._parts: dict[int, _Part] = {}
        self._numbers: dict[int, int] = {}
        self._transfers: dict[int, Counter[str]] = {}

    def place(
        self, batch: Batch, trees: Trees, trace_groups: Sequence[TraceGroup], of_root: npt.NDArray[np.int64]
    ) -> Batch:
        """Learns of the collectives of a batch that is being placed; the batch, with the numbers of its sends and receives.

        ``of_root``: index into ``trace_groups`` of each node that is a root of ``trees``. Some 20 us per collective.
        """
        reported = batch.collectives
        if reported is None or not len(reported["event"]):
            return batch
        node = nodes_of(batch, reported["event"])
        start, name = (at_nodes(batch, column, node) for column in ("start", "name"))
        numbers, trace_group = reported["sequence_nr"].copy(), of_root[trees.root[node]]
        for at in np.lexsort((reported["event"], start)).tolist():
            group = trace_groups[trace_group[at]]
            step = -1 if group.step is None else group.step.number
            entry = _entry(batch, reported, at, batch.names[int(name[at])])
            if entry.is_transfer:
                entry = entry._replace(number=-1 if step < 0 else self._transfer(entry, step))
                numbers[at] = entry.number
            if entry.event not in self._parts and step >= 0:
                part = self._part(entry, step)
                if part is not None and part.trace_id == group.trace.trace_id:
                    self._parts[entry.event] = part
        _forget_oldest(self._parts)
        _forget_oldest(self._numbers)
        return replace(batch, collectives={**reported, "sequence_nr": numbers})

    def span_ids(self, events: npt.NDArray[np.uint64], own: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The span ids of events: those that other ranks know, of collectives; ``own`` of all others."""
        if not self._parts or not len(events):
            return own
        known = np.fromiter(self._parts, np.uint64, len(self._parts))
        at = np.flatnonzero(np.isin(events, known))
        if not at.size:
            return own
        ids = own.copy()
        ids[at] = [self._parts[event].span_id for event in events[at].tolist()]
        return ids

    def links(self, placed: Placed) -> _Links:
        """Links from the collectives of a placed batch to the spans of other ranks."""
        reported = placed.batch.collectives
        rows = np.empty(0, np.int64) if reported is None else rows_of(placed.batch, reported["event"])
        peers = []
        for row in np.sort(rows[rows >= 0]).tolist():
            part = self._parts.get(int(placed.batch["id"][row]))
            peers += [] if part is None else [(row, *peer) for peer in part.peers]
        trace_ids = b"".join(trace_id.to_bytes(16, "big") for _, trace_id, _ in peers)
        return _Links(
            np.array([row for row, _, _ in peers], dtype=np.int64),
            np.frombuffer(trace_ids, np.uint8).reshape(-1, 16),
            np.array([span_id for _, _, span_id in peers], dtype=np.uint64),
        )

    def _part(self, entry: _OpenCollective, step: int) -> _Part | None:
        """The part of this rank and those of the others; None where nothing has them in common."""
        known, operation = self._ranks, entry.name
        if known is None or entry.number < 0 or not 0 <= entry.rank < len(entry.ranks):
            return None
        together: Sequence[int] = entry.ranks
        if entry.is_transfer:
            if not 0 <= entry.peer < len(entry.ranks):
                return None
            together = (entry.ranks[entry.peer], entry.ranks[entry.rank])
            operation = f"{step}:{entry.way}"
        elif entry.repeat:
            operation = f"{operation}.{entry.repeat}"
        own, *others = (
            known.collective_span(entry.group, entry.number, rank, step, operation)
            for rank in (entry.ranks[entry.rank], *known.linked_ranks(together))
        )
        return None if own is None else _Part(*own, tuple(other for other in others if other is not None))

    def _transfer(self, entry: _OpenCollective, step: int) -> int:
        """Index of the transfer among those of its step, group, way and tag; both ends count the same."""
        if entry.event not in self._numbers:
            counts = self._transfers.setdefault(step, Counter())
            while len(self._transfers) > _STEPS:
                del self._transfers[min(self._transfers)]
            key = f"{entry.group} {entry.way}"
            self._numbers[entry.event] = counts[key]
            counts[key] += 1
        return self._numbers[entry.event]


def _forget_oldest(known: dict[int, Any]) -> None:
    for key in list(known)[: max(len(known) - _REMEMBERED, 0)]:
        del known[key]
