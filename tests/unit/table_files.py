"""Profiles of two ranks with steps, phases, modules, collectives, samples and allocations, made up, and their files."""

from __future__ import annotations

import numpy as np

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.samples import Call, Samples
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, MEMORY_COLUMNS, Kind
from otel_torchprof._model.step_spans import RecordedStep

BASE = 1_790_000_000 * 10**9
MS = 1_000_000
STEPS = 6
NAMES = [
    "",
    "torch.phase.forward",
    "Model",
    "aten::linear",
    "aten::addmm",
    "c10d::allreduce_",
    "gloo",
    "sum",
    "float",
    "0",
]
STACKS = [(Call("train.py", 5, "log"), Call("train.py", 22, "main")), (Call("train.py", 9, "load"),)]


def profile_of(batch: Batch, steps: list[RecordedStep], **settings: object) -> otp.profile:
    """A finished profile with a batch instead of what it recorded."""
    with otp.profile(operators=False, sampling=False) as prof:
        pass
    prof._segments.batch = lambda: batch
    prof._segments.times = lambda: (BASE, BASE + 100 * MS)
    prof._steps = lambda: steps
    for name, value in settings.items():
        setattr(prof, name, value)
    return prof


def rank_profile(rank: int, names: list[str] | None = None) -> otp.profile:
    """A rank: in each step, of which the last is slow, a phase with a module with an operator in another, and a collective."""
    columns: dict[str, list[int]] = {name: [] for name in ("start", "end", "name", "parent", "kind", "fwd_thread")}
    steps = []
    for number in range(STEPS):
        begin = BASE + number * 10 * MS
        longer = 8 * MS if number == STEPS - 1 else 0
        row = len(columns["start"])
        events = [
            (0, 8 * MS + longer, 1, -1, Kind.PHASE, Part.FORWARD),
            (1 * MS, 7 * MS + longer, 2, row, Kind.MODULE, 0),
            (2 * MS, 6 * MS + longer, 3, row + 1, Kind.OPERATOR, 0),
            (3 * MS, 5 * MS + longer, 4, row + 2, Kind.OPERATOR, 0),
            (8 * MS + rank * 1000 + longer, 9 * MS + longer, 5, -1, Kind.OPERATOR, 0),
        ]
        for start, end, *rest in events:
            for column, value in zip(columns.values(), (begin + start, begin + end, *rest), strict=True):
                column.append(int(value))
        steps.append(RecordedStep(number, begin, begin + 10 * MS + longer, 70))
    ids = np.arange(1, len(columns["start"]) + 1)
    batch = Batch.of(
        columns,
        names or NAMES,
        (RecordedThread(7, 70, 1, "main"),),
        memory=_table(MEMORY_COLUMNS, time=BASE + ids * MS, bytes=np.where(ids % 2, 64, -64), event=ids),
        collectives=_table(
            COLLECTIVE_COLUMNS,
            event=ids[4::5],
            sequence_nr=np.arange(1, STEPS + 1),
            group=np.full(STEPS, 9),
            backend=np.full(STEPS, 6),
            reduce_op=np.full(STEPS, 7),
            rank=np.full(STEPS, rank),
        ),
        samples=Samples(BASE + ids * MS, np.full(len(ids), MS), np.zeros_like(ids), ids % 2, STACKS),
    )
    return profile_of(batch, steps, profile_memory=True, record_shapes=True)


def _table(columns: object, **given: np.ndarray) -> dict[str, np.ndarray]:
    rows = len(next(iter(given.values())))
    return {column.name: given.get(column.name, np.zeros(rows, np.int64)) for column in columns}  # type: ignore[attr-defined]
