"""Code that imports from torch's profiler modules finds every name here, in the module that docs/profile.md says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import preloaded
import pytest
import torch

import otel_torchprof as otp

ROOT = Path(__file__).resolve().parents[2]
SCHEME = {
    "torch.profiler": ("otel_torchprof", "otel_torchprof.profiler"),
    "torch.profiler.profiler": ("otel_torchprof", "otel_torchprof.profiler"),
    "torch.autograd.profiler": ("otel_torchprof", "otel_torchprof.profiler"),
    "torch.autograd.profiler_util": ("otel_torchprof", "otel_torchprof.profiler_util"),
    "torch.autograd.profiler_legacy": ("otel_torchprof.legacy",),
    "torch._dynamo.profiler": ("otel_torchprof.dynamo",),
}
"""Where a module of torch's is found; the first of two is where one looks first."""


def public_names(module):
    """What a module offers: its ``__all__``, else the classes and functions that it defines."""
    return getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]


@pytest.mark.parametrize(("theirs", "ours"), [(theirs, ours) for theirs, all_ in SCHEME.items() for ours in all_])
def test_every_public_name_is_found(theirs, ours):
    """Every public name of torch's module is a name of ours."""
    module = importlib.import_module(ours)
    missing = [name for name in public_names(importlib.import_module(theirs)) if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize("module", ["otel_torchprof", "otel_torchprof.profiler"])
def test_what_is_torchs_own(module):
    """The execution trace observer and ``itt`` are torch's; a name that nobody has is an error as everywhere."""
    module = importlib.import_module(module)
    assert module.ExecutionTraceObserver is torch.profiler.ExecutionTraceObserver
    assert module.RecordScope is torch.profiler.RecordScope
    assert module._ExperimentalConfig is torch.profiler._ExperimentalConfig
    assert module.itt is torch.profiler.itt
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_every_name_of_all_can_be_had_without_torch():
    """A star import brings every name, and imports no torch."""
    program = (
        "import sys; from otel_torchprof import *; from otel_torchprof.profiler import *; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_nothing_warns():
    """Torch, the package and NVIDIA's binding are imported, in either order, and GPU metrics started, without any warning."""
    start = "import otel_torchprof; otel_torchprof.GpuMetrics().start().stop()"
    said = "import sys; print('pynvml' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", f"{start}; import torch; {said}"]
    before = subprocess.run(command, capture_output=True, text=True, check=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    after = preloaded.run(f"import torch; {start}; {said}", environment=environment, filters=("error",))
    for done in (before, after):
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_profile_inside():
    """``prof.profiler``, which in torch.profiler's class is the one inside, reads the same events; None before the start."""
    prof = otp.profile()
    assert prof.profiler is None
    with prof:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert "aten::mm" in {event.name for event in prof.profiler.function_events}
    assert isinstance(prof, otp._KinetoProfile)


KINETOS = {
    "kineto_activities",
    "kineto_results",
    "entered",
    "action_map",
    "has_cudagraphs",
    "mem_tl",
    "step_rec_fn",
    "preset_metadata",
}
"""What torch's profiles keep for Kineto and for themselves, under names that look public."""
PROFILES = {
    "torch.profiler.profile": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "torch.autograd.profiler.profile": torch.autograd.profiler.profile,
}


@pytest.mark.parametrize("theirs", PROFILES)
def test_profiles_events_and_averages_have_torchs_attributes(theirs):
    """Every public attribute of torch's profiles, lists, events and averages is one of ours too, after a run."""

    def run(prof):
        with prof:
            torch.ones(2).neg()
        events = prof.events() if hasattr(prof, "events") else prof.function_events
        return prof, events, events[0], prof.key_averages()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attributes that are deprecated
        missing = {
            (type(expected).__name__, name)
            for expected, found in zip(run(PROFILES[theirs]()), run(otp.profile()), strict=True)
            for name in dir(expected)
            if not name.startswith("_") and not hasattr(found, name)
        }
    assert {name for _, name in missing} <= KINETOS, missing
