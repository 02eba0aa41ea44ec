"""Marks of the ends of steps."""

from __future__ import annotations

import threading
import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_torchprof._native.recorder import now_ns
from otel_torchprof._record.step_marks import StepMarks

SLACK_NS = 1_000_000


def test_a_mark_tells_who_when_and_where():
    """A mark has its thread and context; what was taken is not there any more."""
    marks = StepMarks()
    with TracerProvider().get_tracer("test").start_as_current_span("loop") as span:
        marks.note()
    marks.note()
    assert len(marks) == 2
    first, second = marks.take()
    assert first.thread == second.thread == threading.get_ident()
    assert trace.get_current_span(first.context) is span
    assert trace.get_current_span(second.context) is not span
    assert len(marks) == 0


def test_marks_are_told_by_the_recorders_clock(monkeypatch):
    """They can be compared with events, also after the wall clock was set back, which the recorder does not follow."""
    wall = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall() - 3600 * 10**9)
    marks = StepMarks()
    before = now_ns()
    marks.note()
    after = now_ns()
    (mark,) = marks.take()
    assert before - SLACK_NS < mark.time_ns < after + SLACK_NS


def test_who_takes_marks_may_be_interrupted_by_one_who_does():
    """A signal handler that takes marks in the middle leaves none for the one that it has interrupted, who ends well."""
    marks, taken = StepMarks(), []
    for _ in range(3):
        marks.note()
    for mark in marks.take():
        taken.append(mark.time_ns)
        taken += [other.time_ns for other in marks.take()]
    assert len(taken) == 3
    assert taken == sorted(taken)
