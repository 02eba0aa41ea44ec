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

    from ._columns.batch import Array, Batch

_NS_PER_US = 1000
_PLAIN_COLUMNS = ("id", "name", "start", "end", "thread", "fwd_thread", "sequence_nr", "scope", "flags")


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
        self._threads = [(thread.torch_tid or thread.ident, thread.os_tid) for thread in batch.threads]

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
        """Make all events of a range that are not there yet: 5 us for one, about 1 us each for many."""
        if None not in list.__getitem__(self.slots, slice(begin, end)):
            return
        rows, batch = self.view.rows[begin:end], self.batch
        columns = [batch[name][rows].tolist() for name in _PLAIN_COLUMNS]
        with self._lock:
            for index, values in enumerate(zip(*columns, strict=True), begin):
                if list.__getitem__(self.slots, index) is None:
                    list.__setitem__(self.slots, index, RecordedEvent(self, index, self._attributes(values)))
                    self.missing -= 1

    def _attributes(self, values: tuple[int, ...]) -> dict[str, Any]:
        identity, name, start, end, thread, fwd_thread, sequence_nr, scope, flags = values
        text, origin = self.batch.names[name], self._origin_ns
        tid, os_tid = self._threads[thread]
        return {
            "id": identity,
            "name": listed_name(text),
            "trace_name": text,
            "time_range": Interval((start - origin) / _NS_PER_US, (end - origin) / _NS_PER_US),
            "thread": tid,
            "device_resource_id": os_tid,
            "fwd_thread": fwd_thread,
            "sequence_nr": sequence_nr,
            "scope": scope,
            "is_async": flags & Flag.ASYNC != 0,
            "is_user_annotation": scope == Scope.USER_SCOPE,
        }

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
    """An attribute that is made when it is first read and then kept in the instance, where it shadows this descriptor."""

    def __init__(self, make: Callable[[RecordedEvent], Any]) -> None:
        self._make = make
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, event: RecordedEvent | None, owner: type | None = None) -> Any:
        if event is None:
            return self
        value = self._make(event)
        # setdefault, so that two threads that read at the same time get the same object
        return event.__dict__.setdefault(self._name, value)


def _on_demand(make: Callable[[RecordedEvent], Any]) -> Any:
    return _OnDemand(make)


class RecordedEvent(FunctionEvent):
    """An event out of a batch: a FunctionEvent whose parent, children and shapes are found when they are asked for.

    Its attributes can be set like any other's; its list then adds up its events instead of its columns. Copies and pickles
    are plain FunctionEvents.
    """

    overload_name = ""
    flops = 0
    activity_type = "cpu_op"
    cpu_parent = _on_demand(lambda event: event._source.parent(event._index))  # noqa: SLF001 - this class's own
    cpu_children = _on_demand(lambda event: event._source.children(event._index))  # noqa: SLF001
    input_shapes = _on_demand(lambda event: input_shapes(*event._place()))  # noqa: SLF001
    structured_input_shapes = _on_demand(lambda event: structured_input_shapes(*event._place()))  # noqa: SLF001
    use_device = _on_demand(lambda event: event._source.use_device)  # noqa: SLF001
    external_id = _on_demand(lambda event: event.id)
    kernels = _on_demand(lambda _: [])
    stack = _on_demand(lambda _: [])
    concrete_inputs = _on_demand(lambda _: [])
    structured_input_strides = _on_demand(lambda _: [])
    input_dtypes = _on_demand(lambda _: [])
    kwinputs = _on_demand(lambda _: {})

    _source: EventSource
    _index: int

    def __init__(self, source: EventSource, index: int, attributes: dict[str, Any]) -> None:
        attributes["_source"], attributes["_index"] = source, index
        object.__setattr__(self, "__dict__", attributes)

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

    def _place(self) -> tuple[Batch, int]:
        return self._source.batch, self._source.view.rows.item(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        own = {name: value for name, value in self.__dict__.items() if name not in {"_source", "_index"}}
        state = {attribute.name: getattr(self, attribute.name) for attribute in fields(FunctionEvent)}
        return _blank, (), own | state


def _blank() -> FunctionEvent:
    """What a copy or a pickle fills."""
    return FunctionEvent.__new__(FunctionEvent)
