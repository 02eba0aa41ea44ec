"""What the native part tells of collectives is put beside the events that it is of, in whatever drain they come."""

from __future__ import annotations

import numpy as np
import pytest
from live_batches import Event, Recorder

from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS
from otel_torchprof._native.torch_library import no_collectives
from otel_torchprof._record import collective_source
from otel_torchprof._record.collective_source import CollectiveSource
from otel_torchprof.errors import TorchLibraryError


class Library:
    """Tells of collectives what a test says, once."""

    def __init__(self):
        self.reported = []
        self.lost = 0
        self.ended = False

    def report_collectives(self, _session, _most):
        return self

    def take(self):
        reported, self.reported = ([] if self.ended else self.reported), []
        rows = {c.name: [entry.get(c.name, 0) for entry in reported] for c in COLLECTIVE_COLUMNS}
        return {c.name: np.array(rows[c.name], dtype=c.dtype) for c in COLLECTIVE_COLUMNS}

    def stop(self):
        rest = self.take()
        self.ended = True
        return rest


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def recorder():
    return Recorder()


def started(library):
    """A source that has begun."""
    source = CollectiveSource(library)
    source.start(None)
    return source


def drained(source, recorder, *events):
    """The events of a drain that are told to be collectives."""
    return source.decorate(recorder.drain(*events)).collectives["event"].tolist()


def test_an_open_collective_is_told_with_each_drain_until_it_has_ended(library, recorder):
    """Its children may come in any of them; after its end it is told no more."""
    source = started(library)
    event = recorder.id_of("c10d::barrier")
    library.reported = [{"event": event}]
    assert drained(source, recorder, Event("c10d::barrier", 1)) == [event]
    assert drained(source, recorder, Event("c10d::barrier", 1)) == [event]
    assert drained(source, recorder, Event("c10d::barrier", 1, 9)) == [event]
    assert drained(source, recorder, Event("mm", 10, 11)) == []


def test_what_is_told_before_its_event_waits_for_it(library, recorder):
    """Also over the stop, and where a name of it is younger than the copy of the names."""
    source = started(library)
    event = recorder.id_of("c10d::barrier")
    library.reported = [{"event": event, "group": 2}]
    assert drained(source, recorder, Event("mm", 1, 2)) == []
    assert drained(source, recorder) == []
    source.stop()
    source.stop()
    recorder.name_index("0")
    assert drained(source, recorder, Event("c10d::barrier", 1, 9)) == [event]


def test_only_operators_of_c10d_are_collectives(library, recorder):
    """Where torch did not record the operator itself, what was found open is the event around it."""
    source = started(library)
    library.reported = [{"event": recorder.id_of(name)} for name in ("my label", "open label")]
    assert drained(source, recorder, Event("my label", 1, 9), Event("open label", 2)) == []


def test_what_there_was_no_room_for_is_counted(library, recorder, monkeypatch):
    """Both natively and here, where events that were dropped let their collectives wait for ever."""
    monkeypatch.setattr(collective_source, "MOST_COLLECTIVES", 2)
    source = started(library)
    assert source.notes() == []
    library.lost, library.reported = 3, [{"event": 1000 + number} for number in range(5)]
    drained(source, recorder, Event("mm", 1, 2))
    assert source.notes()[0].startswith("collectives without group, number and size: 6;")


def test_without_distributed_there_are_none(recorder):
    """Where the library cannot tell, collectives are operators like any other."""

    class Silent:
        def report_collectives(self, _session, _most):
            raise TorchLibraryError("built without")

    source = started(Silent())
    assert source.decorate(recorder.drain(Event("c10d::barrier", 1, 2))).collectives is None
    assert source.notes() == []
    source.stop()


def test_no_collectives_is_a_whole_table():
    """An empty table has every column, with its type."""
    assert {name: column.dtype for name, column in no_collectives().items()} == {
        column.name: column.dtype for column in COLLECTIVE_COLUMNS
    }
