"""The text table of events or averages, character for character as torch's profiler prints it.

Works on anything with the attributes of torch's ``FunctionEvent`` or ``FunctionEventAvg``. What must be known about all
events before the first line can be written (:class:`Facts`) is apart from the rows that are printed, so that a list which
keeps its events as columns can supply both without making every event.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from otel_torchprof.errors import TorchProfError
from otel_torchprof.markup import Cell, Heading, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


# ---- The table of events or averages as HTML, for notebooks: the columns of the text table, sorted by a click ----


def html_table(
    info: Info, rows: Iterable[Any], options: TableOptions, *, total: int, row_limit: int, sort_by: str | None
) -> str:
    """The first rows of ``total``, in the given order; a negative limit means no limit.

    ``sort_by`` is only for the heading: the attribute by which the rows are sorted.
    """
    columns = columns_of(info, options)
    by = next((column for column in reversed(columns) if sort_by and column.key == attribute_of(sort_by)), None)
    headings = [Heading(column.title, is_text=not column.key, is_sorted=column is by) for column in columns]
    displayed = rows if row_limit < 0 else itertools.islice(rows, row_limit)
    cells = ([_cell(column, event) for column in columns] for event in displayed)
    return table(headings, cells, hidden=0 if row_limit < 0 else total - row_limit)


def _cell(column: TableColumn, event: Any) -> Cell:
    text = str(column.cell(event))
    number = getattr(event, column.key) or 0 if column.key else None
    return Cell(text, number, float(text[:-1]) / 100 if text.endswith("%") else None)


SORT_KEYS: tuple[str, ...] = (
    "count",
    "cpu_time",
    "cpu_time_total",
    "self_cpu_time_total",
    "cpu_memory_usage",
    "self_cpu_memory_usage",
    "device_time",
    "device_time_total",
    "self_device_time_total",
    "device_memory_usage",
    "self_device_memory_usage",
)
"""Common sort keys of tables; ``device`` may be written as cuda, xpu or privateuse1. Other attributes work too."""

_SECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}
_UNITS = sorted(_SECONDS.items(), key=lambda item: item[1])
_FOUR_DIGITS = 999.5
"""Least number that rounds to one of four digits."""
_CPU = 0
_DEVICES_WITH_TOTALS = frozenset((1, 12, 19, 20))  # CUDA, XPU, MTIA, PrivateUse1 of c10::DeviceType
_COLUMN_WIDTH = 12
_GAP = "  "
_FLOPS_UNITS = ("FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs")


class TableArgumentError(ValueError, AttributeError):
    """An argument of ``table()`` that means nothing. Also an AttributeError, which is what torch raises for a sort key."""


@dataclass(frozen=True)
class TableOptions:
    """The arguments of ``table()`` that shape the text; widths are in characters, None for no limit."""

    max_src_column_width: int | None = 75
    max_name_column_width: int | None = 55
    max_shapes_column_width: int | None = 80
    header: str | None = None
    top_level_events_only: bool = False
    time_unit: str | None = None
    profile_memory: bool = False
    with_flops: bool = False
    keeps_ends: bool = False
    """Whether a name that is too long keeps its end: that is what tells the paths of modules apart."""

    def __post_init__(self) -> None:
        for name in ("max_src_column_width", "max_name_column_width", "max_shapes_column_width"):
            _check_number(name, getattr(self, name), "no limit")
        if not isinstance(self.header, str | None):
            raise TypeError(f"header is {self.header!r}; it must be a str, or None")
        if self.time_unit is not None and self.time_unit not in _SECONDS:
            raise TableArgumentError(
                f"time_unit={self.time_unit!r}: allowed are 's', 'ms', 'us' and None (to fit each value)"
            )

    def time(self, microseconds: float) -> str:
        """Formats a time in the requested unit, else in one that fits."""
        if self.time_unit is None:
            return format_time(microseconds)
        return f"{_exact(microseconds) / _SECONDS[self.time_unit]:.3f}{self.time_unit}"

    def name(self, text: str | None) -> str:
        """A name, cut where it would fill its column."""
        text, limit = text or "", self.max_name_column_width
        if limit is None or len(text) < limit - 3:
            return text
        return _tail(text, limit) if self.keeps_ends else text[: limit - 3] + "..."


@dataclass(frozen=True)
class Info:
    """Facts about all events that the table needs: its columns, their widths, and the sums (µs) behind percentages."""

    self_cpu_total: float
    longest_key: int
    longest_shapes: int = 2
    has_shapes: bool = False
    has_overloads: bool = False
    has_device_time: bool = False
    has_device_memory: bool = False
    has_node_ids: bool = False
    longest_frame: int | None = None
    """Length of the longest stack entry; None where no event has a stack."""
    smallest_flops: float | None = None
    self_device_total: float = 0
    use_device: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A column of the table."""

    title: str
    cell: Callable[[Any], object]
    """Returns the cell's text for an event."""
    key: str = ""
    """The attribute of events that it shows; empty where that is no number."""
    width: int = _COLUMN_WIDTH
    left: bool = False

    def aligned(self, value: object) -> str:
        """A value, as wide as the column."""
        text = str(value)
        return (text.ljust(self.width) if self.left else text.rjust(self.width)) + _GAP


def _check_number(name: str, value: object, without: str) -> None:
    if not isinstance(value, SupportsFloat | None):
        raise TypeError(f"{name} is {value!r}; it must be a number, or None for {without}")


def build_table(
    events: Sequence[Any], options: TableOptions, *, sort_by: str | None = None, row_limit: int | None = 100
) -> str:
    """The table of any sequence of events or averages; the empty text for none. A negative row limit means no limit.

    Raises TableArgumentError for an unknown sort key, TorchProfError for device times without a device. Reads the events and changes nothing about them.
    """
    if not events:
        return ""
    return format_table(info_of(events), chosen(events, sort_by, options.top_level_events_only), options, row_limit)


def format_table(info: Info, rows: Iterable[Any], options: TableOptions, row_limit: int | None = 100) -> str:
    """Formats the table. ``rows``: the events in order, of which at most ``row_limit`` are printed."""
    if info.has_device_time and not info.use_device:
        raise TorchProfError("there are device times but the events name no device: set use_device, e.g. 'cuda'")
    _check_number("row_limit", row_limit, "all rows")
    columns = columns_of(info, options)
    rule = "".join("-" * column.width + _GAP for column in columns)
    lines = [*_title(columns, options), rule, _line(columns, (column.title for column in columns)), rule]
    for event in _limited(rows, row_limit):
        lines.append(_line(_as_filled(columns), (column.cell(event) for column in _as_filled(columns))))
        if info.longest_frame is not None:
            lines += _stack_lines(columns, event, info, options)
    lines += [rule, f"Self CPU time total: {options.time(info.self_cpu_total)}"]
    if info.has_device_time:
        lines.append(f"Self {_device(info)} time total: {options.time(info.self_device_total)}")
    return "\n".join(lines) + "\n"


def info_of(events: Sequence[Any]) -> Info:
    """Collects the facts from the events themselves, which must not be none."""
    frames = [len(frame) for event in events for frame in event.stack or ()]
    flops = [event.flops for event in events if (event.flops or 0) > 0]
    return Info(
        self_cpu_total=sum(event.self_cpu_time_total for event in events),
        longest_key=max(len(event.key) for event in events),
        longest_shapes=max(len(str(event.input_shapes)) for event in events),
        has_shapes=any(event.input_shapes for event in events),
        has_overloads=any(event.overload_name for event in events),
        has_device_time=any(event.self_device_time_total > 0 for event in events),
        has_device_memory=any(event.self_device_memory_usage > 0 for event in events),
        has_node_ids=any(event.node_id != -1 for event in events),
        longest_frame=max(frames, default=None),
        smallest_flops=min(flops, default=None),
        self_device_total=sum(event.self_device_time_total for event in events if _has_device_total(event)),
        use_device=events[0].use_device,
    )


def chosen(events: Sequence[Any], sort_by: str | None, top_level_only: bool) -> Iterator[Any]:
    """The events in the order of the table: the largest first, equal ones as they stood."""
    ordered = events if sort_by is None else _sorted(events, sort_by)
    return (event for event in ordered if not (top_level_only and event.cpu_parent is not None))


def attribute_of(sort_by: str) -> str:
    """The attribute a sort key means: the device is written in several ways."""
    return sort_by.replace("cuda", "device").replace("xpu", "device").replace("privateuse1", "device")


def format_time(microseconds: float) -> str:
    """A time in the largest of s, ms and us that it reaches."""
    microseconds = _exact(microseconds)
    unit = "s" if microseconds >= _SECONDS["s"] else "ms" if microseconds >= _SECONDS["ms"] else "us"
    return f"{microseconds / _SECONDS[unit]:.3f}{unit}"


def brief_time(microseconds: float) -> str:
    """A time with three digits, for sentences and summaries."""
    microseconds = _exact(microseconds)
    unit = next(unit for unit, scale in _UNITS if unit == "s" or abs(microseconds) / scale < _FOUR_DIGITS)
    return three_digits(microseconds / _SECONDS[unit]) + unit


def three_digits(number: float) -> str:
    """A number with three digits, at most two of them decimals; all digits of a larger one."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0  # noqa: PLR2004 - what rounds to 10.0 and 100
    return f"{number:.{decimals}f}"


def format_share(part: float, whole: float) -> str:
    """A part as a percentage, NaN of nothing."""
    part, whole = _exact(part), _exact(whole)
    return "NaN" if whole == 0 else f"{part * 100.0 / whole:.2f}%"


def format_memory(size: int) -> str:
    """A number of bytes in the largest of GB, MB, KB and B that it reaches (powers of 1024, as torch counts)."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def _sorted(events: Sequence[Any], sort_by: str) -> list[Any]:
    attribute = attribute_of(sort_by)
    try:
        return sorted(events, key=lambda event: _rank(getattr(event, attribute)), reverse=True)
    except AttributeError as error:
        usual = ", ".join(SORT_KEYS)
        raise TableArgumentError(f"sort_by={sort_by!r} is no attribute of the events; usual are {usual}") from error
    except TypeError as error:
        raise TableArgumentError(f"sort_by={sort_by!r}: its values have no order ({error})") from error


def _exact(microseconds: float) -> float:
    """Rounds off the errors of added floats, so that the same events give the same text and order in any representation."""
    return round(microseconds, 5) + 0.0  # no -0.0, whose text has a sign


def _rank(value: Any) -> Any:
    """Sort key of a value; 0 if unknown."""
    if isinstance(value, float):
        return _exact(value)
    return 0 if value is None else value


def _limited(rows: Iterable[Any], row_limit: int | None) -> Iterator[Any]:
    """The first rows; asks for no event beyond the last one wanted, since asking may make it."""
    if row_limit == 0:
        return
    for number, event in enumerate(rows, 1):
        yield event
        if number == row_limit:
            return


def _has_device_total(event: Any) -> bool:
    """Whether the event's own device time belongs in the sum: kernels do, as do CPU events of the legacy profiler."""
    device = int(event.device_type)
    if device == _CPU:
        return bool(event.is_legacy)
    return device in _DEVICES_WITH_TOTALS and not event.is_user_annotation


def _device(info: Info) -> str:
    return "None" if info.use_device is None else info.use_device.upper()


def _fitting(longest: int, limit: int | None) -> int:
    return longest + 4 if limit is None else min(longest + 4, limit)


def columns_of(info: Info, options: TableOptions) -> list[TableColumn]:
    """Every column of the table, in order of the headings."""
    width = _fitting(info.longest_key, options.max_name_column_width)
    columns = [TableColumn("Name", lambda event: options.name(event.key), width=width)]
    if info.has_overloads:
        columns.append(TableColumn("Overload Name", lambda event: options.name(event.overload_name), width=width))
    columns += _cpu_columns(info, options)
    if info.has_device_time:
        columns += _device_columns(info, options)
    if options.profile_memory:
        columns += _memory_columns(info)
    columns.append(TableColumn("# of Calls", lambda event: event.count, "count"))
    if info.has_node_ids:
        columns.append(TableColumn("Node ID", lambda event: event.node_id, "node_id"))
    if info.has_shapes:
        shapes = _fitting(info.longest_shapes, options.max_shapes_column_width)
        columns.append(TableColumn("Input Shapes", lambda event: str(event.input_shapes)[:shapes], width=shapes))
    if info.longest_frame is not None:
        columns.append(_source_column(info.longest_frame, options))
    if options.with_flops and info.smallest_flops is not None:
        columns.append(_flops_column(info.smallest_flops))
    return columns


def _cpu_columns(info: Info, options: TableOptions) -> list[TableColumn]:
    def own_share(event: Any) -> object:
        return format_share(event.self_cpu_time_total, info.self_cpu_total)

    def total_share(event: Any) -> object:
        return 0 if event.is_async else format_share(event.cpu_time_total, info.self_cpu_total)

    return [
        TableColumn("Self CPU %", own_share, "self_cpu_time_total"),
        TableColumn("Self CPU", lambda event: options.time(event.self_cpu_time_total), "self_cpu_time_total"),
        TableColumn("CPU total %", total_share, "cpu_time_total"),
        TableColumn("CPU total", lambda event: options.time(event.cpu_time_total), "cpu_time_total"),
        TableColumn("CPU time avg", lambda event: options.time(event.cpu_time), "cpu_time"),
    ]


def _device_columns(info: Info, options: TableOptions) -> list[TableColumn]:
    device = _device(info)

    def own_share(event: Any) -> object:
        return format_share(event.self_device_time_total, info.self_device_total)

    return [
        TableColumn(
            f"Self {device}", lambda event: options.time(event.self_device_time_total), "self_device_time_total"
        ),
        TableColumn(f"Self {device} %", own_share, "self_device_time_total"),
        TableColumn(f"{device} total", lambda event: options.time(event.device_time_total), "device_time_total"),
        TableColumn(f"{device} time avg", lambda event: options.time(event.device_time), "device_time"),
    ]


def _memory_columns(info: Info) -> list[TableColumn]:
    columns = [
        TableColumn("CPU Mem", lambda event: format_memory(event.cpu_memory_usage), "cpu_memory_usage"),
        TableColumn("Self CPU Mem", lambda event: format_memory(event.self_cpu_memory_usage), "self_cpu_memory_usage"),
    ]
    if info.use_device and info.has_device_memory:
        device = _device(info)
        columns += [
            TableColumn(f"{device} Mem", lambda event: format_memory(event.device_memory_usage), "device_memory_usage"),
            TableColumn(
                f"Self {device} Mem",
                lambda event: format_memory(event.self_device_memory_usage),
                "self_device_memory_usage",
            ),
        ]
    return columns


def _source_column(longest_frame: int, options: TableOptions) -> TableColumn:
    width = _fitting(longest_frame, options.max_src_column_width)
    return TableColumn(
        "Source Location", lambda event: _tail(event.stack[0], width) if event.stack else "", width=width, left=True
    )


def _flops_column(smallest: float) -> TableColumn:
    """Floating point operations in the unit that suits the smallest of them."""
    magnitude = int(max(0.0, min(math.log10(smallest) / 3, len(_FLOPS_UNITS) - 1.0)))
    scale = 10 ** (magnitude * -3.0)
    return TableColumn(
        f"Total {_FLOPS_UNITS[magnitude]}",
        lambda event: f"{event.flops * scale:8.3f}" if (event.flops or 0) > 0 else "--",
        "flops",
    )


def _as_filled(columns: list[TableColumn]) -> list[TableColumn]:
    """The columns as torch fills them: with both, it puts the FLOPs under "Source Location" and the source under FLOPs."""
    source, last = columns[-2], columns[-1]
    if source.title != "Source Location":
        return columns
    swapped = TableColumn("", last.cell, width=source.width, left=True), TableColumn("", source.cell, width=last.width)
    return [*columns[:-2], *swapped]


def _title(columns: list[TableColumn], options: TableOptions) -> list[str]:
    """The lines above the headings; their rule spares the gap after the last column."""
    rule = "=" * (sum(column.width + len(_GAP) for column in columns) - len(_GAP))
    lines = [] if options.header is None else [rule, options.header]
    return (
        [*lines, rule, "This report only display top-level ops statistics"] if options.top_level_events_only else lines
    )


def _line(columns: Iterable[TableColumn], values: Iterable[object]) -> str:
    return "".join(column.aligned(value) for column, value in zip(columns, values, strict=True))


def _stack_lines(columns: list[TableColumn], event: Any, info: Info, options: TableOptions) -> list[str]:
    """The rest of an event's stack in the last column, and an empty row that ends it."""
    width = _fitting(info.longest_frame or 0, options.max_src_column_width)
    entries = [_tail(frame, width) for frame in (event.stack or ())[1:]]
    return [_line(columns, [""] * (len(columns) - 1) + [entry]) for entry in (*entries, "")]


def _tail(path: str, width: int) -> str:
    """The end of a path that is too long for its column."""
    if len(path) <= width:
        return path
    tail = path[len(path) - width :]
    return "..." + tail[3:] if len(tail) > 3 else tail  # noqa: PLR2004 - the length of the dots
