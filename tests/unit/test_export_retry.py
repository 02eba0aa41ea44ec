"""Attempts, waits and the one deadline, on a clock of the test's own."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from otel_torchprof._export.http import retry_after
from otel_torchprof._export.response import Backoff, Outcome, Response, deliver, one_line, root_cause
from otel_torchprof._process.deadline import Deadline

ACCEPTED = Response(Outcome.ACCEPTED)
EVEN = Backoff(first=1, longest=8, jitter=0, shortest=0.1)


class World:
    """A clock, a receiver that gives the answers it was told to, and what happened when."""

    def __init__(self, *answers, seconds_per_attempt=0.0, woken_at=float("inf")):
        self.now = 100.0
        self.answers = list(answers)
        self.seconds_per_attempt = seconds_per_attempt
        self.woken_at = woken_at
        self.attempts = []
        self.waits = []

    def attempt(self, timeout):
        self.attempts.append((self.now - 100, timeout))
        self.now += self.seconds_per_attempt
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return self.now >= self.woken_at

    def deliver(self, timeout=10.0, backoff=EVEN):
        return deliver(
            self.attempt,
            deadline=Deadline.after(timeout, lambda: self.now),
            wait=self.wait,
            backoff=backoff,
            retrying=lambda response, seconds: None,
        )


def later(reason="busy", wait=None):
    return Response(Outcome.RETRY, reason, wait=wait)


@pytest.mark.parametrize("outcome", [Outcome.ACCEPTED, Outcome.REFUSED, Outcome.TOO_LARGE])
def test_a_final_answer_is_final(outcome):
    """What is accepted or refused is not sent again."""
    world = World(Response(outcome, "so it is"))
    assert world.deliver() == Response(outcome, "so it is")
    assert world.attempts == [(0, 10)]


def test_waits_double_within_the_deadline():
    """Each wait is twice the one before; an attempt has the time that is left; a wait past the deadline is not begun."""
    world = World(later())
    response = world.deliver(timeout=10)
    assert world.attempts == [(0, 10), (1, 9), (3, 7), (7, 3)]
    assert response.outcome is Outcome.REFUSED
    assert response.reason == "busy (after 4 attempts, with no time left to wait 8.0 s for another)"


def test_the_receivers_wait_counts_first():
    """A wait that the receiver asks for replaces our own; one of 0 is no invitation to hammer it."""
    world = World(later(wait=3.5), later(wait=0), later(), ACCEPTED)
    assert world.deliver() is ACCEPTED
    assert world.waits == [3.5, 0.1, 4]


def test_a_receiver_that_wants_more_time_than_there_is():
    """It is given up at once, without waiting in vain."""
    world = World(later("come back tomorrow", wait=86_400))
    assert "come back tomorrow (after 1 attempts" in world.deliver().reason
    assert world.waits == []


def test_attempts_use_up_the_deadline():
    """The time of the attempts counts: together with the waits they never go past the deadline."""
    world = World(later(), seconds_per_attempt=4.0)
    world.deliver(timeout=10)
    assert world.attempts == [(0, 10), (5, 5)]


def test_woken_while_waiting():
    """A shutdown during a wait ends it, and the reason says both."""
    world = World(later(), woken_at=100)
    assert world.deliver().reason == "busy (shut down while waiting to try again)"
    assert len(world.attempts) == 1


def test_jitter():
    """Waits are spread around their value, on both sides, and never grow beyond bounds."""
    backoff = Backoff(first=1, longest=5, jitter=0.2)
    waits = {backoff.wait(0, None) for _ in range(200)}
    assert min(waits) < 1 < max(waits)
    assert all(0.8 <= wait <= 1.2 for wait in waits)
    assert 4 <= backoff.wait(10_000, None) <= 6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", None),
        ("3", 3),
        ("0.5", 0.5),
        ("-3", 0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
)
def test_retry_after(value, expected):
    """Seconds and dates are understood, the past means now, and nonsense is as if it were not there."""
    assert retry_after(value) == expected


def test_retry_after_a_date(monkeypatch):
    """A date in the future is the seconds until then."""
    monkeypatch.setattr(time, "time", lambda: 1_000_000)
    assert retry_after(formatdate(1_000_007, usegmt=True)) == 7


def test_a_deadline():
    """It counts down to 0 and stays there; without an end it can still be handed to a wait."""
    now = [5.0]
    deadline = Deadline.after(2, lambda: now[0])
    assert (deadline.remaining(), deadline.passed) == (2, False)
    now[0] = 9
    assert (deadline.remaining(), deadline.passed) == (0, True)
    assert 0 < Deadline.after(float("inf")).remaining() < float("inf")


def test_somebody_elses_text():
    """It is put on one line and cut."""
    assert one_line(" a\n\n b\t") == "a b"
    assert len(one_line("x" * 10_000)) == 304


def test_root_cause():
    """The system's error at the bottom is told; what a layer above said is not, as it may show a URL."""
    error = RuntimeError("http://user:secret@host")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert root_cause(error) == "ConnectionRefusedError: [Errno 111] Connection refused"
    assert root_cause(ValueError("http://user:secret@host")) == "ValueError"
