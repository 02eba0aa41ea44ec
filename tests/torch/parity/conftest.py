"""The programs that every comparison with torch's profiler runs."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import models  # noqa: E402 - needs torch


@pytest.fixture(params=models.ALL, ids=lambda factory: factory.__name__)
def program(request):
    """A function that makes the steps of a program."""
    return request.param


@pytest.fixture
def step(program):
    """One step of a program, run before so that what happens only once has happened."""
    torch.manual_seed(0)
    # Lists of hundreds of tensors are compared in test_oddities.py; here each one of them is compared with every option.
    body = program(60) if program is models.many_parameters else program()
    for _ in range(2):
        body()
    # What a collection runs and frees belongs to whichever of two runs it comes in.
    gc.collect()
    gc.disable()
    yield body
    gc.enable()
