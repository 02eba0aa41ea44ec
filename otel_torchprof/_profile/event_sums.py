"""Averages, totals, tables and stacks of all recorded events, computed from columns."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import WORK_KIND, Kind, Scope
from otel_torchprof._encode.table import SORT_KEYS, Info, attribute_of
from otel_torchprof._encode.table import chosen as chosen_objects
from otel_torchprof._model.averages import Averages
from otel_torchprof._model.event_info import AMOUNTS, DEVICE_TIMES, PEAKS
from otel_torchprof._model.inputs import shape_keys
from otel_torchprof._model.modules import NO_MODULE, module_tree, sums_by_module
from otel_torchprof._model.tree import display_name
from otel_torchprof.errors import TorchProfError

from .function_event_avg import FunctionEventAvg, ModuleAverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.batch import Array
    from otel_torchprof._model.event_info import EventInfo
    from otel_torchprof._model.modules import ModuleSums

    from .recorded_events import EventSource, RecordedEvent

_NS_PER_US = 1000


def averages(
    source: EventSource, by_shapes: bool, stack_n: int = 0, by_overload: bool = False, with_calls: bool = True
) -> Iterator[FunctionEventAvg]:
    """Yields one average per name and, on request, per shapes, stack and overload. Creates the first event of each.

    Args:
        source: the events.
        by_shapes: whether input shapes are part of the key.
        stack_n: number of innermost stack frames in the key.
        by_overload: whether the overload is part of the key.
        with_calls: whether to include calls of Python functions.
    """
    splits: list[Array] = []
    if by_shapes:
        splits.append(shape_keys(source.batch)[0][source.view.rows])
    if by_overload and source.info.overload_codes is not None:
        splits.append(source.info.overload_codes.codes)
    stacks = source.info.stack_codes if stack_n > 0 else None
    if stacks is not None:
        splits.append(stacks.values.innermost(stack_n)[stacks.codes])
    sums = Averages.of(source.view, splits, _added_up(source), source.info.peaks())
    columns = (sums.first, sums.count, sums.cpu_time_total, sums.self_cpu_time_total)
    amounts = {name: column.tolist() for name, column in (*sums.amounts.items(), *sums.peaks.items())}
    for group, times in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        first, count, total, own = times
        if not with_calls and source.value("kind", first) == Kind.FRAME:  # all events of a group have one kind
            continue
        rest = {name: values[group] for name, values in amounts.items()}
        yield _average(source.event(first), count, total, own, rest)


def module_averages(source: EventSource) -> Iterator[ModuleAverage]:
    """Yields one average per module, and per module with a backward pass; then one for what is in no module.

    Raises:
        TorchProfError: there are no calls of modules.
    """
    tree = module_tree(source.batch)
    if tree is None:
        raise TorchProfError(
            "no calls of modules were recorded: use profile(with_modules=True) or with_stack=True, or "
            "detail='modules' or higher for an instrumentation; a compiled graph has none"
        )
    info = source.with_modules()
    for sums in sums_by_module(tree, info.view, _own_amounts(source, info), info.peaks()):
        yield _module_average(source, sums)


def _own_amounts(source: EventSource, info: EventInfo) -> dict[str, Array]:
    """What each event of a view with modules has itself, by torch's name of the attribute."""
    view = info.view
    own = {name: info.amount(name) for name in ("self_cpu_memory_usage", "self_device_memory_usage", "flops")}
    on_device = info.device_time("self_device_time_total")
    if on_device is not None and source.batch.work is not None:
        # Work counts for what launched it; the rest, as a row in no module, for none.
        is_work = source.batch["kind"][view.rows] == WORK_KIND
        rest = _self_device_total(source, info) - int(on_device[~is_work].sum())
        on_device = np.where(is_work, 0, on_device)
        on_device[is_work.argmax()] += rest
    self_time = view.self_time if view.collapsed is None else view.self_time + view.collapsed
    own |= {"self_cpu_time_total": self_time, "self_device_time_total": on_device}
    return {name: column.astype(np.int64, copy=False) for name, column in own.items() if column is not None}


def _module_average(source: EventSource, sums: ModuleSums) -> ModuleAverage:
    average = ModuleAverage()
    average.module, average.module_class = "" if sums.name == NO_MODULE else sums.name, sums.class_name
    average.is_backward = sums.is_backward
    average.key = f"{sums.name} (backward)" if sums.is_backward else sums.name
    average.node_id, average.input_shapes, average.overload_name, average.stack = -1, "", "", []
    average.scope = int(Scope.BACKWARD_FUNCTION if sums.is_backward else Scope.FUNCTION)
    average.use_device, average.is_legacy = source.use_device, source.use_device is not None
    average.count = sums.calls
    for name, own in sums.own.items():
        total = sums.total[name]
        for attribute, value in ((name, own), (name.removeprefix("self_"), total)):
            setattr(average, attribute, value / _NS_PER_US if "_time_" in attribute else value)
    average.self_flops = sums.own.get("flops", 0)
    for name, value in sums.peaks.items():
        setattr(average, name, value)
    return average


def total(source: EventSource) -> FunctionEventAvg:
    """The sum of all events; as in torch, fields that are not sums are those of the last event."""
    if not len(source):
        return FunctionEventAvg()
    view = source.view
    total, own = int(view.duration.sum()), int(view.self_time.sum())
    calls = len(source) if view.calls is None else int(view.calls.sum())
    rest = {name: column.sum().item() for name, column in _added_up(source).items()}
    rest |= {name: column.max().item() for name, column in source.info.peaks().items()}
    return _average(source.event(len(source) - 1), calls, total, own, rest)


def stack_values(source: EventSource, attribute: str, text_of: Callable[[list[str]], str]) -> Iterator[tuple[str, int]]:
    """Yields stack text and whole microseconds of every event that has both; ``attribute`` is a self time."""
    stacks, times = source.info.stack_codes, _self_times(source, attribute)
    if stacks is None or times is None:
        return
    values = times // _NS_PER_US
    positions = np.flatnonzero((values > 0) & (stacks.codes > 0))
    # Consecutive events often have the same stack; all texts at once would need more memory than all events.
    text = functools.lru_cache(maxsize=1024)(lambda code: text_of(stacks.values[code]))
    for code, value in zip(stacks.codes[positions].tolist(), values[positions].tolist(), strict=True):
        yield text(code), value


def merged_values(
    source: EventSource, attribute: str, text_of: Callable[[list[str]], str]
) -> Iterator[tuple[str, int]]:
    """Yields stack text, including the call's own frame, and whole microseconds; once per stack."""
    times = _self_times(source, attribute)
    if times is None:
        return
    batch, rows, stacks = source.batch, source.view.rows, source.info.stack_codes
    codes = np.zeros(len(rows), dtype=np.int64) if stacks is None else stacks.codes.astype(np.int64)
    # The call's own name plus 1; 0 for other events.
    own = np.where(batch["kind"][rows] == Kind.FRAME, batch["name"][rows].astype(np.int64) + 1, 0)
    pairs, first, place = np.unique(np.stack((codes, own)), axis=1, return_index=True, return_inverse=True)
    sums = np.zeros(len(first), dtype=np.int64)
    np.add.at(sums, place.reshape(-1), times)
    merged: dict[str, int] = {}  # a call and an operator inside it have the same text
    for at in np.argsort(first).tolist():
        code, name = pairs[:, at].tolist()
        if code or name:
            enclosing = [] if stacks is None else stacks.values[code]
            text = text_of([*([display_name(batch.names[name - 1])] if name else ()), *enclosing])
            merged[text] = merged.get(text, 0) + sums.item(at)
    yield from ((text, value // _NS_PER_US) for text, value in merged.items() if value >= _NS_PER_US)


def table_info(source: EventSource) -> Info:
    """Summary of all events that a table needs."""
    names, view, info = source.batch.names, source.view, source.info
    used = distinct_values(source.batch["name"][view.rows]).tolist()
    keys, texts = shape_keys(source.batch)
    shapes = [texts[key] for key in distinct_values(keys[view.rows]).tolist()]
    frames = () if info.stack_codes is None else info.stack_codes.values.entries(info.stack_codes.codes)
    flops = None if info.flops is None else info.flops[info.flops > 0]
    on_device = info.device_time("self_device_time_total")
    return Info(
        self_cpu_total=source.self_cpu_total(),
        longest_key=max(len(display_name(names[name])) for name in used),
        longest_shapes=max(len(text) for text in shapes),
        has_shapes=shapes != ["[]"],
        has_overloads=info.overload_codes is not None and any(info.overload_codes.used()),
        has_device_time=on_device is not None and bool((on_device > 0).any()),
        has_device_memory=info.self_device_memory is not None and bool((info.self_device_memory > 0).any()),
        longest_frame=max(map(len, frames), default=None),
        smallest_flops=flops.min().item() if flops is not None and flops.size else None,
        self_device_total=_self_device_total(source, info) / _NS_PER_US,
        use_device=source.use_device,
    )


def _self_device_total(source: EventSource, info: EventInfo) -> int:
    """Time of devices, ns: of their work where there are events of it, else of the events that launched it."""
    on_device = info.device_time("self_device_time_total")
    if on_device is None:
        return 0
    batch, rows = source.batch, info.view.rows
    if batch.work is not None:
        on_device = on_device[(batch["kind"][rows] == WORK_KIND) & (batch["scope"][rows] != Scope.USER_SCOPE)]
    return int(on_device.sum())


def chosen(source: EventSource, sort_by: str | None, top_level_only: bool) -> Iterator[RecordedEvent]:
    """Yields the events in the order of a table. Creates all events at once only if no column has the sort key."""
    order: Array = np.arange(len(source))
    if sort_by is not None:
        attribute = attribute_of(sort_by)
        if attribute not in SORT_KEYS and attribute not in AMOUNTS and attribute not in PEAKS:
            source.make(0, len(source))
            return chosen_objects(list.copy(source.slots), sort_by, top_level_only)
        column = _sorted_by(source, attribute)
        # Other keys, such as the count, are equal for all events, and sorting by them changes nothing.
        if column is not None:
            order = np.argsort(-column, kind="stable")
    if top_level_only:
        order = order[source.view.parent[order] < 0]
    return (source.event(index) for index in order.tolist())


def _sorted_by(source: EventSource, attribute: str) -> Array | None:
    """The column of a sort key; None if all events have the same value."""
    if attribute in {"cpu_time", "cpu_time_total"}:
        return source.view.duration
    if attribute == "self_cpu_time_total":
        return source.view.self_time
    attribute = "device_time_total" if attribute == "device_time" else attribute
    if attribute in DEVICE_TIMES:
        return source.info.device_time(attribute)
    return source.info.amount(attribute) if attribute in AMOUNTS or attribute in PEAKS else None


def _self_times(source: EventSource, attribute: str) -> Array | None:
    """The column of a self time, ns; None if no device was timed."""
    return source.view.self_time if attribute == "self_cpu_time_total" else source.info.device_time(attribute)


def _added_up(source: EventSource) -> dict[str, Array]:
    """All recorded columns that averages add up besides CPU times."""
    info = source.info
    times = {name: info.device_time(name) for name in DEVICE_TIMES}
    return info.amounts() | {name: column for name, column in times.items() if column is not None}


def _average(
    first: RecordedEvent, count: int, total_ns: int, self_ns: int, amounts: dict[str, Any]
) -> FunctionEventAvg:
    average = FunctionEventAvg()
    average.describe(first)
    average.count = count
    average.cpu_time_total = total_ns / _NS_PER_US
    average.self_cpu_time_total = self_ns / _NS_PER_US
    for name, value in amounts.items():
        setattr(average, name, value / _NS_PER_US if name in DEVICE_TIMES else value)
    return average
