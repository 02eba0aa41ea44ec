"""Sums that were kept without any event, as the list that ``key_averages()`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._columns.schema import Scope
from .events import EventList
from .function_event_avg import FunctionEventAvg

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._model.running import Average

_NS_PER_US = 1000


def averages_list(sums: Iterable[Average]) -> EventList:
    """One FunctionEventAvg per name, times in us. They know sums only: no shapes, stacks, parents or children."""
    return EventList([_average(entry) for entry in sums])


def _average(entry: Average) -> FunctionEventAvg:
    average = FunctionEventAvg()
    average.key = entry.name
    average.count = entry.calls
    average.cpu_time_total = entry.total / _NS_PER_US
    average.self_cpu_time_total = entry.own / _NS_PER_US
    average.scope = int(Scope.USER_SCOPE if entry.is_label else Scope.FUNCTION)
    average.is_user_annotation = entry.is_label
    average.input_shapes = ""
    average.overload_name = ""
    average.stack = []
    return average
