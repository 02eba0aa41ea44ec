"""The sums of a profile that a report displays: calls by path, averages, and memory over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._answers.kept_memory import kept_memory
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import MEMORY_KIND, WORK_KIND, Kind, Scope, WorkFlag
from otel_torchprof._model.call_tree import CallTree, call_tree
from otel_torchprof._model.device_work import work_places
from otel_torchprof._model.devices import device_name
from otel_torchprof._model.frames import MODULE_PREFIX
from otel_torchprof._model.memory import Category, device_number, places_of
from otel_torchprof._model.paths import event_amounts, event_parents
from otel_torchprof._model.tree import display_name
from otel_torchprof.errors import TorchProfError

from .memory_timeline import in_use, known_categories

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.samples import Samples
    from otel_torchprof._model.event_info import EventInfo
    from otel_torchprof._model.memory import Changes

    from .events import EventList
    from .function_event import FunctionEvent
    from .function_event_avg import FunctionEventAvg
    from .recorded_events import EventSource

KINDS = ("operator", "backward", "label", "module", "python", "device", "other")
"""Kinds of names, by which pictures colour them."""
_OPERATOR, _BACKWARD, _LABEL, _MODULE, _PYTHON, _DEVICE, _OTHER = range(len(KINDS))
_NO_EVENT = "(outside of all events)"
_MOST_POINTS = 1200
"""Points of a curve of memory: twice the number of bins, of each of which the least and the most are kept."""
_MOST_HELD = 12

Keys = dict[tuple[str, int], int]
"""Numbers of pairs of a name and a kind."""


# ---- calls by path ----


def tree_of(source: EventSource, keys: Keys) -> CallTree:
    """The calls by path with their sums: ``calls``, ``time``, ``device`` (ns), ``cpu_memory`` and ``device_memory`` (allocated bytes), ``flops``.

    Work of devices is below what launched it. Costs some 300 ns per event.

    Args:
        source: the events.
        keys: gets the names.
    """
    info = _info(source)
    view, batch = info.view, info.view.batch
    kind = batch["kind"][view.rows]
    is_shown = kind != MEMORY_KIND
    if batch.work is not None:
        is_work = kind == WORK_KIND
        work = work_places(batch)[view.rows[is_work]]
        is_shown[is_work] = (batch.work["flags"][work] & WorkFlag.ANNOTATION) == 0
    parent, key = event_parents(info), _keys_of(info, keys)
    sums = {**event_amounts(info), **_allocated(info)}
    chosen = {name: column for name, column in sums.items() if column.any()}
    outside = {name: int(column[-1]) for name, column in chosen.items() if len(column) > len(view)}
    rows = np.flatnonzero(is_shown)
    place = np.full(len(view) + 1, -1, np.int64)
    place[rows] = np.arange(len(rows))
    parent, key = place[parent[rows]], key[rows]
    columns = {name: column[rows].astype(np.int64) for name, column in chosen.items()}
    if any(outside.values()):
        parent, key = np.append(parent, -1), np.append(key, keys.setdefault((_NO_EVENT, _OTHER), len(keys)))
        columns = {name: np.append(column, outside.get(name, 0)) for name, column in columns.items()}
    return call_tree(parent, key, columns)


def _info(source: EventSource) -> EventInfo:
    """The events with the modules, unless calls of Python functions name them."""
    names = source.batch.names
    is_frame = source.batch["kind"] == int(Kind.FRAME)
    of_frames = distinct_values(source.batch["name"][is_frame]).tolist()
    if any(names[number].startswith(MODULE_PREFIX) for number in of_frames):
        return source.info
    return source.with_modules()


def _keys_of(info: EventInfo, keys: Keys) -> Integers:
    """The number of the name of each event of a view."""
    view, batch = info.view, info.view.batch
    kinds = np.full(256, _OTHER, np.int64)
    kinds[[Kind.OPERATOR, Kind.LABEL, Kind.MODULE, Kind.FRAME, Kind.PHASE, WORK_KIND]] = [
        _OPERATOR,
        _LABEL,
        _MODULE,
        _PYTHON,
        _LABEL,
        _DEVICE,
    ]
    kind, scope = kinds[batch["kind"][view.rows]], batch["scope"][view.rows]
    kind[(kind == _OPERATOR) & (scope == int(Scope.BACKWARD_FUNCTION))] = _BACKWARD
    kind[(kind == _OPERATOR) & (scope == int(Scope.USER_SCOPE))] = _LABEL
    codes = view.display_name[view.rows].astype(np.int64) * len(KINDS) + kind
    numbers = np.zeros(len(batch.names) * len(KINDS), np.int64)
    numbers[codes] = 1
    for code in np.flatnonzero(numbers).tolist():
        name = display_name(batch.names[code // len(KINDS)])
        numbers[code] = keys.setdefault((name, code % len(KINDS)), len(keys))
    found: Integers = numbers[codes]
    return found


def _allocated(info: EventInfo) -> dict[str, Integers]:
    """Bytes that events themselves allocated on the CPU and on devices; the last of each is what is in no event."""
    memory, count = info.view.batch.memory, len(info.view)
    if memory is None or not len(memory["time"]):
        return {}
    place, is_block = places_of(info.view), memory["bytes"] > 0
    found = {}
    for name, is_chosen in (("cpu_memory", memory["device_type"] == 0), ("device_memory", memory["device_type"] != 0)):
        rows = np.flatnonzero(is_block & is_chosen)
        found[name] = np.zeros(count + 1, np.int64)
        np.add.at(found[name], np.where(place[rows] < 0, count, place[rows]), memory["bytes"][rows])
    return found


def sampled_tree(samples: Samples, keys: Keys) -> CallTree:
    """The sampled stacks as a tree, each call with the time that samples in it stand for, ns."""
    times = np.bincount(samples.stack, samples.duration, len(samples.stacks)).astype(np.int64)
    counts = np.bincount(samples.stack, minlength=len(samples.stacks))
    parents, names, time, calls = list[int](), list[int](), list[int](), list[int]()
    nodes: dict[tuple[int, int], int] = {}
    for stack in np.flatnonzero(counts).tolist():
        above = -1
        for call in reversed(samples.stacks[stack]):
            name = keys.setdefault((f"{call.file}({call.line}): {call.function}", _PYTHON), len(keys))
            node = nodes.setdefault((above, name), len(parents))
            if node == len(parents):
                parents.append(above)
                names.append(name)
                time.append(0)
                calls.append(0)
            above = node
        if above >= 0:
            time[above] += times.item(stack)
            calls[above] += counts.item(stack)
    columns = {"calls": np.array(calls, np.int64), "time": np.array(time, np.int64)}
    return call_tree(np.array(parents, np.int64), np.array(names, np.int64), columns)


# ---- averages ----


COLUMNS = {
    "calls": "count",
    "self": "self_cpu_time_total",
    "total": "cpu_time_total",
    "self_device": "self_device_time_total",
    "device": "device_time_total",
    "self_cpu_memory": "self_cpu_memory_usage",
    "self_device_memory": "self_device_memory_usage",
    "flops": "flops",
}
"""Columns of a table of averages, and the attributes of an average; times in ns, memory in bytes."""
Rows = dict[tuple[str, str], list[int]]
"""By name and shapes, the sums in the order of :data:`COLUMNS`."""


def averages_of(events: EventList[FunctionEvent]) -> Iterator[tuple[str, Rows]]:
    """Yields averages by name, those by name and shapes if shapes were recorded, and by module if modules were."""
    names = _rows(events.key_averages())
    yield "name", names
    shapes = _rows(events.key_averages(group_by_input_shapes=True))
    if any(shape not in {"", "[]"} for _, shape in shapes):
        yield "shape", shapes
    try:
        modules = events.key_averages(group_by_module=True)
    except TorchProfError:
        return
    yield "module", _rows(modules)


def add_rows(sums: Rows, rows: Rows) -> None:
    """Adds averages of another profile."""
    for key, values in rows.items():
        before = sums.get(key)
        sums[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]


def _rows(averages: Iterable[FunctionEventAvg]) -> Rows:
    rows: Rows = {}
    for average in averages:
        values = [_whole(getattr(average, attribute, 0), attribute) for attribute in COLUMNS.values()]
        add_rows(rows, {(str(average.key), str(average.input_shapes or "")): values})
    return rows


def _whole(value: Any, attribute: str) -> int:
    return round((value or 0) * (1000 if "_time_" in attribute else 1))


# ---- memory over time ----


def memory_curves(batch: Batch, steps: Iterable[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The bytes in use over time of each device, with the peak and what was held then; empty if no memory was recorded.

    Args:
        batch: the events.
        steps: number, start and end (Unix ns) of each step.
    """
    memory = batch.memory
    if memory is None or not len(memory["time"]):
        return []
    number = device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64))
    times, devices = list(steps), distinct_values(number).tolist()
    is_only = len(devices) == 1  # of several devices it is not known what is in use on each
    changes = known_categories(batch)
    return [
        _curve(batch, np.flatnonzero(number == each), each, times, with_held=is_only)
        | ({} if changes is None else {"categories": _categories(changes.chosen(changes.device == each))})
        for each in devices
    ]


def _categories(changes: Changes) -> dict[str, list[Any]]:
    """The bytes in use over time by category, from the moments with the least and the most in use; times in us, Unix."""
    time, used = in_use(changes)
    shown = _extremes(used.sum(axis=1)) if len(time) else np.empty(0, np.int64)
    found = {
        each.name.lower().replace("_", " "): used[shown, each].tolist() for each in Category if used[:, each].any()
    }
    return {"time": time[shown].tolist(), **found}


def _curve(
    batch: Batch, rows: Integers, number: int, steps: list[tuple[int, int, int]], *, with_held: bool
) -> dict[str, Any]:
    memory = batch.memory or {}
    rows = rows[np.argsort(memory["time"][rows], kind="stable")]
    time, total = memory["time"][rows], memory["total_allocated"][rows]
    is_total = bool((total >= 0).all())
    in_use = total if is_total else np.cumsum(memory["bytes"][rows])
    peak = int(in_use.argmax())
    at = int(time[peak])
    shown = _extremes(in_use)
    inside = next((step for step, start, end in steps if start <= at < end), None)
    return {
        "device": device_name(number // 256) + (f":{number % 256}" if number >= 256 else ""),  # noqa: PLR2004 - numbers of devices are in the upper bits
        "began": int(time[0]) // 1000,
        "time": ((time[shown] - time[0]) // 1000).tolist(),
        "bytes": in_use[shown].tolist(),
        "records": len(rows),
        "is_total": is_total,
        "peak": [(at - int(time[0])) // 1000, int(in_use[peak])],
        "step": inside,
        "held": _held(batch, at) if with_held else [],
        "allocated": int(memory["bytes"][rows][memory["bytes"][rows] > 0].sum()),
    }


def _held(batch: Batch, at: int) -> list[list[Any]]:
    """What allocated the most of what is in use at a time: phase, module, operator, bytes and blocks; the last one is the rest."""
    kept = kept_memory(batch, 0, at + 1, at)
    found: list[list[Any]] = [
        [each.phase, each.module, each.operator, each.bytes, each.blocks] for each in kept[:_MOST_HELD]
    ]
    rest = kept[_MOST_HELD:]
    if rest:
        found.append(["", "", f"{len(rest):,} more", sum(e.bytes for e in rest), sum(e.blocks for e in rest)])
    return found


def _extremes(values: Integers) -> Integers:
    """The places of the least and the most of each of some bins, in order, and the last place; all of few values."""
    if len(values) <= _MOST_POINTS:
        return np.arange(len(values))
    firsts = np.linspace(0, len(values), _MOST_POINTS // 2 + 1).astype(np.int64)
    shown = set()
    for begin, end in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        part = values[begin:end]
        shown |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(shown | {len(values) - 1}), np.int64)
