"""The same step under both profilers: names, counts, trees, numbers and shapes are equal."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import models  # noqa: E402 - needs torch
from observed import counts, info, run, torchs  # noqa: E402

import otel_torchprof as otp  # noqa: E402


@pytest.fixture(params=models.ALL, ids=lambda factory: factory.__name__)
def step(request):
    """One step, run before so that what happens only once has happened."""
    torch.manual_seed(0)
    body = request.param()
    for _ in range(2):
        body()
    gc.collect()
    return body


@pytest.mark.filterwarnings("ignore")  # torch's own, of features that are deprecated or in beta
def test_ours_inside_torchs(step):
    """Ours, inside torch's profiler: both see one and the same tree."""
    with torchs() as theirs, otp.profile() as ours:
        run(step)
    assert info(ours.events()) == info(theirs.events())
    assert len(info(ours.events())) > 3


@pytest.mark.filterwarnings("ignore")
def test_torchs_inside_ours(step):
    """Torch's profiler inside ours: both see one and the same tree, with the same shapes and counts."""
    with otp.profile(record_shapes=True) as ours, torchs(shapes=True) as theirs:
        run(step)
    assert info(ours.events(), shapes=True) == info(theirs.events(), shapes=True)
    grouped = counts(ours.key_averages(group_by_input_shape=True), shapes=True)
    assert grouped == counts(theirs.key_averages(group_by_input_shape=True), shapes=True)


@pytest.mark.filterwarnings("ignore")
def test_one_after_the_other(step):
    """Each alone: the same operators under the same parents, as often."""
    with torchs() as theirs:
        run(step)
    with otp.profile() as ours:
        run(step)
    assert [line[1] for line in info(ours.events())] == [line[1] for line in info(theirs.events())]
    assert counts(ours.key_averages()) == counts(theirs.key_averages())
