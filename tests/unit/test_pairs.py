"""Pairs of runs by turns: what is said of made-up runs of one program, and of runs of two, on a machine whose speed varies."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torchprof._answers.difference import ComparedRecording
from otel_torchprof._answers.pairs import NameTimes, RunTimes, judged_pairs

STEP = 0.010
SHARES = {"aten::mm": 0.4, "aten::cosh": 0.1} | {f"aten::op{n}": 0.04 for n in range(12)}
"""Names, and the part of a step that each takes."""
COMPARISONS = 200


def run(random, speed, *, shares=SHARES, factors=None, noise=0.02, runnable=0.0):
    """A run of a program: the machine's speed slows down each name to a degree of its own, and each differs by chance."""
    times = {}
    for place, (name, share) in enumerate(shares.items()):
        log = speed * (0.6 + 0.1 * (place % 8)) + noise * random.standard_t(5)
        times[name] = share * STEP * np.exp(log) * (factors or {}).get(name, 1.0)
    step = sum(times.values()) * np.exp(0.5 * noise * random.standard_t(5))
    names = {name: NameTimes(seconds, 1.0, ("forward", name)) for name, seconds in times.items()}
    return RunTimes(ComparedRecording("program", 100, step, 0.0, runnable), step, names)


def compared(seed, *, rounds=10, changing=0.1, machine=0.0, **of_second):
    """Rounds of two programs; the machine's speed at the second one differs by chance, and by ``machine``."""
    random = np.random.default_rng(seed)
    pairs, speeds = [], []
    for _ in range(rounds):
        first, second = changing * random.standard_normal(2) + (0.0, machine)
        pairs.append((run(random, first), run(random, second, **of_second)))
        speeds.append(second - first + 0.03 * random.standard_normal())
    return judged_pairs(pairs, np.array(speeds))


def says_something(found):
    return bool(found.changes) or found.rounds.beyond != 1


@pytest.mark.parametrize(("rounds", "changing"), [(6, 0.1), (10, 0.3), (14, 0.02)])
def test_false_alarms(rounds, changing):
    """Something is said of a program and itself in at most 5 % of comparisons, up to what chance makes of 200 of them, at any noise."""
    said = sum(says_something(compared(seed, rounds=rounds, changing=changing)) for seed in range(COMPARISONS))
    assert said <= 19  # 99.7 % of Bin(200, 0.05)


def test_power():
    """An operator that is 10 % of a step and takes 10 % more is found in 95 % of ten pairs that differ by 4 %, and nothing else in 95 %."""
    found = [compared(seed, changing=0.02, factors={"aten::cosh": 1.1}) for seed in range(COMPARISONS)]
    right = [[change.name for change in each.changes].count("aten::cosh") for each in found]
    others = [any(change.name != "aten::cosh" for change in each.changes) for each in found]
    assert sum(right) >= 0.95 * COMPARISONS
    assert sum(others) <= 19
    assert sum(each.is_slower_by(0.0) for each in found) >= 0.95 * COMPARISONS


def test_the_interval():
    """The interval of a change has its true size in about 95 % of comparisons, and its share is that of the step."""
    changes = [compared(seed, changing=0.02, factors={"aten::cosh": 1.3}).changes[0] for seed in range(COMPARISONS)]
    assert {change.name for change in changes} == {"aten::cosh"}
    assert sum(change.low <= 1.3 <= change.high for change in changes) >= 0.9 * COMPARISONS
    assert np.median([change.share for change in changes]) == pytest.approx(0.03, rel=0.15)
    assert changes[0].path == ("forward", "aten::cosh")


def test_a_slower_machine():
    """What the fixed calculation shows too is the machine's: it is said, and is no reason to fail."""
    found = compared(0, changing=0.01, machine=0.08)
    assert not says_something(found)
    assert found.headline.startswith("steps were ")
    assert "slower, and the machine itself " in found.headline
    assert found.rounds.machine == pytest.approx(1.08, abs=0.03)
    assert found.can_judge(0.0)
    assert not found.is_slower_by(0.0)


def test_everything_is_slower():
    """What slows all names alike, and not the machine, is said with both numbers, and counts."""
    found = compared(0, changing=0.01, factors=dict.fromkeys(SHARES, 1.08))
    assert found.headline.startswith(("everything 8.", "everything 7."))
    assert "slower; the machine itself was " in found.headline
    assert found.slowdown == pytest.approx(0.08, abs=0.02)
    assert found.is_slower_by(0.05)
    assert not found.is_slower_by(0.12)


def test_new_and_vanished():
    """Names that all runs of one program have, and none of the other."""
    shares = {name: share for name, share in SHARES.items() if name != "aten::op3"} | {"aten::sort": 0.05}
    found = {change.name: change for change in compared(0, shares=shares).changes}
    assert (found["aten::sort"].moved, found["aten::op3"].moved) == ("new", "vanished")
    assert found["aten::sort"].share == pytest.approx(0.05, rel=0.3)


def test_few_names():
    """Of fewer names than have a median worth its name, the machine's speed is taken for what they share."""
    random, pairs, speeds = np.random.default_rng(0), [], []
    few = {"torch.phase.forward": 0.5, "torch.phase.backward": 0.4}
    for _ in range(10):
        first, second = 0.1 * random.standard_normal(2)
        slower = {"torch.phase.backward": 1.2}
        pairs.append((run(random, first, shares=few), run(random, second, shares=few, factors=slower)))
        speeds.append(second - first)
    found = judged_pairs(pairs, np.array(speeds))
    assert [change.name for change in found.changes] == ["torch.phase.backward"]


def test_runs_that_differ_too_much():
    """Where a change of a quarter could hide, "no difference" is not said."""
    found = compared(1, rounds=6, noise=1.5)
    assert found.changes == ()
    assert found.headline.startswith("cannot be judged: runs of one command differ by so much")
    assert not found.can_judge(0.0)


def test_a_busy_machine():
    """How much of the time the loop waited for a processor is said with what is judged."""
    [caveat] = compared(0, runnable=0.4).caveats
    assert "ready to run for 40% of the time" in caveat
    assert compared(0).caveats == ()


def test_the_text():
    """The number of pairs, the machine's speed and what would have been found are in the text, and in JSON."""
    found = compared(0, factors={"aten::cosh": 1.4})
    assert found.headline.startswith("aten::cosh: +")
    assert "10 pairs of runs; a typical operator that is " in str(found)
    assert "the machine itself " in found._repr_markdown_()
    assert found.as_json()["rounds"]["pairs"] == 10
