"""Chrome JSON: every field of every event, what must hold for every trace, and what a profile has beyond its batch."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_validator import parse, validate

import otel_torchprof as otp
from examples import random_examples
from otel_torchprof import ModuleInfo
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._encode.chrome import STEPS_TID, encode
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native import encoders
from otel_torchprof._native.encoders import PIECE_SIZE

THREADS = (
    RecordedThread(100, 1, 1, "main"),
    RecordedThread(200, 2, 2, ""),
    RecordedThread(100, 3, 3, "the same id again"),
)
WEEK_NS = 7 * 24 * 3600 * 10**9
UNIX_NS = 1_790_857_026_123_456_789


def trace_of(batch: Batch, **options: Any) -> dict[str, Any]:
    return validate(b"".join(encode(batch, **{"pid": 42} | options)))


def events_of(trace: dict[str, Any], phases: str = "Xbe") -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases and event["tid"] != STEPS_TID]


def one_event(names: list[str | bytes], columns: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    """The event of a batch of one row from 5 ns to 7 ns with the last name."""
    columns = {"start": [5], "end": [7], "name": [len(names)]} | (columns or {})
    (event, *_) = events_of(trace_of(Batch.of(columns, ["", *names], THREADS, **rest)))
    return event


def test_an_operator_has_the_fields_of_kineto():
    """Phase, category, place, times in exact microseconds, and Kineto's arguments under Kineto's names."""
    event = one_event(
        ["aten::mm"], {"start": [UNIX_NS], "end": [UNIX_NS + 1001], "sequence_nr": [7], "fwd_thread": [3], "id": [9]}
    )
    assert event == {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 42,
        "tid": 100,
        "ts": Decimal(UNIX_NS - UNIX_NS // WEEK_NS * WEEK_NS) / 1000,
        "dur": Decimal("1.001"),
        "args": {"External id": 9, "Sequence number": 7, "Fwd thread id": 3, "Ev Idx": 0},
    }


@pytest.mark.parametrize(
    "name",
    [
        b'quote " backslash \\ slash /',
        bytes(range(32)) + b"\x7f",
        "\u2028\u2029 \u20ac \U0001f600".encode(),
        b"lone \x80 cut \xe2\x82 overlong \xc0\xaf \xe0\x80\x80 sur \xed\xa0\x80 beyond \xf4\x90\x80\x80 \xf0",
        b"",
        b"\xff" * 5000,
        b"n" * (2 * PIECE_SIZE),
    ],
    ids=["quotes", "control characters", "valid UTF-8", "invalid UTF-8", "empty", "all invalid", "longer than a piece"],
)
def test_names_of_any_bytes(name):
    """A name arrives as Python would decode it, replacing what is no UTF-8, wherever it stands."""
    event = one_event([name], {"error_type": [1], "flags": [Flag.ASYNC]})
    assert event["name"] == event["args"]["error.type"] == name.decode("utf-8", "replace")


def test_line_separators_are_escaped():
    """U+2028 and U+2029 would end a line where the JSON is read as JavaScript."""
    text = b"".join(encode(Batch.of({"start": [0], "end": [1], "name": [1]}, ["", "a\u2028b\u2029"]))).decode()
    assert r"a\u2028b\u2029" in text


@given(st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2 << 32 | 1, 9 << 32 | 2])))
def test_input_words_are_never_read_beyond_their_end(data):
    """Words that promise more than there is give valid JSON, and so do offsets that lie outside; ``trace_of`` asserts it."""
    offsets = [*range(len(data) + 2), 2**63 - 1]
    columns = {"start": [0] * len(offsets), "end": [1] * len(offsets), "inputs": offsets}
    trace_of(Batch.of(columns, [""], inputs=np.array(data, dtype=np.int64)))


def test_arrows_from_forward_to_backward():
    """An arrow starts at the forward operator and finishes at each backward function, each with a number of its own."""
    batch = Batch.of(
        {
            "start": [0, 20, 30, 40],
            "end": [10, 25, 35, 45],
            "thread": [0, 1, 1, 1],
            "sequence_nr": [3, 3, 3, 4],
            "scope": [0, 1, 1, 1],
            "fwd_thread": [0, 1, 1, 1],
        },
        [""],
        THREADS,
    )
    arrows = events_of(trace_of(batch), "sf")
    assert sorted((e["id"], e["ph"], e["tid"], int(e["ts"] * 1000)) for e in arrows) == [
        (1, "f", 200, 20),
        (1, "s", 100, 0),
        (2, "f", 200, 30),
        (2, "s", 100, 0),
    ]
    assert {(e["cat"], e["name"]) for e in arrows} == {("fwdbwd", "fwdbwd")}


def test_async_events_have_no_arrows():
    """An arrow needs a slice to hold on to; viewers complain about one that has none."""
    columns = {"start": [0, 20], "end": [9, 25], "sequence_nr": [3, 3], "scope": [0, 1], "fwd_thread": [0, 1]}
    assert events_of(trace_of(Batch.of(columns, [""])), "s")
    assert not events_of(trace_of(Batch.of(columns | {"flags": [0, Flag.ASYNC]}, [""])), "sf")


def test_steps_have_a_track_of_their_own():
    """They carry Kineto's name and category, by which tools find them, and no identity of an event."""
    trace = trace_of(
        Batch.of({"start": [1500], "end": [2500]}, [""]),
        steps=[RecordedStep(3, 1000, 2000), RecordedStep(4, 2000, 3000)],
    )
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == STEPS_TID]
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e["args"]) for e in steps] == [
        ("ProfilerStep#3", "user_annotation", 1, 1, {}),
        ("ProfilerStep#4", "user_annotation", 2, 1, {}),
    ]
    assert metadata(trace, "thread_name")[STEPS_TID] == {"name": "steps"}
    assert STEPS_TID not in metadata(trace_of(Batch.of({"start": [1], "end": [2]}, [""])), "thread_name")


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=4, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.sampled_from((0, 0, Flag.ASYNC))), max_size=3),
)
@random_examples(200)
def test_steps_stay_apart_just_where_an_event_crosses_one(edges, events):
    """Steps are slices of the loop's own track, as in a stream's file, unless a slice there begins in one and ends after it, or the other way."""
    steps = [RecordedStep(number, *pair, thread=2) for number, pair in enumerate(itertools.pairwise(edges))]
    starts, _, flags = zip(*events, strict=True) if events else ((), (), ())
    ends = [start + duration for start, duration, _ in events]
    crosses = any(
        not flag and (step.start <= start < step.end < end or start < step.start < end < step.end)
        for start, end, flag in zip(starts, ends, flags, strict=True)
        for step in steps
    )
    ones = [1] * len(events)
    columns = {"start": starts, "end": ends, "flags": flags, "thread": ones, "end_thread": ones}
    trace = trace_of(Batch.of(columns, [""], THREADS), steps=steps)
    tracks = {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].startswith("ProfilerStep#")}
    assert tracks == {STEPS_TID if crosses else 200}
    assert (STEPS_TID in metadata(trace, "thread_name")) == crosses


def metadata(trace: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    return {e["tid"]: e["args"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == name}


def test_process_and_threads_are_named():
    """A thread without a name is named after its id; of two with one id the first name counts; the process is this one unless given."""
    trace = trace_of(Batch.of({"start": [1], "end": [2]}, [""], THREADS))
    assert metadata(trace, "process_name") == {0: {"name": "python"}}
    assert metadata(trace, "process_sort_index") == {0: {"sort_index": 42}}
    assert metadata(trace, "thread_name") == {100: {"name": "main"}, 200: {"name": "thread 200"}}
    events = parse(b"".join(encode(Batch.of({"start": [1], "end": [2]}, [""]))))["traceEvents"]
    assert {event["pid"] for event in events} == {os.getpid()}


def test_drops_are_told_twice():
    """As numbers at the top level, and as a mark at the end of the time line; where nothing was lost there is none."""
    trace = trace_of(Batch.of({"start": [0], "end": [12345]}, [""], dropped={"budget": 120, "fork": 3, "none": 0}))
    assert trace["dropped_events"] == {"budget": 120, "fork": 3, "none": 0}
    (mark,) = events_of(trace, "i")
    assert (mark["name"], mark["ts"], mark["s"]) == ("123 events dropped (budget, fork)", Decimal("12.345"), "p")
    assert mark["args"] == trace["dropped_events"]
    for none in ({}, {"budget": 0}):
        assert not events_of(trace_of(Batch.of({"start": [0], "end": [1]}, [""], dropped=none)), "i")


def test_an_empty_batch_is_a_valid_trace():
    """Nothing recorded, even with drops and steps only, still loads."""
    assert trace_of(Batch.of({"start": [], "end": []}, [""]))["baseTimeNanoseconds"] == 0
    trace = trace_of(
        Batch.of({"start": [], "end": []}, [""], dropped={"budget": 1}), steps=[RecordedStep(0, UNIX_NS, UNIX_NS + 1)]
    )
    assert trace["baseTimeNanoseconds"] == UNIX_NS // WEEK_NS * WEEK_NS


@pytest.mark.parametrize("base", [0, UNIX_NS + 1, -(2**62), 2**63 - 1, -(2**63)])
def test_times_count_from_the_base(base):
    """Any base gives exact times, before or after the events, however far away."""
    batch = Batch.of({"start": [UNIX_NS], "end": [UNIX_NS + 5]}, [""], dropped={"x": 1})
    trace = trace_of(batch, base_ns=base)
    assert trace["baseTimeNanoseconds"] == base
    assert events_of(trace)[0]["ts"] * 1000 + base == UNIX_NS
    assert events_of(trace, "i")[0]["ts"] * 1000 + base == UNIX_NS + 5


def test_metadata_is_merged_into_the_top_level():
    """Whatever JSON can say, under the user's own keys."""
    given_metadata = {"host": 'a"b', "distributedInfo": {"rank": 0, "ranks": [0, None, True]}, "": 1.5}
    trace = trace_of(Batch.of({"start": [1], "end": [2]}, [""]), metadata=given_metadata)
    assert {key: trace[key] for key in given_metadata} == given_metadata


RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("bad", "error", "words_of_it"),
    [
        ({1: "x"}, TypeError, ["1", "int", "keys must be strings"]),
        ({"x": object()}, TypeError, ["metadata['x']", "object"]),
        ({"x": float("nan")}, ValueError, ["metadata['x']", "finite"]),
        ({"x": RECURSIVE}, ValueError, ["metadata['x']", "Circular"]),
        ({"traceEvents": []}, ValueError, ["'traceEvents'", "choose another name"]),
    ],
)
def test_bad_metadata_is_an_error_before_anything_is_written(bad, error, words_of_it):
    """The error names the key, the reason and the way out, and comes from the call, not from the iterator."""
    with pytest.raises(error) as raised:
        encode(Batch.of({"start": [1], "end": [2]}, [""]), metadata=bad)
    assert all(word in str(raised.value) for word in words_of_it)


@pytest.mark.parametrize("column", ["name", "error_type", "thread", "end_thread"])
def test_a_batch_that_points_outside_its_tables_is_an_error(column):
    """Native code follows indices blindly, so a wrong one must not get there."""
    batch = Batch.of({"start": [1], "end": [2], "end_thread": [0]} | {column: [3]}, ["", "a", "b"], THREADS)
    with pytest.raises(ValueError, match=rf"'{column}' points at \w+\[3\], but there are 3"):
        encode(batch)


def test_a_batch_of_views_with_strides():
    """Columns need not be contiguous: a slice with a step is encoded as what it shows."""
    whole = Batch.of({"start": range(10), "end": range(10, 20), "name": [1, 2] * 5}, ["", "a", "b"])
    every_other = Batch({name: column[::2] for name, column in whole.columns.items()}, whole.names, whole.threads)
    assert [(e["name"], e["args"]["External id"]) for e in events_of(trace_of(every_other), "Xb")] == [
        ("a", i) for i in (1, 3, 5, 7, 9)
    ]


def test_pieces_are_small_and_whatever_their_size_the_text_is_the_same(monkeypatch):
    """A long trace comes piece by piece, and where the pieces end leaves no mark in it, not even at arrows."""
    rows = 20_000
    numbers = np.arange(rows) // 2
    columns = {
        "start": np.arange(rows) * 10,
        "end": np.arange(rows) * 10 + 5,
        "sequence_nr": numbers,
        "scope": np.arange(rows) % 2,
        "fwd_thread": np.arange(rows) % 2,
    }
    batch = Batch.of(columns, [""])
    pieces = list(encode(batch, pid=1))
    assert len(pieces) > 4
    assert all(PIECE_SIZE <= len(piece) < PIECE_SIZE + 1000 for piece in pieces[1:-2])
    text = b"".join(pieces)
    assert len(events_of(validate(text), "sf")) == rows
    monkeypatch.setattr(encoders, "PIECE_SIZE", 1000)
    assert b"".join(encode(batch, pid=1)) == text


# --- any batch ---

TIMES = st.integers(0, 12) | st.integers(0, 2**62)
EVENTS = st.fixed_dictionaries(
    {
        "start": TIMES,
        "duration": st.integers(0, 12) | st.integers(0, 2**62 - 1),
        "thread": st.integers(0, 2),
        "moves": st.sampled_from([0, 0, 0, 0, 1]),
        "sequence_nr": st.integers(-1, 3) | st.just(2**63 - 1),
        "fwd_thread": st.integers(0, 3) | st.just(2**32 - 1),
        "scope": st.integers(0, 9),
        "kind": st.sampled_from((Kind.OPERATOR, Kind.LABEL, Kind.PHASE)),
        "flags": st.integers(0, 31) | st.just(0),
        "name": st.integers(0, 3),
        "error_type": st.integers(0, 3),
        "inputs": st.none()
        | st.lists(
            st.none()
            | st.lists(st.integers(0, 9), max_size=18).map(tuple)
            | st.sampled_from(((-6,), (2**62,)))
            | st.lists(st.just((1, 2)))
        ),
    }
)


def batch_of(rows: list[dict[str, Any]], names: list[bytes]) -> Batch:
    """Rows in the order that a batch has: by thread, then by start."""
    rows.sort(key=lambda row: (row["thread"], row["start"]))
    keys = ("start", "thread", "sequence_nr", "fwd_thread", "scope", "kind", "flags", "name", "error_type")
    columns = {key: [row[key] for row in rows] for key in keys}
    columns["end"] = [row["start"] + row["duration"] for row in rows]
    columns["end_thread"] = [(row["thread"] + row["moves"]) % len(THREADS) for row in rows]
    data: list[int] = []
    columns["inputs"] = []
    for row in rows:
        columns["inputs"].append(-1 if row["inputs"] is None else len(data))
        data += [] if row["inputs"] is None else words(row["inputs"])
    return Batch.of(columns, [b"", *names], THREADS, inputs=np.array(data, dtype=np.int64))


def expected_args(batch: Batch, row: int, inputs: list[Any] | None) -> dict[str, Any]:
    """The arguments of a row, straight from the columns: what is odd about it, and of a phase no number of autograd."""
    args: dict[str, Any] = {"External id": batch["id"][row]}
    if batch["sequence_nr"][row] >= 0 and batch["kind"][row] != Kind.PHASE:
        args |= {"Sequence number": batch["sequence_nr"][row], "Fwd thread id": batch["fwd_thread"][row]}
    names = {"unfinished": 2, "async": 1, "lost before": 8, "inputs cut": 16}
    args |= {name: True for name, bit in names.items() if batch["flags"][row] & bit}
    if batch["error_type"][row]:
        args["error.type"] = batch.names[batch["error_type"][row]]
    elif batch["flags"][row] & Flag.ERROR:
        args["error.type"] = "_OTHER"
    if inputs is not None:
        args |= as_json(inputs)
    return args | {"Ev Idx": row}


@given(
    st.lists(EVENTS, max_size=25), st.lists(st.binary(max_size=8) | st.text().map(str.encode), min_size=3, max_size=3)
)
def test_any_batch_comes_out_field_by_field(rows, names):
    """All fields of all events, for any names, times up to 2**62 and any nesting; the validator checks the rest."""
    batch = batch_of(rows, names)
    events = iter(events_of(trace_of(batch, base_ns=0)))
    for row, source in enumerate(rows):
        event = next(events)
        assert event["ph"] in "Xb"
        assert event["name"] == batch.names[source["name"]]
        is_annotation = source["kind"] == Kind.LABEL or source["scope"] == Scope.USER_SCOPE
        assert event["cat"] == ("user_annotation" if is_annotation else "cpu_op")
        assert (event["pid"], event["tid"]) == (42, THREADS[source["thread"]].os_tid)
        assert event["args"] == expected_args(batch, row, source["inputs"])
        end = event["ts"] + event["dur"] if event["ph"] == "X" else (finish := next(events))["ts"]
        assert (event["ts"] * 1000, end * 1000) == (source["start"], source["start"] + source["duration"])
        if event["ph"] == "b":
            assert (finish["ph"], finish["tid"]) == ("e", THREADS[batch["end_thread"][row]].os_tid)
        elif source["flags"] & Flag.ASYNC or source["moves"]:
            pytest.fail(f"row {row} is async but was written as a slice")
    assert next(events, None) is None


@given(st.lists(EVENTS, max_size=25))
def test_only_what_sticks_out_leaves_its_track(rows):
    """Each async pair that is not async by itself overlaps, without lying inside it, a slice that began before it."""
    batch = batch_of(rows, [b"", b"", b""])
    slices: dict[int, list[tuple[int, int, int]]] = {}
    left: list[tuple[int, int, int, int]] = []
    for event in events_of(trace_of(batch, base_ns=0), "Xb"):
        row = event["args"]["Ev Idx"]
        start, end = int(batch["start"][row]), int(batch["end"][row])
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append((start, row, end))
        elif not (batch["flags"][row] & Flag.ASYNC or batch["thread"][row] != batch["end_thread"][row]):
            left.append((event["tid"], start, row, end))
    for tid, start, row, end in left:
        assert any((s, r) < (start, row) and start < e < end for s, r, e in slices.get(tid, ()))


# ---- Python's calls ----


CALLERS = (RecordedThread(100, 11, 1, "main"), RecordedThread(200, 22, 0, "loader"), RecordedThread(300, 33, 0, "idle"))
CALLED = ["", "a.py(1): main", "b.py(2): work", "aten::mm", "ValueError", 'quo"te']
MAIN, WORK, MM, ERROR, QUOTE = range(1, 6)


def args_of(trace):
    return [event["args"] for event in trace["traceEvents"] if event["ph"] in "Xb"]


def python_calls(**columns):
    """Calls around an operator on the first thread, and one call on the second, which is the first to begin."""
    plain = {
        "start": [10, 11, 12, 13, 5],
        "end": [20, 19, 18, 17, 30],
        "parent": [-1, 0, 1, 2, -1],
        "thread": [0, 0, 0, 0, 1],
        "name": [MAIN, WORK, QUOTE, MM, WORK],
        "kind": [Kind.FRAME, Kind.FRAME, Kind.FRAME, Kind.OPERATOR, Kind.FRAME],
    }
    return Batch.of(plain | columns, CALLED, CALLERS)


def test_what_is_odd_about_a_call():
    """Identity, missing end and exception are arguments; the class of an exception is _OTHER where nobody knows it."""
    columns = {"fwd_thread": [7, 0, 0, 0, 0], "error_type": [0, ERROR, 0, 0, 0]}
    flags = [Flag.UNFINISHED, Flag.ERROR, Flag.ERROR, 0, 0]
    main, work, quote, operator, other = args_of(trace_of(python_calls(flags=flags, **columns)))
    assert main == {"Python id": 2, "Python parent id": None, "Python identity": 7, "unfinished": True, "Ev Idx": 0}
    assert work == {"Python id": 3, "Python parent id": 2, "error.type": "ValueError", "Ev Idx": 1}
    assert quote["error.type"] == "_OTHER"
    assert operator == {"External id": 4, "Ev Idx": 3}
    assert other == {"Python id": 1, "Python parent id": None, "Ev Idx": 4}


def test_which_module_was_called():
    """A call of a module has its full name, beginning with the root's class, as torch's events have the modules around them."""
    modules = {MAIN: ModuleInfo("Net", "Net", "a.Net", ()), WORK: ModuleInfo("layers.1", "Net", "a.Layer", ())}
    calls = replace(python_calls(), frame_info=FrameInfo(modules=modules))
    found = [args.get("Module Hierarchy") for args in args_of(trace_of(calls))]
    assert found == ["Net", "Net.layers.1", None, None, "Net.layers.1"]


def test_threads_of_calls_are_told_by_both_their_ids():
    """At the top stands Python's id for the system's id of every thread with calls; without calls there is no such thing."""
    assert trace_of(python_calls())["python_threads"] == {"100": 11, "200": 22}
    assert "python_threads" not in trace_of(python_calls(kind=[Kind.OPERATOR] * 5))


def test_stacks_of_a_verbose_trace():
    """Every event has the calls around it, innermost first, and every call the number of its thread, by the first call there."""
    main, work, quote, operator, other = args_of(trace_of(python_calls(), call_stacks=True))
    assert "Call stack" not in main
    assert work["Call stack"] == "a.py(1): main;"
    assert operator["Call stack"] == 'quo"te;b.py(2): work;a.py(1): main;'
    assert quote["Call stack"] == "b.py(2): work;a.py(1): main;"
    assert [args["Python thread"] for args in (main, work, other)] == [1, 1, 0]
    assert "Python thread" not in operator


def test_stacks_of_any_length():
    """A stack that is longer than a piece of the file comes whole."""
    depth, name = 16, "x" * (PIECE_SIZE // 8)
    columns = {"start": range(depth), "end": range(2 * depth, depth, -1), "parent": range(-1, depth - 1)}
    columns |= {"name": [1] * depth, "kind": [Kind.FRAME] * (depth - 1) + [Kind.OPERATOR]}
    *_, operator = args_of(trace_of(Batch.of(columns, ["", name], CALLERS), call_stacks=True))
    assert operator["Call stack"] == f"{name};" * (depth - 1)


def test_a_verbose_trace_without_calls():
    """Where no calls were recorded, a verbose trace is as any other."""
    plain = python_calls(kind=[Kind.OPERATOR] * 5)
    assert b"".join(encode(plain, pid=1, call_stacks=True)) == b"".join(encode(plain, pid=1))


def test_profiles_and_streams_draw_a_loop_alike(tmp_path):
    """The same loop has the same slices on the same track, whether a profile or a stream wrote the file."""

    def loop(step):
        for _ in range(3):
            with otp.record_function("work"):
                pass
            step()

    with otp.profile(operators=False) as prof:
        loop(prof.step)
    prof.export_chrome_trace(tmp_path / "profile.json")
    with otp.stream(otp.ChromeTraceExporter(tmp_path / "stream.json"), detail="modules") as running:
        loop(running.step)
    drawn = []
    for name in ("profile", "stream"):
        trace = parse((tmp_path / f"{name}.json").read_bytes())
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "Trace"]
        tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        slices = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
        drawn.append([(e["name"], tracks[e["tid"]]) for e in slices if e["name"] != "torch.job"])
    assert drawn[0] == drawn[1]
    assert drawn[0] == [(name, "MainThread") for i in range(3) for name in (f"ProfilerStep#{i}", "work")]


def test_the_recording_as_a_whole(tmp_path):
    """A profile draws when it began and ended, as Kineto does; a batch of which that is not known has none of it."""
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    prof.export_chrome_trace(tmp_path / "trace.json")
    trace = parse((tmp_path / "trace.json").read_bytes())
    found = {event["name"]: event for event in trace["traceEvents"]}
    begin, whole, end = (
        found[name] for name in ("Iteration Start: PyTorch Profiler", "PyTorch Profiler (0)", "Record Window End")
    )
    assert (whole["ph"], whole["cat"], whole["pid"], whole["tid"]) == ("X", "Trace", "Spans", "PyTorch Profiler")
    assert [(mark["ph"], mark["s"], mark["pid"]) for mark in (begin, end)] == [("i", "g", "Traces"), ("i", "g", "")]
    assert begin["ts"] == whole["ts"] <= found["label"]["ts"]
    assert end["ts"] == whole["ts"] + whole["dur"] >= found["label"]["ts"] + found["label"]["dur"]
    assert prof.health.start_ns == round(whole["ts"] * 1000) + trace["baseTimeNanoseconds"]
    assert not [
        event for event in validate(b"".join(encode(prof._batch())))["traceEvents"] if event.get("cat") == "Trace"
    ]


def words(inputs: list[Any]) -> list[int]:
    """Inputs in the format of Batch.inputs: None, dimensions, or a list of dimensions."""
    encoded = [len(inputs)]
    for value in inputs:
        if value is None:
            encoded.append(7 << 8)
        elif isinstance(value, tuple):
            encoded += [1 | len(value) << 32, *value]
        else:
            encoded.append(2 | len(value) << 32)
            for tensor in value:
                encoded += [1 | 7 << 8 | len(tensor) << 32, *tensor]
    return encoded


def strides(shape: tuple[int, ...]) -> list[int]:
    """Those of a contiguous tensor."""
    return [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]


def per_input(inputs: list[Any], of_tensor: Any) -> list[Any]:
    """What is made of each tensor, by input; Kineto leaves long lists empty."""
    found = []
    for value in inputs:
        if isinstance(value, list):
            found.append([of_tensor(tensor) for tensor in value] if len(value) <= 30 else [])
        else:
            found.append([] if value is None else of_tensor(value))
    return found


def as_json(inputs: list[Any]) -> dict[str, Any]:
    """The arguments that describe inputs; empty without inputs."""
    if not inputs:
        return {}
    return {
        "Input Dims": per_input(inputs, list),
        "Input Strides": per_input(inputs, strides),
        "Input type": ["TensorList" if isinstance(value, list) else "" for value in inputs],
        "Concrete Inputs": [""] * len(inputs),
    }
