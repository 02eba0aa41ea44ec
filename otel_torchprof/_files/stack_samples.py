"""Samples of Python stacks in trace files: the attribute ``torch.samples`` of spans, and V8's chunks in Chrome traces of profiles."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.samples import MOST_CALLS, Call, Samples

from .records import malformed, object_of, objects
from .values import LARGEST_NUMBER, rounded, text_in, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Array

LONGEST_TEXT = 1 << 16
"""Most characters of the attribute; this package writes at most 15,000."""
_MOST_STACKS = 1024
_MOST_IN_ALL = MOST_CALLS * 512
"""Most calls of the different stacks of an attribute: calls that stacks share are a number in the text, so that a short one may stand for many."""
_MOST_IN_FILE = 1 << 22
"""Most calls of the different stacks of a file: a node of a chunk is one call, and a stack of up to 64."""
_CALL = re.compile(r"(.*):(\d{1,9}) (.*)", re.DOTALL)
_FRAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_LATEST = LARGEST_NUMBER // 1000
_ENTRY = ("time", "duration", "stack")


class SpanSamples(NamedTuple):
    """The samples of one span, or of one chunk."""

    times: Sequence[int]
    """ns since it began."""
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
    stacks = stacks[:_MOST_STACKS]
    samples = [_sample(entry, len(stacks), what) for entry in entries]
    times, durations, indices = zip(*samples, strict=True) if samples else ((), (), ())
    number_of, known = _different(stacks, set(indices), what)
    return SpanSamples(times, durations, [number_of[index] for index in indices], known)


def _different(stacks: Sequence[Any], used: set[int], what: str) -> tuple[dict[int, int], list[tuple[Call, ...]]]:
    """The different ones of the used stacks, and which of them each used one is."""
    before: tuple[Call, ...] = ()
    numbers: dict[tuple[Call, ...], int] = {}
    number_of, total = {}, 0
    for index, stack in enumerate(stacks):
        before = _stack(stack, before, what)
        if index in used:
            total += 0 if before in numbers else len(before)
            number_of[index] = numbers.setdefault(before, len(numbers))
            if total > _MOST_IN_ALL:
                raise malformed(stacks, f"stacks of {what}", f"at most {_MOST_IN_ALL:,} calls in all")
    return number_of, list(numbers)


CHUNK = "ProfileChunk"
"""The key of a chunk of samples, among attributes of rows."""


def parsed_chunk(value: Any, what: str) -> SpanSamples:
    """Parses the data of a chunk. Raises MalformedError."""
    data = object_of(value, what)
    profile = object_of(data.get("cpuProfile"), f"cpuProfile of {what}")
    nodes: dict[int, tuple[Call, ...]] = {}
    for node in objects(profile, "nodes"):
        above = nodes.get(whole(node.get("parent", 0), "parent"), ())
        nodes[whole(node.get("id"), "id")] = (_framed(node, what), *above)[:MOST_CALLS]
    leaves, deltas, durations = (
        [whole(number, f"{key} of {what}") for number in _list(given.get(key), f"{key} of {what}")]
        for given, key in ((profile, "samples"), (data, "timeDeltas"), (data, "durations"))
    )
    if not len(leaves) == len(deltas) == len(durations):
        raise malformed(leaves, f"samples of {what}", "as many as timeDeltas and durations")
    known = {leaf: index for index, leaf in enumerate(dict.fromkeys(leaves))}
    times, durations = (
        [min(number, _LATEST) * 1000 for number in numbers] for numbers in (accumulate(deltas), durations)
    )
    return SpanSamples(times, durations, [known[leaf] for leaf in leaves], [nodes.get(leaf, ()) for leaf in known])


def within_room(parsed: Iterable[Any], what: str) -> list[Any]:
    """What was parsed, equal stacks once; and an error instead of samples with which the calls of a file are too many."""
    known: dict[tuple[Call, ...], tuple[Call, ...]] = {}
    total, found = 0, []
    for value in parsed:
        if not isinstance(value, SpanSamples):
            found.append(value)
            continue
        more = sum(len(stack) for stack in dict.fromkeys(value.stacks) if stack not in known)
        if total + more > _MOST_IN_FILE:
            found.append(malformed(total + more, f"calls of {what}", f"at most {_MOST_IN_FILE:,} calls in all"))
        else:
            total += more
            found.append(value._replace(stacks=[known.setdefault(stack, stack) for stack in value.stacks]))
    return found


def _framed(node: dict[str, Any], what: str) -> Call:
    """The call of a node, by the name of its frame."""
    name = object_of(node.get("callFrame"), f"callFrame of {what}").get("functionName")
    return _matched(_FRAME, name, f"functionName of {what}", "file(line): function")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise malformed(value, what, "a list")
    return value


def _stack(value: Any, before: tuple[Call, ...], what: str) -> tuple[Call, ...]:
    """The calls of a stack; a number at its end stands for so many outer calls of the stack before."""
    calls = _list(value, f"a stack of {what}")[: MOST_CALLS + 1]
    shared = calls.pop() if calls and type(calls[-1]) is int else 0
    if not 0 <= shared <= len(before):
        raise malformed(shared, f"a stack of {what}", f"at most {len(before)} calls of the stack before")
    return (*(_call(text, what) for text in calls), *before[len(before) - shared :])[:MOST_CALLS]


def _call(value: Any, what: str) -> Call:
    return _matched(_CALL, value, f"a call of {what}", "file:line function")


def _matched(pattern: re.Pattern[str], value: Any, what: str, expected: str) -> Call:
    match = pattern.fullmatch(text_in(value, what))
    if match is None:
        raise malformed(value, what, expected)
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
