"""Whole recordings made by chance: threads, calls, modules, labels, backward functions, inputs and memory, all at once."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import MEMORY_COLUMNS, Flag, Kind, MemoryFlag, Scope

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMES = [
    "a.py(1): f",
    "b.py(2): g",
    "<built-in function len>",
    "nn.Module: Linear_0",
    "autograd/__init__.py(1): backward",
]
OPERATORS = ["aten::mm", "aten::add", "aten::is_leaf", "aten::_version", "AddBackward0"]
OPERATORS += [
    "autograd::engine::evaluate_function: AddBackward0",
    "f\tü\0;",
    "\U0001f600" * 90,
    "\udcff",
    '\\"</script>',
]
LABELS = ["aten::mm", "mine", "ProfilerStep#1", "ProfilerStep#2", "[memory]", ""]
MODULES = ["Net", "Net.a", "a.b"]
OVERLOADS = ["Tensor", "out"]
NAMES = ["", *dict.fromkeys(FRAMES + OPERATORS + LABELS[:-1] + MODULES + OVERLOADS)]
THREADS = (RecordedThread(11, 71, 1, "main"), RecordedThread(12, 72, 2, "\ud800"), RecordedThread(13, 73, 0, ""))
TENSOR, OVERLOAD = 1 | 7 << 8, 10
BY_KIND = {Kind.FRAME: FRAMES, Kind.OPERATOR: OPERATORS, Kind.LABEL: LABELS, Kind.MODULE: MODULES}


def recordings(seed: int, moves: int, *, segments: int = 1, nested: bool = False) -> list[Batch]:
    """The final batches of segments that follow each other, the same for the same arguments.

    ``moves`` is about how much happens on a thread in a segment; ``nested``: everything ends where it belongs.
    """
    chance = random.Random(seed)
    ids, clock, found = itertools.count(1), 1_000_000_000_000_000_000, []
    for _ in range(segments):
        segment = _Segment(chance, ids, nested=nested)
        threads = chance.sample(range(len(THREADS)), chance.randint(0 if moves < 2 else 1, len(THREADS)))
        clock = max([clock, *(segment.run(thread, clock, moves) for thread in threads)]) + 1_000
        found.append(segment.batch())
    return found


def with_devices(batch: Batch, seed: int) -> Batch:
    """The same, with what devices told of most rows that are no calls: two of them, three streams, at any times."""
    chance = np.random.default_rng(seed)
    rows = np.flatnonzero((chance.random(len(batch)) < 0.7) & (batch["kind"] != Kind.FRAME))
    count = len(rows)
    devices = {
        "event": batch["id"][rows],
        "start": batch["start"][rows] + chance.integers(-2000, 20_000, count),
        "duration": chance.integers(0, 5000, count),
        "stream": chance.integers(0, 3, count),
        "device_type": np.ones(count, dtype=np.int32),
        "device_index": chance.integers(0, 2, count).astype(np.int32),
    }
    return replace(batch, devices=devices)


class _Segment:
    """A segment while it is made: rows and memory as dictionaries, words of inputs."""

    def __init__(self, chance: random.Random, ids: Iterator[int], *, nested: bool) -> None:
        self._chance, self._ids, self._nested = chance, ids, nested
        self._rows: list[dict[str, Any]] = []
        self._memory: list[dict[str, Any]] = []
        self._words: list[int] = []

    def run(self, thread: int, clock: int, moves: int) -> int:
        """What one thread does; returns when it is done."""
        chance, opened = self._chance, list[int]()
        for _ in range(moves):
            clock += chance.randint(0 if self._nested else 1, 2_000)
            move = chance.random()
            if move < 0.5:
                self._rows.append(self._row(thread, clock, opened))
                opened.append(len(self._rows) - 1)
            elif move < 0.7:
                self._memory.append(self._record(thread, clock, opened))
            elif opened:
                clock += 1
                self._rows[opened.pop(-1 if self._nested else chance.randrange(len(opened)))]["end"] = clock
        for row in reversed(opened):
            clock += 1
            self._rows[row]["end"] = clock
        return clock

    def batch(self) -> Batch:
        """As a final batch has it: rows by thread, in the order in which they began."""
        order = sorted(range(len(self._rows)), key=lambda row: self._rows[row]["thread"])
        place = {row: at for at, row in enumerate(order)} | {-1: -1}
        columns = {key: [self._rows[row][key] for row in order] for key in (self._rows or [{"start": 0}])[0]}
        columns["parent"] = [place[parent] for parent in columns.get("parent", ())]
        records = sorted(self._memory, key=lambda record: record["thread"])
        memory = {column.name: [record[column.name] for record in records] for column in MEMORY_COLUMNS}
        words = np.array(self._words, dtype=np.int64)
        return Batch.of(columns, NAMES, THREADS, inputs=words, memory=memory)

    def _row(self, thread: int, clock: int, opened: list[int]) -> dict[str, Any]:
        chance, kind = self._chance, self._chance.choice([Kind.OPERATOR, *sorted(BY_KIND)])
        flags = Flag.ERROR if kind == Kind.LABEL and chance.random() < 0.1 else Flag(0)
        if not self._nested and kind != Kind.FRAME and chance.random() < 0.08:
            flags |= Flag.ASYNC
        scope, sequence = Scope.USER_SCOPE if kind == Kind.LABEL else Scope.FUNCTION, -1
        if kind == Kind.OPERATOR and not self._nested and chance.random() < 0.4:
            scope, sequence = chance.choice([Scope.FUNCTION, Scope.BACKWARD_FUNCTION]), chance.randint(0, 4)
        return {
            "id": next(self._ids),
            "start": clock,
            "name": NAMES.index(chance.choice(BY_KIND[kind])),
            "parent": opened[-1] if opened else -1,
            "thread": thread,
            "kind": kind,
            "scope": scope,
            "flags": flags,
            "sequence_nr": sequence,
            "fwd_thread": chance.choice([1, 2]) if scope == Scope.BACKWARD_FUNCTION else 0,
            "inputs": self._inputs() if kind == Kind.OPERATOR else -1,
            "end": clock,
        }

    def _inputs(self) -> int:
        """Appends the words of the inputs of an operator: two tensors at most, and an overload perhaps."""
        chance, words = self._chance, self._words
        if chance.random() < 0.3:
            return -1
        at, inputs, overload = len(words), chance.randint(0, 2), chance.choice([0, 0, *map(NAMES.index, OVERLOADS)])
        words.append(inputs | bool(overload) << 32)
        for _ in range(inputs):
            sizes = [chance.randint(1, 2) for _ in range(chance.randint(0, 2))]
            words += [TENSOR | len(sizes) << 32, *sizes]
        if overload:
            words.append(OVERLOAD | overload << 32)
        return at

    def _record(self, thread: int, clock: int, opened: list[int]) -> dict[str, Any]:
        chance = self._chance
        return {
            "time": clock,
            "bytes": chance.choice([-64, -4, 8, 512]),
            "address": chance.randint(1, 5),
            "total_allocated": chance.choice([-1, 4096]),
            "total_reserved": -1,
            "event": self._rows[opened[-1]]["id"] if opened else 0,
            "thread": thread,
            "device_type": chance.choice([0, 0, 0, 1, 19]),
            "device_index": -1,
            "flags": MemoryFlag.OUT_OF_MEMORY if chance.random() < 0.1 else 0,
        }
