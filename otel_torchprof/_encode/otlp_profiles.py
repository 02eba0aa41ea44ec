"""A recording as OTLP profiles, ``v1development``: one ``ProfilesData`` message with its :mod:`.stack_sums`.

The file can be posted to ``/v1development/profiles`` as it is. A profile has one type of values, so there is one for each, all with the
stacks of one dictionary; that of self times is the first, which programs display. The format may still change:
https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/profiles/v1development/profiles.proto
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.arrays import blocks
from otel_torchprof._columns.phases import PHASE_NAME, PHASES
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.span_table import STEP_NUMBER

from .otlp import request_parts
from .protobuf import TextTable, Varints, message, messages, number, tag, varint
from .stack_sums import stack_sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._model.event_table import EventTable

    from .stack_sums import Integers, Location, SummedStacks

SpanIds = tuple[bytes, bytes]
"""Trace and span id."""
_BLOCK = 1 << 13
"""Messages that are encoded at a time."""


class _ProfilesTable(enum.IntEnum):
    """Fields of ``ProfilesDictionary``. The first entry of each is empty."""

    MAPPING, LOCATION, FUNCTION, LINK, TEXT, ATTRIBUTE, STACK = range(1, 8)


def encode(
    table: EventTable,
    window: tuple[int, int],
    spans: Mapping[int, SpanIds],
    resource: Resource,
    scope: InstrumentationScope,
) -> Iterator[bytes]:
    """Yields the pieces of the message. Costs what :func:`.stack_sums` does.

    Args:
        table: the events.
        window: start and end of the recording, Unix ns.
        spans: of each step by its number; -1: of what is in no step. Samples of steps without one have no link.
        resource: of the process.
        scope: of this package.
    """
    sums, known = stack_sums(table), _Dictionary()
    labels = [known.labels(*pair, spans.get(pair[0])) for pair in sums.labels]
    frames = [known.location(location) for location in sums.locations]
    stacks: list[bytes] = []
    indices: list[Integers] = []
    for part in sums.parts:
        used, at = distinct(part.node + 1)  # 0: the stack without calls, which is the first one
        indices.append(np.where(part.node < 0, 0, known.stacks + at + int(used[:1].any())))
        stacks += _stacks(part, used[used > 0] - 1)
        known.stacks += int((used > 0).sum())
    start, end = window
    times = tag(3, 1) + (start % (1 << 64)).to_bytes(8, "little"), number(4, max(end - start, 0))
    profiles = []
    for place, pair in reversed([*enumerate(sums.types)]):
        kind = message(1, *(number(field, known.texts.number(text)) for field, text in enumerate(pair, 1)))
        samples = (_samples(*each, place, labels) for each in zip(sums.parts, indices, strict=True))
        profiles.append(message(2, kind, *times, *(piece for pieces in samples for piece in pieces)))
    parts = request_parts(resource, scope)
    of_scope = message(1, parts.scope), *profiles, message(3, parts.scope_schema_url)
    yield message(1, message(1, parts.resource), message(2, *of_scope), message(3, parts.resource_schema_url))
    yield message(2, *known.tables(), *frames, *stacks)


def _stacks(part: SummedStacks, nodes: Integers) -> Iterator[bytes]:
    """Yields the stacks of nodes, some at a time, each with its locations from the innermost outwards."""
    for block in blocks(len(nodes), _BLOCK):
        locations, counts = part.stacks(nodes[block])
        yield messages(_ProfilesTable.STACK, [Varints(1, locations + 1, counts)])


def _samples(part: SummedStacks, stack: Integers, place: int, labels: Sequence[bytes]) -> Iterator[bytes]:
    """Yields the samples with values of a type, some at a time."""
    chosen = np.flatnonzero(part.values[:, place])
    for block in blocks(len(chosen), _BLOCK):
        rows = chosen[block]
        fields = Varints(1, stack[rows]), Varints.of_rows(4, part.values[rows, place : place + 1])
        yield messages(2, fields, labels, part.labels[rows])


class _Dictionary:
    """The tables that samples refer to, apart from locations and stacks. Not thread-safe."""

    def __init__(self) -> None:
        self.texts = TextTable()
        self.stacks = 0
        """Number of stacks with calls so far."""
        self._functions: dict[tuple[str, str], int] = {}
        self._links: dict[SpanIds, int] = {}
        self._attributes: dict[bytes, int] = {}

    def labels(self, step: int, phase: int, span: SpanIds | None) -> bytes:
        """Attributes and link of a sample."""
        attributes = []
        if step >= 0:
            attributes.append(self._attribute(STEP_NUMBER, number(3, step)))
        if phase >= 0:
            attributes.append(self._attribute(PHASE_NAME, message(1, PHASES[phase].encode())))
        indices = message(2, *map(varint, attributes))
        return indices if span is None else indices + number(3, self._links.setdefault(span, len(self._links) + 1))

    def location(self, location: Location) -> bytes:
        """An entry of the table of locations."""
        function = self._functions.setdefault((location.function, location.file), len(self._functions) + 1)
        line = message(3, number(1, function), number(2, location.line))
        if not location.file:
            return message(_ProfilesTable.LOCATION, line)
        attribute = self._attribute("profile.frame.type", message(1, b"cpython"))
        return message(_ProfilesTable.LOCATION, line, message(4, varint(attribute)))

    def _attribute(self, key: str, value: bytes) -> int:
        """Index of an attribute with a serialized ``AnyValue``."""
        entry = number(1, self.texts.number(key)) + message(2, value)
        return self._attributes.setdefault(entry, len(self._attributes) + 1)

    def tables(self) -> Iterator[bytes]:
        """Yields the tables, with the first entries of all."""
        yield from (message(table) for table in _ProfilesTable if table is not _ProfilesTable.TEXT)
        for function, file in self._functions:
            texts = number(1, self.texts.number(function)), number(3, self.texts.number(file))
            yield message(_ProfilesTable.FUNCTION, *texts)
        yield from (message(_ProfilesTable.LINK, message(1, trace), message(2, span)) for trace, span in self._links)
        yield from (message(_ProfilesTable.ATTRIBUTE, entry) for entry in self._attributes)
        yield from (message(_ProfilesTable.TEXT, text) for text in self.texts.encoded())
