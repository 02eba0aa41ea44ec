"""Labels of this package, without torch's operators."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
from label_trees import tree
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof import record_function
from otel_torchprof._columns.schema import Flag


@pytest.fixture
def prof():
    """A profile of labels; the test starts and stops it."""
    return otp.profile(operators=False)


def test_nesting_and_reentrance(prof):
    """One label may be open several times at once; each time is an event of its own."""
    label = record_function("again")
    with prof, record_function("outer"), label, label, label:
        pass
    assert tree(prof) == ["outer", "outer/again", "outer/again/again", "outer/again/again/again"]


def test_ends_in_the_order_of_begins(prof):
    """Misnested labels end each where their own end was called."""
    first, second = record_function("first"), record_function("second")
    with prof:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with record_function("within second"):
            pass
        second.__exit__(None, None, None)
    assert tree(prof) == ["first", "first/second", "first/second/within second"]
    ends = dict(zip((prof.names[name] for name in prof.columns["name"]), prof.columns["end"], strict=True))
    assert ends["first"] <= ends["within second"] <= ends["second"]


@pytest.mark.parametrize("all_threads", [False, True])
def test_one_label_shared_by_threads(all_threads):
    """A label that two threads are in at the same time ends on each when that thread leaves it, recorded there or not."""
    prof, label = otp.profile(operators=False, all_threads=all_threads), record_function("shared")
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def other():
        with label:
            inside.wait()
        with record_function("after"):
            outside.wait()

    thread = threading.Thread(target=other)
    with prof:
        thread.start()  # which enters first is left to chance: both orders have to be right
        with label:
            inside.wait()
            outside.wait()
            with record_function("still inside"):
                pass
        thread.join()
    expected = ["shared", "shared/still inside"]
    assert sorted(tree(prof)) == sorted([*expected, "shared", "after"] if all_threads else expected)


@pytest.mark.parametrize("first_in", ["here", "there"])
def test_a_shared_label_of_which_one_thread_is_recorded(prof, first_in):
    """Whoever enters or leaves first, the thread that is not recorded neither ends the other's event nor keeps it open."""
    label = record_function("shared")

    enter, leave = label.__enter__, lambda: label.__exit__(None, None, None)
    with prof:
        for function in (
            (enter, lambda: in_threads(enter)) if first_in == "here" else (lambda: in_threads(enter), enter)
        ):
            function()
        in_threads(leave)
        with record_function("inside"):
            pass
        leave()
    assert tree(prof) == ["shared", "shared/inside"]


def test_a_label_left_on_another_thread():
    """A label may be left on another thread than it was entered; it ends then, and what follows is not inside it."""
    prof, label = otp.profile(operators=False), record_function("handed over")
    with prof:
        label.__enter__()
        in_threads(lambda: label.__exit__(None, None, None))
        with record_function("after"):
            pass
    assert tree(prof) == ["handed over", "after"]
    assert prof.columns["flags"].tolist() == [Flag.ASYNC, 0]


def test_exceptions(prof):
    """An exception is not swallowed, marks each event that it leaves, and names its class."""

    class OurError(Exception):
        pass

    with prof:
        with pytest.raises(OurError), record_function("outer"), record_function("inner"):
            raise OurError
        with contextlib.suppress(KeyboardInterrupt), record_function("interrupted"):
            raise KeyboardInterrupt
    error = f"{__name__}.test_exceptions.<locals>.OurError"
    assert tree(prof) == [f"outer !{error}", f"outer/inner !{error}", "interrupted !KeyboardInterrupt"]


def test_open_at_the_stop_and_at_the_start(prof):
    """A label over the start is not recorded, and its end harms nothing; one over the stop ends there, unfinished."""
    before, over = record_function("before"), record_function("over")
    before.__enter__()
    prof.start()
    with record_function("inside"):
        pass
    before.__exit__(None, None, None)
    over.__enter__()
    prof.stop()
    over.__exit__(None, None, None)
    assert tree(prof) == ["inside", "over ..."]
    assert prof.columns["end"][1] == prof.health.stop_ns
    with otp.profile(operators=False) as after, record_function("after"):
        pass
    assert tree(after) == ["after"]


NAMES = ["", "größer 🙂", "with\0zero", "a" * (1 << 20)]


@pytest.mark.parametrize("name", NAMES, ids=["empty", "unicode", "zero", "long"])
def test_names(prof, name):
    """Any str is a name and comes back as it was, whatever is in it."""
    with prof, record_function(name):
        pass
    assert [event.name for event in prof.events()] == [name]
    assert prof.table()
    assert b"".join(prof.to_otlp())


def test_a_name_with_a_lone_surrogate(prof, tmp_path):
    """A str that has no UTF-8 is recorded and written out as valid text all the same."""
    with prof, record_function("a\ud800b"):
        pass
    assert prof.events()[0].name == "a���b"
    prof.export_chrome_trace(tmp_path / "trace.json")
    (tmp_path / "trace.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [b"bytes", None, 7])
def test_a_name_must_be_a_str(prof, name):
    """What is no str is refused with a TypeError, and nothing stays open."""
    with prof:
        with pytest.raises(TypeError), record_function(name):
            pass
        with record_function("after"):
            pass
    assert tree(prof) == ["after"]


def test_an_exit_without_an_enter(prof):
    """Leaving a label that was never entered does nothing."""
    with prof:
        record_function("never entered").__exit__(None, None, None)
    assert tree(prof) == []


def test_deep_recursion():
    """Two thousand labels inside one another: 1,024 are recorded, the rest is counted, and all ends well."""
    prof, after = otp.profile(operators=False), otp.profile(operators=False)

    def recurse():  # on a thread of its own, where nothing is open
        with prof, contextlib.ExitStack() as stack:
            for depth in range(2000):
                stack.enter_context(record_function(f"{depth}"))
        with after, record_function("after"):
            pass

    in_threads(recurse)
    assert len(prof.events()) == 1024
    assert prof.health.dropped == {"depth": 976}
    assert not any("..." in line for line in tree(prof))
    assert tree(after) == ["after"]


def test_garbage_collection_within_labels(prof):
    """Labels that finalizers open while the collector runs inside a label are its children."""

    class Finalized:
        def __del__(self):
            with record_function("finalizer"):
                pass

    with prof, record_function("outer"):
        cycle = Finalized()
        cycle.itself = cycle
        del cycle
        gc.collect()
    assert tree(prof) == ["outer", "outer/finalizer"]


def test_args_that_are_no_text():
    """Arguments of a label are a text or none, as torch's; another type is named."""
    assert record_function("x", "3").args == "3"
    with pytest.raises(TypeError, match="args of a label must be a str or None, not 3"):
        record_function("x", 3)
    with pytest.raises(TypeError, match="must be a str or None"):
        record_function("x", args=["a"])
