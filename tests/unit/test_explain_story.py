"""What ``explain`` makes of findings that follow from one another: one of them, with the others as its evidence; who waits for whom; and advice that fits."""

from __future__ import annotations

import json

import pytest
from explained_files import STEP_MS, Trace

import otel_torchprof as otp

SECONDS = STEP_MS / 1e3
LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"


@pytest.fixture
def explained(tmp_path):
    """Writes traces, one a rank, and explains them together."""

    def explain(*traces):
        return otp.explain(*(trace.chrome(tmp_path / f"{place}.json") for place, trace in enumerate(traces)))

    return explain


def averages(*entries):
    """The attribute of a step without details: names of operators, shares of the step, and whether it waited for data."""
    return json.dumps(
        [
            {"name": name, "count": 2, "self": share * SECONDS} | ({"phase": "data"} if in_data else {})
            for name, share, in_data in entries
        ]
    )


def ranks(late, of_late, of_others, operators=(), ready=0.0):
    """Traces of three ranks, of which rank 2 comes so many ms late to the collective that ends each step."""
    for rank in range(3):
        trace, is_late = Trace(rank), rank == 2
        came = (2 + late if is_late else 2) * 1000
        for number in range(60):
            more = {"torch__collectives": json.dumps([["0", number, came, 9500 + number % 3 * 10]])}
            if operators and is_late:
                more["torch__averages"] = averages(*operators)
            if ready:
                more["torch__step__runnable_duration"] = (ready if is_late else 0.01) * SECONDS
                more["torch__step__blocked_duration"] = 0.0 if is_late else 0.7 * SECONDS
            trace.step(**(of_late if is_late else of_others), **more)
        yield trace


def test_waits_for_a_late_rank_are_its_own(explained):
    """Ranks that wait in a collective, or in the backward pass, have no verdict beside the straggler's; its cause is the headline."""
    [found] = explained(*ranks(6.0, {"data": 0.7}, {"data": 0.1, "collective": 0.7})).findings
    assert found.sentence == "straggler: rank 2 is late: 70% of its step waits for data"
    assert found.next_action.startswith("make batches ahead of time")
    assert "waits of other ranks follow from it: up to 70% of step time on rank 0, rank 1" in found.evidence
    [found] = explained(*ranks(6.0, {"data": 0.7, "backward": 0.2}, {"data": 0.1, "backward": 0.8})).findings
    assert (found.verdict, found.ranks) == ("straggler", ("rank 2",))


@pytest.mark.parametrize(
    ("of_late", "of_others", "operators", "said"),
    [
        ({"rest": 0.65}, {"backward": 0.9}, (), "65% of its step is in no phase"),
        ({"forward": 0.9}, {"backward": 0.9}, (), "90% of its step is forward"),
        (
            {"forward": 0.9},
            {"backward": 0.9},
            [("aten::sort", 0.6, False)],
            "60% of its step is the operator aten::sort",
        ),
        (
            {"data": 0.7},
            {},
            [(LOADER.format("SingleProcess"), 0.7, True)],
            "70% of its step waits for data (num_workers=0)",
        ),
        ({"gc": 0.7}, {}, (), "70% of its step is Python's garbage collector"),
    ],
)
def test_what_makes_a_rank_late(explained, of_late, of_others, operators, said):
    """The phase that is longer than on other ranks, or the operator that is most of it."""
    [found] = explained(*ranks(6.0, of_late, of_others, operators)).findings
    assert found.sentence == f"straggler: rank 2 is late: {said}"


def test_a_rank_without_a_processor(explained):
    """It is late by the time ready to run where that is all; where the rest would make it late too, it is a part."""
    of_others = {"backward": 0.9}
    [found] = explained(*ranks(6.0, {"forward": 0.7}, of_others, ready=0.6)).findings
    assert (
        found.sentence == "straggler: rank 2 is late: 60% of its step has no processor: others on its machine have them"
    )
    [found] = explained(*ranks(6.0, {"forward": 0.7}, of_others, ready=0.3)).findings
    assert (
        found.sentence
        == "straggler: rank 2 is late: 70% of its step is forward, of which 29 points are the busy machine"
    )
    assert any(text.startswith("besides, machine-busy: 30%") for text in found.evidence)


def test_devices_and_hosts_that_wait_for_each_other(explained):
    """A host that waits for a device has nothing launched afterwards; and waits for one that always works are no fault."""
    for device_wait, drained, said in ((0.4, 0.3, "device-wait-bound"), (0.1, 0.85, "host-bound")):
        more = {"device_wait": device_wait, "torch__device__drained_duration": drained * SECONDS}
        [fault] = explained(Trace().steps(60, **more)).faults
        assert fault.verdict == said
        assert any(text.startswith("host-bound: 30%") for text in fault.evidence) is (said != "host-bound")
    found = explained(Trace().steps(60, device_wait=0.7, torch__device__drained_duration=0.0))
    assert [each.verdict for each in found.findings] == ["device-bound"]


def test_memory_that_is_first_touched(explained):
    """An operator that fills memory taken anew is the churn's evidence; another operator is a verdict of its own."""
    for name, said in (("aten::fill_", ["allocation-churn"]), ("aten::sort", ["operator-bound", "allocation-churn"])):
        more = {"torch__step__page_faults__minor": 5000, "torch__averages": averages((name, 0.4, False))}
        assert [each.verdict for each in explained(Trace().steps(60, **more)).faults] == said


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        (
            [(LOADER.format("SingleProcess"), 0.5, True)],
            "let processes of the DataLoader make batches (num_workers=2 or more)",
        ),
        ([(LOADER.format("MultiProcessing"), 0.5, True)], "raise num_workers of the DataLoader"),
        ([], "make batches ahead of time"),
    ],
)
def test_advice_for_loaders(explained, operators, said):
    """Workers are advised where a loader is known, and more of them where it has some."""
    [found] = explained(Trace().steps(60, data=0.5, torch__averages=averages(*operators))).faults
    assert found.next_action.startswith(said)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("aten::mul_", "aten::addcdiv_", "aten::sqrt"), True),
        (("aten::_fused_adam_",), False),
        (("aten::_foreach_add_", "aten::_foreach_mul_", "aten::_foreach_sqrt"), False),
        (("aten::sort",), False),
    ],
)
def test_advice_for_optimizers(explained, names, said):
    """``fused=True`` is advised where it updates parameters one after another."""
    operators = averages(*((name, 0.3 / len(names), False) for name in names))
    found = explained(Trace().steps(60, optimizer=0.4, torch__averages=operators))
    [found] = [each for each in found.faults if each.verdict == "optimizer-bound"]
    assert ("fused=True" in found.next_action) is said


def test_advice_for_a_model_that_waits(explained):
    """Nobody who waits is told to halve the batch."""
    for blocked, statement in (
        (0.8, "is in the model, where the loop's thread mostly waits"),
        (0.2, "the model computes"),
    ):
        [found] = explained(Trace().steps(60, torch__step__blocked_duration=blocked * SECONDS)).findings
        assert found.statement == f"100% of step time {statement}"
        assert ("halve the batch" in found.check) is (blocked < 0.5)


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
