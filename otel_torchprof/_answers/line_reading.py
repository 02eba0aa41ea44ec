"""The lines that a loop's thread was in, from the samples and the recorded calls of a recording."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.samples import Call
from otel_torchprof._columns.schema import NEVER, Kind
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.trace_events import TraceEventKind, nested_in, nested_order

from .lines import Lines
from .steps import PAUSES, PLACE_OF, SMALL_OPERATOR, is_operator, phase_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._files.trace_events import TraceEvents

_MOST_NESTED = 1000


def lines_of(
    events: TraceEvents, is_of_loop: Flags, step_of: Callable[[Integers], Integers], own: Integers
) -> tuple[Lines, ...]:
    """The lines of a process: those of samples, and those of recorded calls, as far as there are any.

    Args:
        events: the events of the recording.
        is_of_loop: a mask of the tracks of its loop's thread.
        step_of: gives the index of the step at each time, -1 for none.
        own: the self time of each event, ns.
    """
    found = []
    is_host = (events.kind == TraceEventKind.SPAN) | (events.kind == TraceEventKind.SLICE)
    rows = np.flatnonzero(is_host & is_of_loop[events.track])
    around = _Enclosing(events)
    has_operators = bool(around.is_operator[events.name[rows]].any())
    if events.samples is not None:
        samples = events.samples.chosen(is_of_loop[events.samples.thread])
        if len(samples):
            phase, operator = around.of(_innermost(events, rows, samples.time))
            step = step_of(samples.time)
            if has_operators:  # of steps without details, those in phases of operators may be in operators
                operator = np.where((operator < 0) & ~around.has_details(rows, step_of, step), _UNKNOWN, operator)
            found.append(
                Lines(
                    samples.time,
                    samples.duration / 1e9,
                    step,
                    phase,
                    operator,
                    samples.stack,
                    samples.stacks,
                    events.names,
                    has_operators,
                    is_short=_are_short(events, rows, operator),
                )
            )
    if is_call_of(events)[events.name[rows]].any():
        rows = rows[own[rows] > 0]
        phase, operator = around.of(rows)
        stack, stacks = _stacks(events, rows)
        step, time = step_of(events.start[rows]), events.start[rows]
        found.append(
            Lines(
                time,
                own[rows] / 1e9,
                step,
                phase,
                operator,
                stack,
                stacks,
                events.names,
                has_operators,
                is_sampled=False,
            )
        )
    return tuple(found)


_UNKNOWN = -2
"""In place of an operator: there may be one."""


def _are_short(events: TraceEvents, rows: Integers, operators: Integers) -> Flags:
    """A mask of the names: those of some operators that take little time, as a median."""
    found, names = np.zeros(len(events.names), np.bool_), events.name[rows]
    for number in distinct_values(operators[operators >= 0]).tolist():
        found[number] = np.median(events.duration[rows[names == number]]) <= SMALL_OPERATOR * 1e9
    return found


class _Enclosing:
    """The phases and operators that events are in."""

    def __init__(self, events: TraceEvents) -> None:
        self._events = events
        self._phase = events.of_names(_phase_number, np.int64)
        self.is_operator = events.of_names(is_operator, np.bool_)

    def of(self, rows: Integers) -> tuple[Integers, Integers]:
        """The innermost phase that each event is or is in, and the innermost operator in that phase; -1 for none."""
        phase, operator, rows = np.full(len(rows), -1, np.int64), np.full(len(rows), -1, np.int64), rows.copy()
        for _ in range(_MOST_NESTED):
            active = np.flatnonzero((rows >= 0) & (phase < 0))
            if not active.size:
                break
            names = self._events.name[rows[active]].astype(np.int64)
            is_first = self.is_operator[names] & (operator[active] == -1)
            operator[active[is_first]] = names[is_first]
            phase[active] = self._phase[names]
            rows[active] = self._events.parent[rows[active]]
        return phase, operator

    def has_details(self, rows: Integers, step_of: Callable[[Integers], Integers], steps: Integers) -> Flags:
        """Whether some steps have operators; -1, the time between steps, always has."""
        operators = rows[self.is_operator[self._events.name[rows]]]
        having = distinct_values(step_of(self._events.start[operators]))
        found: Flags = (steps < 0) | np.isin(steps, having)
        return found


def _phase_number(name: str) -> int:
    return PLACE_OF.get(phase_of(name) or PAUSES.get(name, ""), -1)


class _Nested(Protocol):
    """Events, each with the one that it is in."""

    @property
    def start(self) -> Array: ...
    @property
    def duration(self) -> Array: ...
    @property
    def parent(self) -> Array: ...


def _innermost(events: _Nested, rows: Integers, times: Integers) -> Integers:
    """The innermost of some nested events at each time; -1 for none."""
    if not len(rows):
        return np.full(len(times), -1, np.int64)
    start = events.start[rows]
    order = nested_order(np.zeros(len(rows), np.uint8), start, start + events.duration[rows])
    rows = rows if order is None else rows[order]
    place = np.searchsorted(events.start[rows], times, side="right") - 1
    found: Integers = np.where(place >= 0, rows[place], -1)
    for _ in range(_MOST_NESTED):  # ids of a wrong file may be a circle
        event = np.maximum(found, 0)
        has_ended = (found >= 0) & (events.start[event] + events.duration[event] <= times)
        if not has_ended.any():
            return found
        found[has_ended] = events.parent[found[has_ended]]
    return np.where(has_ended, -1, found)


# ---- samples of a drain ----

TAKEN = np.dtype([("time", "i8"), ("duration", "i8"), ("thread", "i8"), ("phase", "i1"), ("stack", "u4")])
"""A sample: Unix ns, ns, ident of its thread, column of the innermost phase (-1 for none), and index of its stack."""
_PLACE_OF_PART = np.full(max(Part) + 1, -1, np.int64)
for _part in Part:
    _PLACE_OF_PART[_part] = PLACE_OF[_part.phase]


class TakenSamples(NamedTuple):
    """The samples of a drain, with the phases that they were taken in."""

    rows: npt.NDArray[Any]
    """Of :data:`TAKEN`."""
    stacks: Sequence[tuple[Call, ...]]


class _Phases(NamedTuple):
    start: Array
    duration: Array
    parent: Array


def taken_samples(batch: Batch) -> TakenSamples | None:
    """The samples of a drain, whose phases have ended in it or are open; None without any. Costs some 100 us."""
    samples, opens = batch.samples, batch.opens
    if samples is None or not len(samples):
        return None
    ended, still = batch.of_kind(Kind.PHASE), np.flatnonzero(opens.kind == Kind.PHASE)
    start, thread, part = (
        np.concatenate((batch[name][ended], of_open[still]))
        for name, of_open in (("start", opens.start), ("thread", opens.thread), ("fwd_thread", opens.fwd_thread))
    )
    duration = np.concatenate((batch["end"][ended], np.full(len(still), NEVER))) - start
    phases = _Phases(start, duration, nested_in(np.arange(len(start)), thread, start, duration))
    found = np.full(len(samples), -1, np.int64)
    for number in distinct_values(samples.thread).tolist():
        here = np.flatnonzero(samples.thread == number)
        inside = _innermost(phases, np.flatnonzero(thread == number), samples.time[here])
        found[here[inside >= 0]] = _PLACE_OF_PART[part[inside[inside >= 0]]]
    rows = np.empty(len(samples), TAKEN)
    rows["time"], rows["duration"], rows["stack"], rows["phase"] = samples.time, samples.duration, samples.stack, found
    rows["thread"] = np.array([thread.ident for thread in batch.threads], np.int64)[samples.thread]
    return TakenSamples(rows, samples.stacks)


# ---- stacks of recorded calls ----

_CALL = re.compile(r"(.+)\((\d{1,9})\): (.+)", re.DOTALL)
_BUILT_IN = "<built-in "


def is_call(name: str) -> bool:
    """Whether an event is a recorded call, by its name."""
    return name.startswith(_BUILT_IN) or ("): " in name and bool(_CALL.fullmatch(name)))


def is_call_of(events: TraceEvents) -> Flags:
    """A mask of the names that are recorded calls."""
    return events.of_names(is_call, np.bool_)


def calls_in(events: TraceEvents) -> Integers:
    """For each event that is a recorded call, the nearest event around it that is none; -1 without, and of other events."""
    calls = is_call_of(events)[events.name]
    if not calls.any():
        return np.full(len(events), -1, np.int64)
    return np.where(calls, nearest(events.parent, ~calls), -1)


def nearest(parent: Array, is_wanted: Flags) -> Integers:
    """The nearest ancestor of each row that is wanted; -1 for none."""
    found: Integers = np.append(parent, -1).astype(np.int64)
    wanted = np.append(is_wanted, True)
    for _ in range(_MOST_NESTED.bit_length()):
        passed = np.flatnonzero(~wanted[found])
        if not passed.size:
            return found[:-1]
        found[passed] = found[found[passed]]
    return np.where(wanted[found], found, -1)[:-1]


def _stacks(events: TraceEvents, rows: Integers) -> tuple[Integers, list[tuple[Call, ...]]]:
    """For each event, the stack of recorded calls that it is or is in, an index into the stacks."""
    calls = is_call_of(events)[events.name]
    outer = nearest(events.parent, calls)
    of_names = _calls_by_name(events)
    stacks: list[tuple[Call, ...]] = [()]
    found = np.where(calls, -1, 0)  # of each call: its stack, -1 while it is not known
    found = np.append(found, 0)
    pending = np.flatnonzero(calls)
    for _ in range(_MOST_NESTED):
        ready = found[outer[pending]] >= 0
        if not pending.size or not ready.any():
            break
        chosen = pending[ready]
        keys = found[outer[chosen]].astype(np.int64) * len(events.names) + events.name[chosen]
        distinct, places_of = np.unique(keys, return_inverse=True)
        found[chosen] = len(stacks) + places_of
        outers, names = np.divmod(distinct, len(events.names))
        stacks += [(of_names[name], *stacks[at]) for at, name in zip(outers.tolist(), names.tolist(), strict=True)]
        pending = pending[~ready]
    of_rows = np.where(calls[rows], rows, outer[rows])
    return np.maximum(found[of_rows], 0), stacks


def _calls_by_name(events: TraceEvents) -> dict[int, Call]:
    """The calls of the names that are recorded calls, with the path of their file where the events have it."""
    rows, values = events.attributes.get(attribute_keys.FILE, (np.empty(0, np.int64), ()))
    numbers, first = np.unique(events.name[rows], return_index=True)
    paths: dict[int, Any] = {number: values[at] for number, at in zip(numbers.tolist(), first.tolist(), strict=True)}
    found = {}
    for number in np.flatnonzero(is_call_of(events)).tolist():
        name = events.names[number]
        match = _CALL.fullmatch(name)
        if name.startswith(_BUILT_IN) or match is None:
            found[number] = Call("<built-in>", 0, name)
        else:
            file, line, function = match.groups()
            found[number] = Call(str(paths.get(number, file)), int(line), function)
    return found
