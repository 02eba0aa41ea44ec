"""Segments of a job by the word of a framework: what begins, what ends, and what turns out to be no step."""

from __future__ import annotations

import itertools

import pytest

from otel_torchprof._columns.phases import NEXT_STEP, Segment, SegmentChange
from otel_torchprof._model.step_spans import Trace
from otel_torchprof._model.steps import Steps
from otel_torchprof._record.step_marks import LoopMarks

BEGIN = SegmentChange(ends_step=False)


class Job(Steps):
    """Steps whose clock is in ns, and that count what traces were asked for."""

    def __init__(self):
        self.asked = []
        ids = itertools.count(1)

        def new_trace(name, number, _link):
            self.asked.append((name, number))
            return Trace(next(ids), True, True)

        super().__init__(new_trace, lambda: next(ids), {}.get)
        self.now = itertools.count(100, 10)

    def say(self, *changes):
        for change in changes:
            self.change(change, next(self.now), 0, 1)
        return self

    def found(self):
        """Kind, number, begin and end of all."""
        return [(step.segment, step.number, step.start, step.end) for step in self.known()]


@pytest.fixture
def job():
    return Job()


def test_a_loop_may_begin(job):
    """The first change may begin a step and end none, and the last end one and begin none."""
    job.say(BEGIN, NEXT_STEP, SegmentChange(None))
    assert job.found() == [(Segment.STEP, 0, 100, 110), (Segment.STEP, 1, 110, 120)]
    assert job.threads == {1}


def test_segments_take_turns(job):
    """Evaluations and checkpoints stand between steps, which are numbered without them."""
    job.say(
        BEGIN, SegmentChange(Segment.EVALUATION), SegmentChange(Segment.CHECKPOINT, ends_step=False), BEGIN, NEXT_STEP
    )
    assert [found[:2] for found in job.found()] == [
        (Segment.STEP, 0),
        (Segment.EVALUATION, -1),
        (Segment.CHECKPOINT, -1),
        (Segment.STEP, 1),
        (Segment.STEP, 2),
    ]


def test_attributes_are_those_of_what_ends(job):
    """The span of the step that ends has them, and no other."""
    job.say(BEGIN, SegmentChange(attributes={"torch.step.loss": 2.5}), NEXT_STEP)
    first, second, _ = job.known()
    assert first.spans[0].attributes == {"torch.step.loss": 2.5}
    assert second.spans[0].attributes == {}


@pytest.mark.parametrize("has_spans", [False, True])
def test_what_was_begun_as_a_step_may_turn_out_to_be_none(job, has_spans):
    """It is the other segment from its start on, and the next step has its number; spans that are known already follow."""
    job.say(BEGIN, NEXT_STEP)
    running = job.known()[-1]
    span = job.span(running, 0) if has_spans else None
    job.say(SegmentChange(Segment.EVALUATION, ends_step=False, replaces_step=True), BEGIN)
    assert [found[:3] for found in job.found()] == [
        (Segment.STEP, 0, 100),
        (Segment.EVALUATION, -1, 110),
        (Segment.STEP, 1, 130),
    ]
    if span is not None:
        assert (span.name, span.number, span.segment) == ("torch.evaluation", -1, Segment.EVALUATION)
    else:
        assert ("torch.evaluation", -1) in job.asked


def test_what_follows_the_last_step_is_none(job):
    """A step that was begun before the loop's end was known is not there, and the next loop continues with its number."""
    job.say(BEGIN, NEXT_STEP, SegmentChange(None, ends_step=False, replaces_step=True), BEGIN)
    assert [found[:2] for found in job.found()] == [(Segment.STEP, 0), (Segment.STEP, 1)]
    assert job.completed == 1


def test_nothing_is_replaced_but_a_running_step(job):
    """Where an evaluation runs, what comes after it ends it."""
    job.say(
        BEGIN, SegmentChange(Segment.EVALUATION), SegmentChange(Segment.CHECKPOINT, ends_step=False, replaces_step=True)
    )
    assert [found[0] for found in job.found()] == [Segment.STEP, Segment.EVALUATION, Segment.CHECKPOINT]


def test_everybody_is_told_who_wants_to_be():
    """Each recording is told once, until it is taken out; one that was not there can be taken out too."""
    told = []

    class Listener:
        def change_segment(self, change):
            told.append((self, change))

    first, second, marks = Listener(), Listener(), LoopMarks()
    for listener in (first, second, first):
        marks.add(listener)
    marks.change(BEGIN)
    marks.remove(first)
    marks.remove(first)
    marks.change(NEXT_STEP)
    assert told == [(first, BEGIN), (second, BEGIN), (second, NEXT_STEP)]
