"""What a GPU's own failures look like under a profile, and which GPUs it uses. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

FAILING = """
import contextlib, sys
import torch
import otel_torchprof as otp
profiled = sys.argv[1] == "profiled"
values = torch.zeros(4, device="cuda")
there, beyond = torch.tensor([0], device="cuda"), torch.tensor([10**6], device="cuda")
prof = otp.profile(use_device="cuda") if profiled else contextlib.nullcontext()
try:
    with prof:
        for _ in range(100):
            values[there]
        try:
            values[beyond]
            torch.cuda.synchronize()
        except RuntimeError as error:
            print("raised", type(error).__name__, str(error).splitlines()[0], flush=True)
            raise
except RuntimeError as error:
    print("left with", type(error).__name__, str(error).splitlines()[0], flush=True)
if profiled:
    print("health:", prof.health.devices, len(prof.events()), flush=True)
"""

ELSEWHERE = """
import torch
import otel_torchprof as otp
torch.cuda.set_device(1)
a = torch.randn(512, 512, device="cuda")
with otp.profile(use_device="cuda") as prof:
    for _ in range(100):
        torch.mm(a, a)
    torch.cuda.synchronize()
print(torch._C._cuda_hasPrimaryContext(0), {w.device_index for e in prof.events() if (w := e.device_work)})
"""


def run(script: str, *arguments: str) -> list[str]:
    """The lines that a script prints; torch's own and the driver's go to the other output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-8000:])
    return done.stdout.splitlines()


def test_failing_kernel_is_reported_as_without_us():
    """A kernel that fails reaches the program as the same error at the same place, and health says that times ended."""
    plain, profiled = run(FAILING, "plain"), run(FAILING, "profiled")
    assert len(plain) == 2
    assert profiled[:2] == plain
    state, _, events = profiled[2].removeprefix("health: ").rpartition(" ")
    assert state.startswith("off since the device's library failed")
    assert int(events) >= 100


several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@several
def test_only_the_gpu_in_use_is_used():
    """A process that works on the second GPU leaves the first one alone, also where it is profiled."""
    assert run(ELSEWHERE) == ["False {1}"]


@several
def test_operators_on_another_gpu_than_the_current_one():
    """Operators on another GPU than the current one are timed there, and the current one stays what it was."""
    import otel_torchprof as otp

    a = torch.randn(1024, 1024, device="cuda:1")
    with otp.profile(use_device="cuda") as prof:
        torch.mm(a, a)
        torch.mm(a.to("cuda:0"), a.to("cuda:0"))
        current = torch.cuda.current_device()
        torch.cuda.synchronize(1)
    works = [event.device_work for event in prof.events() if event.name == "aten::mm"]
    assert [work.device_index for work in works] == [1, 0]
    assert all(work.duration > 0 for work in works)
    assert current == 0
