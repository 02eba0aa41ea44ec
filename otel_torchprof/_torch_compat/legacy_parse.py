"""Parses the legacy profiler's lists: one ``FunctionEvent`` per begin and end."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from otel_torchprof._events.event_names import MEMORY_EVENT_NAME, _filter_name, _filter_stack_entry, _rewrite_name
from otel_torchprof._events.function_event import FunctionEvent
from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .legacy_event import LegacyEvent

_Key = tuple[int, int]
"""Handle and node, which a begin shares with its end."""


def function_events(lists: Sequence[Sequence[LegacyEvent]]) -> list[FunctionEvent]:
    """Returns the events of all lists by time.

    Omits utility operators, and operators that begin inside one of their name.

    Raises:
        TorchProfError: there is no local ``__start_profile``, the origin of times, or an end without a begin.
    """
    start = next((e for e in itertools.chain.from_iterable(lists) if e.name() == "__start_profile"), None)
    if start is None or start.is_remote():
        raise TorchProfError("Expected a valid local start_record: could not find __start_profile mark")
    found = [event for events in lists for event in _Pairing(start).paired(events)]
    # Of events with equal starts the longest comes first: it encloses the others.
    found.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return found


class _Pairing:
    """Pairs the begins and ends of one list."""

    def __init__(self, start: LegacyEvent) -> None:
        self._start = start
        self._begins: dict[_Key, LegacyEvent] = {}
        self._memory: dict[_Key, tuple[int, int]] = {}

    def paired(self, events: Sequence[LegacyEvent]) -> Iterator[FunctionEvent]:
        """Returns the events in the order of their ends, and top-level changes of memory."""
        passed_over: set[_Key] = set()
        previous: LegacyEvent | None = None
        for event in events:
            key = event.handle(), event.node_id()
            kind = event.kind()
            if _filter_name(event.name()) or key in passed_over:
                passed_over.add(key)
                continue
            if kind == "push":
                if previous is not None and _repeats(previous, event):
                    passed_over.add(key)
                    continue
                self._begins[key], self._memory[key] = event, (0, 0)
            elif kind == "pop":
                yield self._ended(key, event)
            elif kind == "memory_alloc":
                yield from self._changed(event)
            previous = event

    def _ended(self, key: _Key, end: LegacyEvent) -> FunctionEvent:
        begin = self._begins.pop(key, None)
        if begin is None:
            raise TorchProfError(f"the end of the event with handle {key[0]} of node {key[1]} has no begin")
        cpu, device = self._memory.pop(key)
        name, has_device = begin.name(), begin.has_cuda()
        event = FunctionEvent(
            id=end.handle(),
            node_id=end.node_id(),
            name=_rewrite_name(name, with_wildcard=True),
            trace_name=_rewrite_name(name),
            thread=begin.thread_id(),
            start_us=self._start.cpu_elapsed_us(begin),
            end_us=self._start.cpu_elapsed_us(end),
            fwd_thread=begin.fwd_thread_id(),
            input_shapes=begin.shapes(),
            stack=[frame for frame in begin.stack() if _filter_stack_entry(frame)],
            scope=begin.scope(),
            use_device="cuda" if has_device else None,
            cpu_memory_usage=cpu,
            device_memory_usage=device,
            is_async=begin.is_async() or begin.thread_id() != end.thread_id(),
            is_remote=end.is_remote(),
            sequence_nr=begin.sequence_nr(),
            is_legacy=True,
            flops=begin.flops(),
        )
        # Of asynchronous events only the total time on the CPU is known.
        if has_device and not event.is_async:
            duration = begin.cuda_elapsed_us(end)
            if duration > 0:
                event.append_kernel(name, begin.device(), duration)
        return event

    def _changed(self, change: LegacyEvent) -> Iterator[FunctionEvent]:
        """Adds memory to all open events; a top-level change of memory is an event of its own."""
        cpu, device = change.cpu_memory_usage(), change.cuda_memory_usage()
        for key, (cpu_so_far, device_so_far) in self._memory.items():
            self._memory[key] = cpu_so_far + cpu, device_so_far + device
        if not self._memory:
            yield FunctionEvent(
                id=0,
                name=MEMORY_EVENT_NAME,
                thread=0,
                start_us=0,
                end_us=0,
                stack=[],
                cpu_memory_usage=cpu,
                device_memory_usage=device,
                is_legacy=True,
            )


def _repeats(previous: LegacyEvent, begin: LegacyEvent) -> bool:
    """Whether an operator begins directly after another of its name: a wrapper that calls it."""
    return previous.kind() == "push" and previous.name() == begin.name() and previous.node_id() == begin.node_id()
