"""The arguments of profile() that need no torch: what is refused, what is accepted, what is said."""

from __future__ import annotations

import copy
import gc
import json
import logging
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

import otel_torchprof as otp
from otel_torchprof._process import torch_differences
from otel_torchprof._profile import options as _profile_options
from otel_torchprof.errors import forget_warnings

CPU, CUDA = otp.ProfilerActivity.CPU, otp.ProfilerActivity.CUDA


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    """What is said once per process is said in each of these tests."""
    forget_warnings()


@pytest.fixture
def devices(monkeypatch):
    """The devices that are there, a set to be filled."""
    found = set()
    monkeypatch.setattr(_profile_options, "synchronize", lambda _device: None)
    monkeypatch.setattr(_profile_options, "_is_available", found.__contains__)
    monkeypatch.setattr(
        _profile_options, "_torchs_activities", lambda: {CPU} | {_profile_options._DEVICES[name] for name in found}
    )
    return found


def recorded(**rest):
    """A finished profile with one label inside another."""
    with otp.profile(operators=False, **rest) as prof, otp.record_function("outer"), otp.record_function("inner"):
        pass
    return prof


def test_activity_texts():
    """Our activities have torch's text, are integers, and survive a copy."""
    assert (str(CPU), f"{CUDA}", int(CUDA)) == ("ProfilerActivity.CPU", "ProfilerActivity.CUDA", 2)
    assert copy.deepcopy(CUDA) is CUDA
    assert CPU != CUDA
    assert otp.supported_activities() == {CPU}


@pytest.fixture
def older_torch(monkeypatch):
    """Torch up to 2.13, whichever is here; what versions differ in is compared with torch's own in tests/torch."""
    monkeypatch.setattr(_profile_options, "differences", lambda: torch_differences._of("2.13.0"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"activities": []}, AssertionError, "No valid profiler activities found"),
        ({"activities": ["CPU"]}, AssertionError, "No valid profiler activities found"),
        ({"activities": ["CPU", CPU]}, TypeError, "Expected ProfilerActivity or dict, got <class 'str'>"),
        ({"activities": [CPU, {CPU: []}]}, ValueError, "Activity ProfilerActivity.CPU specified more than once"),
        ({"activities": [{CPU: ["cpu_op"]}]}, RuntimeError, "activity type name: 'cpu_op'"),
        ({"activity_filters": {"CPU": []}}, TypeError, "Expected ProfilerActivity"),
        ({"use_cpu": False}, AssertionError, r"supported only with Kineto \(use_kineto=True\)"),
        ({"use_cpu": False, "use_kineto": True}, AssertionError, "No activities specified for the profiler"),
        ({"use_device": "mtia"}, AssertionError, "Legacy MTIA profiling is not supported"),
        ({"post_processing_timeout_s": -1}, ValueError, "must be non-negative"),
        ({"post_processing_timeout_s": "1"}, TypeError, "post_processing_timeout_s is '1'; .*number"),
        ({"activities": 3}, TypeError, "activities is 3; .*list"),
        ({"activities": "CPU"}, TypeError, "activities is 'CPU'; .*list of ProfilerActivity"),
        ({"activity_filters": 3}, TypeError, "activity_filters is 3; .*dictionary"),
        ({"activities": [{CPU: "CPU_OP"}]}, TypeError, "filter of ProfilerActivity.CPU is 'CPU_OP'; .*list"),
        ({"schedule": 3}, TypeError, "schedule is 3; .*function"),
        ({"on_trace_ready": "log"}, TypeError, "on_trace_ready is 'log'; .*function"),
        ({"custom_trace_id_callback": "id"}, TypeError, "custom_trace_id_callback is 'id'; .*function"),
        ({"execution_trace_observer": "et.json"}, TypeError, "execution_trace_observer is 'et.json'; .*start, stop"),
        ({"experimental_config": {"verbose": True}}, TypeError, "experimental_config is {'verbose': True}; "),
    ],
)
@pytest.mark.usefixtures("older_torch")
def test_what_is_refused(arguments, error, text):
    """Arguments that torch refuses are refused with torch's error; what is of a wrong type is named, before anything runs."""
    with pytest.raises(error, match=text):
        otp.profile(operators=False, **arguments)


@pytest.mark.usefixtures("older_torch")
@pytest.mark.parametrize(
    ("arguments", "category", "text"),
    [
        ({"use_cuda": True}, FutureWarning, "`use_cuda` will be deprecated soon"),
        ({"use_cuda": False, "activities": [CPU]}, FutureWarning, "`use_cuda` is deprecated, use `activities`"),
        ({"use_device": "cuda"}, UserWarning, "CUDA is not available, disabling CUDA profiling"),
        ({"use_device": "abacus"}, UserWarning, "The abacus is not a valid device option"),
        ({"activities": [CPU, CUDA]}, UserWarning, "CUDA is not available, disabling CUDA profiling"),
    ],
)
def test_what_is_warned_of(devices, arguments, category, text):
    """A deprecated argument and a device that is not there are warned of at the user's line; the profile works."""
    with pytest.warns() as said:
        prof = recorded(**arguments)
    matching = [warning for warning in said if text in str(warning.message)]
    assert [(warning.category, warning.filename) for warning in matching] == [(category, __file__)]
    assert prof.use_device is None
    assert len(prof.events()) == 2


def test_a_device_that_is_there(devices, caplog, monkeypatch):
    """A device that is there is waited for when the recording stops; health says why it has no times nevertheless."""
    waited = []
    monkeypatch.setattr(_profile_options, "synchronize", waited.append)
    devices.add("cuda")
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        prof = recorded(activities=[CPU, CUDA])
        recorded(use_device="cuda", use_kineto=True)
    assert waited == ["cuda", "cuda"]
    assert (prof.use_device, prof.activities) == ("cuda", {CPU, CUDA})
    assert [record.getMessage().startswith("use_kineto is ") for record in caplog.records].count(True) == 1
    assert prof.health.devices.startswith("off: torch")


def test_a_device_that_fails(devices, monkeypatch):
    """An error of the device at the end goes to the caller, and the recording has stopped and can be read."""

    def fail(_device):
        raise RuntimeError("the device is lost")

    devices.add("cuda")
    monkeypatch.setattr(_profile_options, "synchronize", fail)
    prof = otp.profile(operators=False, use_device="cuda")
    with pytest.raises(RuntimeError, match="the device is lost"), prof, otp.record_function("label"):
        pass
    assert [event.name for event in prof.events()] == ["label"]


def test_a_device_alone(devices):
    """Without the CPU among the activities nothing is recorded, until it is asked for meanwhile."""
    devices.add("cuda")
    assert len(recorded(activities=[CUDA]).events()) == 0
    with otp.profile(operators=False, activities=[CUDA]) as prof:
        prof.toggle_collection_dynamic(True, [CPU])
        with otp.record_function("label"):
            pass
    assert [event.name for event in prof.events()] == ["label"]


def test_a_pause():
    """While the CPU is toggled off nothing is recorded; what was open then ends there; before and after has no effect."""
    prof = otp.profile(operators=False)
    prof.toggle_collection_dynamic(False, [CPU])
    with prof, otp.record_function("open"):
        prof.toggle_collection_dynamic(False, [CUDA])
        prof.toggle_collection_dynamic(False, [CPU])
        with otp.record_function("unseen"), pytest.raises(RuntimeError, match="didn't finish running"):
            prof.events()
        prof.toggle_collection_dynamic(True, [CPU])
        prof.toggle_collection_dynamic(True, [CPU])
        with otp.record_function("seen"):
            pass
    assert [event.name for event in prof.events()] == ["open", "seen"]
    prof.toggle_collection_dynamic(True, [CPU])
    assert len(prof.events()) == 2


def test_a_filter_of_the_cpus_events(tmp_path):
    """A filter of the CPU's group leaves events out of the trace; the list of events has all, as torch's."""

    def displayed(types):
        prof = recorded(activities=[{CPU: types}])
        prof.export_chrome_trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        return len(prof.events()), [event["name"] for event in events if event["ph"] == "X" and event["cat"] != "Trace"]

    assert displayed(["USER_ANNOTATION"]) == (2, ["outer", "inner"])
    assert displayed(["CPU_OP"]) == displayed([]) == (2, [])


def config(**settings):
    """What a torch _ExperimentalConfig says, as an object."""
    return SimpleNamespace(**{"trace_only": False, **settings})


def test_settings_without_a_meaning(caplog):
    """A setting of the experimental configuration that means nothing here is said so, once; the others are not."""
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        for _ in range(2):
            recorded(experimental_config=config(enable_cuda_sync_events=True, verbose=True, profiler_metrics=[]))
    assert [record.getMessage().partition(" is ")[0] for record in caplog.records] == [
        "experimental_config: enable_cuda_sync_events"
    ]


def test_collections_without_calls():
    """``record_python_gc_info`` records pauses of the garbage collector, and no calls; without it there are none."""

    def names(**options):
        with otp.profile(operators=False, **options) as prof:
            gc.collect(0)
        return [event.name for event in prof.events()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "gc.collect: generation 0" in (found := names(experimental_config=config(record_python_gc_info=True)))
    assert {name.rpartition(" ")[0] for name in found} == {"gc.collect: generation"}
    assert names() == []


def test_trace_only(tmp_path):
    """With trace_only there is a trace and no list of events; with stacks torch drops it, with a warning."""
    prof = recorded(experimental_config=config(trace_only=True))
    for read in (prof.events, prof.key_averages, prof.table, prof.total_average, lambda: prof.self_cpu_time_total):
        with pytest.raises(RuntimeError, match="not available when trace_only=True"):
            read()
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert repr(prof) == str(prof) == "<profile of 2 events>"
    given = config(trace_only=True)
    with pytest.warns(UserWarning, match="trace_only=True is incompatible"):
        assert len(recorded(experimental_config=given, with_stack=True).events()) >= 2
    assert given.trace_only


def test_metadata(tmp_path):
    """What is added to a trace, preset for it, and noted by itself stands at its top level; what is no JSON is refused."""
    prof = otp.profile(operators=False, record_shapes=True, with_flops=True)
    prof.preset_metadata_json("preset", '{"a": [1, null]}')
    prof.add_metadata("early", "text")
    with prof:
        prof.add_metadata('quo"te', 'a "b"')
        prof.add_metadata_json("late", "1.5")
    for wrong in ("{", "NaN", None):
        with pytest.raises(ValueError, match=r"metadata 'x' is .*must be a JSON text"):
            prof.add_metadata_json("x", wrong)
    with pytest.raises(TypeError, match="must be a str"):
        prof.add_metadata("x", 1)
    prof.export_chrome_trace(tmp_path / "trace.json", metadata={"late": 2})
    top = json.loads((tmp_path / "trace.json").read_text())
    expected = {"preset": {"a": [1, None]}, "early": "text", 'quo"te': 'a "b"', "late": 2}
    expected |= {"record_shapes": 1, "with_flops": 1, "trace_id": prof.get_trace_id()}
    assert {key: top.get(key) for key in expected} == expected
    assert "profile_memory" not in top


def test_trace_ids():
    """Each recording gets an id, from the callback in force or at random; before the first there is none."""
    numbers = iter("12")
    prof = otp.profile(operators=False, custom_trace_id_callback=lambda: next(numbers))
    assert (prof.get_trace_id(), prof.trace_id) == (None, "")
    with prof:
        assert prof.get_trace_id() == "1"
    prof.set_custom_trace_id_callback(None)
    with prof:
        pass
    assert len(prof.get_trace_id()) == 32
    int(prof.get_trace_id(), 16)


class Observer:
    """Notes what is asked of an execution trace observer."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda: self.asked.append(name)


def test_an_observer():
    """An execution trace observer starts and stops with each recording, and is cleaned up when the block is left."""
    observer = Observer()
    with pytest.raises(KeyError), otp.profile(operators=False, execution_trace_observer=observer) as prof:
        raise KeyError
    assert observer.asked == ["start", "stop", "cleanup"]
    assert prof.execution_trace_observer is observer


def test_export_stacks(tmp_path):
    """Stacks are exported only where they were recorded, with torch's error."""
    prof = otp.profile(operators=False)
    with prof, pytest.raises(RuntimeError, match=r"^Profiler didn't finish running"):
        prof.export_stacks(tmp_path / "stacks")
    with pytest.raises(AssertionError, match=r"export_stacks\(\) requires with_stack=True"):
        prof.export_stacks(tmp_path / "stacks", "self_cuda_time_total")  # samples have other metrics
    with pytest.raises(ValueError, match="metric"):
        recorded(with_stack=True).export_stacks(tmp_path / "stacks", "time")


def test_a_memory_timeline_needs_much():
    """A memory timeline of a profile without what it needs is refused with what is missing, after torch's warning."""
    prof = recorded(record_shapes=True)
    with (
        pytest.warns(FutureWarning, match="`export_memory_timeline` is deprecated"),
        pytest.raises(ValueError, match=r"^profile_memory=True, with_stack=True required for memory profiling"),
    ):
        prof.export_memory_timeline("timeline.json")


def test_figures():
    """The figures of a profile say how long it ran and, once it is read, how many events it has."""
    begun = time.perf_counter()
    prof = recorded()
    most = time.perf_counter() - begun
    stats = prof._stats()
    assert stats == prof.health.stats
    assert 0 < stats.profiling_window_duration_sec < most
    assert (stats.number_of_events, stats.function_events_build_tree_call_duration_us) == (0, 0)
    assert prof.health.start_ns < prof.health.stop_ns
    prof.events()
    assert prof._stats().number_of_events == 2


def test_disabled_takes_everything():
    """enabled=False checks nothing, calls nobody and counts steps."""
    observer, ready = Observer(), []
    with otp.profile(
        False, use_device="abacus", on_trace_ready=ready.append, execution_trace_observer=observer, schedule=len
    ) as prof:
        prof.step()
        prof.add_metadata("a", "b")
        prof.toggle_collection_dynamic(False, [CPU])
    assert (ready, prof.step_num, prof.get_trace_id(), len(prof.events())) == ([], 1, None, 0)


def test_without_torch():
    """Every option is there without torch: activities, schedules, devices that then are not, and the import of none."""
    program = (
        "import sys, warnings\n"
        "sys.modules['torch'] = None\n"
        "import otel_torchprof as otp\n"
        "warnings.simplefilter('ignore')\n"
        "schedule = otp.schedule(wait=0, warmup=1, active=1)\n"
        "kept = []\n"
        "with otp.profile(activities=[otp.ProfilerActivity.CPU, otp.ProfilerActivity.CUDA], schedule=schedule,\n"
        "                 on_trace_ready=lambda p: kept.append(len(p.events())), record_shapes=True,\n"
        "                 profile_memory=True, operators=False) as prof:\n"
        "    for _ in range(4): prof.step()\n"
        "print(kept, otp.kineto_available(), prof.use_device)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 1] False None\n", "")
