"""What the values in trace files may be: times, ids, keys, texts, and the attributes of spans that readers look at."""

from __future__ import annotations

import json
import re
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import PHASE_NAME, PHASE_PREFIX

from .attribute_keys import AVERAGES, COLLECTIVES, DURATIONS, TEXTS, UNFINISHED
from .records import malformed, object_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LARGEST_NUMBER = 1 << 61
"""Of nanoseconds: sums of two are 64-bit numbers."""
_LARGEST_TIME = Decimal(LARGEST_NUMBER // 1000)
"""Microseconds."""
_LONGEST_KEY = 64
"""Characters of what tells tracks and traces apart."""
_OF_ENTRY = ("group", "number", "begin", "end")
_LONGEST_LIST = 4096
"""Characters. This package writes 1,279 at most."""
_NUMBERS = frozenset((int, Decimal))
_KEYS = frozenset((int, float, Decimal, bool, type(None)))
_NUMBER = re.compile(r"[-+]?(?:\d{1,20}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,2})?")
"""In a text."""
_THOUSAND = Decimal(1000)
_multiplied = Context(prec=64, traps=[]).multiply
"""Whatever context the program has set."""


class StepAverage(NamedTuple):
    """What the events of one name took in a step that has no others of it: of the attribute ``torch.averages``."""

    name: str
    calls: int
    self_seconds: float
    in_data: bool
    """Whether the loop waited for data meanwhile."""


def nanoseconds(value: Any, what: str) -> int:
    """Microseconds of a Chrome trace, to the nanosecond: a double has no room for those since 1970. Raises MalformedError."""
    number = Decimal(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if type(number) in _NUMBERS and -_LARGEST_TIME < number < _LARGEST_TIME:
        found: int = round(_multiplied(number, _THOUSAND) if type(number) is Decimal else number * 1000)
        return found
    raise malformed(value, what, f"a number up to {_LARGEST_TIME}")


def values_of(attributes: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """The attributes that are looked at, as numbers that can be added up, as short texts, and as lists of what is in them."""
    return {key: _reader_of(key)(value, key) for key, value in attributes}


def event_name(name: str, attributes: Mapping[str, Any]) -> str:
    """The name of the event that a span is of: a call of ``generate`` is a phase, whose span is named as the conventions say."""
    phase = attributes.get(PHASE_NAME)
    return name if phase is None else f"{PHASE_PREFIX}{phase}"


def _reader_of(key: str) -> Callable[[Any, str], Any]:
    if key in DURATIONS:
        return _seconds
    return _short_text if key in TEXTS else _READERS.get(key, whole)


def _short_text(value: Any, what: str) -> str:
    return text_in(value, what)[:_LONGEST_KEY]


def _flag(value: Any, _what: str) -> bool:
    return bool(value)


def _averages(value: Any, what: str) -> list[StepAverage]:
    return [
        StepAverage(
            text_in(entry.get("name"), "name"),
            whole(entry.get("count"), "count"),
            _seconds(entry.get("self"), "self"),
            entry.get("phase") == "data",
        )
        for entry in (object_of(each, what) for each in _list(value, what))
    ]


def _collectives(value: Any, what: str) -> list[tuple[str, int, int, int]]:
    """Group, number, begin and end; the last two in ns."""
    found = []
    for entry in _list(value, what):
        if not isinstance(entry, list) or len(entry) != len(_OF_ENTRY):
            raise malformed(entry, what, f"lists of {', '.join(_OF_ENTRY)}")
        group, number, *times = entry
        begin, end = (_rounded(time, 1e3, what) for time in times)
        found.append((text_in(group, what)[:_LONGEST_KEY], whole(number, what), begin, end))
    return found


def _list(value: Any, what: str) -> list[Any]:
    """Of a text in JSON."""
    text = text_in(value, what)
    try:
        found = json.loads(text) if len(text) <= _LONGEST_LIST else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise malformed(text, what, f"a JSON list of at most {_LONGEST_LIST:,} characters")
    return found


def _seconds(value: Any, what: str) -> float:
    return max(0, _rounded(value, 1e9, what)) / 1e9


def _rounded(value: Any, scale: float, what: str) -> int:
    try:
        found = round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a number") from None
    if abs(found) > LARGEST_NUMBER:
        raise malformed(value, what, f"at most {LARGEST_NUMBER / scale:.0f}")
    return found


def whole(value: Any, what: str) -> int:
    """A number from 0 on; protobuf writes those of 64 bits as texts into JSON."""
    try:
        found = int(float(value) if type(value) is Decimal else value)  # an int of any exponent would be too large
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a whole number") from None
    if not 0 <= found <= LARGEST_NUMBER:
        raise malformed(value, what, f"a number from 0 to {LARGEST_NUMBER}")
    return found


def id_in(value: Any, what: str) -> int:
    """The id of a span."""
    try:
        found = int(value, 16)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < 1 << 64:
        raise malformed(value, what, "16 hexadecimal digits")
    return found


def text_in(value: Any, what: str) -> str:
    """The value, which has to be a text."""
    if not isinstance(value, str):
        raise malformed(value, what, "a text")
    return value


def key_of(value: Any) -> Any:
    """What may tell tracks, or traces, apart."""
    if type(value) in _KEYS:
        return value
    return value[:_LONGEST_KEY] if isinstance(value, str) else None


_READERS: dict[str, Callable[[Any, str], Any]] = {
    UNFINISHED: _flag,
    AVERAGES: _averages,
    COLLECTIVES: _collectives,
}
"""Of attributes that are neither durations, nor texts, nor whole numbers."""
