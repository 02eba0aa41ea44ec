"""Labels that end when a future is done, and labels with arguments; without torch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools

import pytest
from recorded_tables import recorded_table
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.inputs import concrete_inputs, input_dtypes, input_shapes
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

ONCE = "_call_end_callbacks_on_future can only be called once."


@pytest.fixture
def prof():
    """A profile of labels; read after the block that a test runs inside of it."""
    return otp.profile(operators=False)


def rows(prof):
    """Columns of every event, by name."""
    columns = {name: values.tolist() for name, values in prof.columns.items()}
    return {
        prof.names[name]: {column: values[row] for column, values in columns.items()}
        for row, name in enumerate(columns["name"])
    }


def begin(name, future):
    """A label that goes on until the future is done."""
    label = otp.record_function(name)
    with label:
        return label, label._call_end_callbacks_on_future(future)


def test_the_label_ends_with_the_future(prof):
    """What runs after its block is not inside of it, though it is still open; its future has the value after it ended."""
    future = concurrent.futures.Future()
    with prof:
        label, after = begin("call", future)
        assert label.is_open()
        with otp.record_function("meanwhile"):
            assert not after.done()
        future.set_result(7)
        assert after.result() == 7
        assert not label.is_open()
    found = rows(prof)
    assert found["meanwhile"]["parent"] == -1
    assert found["call"]["end"] >= found["meanwhile"]["end"]
    assert found["call"]["flags"] == 0


def test_the_future_may_be_done_on_another_thread(prof):
    """The label ends there, is asynchronous, and knows where it ended."""
    future = concurrent.futures.Future()
    with prof:
        _, after = begin("call", future)
        in_threads(lambda: future.set_result(1))
        assert after.result() == 1
    call = rows(prof)["call"]
    assert call["flags"] == 1
    assert prof.threads[call["end_thread"]].ident != prof.threads[call["thread"]].ident


def test_a_future_that_is_done_already(prof):
    """The label ends at once, inside its block, and what follows there is not inside of it."""
    future = concurrent.futures.Future()
    future.set_result(3)
    label = otp.record_function("call")
    with prof, label:
        assert label._call_end_callbacks_on_future(future).result() == 3
        with otp.record_function("after"):
            pass
    found = rows(prof)
    assert (found["after"]["parent"], found["call"]["flags"]) == (-1, 0)


def test_a_failed_future_is_an_error_of_the_label(prof):
    """The exception comes out of the new future, and its class stands on the label."""
    future = concurrent.futures.Future()
    with prof:
        _, after = begin("call", future)
        future.set_exception(KeyError("gone"))
    with pytest.raises(KeyError, match="gone"):
        after.result()
    assert prof.names[rows(prof)["call"]["error_type"]] == "KeyError"


def test_a_cancelled_future(prof):
    """Cancels the new one and ends the label, with the error that asking for its result would raise."""
    future = concurrent.futures.Future()
    with prof:
        label, after = begin("call", future)
        future.cancel()
        assert after.cancelled()
        assert not label.is_open()
    assert prof.names[rows(prof)["call"]["error_type"]] == "concurrent.futures._base.CancelledError"


def test_tasks_of_asyncio(prof):
    """An asyncio future gives one of its own loop; its label ends when the task does."""

    async def main():
        async def work():
            with otp.record_function("inside"):
                return 5

        label, after = begin("call", asyncio.ensure_future(work()))
        assert isinstance(after, asyncio.Future)
        assert label.is_open()
        assert await after == 5
        assert not label.is_open()

    with prof:
        asyncio.run(main())
    found = rows(prof)
    assert found["call"]["start"] <= found["inside"]["start"] <= found["inside"]["end"] <= found["call"]["end"]


def test_once_only():
    """A second future is refused with torch's words, and so is one for a label that nobody is in."""
    label = otp.record_function("call")
    with pytest.raises(AssertionError, match="must be entered"):
        label._call_end_callbacks_on_future(concurrent.futures.Future())
    with label:
        assert label.run_callbacks_on_exit is True
        label._call_end_callbacks_on_future(concurrent.futures.Future())
        assert label.run_callbacks_on_exit is False
        with pytest.raises(RuntimeError, match=ONCE):
            label._call_end_callbacks_on_future(concurrent.futures.Future())


def test_what_is_no_future_is_refused(prof):
    """The error says what is needed, and the label ends with its block as if nobody had asked."""
    label = otp.record_function("call")
    with prof:
        with label, pytest.raises(TypeError, match=r"7 is no future: a torch\.futures\.Future"):
            label._call_end_callbacks_on_future(7)
        assert not label.is_open()
    assert rows(prof)["call"]["flags"] == 0


def test_never_done_is_unfinished(prof):
    """A label whose future is not done when the profile stops ends there, marked; the future's end comes to nothing."""
    future = concurrent.futures.Future()
    with prof:
        _, after = begin("call", future)
    future.set_result(1)
    assert after.result() == 1
    assert rows(prof)["call"]["flags"] == 2


def recorded(requested):
    """Labels with arguments, under a recording."""
    recording = ProfileSegment(requested)
    recording.start()
    for args in ('an "argument"', "", None, "\ud800"):
        with otp.record_function("label", args):
            pass
    recording.stop()
    return recording.batch()


def test_arguments_are_inputs():
    """A label with arguments has an input, as in torch; its text is an attribute of its span."""
    batch = recorded(RecordingOptions(operators=False, inputs=True))
    assert [input_shapes(batch, row) for row in range(4)] == [[[]], [[]], [], [[]]]
    assert (input_dtypes(batch, 0), concrete_inputs(batch, 0)) == ([""], [None])
    ids = itertools.count(1)
    spans = recorded_table(batch, start=0, end=2**62, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    table = add_attributes(spans, batch)
    [column] = [column for column in table.attributes if column.key == "torch.label.args"]
    texts = [table.names[text] for text in column.values]
    assert texts == ['an "argument"', "\ufffd\ufffd\ufffd"]


def test_arguments_are_not_kept_unasked():
    """Without record_shapes nothing of them is recorded."""
    assert recorded(RecordingOptions(operators=False)).inputs is None
