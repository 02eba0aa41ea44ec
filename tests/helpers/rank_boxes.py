"""Boxes of ranks, made up: contents, states, and the text of an autopsy of them."""

from __future__ import annotations

import re

import numpy as np

from otel_torchprof._answers.autopsy import autopsy
from otel_torchprof._cli.autopsy import as_text
from otel_torchprof._columns.batch import Batch, Names
from otel_torchprof._files.rank_state import GroupKey, state_of
from otel_torchprof._native.blackbox import Collective, Contents, Group

SECOND = 10**9
NOW = 1_700_000_000 * SECOND
COLUMNS = ("name", "start", "end", "flags", "kind", "thread")
NOTHING = Batch({name: np.zeros(0, np.int64) for name in COLUMNS}, Names.of([]), [])
DEFAULT = GroupKey("0", "")
ALL_REDUCE, BROADCAST = "c10d::allreduce_", "c10d::broadcast_"
PENDING, DONE, FAILED, UNTRACKED = "pending", "done", "failed", "untracked"


def call(number: int, status: str = DONE, name: str = ALL_REDUCE, group: GroupKey = DEFAULT, **more) -> Collective:
    """A collective; it was enqueued at the second of its number."""
    found = Collective(
        name=name,
        group=group.name,
        ranks=group.ranks,
        dtype="float",
        reduce_op="sum" if name == ALL_REDUCE else "",
        sequence_nr=number,
        bytes_in=4000,
        bytes_out=4000,
        root=0 if name == BROADCAST else -1,
        peer=-1,
        tag=-1,
        is_transfer=False,
        is_async=True,
        has_failed=status == FAILED,
        is_tracked=status != UNTRACKED,
        os_tid=1,
        enqueued_ns=NOW + number * SECOND,
        completed_ns=NOW + number * SECOND + 1 if status in {DONE, FAILED} else 0,
    )
    return found._replace(**more)


def transfer(peer: int, status: str = PENDING, name: str = "c10d::recv_", **more) -> Collective:
    """A send or a receive, with the rank ``peer`` of its group."""
    more = {"is_transfer": True, "peer": peer, "tag": 7, "enqueued_ns": NOW, **more}
    return call(-1, status, name, **more)


def contents(rank: int | None, *calls: Collective, size: int = 4, info: dict | None = None, **more) -> Contents:
    """A box with these collectives, and with the groups that they are of."""
    groups = {}
    for each in calls:
        key = each.group, each.ranks, each.is_transfer
        ranks = each.ranks.split(",") if each.ranks else []
        place = ranks.index(str(rank)) if str(rank) in ranks else rank or 0
        groups[key] = Group(
            name=each.group,
            ranks=each.ranks,
            backend="gloo" if each.is_tracked else "nccl",
            size=len(ranks) or size,
            rank=place,
            is_transfers=each.is_transfer,
            is_tracked=each.is_tracked,
            enqueued=0,
            completed=0,
            last_enqueued=max(each.sequence_nr, groups[key].last_enqueued if key in groups else -1),
            last_completed=-1,
        )
    told = {} if rank is None else {"rank": rank}
    found = Contents(
        events=lambda _size: iter([NOTHING]),
        pid=1000 + (rank or 0),
        is_closed=False,
        last_ns=NOW,
        chunks=1,
        chunks_damaged=0,
        names_left_out=0,
        dropped=0,
        groups=list(groups.values()),
        collectives=calls,
        info={**told, "host": "node", "opened": NOW - 60 * SECOND, **(info or {})},
    )
    return found._replace(**more)


def state(rank: int | None, *calls: Collective, is_alive: bool = True, place: str = "", **more):
    """The state of a rank, in a place for three seconds."""
    found = state_of(contents(rank, *calls, **more), is_alive=is_alive, now_ns=NOW + 100 * SECOND, number=-1)
    return found._replace(place=place, since_ns=found.last_ns - 3 * SECOND) if place else found


def lines(*states) -> list[str]:
    """The headlines, without the times of day."""
    return as_text(autopsy(states)).partition("\n\n")[0].splitlines()


def roll_call(*states) -> list[str]:
    return as_text(autopsy(states)).partition("\n\n")[2].splitlines()


def without_times(text: str) -> str:
    """The text with T for each time of day."""
    return re.sub(r"\d\d:\d\d:\d\d\.\d", "T", text)
