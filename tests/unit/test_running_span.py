"""The span of the step that runs, asked for by what logs a hang: asking changes nothing of what is sent."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof._columns.phases import Segment, SegmentChange
from otel_torchprof._model.step_spans import Trace
from otel_torchprof._model.steps import Steps

STEP = SegmentChange(Segment.STEP, False, False, {})
APPLICATION = SpanContext(99, 77, is_remote=False, trace_flags=TraceFlags(1))


def new_steps() -> Steps:
    """A first step has ended, outside of any span, and the next one runs."""
    ids = itertools.count(1)
    made = Steps(lambda *_: Trace(next(ids), True, True), lambda: next(ids) + 1000, lambda _: (APPLICATION, None))
    made.begin(0)
    made.boundary(Segment.STEP, 10, 0, 1)
    return made


def sent(steps: Steps) -> list:
    """What would be sent, without ids."""
    ended = steps.take_ended(everything=True)
    return [
        (step.segment, step.number, [(each, span.name, span.start, span.end) for each, span in step.spans.items()])
        for step in ended
    ]


def replaced_by_nothing(steps: Steps) -> None:
    steps.change(SegmentChange(None, False, True, {}), 12, 0, 1)
    steps.change(STEP, 20, 0, 1)
    steps.boundary(Segment.STEP, 30, 0, 1)


def replaced_by_a_checkpoint(steps: Steps) -> None:
    steps.change(SegmentChange(Segment.CHECKPOINT, False, True, {}), 12, 0, 1)
    steps.boundary(Segment.STEP, 30, 0, 1)


def in_another_context(steps: Steps) -> None:
    steps.boundary(Segment.STEP, 30, 5, 1)


@pytest.mark.parametrize("then", [replaced_by_nothing, replaced_by_a_checkpoint, in_another_context])
def test_asking_changes_nothing(then):
    """The same spans are sent, with the same numbers, whether somebody asked for that of the running step or not."""
    steps, asked = new_steps(), new_steps()
    asked.running_span()
    then(steps)
    then(asked)
    assert sent(asked) == sent(steps)


def test_the_span_is_the_one_that_is_sent():
    """What was asked for has the ids of the span that is sent when the step has ended, and is the same when asked for again."""
    steps = new_steps()
    running = steps.running_span()
    assert steps.running_span() is running
    steps.boundary(Segment.STEP, 30, 0, 1)
    spans = [span for step in steps.take_ended(everything=True) for span in step.spans.values()]
    assert running in spans
