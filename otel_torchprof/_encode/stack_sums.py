"""Sums by call stack, step and phase: what formats of profiles have.

A stack has modules, operators, labels, Python calls and kernels. Samples of Python stacks are stacks of their own, with values of their own,
so that no time is counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.phases import PHASES
from otel_torchprof._model.averages import grouped
from otel_torchprof._model.call_tree import paths_of
from otel_torchprof._model.frames import CALL, distinct
from otel_torchprof._model.paths import event_amounts, event_parents
from otel_torchprof._model.tree import display_name

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Location(NamedTuple):
    """A place in a stack."""

    function: str
    """The function of a Python call, else the name of the event."""
    file: str = ""
    """The file of a Python call, else empty."""
    line: int = 0
    """Of events, the first line of the function; of samples, the line that it has come to."""
    name: str = ""
    """For programs that tell functions apart by their names: of Python calls with the file; else empty."""
    system_name: str = ""
    """The whole text of a Python call."""


class SummedStacks(NamedTuple):
    """Sums as columns, and the tree of calls that they refer to."""

    parent: Integers
    """By node of the tree, the node around it; -1 for none."""
    location: Integers
    """By node, index into :attr:`StackSums.locations`."""
    node: Integers
    """By sum, the innermost call; -1 for a stack without calls."""
    values: Integers
    """A row of values each, none of them negative."""
    labels: Integers
    """By sum, index into :attr:`StackSums.labels`."""

    def stacks(self, nodes: Integers) -> tuple[Integers, Integers]:
        """The locations of some nodes and of those around them, the innermost first, one after another; and their number."""
        levels, current = [], nodes
        while (current >= 0).any():
            levels.append(current)
            current = np.where(current >= 0, self.parent[current], -1)
        stacked = np.stack(levels, axis=1) if levels else np.empty((len(nodes), 0), dtype=np.int64)
        is_call = stacked >= 0
        return self.location[stacked[is_call]], is_call.sum(axis=1)


class StackSums(NamedTuple):
    """The sums of a recording."""

    types: Sequence[tuple[str, str]]
    """Type and unit of each column of values."""
    parts: Sequence[SummedStacks]
    """The sums of events, then those of sampled stacks, if there are any."""
    locations: Sequence[Location]
    labels: Sequence[tuple[int, int]]
    """Number of the step, and of the phase in ``PHASES``; -1 for none."""


def stack_sums(table: EventTable) -> StackSums:
    """The sums of a recording. Costs some 0.7 us per event, most of it per different stack, step and phase.

    A sum that is negative, as torch's self time of a call with overlapping labels, is 0: programs refuse others.
    """
    known = _Known()
    view, allocated = table.info.view, table.info.allocated
    texts, code = distinct(view.display_name[view.rows].astype(np.int64))
    of_texts = [known.call(display_name(table.batch.names[text])) for text in texts.tolist()]
    parents, locations, path = paths_of(event_parents(table.info), np.array(of_texts, dtype=np.int64)[code])
    amounts = {**event_amounts(table.info), **({} if allocated is None else {"allocated": allocated})}
    used = [name for name in VALUES if name in _ALWAYS or (name in amounts and amounts[name].any())]
    samples = table.batch.samples
    types = [*(() if samples is None else SAMPLED), *((name, VALUES[name]) for name in used)]
    labels = known.labels(table.steps_at(table.column("start")), table.phases)
    width = int(labels.max(initial=0)) + 1
    keys, group = distinct(path * width + labels)
    sums = grouped(group, len(keys), len(group), {name: amounts[name] for name in used})
    stack = keys[group[sums.first]]
    values = np.zeros((len(stack), len(types)), dtype=np.int64)
    for place, name in enumerate(used, len(types) - len(used)):
        values[:, place] = np.maximum(sums.amounts[name], 0)
    parts = [SummedStacks(parents, locations, stack // width, values, stack % width)]
    if samples is not None and len(samples):
        parts.append(_sampled(known, table, samples, len(types)))
    return StackSums(types, parts, [*known.locations], [*known.pairs])


def _sampled(known: _Known, table: EventTable, samples: Samples, width: int) -> SummedStacks:
    """The samples of Python stacks: one row per stack, step and phase."""
    used, place = distinct(samples.stack)
    parent, location, leaves = list[int](), list[int](), list[int]()
    nodes: dict[tuple[int, int], int] = {}
    for number in used.tolist():
        node = -1
        for call in reversed(samples.stacks[number]):
            name = f"{call.function} {call.file}"
            key = node, known.location(Location(call.function, call.file, call.line, name, str(call)))
            node = nodes.setdefault(key, len(parent))
            if node == len(parent):
                parent.append(key[0])
                location.append(key[1])
        leaves.append(node)
    labels = known.labels(table.steps_at(samples.time), table.phases_at(samples.time))
    count = int(labels.max(initial=0)) + 1
    keys, group = distinct((np.array(leaves)[place] + 1) * count + labels)
    values = np.zeros((len(keys), width), dtype=np.int64)
    np.add.at(values[:, 0], group, 1)
    np.add.at(values[:, 1], group, samples.duration)
    tree = np.array(parent, np.int64), np.array(location, np.int64)
    return SummedStacks(*tree, keys // count - 1, values, keys % count)


class _Known:
    """The different locations and labels, by number. Not thread-safe."""

    def __init__(self) -> None:
        self.locations: dict[Location, int] = {}
        self.pairs: dict[tuple[int, int], int] = {}

    def call(self, name: str) -> int:
        """Number of the location of calls with the name of an event."""
        match = CALL.fullmatch(name)
        if match is None:
            return self.location(Location(name))
        file, line, function = match["file"], int(match["line"]) % (1 << 62), match["function"]
        return self.location(Location(function, file, line, f"{function} {file}:{line}", name))

    def location(self, location: Location) -> int:
        """Number of a location."""
        return self.locations.setdefault(location, len(self.locations))

    def labels(self, steps: Integers, phases: Integers) -> Integers:
        """Number of the labels of each event."""
        width = len(PHASES) + 1
        used, places = distinct((steps + 1) * width + phases + 1)
        pairs = [(key // width - 1, key % width - 1) for key in used.tolist()]
        numbers = [self.pairs.setdefault(pair, len(self.pairs)) for pair in pairs]
        return np.array(numbers, dtype=np.int64)[places]
