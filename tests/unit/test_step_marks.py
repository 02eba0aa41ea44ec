"""Marks of the ends of steps."""

from __future__ import annotations

import threading
import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_torchprof._native.recorder import now_ns
from otel_torchprof._sources.step_marks import StepMarks

SLACK_NS = 1_000_000


def test_a_mark_tells_who_when_and_where():
    """A mark has its optimizer, thread and context; what was taken is not there any more."""
    marks, optimizer = StepMarks(), object()
    with TracerProvider().get_tracer("test").start_as_current_span("loop") as span:
        marks.note(optimizer, (), {})
    marks.note(None)
    assert len(marks) == 2
    first, second = marks.take()
    assert (first.optimizer, first.thread) == (optimizer, threading.get_ident())
    assert trace.get_current_span(first.context) is span
    assert second.optimizer is None
    assert len(marks) == 0


def test_marks_are_told_by_the_recorders_clock(monkeypatch):
    """They can be compared with events, also after the wall clock was set back, which the recorder does not follow."""
    wall = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall() - 3600 * 10**9)
    marks = StepMarks()
    before = now_ns()
    marks.note(None)
    after = now_ns()
    (mark,) = marks.take()
    assert before - SLACK_NS < mark.time_ns < after + SLACK_NS


def test_who_takes_marks_may_be_interrupted_by_one_who_does():
    """A signal handler that takes marks in the middle leaves none for the one that it has interrupted, who ends well."""
    marks, taken = StepMarks(), []
    for number in range(3):
        marks.note(number)
    for mark in marks.take():
        taken.append(mark.optimizer)
        taken += [other.optimizer for other in marks.take()]
    assert taken == [0, 1, 2]


def test_what_waits_can_be_forgotten():
    """A forked child forgets the marks of its parent."""
    marks = StepMarks()
    marks.note(None)
    marks.clear()
    assert list(marks.take()) == []
