"""Sums that were kept without any event, as the list that ``key_averages()`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._columns.schema import Scope
from otel_torchprof._process.printable import printable

from .events import EventList
from .function_event_avg import FunctionEventAvg

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_torchprof._averages.named_sums import Average

_NS_PER_US = 1000


def averages_list(sums: Iterable[Average], use_device: str | None = None) -> EventList[FunctionEventAvg]:
    """One FunctionEventAvg per name, times in us. They know sums only: no shapes, stacks, parents or children.

    ``use_device`` names the device whose times are among the sums; None where there are none.
    """
    return EventList([_average(entry, use_device) for entry in sums], use_device=use_device)


def printable_table(averages: EventList, sort_by: str, row_limit: int) -> str:
    """The table for a terminal: names are made printable, in the list too."""
    for average in averages:
        average.key = printable(average.key)
    return averages.table(sort_by=sort_by, row_limit=row_limit)


def _average(entry: Average, use_device: str | None) -> FunctionEventAvg:
    average = FunctionEventAvg()
    average.key = entry.name
    average.count = entry.calls
    average.node_id = -1
    average.cpu_time_total = entry.total / _NS_PER_US
    average.self_cpu_time_total = entry.self_time / _NS_PER_US
    average.device_time_total = entry.device_total / _NS_PER_US
    average.self_device_time_total = entry.device_self_time / _NS_PER_US
    average.use_device = use_device
    average.is_legacy = (
        use_device is not None
    )  # as of recorded events, whose times of devices then count in a table's sum
    average.scope = int(Scope.USER_SCOPE if entry.is_label else Scope.FUNCTION)
    average.is_user_annotation = entry.is_label
    average.input_shapes = ""
    average.overload_name = ""
    average.stack = []
    return average
