"""Metadata events and texts that all Chrome JSON of this package uses."""

from __future__ import annotations

import json
from typing import Any

LARGEST_TID = 2**31 - 1
"""Perfetto takes a thread id that does not fit, 0 and -1 for the main thread."""

# Tools lay the traces of several processes side by side by "ts" alone, so processes must count from the same time: the
# start of a week. Counting from 1970 would leave a double (which is how viewers read "ts") steps of 250 ns; within a week
# they are 0.1 ns.
BASE_GRID_NS = 7 * 24 * 3600 * 10**9


def compact(value: Any) -> str:
    """A value as JSON without blanks. Raises ValueError for NaN and infinities, which JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def metadata_event(kind: str, pid: int, tid: int, **args: Any) -> str:
    """JSON of a metadata event, which describes a process or a track."""
    return compact({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def process_events(pid: int, name: str, sort_index: int, labels: str = "") -> list[str]:
    """Name and place of a process, and its labels where there are any."""
    events = [metadata_event("process_name", pid, 0, name=name)]
    if labels:
        events.append(metadata_event("process_labels", pid, 0, labels=labels))
    return [*events, metadata_event("process_sort_index", pid, 0, sort_index=sort_index)]


def track_events(pid: int, tid: int, name: str, sort_index: int) -> list[str]:
    """Name and place of a track."""
    return [
        metadata_event("thread_name", pid, tid, name=valid(name) or f"thread {tid}"),
        metadata_event("thread_sort_index", pid, tid, sort_index=sort_index),
    ]


def window_events(start_ns: int, end_ns: int, base_ns: int) -> list[str]:
    """Kineto's three events of a recording as a whole: a slice of it, and marks through all tracks where it begins and ends."""
    start = f'"ts":{microseconds(start_ns - base_ns)}'
    slice_ = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    begin = {"ph": "i", "s": "g", "name": "Iteration Start: PyTorch Profiler"}
    begin |= {"pid": "Traces", "tid": "Trace PyTorch Profiler"}
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": ""}
    return [
        f'{compact(slice_)[:-1]},{start},"dur":{microseconds(end_ns - start_ns)},"args":{{"Op count":0}}}}',
        f"{compact(begin)[:-1]},{start}}}",
        f'{compact(end)[:-1]},"ts":{microseconds(end_ns - base_ns)}}}',
    ]


def microseconds(nanoseconds: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    sign, size = ("-" if nanoseconds < 0 else ""), abs(nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def valid(text: str) -> str:
    """Text without lone surrogates, which are no valid JSON."""
    return text.encode("utf-8", "replace").decode()
