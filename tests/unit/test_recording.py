"""The states of a recording: new, running, stopping, stopped, with interrupts and forks in between."""

from __future__ import annotations

import pytest
from forked import in_child

from otel_torchprof._native.ffi import lib
from otel_torchprof._native.recorder import Session
from otel_torchprof._record.recording import Recording, State
from otel_torchprof._record.source import Source
from otel_torchprof.errors import NativeError

MAX_SESSIONS: int = lib.OTP_MAX_SESSIONS


class Noted(Source):
    """Notes its start and its stop, either of which may be interrupted once."""

    def __init__(self, name: str, notes: list[str], *, early: bool = False, interrupted: str = "") -> None:
        self.name, self._notes, self._interrupted = name, notes, interrupted
        self.starts_before_session = early

    def start(self, session: Session) -> None:
        self._note("start")

    def stop(self) -> None:
        self._note("stop")

    def _note(self, what: str) -> None:
        if self._interrupted == what:
            self._interrupted = ""
            raise KeyboardInterrupt
        self._notes.append(f"{what} {self.name}")


def session() -> Session:
    return Session(1 << 20)


def test_sources_stop_in_reverse_order():
    """Those that start before the session do, whatever their place; what started last stops first."""
    notes: list[str] = []
    recording = Recording()
    recording.start(session(), [Noted("a", notes), Noted("early", notes, early=True), Noted("b", notes)])
    assert recording.state is State.RUNNING
    recording.stop()
    recording.stop()
    assert recording.state is State.STOPPED
    assert notes == ["start early", "start a", "start b", "stop b", "stop a", "stop early"]


def test_an_interrupted_start_leaves_it_new():
    """What had been started is stopped, and it can be started again."""
    notes: list[str] = []
    recording = Recording()
    with pytest.raises(KeyboardInterrupt):
        recording.start(session(), [Noted("a", notes), Noted("b", notes, interrupted="start")])
    assert recording.state is State.NEW
    assert notes == ["start a", "stop b", "stop a"]
    recording.start(session())
    recording.stop()
    assert recording.state is State.STOPPED


def test_an_interrupted_stop_is_done_by_the_next():
    """Until then the recording is stopping."""
    notes: list[str] = []
    recording = Recording()
    recording.start(session(), [Noted("a", notes), Noted("b", notes, interrupted="stop")])
    with pytest.raises(KeyboardInterrupt):
        recording.stop()
    assert recording.state is State.STOPPING
    assert recording.running
    recording.stop()
    assert recording.state is State.STOPPED
    assert notes == ["start a", "start b", "stop b", "stop a"]


class DrainedBeforeItStops(Source):
    """Another thread reads what is left of the session, and others begin and end, before this source has stopped."""

    def __init__(self) -> None:
        self.others: list[int] = []

    def start(self, session: Session) -> None:
        self._session = session

    def stop(self) -> None:
        self._session.drain()
        for _ in range(2 * MAX_SESSIONS):
            other = session()
            other.start()
            self.others.append(other.consumer)
            other.stop()


def test_a_bit_is_reserved_until_the_sources_have_stopped():
    """What a source does at its stop, by the bit of its session, is done to no other session that has got it."""
    source, own = DrainedBeforeItStops(), session()
    recording = Recording()
    recording.start(own, [source])
    recording.stop()
    assert len(source.others) == 2 * MAX_SESSIONS
    assert own.consumer not in source.others
    bits = set()
    for _ in range(MAX_SESSIONS):
        other = session()
        other.start()
        bits.add(other.consumer)
        other.stop()
    assert own.consumer in bits


def test_in_a_forked_child_it_is_the_parents():
    """A child can stop nothing of it, is told so where that is asked for, and can start it anew; the parent's continues."""
    notes: list[str] = []
    recording = Recording(raises=True)
    recording.start(session(), [Noted("a", notes)])

    def child() -> tuple[bool, bool, list[str]]:
        was_parents = recording.is_parents
        with pytest.raises(NativeError):
            recording.stop()
        recording.start(session(), [Noted("b", notes)])
        recording.stop()
        return was_parents, recording.is_parents, notes

    assert in_child(child) == repr((True, False, ["start a", "start b", "stop b"]))
    recording.stop()
    assert notes == ["start a", "stop a"]
