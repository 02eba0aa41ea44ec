"""A recording as a profile in pprof's format, for ``go tool pprof``, Pyroscope and speedscope: its :mod:`.stack_sums`.

The format: https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._columns.arrays import blocks
from otel_torchprof._columns.phases import PHASES

from .protobuf import TextTable, Varints, message, messages, number
from .stack_sums import SELF_TIME, stack_sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._model.event_table import EventTable

    from .stack_sums import Location, SummedStacks

_SAMPLES = 1 << 13
"""Samples of the profile that are encoded at a time."""


def encode(table: EventTable, window: tuple[int, int]) -> Iterator[bytes]:
    """Yields the pieces of the profile. Costs what :func:`.stack_sums` does.

    Args:
        table: the events.
        window: start and end of the recording, Unix ns.
    """
    sums, texts = stack_sums(table), TextTable()

    def label(key: str, value: str) -> bytes:
        return message(3, number(1, texts.number(key)), number(2, texts.number(value)))

    rank = b"" if table.rank is None else label("rank", str(table.rank))
    labels = [
        (label("step", str(step)) if step >= 0 else b"") + (label("phase", PHASES[phase]) if phase >= 0 else b"") + rank
        for step, phase in sums.labels
    ]
    for part in sums.parts:
        yield from _samples(part, labels)
    types = [message(1, *(number(1 + at, texts.number(text)) for at, text in enumerate(pair))) for pair in sums.types]
    locations = [_location(location, place, texts) for place, location in enumerate(sums.locations, 1)]
    start, end = window
    times = number(9, start), number(10, max(end - start, 0)), number(14, texts.number(SELF_TIME))
    yield b"".join((*types, *locations, *(message(6, text) for text in texts.encoded()), *times))


def _location(location: Location, place: int, texts: TextTable) -> bytes:
    """A location and its function. Without a second name pprof does not take "<built-in" for a template."""
    names = location.name or location.function, location.system_name, location.file
    fields = (number(field, texts.number(text)) for field, text in enumerate(names, 2))
    line = message(4, number(1, place), number(2, location.line))
    return message(5, number(1, place), *fields) + message(4, number(1, place), line)


def _samples(part: SummedStacks, labels: list[bytes]) -> Iterator[bytes]:
    """Yields samples as messages, some at a time: each the locations from the innermost outwards, the values and the labels."""
    for block in blocks(len(part.node), _SAMPLES):
        locations, counts = part.stacks(part.node[block])
        fields = Varints(1, locations + 1, counts), Varints.of_rows(2, part.values[block])
        yield messages(2, fields, labels, part.labels[block])
