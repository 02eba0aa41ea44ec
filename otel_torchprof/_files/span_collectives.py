"""Collectives of a file of spans as columns of a batch, from the attributes of their spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.batch import Names
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, CollectiveFlag

from .attribute_keys import (
    ASYNC,
    BACKEND,
    COLLECTIVE,
    DEFAULT_GROUP,
    DTYPE,
    GROUP,
    GROUP_SIZE,
    PEER,
    RANK_IN_GROUP,
    REDUCE_OP,
    ROOT,
    SEQUENCE,
    SIZE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Array

_TEXTS = {"group": GROUP, "backend": BACKEND, "dtype": DTYPE, "reduce_op": REDUCE_OP}
_NUMBERS = {
    "sequence_nr": SEQUENCE,
    "bytes_in": SIZE,
    "bytes_out": SIZE,
    "group_size": GROUP_SIZE,
    "rank": RANK_IN_GROUP,
    "peer": PEER,
    "root": ROOT,
}
"""Columns and the attributes that have them; of the two sizes a span has the larger one only."""
_TRANSFERS = ("send", "recv")


def rank_in_job(attributes: Mapping[str, tuple[Integers, Sequence[Any]]]) -> int | None:
    """The rank that spans of collectives have in the group of all ranks; None if they have none, or several."""
    none = np.empty(0, np.int64), ()
    (of_groups, groups), (of_ranks, ranks) = (attributes.get(key, none) for key in (GROUP, RANK_IN_GROUP))
    of_all = {row for row, group in zip(of_groups.tolist(), groups, strict=True) if group == DEFAULT_GROUP}
    found = {rank for row, rank in zip(of_ranks.tolist(), ranks, strict=True) if row in of_all}
    return found.pop() if len(found) == 1 else None


def collectives_of_spans(
    attributes: Mapping[str, tuple[Integers, Sequence[Any]]], event: Array, names: Names
) -> tuple[dict[str, Array] | None, Names]:
    """The collectives, None without any, and the names, to which theirs are added.

    Args:
        attributes: by key, rows of the file and the value of each.
        event: by row of the file, the id of its event; 0 for none.
        names: of the batch.
    """
    rows, operations = attributes.get(COLLECTIVE, (np.empty(0, np.int64), ()))
    kept = np.flatnonzero(event[rows] > 0)
    if not kept.size:
        return None, names
    rows = rows[kept]
    texts: dict[str, int] = {}
    limits = np.iinfo(np.int32)
    place = np.full(len(event), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    columns = {column.name: np.zeros(len(rows), dtype=column.dtype) for column in COLLECTIVE_COLUMNS}
    columns["event"][:], columns["tag"][:] = event[rows], -1
    for name, key in (_TEXTS | _NUMBERS).items():
        own, values = attributes.get(key, (np.empty(0, np.int64), ()))
        if name in _TEXTS:
            numbers = [len(names) + texts.setdefault(value, len(texts)) for value in values]
        else:
            columns[name][:] = -1
            numbers = [min(value, limits.max) if columns[name].dtype == limits.dtype else value for value in values]
        here = place[own] >= 0
        columns[name][place[own[here]]] = np.array(numbers, dtype=np.int64)[here]
    own, values = attributes.get(ASYNC, (np.empty(0, np.int64), ()))
    is_async = own[(np.array(values) != 0) & (place[own] >= 0)] if len(own) else own
    columns["flags"][place[is_async]] |= int(CollectiveFlag.ASYNC)
    is_transfer = [operations[at].startswith(_TRANSFERS) for at in kept.tolist()]
    columns["flags"][is_transfer] |= int(CollectiveFlag.TRANSFER)
    return columns, names.followed_by(Names.of(list(texts))) if texts else names
