"""A recording as a profile in pprof's format: sums by call stack, for ``go tool pprof``, Pyroscope and speedscope.

A stack has modules, operators, labels, Python calls and kernels. Samples of Python stacks are stacks of their own, with values of their own,
so that no time is counted twice. The format: https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import blocks
from otel_torchprof._columns.phases import PHASES
from otel_torchprof._model.averages import grouped
from otel_torchprof._model.call_tree import paths_of
from otel_torchprof._model.frames import CALL, distinct
from otel_torchprof._model.paths import event_amounts, event_parents
from otel_torchprof._model.tree import display_name

from .protobuf import message, number, put_pieces, put_varints, starts_of, tag, varint_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._columns.samples import Samples
    from otel_torchprof._model.event_table import EventTable

Integers = npt.NDArray[np.int64]

SELF_TIME = "time"
"""Type of the values that programs show first: some those that the file names, others, such as speedscope, the last ones."""
SAMPLED = (("samples", "count"), ("sampled", "nanoseconds"))
"""Type and unit of the values of sampled stacks, if there are any."""
VALUES = {"allocated": "bytes", "flops": "count", "device": "nanoseconds", "calls": "count", SELF_TIME: "nanoseconds"}
"""Types and units of the values of calls; the first three only if there are any."""
_ALWAYS = ("calls", SELF_TIME)
_SAMPLES = 1 << 13
"""Samples of the profile that are encoded at a time."""


class _PprofSamples(NamedTuple):
    """Samples of the profile."""

    node: Integers
    """The innermost call of each, a number in a tree of calls."""
    values: Integers
    """A row of values each."""
    labels: Integers
    """Number of its labels."""


class _CallTree(NamedTuple):
    """A tree of calls, by number."""

    parent: Integers
    """-1 for none."""
    location: Integers


def encode(table: EventTable, window: tuple[int, int]) -> Iterator[bytes]:
    """Yields the pieces of the profile. Costs some 0.7 us per event, most of it per different stack, step and phase.

    A sum that is negative, as torch's self time of a call with overlapping labels, is 0: programs refuse others.

    Args:
        table: the events.
        window: start and end of the recording, Unix ns.
    """
    profile = _Profile(table.rank)
    view, allocated = table.info.view, table.info.allocated
    kinds, code = distinct(view.display_name[view.rows].astype(np.int64) << 8 | table.column("kind"))
    parents, of_kinds, path = paths_of(event_parents(table.info), code)
    amounts = {**event_amounts(table.info), **({} if allocated is None else {"allocated": allocated})}
    used = [name for name in VALUES if name in _ALWAYS or (name in amounts and amounts[name].any())]
    samples = table.batch.samples
    types = [*(() if samples is None else SAMPLED), *((name, VALUES[name]) for name in used)]
    labels = profile.labels(table.steps_at(table.column("start")), table.phases)
    width = int(labels.max(initial=0)) + 1
    keys, group = distinct(path * width + labels)
    sums = grouped(group, len(keys), len(group), {name: amounts[name] for name in used})
    stack = keys[group[sums.first]]
    values = np.zeros((len(stack), len(types)), dtype=np.int64)
    for place, name in enumerate(used, len(types) - len(used)):
        values[:, place] = np.maximum(sums.amounts[name], 0)
    names = table.batch.names
    locations = np.array([profile.call(display_name(names[kind >> 8])) for kind in kinds.tolist()], dtype=np.int64)
    tree = _CallTree(parents, locations[of_kinds] if len(kinds) else of_kinds)
    yield from profile.rows(tree, _PprofSamples(stack // width, values, stack % width))
    if samples is not None and len(samples):
        yield from profile.rows(*_sampled(profile, table, samples, len(types)))
    yield profile.rest(types, window)


def _sampled(profile: _Profile, table: EventTable, samples: Samples, width: int) -> tuple[_CallTree, _PprofSamples]:
    """The samples of Python stacks: one row per stack, step and phase."""
    labels = profile.labels(table.steps_at(samples.time), table.phases_at(samples.time))
    count = int(labels.max(initial=0)) + 1
    keys, group = distinct(samples.stack * count + labels)
    values = np.zeros((len(keys), width), dtype=np.int64)
    np.add.at(values[:, 0], group, 1)
    np.add.at(values[:, 1], group, samples.duration)
    used, node_of = distinct(keys // count)
    parent, location, leaves = [-1], [-1], []
    nodes: dict[tuple[int, int], int] = {}
    for number_of_stack in used.tolist():
        node = 0
        for call in reversed(samples.stacks[number_of_stack]):
            key = node, profile.location(f"{call.function} {call.file}", str(call), call.file, call.line)
            node = nodes.setdefault(key, len(parent))
            if node == len(parent):
                parent.append(key[0])
                location.append(key[1])
        leaves.append(node or -1)
    above = np.array(parent, dtype=np.int64)
    above[above == 0] = -1
    return _CallTree(above, np.array(location, np.int64)), _PprofSamples(
        np.array(leaves)[node_of], values, keys % count
    )


class _Profile:
    """The tables that samples refer to. Not thread-safe."""

    def __init__(self, rank: int | None) -> None:
        self._texts: dict[str, int] = {"": 0}
        self._locations: dict[tuple[str, str, int], int] = {}
        self._written: list[bytes] = []  # locations and functions
        self._labels: dict[tuple[int, int], int] = {}
        self._label_texts: list[bytes] = []
        self._rank = b"" if rank is None else self._label("rank", str(rank))

    def text(self, text: str) -> int:
        """Number of a text."""
        return self._texts.setdefault(text, len(self._texts))

    def call(self, name: str) -> int:
        """Number of the location of calls with the name of an event."""
        match = CALL.fullmatch(name)
        if match is None:
            return self.location(name, "", "", 0)  # with a second name pprof does not take "<built-in" for a template
        file, line, function = match["file"], int(match["line"]) % (1 << 62), match["function"]
        return self.location(f"{function} {file}:{line}", name, file, line)

    def location(self, name: str, system_name: str, file: str, line: int) -> int:
        """Number of the location of a line in a function, from 1."""
        key = name, system_name, line
        known = self._locations.get(key)
        if known is not None:
            return known
        place = self._locations[key] = len(self._locations) + 1
        texts = (number(field, self.text(text)) for field, text in ((2, name), (3, system_name), (4, file)))
        self._written.append(message(5, number(1, place), *texts))
        self._written.append(message(4, number(1, place), message(4, number(1, place), number(2, line))))
        return place

    def labels(self, steps: Integers, phases: Integers) -> Integers:
        """Number of the labels of each event."""
        width = len(PHASES) + 1
        used, places = distinct((steps + 1) * width + phases + 1)
        numbers = []
        for key in used.tolist():
            pair = divmod(key, width)
            if pair not in self._labels:
                self._labels[pair] = len(self._labels)
                step = self._label("step", str(pair[0] - 1)) if pair[0] else b""
                phase = self._label("phase", PHASES[pair[1] - 1]) if pair[1] else b""
                self._label_texts.append(step + phase + self._rank)
            numbers.append(self._labels[pair])
        return np.array(numbers, dtype=np.int64)[places] if numbers else places

    def _label(self, key: str, value: str) -> bytes:
        return message(3, number(1, self.text(key)), number(2, self.text(value)))

    def rows(self, tree: _CallTree, rows: _PprofSamples) -> Iterator[bytes]:
        """Yields the encoded samples, some at a time."""
        sizes = np.array([len(text) for text in self._label_texts], dtype=np.int64)
        for block in blocks(len(rows.node), _SAMPLES):
            yield _encoded(tree, _PprofSamples(*(column[block] for column in rows)), self._label_texts, sizes)

    def rest(self, types: Sequence[tuple[str, str]], window: tuple[int, int]) -> bytes:
        """Everything but the samples."""
        of_types = [message(1, *(number(1 + at, self.text(text)) for at, text in enumerate(pair))) for pair in types]
        start, end = window
        shown = number(14, self.text(SELF_TIME))
        texts = [message(6, text.encode("utf-8", "replace")) for text in self._texts]
        times = number(9, start), number(10, max(end - start, 0))
        return b"".join((*of_types, *self._written, *texts, *times, shown))


def _encoded(tree: _CallTree, rows: _PprofSamples, labels: Sequence[bytes], label_sizes: Integers) -> bytes:
    """Samples as messages: each the locations from the innermost outwards, the values and the labels."""
    locations, counts = _stacks(tree, rows.node)
    sample = np.repeat(np.arange(len(counts)), counts)
    sizes = varint_sizes(locations)
    in_stack = np.zeros(len(counts), dtype=np.int64)
    np.add.at(in_stack, sample, sizes)
    value_sizes = varint_sizes(rows.values)
    in_values = value_sizes.sum(axis=1)
    content = 2 + varint_sizes(in_stack) + in_stack + varint_sizes(in_values) + in_values + label_sizes[rows.labels]
    header = varint_sizes(content) + 1
    begin = starts_of(content + header)
    room = np.empty(int((content + header).sum()), dtype=np.uint8)
    room[begin] = tag(2)[0]
    put_varints(room, begin + 1, content, header - 1)
    at = begin + header
    for field, length, column, of_column in (
        (1, in_stack, locations, sizes),
        (2, in_values, rows.values.reshape(-1), value_sizes.reshape(-1)),
    ):
        room[at] = tag(field)[0]
        width = varint_sizes(length)
        put_varints(room, at + 1, length, width)
        at = at + 1 + width
        per_sample = counts if field == 1 else np.full(len(counts), rows.values.shape[1])
        before = starts_of(of_column) - np.repeat(starts_of(length), per_sample)
        put_varints(room, np.repeat(at, per_sample) + before, column, of_column)
        at = at + length
    put_pieces(room, at, rows.labels, labels, label_sizes)
    return room.tobytes()


def _stacks(tree: _CallTree, nodes: Integers) -> tuple[Integers, Integers]:
    """The locations of each node and of those around it, the innermost first, one after another; and their number."""
    levels, current = [], nodes
    while (current >= 0).any():
        levels.append(current)
        current = np.where(current >= 0, tree.parent[current], -1)
    stacked = np.stack(levels, axis=1) if levels else np.empty((len(nodes), 0), dtype=np.int64)
    is_call = stacked >= 0
    return tree.location[stacked[is_call]], is_call.sum(axis=1)
