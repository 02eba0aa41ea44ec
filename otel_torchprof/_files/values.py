"""Parses and checks values of trace files: times, ids, keys, texts, and the span attributes that readers use."""

from __future__ import annotations

import json
import re
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import MFU

from .attribute_keys import AVERAGES, COLLECTIVES, DURATIONS, FLOPS, INSTANCE, LINKS, RANK, TEXTS, UNFINISHED
from .records import malformed, object_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

LARGEST_NUMBER = 1 << 61
"""Largest number of nanoseconds: the sum of two fits in 64 bits."""
_LARGEST_TIME = Decimal(LARGEST_NUMBER // 1000)
"""The same in microseconds."""
_LONGEST_KEY = 64
"""Most characters of keys of tracks and traces."""
_OF_ENTRY = ("group", "number", "begin", "end")
_LONGEST_LIST = 4096
"""Most characters of a JSON list in an attribute; this package writes at most 1,279."""
_NUMBERS = frozenset((int, Decimal))
_KEYS = frozenset((int, float, Decimal, bool, type(None)))
_NUMBER = re.compile(r"[-+]?(?:\d{1,20}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,2})?")
"""Matches a number in a text."""
_THOUSAND = Decimal(1000)
_multiplied = Context(prec=64, traps=[]).multiply
"""Multiplies in a fixed context, independent of the program's."""


class StepAverage(NamedTuple):
    """Sums over the events of one name in a step, from the attribute ``torch.averages``."""

    name: str
    calls: int
    self_seconds: float
    in_data: bool
    """Whether they are in the phase in which the loop waits for data."""


def nanoseconds(value: Any, what: str) -> int:
    """Converts microseconds of a Chrome trace to nanoseconds, exactly. Raises MalformedError."""
    number = Decimal(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if type(number) in _NUMBERS and -_LARGEST_TIME < number < _LARGEST_TIME:
        converted: int = round(_multiplied(number, _THOUSAND) if type(number) is Decimal else number * 1000)
        return converted
    raise malformed(value, what, f"a number up to {_LARGEST_TIME}")


def values_of(attributes: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """Parses attributes: as numbers, short texts and lists. Raises MalformedError."""
    return {key: _reader_of(key)(value, key) for key, value in attributes}


def _reader_of(key: str) -> Callable[[Any, str], Any]:
    if key in DURATIONS:
        return _seconds
    return _short_text if key in TEXTS else _READERS.get(key, whole)


def _short_text(value: Any, what: str) -> str:
    return text_in(value, what)[:_LONGEST_KEY]


def _links(value: Any, what: str) -> list[str]:
    """Parses ids of spans: of each, ``trace/span`` in hexadecimal digits."""
    return text_in(value, what).lower().split()


def _flag(value: Any, _what: str) -> bool:
    return bool(value)


def _flops(value: Any, _what: str) -> int:
    """Parses a number of operations; -1 for other values, which are as none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 1 << 63 else -1


def _averages(value: Any, what: str) -> list[StepAverage]:
    return [
        StepAverage(
            text_in(entry.get("name"), "name"),
            whole(entry.get("count"), "count"),
            _seconds(entry.get("self"), "self"),
            entry.get("phase") == "data",
        )
        for entry in (object_of(item, what) for item in _list(value, what))
    ]


def _collectives(value: Any, what: str) -> list[tuple[str, int, int, int]]:
    """Parses a list of group, number, begin and end, the last two in ns."""
    collectives = []
    for entry in _list(value, what):
        if not isinstance(entry, list) or len(entry) != len(_OF_ENTRY):
            raise malformed(entry, what, f"lists of {', '.join(_OF_ENTRY)}")
        group, number, *times = entry
        begin, end = (rounded(time, 1e3, what) for time in times)
        collectives.append((text_in(group, what)[:_LONGEST_KEY], whole(number, what), begin, end))
    return collectives


def _list(value: Any, what: str) -> list[Any]:
    """Parses a JSON list."""
    text = text_in(value, what)
    try:
        items = json.loads(text) if len(text) <= _LONGEST_LIST else None
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list):
        raise malformed(text, what, f"a JSON list of at most {_LONGEST_LIST:,} characters")
    return items


def _seconds(value: Any, what: str) -> float:
    return max(0, rounded(value, 1e9, what)) / 1e9


def rounded(value: Any, scale: float, what: str) -> int:
    """Parses a number of seconds or of others, as a whole number of its ``scale``-th parts. Raises MalformedError."""
    try:
        number = round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a number") from None
    if abs(number) > LARGEST_NUMBER:
        raise malformed(value, what, f"at most {LARGEST_NUMBER / scale:.0f}")
    return number


def whole(value: Any, what: str) -> int:
    """Parses an integer from 0 on, also from a text: protobuf writes 64-bit numbers as texts into JSON. Raises MalformedError."""
    try:
        number = int(float(value) if type(value) is Decimal else value)  # an int of any exponent would be too large
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a whole number") from None
    if not 0 <= number <= LARGEST_NUMBER:
        raise malformed(value, what, f"a number from 0 to {LARGEST_NUMBER}")
    return number


def check_event(event: Any) -> None:
    """Raises MalformedError if an event of a Chrome trace has a value that makes it unusable."""
    event = object_of(event, "event")
    text_in(event.get("name", ""), "name")
    args = object_of(event.get("args") or {}, "args")
    nanoseconds(event.get("ts"), "ts")
    nanoseconds(event.get("dur", 0), "dur")
    id_in(args.get("span_id", "0"), "span_id")
    id_in(args.get("parent_id") or "0", "parent_id")


def id_in(value: Any, what: str) -> int:
    """Parses the id of a span. Raises MalformedError."""
    try:
        number = int(value, 16)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 1 << 64:
        raise malformed(value, what, "16 hexadecimal digits")
    return number


def text_in(value: Any, what: str) -> str:
    """Returns the value; raises MalformedError if it is no text."""
    if not isinstance(value, str):
        raise malformed(value, what, "a text")
    return value


def key_of(value: Any) -> Any:
    """A hashable key of a track or trace, shortened; None for values of other types."""
    if type(value) in _KEYS:
        return value
    return value[:_LONGEST_KEY] if isinstance(value, str) else None


def process_of(attributes: Mapping[str, Any]) -> Hashable:
    """The key of a process, from the attributes of its resource."""
    return key_of(attributes.get(INSTANCE)), key_of(attributes.get(RANK))


_READERS: dict[str, Callable[[Any, str], Any]] = {
    UNFINISHED: _flag,
    AVERAGES: _averages,
    COLLECTIVES: _collectives,
    FLOPS: _flops,
    LINKS: _links,
    MFU: _seconds,
}
"""Parsers of attributes that are neither durations, texts nor integers."""
