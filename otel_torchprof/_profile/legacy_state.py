"""State of the legacy profiler: running profiles per thread, and the lists of events that they return."""

from __future__ import annotations

import enum
import functools
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind, MemoryFlag
from otel_torchprof._model.inputs import input_shapes
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions
from otel_torchprof.errors import TorchProfError

from .function_event import DeviceType
from .legacy_event import DeviceEvents, EventKind, LegacyEvent, ResolvedEvents, may_have_device_event
from .recorded_events import EventSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from typing_extensions import Self

    from otel_torchprof._columns.batch import Array, Batch

    from .recorded_events import RecordedEvent

# ---- rows of a batch as lists of the legacy profiler: one list per thread, each event as a begin and an end ----

MemoryKey = tuple[int, int, int]
"""Time, address and bytes: identifies a change of memory in all recordings that have it."""

_DEVICE_MEMORY = frozenset({DeviceType.CUDA, DeviceType.HIP})
_CPU_MEMORY = frozenset({DeviceType.CPU, DeviceType.MKLDNN, DeviceType.IDEEP})


class _Rows:
    """A batch, and the event objects of its rows. Thread-safe."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._lock = threads.Lock()
        self._source: EventSource | None = None
        self._position: dict[int, int] = {}

    def event_of(self, row: int) -> RecordedEvent | None:
        """The event of a row as in ``prof.events()``; None for a duplicate, which is merged into its parent there."""
        with self._lock:
            if self._source is None:
                source = EventSource(self.batch, 0, None)
                source.slots = [None] * len(source)
                self._position = {int(row): at for at, row in enumerate(source.view.rows.tolist())}
                self._source = source
        position = self._position.get(row)
        return None if position is None else self._source.event(position)


class _Begin(LegacyEvent):
    """The begin of a recorded event; reads its columns on access."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: _Rows, row: int, thread: int, *, cpu_ns: int, handle: int) -> None:
        super().__init__(EventKind.PUSH, "", thread, cpu_ns=cpu_ns, handle=handle)
        self._rows = rows
        self._row = row

    def _value(self, column: str) -> int:
        return int(self._rows.batch[column].item(self._row))

    def name(self) -> str:
        """Name of the operator or label."""
        return str(self._rows.batch.names[self._value("name")])

    def is_async(self) -> bool:
        """Whether it was declared asynchronous, or ended on another thread."""
        return bool(self._value("flags") & Flag.ASYNC)

    def shapes(self) -> list[list[int]]:
        """Dimensions of the inputs, if shapes were recorded."""
        return input_shapes(self._rows.batch, self._row)

    def stack(self) -> list[str]:
        """Enclosing Python frames, innermost first, if stacks were recorded."""
        event = self._rows.event_of(self._row)
        return list(event.stack or ()) if event is not None else []

    def scope(self) -> int:
        """``at::RecordScope``: 0 operator, 1 backward function, 7 label."""
        return self._value("scope")

    def sequence_nr(self) -> int:
        """Pairs a backward function with its forward operator; -1 for none."""
        return self._value("sequence_nr")

    def fwd_thread_id(self) -> int:
        """Thread of the forward operator, for backward functions; 0 for none."""
        return self._value("fwd_thread")

    def flops(self) -> int:
        """Floating point operations, if they were requested and are known."""
        event = self._rows.event_of(self._row)
        return int(event.flops or 0) if event is not None else 0


class OtherRecordings:
    """Ids of the events, and keys of the changes of memory, of other recordings. An event has the same id in all of them."""

    def __init__(self) -> None:
        self._ids: list[Array] = []
        self.memory: set[MemoryKey] = set()

    def add(self, batch: Batch) -> None:
        """Adds the events and changes of memory of a batch."""
        self._ids.append(batch["id"])
        self.memory.update(_memory_keys(batch))

    def update(self, other: OtherRecordings) -> None:
        """Adds those of another object."""
        self._ids += other._ids
        self.memory |= other.memory

    def rows(self, batch: Batch) -> Array:
        """A mask of the rows of a batch whose events are among these."""
        if not self._ids:
            return np.zeros(len(batch), dtype=np.bool_)
        return np.isin(batch["id"], np.concatenate(self._ids))


def legacy_events(
    batch: Batch,
    *,
    left_out: OtherRecordings,
    until: Mapping[int, int],
    device_events: DeviceEvents | None,
) -> dict[int, list[LegacyEvent]]:
    """The events of a batch by the system's id of the thread on which they began, each list in order of time.

    An unfinished event has a begin only. Two threads with the same id, which the system reused, share a list. Costs some
    5 us per event.

    Args:
        batch: the events.
        left_out: events and changes of memory to omit.
        until: by thread id, the Unix time in ns after which events are omitted.
        device_events: source of device events; None for none.
    """
    requested = np.isin(batch["kind"], (Kind.OPERATOR, Kind.LABEL)) & ~left_out.rows(batch)
    rows, last = _Rows(batch), _last_inside(batch)
    memory = _memory_by_thread(batch, left_out.memory)
    events_by_thread: dict[int, list[LegacyEvent]] = {}
    for index, thread in enumerate(batch.threads):
        own = requested & (batch["thread"] == index)
        limit = until.get(thread.os_tid)
        if limit is not None:
            own &= batch["start"] <= limit
        changes = [change for change in memory.get(index, ()) if limit is None or change[0] <= limit]
        events = _in_order(rows, np.flatnonzero(own), last, changes, device_events)
        if events:
            events_by_thread.setdefault(thread.os_tid, []).extend(events)
    return events_by_thread


def _last_inside(batch: Batch) -> list[int]:
    """For every row, the last row that began inside it; the row itself if none did."""
    last = list(range(len(batch)))
    for row, parent in zip(reversed(last.copy()), reversed(batch["parent"].tolist()), strict=True):
        if parent >= 0:
            last[parent] = max(last[parent], last[row])
    return last


_Change = tuple[int, int, int, int, int]
"""A change of memory: time, row of the enclosing event or -1, bytes on the CPU, bytes on a device, thread."""

_BEGIN, _MEMORY, _END = range(3)

_UNFINISHED = int(Flag.UNFINISHED)


def _in_order(
    rows: _Rows, own: Array, last: list[int], changes: list[_Change], device_events: DeviceEvents | None
) -> list[LegacyEvent]:
    """Begins, ends and changes of memory of one thread, in the order in which they happened.

    Entries of equal time are in the order of the tree: an event ends after all that began inside it, and before the next one.
    """
    batch = rows.batch
    threads = [thread.number for thread in batch.threads]
    keyed: list[tuple[int, int, int, int, LegacyEvent]] = []
    columns = (batch[name][own].tolist() for name in ("start", "end", "id", "thread", "end_thread", "flags"))
    for row, start, stop, handle, thread, end_thread, flags in zip(own.tolist(), *columns, strict=True):
        begin = _Begin(rows, row, threads[thread], cpu_ns=start, handle=handle)
        keyed.append((start, row, _BEGIN, row, begin))
        end = None
        if not flags & _UNFINISHED:
            end = LegacyEvent(EventKind.POP, "", threads[end_thread], cpu_ns=stop, handle=handle)
            keyed.append((stop, last[row], _END, -row, end))
        if device_events is not None and may_have_device_event(begin.name()):
            _add_device_events(device_events, begin, end)
    for time, enclosing, cpu, device, thread in changes:
        event = LegacyEvent(
            EventKind.MEMORY_ALLOC, "", threads[thread], cpu_ns=time, cpu_memory_usage=cpu, cuda_memory_usage=device
        )
        keyed.append((time, enclosing, _MEMORY, 0, event))
    keyed.sort(key=lambda entry: entry[:4])
    return [entry[4] for entry in keyed]


def _add_device_events(device_events: DeviceEvents, begin: LegacyEvent, end: LegacyEvent | None) -> None:
    begun = device_events.begun(begin.handle())
    if begun is not None:
        begin.set_device_event(begun)
    ended = device_events.ended(begin.handle()) if end is not None else None
    if end is not None and ended is not None:
        end.set_device_event(ended)


def _memory_keys(batch: Batch) -> Collection[MemoryKey]:
    memory = batch.memory
    if memory is None:
        return ()
    return set(zip(*(memory[name].tolist() for name in ("time", "address", "bytes")), strict=True))


def _memory_by_thread(batch: Batch, left_out: Collection[MemoryKey]) -> dict[int, list[_Change]]:
    """The changes of memory by index of the thread, without failed allocations."""
    memory = batch.memory
    changes_by_thread: dict[int, list[_Change]] = {}
    if memory is None:
        return changes_by_thread
    row_of = dict(zip(batch["id"].tolist(), range(len(batch)), strict=True))
    made = memory["flags"] & MemoryFlag.OUT_OF_MEMORY == 0
    columns = ("time", "address", "bytes", "event", "thread", "device_type")
    for time, address, size, event, thread, device in zip(
        *(memory[name][made].tolist() for name in columns), strict=True
    ):
        if (time, address, size) in left_out:
            continue
        cpu, other = size * (device in _CPU_MEMORY), size * (device in _DEVICE_MEMORY)
        changes_by_thread.setdefault(thread, []).append((time, row_of.get(event, -1), cpu, other, thread))
    return changes_by_thread


_logger = logging.getLogger("otel_torchprof")

P = ParamSpec("P")
R = TypeVar("R")

ThreadEventLists = list[list[LegacyEvent]]

START_MARK = "__start_profile"
STOP_MARK = "__stop_profile"
DEVICE = "cuda"
"""Type of device that ``ProfilerState.CUDA`` times, as ``torch.device`` names it."""


class _State:
    """One profile of the legacy profiler. Thread-safe. Stops recording when its last reference is released."""

    def __init__(self, config: ProfilerConfig, device_events: DeviceEvents | None) -> None:
        self._with_devices = config.state == ProfilerState.CUDA
        self._device_events = device_events if self._with_devices else None
        self._recording = _recording(config, DEVICE if self._with_devices and device_events is None else None)
        self._lock = threads.RLock()
        self._pulled: list[Batch] = []
        self._recorded = OtherRecordings()
        self._overridden_by: list[_State] = []
        self._until: dict[int, int] = {}
        self._remote: ThreadEventLists = []
        self._marks: list[tuple[str, int, int, int]] = []
        self._thread_ids: dict[int, int] = {}
        self._mark(START_MARK)
        self._recording.start()
        weakref.finalize(self, _stop, self._recording).atexit = False

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made it."""
        return self._recording.is_parents

    def override_by(self, inner: _State) -> None:
        """Excludes the events that another profile records."""
        with self._lock:
            self._overridden_by.append(inner)

    def add_remote(self, events: list[LegacyEvent]) -> None:
        """Adds a list that another process recorded."""
        with self._lock:
            self._remote.append(events)

    def leave_thread(self) -> None:
        """Excludes later events of the calling thread; other threads continue."""
        with self._lock:
            self._until.setdefault(threads.get_native_id(), now_ns())

    def stop(self) -> None:
        """Stops recording."""
        self._recording.stop()

    def consolidated(self) -> ThreadEventLists:
        """Returns and removes the lists of all threads, first that of the thread on which the profile began."""
        with self._lock:
            self._mark(STOP_MARK)
            self._pull()
            left_out = OtherRecordings()
            for inner in self._overridden_by:
                left_out.update(inner.recorded())
            device_events = self._device_events
            if device_events is None and self._with_devices:
                device_events = ResolvedEvents(self._pulled)
            lists: dict[int, list[LegacyEvent]] = {tid: [] for _, tid, _, _ in self._marks}
            for batch in self._pulled:
                events_by_thread = legacy_events(
                    batch, left_out=left_out, until=self._until, device_events=device_events
                )
                self._thread_ids.update({thread.os_tid: thread.number for thread in batch.threads})
                for tid, events in events_by_thread.items():
                    lists.setdefault(tid, []).extend(events)
            if len(self._pulled) > 1:
                for events in lists.values():
                    events.sort(key=LegacyEvent.start_us)
            self._add_marks(lists)
            remote, self._remote, self._pulled = self._remote, [], []
        return [*lists.values(), *remote]

    def recorded(self) -> OtherRecordings:
        """Returns all events recorded so far, including those that :meth:`consolidated` returned before."""
        with self._lock:
            self._pull()
            return self._recorded

    def _pull(self) -> None:
        batch = self._recording.drain()
        self._pulled.append(batch)
        self._recorded.add(batch)

    def _mark(self, name: str) -> None:
        self._marks.append((name, threads.get_native_id(), threads.get_ident(), now_ns()))

    def _add_marks(self, lists: dict[int, list[LegacyEvent]]) -> None:
        for name, tid, ident, time in self._marks:
            mark = LegacyEvent(EventKind.MARK, name, self._thread_ids.get(tid, ident), cpu_ns=time)
            lists[tid].insert(0 if name == START_MARK else len(lists[tid]), mark)
        self._marks = []


def _recording(config: ProfilerConfig, device: str | None) -> ProfileSegment:
    return ProfileSegment(
        RecordingOptions(
            inputs=config.report_input_shapes,
            memory=config.profile_memory,
            frames=config.with_stack,
            device=device,
            device_events="all",  # as in torch's legacy profiler
            sources={"energy": False},
        )
    )


def _stop(recording: ProfileSegment) -> None:
    if not recording.is_parents:
        recording.stop()


class _OnThread(threads.local):
    """The profiles of a thread; the last one records."""

    def __init__(self) -> None:
        self.states: list[_State] = []


_on_thread = _OnThread()


def _states() -> list[_State]:
    """Returns the profiles of the calling thread, without those from before a fork."""
    _on_thread.states = [state for state in _on_thread.states if not state.is_parents]
    return _on_thread.states


def _begin(config: ProfilerConfig, device_events: DeviceEvents | None) -> _State:
    if not isinstance(config, ProfilerConfig):
        raise TypeError(
            f"config is a {type(config).__name__}; give an otel_torchprof.legacy.ProfilerConfig, since torch's cannot be read"
        )
    if config.state not in {ProfilerState.CPU, ProfilerState.CUDA}:
        raise TorchProfError(
            f"the legacy engine profiles for ProfilerState.CPU and CUDA, not {config.state.name}: for NVTX and ITT there are "
            "emit_nvtx and emit_itt"
        )
    states = _states()
    state = _State(config, device_events)
    if states:
        states[-1].override_by(state)
    states.append(state)
    return state


def enable_profiler_legacy(config: ProfilerConfig, *, device_events: DeviceEvents | None = None) -> None:
    """Starts to profile the calling thread, and the threads on which torch continues its work.

    Args:
        config: recording options.
        device_events: source of device events, with ``ProfilerState.CUDA``. Default: the recording itself.

    Raises:
        TorchProfError: the thread is being profiled already, or the state is neither CPU nor CUDA.
        TypeError: the config is torch's own, which cannot be read.
        NativeError: 16 recordings are running.
    """
    if _states():
        raise TorchProfError("Profiler is already enabled on this thread")
    _begin(config, device_events)


def disable_profiler_legacy(options: ProfilerDisableOptions | None = None) -> ThreadEventLists:
    """Ends the profile of the calling thread, or acts as the options say, and returns its events: a list per thread.

    The first list is that of the thread that enabled the profile, and begins with the mark ``__start_profile``; the
    list of the calling thread ends with the mark ``__stop_profile``. An end on another thread is in its begin's list,
    with the id of the other thread. Lists of other processes come last. Open events have a begin only; if the profile
    continues (``cleanup_tls_state=False``), the next call returns them complete instead.

    Raises:
        TorchProfError: the thread is not being profiled.
    """
    chosen = options or ProfilerDisableOptions()
    states = _states()
    if not states:
        raise TorchProfError("Can't disable profiler when it's not running")
    state = states[-1]
    if chosen.cleanup_tls_state:
        states.pop()
        if chosen.consolidate:
            state.stop()
        else:
            state.leave_thread()
    return state.consolidated() if chosen.consolidate else []


def add_event_list(events: Iterable[LegacyEvent], from_node_id: int | None = None) -> None:
    """Adds a list of events of another process to the profile of the calling thread.

    They are copied and marked as remote, with the node id if one is given.

    Raises:
        TorchProfError: the thread is not being profiled.
        ValueError: a local event has a device event and no device time: see ``set_cuda_us``.
    """
    states = _states()
    if not states:
        raise TorchProfError("Profiler must be enabled.")
    states[-1].add_remote([event.from_node(from_node_id) for event in events])


def wrap_propagate_state(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that it runs with the profiles of the wrapping thread, on any thread.

    For work that continues on another thread, which may then add events or consolidate. As in torch, this does not
    record operators of threads that torch does not know.
    """
    carried = tuple(_states())

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _on_thread.states = _on_thread.states, list(carried)
        try:
            return function(*args, **kwargs)
        finally:
            _on_thread.states = before

    return wrapped


class TLSLegacyProfilerGuard:
    """Profiles a block, also inside another profile, which excludes the block and resumes after it.

    Args:
        config: recording options.
        result_callback: called at the end with the lists; its errors are logged, as in torch.
        options: options for the end.
        device_events: source of device events, with ``ProfilerState.CUDA``. Default: the recording itself.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        result_callback: Callable[[ThreadEventLists], object] | None = None,
        options: ProfilerDisableOptions | None = None,
        *,
        device_events: DeviceEvents | None = None,
    ) -> None:
        self._config = config
        self._callback = result_callback
        self._options = options
        self._device_events = device_events
        self._state: _State | None = None

    def __enter__(self) -> Self:
        self._state = _begin(self._config, self._device_events)
        return self

    def __exit__(self, *_: object) -> None:
        # A child that was forked inside the block leaves it too, but only the parent records.
        if self._state is None or self._state.is_parents:
            return
        lists = disable_profiler_legacy(self._options)
        self._state = None
        if self._callback is None:
            return
        try:
            self._callback(lists)
        except Exception:  # the profiled program continues
            _logger.exception("Got error processing profiler events")


# ---- options of the legacy profiler, and of its stop ----


class ProfilerState(enum.IntEnum):
    """Device to profile; torch's names and numbers. The legacy profiler supports CPU and CUDA."""

    Disabled = 0
    CPU = 1
    CUDA = 2
    NVTX = 3
    ITT = 4
    PRIVATEUSE1 = 5
    KINETO = 6
    KINETO_GPU_FALLBACK = 7
    KINETO_PRIVATEUSE1_FALLBACK = 8
    KINETO_PRIVATEUSE1 = 9


@dataclass(frozen=True)
class ProfilerConfig:
    """Recording options, with the names and order of torch's class, whose objects have no readable attributes.

    Raises:
        ValueError: the state is not one of torch's.
    """

    state: Any = ProfilerState.CPU
    """A :class:`ProfilerState`, or torch's."""
    report_input_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    experimental_config: Any = None
    """Accepted as in torch, without an effect."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", ProfilerState(int(self.state)))


@dataclass(frozen=True)
class ProfilerDisableOptions:
    """Options for the end of a profile."""

    cleanup_tls_state: bool = True
    """Whether to remove it from the calling thread; if False, it continues there."""
    consolidate: bool = True
    """Whether to return the events so far, which removes them from the profile; False if other threads continue, and
    one of them returns them."""
