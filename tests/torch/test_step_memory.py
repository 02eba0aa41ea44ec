"""Memory of the process as attributes of steps, and what explain makes of it."""

from __future__ import annotations

import mmap
import time

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native.python_sources import usage_now  # noqa: E402
from otel_torchprof._native.recorder import recorder_stats  # noqa: E402
from otel_torchprof._record.process_memory import resident_memory  # noqa: E402

pytestmark = pytest.mark.skipif(resident_memory() is None, reason="this system does not say what memory is resident")

MIB = 2**20
STEPS = 80


class Keeping(torch.nn.Module):
    """Keeps what its layer returns, half a MiB of each call."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(64, 512)
        self.kept = []

    def forward(self, x):
        self.kept.append(self.encoder(x))
        return self.kept[-1].mean()


def train(step, steps):
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(256, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step()


def test_steps_have_the_memory_at_their_end():
    """A step that ends after memory was taken has more of it; the most so far is never less; what is free is on some step."""
    exporter = Collecting()
    stream = otp.stream(exporter, detail="steps")
    with stream:
        train(stream.step, 4)
        before, deadline = usage_now()[8], time.monotonic() + 60
        taken = mmap.mmap(-1, 64 * MIB)
        taken.write(b"1" * (64 * MIB))
        while usage_now()[8] - before < 32 * MIB and time.monotonic() < deadline:  # it is read every 10 ms
            train(stream.step, 1)
        train(stream.step, 4)
        taken.close()
    steps = [span.attributes for span in exporter.spans if "torch.step.memory.resident" in span.attributes]
    resident = [step["torch.step.memory.resident"] for step in steps]
    assert len(steps) >= 6
    assert max(resident) - resident[0] >= 32 * MIB
    assert all(step["torch.step.memory.peak"] >= step["torch.step.memory.resident"] for step in steps)
    assert any(step.get("torch.step.memory.free", 0) > 0 for step in steps)


@pytest.fixture
def resident(monkeypatch):
    """Sets what the system says of resident memory: what a test's allocator takes from the system depends on those before it."""
    size = [0]
    monkeypatch.setattr("otel_torchprof._profile.steps.usage_now", lambda: (*(0,) * 8, size[0], size[0], 0, 0))
    return size


def test_explain_says_where_memory_stays(resident):
    """A profile with memory and modules names the module and the operator whose memory is in use at the end."""
    with otp.profile(profile_memory=True, with_modules=True) as prof:

        def step():
            resident[0] += MIB // 2
            prof.step()

        resident[0] = 300 * MIB
        train(step, STEPS)
    [found] = [finding for finding in prof.explain().findings if finding.verdict == "memory-growth"]
    assert "512 KiB a step stay of what is allocated in Keeping.encoder, aten::linear" in found.evidence[1]


def test_a_profile_is_no_leak_of_the_program(resident, monkeypatch):
    """What recordings have of the process's memory grows with each step, and is not counted."""
    recorded = [0]
    monkeypatch.setattr(
        "otel_torchprof._profile.steps.recorder_stats", lambda: recorder_stats()._replace(chunk_bytes=recorded[0])
    )
    with otp.profile() as prof:
        for _ in range(10):
            torch.ones(4) + 1
            recorded[0] += MIB
            resident[0] = 300 * MIB + recorded[0]
            prof.step()
    steps = [span for span in prof.spans() if span.name == "torch.step"]
    assert {span.attributes["torch.step.memory.resident"] for span in steps[:10]} == {300 * MIB}
