"""The requests of a service as a series for pictures: a recording without steps has a trace for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files.trace_events import TraceEventKind
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.step_spans import JOB_NAME

from .line_reading import nearest
from .step_series import MOST_BARS

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Floats, Integers
    from otel_torchprof._files.trace_events import TraceEvents

_FEWEST = 3
_SLOWER = 3.0
"""A request is slow from so many medians of those of its name on: they differ more than steps do."""
_MOST_LISTED = 8
_NO_REQUESTS = frozenset((JOB_NAME, OPERATORS_NAME))


def request_series(events: TraceEvents) -> dict[str, Any] | None:
    """The traces of a recording in the form of :func:`~.step_series.step_series`, and its slowest; None for fewer than three.

    A trace is named after its longest root. Its phases are the outermost ones. Of many traces, neighbours share a bar.
    Costs some 100 ns per event.
    """
    if len(events.traces) < _FEWEST:
        return None
    rows = np.flatnonzero(events.kind == TraceEventKind.SPAN)
    trace, start = events.trace[rows].astype(np.int64), events.start[rows]
    first, last = np.full(len(events.traces), np.iinfo(np.int64).max), np.zeros(len(events.traces), np.int64)
    np.minimum.at(first, trace, start)
    np.maximum.at(last, trace, start + events.duration[rows])
    name = _roots(events, rows)
    is_other = np.array([each in _NO_REQUESTS for each in events.names], np.bool_)
    of_trace = np.array([each is not None for each in events.traces], np.bool_)
    chosen = np.flatnonzero(of_trace & (name >= 0) & ~is_other[name] & (last > first))
    if len(chosen) < _FEWEST:
        return None
    chosen = chosen[np.argsort(first[chosen], kind="stable")]
    seconds = (last - first)[chosen] / 1e9
    median = _medians(name[chosen], seconds)
    slow, slowest = seconds >= _SLOWER * median, np.argsort(-seconds / median, kind="stable")[:_MOST_LISTED]
    each = -(-len(chosen) // MOST_BARS)
    firsts = np.arange(0, len(chosen), each)
    sizes = np.diff(np.append(firsts, len(chosen)))

    def means(values: Integers) -> list[int]:
        found: list[int] = np.rint(np.add.reduceat(values / 1e3, firsts) / sizes).astype(np.int64).tolist()
        return found

    phases = {phase: column[chosen] for phase, column in _phases(events, rows).items() if column[chosen].any()}
    rest = np.maximum((last - first)[chosen] - sum(phases.values(), np.zeros(len(chosen), np.int64)), 0)
    return {
        "name": "requests",
        "count": len(chosen),
        "steps": each,
        "number": firsts.tolist(),
        "start": ((first[chosen][firsts] - first[chosen][0]) // 1000).tolist(),
        "duration": means((last - first)[chosen]),
        "longest": np.rint(np.maximum.reduceat(seconds, firsts) * 1e6).astype(np.int64).tolist(),
        "phases": {phase: means(column) for phase, column in {**phases, "other": rest}.items() if column.any()},
        "slow": np.add.reduceat(slow.astype(np.int64), firsts).tolist(),
        "median": round(float(np.median(seconds)) * 1e6),
        "pauses": {},
        "slowest": [
            [at, events.names[name[chosen[at]]], str(events.traces[chosen[at]]), seconds[at], seconds[at] / median[at]]
            for at in slowest.tolist()
            if slow[at]
        ],
    }


def _roots(events: TraceEvents, rows: Integers) -> Integers:
    """The name of the longest span without a parent of each trace; -1 for none."""
    roots = rows[events.parent[rows] < 0]
    roots = roots[np.argsort(events.duration[roots], kind="stable")]
    name = np.full(len(events.traces), -1, np.int64)
    name[events.trace[roots]] = events.name[roots]  # the last one counts
    return name


def _medians(name: Integers, seconds: Floats) -> Floats:
    """For each request the median of those of its name."""
    order = np.lexsort((seconds, name))
    begins = np.flatnonzero(np.append([True], np.diff(name[order]) != 0))
    counts = np.diff(np.append(begins, len(name)))
    middles = [seconds[order[begins + (counts - back) // 2]] for back in (0, 1)]
    found = np.empty(len(name))
    found[order] = np.repeat((middles[0] + middles[1]) / 2, counts)
    return found


def _phases(events: TraceEvents, rows: Integers) -> dict[str, Integers]:
    """By phase, the time that each trace is in it, ns; without those inside of others."""
    is_phase = events.named(lambda name: name.startswith(PHASE_PREFIX))
    rows = rows[is_phase[rows]]
    rows = rows[nearest(events.parent, is_phase)[rows] < 0]
    found: dict[str, Integers] = {}
    for number in distinct_values(events.name[rows]).tolist():
        of_name = rows[events.name[rows] == number]
        found[events.names[number].removeprefix(PHASE_PREFIX)] = time = np.zeros(len(events.traces), np.int64)
        np.add.at(time, events.trace[of_name], events.duration[of_name])
    return found
