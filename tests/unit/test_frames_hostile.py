"""The tracer of calls in programs that make it hard: nothing of it may reach them."""

import subprocess
import sys
import textwrap
import threading

from frame_trees import by_profile_function, recorded, recording, tree

from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions


def _leaf():
    return len("leaf")


def _run(program):
    """What a program of its own prints."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()


@by_profile_function
def test_profile_function_that_is_put_back_goes_on():
    """A tool that saves sys.getprofile() and puts it back does no harm, and calls are recorded again from there on."""

    def program():
        before = sys.getprofile()
        sys.setprofile(None)
        sys.setprofile(before)
        _leaf()

    assert [name.lstrip(".") for name in tree(recorded(program), "program")][-2:] == [
        "_leaf",
        "<built-in function len>",
    ]


@by_profile_function
def test_profile_function_that_is_put_back_too_late_goes():
    """What was saved while calls were recorded, and is put back when they are not any more, takes itself away."""
    with recording():
        before = sys.getprofile()
    sys.setprofile(before)
    _leaf()
    assert sys.getprofile() is None


@by_profile_function
def test_profile_function_of_another_thread():
    """Given to another thread, it neither disturbs its own nor the other."""

    def other(before):
        sys.setprofile(before)
        _leaf()

    def program():
        thread = threading.Thread(target=other, args=[sys.getprofile()])
        thread.start()
        thread.join()
        _leaf()

    assert [name.lstrip(".") for name in tree(recorded(program), "program")][-2:] == [
        "_leaf",
        "<built-in function len>",
    ]


@by_profile_function
def test_tool_that_has_the_threads_to_come_keeps_them(caplog):
    """A hook of threading.setprofile's is there during the recording and after it, and health says whose it is."""
    seen = []

    def hook(*event):
        seen.append(event)

    threading.setprofile(hook)
    try:
        record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
        record.start()
        thread = threading.Thread(target=_leaf)
        thread.start()
        thread.join()
        assert threading.getprofile() is hook
        record.stop()
        assert threading.getprofile() is hook
    finally:
        threading.setprofile(None)
    assert seen
    name = "test_frames_hostile.test_tool_that_has_the_threads_to_come_keeps_them.<locals>.hook"
    assert record.health().notes == (f"frames off on threads that start later: {name} profiles them",)


_STOPS_INSIDE = """
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    record = ProfileSegment(RecordingOptions(operators=False, frames=True))

    class Stops(type):
        def __getattribute__(cls, name):
            record.stop()
            return super().__getattribute__(name)

    class Made(list, metaclass=Stops):
        pass

    made = Made()
    record.start()
    made.append(1)
    print(len(record.batch()) > 0)
"""


def test_recording_that_is_stopped_while_a_name_is_made():
    """Making the name of a call can run the program's own code (a metaclass here), and that can stop the recording."""
    assert _run(_STOPS_INSIDE) == ["True"]


_REFUSES = """
    import logging
    import sys
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    logging.disable(logging.CRITICAL)
    refuses = False

    def hook(event, args):
        if refuses and event == "sys.setprofile":
            raise RuntimeError("no")

    def called():
        return len("x")

    sys.addaudithook(hook)
    record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
    record.start()
    refuses = True
    record.stop()
    print(called())
    refuses = False
    called()
    print(sys.getprofile())
    refuses = True
    another = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
    another.start()
    print(called())
    another.stop()
    print(another.health().notes[0].replace(" ", "_"))
"""


@by_profile_function
def test_audit_hook_that_forbids_profile_functions():
    """Where an audit hook refuses, the program goes on: at the start the recording goes without calls, at the stop they end."""
    assert _run(_REFUSES) == ["1", "None", "1", "frames_off:_the_interpreter_refused:_RuntimeError('no')"]
