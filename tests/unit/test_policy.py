"""How traces are cut down to a budget, on trees small enough to see what should become of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trace_group_tables import (
    BEGIN,
    MS,
    ROOT,
    TARGET,
    TRACE,
    attribute,
    attributes_of,
    cut,
    displayed,
    trace_group,
    trace_group_of,
)

from otel_torchprof._export.policy import Reduction, TracePart, fits
from otel_torchprof._model.limits import LINK_SIZE, Budget
from otel_torchprof._model.span_table import LINK, AttributeType

INT64, DOUBLE, BOOL, NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME
SHORT = 0.01


def links_of(table, row):
    """Trace and span ids that a row links to."""
    own = table.links[table.links["row"] == row]
    return [(int.from_bytes(bytes(link["trace_id"]), "big"), int(link["span_id"])) for link in own]


def link(row, span_id, trace_id=TRACE):
    """An entry of a table's links."""
    return (row, np.frombuffer(trace_id.to_bytes(16, "big"), np.uint8), span_id)


def test_what_fits_is_left_alone():
    """The same table comes back, and is counted."""
    table = trace_group(("torch.step", 0, 9, ("a", 0, 1), ("a", 1, 2)))
    found, done = cut(table, Budget(max_spans=3))
    assert found is table
    assert done == Reduction(recorded=3)
    assert not done


def test_a_run_of_short_siblings_becomes_one_span():
    """It has the first one's id, lasts from the first to the last, and says how many they were and how long they took."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 1), ("a", 2, 3), ("a", 4, 6), ("b", 10, 90), ("a", 91, 92)),
        error=np.zeros(6, np.uint8),
    )
    found, done = cut(table, Budget(max_spans=4, short=SHORT))
    reported = {"torch.recorded_spans": 6, "torch.aggregated_spans": 2, "torch.collapsed_spans": 0, "torch.parts": 0}
    assert displayed(found) == [
        ("torch.step", 0, 100, "", reported),
        ("a", 0, 6, "torch.step", {"torch.aggregated.count": 3, "torch.aggregated.duration": 0.004}),
        ("b", 10, 90, "torch.step", {}),
        ("a", 91, 92, "torch.step", {}),
    ]
    assert found.span_id.tolist() == [1, 2, 5, 6]
    assert done == Reduction(recorded=6, aggregated=2)


@pytest.mark.parametrize("short", [SHORT, 0.1, 1.0])
def test_no_more_is_merged_than_needed(short):
    """The shortest become one first: what takes longer stays as it is where that will do."""
    tree = (
        "torch.step",
        0,
        100,
        *(("a", i, i + 0.9) for i in range(5)),
        *(("b", 10 + 9 * i, 18 + 9 * i) for i in range(5)),
    )
    found, done = cut(trace_group(tree), Budget(max_spans=8, short=short))
    assert [row[0] for row in displayed(found)] == ["torch.step", "a", *"bbbbb"]
    assert done.aggregated == 4


def test_phases_are_never_reduced():
    """Runs of short phases stay while what is inside of them and beside them is aggregated or collapsed, however little room there is."""
    phase = "torch.phase.device_wait"
    table = trace_group(
        (
            "torch.step",
            0,
            100,
            *((phase, i, i + 1, ("a", i, i + 0.4), ("a", i + 0.5, i + 1)) for i in range(5)),
            ("b", 9, 10),
        )
    )
    found, done = cut(table, Budget(max_spans=12, short=1.0))
    assert [row[0] for row in displayed(found)] == ["torch.step", *[phase, "a"] * 5, "b"]
    assert (done.aggregated, done.collapsed, done.parts) == (5, 0, 0)
    found, done = cut(table, Budget(max_spans=7, short=1.0))
    assert [row[0] for row in displayed(found)] == ["torch.step", *[phase] * 5, "b"]
    assert (done.aggregated, done.collapsed, done.parts) == (0, 10, 0)
    found, done = cut(table, Budget(max_spans=4, short=1.0))
    assert sum(row[0] == phase for row in displayed(found)) == 5
    assert done.parts > 0


def test_below_a_composite_all_of_one_name_become_one():
    """Whatever their order and whose children they were, level by level; times and counts are sums."""
    table = trace_group(
        (
            "torch.step", 0, 100,
            ("f", 0, 6, ("x", 0, 1, ("z", 0, 1)), ("y", 1, 2), ("x", 3, 5)),
            ("f", 6, 10, ("y", 6, 7), ("x", 7, 8, ("z", 7, 8), ("z", 8, 8))),
        )
    )  # fmt: skip
    found, done = cut(table, Budget(max_spans=5, short=SHORT))

    def composite(count, seconds):
        return {"torch.aggregated.count": count, "torch.aggregated.duration": seconds}

    assert displayed(found)[1:] == [
        ("f", 0, 10, "torch.step", composite(2, 0.01)),
        ("x", 0, 8, "f", composite(3, 0.004)),
        ("z", 0, 8, "x", composite(3, 0.002)),
        ("y", 1, 7, "f", composite(2, 0.002)),
    ]
    assert done.aggregated == 6


def test_composites_are_merged_on():
    """What an earlier reduction left can be reduced further: what hangs under an aggregate span needs no order."""
    table = trace_group(
        ("torch.step", 0, 100, ("f", 0, 10, ("x", 0, 1), ("y", 1, 2), ("x", 3, 5))),
        attributes=(attribute("torch.aggregated.count", INT64, None, 2, None, None, None),),
    )
    found, done = cut(table, Budget(max_spans=4, short=SHORT))
    assert [(row[0], row[4].get("torch.aggregated.count")) for row in displayed(found)[1:]] == [
        ("f", 2),
        ("x", 2),
        ("y", None),
    ]
    assert done == Reduction(recorded=6, aggregated=2)


def test_only_one_thread_and_outcome_becomes_one():
    """Siblings of other threads do not end a run and are not in it; what failed is not aggregated with what did not."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 1), ("a", 1, 2), ("a", 2, 3), ("a", 3, 4), ("a", 4, 5)),
        attributes=(attribute("thread.id", INT64, None, 1, 2, 1, 2, 1),),
        error=np.array([0, 0, 0, 0, 0, 1], np.uint8),
    )
    found, _ = cut(table, Budget(max_spans=4, short=SHORT))
    assert [(row[1], row[2], row[4].get("thread.id")) for row in displayed(found)[1:]] == [
        (0, 3, 1),
        (1, 4, 2),
        (4, 5, 1),
    ]
    assert found.error.tolist() == [0, 0, 0, 1]


def test_attributes_of_composites():
    """Amounts are added, peaks compared, flags of trouble kept; of the rest what all agree on."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 1), ("a", 1, 2), ("a", 2, 3)),
        attributes=(
            attribute("torch.op.flops", INT64, None, 5, None, 7),
            attribute("torch.memory.allocated", INT64, None, 2**62, 2**62, 2**62),
            attribute("torch.self_duration", DOUBLE, None, 0.25, 0.5, 0.125),
            attribute("torch.memory.peak", INT64, None, -3, -1, None),
            attribute("torch.dropped_before", BOOL, None, None, 1, None),
            attribute("torch.async", BOOL, None, None, 1, 1),
            attribute("torch.op.scope", NAME, None, 1, 1, 1),
            attribute("torch.op.input_shapes", NAME, None, 1, 1, 2),
            attribute("torch.aggregated.count", INT64, None, 10, None, None),
            attribute("torch.aggregated.duration", DOUBLE, None, 0.0005, None, None),
            attribute("torch.collapsed.count", INT64, None, None, 3, None),
        ),
    )
    found, done = cut(table, Budget(max_spans=2, short=SHORT))
    assert attributes_of(found, 1) == {
        "torch.op.flops": 12,
        "torch.memory.allocated": 2**63 - 1,
        "torch.self_duration": 0.875,
        "torch.memory.peak": -1,
        "torch.dropped_before": 1,
        "torch.op.scope": "torch.step",
        "torch.aggregated.count": 12,
        "torch.aggregated.duration": 0.0025,
        "torch.collapsed.count": 3,
    }
    assert done == Reduction(recorded=16, aggregated=11, collapsed=3)


def test_the_shortest_are_folded_and_no_more_than_needed():
    """Leaves first, a parent only after all below it; what stays says how many went and how long they took, none twice."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 50, ("b", 0, 4, ("c", 0, 3), ("d", 3, 3.5)), ("e", 5, 30)), ("f", 60, 62)),
    )
    found, done = cut(table, Budget(max_spans=6, short=SHORT))
    assert [row[0] for row in displayed(found)] == ["torch.step", "a", "b", "c", "e", "f"]
    assert attributes_of(found, 2) == {"torch.collapsed.count": 1, "torch.collapsed.duration": 0.0005}
    assert done == Reduction(recorded=7, collapsed=1)
    found, _ = cut(table, Budget(max_spans=3, short=SHORT))
    assert [row[0] for row in displayed(found)] == ["torch.step", "a", "e"]
    assert attributes_of(found, 0)["torch.collapsed.count"] == 1
    assert attributes_of(found, 1) == {"torch.collapsed.count": 3, "torch.collapsed.duration": 0.004}


def test_what_was_folded_before_counts_on():
    """A span that goes takes with it what it had collapsed: counted once more, its time not again."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 50, ("b", 0, 4), ("c", 5, 11))),
        attributes=(
            attribute("torch.collapsed.count", INT64, None, 2, 5, None),
            attribute("torch.collapsed.duration", DOUBLE, None, 0.001, 0.0015, None),
        ),
    )
    found, done = cut(table, Budget(max_spans=3, short=SHORT))
    assert attributes_of(found, 1) == {"torch.collapsed.count": 8, "torch.collapsed.duration": 0.005}
    assert done == Reduction(recorded=11, collapsed=8)


def test_of_equally_long_ones_the_inner_goes():
    """A span that lasts no longer than what it is in goes before it."""
    found, _ = cut(trace_group(("torch.step", 0, 100, ("a", 0, 4, ("b", 0, 4)))), Budget(max_spans=2, short=SHORT))
    assert [row[0] for row in displayed(found)] == ["torch.step", "a"]


def test_the_root_stays_what_it_is():
    """Though others beside it have its name, and begin before it, it is aggregated with none and is the first of its trace."""
    names = ("a", "b", "torch.step", "torch.step", "torch.step")
    table = trace_group_of([(name, i, i + 1, 0) for i, name in enumerate(names)])
    table = replace(table, span_id=np.array([9, 8, ROOT, 7, 6], np.uint64))
    found, _ = cut(table, Budget(max_spans=4, short=SHORT))
    assert found.span_id.tolist() == [9, 8, ROOT, 7]
    found, done = cut(table, Budget(max_spans=2, short=0.0))
    assert (found.span_id[0], found.trace_ids[0].tolist()) == (ROOT, table.trace_ids[0].tolist())
    assert (done.parts, found.trace.tolist()) == (3, [0, 0, 1, 1, 2, 2, 3, 3])


def test_what_failed_is_folded_last():
    """An error stays where a longer span without one can go."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 1), ("b", 2, 6), ("c", 10, 90)), error=np.array([0, 1, 0, 0], np.uint8)
    )
    found, _ = cut(table, Budget(max_spans=3, short=SHORT))
    assert [row[0] for row in displayed(found)] == ["torch.step", "a", "c"]


def test_what_others_look_for_is_never_merged():
    """Collectives and what is around them keep their ids and their own attributes; the others of their name do not."""
    table = trace_group(
        ("torch.step", 0, 100, *(("f", i, i + 1, ("all_reduce", i, i + 1)) for i in range(6))),
        attributes=(attribute("torch.collective.sequence", INT64, *[None] * 4, 1, *[None] * 8),),
    )
    found, _ = cut(table, Budget(max_spans=7, short=SHORT))
    names = [
        (row[0], row[4].get("torch.aggregated.count"), row[4].get("torch.collective.sequence"))
        for row in displayed(found)
    ]
    assert names[1:] == [
        ("f", None, None),
        ("all_reduce", None, None),
        ("f", None, None),
        ("all_reduce", None, 1),
        ("f", 4, None),
        ("all_reduce", 4, None),
    ]


def test_links_go_where_spans_went():
    """Links of what is gone move to the span that replaces it, once each and none to itself; links to what is gone go to its keeper."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 1), ("a", 1, 2), ("b", 2, 3), ("b", 4, 5), ("c", 10, 90)),
        links=np.array([link(1, 5), link(2, 4), link(2, 1), link(3, 5), link(5, 3), link(5, 3, 77)], dtype=LINK),
    )
    found, _ = cut(table, Budget(max_spans=4, short=SHORT))
    assert found.span_id.tolist() == [1, 2, 4, 6]
    assert sorted(links_of(found, 1)) == [(TRACE, 1), (TRACE, 4)]
    assert links_of(found, 2) == []
    assert sorted(links_of(found, 3)) == [(77, 3), (TRACE, 2)]


def test_links_of_a_composite_are_limited():
    """An aggregate span of very many linked spans has no more links than OpenTelemetry's limit, and counts the others."""
    rows = [("torch.step", 0, 2000, 0), *(("a", i, i + 1, 1) for i in range(500))]
    links = np.array([link(i, 10_000 + i, 77) for i in range(1, 501)], dtype=LINK)
    found, _ = cut(trace_group_of(rows, links=links), Budget(max_spans=10, short=SHORT))
    assert (len(found.links), found.dropped_links.tolist()) == (128, [0, 500 - 128])


def test_what_cannot_be_cut_down_is_split():
    """Long spans all go: into linked traces of which each has the step's name and number, and holds its spans in time."""
    table = trace_group(
        ("torch.step", 0, 100, ("a", 0, 40, ("b", 0, 20), ("c", 20, 40)), ("d", 40, 70), ("e", 70, 100))
    )
    found, done = cut(table, Budget(max_spans=3, short=0.0))
    parts = [TracePart(1 << 100, 1 << 50), TracePart((1 << 100) + 1, (1 << 50) + 1)]
    reported = {"torch.recorded_spans": 6, "torch.aggregated_spans": 0, "torch.collapsed_spans": 0, "torch.parts": 2}
    assert [row[:4] for row in displayed(found)] == [
        ("torch.step", 0, 100, ""),
        ("a", 0, 40, "torch.step"),
        ("b", 0, 20, "a"),
        ("torch.step", 20, 70, ""),
        ("c", 20, 40, "torch.step"),
        ("d", 40, 70, "torch.step"),
        ("torch.step", 70, 100, ""),
        ("e", 70, 100, "torch.step"),
    ]
    assert [attributes_of(found, row) for row in (0, 3, 6)] == [
        reported,
        {"torch.step.number": 7, "torch.part": 1},
        {"torch.step.number": 7, "torch.part": 2},
    ]
    assert links_of(found, 0) == parts
    assert links_of(found, 3) == links_of(found, 6) == [(TRACE, ROOT)]
    assert links_of(found, 4) == [(TRACE, 2)], "c's parent is in the step's own trace"
    assert links_of(found, 5) == [], "the step itself is where the part's root links to"
    assert found.parent_span_id[[4, 5, 7]].tolist() == [1 << 50, 1 << 50, (1 << 50) + 1]
    assert found.step[[0, 3, 6]].tolist() == [-1, 7, 7]
    assert done == Reduction(recorded=6, parts=2, linked=tuple(parts))


def test_links_between_parts():
    """A link to a span that went to another trace goes there."""
    table = trace_group(
        ("torch.step", 0, 9, ("a", 0, 4), ("b", 4, 9)), links=np.array([link(1, 3), link(2, 2)], dtype=LINK)
    )
    found, _ = cut(table, Budget(max_spans=2, short=0.0))
    assert links_of(found, 1) == [(1 << 100, 3)]
    assert links_of(found, 3) == [(TRACE, 2)]


def test_a_unit_that_goes_in_several_tables():
    """What goes before its root goes to parts; the root then says all, and holds what has lost its parent."""
    early = trace_group_of([("a", 0, 1, 0), ("a", 1, 2, 0), ("b", 3, 9, 0)])
    early = replace(early, span_id=early.span_id + np.uint64(10), parent_span_id=np.full(3, ROOT, np.uint64))
    found, first = cut(early, Budget(max_spans=3, short=SHORT))
    assert [row[:4] for row in displayed(found)] == [
        ("torch.step", 0, 9, ""),
        ("a", 0, 2, "torch.step"),
        ("b", 3, 9, "torch.step"),
    ]
    assert links_of(found, 1) == []
    assert first == Reduction(recorded=3, aggregated=1, parts=1, linked=(TracePart(1 << 100, 1 << 50),))

    late = trace_group_of([("torch.step", 0, 20, 0), ("c", 10, 11, 1), ("d", 5, 6, 13)])
    found, second = cut(late, Budget(max_spans=3, short=SHORT), before=first)
    assert second == Reduction(recorded=3)
    assert found.parent_span_id.tolist() == [0, ROOT, ROOT]
    assert links_of(found, 0) == [(1 << 100, 1 << 50)]
    assert attributes_of(found, 0) == {
        "torch.recorded_spans": 6,
        "torch.aggregated_spans": 1,
        "torch.collapsed_spans": 0,
        "torch.parts": 1,
    }


def test_parts_have_the_number_under_another_name(monkeypatch):
    """With aliases=nemo_lens the roots of parts have the step's number as dl.iteration too."""
    monkeypatch.setenv("OTEL_TORCHPROF_RANKS", "aliases=nemo_lens")
    found, _ = cut(trace_group(("torch.step", 0, 9, ("a", 0, 4), ("b", 4, 9))), Budget(max_spans=2, short=0.0))
    own = [attributes_of(found, row) for row in range(len(found))]
    assert [attributes.get("dl.iteration") for attributes in own] == [None, None, 7, None]
    assert [attributes.get("torch.step.number") for attributes in own] == [None, None, 7, None]


def test_later_parts_count_on():
    """Numbers of parts begin after those that there were; to a parent that goes later, nobody knows where, there is no link."""
    early = trace_group_of([("a", 0, 1, 0), ("b", 3, 9, 0)])
    early = replace(early, span_id=early.span_id + np.uint64(10), parent_span_id=np.array([ROOT, 99], np.uint64))
    found, _ = cut(early, Budget(), TARGET._replace(trace_state="k=v"), before=Reduction(parts=4))
    assert attributes_of(found, 0)["torch.part"] == 5
    assert links_of(found, 2) == []
    assert found.trace_states == ("k=v",)


def test_bytes_count_too():
    """A budget of bytes is kept by the same means, with few spans."""
    table = trace_group(("torch.step", 0, 100, *(("a", i, i + 1) for i in range(50))))
    found, done = cut(table, Budget(max_bytes=2000, short=SHORT))
    assert len(found) == 2
    assert fits(found, Budget(max_bytes=2000))
    assert done.aggregated == 49
    found, done = cut(table, Budget(max_bytes=2000, short=0.0))
    for trace in range(done.parts + 1):
        assert (found.trace == trace).sum() in range(2, 30)


def test_hidden_attributes_stay_hidden(monkeypatch):
    """What no span is to have is not added either; the counts are right all the same."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "torch.aggregated.count,torch.aggregated_spans")
    table = trace_group(("torch.step", 0, 100, ("a", 0, 1), ("a", 1, 2)))
    found, done = cut(table, Budget(max_spans=2, short=SHORT))
    assert done.aggregated == 1
    assert set(attributes_of(found, 0)) == {"torch.recorded_spans", "torch.collapsed_spans", "torch.parts"}
    assert set(attributes_of(found, 1)) == {"torch.aggregated.duration"}


def test_parents_that_go_round_and_very_deep_trees():
    """Neither what is no tree nor a chain of thousands hangs or loses anything."""
    chain = trace_group_of([("torch.step", 0, 5000, 0), *(("f", i / 10, 5000 - i / 10, i) for i in range(1, 5000))])
    found, done = cut(chain, Budget(max_spans=1000))
    assert done.recorded == 5000 == len(found) - done.parts + done.aggregated + done.collapsed
    circle = replace(
        trace_group_of([("torch.step", 0, 9, 0), ("a", 0, 1, 1), ("b", 1, 2, 4), ("c", 2, 3, 3)]),
        start=np.array([BEGIN, BEGIN, BEGIN + MS, BEGIN]),
    )
    found, done = cut(circle, Budget(max_spans=2, short=0.0))
    assert done.recorded == 4 == len(found) - done.parts


@pytest.mark.parametrize("size", [1, LINK_SIZE])
def test_impossible_budgets(size):
    """A budget that nothing fits into still loses nothing: each span goes alone."""
    table = trace_group(("torch.step", 0, 9, ("a", 0, 4), ("b", 4, 9)))
    found, done = cut(table, Budget(max_spans=1, max_bytes=size, short=0.0))
    assert len(found) == 3 + done.parts == 5
