"""Memory that grows from step to step: what ``explain`` says of it, and of memory that only fills, or comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from explained_files import STEP_MS, Trace

import otel_torchprof as otp
from otel_torchprof._answers.memory_growth import growth

MIB = 2**20
STEPS = 200
START = 300 * MIB


def numbers(count=STEPS):
    return np.arange(count, dtype=np.float64)


def grown(size, count=STEPS):
    return growth(numbers(count), np.asarray(size, np.float64))


def test_the_slope_and_its_interval_are_those_of_the_leak():
    """Of memory that grows by 1 MiB a step, beside what comes and goes, the interval has that slope in it."""
    noise = np.random.default_rng(0).uniform(0, 40 * MIB, STEPS)
    found = grown(START + MIB * numbers() + noise)
    assert found.low <= MIB <= found.high
    assert found.slope == pytest.approx(MIB, rel=0.1)
    assert found.high - found.low < 0.3 * MIB
    assert found.steps == STEPS - 40  # without the first fifth


def test_growth_that_comes_in_jumps():
    """A leak of each tenth step is as large as one of a tenth in each."""
    assert grown(START + 10 * MIB * (numbers() // 10)).slope == pytest.approx(MIB, rel=0.1)


@pytest.mark.parametrize(
    "size",
    [
        np.full(STEPS, START),
        START + MIB * np.minimum(numbers(), 90),
        START + MIB * (numbers() % 10),
        START + 10 * MIB * np.log1p(numbers()),
        START + 50 * MIB * (numbers() > 120),
        START + 2_000.0 * numbers(),
        START - MIB * numbers(),
        START + np.random.default_rng(1).uniform(0, 20 * MIB, STEPS),
    ],
    ids=["constant", "plateau", "sawtooth", "ever more slowly", "one jump", "a little", "shrinks", "comes and goes"],
)
def test_what_is_no_growth(size):
    """Memory that is filled once, that is freed again, or that changes by little, is not reported."""
    assert grown(size) is None


def test_few_steps_say_nothing():
    """Less than 39 steps after the first ones are none."""
    assert grown(START + MIB * numbers(43), 43) is None
    assert grown(START + MIB * numbers(50), 50) is not None


def leaking(*, free=None, key="torch__step__memory__resident", every=1):
    trace = Trace()
    for number in range(100):
        more = {key: START + MIB * number} if number % every == 0 else {}
        if free is not None and number == 90:
            more[free[0]] = free[1]
        trace.step(data=0.5, **more)
    return trace


@pytest.mark.parametrize("kind", ["chrome", "lines"])
def test_a_file_says_how_much_and_until_when(tmp_path, kind):
    """The verdict has the slope, the steps, and when what was free is full; it comes after what costs time."""
    trace = leaking(free=("torch__step__memory__free", 109 * MIB))
    explanation = otp.explain(str(getattr(trace, kind)(tmp_path / "trace.json")))
    first, found = explanation.faults
    assert (first.verdict, found.verdict, found.severity) == ("input-bound", "memory-growth", "high")
    assert found.statement == (
        f"1 MiB more a step (1 MiB to 1 MiB) over 80 steps; the 100 MiB that are free are full in 100 steps, {STEP_MS / 10:.2f}s"
    )
    assert found.evidence[0].startswith("the process has 399 MiB at the end, 300 MiB at the beginning")
    assert found.recoverable_seconds == 0


def test_a_leak_is_beside_no_fault(tmp_path):
    """Where nothing costs time, the headline is the leak, and the model still is what computes."""
    trace = Trace()
    for number in range(100):
        trace.step(torch__step__memory__resident=START + MIB * number)
    explanation = otp.explain(str(trace.chrome(tmp_path / "trace.json")))
    assert explanation.headline.startswith("memory-growth: 1 MiB more a step")
    assert [finding.verdict for finding in explanation.findings] == ["memory-growth", "compute-bound"]


def test_a_device_that_was_read_now_and_then(tmp_path):
    """Memory of a device is known of the last step of each drain only; its free memory is that of the device."""
    trace = leaking(key="torch__step__device__memory__allocated", every=2)
    explanation = otp.explain(str(trace.chrome(tmp_path / "trace.json")))
    found = explanation.faults[-1]
    assert (found.verdict, found.severity) == ("memory-growth", "medium")
    assert found.evidence[0].startswith("the device has")


@pytest.mark.parametrize(("grows", "is_reported"), [(MIB // 4, False), (MIB, True)])
def test_a_recording_of_operators_takes_memory_itself(tmp_path, grows, is_reported):
    """Where operators are recorded, less than the buffers of the recording may take is no growth of the program; more of it is."""
    trace = Trace()
    for number in range(100):
        for at in range(10):
            trace.span("aten::mm", trace.now + at, 0.5)
        trace.step(torch__step__memory__resident=START + grows * number)
    explanation = otp.explain(str(trace.chrome(tmp_path / "trace.json")))
    assert ("memory-growth" in {finding.verdict for finding in explanation.faults}) is is_reported
