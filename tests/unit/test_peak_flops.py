"""The peak of a device, and the share of it that steps reach."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import otel_torchprof as otp
from otel_torchprof._columns.phases import FLOPS, MFU
from otel_torchprof._instrument.step_log import StepLog
from otel_torchprof._model.peak_flops import known_peak, peak_flops
from otel_torchprof._model.step_spans import RecordedStep


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("Tesla T4", None),
    ],
)
def test_known_devices(name, peak):
    """A device is known by the words of its name; a part of one, and one that only begins alike, are not."""
    assert known_peak(name) == peak


def test_a_given_peak_wins_over_the_device(monkeypatch):
    """The variable wins over the table; without both, and before a program uses its device, the peak is not known."""
    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_name=lambda _index: "NVIDIA L4")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert peak_flops() == 121e12
    monkeypatch.setenv("OTEL_TORCHPROF_DEVICE", "cuda,peak_flops=5e12")
    assert peak_flops() == 5e12
    monkeypatch.delenv("OTEL_TORCHPROF_DEVICE")
    cuda.is_initialized = lambda: False
    assert peak_flops() is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peak_flops() is None


@pytest.mark.parametrize("peak", [None, "4e9"])
def test_steps_say_their_share_of_the_peak(monkeypatch, peak):
    """Spans of steps with operations have MFU if the peak is given: operations by duration and peak; else none has it."""
    if peak:
        monkeypatch.setenv("OTEL_TORCHPROF_DEVICE", f"peak_flops={peak}")
    x = torch.ones(64, 64)
    with otp.profile(record_shapes=True) as prof:
        for _ in range(3):
            x @ x
            prof.step()
    spans = [span for span in prof.spans() if FLOPS in span.attributes]
    assert [span.attributes[FLOPS] for span in spans] == [2 * 64**3] * 3
    for span in spans:
        expected = 2 * 64**3 / ((span.end_time - span.start_time) / 1e9) / 4e9
        assert span.attributes.get(MFU) == (pytest.approx(expected) if peak else None)


def test_rates_of_the_latest_steps():
    """Rates are those of the steps that have the amounts, and MFU is their mean by duration."""
    log = StepLog()
    assert log.status()["rates"] == {}
    log.add_step(RecordedStep(0, 0, 10**9))
    log.add_step(RecordedStep(1, 10**9, 2 * 10**9, attributes={"torch.step.tokens": 100, FLOPS: 10, MFU: 0.5}))
    log.add_step(RecordedStep(2, 2 * 10**9, 5 * 10**9, attributes={"torch.step.tokens": 100, "torch.step.samples": 3}))
    assert log.status()["rates"] == {"tokens": 50.0, "samples": 1.0, "flops": 10.0, "mfu": 0.5}
