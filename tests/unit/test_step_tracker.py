"""KinetoStepTracker where torch does not count: its own table of requesters."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import defaultdict

import pytest
from threaded import in_threads

from otel_torchprof._profile import steps
from otel_torchprof._profile.steps import KinetoStepTracker


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """A tracker that has counted nothing, in a process without torch."""
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", None)
    monkeypatch.setattr(KinetoStepTracker, "_own", steps._OwnTracker())


def test_the_largest_count_is_the_step():
    """Requesters that count the same steps count them once; the one that is ahead decides."""
    assert [KinetoStepTracker.increment_step(r) for r in ("yield", "yield", "yield")] == [1, 2, 3]
    KinetoStepTracker.init_step_count("optimizer")
    assert KinetoStepTracker.increment_step("optimizer") == 4
    assert KinetoStepTracker.increment_step("yield") == 4
    assert KinetoStepTracker.increment_step("new") == 5
    assert KinetoStepTracker.current_step() == 5


def test_a_requester_may_leave():
    """Forgetting a requester keeps the step, and says whether there was one."""
    KinetoStepTracker.increment_step("a")
    assert KinetoStepTracker.erase_step_count("a") is True
    assert KinetoStepTracker.erase_step_count("a") is False
    assert KinetoStepTracker.current_step() == 1
    assert KinetoStepTracker.increment_step("a") == 2


def test_a_jump_is_warned_of():
    """A step that jumps by more than one is warned of in torch's words, and taken."""
    KinetoStepTracker.increment_step("a")
    KinetoStepTracker._own._step_dict["b"] = 3
    expected = r"Profiler step count has increased more than 1 - current_step = 1 step dict =  \{'a': 1, 'b': 4\}"
    with pytest.warns(UserWarning, match=expected):
        assert KinetoStepTracker.increment_step("b") == 4
    assert KinetoStepTracker.current_step() == 4


def test_from_many_threads():
    """Steps counted on several threads at a time are all counted."""
    start = threading.Barrier(4)

    def count(requester):
        start.wait()
        for _ in range(500):
            KinetoStepTracker.increment_step(requester)

    for name in "abcd":
        KinetoStepTracker.init_step_count(name)
    in_threads(*(functools.partial(count, name) for name in "abcd"))
    assert KinetoStepTracker.current_step() == 500


def test_torch_takes_over(monkeypatch):
    """What was counted before torch's profiler was imported is in torch's tracker afterwards, once."""

    class Torchs(steps._OwnTracker):
        pass

    KinetoStepTracker.increment_step("a")
    KinetoStepTracker.increment_step("a")
    torchs = Torchs()
    torchs._step_dict = defaultdict(int)
    module = types.SimpleNamespace(KinetoStepTracker=torchs)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    assert KinetoStepTracker.current_step() == 2
    assert KinetoStepTracker.increment_step("a") == 3
    assert torchs._step_dict == {"a": 3}
    assert KinetoStepTracker._own.current_step() == 0


@pytest.mark.parametrize("daemon", ["", "1"])
def test_steps_of_profiles(monkeypatch, daemon):
    """Profiles count where Kineto's daemon follows steps, two over one loop only once, and leave nothing behind."""
    monkeypatch.setenv("KINETO_USE_DAEMON", daemon)
    first, second = steps.ProfilerSteps(), steps.ProfilerSteps()
    first.begin()
    first.step()
    second.begin()
    for _ in range(2):
        first.step()
        second.step()
    assert KinetoStepTracker.current_step() == (3 if daemon else 0)
    first.end()
    second.end()
    second.end()
    assert KinetoStepTracker._own._step_dict == {}
