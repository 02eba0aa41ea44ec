"""Schedules, beside torch's profiler: what is reported when, with which events."""

from __future__ import annotations

import json
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import torch.profiler as torch_profiler  # noqa: E402
from observed import counts  # noqa: E402
from trace_validator import validate  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof import errors  # noqa: E402
from otel_torchprof._process.torch_differences import differences  # noqa: E402

CPU = torch_profiler.ProfilerActivity.CPU
X = torch.ones(3)


def listed(*actions):
    """A schedule by its actions; none of them after the last."""
    return lambda step: torch_profiler.ProfilerAction[actions[step] if step < len(actions) else "NONE"]


SCHEDULES = {
    "one cycle": {"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
    "two cycles": {"wait": 0, "warmup": 1, "active": 1, "repeat": 2},
    "no end": {"wait": 0, "warmup": 1, "active": 2},
    "no warm-up": {"wait": 1, "warmup": 0, "active": 2},
    "every step": {"wait": 0, "warmup": 0, "active": 1},
    "later": {"wait": 2, "warmup": 1, "active": 1, "skip_first": 2},
    "later, without waiting": {"wait": 2, "warmup": 1, "active": 1, "skip_first": 1, "skip_first_wait": 1},
    "warm-up that breaks off": ("WARMUP", "NONE"),
    "recording that breaks off": ("RECORD", "NONE", "WARMUP", "RECORD_AND_SAVE"),
    "warm-up only": ("WARMUP",) * 9,
    "all": ("RECORD",) * 9,
}


def made(module, name):
    """One of the schedules, by the torch or by us."""
    how = SCHEDULES[name]
    return module.schedule(**how) if isinstance(how, dict) else listed(*how)


def reported(profiler, schedule, **options):
    """What the callback of a profile found, and what is there at the end."""
    found = []

    def ready(prof):
        events = sorted(event.name for event in prof.events())
        averages = sorted((row.key, row.count) for row in prof.key_averages())
        found.append((prof.step_num, prof.current_action.name, events, averages))

    with profiler(activities=[CPU], schedule=schedule, on_trace_ready=ready, **options) as prof:
        for step in range(7):
            X.neg()
            if step % 2:
                X.exp()
            prof.step()
    return found, sorted(event.name for event in prof.events())


def with_warnings(*arguments, **options):
    """The same, and what was warned of the schedule."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = reported(*arguments, **options)
    texts = {str(warning.message) for warning in said}
    return found, {text for text in texts if text.startswith("Incorrect schedule")}


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("acc_events", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_as_torchs(name, acc_events):
    """Both report as often, at the same steps, with the same events, and warn of the same orders."""
    ours = with_warnings(otp.profile, made(otp, name), acc_events=acc_events)
    assert ours == with_warnings(torch_profiler.profile, made(torch_profiler, name), acc_events=acc_events)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("name", [name for name, how in SCHEDULES.items() if isinstance(how, dict)])
def test_schedules_of_the_other(name):
    """A schedule of torch's works with our profiler, one of ours with torch's, and both say the same for every step."""
    ours, theirs = made(otp, name), made(torch_profiler, name)
    assert [ours(step) for step in range(40)] == [theirs(step) for step in range(40)]
    assert [theirs(step) for step in range(40)] == [ours(step) for step in range(40)]
    assert with_warnings(otp.profile, theirs) == with_warnings(torch_profiler.profile, ours)


def test_the_actions_are_torchs():
    """Our actions equal torch's of the same value in both directions, and hash alike."""
    for theirs in torch_profiler.ProfilerAction:
        ours = otp.ProfilerAction[theirs.name]
        assert ours == theirs
        assert theirs == ours
        assert {ours: 1}[theirs] == 1
        assert ours.value == theirs.value


def test_what_torch_cannot():
    """A recording that falls back to a warm-up, at which torch's profiler crashes, is warned of and goes on."""
    found = []

    def program():
        schedule = listed("RECORD", "WARMUP", "RECORD_AND_SAVE")
        with otp.profile(schedule=schedule, on_trace_ready=lambda prof: found.append(len(prof.events()))) as prof:
            for _ in range(4):
                X.neg()
                prof.step()

    with pytest.warns(UserWarning, match="Incorrect schedule: RECORD followed by WARMUP"):
        program()
    assert found == [4]


def test_events_of_earlier_cycles_go_with_a_warning(monkeypatch):
    """That earlier cycles are forgotten is said once per process, in torch's words, where torch says it."""
    errors.forget_warnings()
    monkeypatch.setattr(torch_profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    texts = []
    for module in (otp, torch_profiler):
        schedule = module.schedule(wait=0, warmup=1, active=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reported(module.profile, schedule)
        texts.append([str(warning.message) for warning in said])
    assert texts[0] == texts[1]
    assert ["clears events" in text for text in texts[0]] == [True] * differences().warns_of_cycles


def test_the_trace_of_a_cycle(tmp_path):
    """The trace has each recorded step once, on the thread of the loop, with its operators inside, as torch's."""
    displayed = []
    for module in (otp, torch_profiler):
        schedule = module.schedule(wait=1, warmup=1, active=2, repeat=1)
        handler = module.tensorboard_trace_handler(str(tmp_path / module.__name__), "worker")
        with module.profile(activities=[CPU], schedule=schedule, on_trace_ready=handler) as prof:
            for _ in range(5):
                X.neg()
                prof.step()
        files = list((tmp_path / module.__name__).glob("worker.*.pt.trace.json"))
        assert len(files) == 1
        events = [event for event in json.loads(files[0].read_text())["traceEvents"] if event["ph"] == "X"]
        named = [event for event in events if event["name"].startswith(("ProfilerStep", "aten::"))]
        displayed.append([(event["name"], event["cat"]) for event in sorted(named, key=lambda event: event["ts"])])
        assert len({event["tid"] for event in named}) == 1
    assert displayed[0] == displayed[1]
    assert [name for name, _ in displayed[0]] == ["ProfilerStep#2", "aten::neg", "ProfilerStep#3", "aten::neg"]


def test_nothing_is_registered_between_cycles():
    """While a schedule waits or warms up torch has no observer of ours to call."""
    seen = []
    with otp.profile(schedule=otp.schedule(wait=1, warmup=1, active=1, repeat=1)) as prof:
        for _ in range(4):
            seen.append(prof._segments.running)
            prof.step()
    assert seen == [False, False, True, False]


def train():
    """Forward and backward, the backward on a thread of torch's own, and a label on a thread of ours."""
    weight = torch.ones(3, 3, requires_grad=True)
    with otp.record_function("forward"):
        loss = (weight @ weight).relu().sum()
    loss.backward()
    thread = threading.Thread(target=otp.record_function("other")(X.sin), name="other")
    thread.start()
    thread.join()


def test_several_cycles_as_one(tmp_path):
    """Cycles that are kept are one recording to everything that reads: averages, shapes, trace, arrows and spans."""
    train()
    schedule = otp.schedule(wait=1, warmup=1, active=1, repeat=3)
    with otp.profile(schedule=schedule, acc_events=True, all_threads=True, record_shapes=True) as prof:
        for _ in range(9):
            train()
            prof.step()
    with otp.profile(all_threads=True, record_shapes=True) as single:
        train()
    expected = {key: 3 * count for key, count in counts(single.key_averages(True), shapes=True).items()}
    found = counts(prof.key_averages(True), shapes=True)
    assert found.pop(("ProfilerStep*", "[]", True)) == 3
    assert found == expected

    names = [prof.threads[thread].name for thread in prof.columns["thread"].tolist()]
    assert names == sorted(names, key=names.index)
    assert (
        names.count("MainThread")
        == 3 * [single.threads[t].name for t in single.columns["thread"]].count("MainThread") + 3
    )

    prof.export_chrome_trace(tmp_path / "trace.json")
    trace = validate((tmp_path / "trace.json").read_bytes())
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    single.export_chrome_trace(tmp_path / "single.json")
    one = validate((tmp_path / "single.json").read_bytes())
    assert len(arrows) == 3 * len([event for event in one["traceEvents"] if event["ph"] == "s"]) > 0

    spans = prof.spans()
    ids = {span.context.span_id for span in spans}
    assert len(ids) == len(spans) == len(prof.columns["id"])
    assert [span.attributes["torch.step.number"] for span in spans if span.parent is None] == [2, 5, 8]
    assert {span.parent.span_id for span in spans if span.parent} <= ids


def test_another_schedule_may_take_over():
    """A schedule that is set while a profile runs is asked from the next step on; whether it runs can be asked, too."""
    asked = []
    profile = otp.profile(schedule=otp.schedule(wait=5, warmup=1, active=1))
    assert not profile.is_running
    with profile:
        assert profile.is_running
        profile.schedule = lambda step: asked.append(step) or otp.ProfilerAction.RECORD
        profile.step()
        profile.step()
    assert asked == [1, 2]
    assert not profile.is_running
