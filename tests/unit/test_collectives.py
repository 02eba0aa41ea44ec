"""Collectives have ids that every rank computes alike, and link to what the other ranks do of them."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from live_batches import Event, Service, readable

from otel_torchprof._columns.batch import Names
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, CollectiveFlag
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.collectives import LiveCollectives, collective_name, ranks_in
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import live_table
from otel_torchprof._model.step_spans import Trace

WORLD = 4


class Run:
    """Ids that all ranks of a test compute alike; a trace per rank and step, or one per step."""

    def __init__(self, rank, *, together=False):
        self.rank = rank
        self.together = together

    def trace_of(self, rank, step):
        return 1000 + step if self.together else 1000 * (rank + 1) + step

    def collective_span(self, group, sequence, rank, step, operation=""):
        span_id = zlib.crc32(repr((group, sequence, rank, operation)).encode())
        return self.trace_of(rank, step), 1 << 40 | span_id

    def linked_ranks(self, ranks):
        return tuple(rank for rank in ranks if rank != self.rank)


class Rank(Service):
    """The live model of one rank, whose drains may bring collectives."""

    def __init__(self, rank=0, *, together=False, linked=True):
        super().__init__()
        self.run = Run(rank, together=together)
        self.rank = rank
        self.links = LiveCollectives(self.run if linked else None)
        self.trees = LiveTrees(
            key=rank + 1,
            steps=self.steps,
            new_trace=self.new_trace,
            current_span=self.current_spans.get,
            collectives=self.links,
        )

    def new_trace(self, name, step, link):
        self.asked.append((name, step, link))
        return Trace(self.run.trace_of(self.rank, step), True, True)

    def table(self, *events, reported=(), final=True):
        ended = list(self.steps.take_ended())
        batch = self.recorder.drain(*events)
        reported = self.columns(reported)
        # What tells two events of a name apart, here, stands behind a space.
        batch = replace(
            batch, collectives=reported, names=Names.of([name.split(" ")[0] for name in self.recorder.names])
        )
        placed = self.trees.place(batch)
        ended += self.steps.take_ended(everything=final)
        spans = [span for step in ended for span in step.spans.values()]
        table = live_table(placed, spans, self.flows, collectives=self.links)
        return add_attributes(table, placed.batch)

    def spans(self, *events, reported=(), final=True):
        return readable(self.table(*events, reported=reported, final=final))

    def columns(self, reported):
        """What the recorder tells: by event, what differs from a collective of all ranks over gloo."""
        texts = {"group": "0", "backend": "gloo", "ranks": "", "dtype": "float", "reduce_op": ""}
        numbers = {"sequence_nr": 1, "group_size": WORLD, "rank": self.rank, "peer": -1, "root": -1, "tag": -1}
        rows = [{**texts, **numbers, "event": self.recorder.id_of(name), **more} for name, more in reported]
        value = {c.name: [row.get(c.name, 0) for row in rows] for c in COLLECTIVE_COLUMNS}
        value |= {key: [self.recorder.name_index(text) if text else 0 for text in value[key]] for key in texts}
        return {c.name: np.array(value[c.name], dtype=c.dtype) for c in COLLECTIVE_COLUMNS}


def attributes_of(table, name, nth=0):
    """The attributes of a span of that name that are about collectives."""
    row = [row for row in range(len(table)) if table.names[table.name[row]] == name][nth]
    found = {}
    for column in table.attributes:
        values, present = column.spread(len(table))
        if column.key.startswith("torch.collective.") and present[row]:
            value = values[row]
            found[column.key.removeprefix("torch.collective.")] = (
                table.names[value] if column.type.name == "NAME" else value.item()
            )
    return found


def stepping(*ranks):
    for rank in ranks:
        rank.steps.begin(0)
    return ranks


@pytest.mark.parametrize("together", [False, True])
def test_every_rank_links_to_what_the_others_do_of_a_collective(together):
    """The ids that one rank links to are those that the spans of the other ranks have, in their traces."""
    ranks = stepping(*(Rank(rank, together=together) for rank in range(WORLD)))
    reported = [("c10d::allreduce_", {"sequence_nr": 7})]
    found = [rank.spans(Event("c10d::allreduce_", 10, 20), reported=reported)["c10d::allreduce_"] for rank in ranks]
    ends = {(span.trace, span.span_id) for span in found}
    assert len(ends) == WORLD
    for span in found:
        assert set(span.links) == ends - {(span.trace, span.span_id)}
    assert len({span.trace for span in found}) == (1 if together else WORLD)


def test_children_hang_under_the_id_that_others_know():
    """Also children that are drained before the collective has ended, and those that end in a drain after it."""
    (rank,) = stepping(Rank())
    reported = [("c10d::barrier", {"sequence_nr": 3})]
    early = rank.spans(
        Event("c10d::barrier", 10), Event("aten::empty", 11, 12, "c10d::barrier"), reported=reported, final=False
    )
    own = rank.run.collective_span("0/gloo", 3, 0, 0, "barrier")[1]
    assert early["aten::empty"].parent == own
    inside = Event("gloo:barrier", 80, None, "c10d::barrier")
    late = rank.spans(Event("c10d::barrier", 10, 90), inside, reported=reported, final=False)
    assert late["c10d::barrier"].span_id == own
    assert rank.spans(Event("gloo:barrier", 80, 95, "c10d::barrier"))["gloo:barrier"].parent == own


def test_numbers_of_the_same_value_are_told_apart():
    """Where a backend gives several collectives one number, their ids differ, and are the same on every rank."""
    ranks = stepping(Rank(0), Rank(1))
    events = [Event("c10d::reduce_", 10, 20), Event("c10d::reduce_ b", 30, 40)]
    reported = [("c10d::reduce_", {"sequence_nr": 5}), ("c10d::reduce_ b", {"sequence_nr": 5, "repeat": 1})]
    one, other = (rank.spans(*events, reported=reported) for rank in ranks)
    assert one["c10d::reduce_"].span_id != one["c10d::reduce_'"].span_id
    for name in ("c10d::reduce_", "c10d::reduce_'"):
        assert (other[name].trace, other[name].span_id) in one[name].links


def transfer(sender, name, peer, **more):
    return (name, {"sequence_nr": -1, "rank": sender, "peer": peer, "tag": 0, "flags": CollectiveFlag.TRANSFER, **more})


def test_sends_and_receives_are_counted_in_their_step():
    """The second receive of a step links to the second send of that step, whatever was sent before on one of the ranks."""
    sender, receiver = stepping(Rank(2), Rank(3))
    sender.spans(Event("c10d::send", 10, 11), reported=[transfer(2, "c10d::send", 3)], final=False)
    for rank in (sender, receiver):
        rank.boundary(1, 100, 0)
    sends = sender.table(
        Event("c10d::send a", 110, 111), Event("c10d::send b", 120, 121),
        reported=[transfer(2, "c10d::send b", 3), transfer(2, "c10d::send a", 3)],
    )  # fmt: skip
    receives = receiver.spans(
        Event("c10d::recv_ a", 110, 111), Event("c10d::recv_ b", 120, 121),
        reported=[transfer(3, "c10d::recv_ a", 2), transfer(3, "c10d::recv_ b", 2)],
    )  # fmt: skip
    sent = readable(sends)
    assert [attributes_of(sends, "c10d::send", nth)["sequence_nr"] for nth in range(2)] == [0, 1]
    assert receives["c10d::recv_'"].links == [(sent["c10d::send'"].trace, sent["c10d::send'"].span_id)]
    assert sent["c10d::send"].links == [(receives["c10d::recv_"].trace, receives["c10d::recv_"].span_id)]


def test_other_ways_and_tags_are_counted_apart():
    """What is sent the other way, to another rank or with another tag does not shift the numbers."""
    (rank,) = stepping(Rank(1))
    names = ["c10d::send", "c10d::send 2", "c10d::send 3", "c10d::recv_"]
    reported = [
        transfer(1, names[0], 0), transfer(1, names[1], 2), transfer(1, names[2], 0, tag=9), transfer(1, names[3], 0),
    ]  # fmt: skip
    table = rank.table(*(Event(name, 10 * i + 10, 10 * i + 11) for i, name in enumerate(names)), reported=reported)
    numbers = [attributes_of(table, "c10d::send", nth)["sequence_nr"] for nth in range(3)]
    assert [*numbers, attributes_of(table, "c10d::recv_")["sequence_nr"]] == [0, 0, 0, 0]


def test_a_sub_group_links_its_own_ranks_only():
    """Ranks of a group are found by the group's own list; the rank in the group is not that of the world."""
    ranks = stepping(Rank(1), Rank(3))
    more = {"ranks": "1,3", "group": "5", "group_size": 2}
    found = [
        rank.spans(Event("c10d::broadcast_", 1, 2), reported=[("c10d::broadcast_", {**more, "rank": place})])
        for place, rank in enumerate(ranks)
    ]
    one, other = (spans["c10d::broadcast_"] for spans in found)
    assert one.links == [(other.trace, other.span_id)]
    assert other.links == [(one.trace, one.span_id)]


@pytest.mark.parametrize(
    "more",
    [
        {"sequence_nr": -1},
        {"rank": 7},
        {"flags": CollectiveFlag.TRANSFER, "peer": -1},
        {"flags": CollectiveFlag.TRANSFER, "peer": 9},
    ],
)
def test_what_cannot_be_told_apart_is_not_linked(more):
    """Without a number, or a place in its group, or with any rank as its peer, it is an operator like others."""
    (rank,) = stepping(Rank())
    assert rank.spans(Event("c10d::recv_", 1, 2), reported=[("c10d::recv_", more)])["c10d::recv_"].links == []


def test_nothing_is_linked_outside_of_steps_and_without_ranks():
    """Where the trace is none that others could know, collectives have attributes, and no links."""
    reported = [("c10d::allreduce_", {})]
    event = Event("c10d::allreduce_", 1, 2)
    assert Rank().spans(event, reported=reported)["c10d::allreduce_"].links == []
    (alone,) = stepping(Rank(linked=False))
    assert alone.spans(event, reported=reported)["c10d::allreduce_"].links == []


def test_a_step_in_somebodys_trace_is_not_linked():
    """A step whose trace is not the one that the ranks have computed for it keeps to itself."""
    (rank,) = stepping(Rank())
    rank.run.rank = 0
    rank.new_trace = lambda *_: Trace(1, True, True)
    rank.steps._new_trace = rank.new_trace
    assert (
        rank.spans(Event("c10d::allreduce_", 1, 2), reported=[("c10d::allreduce_", {})])["c10d::allreduce_"].links == []
    )


def test_attributes():
    """Each column becomes its attribute; what a collective does not have is not there."""
    (rank,) = stepping(Rank())
    reported = [
        (
            "c10d::_allgather_base_",
            {"sequence_nr": 4, "bytes_in": 16, "bytes_out": 64, "flags": CollectiveFlag.ASYNC},
        ),
        ("c10d::reduce_", {"sequence_nr": 5, "bytes_in": 8, "reduce_op": "max", "root": 2, "ranks": "0,1,2,3"}),
    ]
    table = rank.table(
        Event("c10d::_allgather_base_", 1, 2), Event("c10d::reduce_", 3, 4), Event("mm", 5, 6), reported=reported
    )
    common = {"group": "0", "group_size": 4, "rank": 0, "dtype": "float", "backend": "gloo"}
    assert attributes_of(table, "c10d::_allgather_base_") == {
        **common, "name": "all_gather", "sequence_nr": 4, "size": 64, "async": 1,
    }  # fmt: skip
    assert attributes_of(table, "c10d::reduce_") == {
        **common, "name": "reduce", "sequence_nr": 5, "size": 8, "reduce_op": "max", "root": 2,
    }  # fmt: skip
    assert attributes_of(table, "mm") == {}


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::recv_any_source_", "recv"),
        ("c10d::barrier", "barrier"),
        ("c10d::of_tomorrow_", "of_tomorrow"),
    ],
)
def test_names(operator, name):
    """Operators have the names that the field has for what they do; unknown ones keep their own."""
    assert collective_name(operator) == name


def test_ranks_of_a_group():
    """A group that tells no ranks is that of all."""
    assert ranks_in("", 3) == (0, 1, 2)
    assert ranks_in("4,1", 2) == (4, 1)
