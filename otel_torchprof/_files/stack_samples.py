"""Samples of Python stacks in trace files: the attribute ``torch.samples`` of spans."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.samples import Call, Samples

from .records import malformed, object_of
from .values import rounded, text_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Array

MOST_CALLS = 64
"""Innermost calls of a stack that are read."""
LONGEST_TEXT = 1 << 16
"""Most characters of the attribute; this package writes at most 15,000."""
_CALL = re.compile(r"(.*):(\d{1,9}) (.*)", re.DOTALL)
_ENTRY = ("time", "duration", "stack")


class SpanSamples(NamedTuple):
    """The samples of one span."""

    times: Sequence[int]
    """ns since the span began."""
    durations: Sequence[int]
    """ns"""
    indices: Sequence[int]
    """Index of the stack of each."""
    stacks: Sequence[tuple[Call, ...]]


def parsed_samples(value: Any, what: str) -> SpanSamples:
    """Parses the attribute. Raises MalformedError."""
    text = text_in(value, what)
    try:
        given = json.loads(text) if len(text) <= LONGEST_TEXT else None
    except (ValueError, RecursionError):
        given = None
    if given is None:
        raise malformed(text, what, f"a JSON object of at most {LONGEST_TEXT:,} characters")
    given = object_of(given, what)
    stacks, entries = (_list(given.get(key), f"{key} of {what}") for key in ("stacks", "samples"))
    known = [_stack(stack, what) for stack in stacks]
    samples = [_sample(entry, len(known), what) for entry in entries]
    times, durations, indices = zip(*samples, strict=True) if samples else ((), (), ())
    return SpanSamples(times, durations, indices, known)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise malformed(value, what, "a list")
    return value


def _stack(value: Any, what: str) -> tuple[Call, ...]:
    return tuple(_call(text, what) for text in _list(value, f"a stack of {what}")[:MOST_CALLS])


def _call(value: Any, what: str) -> Call:
    match = _CALL.fullmatch(text_in(value, f"a call of {what}"))
    if match is None:
        raise malformed(value, f"a call of {what}", "file:line function")
    file, line, function = match.groups()
    return Call(file, int(line), function)


def _sample(value: Any, stacks: int, what: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != len(_ENTRY):
        raise malformed(value, f"a sample of {what}", f"a list of {', '.join(_ENTRY)}")
    time, duration = (rounded(number, 1e9, f"a time of {what}") for number in value[:2])
    if type(value[2]) is not int or not 0 <= value[2] < stacks or min(time, duration) < 0:
        raise malformed(value[2], f"a sample of {what}", f"times from 0 on, and the index of one of {stacks} stacks")
    return time, duration, value[2]


def samples_of(given: tuple[Integers, Sequence[SpanSamples]] | None, start: Integers, thread: Array) -> Samples | None:
    """The samples of the spans in some rows as one table, in which equal stacks are one; None without any.

    ``start``: of all rows, Unix ns; ``thread``: index of the thread of each, negative: its samples are left out.
    """
    if given is None:
        return None
    rows, spans = given
    known: dict[tuple[Call, ...], int] = {}
    columns: list[list[int]] = [[], [], [], []]
    for span, begin, of_thread in zip(spans, start[rows].tolist(), thread[rows].tolist(), strict=True):
        if of_thread >= 0:
            numbers = [known.setdefault(stack, len(known)) for stack in span.stacks]
            columns[0] += (begin + time for time in span.times)
            columns[1] += span.durations
            columns[2] += (of_thread for _ in span.times)
            columns[3] += (numbers[index] for index in span.indices)
    if not columns[0]:
        return None
    time, duration, of_sample, stack = (np.array(column, np.int64) for column in columns)
    order = np.argsort(time, kind="stable")
    return Samples(time[order], duration[order], of_sample[order], stack[order], list(known))
