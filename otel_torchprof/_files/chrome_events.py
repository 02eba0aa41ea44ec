"""Interprets the events of a Chrome trace: spans, steps, and slices of the CPU or of devices; others are only counted."""

from __future__ import annotations

import re
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import PHASE_NAME
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.tree import STEP_PREFIX

from .records import object_of
from .values import event_name, id_in, key_of, nanoseconds, text_in, values_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Protocol

    Track = tuple[Any, Any]

_STEPS_TRACK = 2**31 - 1
"""Track on which profiles of this package have their steps, beside the events in them."""
_MOST_WAITING = _MOST_OPEN = 20_000
_MOST_PROCESSES = 10_000
_LONGEST_NAME = 500
"""Characters of the name of a buffered slice; readers use no more."""
_PROCESS_METADATA = {"process_labels": "labels", "process_name": "name"}
"""Metadata events of processes, and their arguments."""
OTHER_EVENTS = {
    phase: name
    for name, phases in {
        "arrows": "stf",
        "instant events": "iI",
        "counter values": "C",
        "asynchronous events": "bneSTpF",
        "events of objects": "NOD",
        "marks, samples and dumps": "RcPvV",
    }.items()
    for phase in phases
}
"""Events that are no slices, by phase."""


if TYPE_CHECKING:

    class Events(Protocol):
        """Receives the events of a file one by one; its length is the number of counted events. Times are in ns."""

        used_attributes: frozenset[str]
        """Keys of the attributes to pass to :meth:`add_span`."""

        def __len__(self) -> int: ...

        def add_span(
            self,
            name: str,
            start: int,
            duration: int,
            ids: tuple[int, int, Hashable],
            attributes: Mapping[str, Any],
            /,
            *,
            process: Hashable,
        ) -> None:
            """Adds a span; ``ids``: its id, that of its parent (0: none) and its trace; ``attributes``: those in :attr:`used_attributes`."""

        def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool, /) -> None:
            """Adds an event whose parent is the enclosing one on its track, a process and a thread; ``on_device``: work of a device."""

        def add_step(self, name: str, start: int, duration: int, process: Hashable, /) -> None:
            """Adds a step of a profile; it is not a parent of events."""

        def name_rank(self, process: Hashable, rank: int, /) -> None:
            """Sets the rank of a process; process None: of the whole file."""


class _OpenSlice(NamedTuple):
    """A slice that is buffered until its end, or the name of its process, is known."""

    name: str
    start: int
    duration: int
    track: Track
    kind: SliceKind | None


class ChromeEvents:
    """Passes the events of a Chrome trace on as spans, slices and steps.

    A slice of unknown category is of a device if its process is one. Until 2025, Kineto wrote the metadata of processes after the
    events, so such slices are buffered.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._open: dict[Track, list[_OpenSlice]] = {}
        self._open_count = 0
        self._waiting: list[_OpenSlice] | None = []
        self._devices: dict[Hashable, bool] = {}
        """Whether a process is a device, for processes whose metadata says so."""
        self.left_out = Counter[str]()
        """Number of events that were not passed on, by kind."""

    def __len__(self) -> int:
        """Number of slices that are buffered until the name of their process is known."""
        return len(self._waiting or ())

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event. Raises MalformedError."""
        if event.get("ph") != "X":
            self._add_other(event)
            return
        name, args, category = event.get("name", ""), event.get("args"), event.get("cat")
        if type(name) is not str or type(args) is not dict:  # a check for both: each call costs 0.1 us
            name, args = text_in(name, "name"), object_of(args or {}, "args")
        is_span = isinstance(args.get("span_id"), str)
        kind = None
        if not is_span:
            kind = (KINDS.get(category) if isinstance(category, str) else None) or kind_by_stream(event)
            if kind is SliceKind.BESIDE or kind is SliceKind.PROFILER:
                self.left_out[kind.value] += 1
                return
        if "dur" not in event:
            self.left_out["slices without duration, counted as 0"] += 1
        start, duration = nanoseconds(event.get("ts"), "ts"), max(0, nanoseconds(event.get("dur", 0), "dur"))
        track = key_of(event.get("pid")), key_of(event.get("tid"))
        if is_span:
            self._add_span(name, start, duration, args, track[0])
        elif track[1] == _STEPS_TRACK:
            self._events.add_step(name, start, duration, track[0])
        elif kind is None:
            self._add_slice(name, start, duration, track, kind)
        else:
            self._events.add_slice(name, start, duration, track, kind is SliceKind.DEVICE)

    def settle(self) -> None:
        """Passes on buffered slices; call it at the end of the file."""
        self._end_waiting()
        if self._open_count:
            self.left_out["slices without end"] += self._open_count
            self._open, self._open_count = {}, 0

    def _add_other(self, event: dict[str, Any]) -> None:
        phase = event.get("ph")
        if phase == "B":
            self._begin(event)
        elif phase == "E":
            self._end(event)
        elif phase == "M":
            self._name_process(event)
        else:
            known = OTHER_EVENTS.get(phase) if isinstance(phase, str) else None
            self.left_out[known or "events of unknown phase"] += 1

    def _add_span(self, name: str, start: int, duration: int, args: dict[str, Any], process: Hashable) -> None:
        ids = id_in(args["span_id"], "span_id"), id_in(args.get("parent_id") or "0", "parent_id")
        attributes = object_of(args.get("attributes") or {}, "attributes")
        values = values_of(
            (key, attributes[key]) for key in (self._events.used_attributes | {PHASE_NAME}) & attributes.keys()
        )
        self._events.add_span(
            STEP_NAME if name.startswith(STEP_PREFIX) else event_name(name, values),
            start,
            duration,
            (*ids, key_of(args.get("trace_id"))),
            values,
            process=process,
        )

    def _begin(self, event: dict[str, Any]) -> None:
        name, start, category = (
            text_in(event.get("name", ""), "name"),
            nanoseconds(event.get("ts"), "ts"),
            event.get("cat"),
        )
        kind = (KINDS.get(category) if isinstance(category, str) else None) or kind_by_stream(event)
        if self._open_count == _MOST_OPEN:
            self.left_out["slices without end"] += 1
            return
        track = key_of(event.get("pid")), key_of(event.get("tid"))
        self._open.setdefault(track, []).append(_OpenSlice(name[:_LONGEST_NAME], start, 0, track, kind))
        self._open_count += 1

    def _end(self, event: dict[str, Any]) -> None:
        """Ends the slice that began last on the track."""
        end, track = nanoseconds(event.get("ts"), "ts"), (key_of(event.get("pid")), key_of(event.get("tid")))
        if track not in self._open:
            self.left_out["ends of no slice"] += 1
            return
        name, start, _, _, kind = self._open[track].pop()
        self._open_count -= 1
        if not self._open[track]:
            del self._open[track]
        if kind is SliceKind.BESIDE or kind is SliceKind.PROFILER:
            self.left_out[kind.value] += 1
        else:
            self._add_slice(name, start, max(0, end - start), track, kind)

    def _add_slice(self, name: str, start: int, duration: int, track: Track, kind: SliceKind | None) -> None:
        if kind is None:
            is_known = track[0] in self._devices
            if not is_known and self._waiting is not None:
                self._waiting.append(_OpenSlice(name[:_LONGEST_NAME], start, duration, track, None))
                if len(self._waiting) == _MOST_WAITING:
                    self._end_waiting()
                return
            kind = SliceKind.DEVICE if is_known and self._devices[track[0]] else SliceKind.HOST
        self._events.add_slice(name, start, duration, track, kind is SliceKind.DEVICE)

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for waiting_slice in waiting:
            self._add_slice(*waiting_slice)

    def _name_process(self, event: dict[str, Any]) -> None:
        """Notes whether a process is a device. One labelled as CPU and as device counts as CPU: Kineto's device ids may equal pids."""
        kind, args, process = event.get("name"), event.get("args"), key_of(event.get("pid"))
        if not isinstance(kind, str) or kind not in _PROCESS_METADATA or not isinstance(args, dict):
            return
        device_state = is_device(kind, args.get(_PROCESS_METADATA[kind]))
        if device_state is not None and (process in self._devices or len(self._devices) < _MOST_PROCESSES):
            self._devices[process] = device_state and self._devices.get(process, True)


# ---- kinds of slices of a Chrome trace, by category or process ----


class SliceKind(Enum):
    """Kinds of slices; the values are the words in which omitted ones are reported."""

    HOST = "slices of the program"
    DEVICE = "slices of devices"
    BESIDE = "waits and ranges of devices"
    """On a device, but not work of it."""
    PROFILER = "slices of the profiler"


KINDS: dict[str, SliceKind] = {
    **dict.fromkeys(
        (
            *("cpu_op", "user_annotation", "external_correlation", "cpu_instant_event", "python_function"),
            *("cuda_runtime", "cuda_driver", "glow_runtime", "mtia_runtime", "xpu_runtime", "xpu_driver"),
            *("privateuse1_runtime", "privateuse1_driver", "Operator", "Runtime", "module"),
        ),
        SliceKind.HOST,
    ),
    **dict.fromkeys(
        (
            *("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "mtia_insight", "hpu_op", "concurrent_kernel"),
            *("Kernel", "Memcpy", "Memset"),
        ),
        SliceKind.DEVICE,
    ),
    **dict.fromkeys(
        (
            *("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
            *("xpu_sync", "xpu_scope_profiler", "mtia_counters"),
        ),
        SliceKind.BESIDE,
    ),
    **dict.fromkeys(("Trace", "overhead"), SliceKind.PROFILER),
}
"""Kinds by category: Kineto's activity types, its capitalized names until 2022, and those of this package."""

_DEVICE = r"(?:GPU|CUDA|HIP|XPU|NPU|HPU|TPU|IPU|MLU|MTIA|XLA)"
_NAME = re.compile(rf"(?:rank \d+ )?{_DEVICE}(?:[ :]?\d+)?|CUDA functions|/device:(?!CPU).*")


def is_device(kind: str, text: Any) -> bool | None:
    """Whether a process is a device, by its label or its name; None if unknown.

    Kineto gives the processes of devices the program's name, and labels both.
    """
    if not isinstance(text, str):
        return None
    if kind == "process_labels" and text == "CPU":
        return False
    return True if _NAME.fullmatch(text) else None


def kind_by_stream(event: Mapping[str, Any]) -> SliceKind | None:
    """The kind of a slice that is on a stream of a device; None for other slices."""
    args, process = event.get("args"), event.get("pid")
    if isinstance(args, dict) and "stream" in args and "device" in args:
        return SliceKind.DEVICE
    return SliceKind.DEVICE if isinstance(process, str) and _NAME.fullmatch(process) else None
