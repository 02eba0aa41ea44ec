"""Attributes of collectives: name, group, number, and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import CollectiveFlag
from otel_torchprof._model.collectives import collective_name
from otel_torchprof._model.span_table import AttributeType

from .attribute_source import Attribute, chosen

if TYPE_CHECKING:
    from collections.abc import Callable

    from .attribute_source import AttributeSource, Values


def name(source: AttributeSource) -> Values | None:
    """Common name of the collective."""
    if source.collectives is None:
        return None
    _, spans = source.collectives
    used, which = np.unique(source.batch["name"][source.table.row[spans]], return_inverse=True)
    return source.add([collective_name(source.batch.names[at]) for at in used.tolist()])[which.reshape(-1)], spans


def text(column: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for a column of indices into the names; 0 is no value."""

    def compute(source: AttributeSource) -> Values | None:
        values = _values(source, column)
        return None if values is None else chosen(values, values[0] != 0)

    return compute


def number(column: str) -> Callable[[AttributeSource], Values | None]:
    """Returns a function for a column of numbers; negative ones are no values."""

    def compute(source: AttributeSource) -> Values | None:
        values = _values(source, column)
        return None if values is None else chosen(values, values[0] >= 0)

    return compute


def size(source: AttributeSource) -> Values | None:
    """The larger of the rank's sent and received bytes."""
    given, got = _values(source, "bytes_in"), _values(source, "bytes_out")
    if given is None or got is None:
        return None
    larger = np.maximum(given[0], got[0])
    return chosen((larger, given[1]), larger >= 0)


def is_async(source: AttributeSource) -> Values | None:
    """Whether the caller continues before the collective is complete."""
    flags = _values(source, "flags")
    if flags is None:
        return None
    is_async_flag = flags[0] & CollectiveFlag.ASYNC != 0
    return chosen((is_async_flag, flags[1]), is_async_flag)


def _values(source: AttributeSource, column: str) -> Values | None:
    """A column of the collectives; None where there are none."""
    if source.collectives is None:
        return None
    place, spans = source.collectives
    return (source.batch.collectives or {})[column][place], spans


_PRESENT = "on collectives, sends and receives of `torch.distributed`"

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "torch.collective.name",
        AttributeType.NAME,
        "name of the operation, independent of the operator: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `send`",
        _PRESENT,
        name,
    ),
    Attribute(
        "torch.collective.group",
        AttributeType.NAME,
        "name of the process group, the same on every rank; `0` is the default group",
        _PRESENT,
        text("group"),
    ),
    Attribute(
        "torch.collective.group_size",
        AttributeType.INT64,
        "number of ranks in the group",
        _PRESENT,
        number("group_size"),
    ),
    Attribute(
        "torch.collective.rank", AttributeType.INT64, "this rank's number in the group", _PRESENT, number("rank")
    ),
    Attribute(
        "torch.collective.sequence_nr",
        AttributeType.INT64,
        "number of the collective in its group, from 1, the same on every rank; for a send or receive, its number in "
        "the step between these ranks with this tag, from 0",
        f"{_PRESENT}, if known",
        number("sequence_nr"),
    ),
    Attribute(
        "torch.collective.size",
        AttributeType.INT64,
        "bytes that the rank sends or receives, whichever is more",
        _PRESENT,
        size,
    ),
    Attribute(
        "torch.collective.dtype",
        AttributeType.NAME,
        "type of the first tensor, as torch's profiler names it",
        f"{_PRESENT}, except barriers",
        text("dtype"),
    ),
    Attribute(
        "torch.collective.reduce_op",
        AttributeType.NAME,
        "reduction operation: `sum`, `avg`, `max`",
        "on collectives that reduce",
        text("reduce_op"),
    ),
    Attribute(
        "torch.collective.root",
        AttributeType.INT64,
        "number of the root rank in the group",
        "on broadcast, reduce, gather and scatter",
        number("root"),
    ),
    Attribute(
        "torch.collective.peer",
        AttributeType.INT64,
        "number of the other rank in the group",
        "on sends and receives, except receives from any rank",
        number("peer"),
    ),
    Attribute(
        "torch.collective.backend",
        AttributeType.NAME,
        "backend of the group: `gloo`, `nccl`",
        _PRESENT,
        text("backend"),
    ),
    Attribute(
        "torch.collective.async",
        AttributeType.BOOL,
        "true: the caller continues before the operation has ended",
        "if true",
        is_async,
    ),
)
"""Attributes of collectives, in the order in which spans have them."""
