"""Operators and labels of torch that end on another thread than they began on."""

from __future__ import annotations

import threading

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from observed import info, run, torchs  # noqa: E402
from odd_programs import left_elsewhere, misnested  # noqa: E402

import otel_torchprof as otp  # noqa: E402

X = torch.ones(3)


def complete_elsewhere(future):
    """Completes a future on another thread."""
    in_threads(lambda: future.set_result(X))


def ended_by_future():
    """A label of torch that ends when a future does."""
    future = torch.futures.Future()
    with torch.profiler.record_function("until the future") as label:
        X.neg()
        label._call_end_callbacks_on_future(future)
    X.tan()
    complete_elsewhere(future)
    X.sin()


def fast():
    """The label that dynamo's generated code uses."""
    with torch._C._profiler._RecordFunctionFast("fast", [X], {"key": 1}):
        X.neg()


def through_the_dispatcher():
    """The operators behind record_function, used directly."""
    record = torch.ops.profiler._record_function_enter_new("by hand", None)
    X.neg()
    torch.ops.profiler._record_function_exit._RecordFunction(record)


@pytest.mark.parametrize("body", [ended_by_future, fast, through_the_dispatcher, left_elsewhere, misnested])
def test_as_torch(body):
    """The same tree and the same asynchronous events as in torch's profiler."""
    body()
    with otp.profile() as ours, torchs() as theirs:
        run(body)
    assert info(ours.events()) == info(theirs.events())


def test_an_end_on_another_thread_says_where():
    """The columns name the thread that ended an event, and flag the event as asynchronous."""
    with otp.profile() as ours:
        ended_by_future()
    row = [ours.names[name] for name in ours.columns["name"]].index("until the future")
    assert ours.columns["flags"][row] == 1
    began, ended = (ours.threads[ours.columns[column][row]] for column in ("thread", "end_thread"))
    assert began.ident == threading.get_ident() != ended.ident
    assert (ours.columns["end"] > 0).all()
