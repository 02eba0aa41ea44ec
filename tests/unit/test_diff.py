"""``diff``: what is said to have become slower, and what is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from checked_json import checked
from explained_files import Trace, kineto, piece

import otel_torchprof as otp
from otel_torchprof._answers.findings import DIFF_RULES
from otel_torchprof._cli import main as cli
from otel_torchprof._encode.table import brief_time

STEPS = 65
NAMES = {"aten::mm": 3.0, "aten::add": 1.0, "aten::relu": 0.5, "aten::sum": 1.5, "aten::norm": 0.8, "aten::copy_": 0.4}
"""Operators of a step, and how many ms each takes."""


def recording(path, seed, *, steps=STEPS, noise=0.02, speed=1.0, **times):
    """Steps of these operators one after the other, all slower or faster together; two underscores in a name are colons."""
    random, now, events = np.random.default_rng(seed), 0.0, []
    wanted = NAMES | {name.replace("__", "::"): ms for name, ms in times.items()}
    for number in range(steps):
        begin, now = now, now + 0.1
        for name, ms in wanted.items():
            duration = ms * speed * (1 + noise * abs(random.standard_normal()))
            events += [piece(name, now, duration)] if ms else []
            now += duration
        events += [
            piece("forward", begin + 0.05, now - begin - 0.05),
            piece(f"ProfilerStep#{number}", begin, now - begin),
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture
def compared(tmp_path):
    """Two recordings of the same program, the second with what is given."""

    def compare(seed=0, *, noise=0.02, **times):
        paths = recording(tmp_path / "a.json", 2 * seed, noise=noise), tmp_path / "b.json"
        return otp.diff(paths[0], recording(paths[1], 2 * seed + 1, noise=noise, **times))

    return compare


def names(found):
    return [each.name for each in found.changes]


def test_recordings_of_one_program(compared):
    """Nothing is said of 40 pairs that differ by chance only."""
    assert [names(compared(seed)) for seed in range(40)] == [[]] * 40
    assert compared().headline.startswith("no difference that is more than chance")


@pytest.mark.parametrize(("ms", "found"), [(3.3, ["aten::mm"]), (3.0, []), (3.03, [])])
def test_one_operator(compared, ms, found):
    """An operator that is 10 % slower is found by its path, with its interval; one that is 1 % slower is not."""
    assert names(compared(aten__mm=ms)) == found
    for each in compared(aten__mm=ms).changes:
        assert each.path == ("forward", "aten::mm")
        assert each.low < each.after / each.before < each.high
        assert each.share == pytest.approx(0.3 / sum(NAMES.values()), rel=0.2)
        assert (each.calls_before, each.calls_after) == (1, 1)


def test_faster_is_said_too(compared):
    """An operator that takes less is a change, and no reason to fail."""
    found = compared(aten__sum=1.2)
    assert names(found) == ["aten::sum"]
    assert found.changes[0].share < 0
    assert not found.is_slower_by(0.0)


def test_new_and_vanished(compared):
    """What runs in one of the recordings only."""
    found = compared(aten__new=0.7, aten__add=0.0)
    assert [(each.name, each.is_new, each.is_vanished) for each in found.changes] == [
        ("aten::add", False, True),
        ("aten::new", True, False),
    ]
    assert found.changes[1].sentence == (
        f"aten::new: new, 0.00us -> {brief_time(found.changes[1].after * 1e6)} a step, 0 -> 1 calls, {found.changes[1].share:+.1%} of the step"
    )


@pytest.mark.parametrize("speed", [0.7, 1.25])
def test_a_machine_of_another_speed(compared, speed):
    """What changes all operators alike is no change of one of them, and is said as what it is; one that changes beside is found."""
    found = compared(speed=speed)
    assert found.changes == ()
    assert found.common == pytest.approx(speed, rel=0.02)
    said = "a typical operator is 30." if speed < 1 else "cannot be judged from two files: a typical operator is 2"
    assert found.headline.startswith(said)
    assert names(compared(speed=speed, aten__mm=3.6)) == ["aten::mm"]


def test_against_the_machine(compared):
    """Steps that became faster where all else became slower are judged, whether that is of the machine or not; and the other way round."""
    faster, slower = compared(speed=1.25, aten__mm=0.05), compared(speed=0.7, aten__mm=12.0)
    for found in (faster, replace(faster, changes=())):  # on a busy machine the names may be unsure
        assert found.high < 1 < found.common
        assert found.can_judge(0.0)
        assert not found.is_slower_by(0.0)
    for found in (slower, replace(slower, changes=())):
        assert found.common < 1 < found.low
        assert found.is_slower_by(0.05)


def test_a_path_among_several(tmp_path):
    """Of a name on several paths the one that changed is named; where all did, the name."""

    def traced(path, first, second):
        def inside(begin):
            layers = [piece("0", begin + 0.1, first + 0.1), piece("1", begin + 5, second + 0.1)]
            rest = [piece(f"aten::op{n}", begin + 9 + n / 10, 0.08) for n in range(6)]
            return [*layers, piece("mm", begin + 0.15, first), piece("mm", begin + 5.05, second), *rest]

        return kineto(path, STEPS, inside)

    before = traced(tmp_path / "a.json", 2.0, 2.0)
    one, both = traced(tmp_path / "b.json", 2.0, 2.5), traced(tmp_path / "c.json", 2.5, 2.5)
    assert [each.path for each in otp.diff(before, one).changes if each.name == "mm"] == [("1", "mm")]
    assert [each.path for each in otp.diff(before, both).changes if each.name == "mm"] == [()]


def test_steps_without_details(tmp_path):
    """Where steps carry sums by name, names are compared, also with a recording that has details."""

    def traced(path, mm):
        trace = Trace()
        for number in range(STEPS):
            entries = [{"name": f"aten::op{n}", "count": 1, "self": 0.001 + number % 3 * 1e-5} for n in range(6)]
            text = json.dumps([{"name": "aten::mm", "count": 2, "self": mm}, *entries])
            trace.span("torch.phase.forward", trace.now, 5.0)
            trace.step(torch__averages=text)
        return trace.chrome(path)

    before, after = traced(tmp_path / "a.json", 0.002), traced(tmp_path / "b.json", 0.003)
    [change] = otp.diff(before, after).changes
    assert (change.name, change.path, change.calls_before) == ("aten::mm", (), 2)
    assert change.before == pytest.approx(0.002)
    assert change.share == pytest.approx(0.1)
    times = {f"aten::op{n}": 1.0 for n in range(6)} | {"aten::mm": 2.0}
    whole = kineto(
        tmp_path / "c.json",
        STEPS,
        lambda begin: [piece(name, begin + at, ms) for at, (name, ms) in enumerate(times.items())],
    )
    assert names(otp.diff(whole, after)) == ["aten::mm"]


def test_spans_that_stand_for_several(tmp_path):
    """Aggregate spans count with their time, and are not counted."""

    def traced(path, seconds):
        trace = Trace()
        for _ in range(STEPS):
            sums = {"torch__aggregated__count": 10, "torch__aggregated__duration": seconds}
            trace.span("aten::mm", trace.now + 1, 5.0, **sums)
            for n in range(6):
                trace.span(f"aten::op{n}", trace.now + 7 + n / 10, 0.1)
            trace.step()
        return trace.chrome(path)

    found = otp.diff(traced(tmp_path / "a.json", 0.002), traced(tmp_path / "b.json", 0.003))
    [change] = [each for each in found.changes if each.name == "aten::mm"]
    assert change.after == pytest.approx(0.003)
    assert np.isnan(change.calls_before)
    assert "calls" not in change.sentence


def test_what_stood_for_several_and_vanished(tmp_path):
    """That the number of events is not known does not hide that a name runs no more, nor that it is new."""

    def traced(path, *names):
        trace = Trace()
        for _ in range(STEPS):
            for place, name in enumerate(names):
                trace.span(name, trace.now + place, 0.9, torch__aggregated__count=10)
            trace.step()
        return trace.chrome(path)

    before, after = traced(tmp_path / "a.json", "aten::mm", "aten::add"), traced(tmp_path / "b.json", "aten::mm")
    assert [each.moved for each in otp.diff(before, after).changes if each.name == "aten::add"] == ["vanished"]
    assert [each.moved for each in otp.diff(after, before).changes if each.name == "aten::add"] == ["new"]


def test_the_exit_status(tmp_path, capsys):
    """1 where what changed makes steps slower, by more than ``--fail-over``; 0 where they are not."""
    before, after = recording(tmp_path / "a.json", 0), recording(tmp_path / "b.json", 1, aten__mm=3.9)
    assert cli.main(["diff", str(before), str(after)]) == 1
    assert cli.main(["diff", str(before), str(after), "--fail-over", "20%"]) == 0
    assert cli.main(["diff", str(after), str(before)]) == 0
    capsys.readouterr()
    assert cli.main(["diff", str(before), str(after), "--fail-over", "5%"]) == 1
    assert re.search(r"what is listed adds 12\.\d% to a step, and --fail-over allows 5\.0%", capsys.readouterr().err)
    for bad in ("many", "0.05"):
        with pytest.raises(SystemExit):
            cli.main(["diff", str(before), str(after), "--fail-over", bad])
        assert f"'{bad}' is no percentage, such as 5%" in capsys.readouterr().err
    assert cli.main(["diff", str(before), str(tmp_path / "none.json")]) == 3


def test_what_may_be_the_machine_or_the_program(tmp_path, capsys):
    """Two files whose operators all take 40 % more time are judged only by limits that hold of a slower machine and of a slower program."""
    before, slower = recording(tmp_path / "a.json", 0), recording(tmp_path / "c.json", 2, speed=1.4)
    assert cli.main(["diff", str(before), str(slower)]) == 3
    text = capsys.readouterr().out
    assert re.match(
        r"cannot be judged from two files: a typical operator is \d\d\.\d% slower, by the machine or by", text
    )
    assert "`otel-torchprof diff --interleave 10 -o DIR -- COMMAND -- COMMAND` tells which" in text
    ratio = f"{otp.diff(before, slower).ratio - 1:+.1%}"
    assert [line.startswith((f"a median step {ratio}", "cannot")) for line in text.splitlines() if ratio in line] == [
        True,
        True,
    ]
    assert cli.main(["diff", str(before), str(slower), "--fail-over", "60%"]) == 0
    assert cli.main(["diff", str(slower), str(before)]) == 0
    both = recording(tmp_path / "d.json", 3, speed=1.4, aten__mm=6.0)
    assert cli.main(["diff", str(before), str(both), "--fail-over", "20%"]) == 1


WAITS = {"torch__step__runnable_duration": 0.012}
"""Of a step of 30 ms, the 12 in which other programs had the processors."""


def test_a_busy_machine_that_decides(tmp_path, capsys):
    """Steps that take longer by no more than they waited for a processor are called neither slower nor the same."""
    before = Trace().steps(60, 18.0).chrome(tmp_path / "a.json")
    after = Trace().steps(60, 30.0, **WAITS).chrome(tmp_path / "b.json")
    found = otp.diff(before, after)
    assert found.ratio == pytest.approx(1.0)
    assert found.headline.startswith("cannot be judged: it depends on whether all steps")
    assert not found.is_slower_by(0.01)
    assert found.can_judge(2.0)
    assert cli.main(["diff", str(before), str(after)]) == 3
    assert "not judged: (step): +66.7%" in capsys.readouterr().out
    assert json.loads(json.dumps(found.as_json()))["unsure"][0]["name"] == "(step)"


def test_a_busy_machine_that_decides_nothing(tmp_path, capsys):
    """Steps that take longer than before also without what they waited are called slower, with how busy the machine was."""
    before = Trace().steps(60).chrome(tmp_path / "a.json")
    after = Trace().steps(60, 30.0, **WAITS).chrome(tmp_path / "b.json")
    found = otp.diff(before, after)
    assert found.ratio == pytest.approx(1.8)
    assert [(each.name, round(each.after / each.before, 3)) for each in found.changes] == [("(step)", 1.8)]
    assert cli.main(["diff", str(before), str(after), "--fail-over", "50%"]) == 1
    assert "ready to run for 40% of the time" in capsys.readouterr().out
    assert cli.main(["diff", str(after), str(after)]) == 0


def test_a_sleep_on_a_busy_machine(tmp_path):
    """A sleep that became longer has its own time beside others that had the processors, and a computation the part in which it had one."""

    def recorded(name, sleep, seed):
        random, trace = np.random.default_rng(seed), Trace()
        for _ in range(60):
            wait, own = 4 + 4 * random.random(), [ms * (1 + 0.01 * random.random()) for ms in (sleep, 6.0)]
            trace.span("sleep", trace.now, own[0])
            trace.span("compute", trace.now + own[0], own[1] + wait)
            trace.step(sum(own) + wait, torch__step__runnable_duration=wait / 1000)
        return trace.chrome(tmp_path / name)

    found = otp.diff(recorded("a.json", 4.0, 1), recorded("b.json", 9.0, 2))
    assert [each.name for each in found.changes] == ["sleep"]
    assert (found.changes[0].before, found.changes[0].after) == pytest.approx((0.004, 0.009), rel=0.02)


def test_steps_that_only_waited_for_a_processor(tmp_path):
    """A file whose steps have no time but waits for a processor is named, with the way out."""
    waits = {"torch__step__runnable_duration": 0.030}
    path = Trace().steps(60, 30.0, **waits).chrome(tmp_path / "a.json")
    with pytest.raises(otp.TorchProfError, match=r"a.json': the loop waited for a processor throughout most steps"):
        otp.diff(path, path)


def test_recordings_of_different_detail(tmp_path):
    """Times of operators and of phases are not of the same, and both files are named with the way out."""
    more = recording(tmp_path / "a.json", 0)
    trace = Trace()
    for _ in range(60):
        trace.span("torch.phase.data", trace.now, 3.0)
        trace.step(data=0.3)
    less = trace.chrome(tmp_path / "b.json")
    with pytest.raises(otp.TorchProfError, match=r"a.json' has operators.*b.json' steps and phases only.*one --detail"):
        otp.diff(more, less)


def test_what_runs_rarely_is_counted(tmp_path):
    """What is not compared since it runs in less than half of the steps is said, with how much of the time that is."""

    def inside(begin):
        return [piece("aten::mm", begin, 4.0)] + ([piece("aten::rare", begin + 4, 5.0)] if begin % 40 == 0 else [])

    path = kineto(tmp_path / "a.json", 65, inside)
    found = otp.diff(path, path)
    assert found.before.rare == pytest.approx(0.125, abs=0.01)
    assert "12% of it runs in less than half of the steps and is not compared" in str(found)


def test_too_few_steps(tmp_path):
    """The file, how many it has and what is needed are named."""
    few = recording(tmp_path / "few.json", 0, steps=DIFF_RULES.warm_up_steps + DIFF_RULES.fewest_steps - 1)
    with pytest.raises(otp.TorchProfError, match=r"few.json' has 19 training steps .* and 20 are needed"):
        otp.diff(few, few)


def test_the_forms(tmp_path, capsys):
    """Text, Markdown and JSON say the same, and so does what Python shows."""
    before, after = recording(tmp_path / "a.json", 0), recording(tmp_path / "b.json", 1, aten__mm=3.6)
    found = otp.diff(before, after)
    assert cli.main(["diff", str(before), str(after)]) == 1
    text = capsys.readouterr().out
    assert text == str(found)
    assert text.splitlines()[0] == found.headline
    [row] = [line for line in text.splitlines() if line.endswith("forward > aten::mm")]
    assert "1 -> 1" in row
    shares = [float(line[54:63].strip(" %")) for line in text.splitlines()[3:6]]
    assert shares[0] + shares[1] == pytest.approx(shares[2], abs=0.11)
    assert shares[2] == pytest.approx(100 * (found.ratio - 1), abs=0.06)
    assert cli.main(["diff", "--markdown", str(before), str(after)]) == 1
    assert capsys.readouterr().out == found._repr_markdown_()
    assert "| aten::mm | 3." in found._repr_markdown_()
    assert cli.main(["diff", "--json", str(before), str(after)]) == 1
    said = checked("diff", capsys.readouterr().out)
    assert said == json.loads(json.dumps(found.as_json()))
    assert said["rules"]["deviations"] == 4
    assert said["changes"][0]["path"] == ["forward", "aten::mm"]


def test_events_that_are_their_own_ancestors(tmp_path):
    """A file whose parents go in a circle, or down 2,000 levels, is compared all the same."""
    trace = Trace().steps(60).chrome(tmp_path / "a.json")
    document = json.loads(trace.read_text())
    for number in range(2000):
        span = {"trace_id": "1", "span_id": f"{number + 500:x}", "parent_id": f"{(number + 1) % 2000 + 500:x}"}
        document["traceEvents"].append(
            {
                "ph": "X",
                "cat": "x",
                "name": f"n{number % 7}",
                "pid": 1,
                "tid": 1,
                "ts": 1_200_000,
                "dur": 10,
                "args": span,
            }
        )
    trace.write_text(json.dumps(document))
    assert otp.diff(trace, trace).ratio == 1.0
