"""Ids that ranks derive, and which of them export."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from otel_torchprof import config
from otel_torchprof._ranks.rank_ids import (
    Run,
    collective_span_id,
    linked_peers,
    step_ids,
    step_span_id,
    step_trace_id,
)
from otel_torchprof._ranks.ranks import Place, exporting

RUN = Run("job", 1, "a")


def test_ids_are_the_same_everywhere_and_in_every_version():
    """Ranks that run different versions of Python, or of this package, derive the same: these values must never change."""
    assert step_trace_id(RUN, 3, 2) == 0xDB262DFBF8A3BD1FD33ACC140675E62F
    assert step_trace_id(RUN, 3, None) == 0x86D1CC59BF9A803726B32DBDE9044520
    assert step_span_id(RUN, 3, 2) == 0xEAA4EAA085275E52
    assert collective_span_id(RUN, 2, "0", 7, "allreduce") == 0x3F78DE0EBF98814E


def test_ids_differ_by_all_that_they_are_made_from():
    """Another run, restart, attempt, rank or step has other ids; each is valid."""
    runs = [RUN, RUN._replace(run_id="other"), RUN._replace(restart=2), RUN._replace(attempt="b")]
    traces = {step_trace_id(run, step, rank) for run in runs for step in range(20) for rank in (*range(8), None)}
    spans = {step_span_id(run, step, rank) for run in runs for step in range(20) for rank in range(8)}
    collectives = {
        collective_span_id(run, rank, group, sequence, operation)
        for run in runs
        for rank in range(4)
        for group in ("1", "11")
        for sequence in (1, 11)
        for operation in ("", "1")
    }
    assert (len(traces), len(spans), len(collectives)) == (4 * 20 * 9, 4 * 20 * 8, 4 * 4 * 8)
    assert 0 < min(traces) < max(traces) < 1 << 128
    assert 0 < min(spans | collectives) < max(spans | collectives) < 1 << 64


def test_samplers_by_trace_id_take_their_share():
    """Of 4,000 steps a sampler of 25 % takes as many as chance does (within five standard deviations)."""
    sampler = TraceIdRatioBased(0.25)
    taken = sum(
        sampler.should_sample(None, step_trace_id(RUN, step, 0), "torch.step").decision is Decision.RECORD_AND_SAMPLE
        for step in range(4000)
    )
    assert abs(taken - 1000) < 5 * np.sqrt(4000 * 0.25 * 0.75)


def test_apart_each_rank_has_a_trace_and_links_to_the_first():
    """The first exporting rank has nobody to link to; the others link to its span of the same step."""
    first, other = (step_ids(RUN, 5, rank, layout="apart", first=1) for rank in (1, 3))
    assert first.trace_id != other.trace_id
    assert (first.parent_span_id, first.links) == (0, ())
    assert (other.parent_span_id, other.links) == (0, ((first.trace_id, first.span_id),))


def test_together_all_ranks_are_below_the_first():
    """One trace, whose root is the step of the first rank that exports."""
    first, other = (step_ids(RUN, 5, rank, layout="together", first=1) for rank in (1, 3))
    assert first.trace_id == other.trace_id
    assert (first.parent_span_id, other.parent_span_id) == (0, first.span_id)
    assert (first.links, other.links) == ((), ())


@pytest.mark.parametrize(
    ("ranks", "rank", "most", "expected"),
    [
        (range(4), 1, 128, (0, 2, 3)),
        ((4, 8, 12), 8, 128, (4, 12)),
        ((4, 8, 12), 9, 128, ()),
        ((), 0, 128, ()),
        (range(16), 3, 4, (0, 1, 2, 4)),
        (range(16), 3, 0, ()),
        (range(17), 0, 128, (16, 1)),
        (range(17), 16, 128, (0, 15)),
        (range(100), 50, 128, (0, 49, 51)),
        (range(100), 50, 2, (0, 49)),
    ],
)
def test_linked_peers(ranks, rank, most, expected):
    """All others in a small group; the first and the neighbours in a large one; never more than allowed."""
    assert linked_peers(tuple(ranks), rank, most) == expected


def places(world: int, local: int) -> list[Place]:
    return [Place(rank, world, rank % local, local, rank // local) for rank in range(world)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("all", list(range(8))), ("node", [0, 4]), ("one", [0])],
)
def test_who_exports(choice, expected):
    """Every rank finds for itself whether it does, and all agree on how many do and on the first."""
    found = [exporting(choice, place) for place in places(8, 4)]
    assert [rank for rank, each in enumerate(found) if each.own] == expected
    assert {each[1:] for each in found} == {(len(expected), 0)}


@pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.25, 4), (0.5, 8), (0.99, 16)])
def test_a_share_of_the_ranks(share, count):
    """So many as the share says, at least one; the run decides which, and all ranks know."""
    for seed in ("one run", "another"):
        found = [exporting(share, place, seed) for place in places(16, 4)]
        chosen = [rank for rank, each in enumerate(found) if each.own]
        assert len(chosen) == count
        assert {each[1:] for each in found} == {(count, chosen[0])}
    a, b = ([exporting(0.5, place, seed).own for place in places(16, 4)] for seed in ("one run", "another"))
    assert a != b


def test_nodes_that_are_not_known_export():
    """Where a rank does not know whether it is the first of its node it is not silent: nothing would be seen of that node."""
    assert exporting("node", Place(5, 8)) == (True, 8, 0)


@pytest.mark.parametrize("value", ["most", "", 0, -1, 1.5, True, None, float("nan")])
def test_bad_choices(value):
    """What is no strategy is refused, with what is allowed."""
    with pytest.raises(ValueError, match="allowed are all, node, one, and a share above 0, up to 1"):
        config.EXPORT_RANKS.check(value)


@pytest.mark.parametrize(
    ("value", "expected"), [("ALL", "all"), ("node", "node"), ("0.5", 0.5), (1, "all"), ("1.0", "all")]
)
def test_good_choices(value, expected):
    """Of a variable and of a keyword; all of them is no sample."""
    assert config.EXPORT_RANKS.check(value) == expected


def test_layouts():
    """There are two."""
    assert config.RANKS.check(" Together ") == "together"
    with pytest.raises(ValueError, match="it must be one of 'apart', 'together'"):
        config.RANKS.check(3)
