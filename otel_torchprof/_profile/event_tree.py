"""The tree of event objects, built from their times as by torch's ``EventList._build_tree``."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.schema import Scope

from .function_event import DeviceType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .function_event import FunctionEvent


def build_tree(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """Sets parents, children and the stacks of backward events; returns the events without duplicates.

    Raises ValueError for an event that has a parent already. Costs a sort.
    """
    remaining = list(events)
    _nest(remaining)
    remaining = _without_duplicates(remaining)
    _copy_stacks_to_backward(remaining)
    return remaining


def _nest(events: list[FunctionEvent]) -> None:
    """Puts each event under the shortest one of its thread and node that contains it in time.

    Asynchronous events and events of devices have no parent and no children: overlap in time does not show a call.
    """
    threads: dict[Any, list[FunctionEvent]] = defaultdict(list)
    for event in events:
        if not event.is_async and event.device_type == DeviceType.CPU:
            threads[event.thread, event.node_id].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        enclosing: list[FunctionEvent] = []
        for event in thread:
            while enclosing and not _contains(enclosing[-1], event):
                enclosing.pop()
            if enclosing:
                if event.cpu_parent is not None:
                    raise ValueError(f"event {event.name!r} has a parent already: a tree is built once")
                enclosing[-1].append_cpu_child(event)
                event.set_cpu_parent(enclosing[-1])
            enclosing.append(event)


def _contains(parent: FunctionEvent, event: FunctionEvent) -> bool:
    outer, inner = parent.time_range, event.time_range
    return inner.start < outer.end and inner.end <= outer.end


def _without_duplicates(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Merges an event into its parent if it is the only child and has the parent's name.

    One pass in any order is enough: the parent gets the children of the merged event, which has the same name.
    """
    remaining = []
    for event in events:
        parent = event.cpu_parent
        if parent is None or parent.name != event.name or len(parent.cpu_children) != 1:
            remaining.append(event)
            continue
        parent.cpu_children = event.cpu_children
        parent.kernels = event.kernels
        for child in event.cpu_children:
            child.cpu_parent = parent
    return remaining


def _copy_stacks_to_backward(events: list[FunctionEvent]) -> None:
    """Gives backward events, which have no Python caller, the stack of their forward operator."""
    backward = {id(event): _backward_function(event) for event in events}
    stacks: dict[tuple[int, int | None], list[str]] = {}
    for event in events:
        if backward[id(event)] is None and event.stack is not None:
            stacks.setdefault((event.sequence_nr, event.thread), event.stack)
    for event in events:
        cause = backward[id(event)]
        if cause is not None:
            event.stack = stacks.get((cause.sequence_nr, cause.fwd_thread), [])


def _backward_function(event: FunctionEvent | None) -> FunctionEvent | None:
    """The event itself or its nearest ancestor that is a backward function; None if there is none."""
    while event is not None and event.scope != Scope.BACKWARD_FUNCTION:
        event = event.cpu_parent
    return event
