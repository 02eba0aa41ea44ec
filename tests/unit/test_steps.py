"""Steps: where one ends and the next one begins, told by the program or by its optimizers; and the marks of their ends."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import types

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from threaded import in_threads

from otel_torchprof._native.recorder import now_ns
from otel_torchprof._record.step_marks import StepMarks, StepTracker


class Optimizer:
    """Stands for an optimizer: all that counts is which one it is."""


class Boundaries(list):
    """A tracker with a clock that ticks, and the numbers of the steps that it began."""

    def __init__(self):
        self.ticks = itertools.count(100)
        self.times = []
        self.tracker = StepTracker(self.begun, clock=lambda: next(self.ticks))

    def begun(self, number, now_ns):
        self.append(number)
        self.times.append(now_ns)

    def stepped(self, *optimizers):
        """The steps that these optimizers begin, one after the other."""
        before = len(self)
        for optimizer in optimizers:
            self.tracker.optimizer_stepped(optimizer)
        return self[before:]


@pytest.fixture
def boundaries():
    return Boundaries()


def test_the_program_tells(boundaries):
    """Every call of step() begins the next step, at the time that the clock tells."""
    assert boundaries.tracker.number == 0
    for _ in range(3):
        boundaries.tracker.step()
    assert boundaries == [1, 2, 3]
    assert boundaries.times == [100, 101, 102]
    assert boundaries.tracker.number == 3


def test_an_optimizer_that_is_used_more_often(boundaries):
    """Of two optimizers the one that is used more often sets the pace; the other does not have to catch up."""
    often, seldom = Optimizer(), Optimizer()
    for first in (1, 4, 7):
        assert boundaries.stepped(often, often, often, seldom) == [first, first + 1, first + 2]
    assert boundaries.stepped(seldom, seldom) == [10, 11]


def test_a_second_optimizer_takes_over(boundaries):
    """An optimizer that comes later joins the running step and then goes on from there."""
    first, second = Optimizer(), Optimizer()
    assert boundaries.stepped(first, first, first) == [1, 2, 3]
    assert boundaries.stepped(second, second, second) == [4, 5]


def test_a_new_optimizer_for_every_step(boundaries):
    """A program that makes a new optimizer for every step has as many steps."""
    for count in range(1, 5):
        assert boundaries.stepped(Optimizer()) == [count]


def test_explicit_steps_switch_optimizers_off(boundaries):
    """Once the program has told of a step itself, optimizers begin none any more."""
    optimizer = Optimizer()
    assert boundaries.stepped(optimizer) == [1]
    boundaries.tracker.step()
    assert boundaries.stepped(optimizer, optimizer) == []
    boundaries.tracker.step()
    assert boundaries == [1, 2, 3]


def test_what_the_boundary_raises_goes_to_the_caller():
    """An error of whoever is told of boundaries is raised where the step was told of, and the next step begins all the same."""

    def fail(number, _):
        raise ValueError(number)

    tracker = StepTracker(fail)
    with pytest.raises(ValueError, match="1"):
        tracker.step()
    with pytest.raises(ValueError, match="2"):
        tracker.step()


def test_steps_of_several_threads(boundaries):
    """Steps told of by several threads at once are all counted, and each number comes once and in order."""

    def run():
        for _ in range(200):
            boundaries.tracker.step()

    in_threads(*[run] * 4)
    assert boundaries == list(range(1, 801))
    assert boundaries.times == sorted(boundaries.times)


@pytest.fixture
def torchs_optimizers(monkeypatch):
    """A module in the place of torch's, with a class of optimizers, one derived from it, and one derived from that."""
    module = types.ModuleType("torch.optim.optimizer")

    class Base:
        def step(self):
            """Does nothing."""

    class Derived(Base):
        pass

    class Twice(Derived):
        def step(self):
            """Does nothing."""

    module.Optimizer = Base
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", module)
    return Base, Derived, Twice


def test_no_steps_are_expected_without_torch(boundaries, monkeypatch):
    """Without torch, and with a torch in which no optimizer was made, no steps are expected."""
    monkeypatch.delitem(sys.modules, "torch.optim.optimizer", raising=False)
    assert boundaries.tracker.expects_steps() is False


@pytest.mark.parametrize("made", range(1, 3))
def test_steps_are_expected_once_an_optimizer_was_made(boundaries, torchs_optimizers, made):
    """Steps are expected from the moment that torch has marked the class of an optimizer."""
    assert boundaries.tracker.expects_steps() is False

    def wrapper(self):
        """Stands for what torch puts in place of the step function."""

    wrapper.hooked = True
    torchs_optimizers[made].step = wrapper
    assert boundaries.tracker.expects_steps() is True


def test_steps_are_expected_after_a_boundary(boundaries, torchs_optimizers):
    """Steps are expected once the program has told of one."""
    boundaries.tracker.step()
    assert boundaries.tracker.expects_steps() is True


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
