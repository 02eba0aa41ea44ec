"""How traces are cut down to a budget, on trees made by chance: what must hold whatever the tree."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from random_recordings import recordings
from recorded_tables import recorded_table
from span_tables import tables
from trace_group_tables import (
    TARGET,
    attributes_of,
    cut,
    per_name,
    random_trace_group,
    trace_group_of,
    with_collectives,
)

from otel_torchprof._columns.joined import joined
from otel_torchprof._encode.attributes import REDUCTIONS, add_attributes
from otel_torchprof._encode.otlp import encode
from otel_torchprof._export.aggregating import Sizes, TraceGroups, aggregated
from otel_torchprof._export.policy import Reduction, fits, reduced_together
from otel_torchprof._export.root_only import root_only
from otel_torchprof._model.limits import Budget, most_bytes, span_sizes
from otel_torchprof._model.span_tables import joined_tables, taken
from otel_torchprof._model.span_tree import rows_of_spans
from otel_torchprof._model.step_spans import RecordedStep

SEEDS = range(60)
LEFT_OUT = 9 + 9 + 2 + 1
"""Bytes of two times of 0 and of an empty trace state, and what they may add to a length."""
COMMON = {"resource": Resource({}), "scope": InstrumentationScope("")}


def budget_of(chance):
    """Any budget, most of them tight."""
    return Budget(
        max_spans=chance.choice([2, 3, 10, 40, 150, 5000]),
        max_bytes=chance.choice([2000, 10_000, 40_000, 4_000_000]),
        short=chance.choice([None, 0.0, 1e-8, 2e-6, 1.0]),
    )


def check_trees(table):
    """Each trace is one tree of distinct spans under its root, parents hold their children, links lead somewhere."""
    trace = [bytes(table.trace_ids[t]) for t in table.trace]
    place = {(t, int(i)): row for row, (t, i) in enumerate(zip(trace, table.span_id, strict=True))}
    assert len(place) == len(table)
    assert sum(table.parent_span_id == 0) == len(set(trace))
    for row in range(len(table)):
        seen, at = set(), row
        while table.parent_span_id[at]:
            assert at not in seen
            seen.add(at)
            above = place[trace[at], int(table.parent_span_id[at])]
            assert table.start[above] <= table.start[at] <= table.end[at] <= table.end[above]
            at = above
    rows = table.links["row"].tolist()
    assert rows == sorted(rows)
    targets = [(bytes(link["trace_id"]), int(link["span_id"])) for link in table.links]
    assert all(target in place for target in targets)
    assert len(set(zip(rows, targets, strict=True))) == len(rows)


def groups_of(table, most):
    """The table as one trace group of at most so many spans, all of which are short; its root comes first."""
    limits = (np.array([value]) for value in (0, most, 1 << 40, 1e9))
    parent = rows_of_spans(table, table.parent_span_id)
    return TraceGroups(np.zeros(len(table), np.int64), *limits, parent)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_tree_and_the_budget(seed):
    """Every trace is a tree within the budget, all that was recorded is accounted for, and doing it again changes nothing."""
    table, budget = random_trace_group(seed), budget_of(random.Random(seed))
    found, done = cut(table, budget)
    check_trees(found)
    assert done.recorded == len(table) == len(found) - done.parts + done.aggregated + done.collapsed
    traces = [taken(found, np.flatnonzero(found.trace == trace)) for trace in np.unique(found.trace)]
    assert len(traces) == done.parts + 1
    for trace in traces:
        assert len(trace) <= budget.max_spans
        assert fits(trace, budget)
    said = [attributes_of(found, row) for row in range(len(found))]
    assert sum(s.get("torch.aggregated.count", 1) - 1 for s in said) == done.aggregated
    assert sum(s.get("torch.collapsed.count", 0) for s in said) == done.collapsed
    if done:
        assert (said[0]["torch.recorded_spans"], said[0]["torch.parts"]) == (len(table), done.parts)
        assert (said[0]["torch.aggregated_spans"], said[0]["torch.collapsed_spans"]) == (
            done.aggregated,
            done.collapsed,
        )
        if not done.parts:
            assert cut(found, budget)[0] is found
    else:
        assert found is table


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_many_trace_groups_are_each_reduced_as_one(seed):
    """Of trace groups in one table each is reduced as if it were alone, by its own budget; what would have to be split is said."""
    chance = random.Random(seed)
    alone = [moved(random_trace_group(100 * seed + number, 120), number) for number in range(5)]  # ids below 1000 each
    budgets = [budget_of(chance) for _ in alone]
    together = joined_tables(alone)
    of_row = np.repeat(np.arange(len(alone)), [len(table) for table in alone])
    roots = np.searchsorted(of_row, np.arange(len(alone)))
    done = reduced_together(together, of_row, budgets, roots)
    for number, (table, budget) in enumerate(zip(alone, budgets, strict=True)):
        expected, reduction = cut(table, budget, TARGET._replace(span_id=int(table.span_id[0])))
        assert bool(reduction.parts) is not bool(done.is_within[number])
        if reduction.parts:
            continue
        assert (done.aggregated[number], done.collapsed[number]) == (reduction.aggregated, reduction.collapsed)
        found = taken(done.table, np.flatnonzero(done.table.span_id // 1000 == number))
        assert told(found) == told(expected)
        became = done.became[of_row == number]
        assert became.tolist() == (table.span_id if reduction.became is None else reduction.became).tolist()


def moved(table, number):
    """The same spans with other ids, and without links to themselves, which only a reduction removes."""
    links = table.links[table.span_id[table.links["row"]] != table.links["span_id"]]
    links["span_id"] += np.uint64(1000 * number)
    parent = np.where(table.parent_span_id == 0, 0, table.parent_span_id + np.uint64(1000 * number))
    return replace(table, span_id=table.span_id + np.uint64(1000 * number), parent_span_id=parent, links=links)


def told(table):
    """All that spans say, by id."""
    links = {}
    for link in table.links:
        links.setdefault(int(link["row"]), []).append(int(link["span_id"]))
    columns = (table.span_id, table.parent_span_id, table.start, table.end, table.error)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {row[0]: (row, attributes_of(table, at), links.get(at)) for at, row in enumerate(rows)}


def test_bytes_are_kept_to_the_last():
    """Whatever the budget of bytes, it is kept by merging where that will do, and by folding where all is short."""
    table = random_trace_group(3, 60)
    alike, _ = aggregated(table, groups_of(table, 0), Sizes(table))
    for size in range(900, 6000, 37):
        budget = Budget(max_bytes=size, short=1.0)
        found, done = cut(table, budget)
        assert fits(found, budget)
        assert not done.parts
        assert not (done.collapsed and fits(alike, budget.less(0, 200)))


def test_bytes_of_parts_are_kept_to_the_last():
    """No trace takes more: not for what is said on roots, nor for links between traces."""
    rows = [("torch.step", 0, 300, 0), ("a", 0, 300, 1), *(("b", i, i + 1, 2) for i in range(150))]
    for size in range(1500, 6000, 137):
        found, _ = cut(trace_group_of(rows), Budget(max_bytes=size, short=0.0))
        assert np.bincount(found.trace, weights=span_sizes(found)).max() <= size


@pytest.mark.parametrize("seed", SEEDS)
def test_merging_keeps_counts_and_sums(seed):
    """For each name there are as many spans, of the same time, and amounts add up to the same, to the nanosecond."""
    table = random_trace_group(seed)
    most = (2, 20, 100)[seed % 3]
    found, _ = aggregated(table, groups_of(table, most), Sizes(table))
    assert per_name(found) == per_name(table)
    assert set(found.span_id.tolist()) <= set(table.span_id.tolist())
    for key in ("torch.op.flops", "torch.self_duration"):
        sums = [
            Counter({name: sum(s.get(key, 0) for s in said) for name, said in by_name(one).items()})
            for one in (found, table)
        ]
        assert sums[0] == sums[1]
    assert aggregated(found, groups_of(found, most), Sizes(found))[0] is found or len(found) > most


def test_the_documentation_knows_all_that_is_added():
    """The attributes of reduced and shrunk traces are those that the table of attributes has for them, with their types."""
    tables_of = [cut(random_trace_group(seed), Budget(max_spans=10, short=seed * 2e-6))[0] for seed in range(10)]
    tables_of += [root_only(random_trace_group(0), TARGET), root_only(with_collectives(), TARGET)]
    before = {column.key for column in random_trace_group(0).attributes} | {"torch.step.number"}
    before |= {column.key for column in with_collectives().attributes}
    added = {(c.key, c.type) for table in tables_of for c in table.attributes if c.key not in before}
    assert added == {(key, kind) for key, kind, *_ in REDUCTIONS}


def by_name(table):
    """What the spans of each name say."""
    found = {}
    for row in range(len(table)):
        found.setdefault(table.names[table.name[row]], []).append(attributes_of(table, row))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_unit_in_two_tables(seed):
    """What goes before the root goes to traces of their own; both together say what was recorded, and lose nothing."""
    table, budget = random_trace_group(seed, 150), Budget(max_spans=20, max_bytes=20_000, short=1e-6)
    # Children end before their parents, so in the order of their ends none comes after what is around it.
    order = np.lexsort((-np.arange(len(table)), table.end))
    middle = len(table) // 2
    first, second = np.sort(order[:middle]), np.sort(order[middle:])
    early, done = cut(taken(table, first), budget)
    late, then = cut(taken(table, second), budget, before=done)
    whole = done + then
    assert whole.recorded == len(table) == len(early) + len(late) - whole.parts + whole.aggregated + whole.collapsed
    root = int(np.flatnonzero(late.span_id == TARGET.span_id)[0])
    said = attributes_of(late, root)
    assert (said["torch.recorded_spans"], said["torch.parts"]) == (len(table), whole.parts)
    for part in (early, late):
        parts = [attributes_of(part, row).get("torch.part") for row in range(len(part))]
        numbers = [number for number in parts if number]
        begin = 1 if part is early else 1 + done.parts
        assert numbers == list(range(begin, begin + len(numbers)))
        assert all(np.bincount(part.trace) <= budget.max_spans)


def sizes_on_the_wire(table):
    """What the encoder makes of each span, with the tag and length in front of it."""
    found = []
    for message in encode(table, **COMMON):
        for span in TracesData.FromString(message).resource_spans[0].scope_spans[0].spans:
            size = span.ByteSize()
            found.append(size + 1 + -(-max(size.bit_length(), 1) // 7))
    return np.array(found, dtype=np.int64)


@settings(max_examples=60, deadline=None)
@given(tables())
def test_sizes_are_never_too_small(table):
    """Whatever is in a table, no span takes more bytes than thought; nor less but for what may be left out, in good UTF-8."""
    thought, real = span_sizes(table), sizes_on_the_wire(table)
    assert (thought >= real).all()
    assert most_bytes(table, len(table)) >= thought.sum()
    raw = [table.names.raw(i) for i in range(1, len(table.names))]
    if all(raw) and all(name.decode("utf-8", "ignore").encode() == name for name in raw):
        assert (thought <= real + LEFT_OUT).all()


@pytest.mark.parametrize("seed", range(5))
def test_sizes_of_recordings_are_close(seed):
    """Of whole recordings, hostile names and all, no span takes more than thought, and all together at most a tenth less."""
    batch = joined(recordings(seed, 200))
    steps = (RecordedStep(3, 10**18, 2 * 10**18),)
    table = recorded_table(batch, start=0, end=1, steps=steps, new_trace_id=lambda: 7, new_span_id=lambda: 9)
    table = add_attributes(table, batch)
    thought, real = span_sizes(table), sizes_on_the_wire(table)
    assert (thought >= real).all()
    assert most_bytes(table, len(table)) >= thought.sum()
    assert thought.sum() <= 1.1 * real.sum()


def test_a_step_of_a_hundred_thousand():
    """So many fit into the budget by merging alone where they are alike, and all of them are counted."""
    small = random_trace_group(1, 2000)
    count = 100_000 // len(small)
    copies = [taken(small, np.arange(1, len(small))) if copy else small for copy in range(count)]
    moved = []
    for number, copy in enumerate(copies):
        ids = copy.span_id + np.uint64(number << 32)
        under = np.where(copy.parent_span_id > 1, copy.parent_span_id + np.uint64(number << 32), copy.parent_span_id)
        links = copy.links[:0]
        moved.append(type(copy)(**{**vars(copy), "span_id": ids, "parent_span_id": under, "links": links}))
    table = joined_tables(moved)
    found, done = cut(table, Budget(short=1.0))
    assert fits(found, Budget())
    assert done == Reduction(recorded=len(table), aggregated=len(table) - len(found))
    assert per_name(found) == per_name(table)
