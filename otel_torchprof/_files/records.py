"""What readers of trace files share: members of documents, attributes of OTLP, and errors of what is malformed."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BASE_TIME = "baseTimeNanoseconds"
"""The member of a Chrome trace's document with its time base."""
MEMBERS = frozenset(("distributedInfo", "otherData", BASE_TIME))
"""Members of it that are used."""
DESCRIPTIONS = frozenset(
    (
        *("schemaVersion", "displayTimeUnit", "deviceProperties", "traceName", "trace_id", "host_name"),
        *("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"),
    )
)
"""Members that describe the recording; they contain no events and are ignored."""
NO_SPAN = "{!r} is a trace without a span; nothing is to be shown"


class MalformedError(ValueError):
    """A record is malformed; later records can still be read."""


def check_can_be_read_twice(path: str) -> None:
    """Raises TorchProfError for a pipe or a device."""
    if Path(path).is_fifo() or Path(path).is_char_device():
        raise TorchProfError(
            f"cannot read {path!r}: it is a pipe or a device, and is read twice; write it to a file first"
        )


def check_given_once(paths: Sequence[str]) -> None:
    """Raises TorchProfError if two paths are the same file."""
    files = [os.path.realpath(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            raise TorchProfError(f"{path!r} is given twice: give each file once")


_WHOLE = re.compile(r"-?[0-9]{1,19}")


def json_attributes(parent: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the attributes of an OTLP/JSON object."""
    for attribute in objects(parent, "attributes"):
        key = attribute.get("key")
        if isinstance(key, str):
            kind, value = next(iter(object_of(attribute.get("value"), key).items()), ("", 0))
            is_number = (
                kind == "intValue" and isinstance(value, str) and _WHOLE.fullmatch(value)
            )  # as protobuf writes it
            yield key, int(value) if is_number else value


def protobuf_attributes(parent: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the attributes of a message."""
    for attribute in parent.attributes:
        yield attribute.key, getattr(attribute.value, attribute.value.WhichOneof("value") or "int_value")


def object_of(value: Any, what: str) -> dict[str, Any]:
    """Returns the value; raises MalformedError if it is no object."""
    if not isinstance(value, dict):
        raise malformed(value, what, "an object")
    return value


def objects(parent: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a member that is a list. Raises MalformedError."""
    items = parent.get(name) or []
    if not isinstance(items, list):
        raise malformed(items, name, "a list")
    for item in items:
        yield object_of(item, name)


def malformed(value: Any, what: str, expected: str) -> MalformedError:
    """The error for an unexpected value."""
    displayed = (
        repr(value[:30])
        if isinstance(value, str)
        else str(value)[:30]
        if isinstance(value, float | bool | Decimal)
        else ""
    )
    return MalformedError(f"{what} is {displayed or 'of type ' + type(value).__name__}, expected {expected}")
