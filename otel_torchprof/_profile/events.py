"""The list of profiled events with its tables, averages, totals and stacks.

Names, arguments and results are those of ``torch.autograd.profiler_util``. torch demangles every name; operator names
never need it, so names stay as they were recorded.
"""

from __future__ import annotations

import copyreg
import functools
import json
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

import numpy as np

from otel_torchprof import markup
from otel_torchprof._columns.arrays import BLOCK, distinct_values
from otel_torchprof._columns.schema import MEMORY_KIND, WORK_KIND, Scope
from otel_torchprof._encode.chrome_json import valid
from otel_torchprof._encode.table import TableOptions, attribute_of, chosen, format_table, html_table, info_of
from otel_torchprof._export.file import write
from otel_torchprof._model.averages import collapsed_average
from otel_torchprof._native.encoders import PIECE_SIZE
from otel_torchprof._process.torch_differences import differences
from otel_torchprof.errors import TorchProfError, printable

from . import event_sums
from .event_frames import of_columns, of_objects
from .event_tree import build_tree
from .function_event import DeviceType, DeviceWork, FormattedTimesMixin, FunctionEvent, Interval, Kernel
from .function_event_avg import FunctionEventAvg, ModuleAverage
from .recorded_events import EventSource

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt
    import pandas as pd
    import typing_extensions

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.samples import Samples
    from otel_torchprof._encode.table import Info
    from otel_torchprof._model.averages import Average

    Array = npt.NDArray[Any]

__all__ = [
    "DeviceType",
    "DeviceWork",
    "EventList",
    "FormattedTimesMixin",
    "FunctionEvent",
    "FunctionEventAvg",
    "Interval",
    "Kernel",
]

_STACK_METRICS = ("self_cpu_time_total", "self_cuda_time_total", "self_xpu_time_total", "self_privateuse1_time_total")
_PLAIN_STACK_METRIC = "self_device_time_total"
_STACK_SEPARATORS = str.maketrans(" ;\t\n", "____")
_ITERATION_BLOCK = 1024
_DISPLAYED_ROWS = 50
"""Rows that a notebook displays."""

if TYPE_CHECKING:
    _Event = typing_extensions.TypeVar("_Event", bound=FunctionEvent | FunctionEventAvg, default=Any)
else:
    _Event = TypeVar("_Event")


class EventList(list[_Event]):
    """A list of FunctionEvent or FunctionEventAvg objects, with torch's methods.

    For type checkers ``EventList[FunctionEvent]``. ``prof.events()`` returns a list that is backed by columns. Its
    length is known, each event object is created on first access and stays the same, and averages, totals and tables
    are computed without creating event objects. After a change of the list or of one of its events, results are
    computed from the objects instead.

    Reading is thread-safe; changing is as safe as for any list.

    Args:
        events: the events. Default: none.
        use_device: type of device whose times the tables have, such as ``"cuda"``. Default: None.
        profile_memory: whether tables have memory columns. Default: False.
        with_flops: whether tables have a column for floating point operations. Default: False.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> events = prof.events()
        >>> events[0].name
        'aten::ones'
        >>> [average.count for average in events.key_averages() if average.key == "aten::add"]
        [1]
    """

    _source: EventSource | None = None
    _collapsed: Average | None = None
    """Calls that were collapsed into others: among the averages, whether computed from columns or from objects."""

    def __init__(
        self,
        events: Any = (),
        *,
        use_device: str | None = None,
        profile_memory: bool = False,
        with_flops: bool = False,
    ) -> None:
        super().__init__(events)
        self._use_device = use_device
        self._profile_memory = profile_memory
        self._with_flops = with_flops
        self._has_tree = False

    @classmethod
    def of(
        cls,
        batch: Batch,
        *,
        origin_ns: int,
        use_device: str | None = None,
        profile_memory: bool = False,
        with_flops: bool = False,
        has_modules: bool = False,
        pid: int | None = None,
    ) -> EventList[FunctionEvent]:
        """Makes the list of the events of a batch, as torch's profiler would show them.

        ``origin_ns`` is the Unix time in ns at 0 of their time axis, ``pid`` the id of their process, this one by
        default, ``has_modules`` whether modules are events; the other arguments are those of the class. Costs 30 to 60 ns per event.
        """
        source = EventSource(batch, origin_ns, use_device, with_flops=with_flops, has_modules=has_modules, pid=pid)
        # One slot per event, None until the event is created, so that len() and C code see the right length.
        events: EventList[Any] = cls(
            repeat(None, len(source)), use_device=use_device, profile_memory=profile_memory, with_flops=with_flops
        )
        events._source, source.slots = source, events
        if batch.reductions is not None and batch.reductions["collapsed"].any():
            events._collapsed = collapsed_average(
                *(batch.reductions[name] for name in ("collapsed", "collapsed_duration"))
            )
        return events

    @property
    def self_cpu_time_total(self) -> float:
        """Sum of the self CPU times of all events, in microseconds."""
        source = self._columns()
        return sum(event.self_cpu_time_total for event in self) if source is None else source.self_cpu_total()

    def table(  # noqa: PLR0917 - torch's signature
        self,
        sort_by: str | None = None,
        row_limit: int | None = 100,
        max_src_column_width: int | None = 75,
        max_name_column_width: int | None = 55,
        max_shapes_column_width: int | None = 80,
        header: str | None = None,
        top_level_events_only: bool = False,
        time_unit: str | None = None,
    ) -> str:
        """Returns the events as a text table.

        Args:
            sort_by: attribute to sort by, largest first. Default: None, the order of the list.
            row_limit: number of rows; -1 for all. Default: 100.
            max_src_column_width: limit of stack frames in characters; None for no limit. Default: 75.
            max_name_column_width: limit of names in characters, of which modules keep the end; None for no limit.
                Default: 55.
            max_shapes_column_width: limit of shapes in characters; None for no limit. Default: 80.
            header: a line above the table. Default: None.
            top_level_events_only: whether to omit events with a parent. Default: False.
            time_unit: ``s``, ``ms`` or ``us``. Default: None, a unit that fits each value.

        Raises:
            ValueError: ``sort_by`` is not an attribute of the events, or the unit is unknown.
        """
        options = TableOptions(
            max_src_column_width=max_src_column_width,
            max_name_column_width=max_name_column_width,
            max_shapes_column_width=max_shapes_column_width,
            header=header,
            top_level_events_only=top_level_events_only,
            time_unit=time_unit,
            profile_memory=self._profile_memory,
            with_flops=self._with_flops,
            keeps_ends=self._source is None and bool(self) and isinstance(self[0], ModuleAverage),
        )
        if not len(self):
            return ""
        return format_table(self._info(), self._chosen(sort_by, top_level_events_only), options, row_limit)

    def to_html(self, sort_by: str | None = None, row_limit: int = _DISPLAYED_ROWS) -> str:
        """Returns the events as an HTML table for a notebook, which sorts by a column when its heading is clicked.

        The HTML is self-contained and all names are escaped. A notebook displays a list at the end of a cell
        automatically, averages by self time.

        Args:
            sort_by: attribute to sort by, largest first. Default: None, the order of the list.
            row_limit: number of rows; -1 for all. Default: 50.

        Raises:
            ValueError: ``sort_by`` is not an attribute of the events.
        """
        if not len(self):
            return markup.block(markup.line("no events"))
        options = TableOptions(None, None, None, profile_memory=self._profile_memory, with_flops=self._with_flops)
        info, rows = self._info(), self._chosen(sort_by)
        total = f"Self CPU time total: {options.time(info.self_cpu_total)}"
        if info.has_device_time:
            total += f", on {info.use_device}: {options.time(info.self_device_total)}"
        rows_html = html_table(info, rows, options, total=len(self), row_limit=row_limit, sort_by=sort_by)
        return markup.block(rows_html, markup.line(total))

    def _repr_html_(self) -> str | None:
        """HTML for a notebook; None if that fails, so that the notebook displays the text."""
        return markup.attempt(lambda: self.to_html(self._displayed_by()))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Prints the table in IPython; creates no more event objects than it has rows."""
        printer.text(self.table(self._displayed_by(), row_limit=_DISPLAYED_ROWS) or "[]")

    def _displayed_by(self) -> str | None:
        """Sort key of the displayed table: self time for averages, None for events."""
        if not len(self) or self._columns() is not None or not isinstance(self[0], FunctionEventAvg):
            return None
        return "self_device_time_total" if self._info().has_device_time else "self_cpu_time_total"

    def _info(self) -> Info:
        """Summary of all events that a table needs."""
        source = self._columns()
        return info_of(self) if source is None else event_sums.table_info(source)

    def _chosen(self, sort_by: str | None, top_level_only: bool = False) -> Iterator[Any]:
        """Yields the events in the order of a table."""
        source = self._columns()
        if source is None:
            return chosen(self, sort_by, top_level_only)
        return event_sums.chosen(source, sort_by, top_level_only)

    def key_averages(
        self,
        group_by_input_shapes: bool = False,
        group_by_stack_n: int = 0,
        group_by_overload_name: bool = False,
        include_python_functions: bool | None = None,
        *,
        group_by_module: bool = False,
    ) -> EventList[FunctionEventAvg]:
        """Sums the events by name and, on request, by input shapes, innermost stack frames and overload; or by module.

        Labels and operators of one name are separate. Averages are in the order in which their events first appear.

        Args:
            group_by_input_shapes: whether shapes are part of the key. Default: False.
            group_by_stack_n: number of innermost stack frames in the key. Default: 0.
            group_by_overload_name: whether the overload is part of the key. Default: False.
            include_python_functions: whether to include calls of Python functions (``with_stack``). Default: as the
                imported torch: included in 2.12 and 2.13, excluded before and after.
            group_by_module: whether to sum by ``nn.Module`` instead of by name (``with_modules``). An average per module and
                one for its backward pass, ``Net.head (backward)``; all else is in ``(no module)``. Totals and ``flops``
                include inner modules; self times, self memory and ``self_flops`` add up to those of all events. Averages have
                ``module``, ``module_class``, ``is_backward``, too. Costs 0.2 us per event, 1.3 with memory and FLOPs.
                Default: False.

        Raises:
            TypeError: ``group_by_stack_n`` is not an int.
            TorchProfError: ``group_by_module``, and no calls of modules were recorded, or the list was changed.
            ValueError: ``group_by_module`` with another grouping.
        """
        if not isinstance(group_by_stack_n, int):
            raise TypeError(f"group_by_stack_n is {group_by_stack_n!r}; it must be a whole number, 0 for no stacks")
        if group_by_module:
            if group_by_input_shapes or group_by_stack_n or group_by_overload_name:
                raise ValueError("group_by_module=True sums by module only; leave out the other group_by arguments")
            return self._listed(self._by_module())
        with_calls = include_python_functions
        if with_calls is None:
            with_calls = differences().averages_have_python_functions
        source = self._columns()
        if source is None:
            averages = self._grouped(group_by_input_shapes, group_by_stack_n, group_by_overload_name, with_calls)
        else:
            averages = list(
                event_sums.averages(source, group_by_input_shapes, group_by_stack_n, group_by_overload_name, with_calls)
            )
        averages += [] if self._collapsed is None else [_average(self._collapsed, self._use_device)]
        for average in averages:
            average.stack = (average.stack or [])[:group_by_stack_n]
            if not group_by_input_shapes:
                average.input_shapes = ""
            if not group_by_overload_name:
                average.overload_name = ""
        return self._listed(averages)

    def _by_module(self) -> list[ModuleAverage]:
        source = self._columns()
        if source is None:
            raise TorchProfError(
                "group_by_module=True needs the recorded events; this list was changed, or made by hand"
            )
        return list(event_sums.module_averages(source))

    def _listed(self, averages: Iterable[FunctionEventAvg]) -> EventList[FunctionEventAvg]:
        return EventList(
            averages, use_device=self._use_device, profile_memory=self._profile_memory, with_flops=self._with_flops
        )

    def total_average(self) -> FunctionEventAvg:
        """Sums all events under the key "Total"; fields that are not sums are those of the last event."""
        source = self._columns()
        total = FunctionEventAvg() if source is None else event_sums.total(source)
        if source is None:
            for event in self:
                total.key = None
                total += event
        total.key = "Total"
        return total

    def supported_export_stacks_metrics(self) -> list[str]:
        """Returns the metrics that :meth:`export_stacks` accepts."""
        return list(_STACK_METRICS)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the events as Chrome JSON in torch's simple form: a list of slices in microseconds, one per event.

        For lists from other sources; ``profile.export_chrome_trace`` writes the complete trace. A name that ends in
        ``.gz`` is compressed. Creates no event objects unless devices were timed.

        Raises:
            ExportError: the file cannot be written.
        """
        source = self._columns()
        if source is None or source.batch.devices is not None:  # only objects have device times
            slices = slices_of(self, self._use_device)
        else:
            slices = slices_of_columns(source)
        write(path, joined(slices))

    def to_pandas(self) -> pd.DataFrame:
        """Returns the list as a pandas DataFrame: one row per event or average, in the order of the list.

        Columns have torch's names. Times are in microseconds, sizes in bytes, ``start`` and ``end`` in microseconds
        since the start of the recording; ``parent`` is the row of the parent event, -1 for none. Names, shapes,
        overloads and stacks are categorical; shapes and stacks are text, a stack with one line per frame. Creates no
        event objects; costs less than 1 us per event.

        Raises:
            ImportError: pandas is not installed.
        """
        source = self._columns()
        return of_objects(self) if source is None else of_columns(source)

    def export_stacks(self, path: str | os.PathLike[str], metric: str, *, merged: bool = False) -> None:
        """Writes one line per event with a stack: its frames, top-level first, and the metric in whole microseconds.

        The format is the input of Brendan Gregg's flamegraph.pl. As in torch, an event is in the line of its caller,
        and events whose metric is below 1 are omitted.

        Args:
            path: path of the file.
            metric: one of :meth:`supported_export_stacks_metrics`, or ``self_device_time_total``. The metric of any
                device means the device of the list; without device times the file is empty.
            merged: whether a call is the last frame of its own line and equal stacks are one line; then values below 1
                are omitted after the sum. Default: False.

        Raises:
            ValueError: the metric is unknown.
        """
        if metric not in _STACK_METRICS and metric != _PLAIN_STACK_METRIC:
            raise ValueError(f"metric should be one of: {[*_STACK_METRICS, _PLAIN_STACK_METRIC]}, and not {metric!r}")
        attribute = attribute_of(metric)
        source = self._columns()
        if merged:
            lines = (
                self._merged_values(attribute)
                if source is None
                else event_sums.merged_values(source, attribute, _folded)
            )
        else:
            lines = (
                self._stack_values(attribute) if source is None else event_sums.stack_values(source, attribute, _folded)
            )
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(f"{frames} {value}\n" for frames, value in lines)

    def _stack_values(self, attribute: str) -> Iterator[tuple[str, int]]:
        """Yields stack text and whole microseconds of every event that has both."""
        for event in self:
            stack = event.stack or []
            # Rounded first: 6 us as a difference of floats may be just below 6.
            value = int(round(getattr(event, attribute), 5)) if stack else 0
            if value > 0:
                yield _folded(stack), value

    def _merged_values(self, attribute: str) -> Iterator[tuple[str, int]]:
        """Yields stack text, including the call's own frame, and whole microseconds.

        Once per stack, in order of appearance.
        """
        sums: dict[str, float] = {}
        event: Any
        for event in self:
            frames = [*([event.name] if event.is_python_function else ()), *(event.stack or ())]
            if frames:
                text = _folded(frames)
                sums[text] = sums.get(text, 0.0) + getattr(event, attribute)
        return ((text, int(round(value, 5))) for text, value in sums.items() if round(value, 5) >= 1)

    def _grouped(self, by_shapes: bool, stack_n: int, by_overload: bool, with_calls: bool) -> list[FunctionEventAvg]:
        """Computes averages from the objects in the list."""
        groups: dict[tuple[Any, ...], FunctionEventAvg] = {}
        event: Any
        for event in self:
            if event.is_python_function and not with_calls:
                continue
            key = [event.key, event.node_id, str(event.device_type), event.is_legacy, event.is_user_annotation]
            if by_overload:
                key.append(event.overload_name)
            if by_shapes:
                key.append(str(event.input_shapes))
            key += (event.stack or [])[: max(stack_n, 0)]
            groups.setdefault(tuple(key), FunctionEventAvg()).add(event)
        return list(groups.values())

    @property
    def _tree_built(self) -> bool:
        """Whether the events know their parents and children; events of a recording do."""
        return self._source is not None or self._has_tree

    @_tree_built.setter
    def _tree_built(self, built: bool) -> None:
        """Sets the flag: in torch it is a plain attribute, which code that builds lists sets."""
        self._has_tree = built

    def _build_tree(self) -> None:
        """Finds parents and children of events that were created by hand, from their times, as torch does; once."""
        if not self._tree_built:
            events: EventList[Any] = self
            events[:] = build_tree(events)
            self._has_tree = True

    def _columns(self) -> EventSource | None:
        """The columns behind the list, unless its events were edited."""
        return None if self._source is None or self._source.edited else self._source

    def _make_all(self) -> None:
        if self._source is not None:
            self._source.make(0, len(self))

    def _settle(self) -> None:
        """Turns into an ordinary list before positions change; the events still find one another."""
        if self._source is not None:
            self._make_all()
            events: EventList[Any] = self
            self._source.slots = list.copy(events)
            self._source = None
            self._has_tree = True

    @overload
    def __getitem__(self, index: SupportsIndex) -> _Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[_Event]: ...

    def __getitem__(self, index: Any) -> Any:
        source = self._source
        if source is None:
            return super().__getitem__(index)
        if isinstance(index, slice):
            return [source.event(i) for i in range(*index.indices(len(self)))]
        # range() converts negative indices and raises list's kind of error outside
        return source.event(range(len(self))[index])

    def __iter__(self) -> Iterator[_Event]:
        return self._made_in_blocks() if self._source is not None and self._source.missing else super().__iter__()

    def _made_in_blocks(self) -> Iterator[_Event]:
        index = 0
        while index < len(self):
            if self._source is not None and index % _ITERATION_BLOCK == 0:
                self._source.make(index, min(index + _ITERATION_BLOCK, len(self)))
            yield self[index]
            index += 1

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __str__(self) -> str:
        return self.table()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != "_source"}
        state["_has_tree"] = self._tree_built
        return copyreg.__newobj__, (type(self),), state, iter(self)  # type: ignore[attr-defined]  # not in the stubs


def _folded(stack: list[str]) -> str:
    """Formats a stack for flamegraph.pl, top-level entry first."""
    return ";".join(map(_separable, reversed(stack)))


def export_sampled(samples: Samples, path: str | os.PathLike[str]) -> None:
    """Writes one line per sampled stack in the format of :meth:`EventList.export_stacks`, with its time in whole microseconds."""
    times = np.bincount(samples.stack, samples.duration).astype(np.int64) // _NS_PER_US
    with Path(path).open("w", encoding="utf-8") as file:
        for at in np.flatnonzero(times).tolist():
            if stack := samples.stacks[at]:
                frames = _folded([valid(f"{call.file}({call.line}): {call.function}") for call in stack])
                file.write(f"{frames} {times.item(at)}\n")


@functools.lru_cache(maxsize=4096)
def _separable(frame: str) -> str:
    return frame.translate(_STACK_SEPARATORS)


def _prepared(name: str, prepare: Callable[[EventList], None]) -> Any:
    """Wraps a method of list that needs all event objects."""
    method = getattr(list, name)

    @functools.wraps(method)
    def prepared(self: EventList, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        return method(self, *args, **kwargs)

    return prepared


_READS = "__add__ __contains__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __repr__ __reversed__ __rmul__ copy count index"
_CHANGES = "__delitem__ __iadd__ __imul__ __setitem__ append clear extend insert pop remove reverse sort"
for _name in _READS.split():
    setattr(EventList, _name, _prepared(_name, EventList._make_all))  # noqa: SLF001 - of this module
for _name in _CHANGES.split():
    setattr(EventList, _name, _prepared(_name, EventList._settle))  # noqa: SLF001


# ---- sums without events, as the list that ``key_averages()`` returns ----

_NS_PER_US = 1000


def averages_list(sums: Iterable[Average], use_device: str | None = None) -> EventList[FunctionEventAvg]:
    """One FunctionEventAvg per name, times in us, with sums only: no shapes, stacks, parents or children.

    ``use_device`` names the device whose times are among the sums; None if there are none.
    """
    return EventList([_average(entry, use_device) for entry in sums], use_device=use_device)


def printable_table(averages: EventList, sort_by: str, row_limit: int) -> str:
    """The table for a terminal. Makes the names printable, in the list too."""
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
    )  # as for recorded events: only then does a table's sum include device times
    average.scope = int(Scope.USER_SCOPE if entry.is_label else Scope.FUNCTION)
    average.is_user_annotation = entry.is_label
    average.input_shapes = ""
    average.overload_name = ""
    average.stack = []
    return average


# ---- events as torch's simple Chrome JSON ----


_PROCESS = '"pid": "CPU functions", '
_NO_ARGUMENTS = '"args": {}}'


def slices_of_columns(source: EventSource) -> Iterator[str]:
    """Yields the slices of recorded events, a block at a time, without creating event objects. Omits memory events."""
    batch, times = source.batch, source.info.device_time("device_time_total")
    kind = batch["kind"][source.view.rows]
    chosen = np.flatnonzero((kind != MEMORY_KIND) & (kind != WORK_KIND))  # as in torch, neither is in this trace
    rows = source.view.rows[chosen]
    launches = np.zeros(len(rows), dtype=np.bool_) if times is None else times[chosen] != 0
    used = distinct_values(batch["name"][rows]).tolist()
    heads = {name: f'{{"name": {_quoted(batch.names[name])}, "ph": "X", "ts": ' for name in used}
    tids = [thread.number for thread in batch.threads]
    arrows = 0
    tails = [f', "tid": {tid}, {_PROCESS}{_NO_ARGUMENTS}' for tid in tids]
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        starts, ends = ((batch[column][block] - source.origin_ns) / _NS_PER_US for column in ("start", "end"))
        columns = (batch["name"][block], starts, ends - starts, batch["thread"][block])
        lines = zip(*(column.tolist() for column in columns), strict=True)
        texts = [f'{heads[name]}{at}, "dur": {long}{tails[thread]}' for name, at, long, thread in lines]
        for place in np.flatnonzero(launches[begin : begin + BLOCK]).tolist():
            row, at = block[place], starts.item(place)
            texts[place] += ", " + _arrow(
                _quoted(batch.names[batch["name"][row]]), at, tids[batch["thread"][row]], arrows, source.use_device
            )
            arrows += 1
        yield ", ".join(texts)


def slices_of(events: Iterable[Any], use_device: str | None) -> Iterator[str]:
    """Yields the slices of event objects, each followed by the begins of the arrows to its kernels."""
    arrows = 0
    for event in events:
        if event.trace_name is None:
            continue
        times, tid = event.time_range, event.thread
        place = json.dumps(f" node_id:{event.node_id}, thread_id:{tid} ") if event.is_remote else tid
        yield (
            f'{{"name": {_quoted(event.trace_name)}, "ph": "X", "ts": {times.start}, "dur": {times.elapsed_us()}, '
            f'"tid": {place}, {_PROCESS}{_NO_ARGUMENTS}'
        )
        for _ in event.kernels:
            yield _arrow(_quoted(event.trace_name), times.start, tid, arrows, use_device)
            arrows += 1


def _arrow(name: str, start: float, tid: int, number: int, use_device: str | None) -> str:
    """The begin of an arrow to work on a device; ``name`` is JSON."""
    return (
        f'{{"name": {name}, "ph": "s", "ts": {start}, "tid": {tid}, {_PROCESS}'
        f'"id": {number}, "cat": "cpu_to_{use_device or "cuda"}", {_NO_ARGUMENTS}'
    )


def joined(slices: Iterable[str]) -> Iterator[bytes]:
    """Yields the JSON document, in pieces of about 1 MiB."""
    piece, size, before = ["["], 1, ""
    for text in slices:
        piece += before, text
        before = ", "
        size += len(text)
        if size >= PIECE_SIZE:
            yield "".join(piece).encode()
            piece, size = [], 0
    yield "".join([*piece, "]"]).encode()


@functools.lru_cache(maxsize=4096)
def _quoted(name: str) -> str:
    return json.dumps(valid(name), ensure_ascii=False)
