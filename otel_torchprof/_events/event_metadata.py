"""Metadata from a device's own event of a kernel, a copy or a collective, as in torch's profiler."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class EventMetadata(NamedTuple):
    """Metadata of one event on a device.

    None for a missing value. Sizes are in bytes, ``bandwidth_gb_s`` in GB/s. Immutable. Mirrors torch's class of that
    name.

    Examples:
        >>> found = otp.EventMetadata.of({"stream": "7", "grid": "[8, 1, 1]"})
        >>> found.stream, found.grid
        (7, [8, 1, 1])
    """

    registers_per_thread: int | None = None
    shared_memory: int | None = None
    grid: list[int] | None = None
    block: list[int] | None = None
    priority: int | None = None
    blocks_per_sm: float | None = None
    warps_per_sm: float | None = None
    occupancy: dict[str, Any] | None = None
    est_occupancy_pct: float | None = None
    queued: int | None = None
    graph_id: int | None = None
    graph_node_id: int | None = None
    stream: int | None = None
    context: int | None = None
    channel: int | None = None
    channel_type: int | None = None
    bytes: int | None = None
    bandwidth_gb_s: float | None = None
    collective_name: str | None = None
    dtype: str | None = None
    in_msg_nelems: int | None = None
    out_msg_nelems: int | None = None
    in_split_size: str | None = None
    out_split_size: str | None = None
    global_rank_start: int | None = None
    global_rank_stride: int | None = None
    group_size: int | None = None
    process_group_name: str | None = None
    process_group_desc: str | None = None
    group_ranks: str | None = None
    rank: int | None = None
    src_rank: int | None = None
    dst_rank: int | None = None
    seq: int | None = None
    is_async: bool | None = None

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> EventMetadata | None:
        """Parses metadata from the texts of a trace under Kineto's keys; returns None if none of the keys is known.

        Raises:
            ValueError: a text is not a value of its type.
        """
        found = {_FIELDS[key]: text for key, text in texts.items() if key in _FIELDS and text is not None}
        return cls(**{field: _READERS[field](text) for field, text in found.items()}) if found else None


def _unquoted(text: str) -> str:
    return text.strip('"')


def _truth(text: str) -> bool:
    return text in {"1", "true"}


_KEYS: tuple[tuple[Callable[[str], Any], dict[str, str]], ...] = (
    (
        int,
        {
            "registers per thread": "registers_per_thread",
            "shared memory": "shared_memory",
            "graph id": "graph_id",
            "graph node id": "graph_node_id",
            "In msg nelems": "in_msg_nelems",
            "Out msg nelems": "out_msg_nelems",
            "Global rank start": "global_rank_start",
            "Global rank stride": "global_rank_stride",
            "Group size": "group_size",
            "Rank": "rank",
            "Src Rank": "src_rank",
            "Dst Rank": "dst_rank",
            "Seq": "seq",
            **{key: key for key in ("priority", "queued", "stream", "context", "channel", "channel_type", "bytes")},
        },
    ),
    (
        float,
        {
            "blocks per SM": "blocks_per_sm",
            "warps per SM": "warps_per_sm",
            "est. achieved occupancy %": "est_occupancy_pct",
            "memory bandwidth (GB/s)": "bandwidth_gb_s",
        },
    ),
    (json.loads, {"grid": "grid", "block": "block", "occupancy": "occupancy"}),
    (
        _unquoted,
        {
            "Collective name": "collective_name",
            "dtype": "dtype",
            "In split size": "in_split_size",
            "Out split size": "out_split_size",
            "Process Group Name": "process_group_name",
            "Process Group Description": "process_group_desc",
            "Process Group Ranks": "group_ranks",
        },
    ),
    (_truth, {"Is asynchronized op": "is_async"}),
)
"""Parsers of texts, each with Kineto's keys for it and the fields of these."""

_FIELDS = {key: field for _, fields in _KEYS for key, field in fields.items()}
_READERS = {field: read for read, fields in _KEYS for field in fields.values()}
