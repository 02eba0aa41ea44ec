"""What ``explain`` says of steps that wait: devices for the host, the host for devices, and a model for other ranks."""

from __future__ import annotations

import pytest
from explained_files import STEP_MS, Trace

import otel_torchprof as otp


@pytest.fixture
def explained(tmp_path):
    """Writes a trace and explains it."""
    return lambda trace: otp.explain(trace.chrome(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    ("drained", "more", "expected"),
    [
        (0.0, {}, ["device-bound"]),
        (0.9, {}, ["host-bound"]),
        (0.6, {}, ["host-bound"]),
        (0.5, {"data": 0.5}, ["input-bound"]),
    ],
    ids=["behind", "waiting", "in part", "waiting while the loop waits"],
)
def test_who_waits_for_whom(explained, drained, more, expected):
    """A device that has nothing to do waits for the host, unless the loop itself waits; where it is behind it is what steps take."""
    drained_seconds = {"torch__device__drained_duration": drained * STEP_MS / 1e3}
    found = explained(Trace().steps(60, **drained_seconds, **more))
    assert [each.verdict for each in found.findings] == expected


@pytest.mark.parametrize(("count", "expected"), [(25, ["host-bound"]), (10, ["compute-bound"])])
def test_a_device_that_was_timed_from_some_step_on(explained, count, expected):
    """Steps in which no device was timed say nothing of it; where too few say something, the host is judged alone."""
    trace = Trace().steps(60).steps(count, torch__device__drained_duration=0.9 * STEP_MS / 1e3)
    assert [each.verdict for each in explained(trace).findings] == expected


def test_a_model_that_waits_more_than_it_computes(explained):
    """Where the loop's thread is blocked in forward and backward, the verdict on what computes says so: other ranks may be waited for."""
    found = explained(Trace().steps(60, torch__step__blocked_duration=0.8 * STEP_MS / 1e3))
    [finding] = found.findings
    assert finding.verdict == "compute-bound"
    assert "the loop's thread was blocked for 80% of the time, 80% in no phase that waits" in finding.evidence
