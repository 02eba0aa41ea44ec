"""Python's calls in Chrome JSON: their arguments, their threads, and the stacks of a trace that is verbose."""

from __future__ import annotations

from dataclasses import replace

from trace_validator import validate

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.frame_info import FrameInfo, ModuleInfo
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._encode.chrome import encode
from otel_torchprof._native.encoders import PIECE_SIZE

THREADS = (RecordedThread(100, 11, 1, "main"), RecordedThread(200, 22, 0, "loader"), RecordedThread(300, 33, 0, "idle"))
NAMES = ["", "a.py(1): main", "b.py(2): work", "aten::mm", "ValueError", 'quo"te']
MAIN, WORK, MM, ERROR, QUOTE = range(1, 6)


def trace_of(batch, **options):
    return validate(b"".join(encode(batch, pid=1, **options)))


def args_of(trace):
    return [event["args"] for event in trace["traceEvents"] if event["ph"] in "Xb"]


def batch(**columns):
    """Calls around an operator on the first thread, and one call on the second, which is the first to begin."""
    plain = {
        "start": [10, 11, 12, 13, 5],
        "end": [20, 19, 18, 17, 30],
        "parent": [-1, 0, 1, 2, -1],
        "thread": [0, 0, 0, 0, 1],
        "name": [MAIN, WORK, QUOTE, MM, WORK],
        "kind": [Kind.FRAME, Kind.FRAME, Kind.FRAME, Kind.OPERATOR, Kind.FRAME],
    }
    return Batch.of(plain | columns, NAMES, THREADS)


def test_what_is_odd_about_a_call():
    """Identity, missing end and exception are arguments; the class of an exception is _OTHER where nobody knows it."""
    columns = {"fwd_thread": [7, 0, 0, 0, 0], "error_type": [0, ERROR, 0, 0, 0]}
    flags = [Flag.UNFINISHED, Flag.ERROR, Flag.ERROR, 0, 0]
    main, work, quote, operator, other = args_of(trace_of(batch(flags=flags, **columns)))
    assert main == {"Python id": 2, "Python parent id": None, "Python identity": 7, "unfinished": True, "Ev Idx": 0}
    assert work == {"Python id": 3, "Python parent id": 2, "error.type": "ValueError", "Ev Idx": 1}
    assert quote["error.type"] == "_OTHER"
    assert operator == {"External id": 4, "Ev Idx": 3}
    assert other == {"Python id": 1, "Python parent id": None, "Ev Idx": 4}


def test_which_module_was_called():
    """A call of a module has its full name, beginning with the root's class, as torch's events have the modules around them."""
    modules = {MAIN: ModuleInfo("Net", "Net", "a.Net", ()), WORK: ModuleInfo("layers.1", "Net", "a.Layer", ())}
    calls = replace(batch(), frame_info=FrameInfo(modules=modules))
    found = [args.get("Module Hierarchy") for args in args_of(trace_of(calls))]
    assert found == ["Net", "Net.layers.1", None, None, "Net.layers.1"]


def test_threads_of_calls_are_told_by_both_their_ids():
    """At the top stands Python's id for the system's id of every thread with calls; without calls there is no such thing."""
    assert trace_of(batch())["python_threads"] == {"100": 11, "200": 22}
    assert "python_threads" not in trace_of(batch(kind=[Kind.OPERATOR] * 5))


def test_stacks_of_a_verbose_trace():
    """Every event has the calls around it, innermost first, and every call the number of its thread, by the first call there."""
    main, work, quote, operator, other = args_of(trace_of(batch(), call_stacks=True))
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
    *_, operator = args_of(trace_of(Batch.of(columns, ["", name], THREADS), call_stacks=True))
    assert operator["Call stack"] == f"{name};" * (depth - 1)


def test_a_verbose_trace_without_calls():
    """Where no calls were recorded, a verbose trace is as any other."""
    plain = batch(kind=[Kind.OPERATOR] * 5)
    assert b"".join(encode(plain, pid=1, call_stacks=True)) == b"".join(encode(plain, pid=1))
