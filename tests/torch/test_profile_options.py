"""Every option of profile(), beside torch's two classes of that name."""

from __future__ import annotations

import gc
import json
import warnings

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import torch.autograd.profiler as autograd_profiler  # noqa: E402
import torch.profiler as torch_profiler  # noqa: E402
from observed import counts, info, run, succeeds  # noqa: E402
from torch._C._profiler import _ExperimentalConfig  # noqa: E402

import otel_torchprof as otp  # noqa: E402

CPU, CUDA, XPU, MTIA, PRIVATE = (
    getattr(torch_profiler.ProfilerActivity, name) for name in ("CPU", "CUDA", "XPU", "MTIA", "PrivateUse1")
)
WEIGHT = torch.ones(3, 3, requires_grad=True)


def step():
    """Forward and backward."""
    return run(lambda: (WEIGHT @ WEIGHT).relu().sum().backward())


def outcome(profiler, arguments):
    """The error of a profile around nothing, and its warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with profiler(**arguments):
                pass
            error = None
        except Exception as raised:  # noqa: BLE001 - whatever it is, both have to raise it
            error = type(raised), str(raised)
    own = {(warning.category, str(warning.message)) for warning in said if "profil" in str(warning.message).lower()}
    return error, own


def assert_same(arguments, theirs):
    """Where torch has an argument no longer, our error begins as its own and adds what to write instead."""
    (ours, warned), (error, expected) = outcome(otp.profile, arguments), outcome(theirs, arguments)
    if error is not None and "unexpected keyword" in error[1]:
        ours = ours[0], ours[1].partition(": ")[0]
    assert (ours, warned) == (error, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compared here is how a device is missed")
@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cpu": False},
        {"use_cpu": False, "use_kineto": True},
        {"use_cuda": True},
        {"use_cuda": False},
        {"use_device": "cuda"},
        {"use_device": "cuda", "use_cpu": False, "use_kineto": True},
        {"use_device": "abacus"},
        {"use_device": "xpu"},
        {"use_device": "hpu", "use_kineto": True},
        {"use_device": "mtia"},
        {"use_device": "mtia", "use_kineto": True},
        {"use_device": "privateuseone"},
        {"post_processing_timeout_s": -0.5},
        {"post_processing_timeout_s": 60.0},
        {"with_stack": True, "experimental_config": _ExperimentalConfig(trace_only=True)},
        {"activity_filters": {CPU: {"no such"}}},
        {"activity_filters": {CPU: {"CPU_OP"}}},
    ],
    ids=str,
)
def test_as_torch_autograd(arguments):
    """What torch.autograd.profiler.profile refuses and warns of, ours does, with its words."""
    assert_same(arguments, autograd_profiler.profile)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compared here is how a device is missed")
@pytest.mark.parametrize(
    "arguments",
    [
        {"activities": []},
        {"activities": ["CPU"]},
        {"activities": ["CPU", CPU]},
        {"activities": [CPU, CPU]},
        {"activities": [CPU, {CPU: ["CPU_OP"]}]},
        {"activities": [{CPU: ["no such"]}]},
        {"activities": [CPU, CUDA]},
        {"activities": [CUDA]},
        {"activities": [CPU, {CUDA: ["KERNEL"]}]},
        {"activities": [CPU, XPU]},
        {"activities": [MTIA]},
        {"activities": [CPU, PRIVATE]},
        {"activities": [CPU], "use_cuda": True},
        {"activities": [CPU], "use_cuda": False},
        {"activities": [CUDA], "use_cuda": False},
        {"schedule": torch_profiler.schedule(wait=1, warmup=1, active=1), "use_cuda": True},
        {"schedule": lambda _: torch_profiler.ProfilerAction.DEVICE_STOPPED},
        {"activities": [CPU], "post_processing_timeout_s": -0.5},
        {"activities": [CPU], "with_stack": True, "experimental_config": _ExperimentalConfig(trace_only=True)},
    ],
    ids=str,
)
def test_as_torch_profiler(arguments):
    """What torch.profiler.profile refuses and warns of, ours does, with its words."""
    assert_same(arguments, torch_profiler.profile)


@pytest.mark.parametrize(
    "options",
    [
        {"use_kineto": True},
        {"experimental_config": _ExperimentalConfig(capture_overload_names=True)},
        {"experimental_config": _ExperimentalConfig(profile_all_threads=True, verbose=True)},
        {"post_processing_timeout_s": 60.0},
    ],
    ids=str,
)
def test_the_same_events(options):
    """Options that are in no list give both the same operators and labels as often; test_parity_options.py shows the others."""
    step()
    gc.collect()
    with otp.profile(**options) as ours:
        step()
    with autograd_profiler.profile(**options) as theirs:
        step()
    assert info(ours.events())
    mine, torchs = ([line[1:2] + line[4:] for line in info(prof.function_events)] for prof in (ours, theirs))
    assert sorted(mine, key=str) == sorted(torchs, key=str)
    assert {row.key for row in ours.key_averages()} == {row.key for row in theirs.key_averages()}
    assert isinstance(ours.config(), type(theirs.config()))


def test_the_experimental_configuration():
    """What torch's configuration hides but pickles is found: other threads and overloads are recorded."""
    config = _ExperimentalConfig(profile_all_threads=True, capture_overload_names=True)
    requested = otp.profile(experimental_config=config)._segments._options
    assert (requested.all_threads, requested.overloads) == (True, True)
    requested = otp.profile(experimental_config=_ExperimentalConfig(verbose=True))._segments._options
    assert (requested.all_threads, requested.overloads) == (False, False)


def test_trace_only():
    """With trace_only both give the same error for events."""
    errors = set()
    for profiler in (otp.profile, torch_profiler.profile):
        with profiler(activities=[CPU], experimental_config=_ExperimentalConfig(trace_only=True)) as prof:
            step()
        with pytest.raises(RuntimeError) as raised:
            prof.events()
        errors.add(str(raised.value))
    assert len(errors) == 1


def test_activities_are_torchs():
    """Our activities equal torch's of the same name, whatever number torch gives them, and hash alike."""
    for name, theirs in torch_profiler.ProfilerActivity.__members__.items():
        ours = otp.ProfilerActivity[name]
        assert ours == theirs
        assert hash(ours) == hash(theirs)
        assert str(ours) == str(theirs)
    assert len(otp.ProfilerActivity) == len(torch_profiler.ProfilerActivity.__members__)
    assert otp.supported_activities() <= {otp.ProfilerActivity(int(a)) for a in torch_profiler.supported_activities()}
    assert otp.kineto_available() == torch_profiler.kineto_available()


def test_metadata(tmp_path):
    """What is added to the trace, and the options that were on, stand at its top level as in torch's."""
    found = []
    options = {"record_shapes": True, "profile_memory": True, "with_modules": True, "with_flops": True}
    for profiler in (otp.profile, torch_profiler.profile):
        prof = profiler(activities=[CPU], custom_trace_id_callback=lambda: "0A", **options)
        prof.preset_metadata_json("preset", '{"a": 1}')
        with prof:
            step()
            prof.add_metadata("text", "a value")
            prof.add_metadata_json("list", "[1, 2]")
        prof.export_chrome_trace(str(tmp_path / "trace.json"))
        found.append(json.loads((tmp_path / "trace.json").read_text()))
    keys = ("preset", "text", "list", "trace_id", "with_stack", *options)
    assert [found[0].get(key) for key in keys] == [found[1].get(key) for key in keys]
    assert found[0]["trace_id"] == "0A"


def test_distributed(tmp_path):
    """Where torch has process groups, the trace says which, as torch's does."""
    succeeds(
        "import json, sys, torch, torch.distributed as dist, otel_torchprof as otp\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "found = []\n"
        "for profiler in (otp.profile, torch.profiler.profile):\n"
        "    with profiler(activities=[torch.profiler.ProfilerActivity.CPU]) as prof: torch.ones(3).neg()\n"
        f"    prof.export_chrome_trace({str(tmp_path / 'trace.json')!r})\n"
        f"    found.append(json.load(open({str(tmp_path / 'trace.json')!r}))['distributedInfo'])\n"
        "assert found[0] == found[1], found\n"
        "dist.destroy_process_group()\n",
        has_torch=True,
    )


def test_an_execution_trace(tmp_path):
    """Torch's execution trace observer runs with the recording and is finished with it; the variable brings one."""
    observer = torch_profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.et.json"))
    with otp.profile(execution_trace_observer=observer):
        assert observer.is_running()
        step()
    assert not observer.is_running()
    assert not observer.is_registered
    nodes = json.loads((tmp_path / "trace.et.json").read_text())["nodes"]
    assert "aten::relu" in {node["name"] for node in nodes}


def test_an_execution_trace_by_variable():
    """The variable that torch.profiler looks at brings an execution trace observer to ours too."""
    program = (
        "import json, os, torch, otel_torchprof as otp\n"
        "with otp.profile() as prof: torch.ones(3).neg()\n"
        "path = prof.execution_trace_observer.get_output_file_path()\n"
        "print('aten::neg' in {node['name'] for node in json.load(open(path))['nodes']}); os.remove(path)\n"
    )
    said = succeeds(program, has_torch=True, ENABLE_PYTORCH_EXECUTION_TRACE="1")
    assert said.splitlines()[-1] == "True"


def test_a_pause():
    """Toggled off and on, both see the same operators as often; ours ends what is open at the pause."""
    found = []
    step()  # the first gradient is made, the others are added to it
    for profiler in (otp.profile, torch_profiler.profile):
        with profiler(activities=[CPU]) as prof:
            step()
            prof.toggle_collection_dynamic(False, [CPU])
            step()
            prof.toggle_collection_dynamic(True, [CPU])
            step()
        found.append(counts(prof.key_averages()))
    assert found[0] == found[1]


@pytest.mark.parametrize("moves", ["oOtT", "otOT", "otTO", "toTO", "toOT", "ooOtOT"])
def test_the_flag(moves):
    """Code that asks torch in either way hears yes while one of ours (o to O) or torch's (t to T) runs."""
    running, ours, theirs = 0, [], torch_profiler.profile(activities=[CPU])
    for move in moves:
        if move == "o":
            ours.append(otp.profile())
            ours[-1].start()
        elif move == "O":
            ours.pop(0).stop()
        else:
            (theirs.start if move == "t" else theirs.stop)()
        running += 1 if move.islower() else -1
        assert autograd_profiler._is_profiler_enabled == torch.autograd._profiler_enabled() == (running > 0)


def test_the_flag_of_a_torch_that_comes_later():
    """A torch that is imported while ours runs says so from its import on, and no longer when ours has stopped."""
    program = (
        "import otel_torchprof as otp\n"
        "with otp.profile(operators=False):\n"
        "    import torch.autograd.profiler as profiler\n"
        "    inside = profiler._is_profiler_enabled\n"
        "print(inside, profiler._is_profiler_enabled, profiler._set_is_profiler_enabled.__module__)\n"
    )
    assert succeeds(program) == "True False torch.autograd.profiler\n"


def test_the_flag_in_a_forked_child():
    """In a child that was forked while ours runs the flag says what torch does there: nothing."""
    program = (
        "import os, torch.autograd.profiler as profiler, otel_torchprof as otp\n"
        "with otp.profile(operators=False):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(int(profiler._is_profiler_enabled))\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), profiler._is_profiler_enabled)\n"
    )
    assert succeeds(program, has_torch=True) == "0 True\n"


def test_the_device_is_waited_for(monkeypatch):
    """What the device still does when the profile ends is in it: it is waited for before the recording stops."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: torch.ones(3).sinh())
    with otp.profile(use_device="cuda") as prof:
        step()
    assert prof.use_device == "cuda"
    assert "aten::sinh" in {event.name for event in prof.events()}


def test_texts_and_errors_before_the_end():
    """Before its end a profile says that it is unfinished, and its events and stacks cannot be had."""
    ours, theirs = otp.profile(sampling=False), autograd_profiler.profile()
    assert repr(theirs) == str(theirs) == "<unfinished torch.autograd.profile>"
    assert repr(ours) == str(ours) == "<unfinished otel_torchprof.profile>"
    with ours, theirs:
        step()
    errors = set()
    for prof in (ours, theirs):
        with pytest.raises(AssertionError) as raised:
            prof.export_stacks("stacks")
        errors.add(str(raised.value))
    assert len(errors) == 1
    for prof in (otp.profile(), autograd_profiler.profile()):
        with prof, pytest.raises(RuntimeError, match="Profiler context manager is not reentrant"):
            prof.__enter__()
