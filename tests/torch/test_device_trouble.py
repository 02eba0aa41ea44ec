"""Times of a device where graphs are captured, and where its library fails."""

from __future__ import annotations

import threading

import pytest
import torch
from device_profiles import profile, tensor, times_of

import otel_torchprof as otp
from otel_torchprof._native import torch_library

pytestmark = pytest.mark.simulated_device


def test_nothing_is_recorded_while_a_stream_is_captured(simulated):
    """While a stream is captured its operators have no mark and nobody asks the device; before and after they have."""
    a = tensor(4, 4)
    simulated.duration(5_000)
    with profile() as prof:
        torch.add(a, a)
        torch_library.load().collect_devices(
            1.0
        )  # only recording a timing event in a capture detects it on this device
        with simulated.capture():
            torch.mul(a, a)
        torch.add(a, a)
    assert [own for _, own, _ in times_of(prof)] == [5_000, None, 5_000]
    assert any("captured" in note for note in prof.health.notes)
    assert not [text for text in simulated.violations() if "record" in text]


def test_graphs_are_held_apart(simulated, monkeypatch):
    """Around torch's own graphs nothing is asked of the device while one is captured, and a replay is one event with its time."""
    a = tensor(4, 4)
    simulated.duration(5_000)

    class Graph:
        def capture_begin(self):
            self.capture = simulated.capture()
            self.capture.__enter__()

        def capture_end(self):
            self.capture.__exit__(None, None, None)

        def replay(self):
            simulated.kernel("graph")

    original = Graph.replay
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    with profile() as prof:
        graph = Graph()
        with otp.record_function("capture"):
            graph.capture_begin()
            for _ in range(10_000):
                torch.mul(a, a)
            graph.capture_end()
        graph.replay()
    found = times_of(prof)
    assert simulated.violations() == []
    assert found[-1] == ("torch.cuda.CUDAGraph.replay", 5_000, 5_000)
    assert any("captured" in note for note in prof.health.notes), "what was not timed is told of"
    assert {own for name, own, _ in found if name == "aten::mul"} == {None}
    assert Graph.replay is original, "what was put around it is gone with the profile"


@pytest.mark.parametrize("what", ["record", "query", "elapsed", "is_capturing", "get_stream", "get_device"])
def test_failures_end_the_times_and_nothing_else(simulated, what):
    """Where the device's library fails, the program goes on, every operator is recorded, and health says what happened.

    The device's events go back to it, unless it does not even answer for them.
    """
    a = tensor(4, 4)
    before = simulated.counts()["alive"]
    with profile() as prof:
        torch.add(a, a)
        torch_library.load().collect_devices(1.0)  # from here on there are events to record again
        simulated.fail(what, "no such luck")
        for _ in range(10):
            with otp.record_function("label"):
                pass
        simulated.fail(what, times=0)
        for _ in range(5000):
            torch.add(a, a)
        torch_library.load().collect_devices(1.0)
        simulated.fail(what, "no such luck")
    simulated.fail(what, times=0)
    names = [name for name, _, _ in times_of(prof)]
    assert names.count("label") == 10
    assert names.count("aten::add") == 5001
    left = simulated.counts()["alive"] - before
    # An event of before that could not be recorded again may be one no more and is forgotten: this thread's, and the clock's.
    assert left == 0 or what == "query" or (what == "record" and left in {1, 2})
    with profile() as again:
        torch.add(a, a)
    assert again.health.devices == "on"
    assert again._batch().devices["duration"].tolist() == [5_000]


def test_a_device_that_cannot_be_timed(simulated):
    """Where the device refuses from the beginning the profile records all the rest, and health says why."""
    a = tensor(4, 4)
    simulated.fail("record", "out of events")
    with profile() as prof:
        torch.add(a, a)
    simulated.fail("record", times=0)
    assert "out of events" in prof.health.devices
    assert [name for name, _, _ in times_of(prof)] == ["aten::add"]


def test_a_device_that_is_too_busy_to_answer(simulated):
    """A device that does not come to a mark when the profile starts is calibrated later, and the times are all there."""
    a = tensor(4, 4)
    simulated.duration(5_000)
    simulated.manual()
    with profile() as prof:
        torch.add(a, a)
        torch.add(a, a)
        simulated.complete_all()
        simulated.instant()
    assert prof.health.devices == "on"
    assert [own for _, own, _ in times_of(prof)] == [5_000, 5_000]


def test_a_failed_device_refuses_the_next_profile(simulated):
    """While a profile whose device has failed runs, another one is told why it gets no times; when both are over it works again."""
    a = tensor(4, 4)
    with profile() as first:
        simulated.fail("record", "no such luck")
        torch.add(a, a)
        simulated.fail("record", times=0)
        with profile() as second:
            torch.add(a, a)
    assert "no such luck" in first.health.devices
    assert "no such luck" in second.health.devices
    with profile() as third:
        torch.add(a, a)
    assert third.health.devices == "on"


def test_a_thread_that_stands_in_the_device(simulated):
    """A profile stops while another thread waits inside the device's library; what that thread has goes back with the next stop."""
    a = tensor(4, 4)
    ready, go = threading.Event(), threading.Event()
    ids = []

    def work():
        torch.add(a, a)
        ids.append(threading.get_native_id())
        ready.set()
        go.wait()
        torch.mul(a, a)

    thread = threading.Thread(target=work)
    before, alive = simulated.stalled_calls(), simulated.counts()["alive"]
    with profile(all_threads=True) as prof:
        thread.start()
        ready.wait()
        torch_library.load().collect_devices(1.0)
        with simulated.stall(ids[0]):
            go.set()
            while simulated.stalled_calls() == before:
                threading.Event().wait(0.001)
            prof.stop()
            assert thread.is_alive()
    thread.join()
    assert next((name, own) for name, own, _ in times_of(prof)) == ("aten::add", 5_000)
    with profile():
        torch.add(a, a)
    assert simulated.counts()["alive"] == alive


def test_a_profile_that_begins_during_a_capture(simulated):
    """A profile that starts while its thread captures a stream asks the device nothing until that is over; then there are times."""
    a = tensor(4, 4)
    with simulated.capture():
        prof = profile()
        prof.start()
        torch.add(a, a)
    torch.mul(a, a)
    prof.stop()
    assert simulated.violations() == []
    assert times_of(prof) == [("aten::add", None, 0), ("aten::mul", 5_000, 5_000)]
