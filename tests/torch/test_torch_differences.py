"""What follows the torch that is installed: names of types, what averages have, arguments that come and go."""

from __future__ import annotations

import inspect
import itertools
import warnings

import pytest
import torch
from torch.autograd import profiler_util

import otel_torchprof as otp
from otel_torchprof import errors
from otel_torchprof._native import torch_library
from otel_torchprof._native.ffi import ffi, lib
from otel_torchprof._process import torch_differences
from otel_torchprof._process.torch_differences import Differences, differences

OLDEST, WITH_WARNING, WITH_CALLS, NEWEST = torch_differences._SINCE.values()
CPU = torch.profiler.ProfilerActivity.CPU


def test_types_have_torchs_names():
    """Every type that torch has is called what torch calls it, those that its version alone has too."""
    native = torch_library.load().functions
    names = []
    for number in itertools.count():
        theirs = native.lib.otp_torch_dtype_name(number)
        if not theirs:
            break
        ours = ffi.string(lib.otp_input_type_name(lib.OTP_INPUT_TENSOR | (number + 1) << 8))
        assert (number, ours) == (number, native.ffi.string(theirs))
        names.append(ours)
    assert len(set(names)) == len(names) >= 44


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.6.0+cu124", OLDEST),
        ("2.9.1", OLDEST),
        ("2.10.0", WITH_WARNING),
        ("2.12.0", WITH_CALLS),
        ("2.13.0a0+gitabc", WITH_CALLS),
        ("2.14.0.dev20270101", NEWEST),
        ("3.0", NEWEST),
        ("2.4", OLDEST),
        ("parrot", NEWEST),
    ],
)
def test_versions(version, expected):
    """A version has the ways of the last that changed them; what is no version is taken for the newest."""
    assert torch_differences._of(version) == expected


def _cycles(module):
    """How often two cycles of a schedule say that the second forgets the events of the first."""
    schedule = module.schedule(wait=0, warmup=1, active=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with module.profile(activities=[CPU], schedule=schedule) as prof:
            for _ in range(4):
                prof.step()
    return sum("clears events" in str(warning.message) for warning in said)


def test_the_table_is_torchs(monkeypatch):
    """What the table says of this torch is what its lists, signatures and warnings say."""
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    averages = inspect.signature(profiler_util.EventList.key_averages).parameters.get("include_python_functions")
    with torch.profiler.profile(activities=[CPU], with_stack=True) as prof:
        _called()
    has_calls = any("_called" in event.name for event in prof.events())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.autograd.profiler.profile(with_modules=True)
    wrong = None
    try:
        torch.profiler.profile(activities=["CPU"])
    except (AssertionError, TypeError) as error:  # up to 2.9 nothing is said
        wrong = error
    assert differences() == Differences(
        averages_have_python_functions=has_calls and (averages is None or averages.default),
        takes_use_cuda="use_cuda" in inspect.signature(torch.profiler.profile.__init__).parameters,
        warns_of_modules=any("with_modules" in str(warning.message) for warning in said),
        names_wrong_activities=isinstance(wrong, TypeError),
        warns_of_cycles=_cycles(torch.profiler) == 1,
    )


@pytest.fixture(params=[OLDEST, WITH_WARNING, WITH_CALLS, NEWEST], ids=["2.6", "2.10", "2.12", "2.14"])
def version(request, monkeypatch):
    """The ways of a version, whichever is installed."""
    monkeypatch.setattr(torch_differences, "_of", lambda _: request.param)
    return request.param


def _called():
    torch.ones(2).neg()


def test_python_functions_in_averages(version):
    """Calls are among the averages where the version has them, or as one says; events of a list made by hand likewise."""
    with otp.profile(with_stack=True) as prof:
        _called()
    by_hand = otp.EventList(list(prof.events()))
    expected = {None: version.averages_have_python_functions, True: True, False: False}
    for asked, has_calls in expected.items():
        arguments = {} if asked is None else {"include_python_functions": asked}
        for averages in (prof.key_averages(**arguments), by_hand.key_averages(**arguments)):
            names = [average.key for average in averages]
            assert any("_called" in name for name in names) == has_calls
            assert "aten::neg" in names


@pytest.mark.parametrize("arguments", [{"use_cuda": True}, {"use_cuda": False, "activities": [CPU]}], ids=str)
def test_use_cuda(version, arguments):
    """Where torch has the argument no longer, neither have we, and the error says what to write instead."""
    if version.takes_use_cuda:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            otp.profile(**arguments)
    else:
        with pytest.raises(TypeError, match=r"'use_cuda'.*say activities="):
            otp.profile(**arguments)


def test_with_modules(version):
    """with_modules is said to be deprecated where torch says so, at the line of the caller."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        otp.profile(with_modules=True)
    assert [warning.filename for warning in said if "with_modules" in str(warning.message)] == (
        [__file__] if version.warns_of_modules else []
    )


def test_cycles(version):
    """That a cycle forgets the one before it is said where torch says so."""
    errors.forget_warnings()
    assert _cycles(otp) == version.warns_of_cycles
