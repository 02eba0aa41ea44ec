"""Its being here puts this folder on the path, so that the folders below can import the helpers in it."""

from __future__ import annotations

import inspect
from fractions import Fraction

import pytest


class _Nanoseconds(int):
    """A time whose quotients are exact."""

    def __truediv__(self, other: int) -> Fraction:
        return Fraction(int(self), other)


@pytest.fixture(autouse=True, scope="session")
def _exact_times_of_memory():
    """Keeps the times exact by which torch up to 2.10 says whose memory is whose; all else of its profiler is as it is.

    It divides them to microseconds since 1970, which as floats are a quarter of one apart: what was allocated up to 125 ns
    before or after an operator is its or is not, as it falls. Later releases stay with nanoseconds.
    """
    import torch  # the tests in this folder skip themselves without it
    from torch.autograd.profiler_util import MemRecordsAcc

    event = torch._C._autograd._KinetoEvent
    if "start_us" not in inspect.signature(MemRecordsAcc.in_interval).parameters:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_ns", "end_ns"):
            theirs = getattr(event, name)
            patch.setattr(event, name, lambda self, theirs=theirs: _Nanoseconds(theirs(self)))
        yield


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_measured():
    """Leaves out what torch does at the end of each compilation to time its guards for its log: it flushes all caches of the processor."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(guards, "profile_guard_manager"):  # later ones have it
            patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture
def nothing_is_left():
    """Whatever a test of phases does, torch is as it was; and nothing was compiled before, or roots would not be searched."""
    import torch
    from phase_events import state_of_torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = state_of_torch()
    yield
    assert state_of_torch() == before
