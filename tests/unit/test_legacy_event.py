"""LegacyEvent by itself: its serial form, and the time between two on the CPU and on devices."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof.errors import TorchProfError
from otel_torchprof.legacy import EventKind, LegacyEvent, OnDevice

INT = st.integers(-(2**63), 2**63 - 1)

EVENTS = st.builds(
    lambda device, **rest: LegacyEvent(device=device[0], cuda_us=device[1], is_remote=True, **rest),
    kind=st.sampled_from(EventKind),
    name=st.text(max_size=20),
    thread_id=st.integers(0, 2**64 - 1),
    cpu_ns=st.integers(1, 2**63 - 1),
    handle=st.integers(0, 2**64 - 1),
    shapes=st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=4),
    node_id=INT,
    cpu_memory_usage=INT,
    cuda_memory_usage=INT,
    device=st.one_of(st.just((-1, -1)), st.tuples(st.integers(0, 127), st.integers(0, 2**53))),
)


def event(**rest):
    """A begin."""
    return LegacyEvent(EventKind.PUSH, "name", 1, **{"cpu_ns": 1000, **rest})


class Point:
    """A device event that knows its time."""

    def __init__(self, milliseconds):
        self.milliseconds = milliseconds

    def elapsed_time(self, end_event):
        return end_event.milliseconds - self.milliseconds


def on_device(device, milliseconds):
    """A local event with a device event."""
    found = event()
    found.set_device_event(OnDevice(device, Point(milliseconds)))
    return found


def said(found):
    """What an event answers to every question."""
    names = [name for name in dir(LegacyEvent) if not name.startswith(("_", "set_", "from_"))]
    return {name: getattr(found, name)() for name in names if not name.endswith("elapsed_us")}


@given(EVENTS)
def test_there_and_back(original):
    """Through the serial form, and JSON, an event comes back as it was: kind, times, memory, device and the rest."""
    values = original.to_ivalue()
    copy = LegacyEvent.from_ivalue(json.loads(json.dumps(values)))
    assert said(copy) == said(original)
    assert copy.to_ivalue() == values


def test_what_comes_back_is_remote():
    """A local event becomes a remote one, which has the device time that it was given in place of its device event."""
    local = on_device(2, 5.0)
    local.set_cuda_us(5000)
    copy = LegacyEvent.from_ivalue(local.to_ivalue())
    assert not local.is_remote()
    assert (copy.is_remote(), copy.has_cuda(), copy.device(), copy.node_id()) == (True, True, 2, -1)
    assert copy.from_node(7).node_id() == 7
    assert copy.from_node(None).node_id() == -1


GOOD = event(shapes=[[1]]).to_ivalue()


def changed(place, value):
    """A serial form with one other value."""
    return [*GOOD[:place], value, *GOOD[place + 1 :]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tuple(GOOD), "is a list, not tuple"),
        (None, "is a list, not NoneType"),
        ([], "of version none: this package reads version 1"),
        (changed(0, 2), "of version 2: this package reads version 1"),
        (changed(0, "1"), "of version '1'"),
        (changed(0, True), "of version True"),
        (GOOD[:-1], "Expected 13 elements to reconstruct LegacyEvent.* but got 12"),
        ([*GOOD, 0], "Expected 13 elements to reconstruct LegacyEvent.* but got 14"),
        (changed(1, 4), "kind .* is 4; allowed are 0 to 3"),
        (changed(1, True), "kind .* is True; it must be a int"),
        (changed(2, b"x"), "name .* must be a str"),
        (changed(3, 1.0), "thread_id .* is 1.0; it must be a int"),
        (changed(7, 0), "cpu_ns .* is 0; it must be above 0"),
        (changed(8, True), "has has_cuda True and device -1"),
        (changed(10, 0), "has has_cuda False and device 0"),
        ([*GOOD[:8], True, 0, 0, -1, []], "device 0 has cuda_us -1"),
        ([*GOOD[:8], True, 0, -2, 5, []], "device -2 has cuda_us 5"),
        (changed(12, (1,)), "shapes .* must be a list"),
        (changed(12, [1]), "shapes .* has 1; each must be a list of int"),
        (changed(12, [[1.5]]), r"shapes .* has \[1.5\]"),
    ],
)
def test_what_is_no_event(values, message):
    """Another version, length, type or range is refused with what is wrong."""
    with pytest.raises(ValueError, match=message):
        LegacyEvent.from_ivalue(values)


def test_an_event_with_a_device_event_but_no_device_time():
    """It cannot be sent: the other side could not tell when it was."""
    with pytest.raises(ValueError, match="cuda_us -1"):
        on_device(0, 1.0).from_node(1)


def test_time_on_the_cpu():
    """Microseconds between two events, negative backwards."""
    early, late = event(cpu_ns=1000), event(cpu_ns=3500)
    assert (early.cpu_elapsed_us(late), late.cpu_elapsed_us(early), early.start_us()) == (2.5, -2.5, 1.0)


def test_time_between_local_device_events():
    """The device is asked, in milliseconds; the answer is in microseconds."""
    assert on_device(0, 1.5).cuda_elapsed_us(on_device(0, 4.0)) == 2500


def test_time_between_remote_device_events():
    """The times that came with them are told apart."""
    early, late = (event(is_remote=True, device=1, cuda_us=us) for us in (10, 25))
    assert early.cuda_elapsed_us(late) == 15


@pytest.mark.parametrize(
    ("early", "late", "message"),
    [
        (event(), on_device(0, 1), "Events were not recorded for CUDA"),
        (on_device(0, 1), event(), "Events were not recorded for CUDA"),
        (event(device=1, cuda_us=5), event(device=1, cuda_us=5), "Events were not recorded for CUDA"),
        (on_device(0, 1), on_device(1, 2), "Events are not on the same device: 1 vs 0"),
        (on_device(0, 1), event(is_remote=True, device=0, cuda_us=1), "of this process and one of another"),
    ],
)
def test_no_time_between_device_events(early, late, message):
    """What has no device event, or one of another device, has torch's errors."""
    with pytest.raises(TorchProfError, match=message):
        early.cuda_elapsed_us(late)


def test_its_text():
    """The text says what it is."""
    assert repr(event(handle=3)) == "<LegacyEvent push 'name' handle=3 thread=1>"
