"""Steps that one drain brought whole and that are not sampled: left out before they become spans, as if they had."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from random_recordings import recordings
from trace_group_tables import attributes_of

from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, Kind
from otel_torchprof._encode.spans import drained_spans
from otel_torchprof._export.policy import TargetTrace
from otel_torchprof._export.root_only import left_out, root_only, without_left_out
from otel_torchprof._model.live import placed_recording
from otel_torchprof._model.live_table import Flows
from otel_torchprof._model.placed import TraceGroup
from otel_torchprof._model.span_table import extend_names
from otel_torchprof._model.span_tables import taken
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native.loops import roots_of

PHASES = ["torch.phase.data", "torch.phase.forward", "torch.phase.decode", "gloo:all_reduce", "all_reduce"]
STEPS = 5
SAID = ("torch.recorded_spans", "torch.averages", "torch.collectives")


def recording(seed):
    """A recording in which some events are phases, collectives, or the work of a backend; and its steps."""
    chance = np.random.default_rng(seed)
    batch = recordings(seed, 80)[0]
    own = chance.random(len(batch)) < 0.4
    name = np.where(own, len(batch.names) + chance.integers(0, len(PHASES), len(batch)), batch["name"])
    calls = np.flatnonzero(name == len(batch.names) + len(PHASES) - 1)
    columns = {column.name: np.ones(len(calls), column.dtype) for column in COLLECTIVE_COLUMNS}
    columns["event"], columns["sequence_nr"] = batch["id"][calls], chance.integers(-1, 9, len(calls))
    names = extend_names(batch.names, PHASES)
    batch = replace(
        batch, columns={**batch.columns, "name": name.astype(np.uint32)}, names=names, collectives=columns or None
    )
    cuts = np.linspace(int(batch["start"].min(initial=0)), int(batch["end"].max(initial=9)) + 1, STEPS + 1).astype(int)
    return batch, [RecordedStep(n, *map(int, times)) for n, times in enumerate(itertools.pairwise(cuts))]


def placed_with_left_out(seed):
    """The placed events and the spans of steps of a recording, and what is left out of every other step."""
    batch, steps = recording(seed)
    ids = itertools.count(1)
    placed, spans = placed_recording(batch, steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    left = left_out(placed, spans[seed % 2 :: 2], lambda *_root: True)
    return placed, spans, left


def said(table, span_id):
    """What a span of a table says of what was left out."""
    return {key: attributes_of(table, int(np.flatnonzero(table.span_id == span_id)[0])).get(key) for key in SAID}


def check_as_if_made(placed, spans, left, roots):
    """Of each root the same spans stay, and it says the same, as where all of its spans are in a table first."""
    whole = drained_spans(placed, spans, Flows())
    less = without_left_out(whole, left)
    trace_group = np.where(whole.row >= 0, placed.root[whole.row], whole.span_id) if len(placed.root) else whole.span_id
    stays = set(less.span_id.tolist())
    for root in roots:
        own = taken(whole, np.flatnonzero(trace_group == root))
        if root in left.roots:
            own = root_only(own, TargetTrace(1, root, "root", 7))
            assert said(less, root) == said(own, root)
        assert set(own.span_id.tolist()) <= stays
        stays -= set(own.span_id.tolist())
    assert not stays
    assert left.size == len(whole) - len(less)


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_as_if_their_spans_were_made_and_left_out(seed):
    """Whatever is in a step, by threads, phases and collectives."""
    placed, spans, left = placed_with_left_out(seed)
    check_as_if_made(placed, spans, left, [span.span_id for span in spans])


@pytest.mark.parametrize("seed", range(20))
def test_top_level_events_are_as_if_their_spans_were_made_and_left_out(seed):
    """Events in no step are asked about by their names, without addresses; those with nothing below them stay as they are."""
    batch, steps = recording(seed)
    name = np.where(batch["kind"] == Kind.FRAME, len(batch.names), batch["name"]).astype(np.uint32)
    waits = len(batch.names) - len(PHASES)
    name[name == waits] += 1  # what one thread waits for, others may run in, which the table of one tree does not know
    names = extend_names(batch.names, ["<built-in method relu of Tensor object at 0x7f00aa>"])
    batch = replace(batch, columns={**batch.columns, "name": name}, names=names)
    ids = itertools.count(1)
    placed, _ = placed_recording(batch, steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    groups = [TraceGroup(group.trace, group.parent_span_id) for group in placed.trace_groups]
    placed = placed._replace(trace_groups=groups, root=placed.span_id[roots_of(batch["parent"])])
    asked = []

    def keeps(key, *name_duration_and_trace):
        asked.append(name_duration_and_trace)
        return bool(key % 2)

    left = left_out(placed, [], keeps)
    tops = np.flatnonzero(batch["parent"] < 0)
    if left is not None:
        check_as_if_made(placed, [], left, placed.span_id[tops].tolist())
    durations = (batch["end"] - batch["start"])[tops]
    assert [duration for _, duration, _ in asked] == durations.tolist()
    assert not any("0x" in name for name, *_ in asked)


@pytest.mark.parametrize("seed", range(20))
def test_a_table_without_them_is_the_same(seed):
    """Spans that were never made leave the table that is left when they are taken out: ids, times, attributes and links."""
    placed, spans, left = placed_with_left_out(seed)
    tables = (
        without_left_out(drained_spans(placed, spans, Flows()), left),
        without_left_out(drained_spans(placed, spans, Flows(), left_out=left.events), left),
    )
    one, other = (
        [
            (
                table.names[table.name[row]],
                *(int(getattr(table, key)[row]) for key in COLUMNS),
                attributes_of(table, row),
            )
            for row in range(len(table))
        ]
        for table in tables
    )
    assert one == other
    assert tables[0].links.tobytes() == tables[1].links.tobytes()


COLUMNS = ("start", "end", "span_id", "parent_span_id", "error", "row", "step")


@pytest.mark.parametrize("seed", range(20))
def test_links_lead_to_the_roots(seed):
    """What autograd numbered and was left out is known by its id, with the root of its step and the trace of that."""
    placed, spans, left = placed_with_left_out(seed)
    ids, roots, traces = left.moved
    of_root = {span.span_id: span.trace.trace_id for span in spans}
    assert set(ids.tolist()) <= set(placed.span_id[left.events].tolist())
    assert [int.from_bytes(trace.tobytes(), "big") for trace in traces] == [of_root[root] for root in roots.tolist()]
