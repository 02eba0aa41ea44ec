"""Hooks and wrappers of phases in torch: they look like what they wrap, and leave it as it was, whoever else does the same."""

from __future__ import annotations

import gc
import inspect
import sys

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from forked import in_child  # noqa: E402
from phase_events import model_and, recorded, state_of_torch  # noqa: E402
from torch import nn  # noqa: E402

from otel_torchprof._columns.schema import Kind  # noqa: E402
from otel_torchprof._native.recorder import Session  # noqa: E402
from otel_torchprof._process import wrapped_calls  # noqa: E402
from otel_torchprof._record import phase_calls  # noqa: E402
from otel_torchprof._record.phases import Phases  # noqa: E402

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_wrappers_look_like_what_they_wrap():
    """Names, documentation and signatures are those of torch's functions; a static method stays one."""
    before = {}
    for call in phase_calls._CALLS:
        owner, name = wrapped_calls.place(call, sys.modules.get(call.module))
        if owner is not None:
            before[call] = owner, name, getattr(owner, name)
    static = inspect.getattr_static(checkpointing.CheckpointFunction, "backward")
    with recorded():
        for owner, name, function in before.values():
            wrapper = getattr(owner, name)
            assert wrapper is not function
            assert (wrapper.__name__, wrapper.__doc__) == (function.__name__, function.__doc__)
            try:
                expected = inspect.signature(function)
            except ValueError:  # a C function of which Python knows none
                continue
            assert inspect.signature(wrapper) == expected
        assert isinstance(inspect.getattr_static(checkpointing.CheckpointFunction, "backward"), staticmethod)
    assert inspect.getattr_static(checkpointing.CheckpointFunction, "backward") is static


def test_methods_that_subclasses_override():
    """What calls the method of the base class is a phase around that; what does not is none."""

    class Calls(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)

    class Replaces(torch.amp.GradScaler):
        def update(self, new_scale=None):
            pass

    model, optimizer = model_and(Calls)
    scaler = Replaces("cpu")
    with recorded() as found:
        optimizer.zero_grad()
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert found.lines() == ["ZEROING", "FORWARD", "BACKWARD", "SCALER_STEP", "  UNSCALE", "  STEP"]


@pytest.fixture
def place():
    """A function that is wrapped, back as it was afterwards."""
    original = torch.optim.Optimizer.zero_grad
    yield torch.optim.Optimizer
    torch.optim.Optimizer.zero_grad = original


def other_tool(place):
    """Wraps it too, as other tools do."""
    inner = place.zero_grad

    def theirs(self, *args, **kwargs):
        theirs.calls += 1
        return inner(self, *args, **kwargs)

    theirs.calls = 0
    place.zero_grad = theirs
    return theirs


def test_a_tool_that_wrapped_before(place):
    """Its wrapper is called and put back."""
    theirs = other_tool(place)
    _, optimizer = model_and()
    with recorded() as found:
        optimizer.zero_grad()
    assert found.lines() == ["ZEROING"]
    assert place.zero_grad is theirs
    assert theirs.calls == 1


def test_a_tool_that_wraps_meanwhile(place):
    """Its wrapper stays; ours inside of it is no phase any more, also when others record again."""
    _, optimizer = model_and()
    with recorded() as first:
        theirs = other_tool(place)
        optimizer.zero_grad()
    assert place.zero_grad is theirs
    with recorded() as second:
        optimizer.zero_grad()
    assert place.zero_grad is theirs
    assert theirs.calls == 2
    assert first.lines() == second.lines() == ["ZEROING"]


def test_several_users():
    """The hooks go with the last; what one of them does again changes nothing."""
    before = state_of_torch()
    session = Session(1 << 20, all_threads=True, kinds=[Kind.PHASE])
    first, second = Phases(), Phases()
    first.start(session)
    with_hooks = state_of_torch()
    second.start(session)
    first.stop()
    first.stop()
    assert state_of_torch() == with_hooks != before
    in_threads(second.stop)
    assert state_of_torch() == before


def test_stopped_in_a_finalizer():
    """Wherever it runs, in the middle of a collection too."""
    before = state_of_torch()
    model, _ = model_and()

    class Owner:
        def __init__(self):
            self.me = self
            self.source = Phases()

        def __del__(self):
            self.source.stop()

    owner = Owner()
    owner.source.start(None)
    model(X)
    del owner
    gc.collect()
    assert state_of_torch() == before
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child():
    """Where nobody starts it again nothing is left in torch; in the parent everything continues."""
    before = state_of_torch()
    model, optimizer = model_and()

    def child():
        with torch.no_grad():  # torch's engine is for the parent only
            model(X)
        optimizer.step()
        return [before[0] == state_of_torch()[0], before[1:] == state_of_torch()[1:], len(model._forward_hooks)]

    with recorded() as found:
        model(X)
        assert in_child(child) == "[True, True, 0]"
        optimizer.step()
    assert found.lines() == ["FORWARD", "STEP"]


def test_a_phase_that_began_before_the_recording():
    """It ends without effect; the ones inside of it are recorded."""
    model, optimizer = model_and()
    recordings = []

    class Starts(nn.Module):
        def forward(self, x):
            recordings.append(recorded())
            recordings.append(recordings[0].__enter__())
            optimizer.zero_grad()
            return x

    starts = nn.Sequential(Starts())
    starts(X)
    model(X)
    recordings[0].__exit__(None, None, None)
    assert recordings[1].lines() == ["ZEROING", "FORWARD"]


def test_a_phase_that_ends_after_the_recording():
    """It ends with the recording, unfinished; the next recording begins with nothing open."""
    model, optimizer = model_and()
    manager = recorded()
    first = manager.__enter__()

    class Stops(nn.Module):
        def forward(self, x):
            if len(stopped) == 1:
                manager.__exit__(None, None, None)
            stopped.append(x)
            return x

    stopped = []
    stops = nn.Sequential(Stops())
    stops(X)
    stops(X)
    assert first.lines() == ["FORWARD", "FORWARD ..."]
    with recorded() as second:
        model(X)
        optimizer.step()
    assert second.lines() == ["FORWARD", "STEP"]
