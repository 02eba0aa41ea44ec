"""Torch's flag that says whether a profiler runs."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from otel_torchprof._process.profiler_flag import _ProfilerFlag


def module():
    """What torch.autograd.profiler has of it."""
    made = types.ModuleType("torch.autograd.profiler")
    made._is_profiler_enabled = False

    def set_flag(enable):
        made._is_profiler_enabled = enable

    made._set_is_profiler_enabled = made.original = set_flag
    return made


@pytest.fixture
def autograd(monkeypatch):
    """torch.autograd, as if it were imported."""
    made = types.ModuleType("torch.autograd")
    made._profiler_enabled = made.original = bool
    monkeypatch.setitem(sys.modules, "torch.autograd", made)
    return made


@pytest.fixture
def torchs(monkeypatch, autograd):
    """Torch's module, as if it were imported."""
    made = module()
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", made)
    return made


def test_up_and_down(torchs):
    """The flag is true from the first that runs to the last, and torch's function is its own again afterwards."""
    flag = _ProfilerFlag()
    flag.up("one")
    flag.up("another")
    flag.up("another")
    flag.down("one")
    flag.down("one")
    assert torchs._is_profiler_enabled
    flag.down("another")
    assert not torchs._is_profiler_enabled
    assert torchs._set_is_profiler_enabled is torchs.original


@pytest.mark.parametrize("enable", [False, True])
def test_a_profiler_of_torchs_that_stops_as_the_last_of_ours_does(torchs, enable):
    """It has looked the function up already, and calls it when torch's own is back: that does what torch's does, as does the next one."""
    flag = _ProfilerFlag()
    flag.up("one")
    looked_up = torchs._set_is_profiler_enabled
    flag.down("one")
    looked_up(enable)
    assert torchs._is_profiler_enabled is enable
    flag.up("one")
    assert torchs._is_profiler_enabled
    flag.down("one")
    assert torchs._is_profiler_enabled is enable
    assert torchs._set_is_profiler_enabled is torchs.original


@pytest.mark.parametrize(
    ("moves", "displayed"),
    [("+oO-", "1110"), ("o+O-", "1110"), ("+o-O", "1110"), ("o+-O", "1110"), ("o+O+--", "111110")],
)
def test_beside_torchs(torchs, moves, displayed):
    """Whatever the order in which ours (+ -) and torch's (o O) start and stop, the flag is true while one of them runs."""
    flag, seen, running = _ProfilerFlag(), "", []
    for number, move in enumerate(moves):
        if move == "+":
            running.append(number)
            flag.up(number)
        elif move == "-":
            flag.down(running.pop())
        else:
            torchs._set_is_profiler_enabled(move == "o")
        seen += "01"[torchs._is_profiler_enabled]
    assert seen == displayed
    assert torchs._set_is_profiler_enabled is torchs.original


def test_somebody_elses_function(torchs):
    """A function that somebody put around ours stays, and goes on to work, also with the next profile."""
    flag = _ProfilerFlag()
    flag.up("one")
    inner = torchs._set_is_profiler_enabled
    torchs._set_is_profiler_enabled = lambda enable: inner(enable)  # noqa: PLW0108 - another function
    flag.down("one")
    torchs._set_is_profiler_enabled(True)
    assert torchs._is_profiler_enabled
    flag.up("one")
    torchs._set_is_profiler_enabled(False)
    assert torchs._is_profiler_enabled
    flag.down("one")
    assert not torchs._is_profiler_enabled


def test_forgotten(torchs):
    """A forked child forgets who ran; the flag is torch's again."""
    flag = _ProfilerFlag()
    flag.up("one")
    flag.forget()
    assert not torchs._is_profiler_enabled
    flag.up("one")
    assert torchs._is_profiler_enabled
    flag.down("one")
    assert not torchs._is_profiler_enabled


def test_from_many_threads(torchs):
    """Profiles that start and stop on many threads at once leave the flag as it was."""
    flag = _ProfilerFlag()

    def work(number):
        flag.up(number)
        displayed = torchs._is_profiler_enabled
        flag.down(number)
        return displayed

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert not torchs._is_profiler_enabled
    assert torchs._set_is_profiler_enabled is torchs.original


def test_the_question(torchs, autograd):
    """torch.autograd._profiler_enabled() says yes while ours runs, is torch's own afterwards, and stays somebody else's."""
    flag = _ProfilerFlag()
    flag.up("one")
    assert autograd._profiler_enabled()
    flag.down("one")
    assert autograd._profiler_enabled is autograd.original
    flag.up("one")
    autograd._profiler_enabled = theirs = lambda: False
    flag.down("one")
    assert autograd._profiler_enabled is theirs
