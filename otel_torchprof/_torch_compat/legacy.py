"""The legacy profiler of ``torch.autograd``: marks, begins and ends per thread, and events from them.

The names are those of torch's C++ and of ``torch.autograd.profiler_legacy``. Events come from this package's recorder;
torch's own profiler is not used and may run beside it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from otel_torchprof._events.events import EventList
from otel_torchprof._export import file
from otel_torchprof.errors import ExportError, TorchProfError

from .legacy_config import ProfilerConfig, ProfilerState
from .legacy_parse import function_events
from .legacy_state import (
    TLSLegacyProfilerGuard,
    disable_profiler_legacy,
    enable_profiler_legacy,
)

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from otel_torchprof._events.function_event import FunctionEvent
    from otel_torchprof._events.function_event_avg import FunctionEventAvg

    from .legacy_event import LegacyEvent

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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self._guard.__exit__(exc_type, exc_value, traceback)
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # A child that was forked within the block leaves it too: its parent records, not it.
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
