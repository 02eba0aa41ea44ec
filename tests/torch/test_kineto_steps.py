"""KinetoStepTracker beside torch's: one truth, however it is driven."""

from __future__ import annotations

from collections import defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch.autograd import profiler as torch_profiler  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._profile.steps import KinetoStepTracker, OptimizerSteps  # noqa: E402

TORCHS = torch_profiler.KinetoStepTracker


@pytest.fixture
def reported(monkeypatch):
    """Torch's tracker at zero, and how often Kineto was told of a step."""
    steps = []
    monkeypatch.setattr(TORCHS, "_current_step", 0)
    monkeypatch.setattr(TORCHS, "_step_dict", defaultdict(int))
    monkeypatch.setattr(torch_profiler, "_kineto_step", lambda: steps.append(TORCHS._current_step))
    return steps


def optimizers(count):
    """As many optimizers, each of a parameter of its own."""
    return [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(count)]


def test_kineto_is_told(reported):
    """A new step is passed on to Kineto, once, whoever counted it."""
    assert KinetoStepTracker.increment_step("ours") == 1
    assert TORCHS.increment_step("torchs") == 2
    assert KinetoStepTracker.increment_step("ours") == 2
    assert len(reported) == 2
    assert KinetoStepTracker.current_step() == TORCHS.current_step() == 2


def test_a_jump(reported):
    """A jump is warned of by torch, and Kineto is told of every step of it."""
    TORCHS._step_dict["behind the back"] = 2
    with pytest.warns(UserWarning, match="increased more than 1"):
        assert KinetoStepTracker.increment_step("behind the back") == 3
    assert len(reported) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_optimizers_drive_it(reported, count):
    """One step per round of the optimizers, also beside a program that counts its own steps."""
    steps, those = OptimizerSteps(), optimizers(count)
    KinetoStepTracker.init_step_count("ProfilerStep")  # as a profile does when it is made
    steps.install()
    try:
        for expected in (1, 2, 3):
            for optimizer in those:
                optimizer.step()
            KinetoStepTracker.increment_step("ProfilerStep")
            assert KinetoStepTracker.current_step() == expected == len(reported)
    finally:
        steps.remove()
    those[0].step()
    assert KinetoStepTracker.current_step() == 3


def test_torchs_own_hook_counts_alone(reported):
    """Where torch's hook of optimizers is there too, a step is still one."""
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
    steps, (optimizer,) = OptimizerSteps(), optimizers(1)
    steps.install()
    try:
        optimizer.step()
        optimizer.step()
    finally:
        steps.remove()
        handle.remove()
    assert KinetoStepTracker.current_step() == 2 == len(reported)


@pytest.mark.parametrize("daemon", ["", "1"])
def test_steps_of_profiles(reported, monkeypatch, daemon):
    """Where Kineto's daemon follows steps it is told of each once, with ours alone and beside torch's over one loop."""
    monkeypatch.setenv("KINETO_USE_DAEMON", daemon)
    with otp.profile(operators=False) as ours:
        for _ in range(3):
            ours.step()
        assert KinetoStepTracker.current_step() == (3 if daemon else 0) == len(reported)
    TORCHS.init_step_count(
        "ProfilerStep"
    )  # what torch.profiler.profile does, without a daemon that Kineto would look for
    with otp.profile(operators=False) as ours:
        for _ in range(2):
            ours.step()
            if daemon:
                TORCHS.increment_step("ProfilerStep")
    assert TORCHS.current_step() == (5 if daemon else 0) == len(reported)
    assert list(TORCHS._step_dict) == ["ProfilerStep"]
