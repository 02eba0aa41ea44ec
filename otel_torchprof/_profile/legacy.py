"""The legacy profiler of ``torch.autograd``: marks, begins and ends per thread, and events from them.

The names are those of torch's C++ and of ``torch.autograd.profiler_legacy``. Events come from this package's recorder;
torch's own profiler is not used and may run beside it.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from otel_torchprof._export import file
from otel_torchprof.errors import ExportError, TorchProfError

from .events import EventList
from .function_event import (
    MEMORY_EVENT_NAME,
    FunctionEvent,
    _filter_name,
    _filter_stack_entry,
    _rewrite_name,
)
from .legacy_state import (
    ProfilerConfig,
    ProfilerState,
    TLSLegacyProfilerGuard,
    disable_profiler_legacy,
    enable_profiler_legacy,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Self

    from .function_event_avg import FunctionEventAvg
    from .legacy_event import LegacyEvent


# ---- Parses the legacy profiler's lists: one ``FunctionEvent`` per begin and end ----

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
    function_events_by_time = [event for events in lists for event in _Pairing(start).paired(events)]
    # Of events with equal starts the longest comes first: it encloses the others.
    function_events_by_time.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return function_events_by_time


class _Pairing:
    """Pairs the begins and ends of one list."""

    def __init__(self, start: LegacyEvent) -> None:
        self._start = start
        self._begins: dict[_Key, LegacyEvent] = {}
        self._memory: dict[_Key, tuple[int, int]] = {}

    def paired(self, events: Sequence[LegacyEvent]) -> Iterator[FunctionEvent]:
        """Returns the events in the order of their ends, and top-level changes of memory."""
        skipped: set[_Key] = set()
        previous: LegacyEvent | None = None
        for event in events:
            key = event.handle(), event.node_id()
            kind = event.kind()
            if _filter_name(event.name()) or key in skipped:
                skipped.add(key)
                continue
            if kind == "push":
                if previous is not None and _repeats(previous, event):
                    skipped.add(key)
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
        # Asynchronous events have no device time, as in torch.
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


_logger = logging.getLogger("otel_torchprof")


def write_profiler_events_to_stream(stream: TextIO, events: Iterable[LegacyEvent]) -> None:
    """Writes begins and ends as Chrome JSON: an array of complete events, in microseconds since ``__start_profile``.

    Raises:
        TorchProfError: there is no ``__start_profile`` mark, or an end without a begin; nothing is written then.
    """
    chosen = list(events)
    start = next((event for event in chosen if event.name() == "__start_profile"), None)
    if start is None:
        raise TorchProfError("Could not find __start_profile mark")
    begins: dict[tuple[int, int], LegacyEvent] = {}
    lines = []
    for event in chosen:
        key = event.handle(), event.node_id()
        if event.kind() == "push":
            begins[key] = event
        elif event.kind() == "pop":
            if key not in begins:
                raise TorchProfError("Unmatched pop event")
            lines.append(json.dumps(_slice(start, begins.pop(key), event)))
    stream.write("[\n" + ",\n".join(lines) + "]\n")


def _slice(start: LegacyEvent, begin: LegacyEvent, end: LegacyEvent) -> dict[str, Any]:
    return {
        "name": begin.name(),
        "ph": "X",
        "ts": start.cpu_elapsed_us(begin),
        "dur": begin.cpu_elapsed_us(end),
        "tid": begin.thread_id(),
        "pid": "CPU Functions",
        "args": {},
    }


class RecordProfile:
    """Profiles a block and writes it as Chrome JSON at its end, even after an exception.

    A subclass may handle the events itself: see :meth:`process_events`. Inside another legacy profile it records the
    block instead of that one.

    Args:
        output: path of the file, compressed if it ends in ``.gz``; or a text stream, which stays open.

    Raises:
        ExportError: on entry, the file cannot be written.
    """

    def __init__(self, output: str | os.PathLike[str] | TextIO) -> None:
        self._output = output
        self._guard = TLSLegacyProfilerGuard(ProfilerConfig(ProfilerState.CPU), self._keep)
        self._events: list[LegacyEvent] = []

    def __enter__(self) -> Self:
        if isinstance(self._output, str | os.PathLike):
            try:
                file.check_writable(os.fspath(self._output))
            except ExportError as error:
                raise ExportError(f"Could not open file: {error}") from error
        self._guard.__enter__()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *error: object) -> None:
        try:
            self._guard.__exit__(exc_type, *error)
            events, self._events = self._events, []
            if events:
                self.process_events(events)
        except Exception:
            if exc_type is None:
                raise
            _logger.exception("the events of RecordProfile were not written")  # the block's own exception continues

    def process_events(self, events: list[LegacyEvent]) -> None:
        """Writes the events of all threads; subclasses may override it.

        Raises:
            TorchProfError: there is no ``__start_profile`` mark, or an end without a begin.
            ExportError: the file cannot be written; an older file stays complete.
        """
        if isinstance(self._output, str | os.PathLike):
            text = io.StringIO()
            write_profiler_events_to_stream(text, events)
            file.write(self._output, [text.getvalue().encode()])
        else:
            write_profiler_events_to_stream(self._output, events)

    def _keep(self, lists: Sequence[Sequence[LegacyEvent]]) -> None:
        self._events = [event for events in lists for event in events]


class profile:  # noqa: N801 - torch's name
    """``torch.autograd.profiler_legacy.profile``, by a change of import.

    New code should use ``otel_torchprof.profile``. Profiles the calling thread and the threads on which torch continues
    its work. A context manager, for one use; read it afterwards.

    Args:
        enabled: False records nothing, and nothing can be read. Default: True.
        use_cuda: whether to record device times; warns without CUDA. Default: False.
        record_shapes: whether to record the shapes of operators' inputs. Default: False.
        with_flops: whether to estimate FLOPs of operators, which records shapes too. Default: False.
        profile_memory: whether to record allocations and releases. Default: False.
        with_stack: whether to record the Python stacks of operators. Default: False.
        with_modules: accepted as in torch.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        use_cuda: bool = False,
        record_shapes: bool = False,
        with_flops: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_modules: bool = False,
    ) -> None:
        self.enabled = enabled
        self.function_events: EventList[FunctionEvent] | None = None
        self.entered = False
        self.record_shapes = record_shapes or with_flops
        self.with_flops = with_flops
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self.with_modules = with_modules
        self.use_cuda = enabled and use_cuda
        self._pid = 0
        if self.use_cuda and not _has_cuda():
            warnings.warn("CUDA is not available, disabling CUDA profiling", stacklevel=2)
            self.use_cuda = False
        self.profiler_kind = ProfilerState.CUDA if self.use_cuda else ProfilerState.CPU

    def config(self) -> ProfilerConfig:
        """Returns the options of the legacy profiler."""
        return ProfilerConfig(
            self.profiler_kind,
            self.record_shapes,
            self.profile_memory,
            self.with_stack,
            self.with_flops,
            self.with_modules,
        )

    def __enter__(self) -> Self:
        if not self.enabled:
            return self
        if self.entered:
            raise TorchProfError("Profiler context manager is not reentrant")
        enable_profiler_legacy(self.config())
        self.entered, self._pid = True, os.getpid()
        return self

    def __exit__(self, *_: object) -> None:
        # A child that was forked inside the block leaves it too, but only the parent records.
        if not self.enabled or self._pid != os.getpid():
            return
        if self.use_cuda:
            _synchronize()
        events = EventList(
            function_events(disable_profiler_legacy()),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        events._build_tree()  # noqa: SLF001 - torch's name for it
        self.function_events = events

    def __repr__(self) -> str:
        if self.function_events is None:
            return "<unfinished profiler_legacy.profile>"
        return repr(self.function_events)

    def __str__(self) -> str:
        if self.function_events is None:
            return "<unfinished profile.profiler_legacy.profile>"
        return str(self.function_events)

    def _finished(self) -> EventList[FunctionEvent]:
        if self.function_events is None:
            raise TorchProfError("Profiler didn't finish running")
        return self.function_events

    def table(  # noqa: PLR0917 - torch's signature
        self,
        sort_by: str | None = None,
        row_limit: int | None = 100,
        max_src_column_width: int | None = 75,
        max_name_column_width: int | None = 55,
        max_shapes_column_width: int | None = 80,
        header: str | None = None,
        top_level_events_only: bool = False,
    ) -> str:
        """Returns all events as a text table: see :meth:`EventList.table`."""
        return self._finished().table(
            sort_by=sort_by,
            row_limit=row_limit,
            max_src_column_width=max_src_column_width,
            max_name_column_width=max_name_column_width,
            max_shapes_column_width=max_shapes_column_width,
            header=header,
            top_level_events_only=top_level_events_only,
        )

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the events as Chrome JSON: see :meth:`EventList.export_chrome_trace`."""
        self._finished().export_chrome_trace(path)

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total", *, merged: bool = False) -> None:
        """Writes one line per event with a stack, or per stack (``merged``): see :meth:`EventList.export_stacks`.

        Raises:
            AssertionError: recorded without ``with_stack=True``; torch's error.
        """
        events = self._finished()
        if not self.with_stack:
            raise AssertionError("export_stacks() requires with_stack=True")
        events.export_stacks(path, metric, merged=merged)

    def key_averages(
        self, group_by_input_shape: bool = False, group_by_stack_n: int = 0
    ) -> EventList[FunctionEventAvg]:
        """Returns sums and counts by name, and by shapes and stack on request."""
        return self._finished().key_averages(group_by_input_shape, group_by_stack_n)

    def total_average(self) -> FunctionEventAvg:
        """Returns sums over all events."""
        return self._finished().total_average()

    @property
    def self_cpu_time_total(self) -> float:
        """Sum of all self times on the CPU, in microseconds."""
        return self._finished().self_cpu_time_total


def _has_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
