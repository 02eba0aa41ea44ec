"""Events that exist as columns until somebody looks at one of them."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ._columns.schema import Flag, Scope
from ._encode.table import SORT_KEYS, Facts, attribute_of, chosen
from ._model.averages import Averages
from ._model.inputs import input_shapes, shape_keys, structured_input_shapes
from ._model.tree import listed_name, torch_view
from .function_event import FunctionEvent, Interval
from .function_event_avg import FunctionEventAvg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._columns.batch import Array, Batch, Thread

_NS_PER_US = 1000

_EVALUATION = "autograd::engine::evaluate_function: "
"""What the autograd engine does around each backward function; torch's lists give it the numbers of that function."""


class EventSource:
    """Makes the events of a batch one by one, each at most once, and adds them up without making them.

    ``slots`` is where the events are kept: one entry per event, None until it is made. Safe to share between threads.
    """

    def __init__(self, batch: Batch, origin_ns: int, use_device: str | None) -> None:
        self.batch = batch
        self.view = torch_view(batch)
        self.use_device = use_device
        self.slots: list[RecordedEvent | None] = []
        self.missing = len(self.view)
        """How many events are not made yet."""
        self.edited = False
        """Whether a user changed an event, so that the columns no longer tell the truth about all of them."""
        self._origin_ns = origin_ns
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.view)

    def event(self, index: int) -> RecordedEvent:
        """The event at a position of the view."""
        # The slots may be the list subclass that asks this very method for its items, hence list's own methods.
        event = list.__getitem__(self.slots, index)
        if event is None:
            self.make(index, index + 1)
            event = list.__getitem__(self.slots, index)
        return event  # type: ignore[return-value]  # just made

    def make(self, begin: int, end: int) -> None:
        """Make all events of a range that are not there yet."""
        if None not in list.__getitem__(self.slots, slice(begin, end)):
            return
        with self._lock:
            for index in range(begin, end):
                if list.__getitem__(self.slots, index) is None:
                    list.__setitem__(self.slots, index, RecordedEvent(self, index))
                    self.missing -= 1

    def value(self, column: str, index: int) -> Any:
        """The value of an event in a column of the batch."""
        return self.batch[column].item(self.view.rows.item(index))

    def _numbered(self, index: int) -> int:
        """The row whose autograd numbers an event shows: its own, or its backward function's around which it is the engine's.

        Torch makes that transfer when a profile ends, for two events that follow each other on a thread.
        """
        row: int = self.view.rows.item(index)
        thread, scope = self.batch["thread"], self.batch["scope"]
        follows = row + 1 < len(scope) and thread[row + 1] == thread[row] and scope[row + 1] == Scope.BACKWARD_FUNCTION
        around = follows and scope[row] == Scope.FUNCTION and self.trace_name(index).startswith(_EVALUATION)
        return row + int(around)

    def sequence_nr(self, index: int) -> int:
        """Torch's number of the autograd node; -1 where there is none."""
        number: int = self.batch["sequence_nr"].item(self._numbered(index))
        return number

    def fwd_thread(self, index: int) -> int:
        """Torch's id of the forward thread; 0 where there is none, or no sequence number to go with it."""
        row = self._numbered(index)
        return self.batch["fwd_thread"].item(row) if self.batch["sequence_nr"].item(row) >= 0 else 0

    def trace_name(self, index: int) -> str:
        """The name as it was recorded."""
        name: str = self.batch.names[self.value("name", index)]
        return name

    def thread(self, index: int) -> Thread:
        """Where the event began."""
        thread: Thread = self.batch.threads[self.value("thread", index)]
        return thread

    def time_range(self, index: int) -> Interval:
        """When the event began and ended, in us since the origin."""
        start, end = (self.value(column, index) - self._origin_ns for column in ("start", "end"))
        return Interval(start / _NS_PER_US, end / _NS_PER_US)

    def parent(self, index: int) -> RecordedEvent | None:
        """The event around one."""
        parent = self.view.parent.item(index)
        return None if parent < 0 else self.event(parent)

    def children(self, index: int) -> list[RecordedEvent]:
        """The events directly inside one."""
        return [self.event(child) for child in self.view.children_of(index)]

    def self_cpu_total(self) -> float:
        """Self time of all events, us."""
        return int(self.view.self_time.sum()) / _NS_PER_US

    def averages(self, by_shapes: bool) -> Iterator[FunctionEventAvg]:
        """One average per name, or per name and input shapes; makes the first event of each."""
        sums = Averages.of(self.view, shape_keys(self.batch)[0] if by_shapes else None)
        columns = (sums.first, sums.count, sums.cpu_time_total, sums.self_cpu_time_total)
        for first, count, total, own in zip(*(column.tolist() for column in columns), strict=True):
            yield self._average(self.event(first), count, total, own)

    def total(self) -> FunctionEventAvg:
        """The sum of all events; like torch's it is described by the last one."""
        if not len(self):
            return FunctionEventAvg()
        total, own = int(self.view.duration.sum()), int(self.view.self_time.sum())
        return self._average(self.event(len(self) - 1), len(self), total, own)

    @staticmethod
    def _average(first: RecordedEvent, count: int, total_ns: int, self_ns: int) -> FunctionEventAvg:
        average = FunctionEventAvg()
        average.describe(first)
        average.count = count
        average.cpu_time_total = total_ns / _NS_PER_US
        average.self_cpu_time_total = self_ns / _NS_PER_US
        return average

    def facts(self) -> Facts:
        """What a table of these events has to know."""
        names, view = self.batch.names, self.view
        used = np.unique(self.batch["name"][view.rows]).tolist()
        keys, texts = shape_keys(self.batch)
        shapes = [texts[key] for key in np.unique(keys[view.rows]).tolist()]
        return Facts(
            self_cpu_total=self.self_cpu_total(),
            longest_key=max(len(listed_name(names[name])) for name in used),
            longest_shapes=max(len(text) for text in shapes),
            has_shapes=shapes != ["[]"],
            use_device=self.use_device,
        )

    def chosen(self, sort_by: str | None, top_level_only: bool) -> Iterator[RecordedEvent]:
        """The events in the order of a table, made when asked for; all at once only for a key that no column has."""
        order: Array = np.arange(len(self))
        if sort_by is not None:
            attribute = attribute_of(sort_by)
            if attribute not in SORT_KEYS:
                self.make(0, len(self))
                return chosen(list.copy(self.slots), sort_by, top_level_only)
            if attribute in {"cpu_time", "cpu_time_total"}:
                order = np.argsort(-self.view.duration, kind="stable")
            elif attribute == "self_cpu_time_total":
                order = np.argsort(-self.view.self_time, kind="stable")
            # The other keys, from count to memory, are the same for all recorded events and leave them as they stand.
        if top_level_only:
            order = order[self.view.parent[order] < 0]
        return (self.event(index) for index in order.tolist())


class _OnDemand:
    """An attribute that is made when it is first read and then kept in the instance, where it shadows this descriptor.

    Reading eleven columns for every event that is touched cost 3 us and 680 bytes per event; most are never asked for.
    """

    def __init__(self, make: Callable[[EventSource, int], Any]) -> None:
        self._make = make
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, event: RecordedEvent | None, owner: type | None = None) -> Any:
        if event is None:
            return self
        value = self._make(event._source, event._index)  # noqa: SLF001 - the two belong together
        # setdefault, so that two threads that read at the same time get the same object
        return event.__dict__.setdefault(self._name, value)


def _on_demand(make: Callable[[EventSource, int], Any]) -> Any:
    return _OnDemand(make)


def _column(name: str) -> Any:
    return _OnDemand(lambda source, index: source.value(name, index))


class RecordedEvent(FunctionEvent):
    """An event out of a batch: a FunctionEvent that knows its position only and finds the rest when it is asked for.

    Its attributes can be set like any other's; its list then adds up its events instead of its columns. Copies and pickles
    are plain FunctionEvents.
    """

    __slots__ = ("_index", "_source")
    _index: int
    _source: EventSource

    overload_name = ""
    flops = 0
    id = _column("id")
    sequence_nr = _on_demand(EventSource.sequence_nr)
    fwd_thread = _on_demand(EventSource.fwd_thread)
    scope = _column("scope")
    external_id = _column("id")
    name = _on_demand(lambda source, index: listed_name(source.trace_name(index)))
    trace_name = _on_demand(EventSource.trace_name)
    time_range = _on_demand(EventSource.time_range)
    thread = _on_demand(lambda source, index: source.thread(index).torch_tid or source.thread(index).ident)
    device_resource_id = _on_demand(lambda source, index: source.thread(index).os_tid)
    is_async = _on_demand(lambda source, index: source.value("flags", index) & Flag.ASYNC != 0)
    is_user_annotation = _on_demand(lambda source, index: source.value("scope", index) == Scope.USER_SCOPE)
    activity_type = _on_demand(
        lambda source, index: "user_annotation" if source.value("scope", index) == Scope.USER_SCOPE else "cpu_op"
    )
    cpu_parent = _on_demand(EventSource.parent)
    cpu_children = _on_demand(EventSource.children)
    input_shapes = _on_demand(lambda source, index: input_shapes(source.batch, source.view.rows.item(index)))
    structured_input_shapes = _on_demand(
        lambda source, index: structured_input_shapes(source.batch, source.view.rows.item(index))
    )
    use_device = _on_demand(lambda source, _: source.use_device)
    kernels = _on_demand(lambda *_: [])
    stack = _on_demand(lambda *_: [])
    concrete_inputs = _on_demand(lambda *_: [])
    structured_input_strides = _on_demand(lambda *_: [])
    input_dtypes = _on_demand(lambda *_: [])
    kwinputs = _on_demand(lambda *_: {})

    def __init__(self, source: EventSource, index: int) -> None:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_index", index)

    def __setattr__(self, name: str, value: Any) -> None:
        self._source.edited = True
        super().__setattr__(name, value)

    def append_cpu_child(self, child: FunctionEvent) -> None:
        """Add a direct child, whose time is then no longer this event's own."""
        self._source.edited = True
        super().append_cpu_child(child)

    @property
    def self_cpu_time_total(self) -> float:
        """Duration without the direct children, from the column unless somebody changed events."""
        if self._source.edited:
            return super().self_cpu_time_total
        return self._source.view.self_time.item(self._index) / _NS_PER_US

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (), {**self.__dict__, **{field.name: getattr(self, field.name) for field in fields(self)}}


def _blank() -> FunctionEvent:
    """What a copy or a pickle fills."""
    return FunctionEvent.__new__(FunctionEvent)
