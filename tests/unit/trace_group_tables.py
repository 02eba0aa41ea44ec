"""Span tables of one unit for tests: written as trees, and made by chance."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from span_tables import span_rows

from otel_torchprof._columns.batch import Names
from otel_torchprof._export.policy import TargetTrace, reduced
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType, SpanTable

TRACE = 0xA5
ROOT = 1
TARGET = TargetTrace(TRACE, ROOT, "torch.step", 7)
MS = 1_000_000
BEGIN = 1_000_000_000_000


def trace_group(tree: Any, **columns: Any) -> SpanTable:
    """The table of a tree of (name, start, end in ms, children...): ids from 1 in its order, the first one the root."""
    rows: list[tuple[str, int, int, int]] = []

    def add(node: Any, parent: int) -> None:
        name, start, end, *children = node
        rows.append((name, start, end, parent))
        number = len(rows)
        for child in children:
            add(child, number)

    add(tree, 0)
    return trace_group_of(rows, **columns)


def trace_group_of(rows: list[tuple[str, int, int, int]], **columns: Any) -> SpanTable:
    """The table of (name, start, end in ms, number of the parent from 1 or 0)."""
    names = list(dict.fromkeys(row[0] for row in rows))
    found = span_rows(
        [row[0] for row in rows],
        **{
            "start": np.array([BEGIN + int(row[1] * MS) for row in rows], dtype=np.int64),
            "end": np.array([BEGIN + int(row[2] * MS) for row in rows], dtype=np.int64),
            "parent_span_id": np.array([row[3] for row in rows], dtype=np.uint64),
            "trace_ids": np.frombuffer(TRACE.to_bytes(16, "big"), dtype=np.uint8).reshape(1, 16),
            "name": np.array([names.index(row[0]) + 1 for row in rows], dtype=np.uint32),
            **columns,
        },
    )
    return SpanTable(**{**vars(found), "names": columns.get("names", Names.of(["", *names]))})


def attribute(key: str, kind: AttributeType, *values: Any) -> AttributeColumn:
    """A column with None where the attribute is not."""
    there = [row for row, value in enumerate(values) if value is not None]
    return AttributeColumn(key, kind, np.array([values[row] for row in there], dtype=kind.dtype), np.array(there))


def with_collectives() -> SpanTable:
    """A step with three calls of collectives, two of which a backend worked on, and not in their order."""
    texts = ["", "torch.step", "call", "gloo:all_reduce", "all_reduce", "broadcast", "7"]
    rows = [
        *(("torch.step", 0, 100, 0), ("call", 10, 11, 1), ("call", 5, 6, 1), ("call", 20, 21, 1)),
        *(("gloo:all_reduce", 12, 30, 1), ("gloo:all_reduce", 7, 9, 1)),
    ]
    columns = (
        attribute("torch.collective.name", AttributeType.NAME, None, 4, 4, 5, None, None),
        attribute("torch.collective.group", AttributeType.NAME, None, 6, 6, 6, None, None),
        attribute("torch.collective.sequence_nr", AttributeType.INT64, None, 3, 2, 4, None, None),
    )
    name = np.array([texts.index(row[0]) for row in rows], np.uint32)
    return replace(trace_group_of(rows, name=name, attributes=columns), names=Names.of(texts))


def ids() -> dict[str, Any]:
    """Sources of ids that are like no others."""
    traces, spans = itertools.count(1 << 100), itertools.count(1 << 50)
    return {"new_trace_id": lambda: next(traces), "new_span_id": lambda: next(spans)}


def cut(table: SpanTable, budget: Any, target: TargetTrace = TARGET, **more: Any) -> Any:
    """As ``reduced``, with ids."""
    return reduced(table, budget, target, **ids(), **more)


def attributes_of(table: SpanTable, row: int) -> dict[str, Any]:
    """What the span says, texts as texts."""
    found = {}
    for column in table.attributes:
        at = row if column.rows is None else int(np.searchsorted(column.rows, row))
        if column.rows is None or column.rows[at : at + 1].tolist() == [row]:
            value = column.values[at]
            found[column.key] = table.names[value] if column.type == AttributeType.NAME else value.item()
    return found


def displayed(table: SpanTable) -> list[tuple[str, float, float, str, dict[str, Any]]]:
    """Name, start and end in ms, the parent's name and attributes of each span."""
    names = {int(i): table.names[n] for i, n in zip(table.span_id, table.name, strict=True)}
    return [
        (
            table.names[table.name[row]],
            float((table.start[row] - BEGIN) / MS),
            float((table.end[row] - BEGIN) / MS),
            names.get(int(table.parent_span_id[row]), ""),
            attributes_of(table, row),
        )
        for row in range(len(table))
    ]


def random_trace_group(seed: int, most: int = 300) -> SpanTable:
    """A tree by chance: several threads, errors, links, attributes with gaps; children lie inside of their parents."""
    chance = random.Random(seed)
    rows: list[tuple[str, int, int, int]] = [("torch.step", 0, 1 << 20, 0)]
    free = [(0, 0, 1 << 20)]
    while free and len(rows) < most:
        parent, begin, end = free.pop(chance.randrange(len(free)) if len(rows) > 1 else 0)
        at = begin
        for _ in range(chance.randint(0 if parent else 3, 12)):
            start = at + chance.randint(0, 3)
            stop = start + chance.choice([0, 1, 2, 5, 100, 5_000, 100_000])
            if stop > end:
                continue
            rows.append((chance.choice(["a", "b", "c"]), start, stop, parent + 1))
            free.append((len(rows) - 1, start, stop))
            at = stop
    return _with_attributes(rows, chance)


def _with_attributes(rows: list[tuple[str, int, int, int]], chance: random.Random) -> SpanTable:
    count = len(rows)

    def maybe(value: Any) -> Any:
        return value() if chance.random() < 0.7 else None

    links = (
        sorted((chance.randrange(1, count), chance.randrange(count)) for _ in range(count // 5)) if count > 1 else []
    )
    thread = [None] + [1] * (count - 1)
    for i, row in enumerate(rows[1:], 1):
        thread[i] = thread[row[3] - 1] or chance.choice([1, 2])
    in_ms = [(name, start / MS, end / MS, parent) for name, start, end, parent in rows]
    of = AttributeType
    return trace_group_of(
        in_ms,
        error=np.array([0] + [int(chance.random() < 0.02) for _ in rows[1:]], dtype=np.uint8),
        links=np.array([(a, np.frombuffer(TRACE.to_bytes(16, "big"), np.uint8), b + 1) for a, b in links], dtype=LINK),
        attributes=(
            attribute("thread.id", of.INT64, *thread),
            attribute("torch.op.flops", of.INT64, *(maybe(lambda: chance.randint(1, 1000)) for _ in rows)),
            attribute("torch.self_duration", of.DOUBLE, *(maybe(lambda: chance.randint(1, 99) / 64) for _ in rows)),
            attribute("torch.memory.peak", of.INT64, *(maybe(lambda: chance.randint(-5, 1 << 40)) for _ in rows)),
            attribute("torch.op.input_shapes", of.NAME, *(maybe(lambda: chance.randint(1, 2)) for _ in rows)),
            attribute("torch.async", of.BOOL, *(maybe(lambda: 1) for _ in rows)),
        ),
    )


def per_name(table: SpanTable) -> tuple[Counter[str], Counter[str]]:
    """Of each name how many spans there are and how many ns they took, aggregate spans as what they stand for."""
    spread = {column.key: column.spread(len(table)) for column in table.attributes}
    none = np.zeros(len(table)), np.zeros(len(table), np.bool_)
    standing_for, is_counted = spread.get("torch.aggregated.count", none)
    seconds, is_timed = spread.get("torch.aggregated.duration", none)
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    rows = (table.name, np.where(is_counted, standing_for, 1), table.end - table.start, seconds, is_timed)
    for number, count, own, duration, has_duration in zip(*(column.tolist() for column in rows), strict=True):
        name = table.names[number]
        counts[name] += int(count)
        times[name] += round(duration * 1e9) if has_duration else own
    return counts, times
