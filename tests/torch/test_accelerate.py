"""Accelerate's ``profile()`` with profiles of this package."""

from __future__ import annotations

import gzip
import json

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
accelerate = pytest.importorskip("accelerate")

import otel_torchprof as otp  # noqa: E402
from otel_torchprof.integrations import AccelerateProfileKwargs  # noqa: E402


def test_accelerators_make_our_profiles(tmp_path):
    """Accelerator.profile() gives a profile of this package with the options it was given, and writes its Chrome trace."""
    kwargs = AccelerateProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path))
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[kwargs])
    with accelerator.profile() as prof:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(prof, otp.profile)
    assert [event.input_shapes for event in prof.events() if event.name == "aten::mm"] == [[[2, 3], [3, 4]]]
    (path,) = tmp_path.iterdir()
    text = path.read_bytes()
    trace = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])


def test_schedules_are_followed():
    """The options of the schedule and what is called with each trace are those of Accelerate's own class."""
    ready = []
    options = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
    kwargs = AccelerateProfileKwargs(schedule_option=options, on_trace_ready=lambda prof: ready.append(prof.step_num))
    with kwargs.build() as prof:
        for _ in range(4):
            torch.ones(1)
            prof.step()
    assert ready == [3]
