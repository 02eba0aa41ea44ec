"""Torch's own profilers before, inside, around, across and after ours."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from observed import info, recorded_names, run, torchs  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's, when its legacy profiler is used


def legacy():
    """The profiler of torch.autograd."""
    return torch.autograd.profiler.profile(use_cpu=True)


WEIGHT = torch.ones(3, requires_grad=True)


def step():
    """Forward and backward."""
    return run(lambda: (WEIGHT * 2).sum().backward())


def names(events):
    return sorted(line[1] for line in info(events))


@pytest.fixture(scope="module")
def expected():
    """What torch's profiler sees alone."""
    step()
    with torchs() as theirs:
        step()
    return names(theirs.events())


@pytest.mark.parametrize("torchs_profiler", [torchs, legacy])
@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("order", ["otOT", "toTO", "toOT", "otTO", "oOtT", "tToO"])
def test_crosswise(expected, torchs_profiler, all_threads, order):
    """Whatever the order of starts (o, t) and stops (O, T), both see each step that lies between, whole and once."""
    ours, theirs = otp.profile(all_threads=all_threads), torchs_profiler()
    running, steps = set(), {"o": 0, "t": 0}
    for move in order:
        if move in "oO":
            (ours.start if move == "o" else ours.stop)()
        else:
            (theirs.__enter__ if move == "t" else lambda: theirs.__exit__(None, None, None))()
        running ^= {move.lower()}
        step()
        for profiler in running:
            steps[profiler] += 1
    found = {"o": names(ours.events()), "t": names(getattr(theirs, "events", lambda: theirs.function_events)())}
    assert found == {profiler: sorted(expected * count) for profiler, count in steps.items()}


def test_with_a_schedule(expected):
    """Torch's profiler on a schedule starts and stops inside ours, and neither loses anything."""
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    traces = []
    with (
        otp.profile() as ours,
        torchs(schedule=schedule, on_trace_ready=lambda p: traces.append(names(p.events()))) as theirs,
    ):
        for _ in range(6):
            step()
            theirs.step()
    assert len(traces) == 2
    # Torch's own label of the step stands around each path of its own: ours, inside, sees both.
    assert [[line[line.index("## step ##") :] for line in trace] for trace in traces] == [expected] * 2
    assert recorded_names(ours).count("MulBackward0") == 6


def test_memory_profiling_beside():
    """profile_memory of torch's profiler runs beside ours."""
    with otp.profile() as ours, torchs(shapes=True, profile_memory=True) as theirs:
        step()
    assert names(ours.events()) == names(theirs.events())
