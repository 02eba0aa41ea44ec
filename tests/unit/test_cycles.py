"""Schedules: the action of each step, what lies between two steps, and what a profile makes of it."""

from __future__ import annotations

import json

import pytest

import otel_torchprof as otp
from otel_torchprof import errors
from otel_torchprof._export.cycles import Cycles, Move, moves

NONE, WARMUP, RECORD, SAVE = (otp.ProfilerAction(value) for value in range(4))
PREPARE, START, STOP, READY = Move


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    """A warning that comes once per process comes in each of these tests."""
    errors.forget_warnings()


def letters(schedule, steps):
    """The actions of the first steps: n, w, r, s."""
    return "".join("nwrs"[schedule(step).value] for step in range(steps))


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [
        ({"wait": 1, "warmup": 1, "active": 2}, "nwrsnwrsn"),
        ({"wait": 1, "warmup": 1, "active": 2, "repeat": 1}, "nwrsnnnnn"),
        ({"wait": 0, "warmup": 1, "active": 1, "skip_first": 2}, "nnwswswsw"),
        ({"wait": 2, "warmup": 1, "active": 1, "skip_first": 1, "skip_first_wait": 1}, "nwsnnwsnn"),
        ({"wait": 3, "warmup": 1, "active": 1, "repeat": 2, "skip_first_wait": 5}, "wsnnnwsnn"),
    ],
)
def test_actions(arguments, actions):
    """A schedule waits, warms up and records, from where it begins and as often as it says."""
    assert letters(otp.schedule(**arguments), 9) == actions


@pytest.mark.parametrize("wrong", [{"wait": -1}, {"warmup": -1}, {"active": 0}, {"repeat": -1}, {"skip_first": -1}])
def test_arguments_that_make_no_schedule(wrong):
    """A schedule that cannot be is refused with all its values."""
    with pytest.raises(AssertionError, match=r"Invalid profiler schedule arguments\. Got wait="):
        otp.schedule(**{"wait": 1, "warmup": 1, "active": 1, **wrong})


def test_a_schedule_without_warmup():
    """A schedule without a warm-up says what that does, at the line that made it."""
    with pytest.warns(UserWarning, match="won't be using warmup") as said:
        schedule = otp.schedule(wait=0, warmup=0, active=1)
    assert said[0].filename == __file__
    with pytest.raises(AssertionError, match=r"Step must be non-negative\. Got -1"):
        schedule(-1)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NONE, NONE, []),
        (NONE, WARMUP, [PREPARE]),
        (NONE, RECORD, [PREPARE, START]),
        (NONE, SAVE, [PREPARE, START]),
        (NONE, None, []),
        (WARMUP, WARMUP, []),
        (WARMUP, RECORD, [START]),
        (WARMUP, SAVE, [START]),
        (WARMUP, None, [START, STOP]),
        (RECORD, RECORD, []),
        (RECORD, SAVE, []),
        (RECORD, None, [STOP, READY]),
        (SAVE, NONE, [STOP, READY]),
        (SAVE, WARMUP, [STOP, READY, PREPARE]),
        (SAVE, RECORD, [STOP, READY, PREPARE, START]),
        (SAVE, SAVE, [STOP, READY, PREPARE, START]),
        (SAVE, None, [STOP, READY]),
    ],
)
def test_between_two_steps(before, after, expected):
    """Each pair of actions has its moves, in their order."""
    assert moves(before, after) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(WARMUP, NONE, [START, STOP]), (RECORD, NONE, [STOP]), (RECORD, WARMUP, [STOP])],
)
def test_an_order_that_no_cycle_has(before, after, expected):
    """A warm-up or a recording that breaks off is warned of, ended, and not reported as ready."""
    with pytest.warns(UserWarning, match=f"Incorrect schedule: {before.name} followed by {after.name}"):
        assert moves(before, after) == expected


def test_answers_that_are_no_action():
    """What is no action of a schedule is refused, at the start or at the step, and changes nothing."""
    with pytest.raises(ValueError, match="DEVICE_STOPPED is set internally"):
        otp.profile(operators=False, schedule=lambda _: otp.ProfilerAction.DEVICE_STOPPED)
    with pytest.raises(TypeError, match="returned 'later' for step 0"):
        otp.profile(operators=False, schedule=lambda _: "later")
    cycles = Cycles(lambda step: RECORD if step < 1 else None)
    with pytest.raises(TypeError, match="for step 1"):
        cycles.advance(lambda *_: None)
    assert (cycles.step_num, cycles.current) == (0, RECORD)


def looped(steps, **arguments):
    """A profile around a loop with one label per step; what its callback found in each cycle."""
    found = []

    def ready(prof):
        found.append((prof.step_num, [event.name for event in prof.events()]))

    with otp.profile(operators=False, on_trace_ready=ready, **arguments) as prof:
        for step in range(steps):
            with otp.record_function(f"label {step}"):
                pass
            prof.step()
    return prof, found


def test_cycles():
    """Each cycle is reported with its own events only; those of earlier ones are gone, which is said once."""
    with pytest.warns(UserWarning, match="clears events at the end of each cycle") as said:
        prof, found = looped(6, schedule=otp.schedule(wait=1, warmup=1, active=1))
    assert found == [(3, ["ProfilerStep*", "label 2"]), (6, ["ProfilerStep*", "label 5"])]
    assert len(said) == 1
    assert [event.name for event in prof.events()] == ["ProfilerStep*", "label 5"]
    assert (prof.step_num, prof.current_action) == (6, NONE)


def test_cycles_that_accumulate():
    """With acc_events each cycle is reported with all events so far, and the spans have every step that was recorded."""
    prof, found = looped(7, schedule=otp.schedule(wait=1, warmup=1, active=1), acc_events=True)
    first, second = ["ProfilerStep*", "label 2"], ["ProfilerStep*", "label 5"]
    assert found == [(3, first), (6, first + second)]
    spans = prof.spans()
    assert [span.name for span in spans] == ["torch.step", "torch.step", "label 2", "label 5"]
    assert [span.attributes.get("torch.step.number") for span in spans] == [2, 5, None, None]
    assert [span.parent and span.parent.span_id for span in spans[2:]] == [span.context.span_id for span in spans[:2]]
    assert spans[1].start_time >= spans[0].end_time


def test_the_number_of_a_step_may_be_set():
    """A loop that counts by itself sets it: the schedule is asked for the steps after it, and the steps have these numbers."""
    with otp.profile(schedule=otp.schedule(wait=0, warmup=1, active=2, skip_first=99), operators=False) as prof:
        assert (prof.step_num, prof.current_action, prof.record_steps) == (0, NONE, True)
        prof.step_num = 99
        prof.step()
        assert (prof.step_num, prof.current_action) == (100, RECORD)
        with otp.record_function("label"):
            pass
        with pytest.raises(TypeError):
            prof.step_num = "1"
    assert [span.attributes.get("torch.step.number") for span in prof.spans() if span.name == "torch.step"] == [100]


def test_a_cycle_that_the_end_cuts_short():
    """A recording that the end of the profile cuts short is reported; one that was only warming up is not."""
    assert looped(2, schedule=otp.schedule(wait=1, warmup=1, active=5))[1] == [(2, ["ProfilerStep*"])]
    assert looped(1, schedule=otp.schedule(wait=1, warmup=1, active=5))[1] == []


def test_a_schedule_that_never_records():
    """A profile whose schedule came to no recording says so when it is read."""
    prof, found = looped(2, schedule=otp.schedule(wait=9, warmup=1, active=1))
    assert found == []
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        prof.events()


def test_steps_are_shown_once(tmp_path):
    """Steps are labels in events and trace where a schedule was given, and slices of the trace's own where none was."""

    def slices(**arguments):
        prof, _ = looped(2, **arguments)
        prof.export_chrome_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        displayed = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
        return displayed, [event.name for event in prof.events() if event.name.startswith("ProfilerStep")]

    steps = ["ProfilerStep#0", "ProfilerStep#1"]
    assert slices(schedule=otp.schedule(wait=0, warmup=1, active=1, repeat=1)) == (steps[1:], ["ProfilerStep*"])
    assert slices() == (steps, [])


def test_what_a_callback_raises():
    """An error of on_trace_ready goes to the caller of step(), and the profile can still be ended and read."""

    def ready(_prof):
        raise OSError("no space")

    prof = otp.profile(operators=False, schedule=lambda _: SAVE, on_trace_ready=ready)
    prof.start()
    with pytest.raises(OSError, match="no space"):
        prof.step()
    prof.on_trace_ready = None
    prof.stop()
    assert [event.name for event in prof.events()] == ["ProfilerStep*"]


def test_by_hand():
    """prepare_trace(), start_trace() and stop_trace() do what start() and stop() do, in two halves."""
    prof = otp.profile(operators=False)
    with pytest.raises(AssertionError, match="initialized before starting"):
        prof.start_trace()
    with pytest.raises(AssertionError, match="initialized before stopping"):
        prof.stop_trace()
    prof.prepare_trace()
    with otp.record_function("too early"):
        pass
    prof.start_trace()
    with otp.record_function("label"):
        pass
    prof.stop_trace()
    assert [event.name for event in prof.events()] == ["label"]


@pytest.mark.parametrize(("use_gzip", "ending"), [(False, ".pt.trace.json"), (True, ".pt.trace.json.gz")])
def test_files_for_tensorboard(tmp_path, use_gzip, ending):
    """Each trace becomes a file of the worker's name in a folder that is made."""
    handler = otp.tensorboard_trace_handler(tmp_path / "a" / "log", "worker", use_gzip=use_gzip)
    with otp.profile(operators=False, on_trace_ready=handler):
        pass
    name = next((tmp_path / "a" / "log").iterdir()).name
    assert name.startswith("worker.")
    assert name.endswith(ending)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="Can't create directory"):
        otp.tensorboard_trace_handler(tmp_path / "file")(None)
