"""The names of ``torch.autograd.profiler_util``, for code that changes an import and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._encode.table import TableOptions, build_table
from ._encode.table import format_memory as _format_memory
from ._encode.table import format_share as _format_time_share
from ._encode.table import format_time as _format_time
from ._profile.events import EventList
from ._profile.function_event import (
    MEMORY_EVENT_NAME,
    OUT_OF_MEMORY_EVENT_NAME,
    DeviceType,
    EventMetadata,
    FormattedTimesMixin,
    FunctionEvent,
    Interval,
    Kernel,
    StringTable,
    _filter_name,
    _filter_stack_entry,
    _rewrite_name,
    demangle,
)
from ._profile.function_event_avg import FunctionEventAvg
from ._profile.kineto_event import MemRecordsAcc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "MEMORY_EVENT_NAME",
    "OUT_OF_MEMORY_EVENT_NAME",
    "DeviceType",
    "EventList",
    "EventMetadata",
    "FormattedTimesMixin",
    "FunctionEvent",
    "FunctionEventAvg",
    "Interval",
    "Kernel",
    "MemRecordsAcc",
    "StringTable",
    "_attr_formatter",
    "_build_metadata",
    "_build_table",
    "_canonicalize_profiler_events",
    "_filter_name",
    "_filter_stack_entry",
    "_format_memory",
    "_format_time",
    "_format_time_share",
    "_rewrite_name",
    "demangle",
]

_build_metadata = EventMetadata.of


def _attr_formatter(name: str) -> property:
    """Returns a property that formats an attribute in microseconds as text."""
    return property(lambda self: _format_time(getattr(self, name)))


def _build_table(  # noqa: PLR0917 - torch's signature
    events: Any,
    sort_by: str | None = None,
    header: str | None = None,
    row_limit: int | None = 100,
    max_src_column_width: int | None = 75,
    max_name_column_width: int | None = 55,
    max_shapes_column_width: int | None = 80,
    with_flops: bool = False,
    profile_memory: bool = False,
    top_level_events_only: bool = False,
    time_unit: str | None = None,
) -> str:
    """Returns the table of events or averages, of this package or torch's; arguments as :meth:`EventList.table`."""
    options = TableOptions(
        max_src_column_width=max_src_column_width,
        max_name_column_width=max_name_column_width,
        max_shapes_column_width=max_shapes_column_width,
        header=header,
        top_level_events_only=top_level_events_only,
        time_unit=time_unit,
        profile_memory=profile_memory,
        with_flops=with_flops,
    )
    return build_table(events, options, sort_by=sort_by, row_limit=row_limit)


def _canonicalize_profiler_events(events: Iterable[Mapping[str, Any]]) -> str:
    """Returns a line per event of a Chrome trace, by start: name, graph node and last line of source, for tests."""

    def line(event: Mapping[str, Any]) -> str:
        args = event["args"]
        source = [text.strip() for text in args.get("stack_trace", "").split("\n")]
        # The carets of Python 3.11 below a line of source are not source.
        source = [text for text in source if text.strip("^~ ")]
        name, node = event.get("name", "")[:30], args.get("node_name", "")
        return f"event={name} node={node} stack_trace={source[-1] if source else ''}"

    return "\n".join(line(event) for event in sorted(events, key=lambda event: event.get("ts", 0)))
