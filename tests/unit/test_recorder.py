"""Sessions of the native recorder, as the typed wrapper has them."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from fake_contexts import FakeContexts
from forked import in_child
from frame_trees import no_collections

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import COLUMN_NAMES, COLUMNS, CONTEXT, INPUTS, MEMORY_COLUMNS, Flag, Kind
from otel_torchprof._native.ffi import ffi, lib
from otel_torchprof._native.recorder import CHUNK_BYTES, CONTEXT_MUTED, Session, batch_columns, now_ns, recorder_stats
from otel_torchprof.errors import NativeError


def label(name="label"):
    """Records one label."""
    with otp.record_function(name):
        pass


def names(batch):
    return [batch.names[name] for name in batch["name"].tolist()]


def test_drains_of_a_running_session():
    """Each drain has what ended since the last one; what is open comes later, with its parent's id where that is gone."""
    session = Session(1 << 20)
    session.start()
    outer = otp.record_function("outer")
    outer.__enter__()
    label("first")
    first = session.drain()
    label("second")
    outer.__exit__(None, None, None)
    second = session.drain()
    session.stop()
    last = session.drain()
    assert (names(first), names(second), len(last)) == (["first"], ["outer", "second"], 0)
    outer_id = second["id"][0]
    assert first.outer_rows.tolist() == [0]
    assert first.outer_parents.tolist() == [outer_id]
    assert second["parent"].tolist() == [-1, 0]
    assert session.stats().recorded == 3


def test_states():
    """Calls at the wrong time are refused with a sentence, and change nothing."""
    session = Session(CHUNK_BYTES)
    assert session.consumer == 0
    session.stop()
    with pytest.raises(NativeError, match="reading a recording"):
        session.drain()
    session.start()
    assert session.consumer.bit_count() == 1
    with pytest.raises(NativeError, match="starting a recording"):
        session.start()
    label()
    session.stop()
    session.stop()
    assert names(session.final_batch()) == ["label"]
    assert session.final_batch() is session.final_batch()


def test_a_budget_under_one_chunk():
    """A budget that holds nothing is refused with its value."""
    with pytest.raises(NativeError, match=f"budget of {CHUNK_BYTES - 1} bytes"):
        Session(CHUNK_BYTES - 1)


@pytest.mark.parametrize("keep_newest", [False, True])
def test_what_stays_at_the_budget(keep_newest):
    """A full session keeps its oldest or its newest events, as it wants; recorded + dropped is what was produced."""
    session = Session(2 * CHUNK_BYTES, keep_newest=keep_newest)
    session.start()
    for number in range(10_000):
        label(f"{number}")
    session.stop()
    batch = session.final_batch()
    kept = [int(name) for name in names(batch)]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == ((10_000 - len(kept), 9_999) if keep_newest else (0, len(kept) - 1))
    assert batch.dropped == {"evicted" if keep_newest else "budget": 10_000 - len(kept)}
    assert session.stats().bytes_buffered_max <= 2 * CHUNK_BYTES


def test_one_session_does_not_cost_another():
    """A session at its budget takes nothing from one that has room."""
    small, large = Session(CHUNK_BYTES), Session(1 << 22)
    small.start()
    large.start()
    for _ in range(10_000):
        label()
    small.stop()
    large.stop()
    assert len(large.final_batch()) == 10_000
    assert large.final_batch().dropped == {}
    assert len(small.final_batch()) < 2_000


def test_loss_is_marked_on_the_next_event():
    """After a drain made room again, the first event says that some are missing before it."""
    session = Session(3 * CHUNK_BYTES)
    session.start()
    for _ in range(20_000):
        label()
    assert not (session.drain()["flags"] & Flag.LOSS_BEFORE).any()
    for _ in range(3):
        label("after")
    session.stop()
    batch = session.drain()
    assert names(batch)[-3:] == ["after"] * 3
    marked = (batch["flags"] & Flag.LOSS_BEFORE) != 0
    assert marked.sum() == 1


def test_arrays_outlive_everything():
    """Columns stay readable after session, batch and recording are gone, and cannot be written."""
    session = Session(1 << 20)
    session.start()
    label()
    session.stop()
    batch = session.final_batch()
    assert set(batch.columns) == set(COLUMN_NAMES)
    start, names_ = batch["start"], batch.names
    del session, batch
    for _ in range(20):
        another = Session(1 << 20)
        another.start()
        label()
        another.stop()
        another.final_batch()
    assert start[0] <= now_ns()
    assert "label" in list(names_)
    with pytest.raises(ValueError, match="read-only"):
        start[0] = 0


class _Reads:
    """Stops and reads a session when it is finalized together with it, by a collection."""

    def __init__(self, session, names, *, stops):
        self.session, self.names, self.stops, self.itself = session, names, stops, self

    def __del__(self):
        if self.stops:
            self.session.stop()
        batch = self.session.final_batch()
        self.names += [batch.names[name] for name in batch["name"].tolist()]


@pytest.mark.parametrize("stops", [True, False])
def test_finalizer_that_uses_what_goes_with_it(stops):
    """A finalizer stops and reads a session that is garbage like itself: nothing native is freed before the last finalizer ran."""
    names = []
    session = Session(1 << 20)
    session.start()
    with otp.record_function("before the end"):
        pass
    if not stops:
        session.stop()
        session.final_batch()
    with no_collections():  # one on another thread would still be at it when this one asks
        _Reads(session, names, stops=stops)
        del session
        gc.collect()
    assert names == ["before the end"]


def test_times():
    """Start, events and stop stand in order on one clock, which agrees with the system's."""
    import time

    before = time.time_ns()
    session = Session(1 << 20)
    session.start()
    label()
    session.stop()
    after = time.time_ns()
    batch, stats = session.final_batch(), session.stats()
    times = [stats.start_ns, int(batch["start"][0]), int(batch["end"][0]), stats.stop_ns]
    assert times == sorted(times)
    slack = 100_000_000  # two clocks, one of them adjusted while we look; a wrong unit or epoch is off by far more
    assert before - slack <= times[0]
    assert times[-1] <= after + slack


def test_threads_come_and_go():
    """Short-lived threads keep their events, each under a thread of its own, and leave no buffers behind."""
    session = Session(1 << 24, all_threads=True)
    session.start()
    for number in range(50):
        thread = threading.Thread(target=label, args=(f"{number}",))
        thread.start()
        thread.join()
    session.stop()
    batch = session.final_batch()
    assert sorted(map(int, names(batch))) == list(range(50))
    assert len(np.unique(batch["thread"])) == 50
    assert recorder_stats().threads < 50


def test_sixteen_that_have_stopped_make_room():
    """A session that has stopped and was not read yet makes room for the seventeenth, and keeps its events."""
    sessions = []
    for number in range(20):
        session = Session(1 << 20)
        session.start()
        label(f"{number}")
        session.stop()
        sessions.append(session)
    assert [names(session.final_batch()) for session in sessions] == [[f"{number}"] for number in range(20)]


def test_those_of_the_parent_make_no_room():
    """A forked child whose places are all taken is told so, and reads one of its own, whatever of its parent's was not read."""
    unread = [Session(1 << 20) for _ in range(16)]
    for session in unread:
        session.start()
        session.stop()

    def seventeen():
        sessions = [Session(1 << 20) for _ in range(17)]
        for session in sessions[:16]:
            session.start()
        with pytest.raises(NativeError, match="16 recordings"):
            sessions[16].start()
        sessions[0].stop()
        sessions[16].start()

    assert in_child(seventeen) == "None"
    assert [names(session.final_batch()) for session in unread] == [[]] * 16


def test_a_session_stops_while_another_looks_for_a_place(monkeypatch):
    """Who looks through those that have stopped is not disturbed by one that comes, or goes, meanwhile."""
    stopped = [Session(1 << 20) for _ in range(16)]
    for session in stopped:
        session.start()
        session.stop()
    others = []

    def busy(_session) -> None:
        others.append(Session(1 << 20))
        Session._unread.popitem()
        Session._unread[id(others[-1])] = weakref.ref(others[-1])
        raise NativeError("another thread reads it")

    monkeypatch.setattr(Session, "final_batch", busy)
    with pytest.raises(NativeError, match="16 recordings"):
        Session(1 << 20).start()
    monkeypatch.undo()
    for other in others:
        Session._unread.pop(id(other), None)
    assert len(others) == 16
    assert [names(session.final_batch()) for session in stopped] == [[]] * 16


def test_schema_and_header_agree_on_kinds():
    """The kinds of events are those of the C header."""
    assert {kind.name: int(kind) for kind in Kind} == {
        name.removeprefix("OTP_EVENT_"): getattr(lib, name)
        for name in dir(lib)
        if name.startswith("OTP_EVENT_") and name != "OTP_EVENT_KINDS"
    }
    assert max(Kind) + 1 == lib.OTP_EVENT_KINDS


def module(name):
    """Records one event of the kind MODULE."""
    api, key = lib.otp_get_api(), ffi.new("char[]", name.encode())
    args = ffi.new(
        "otp_begin_args *", {"key": key, "name": key, "name_size": len(name), "kind": Kind.MODULE, "nests": 1}
    )
    api.begin(args)
    api.end(key, 0, ffi.NULL, 0)


def test_kinds():
    """A session gets the kinds that it wants; without any named, all."""
    requested = [(), (Kind.LABEL,), (Kind.MODULE, Kind.LABEL), (Kind.OPERATOR,), (Kind.MODULE,)]
    sessions = [Session(1 << 20, kinds=kinds) for kinds in requested]
    for session in sessions:
        session.start()
    label()
    module("module")
    for session in sessions:
        session.stop()
    found = [names(session.final_batch()) for session in sessions]
    assert found == [["label", "module"], ["label"], ["label", "module"], [], ["module"]]


def test_contexts():
    """A session that follows contexts has each event's; muted ones are left out there, and only there."""
    following, other = Session(1 << 20, contexts=True), Session(1 << 20)
    with FakeContexts().installed() as contexts:
        following.start()
        other.start()
        for number in (0, 7, 7, CONTEXT_MUTED, 8, CONTEXT_MUTED - 1):
            contexts.enter(number)
            label(f"{number}")
        following.stop()
        other.stop()
    batch = following.final_batch()
    assert batch[CONTEXT.name].tolist() == [0, 7, 7, 8, CONTEXT_MUTED - 1]
    assert batch[CONTEXT.name].dtype == CONTEXT.dtype
    assert names(batch) == ["0", "7", "7", "8", f"{CONTEXT_MUTED - 1}"]
    assert batch.dropped == {}
    assert len(other.final_batch()) == 6
    assert CONTEXT.name not in other.final_batch().columns


def test_muted_roots():
    """What begins outside of any context can be left out, from the start and at any time; what is open goes on."""
    session = Session(1 << 20, contexts=True)
    session.mute_roots(True)
    with FakeContexts().installed() as contexts:
        session.start()
        label("muted")
        contexts.enter(1)
        label("in a context")
        contexts.enter(0)
        session.mute_roots(False)
        with otp.record_function("root"):
            session.mute_roots(True)
            label("muted in root")
        session.stop()
    session.mute_roots(False)
    batch = session.final_batch()
    assert names(batch) == ["in a context", "root"]
    assert batch["flags"].tolist() == [0, 0]


def test_open_events():
    """A drain of a running session tells what is open, with the ids that the rows have later; the last has none."""
    session = Session(1 << 20, contexts=True)
    with FakeContexts().installed() as contexts:
        session.start()
        contexts.enter(3)
        with otp.record_function("outer"):
            contexts.enter(4)
            with otp.record_function("inner"):
                label("leaf")
                first = session.drain()
            second = session.drain()
        session.stop()
    last = session.final_batch()
    assert len(first.opens) == 2
    assert first.opens.parent.tolist() == [0, first.opens.id[0]]
    assert first.opens.context.tolist() == [3, 4]
    assert first.opens.thread.tolist() == [first["thread"][0]] * 2
    assert first.opens.scope.tolist() == last["scope"].tolist() * 2
    assert first.outer_parents.tolist() == [first.opens.id[1]]
    assert (second["id"][0], second["start"][0]) == (first.opens.id[1], first.opens.start[1])
    assert second.opens.id.tolist() == [first.opens.id[0]]
    assert last["id"].tolist() == [first.opens.id[0]]
    assert last[CONTEXT.name].tolist() == [3]
    assert len(last.opens) == len(Batch.of({"start": [1], "end": [2], "name": [0], "thread": [0]}, [""]).opens) == 0


def test_the_table_of_columns_is_what_the_core_fills():
    """Every column of the core has the name and the dtype that the table says, and none is missing."""
    core = [(column.group, column.name, column.dtype) for column in batch_columns()]
    groups = {
        lib.OTP_COLUMNS_EVENTS: COLUMNS,
        lib.OTP_COLUMNS_INPUTS: (INPUTS,),
        lib.OTP_COLUMNS_CONTEXTS: (CONTEXT,),
        lib.OTP_COLUMNS_MEMORY: MEMORY_COLUMNS,
    }
    for group, table in groups.items():
        assert [(name, dtype) for of, name, dtype in core if of == group] == [(c.name, c.dtype) for c in table]
