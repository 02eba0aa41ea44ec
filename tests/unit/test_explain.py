"""The rules of ``explain``: what is said of steps that are known, and what is not."""

from __future__ import annotations

import json

import pytest
from explained_files import STEP_MS, Trace, kineto, piece

import otel_torchprof as otp
from otel_torchprof._answers.findings import RULES, time

WARM_UP = RULES.warm_up_steps


@pytest.fixture
def explained(tmp_path):
    """Writes traces, one a rank, and explains them together."""

    def explain(*traces):
        return otp.explain(*(trace.chrome(tmp_path / f"{place}.json") for place, trace in enumerate(traces)))

    return explain


def verdicts(found):
    return [each.verdict for each in found.faults]


@pytest.mark.parametrize(("steady", "said"), [(19, None), (20, "tentative"), (49, "tentative"), (50, "firm")])
def test_how_many_steps(explained, steady, said):
    """Below 20 steady steps there is no verdict, below 50 it is tentative; the first five are none."""
    found = explained(Trace().steps(WARM_UP + steady, data=0.5))
    assert found.steady_steps == steady
    if said is None:
        assert (found.findings, found.notes) == ((), ())
        assert f"{steady} steady training steps" in found.headline
    else:
        assert [each.confidence for each in found.faults] == [said]
        assert ("tentative" in found.headline) is (said == "tentative")


@pytest.mark.parametrize(
    ("first", "count", "steady", "said"),
    [
        (WARM_UP, 20, 20, ""),
        (WARM_UP, 19, 19, "19 steady training steps, and 20 are needed"),
        (WARM_UP - 1, 24, 19, "19 steady training steps (the first 5 left out), and 20 are needed"),
    ],
)
def test_a_recording_of_a_program_that_is_warm(explained, first, count, steady, said):
    """The first steps are left out only where they are the first of the program: recorded steps of a running job count all."""
    trace = Trace()
    trace.number = first
    found = explained(trace.steps(count, data=0.5))
    assert found.steady_steps == steady
    assert said in found.headline


@pytest.mark.parametrize(
    ("share", "bound", "noted"), [(0.05, [], []), (0.15, [], ["input-bound"]), (0.25, ["input-bound"], [])]
)
def test_how_large_a_share(explained, share, bound, noted):
    """A fifth of the step binds it, a tenth is a note, less is nothing."""
    found = explained(Trace().steps(60, data=share))
    assert verdicts(found) == bound
    assert [each.verdict for each in found.notes] == noted


def test_an_interval_of_one_number(explained):
    """An interval whose ends are printed alike is one number; notes are printed as verdicts are, a line for each part."""
    text = str(explained(Trace().steps(60, data=0.12)))
    assert (
        "note: input-bound: 12% of step time waits for data\n  evidence  12% of 55 steady steps, 95 % interval 12%\n"
        in text
    )


def test_a_share_that_is_not_sure(explained):
    """A median over a fifth is a note where the interval reaches below 15 %: half of the steps wait, half do not."""
    trace = Trace()
    for number in range(61):
        trace.step(data=0.4 if number % 2 else 0.0)
    found = explained(trace)
    assert verdicts(found) == []
    [note] = found.notes
    assert note.verdict == "input-bound"


@pytest.mark.parametrize(
    ("phase", "verdict"),
    [
        ("data", "input-bound"),
        ("optimizer", "optimizer-bound"),
        ("collective", "communication-bound"),
        ("checkpoint", "checkpoint-bound"),
        ("evaluation", "evaluation-bound"),
        ("gc", "gc-bound"),
        ("device_wait", "device-wait-bound"),
    ],
)
def test_every_phase_has_its_verdict(explained, phase, verdict):
    """With evidence, the next action and a check; severity and what is at stake follow from the share."""
    [found] = explained(Trace().steps(65, **{phase: 0.5})).faults
    assert (found.verdict, found.severity, found.confidence) == (verdict, "high", "firm")
    assert found.recoverable_seconds == pytest.approx(60 * STEP_MS / 1e3 / 2)
    assert found.step_seconds == pytest.approx(STEP_MS / 1e3 / 2)
    stake = f"at most {time(found.step_seconds)} a step, {time(found.recoverable_seconds)} of the recording"
    assert f"  at stake  {stake}" in str(explained(Trace().steps(65, **{phase: 0.5})))
    assert found.evidence
    assert found.next_action
    assert found.check


def test_several_hold(explained):
    """Verdicts come in the order of what can be recovered; that the model computes is no fault, and is said where there is none."""
    found = explained(Trace().steps(60, data=0.25, optimizer=0.3, forward=0.25, backward=0.2))
    assert verdicts(found) == ["optimizer-bound", "input-bound"]
    assert [each.verdict for each in found.findings] == ["optimizer-bound", "input-bound"]
    assert found.headline.endswith("(and 1 more)")
    assert explained(Trace().steps(60, backward=0.6)).headline.startswith("no fault found; compute-bound: 100%")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rest": 0.2}, "20% of step time is in no phase"),
        ({"torch__dropped_events": 1}, "of the events were dropped"),
        ({"torch__step__number": 7}, "several steps have one number"),
    ],
)
def test_it_abstains(explained, more, said):
    """What is doubtful has no verdict, though its steps wait for data half of the time; and a way out."""
    found = explained(Trace().steps(60, data=0.5, **more))
    assert found.findings == ()
    assert said in found.headline
    assert found.headline.startswith("no verdict: ")
    assert all(each.way_out for each in found.abstentions)


def test_a_rule_that_changes(explained):
    """Steps that began by two rules, and were steady by both, are two kinds of steps."""
    trace = Trace().steps(30, data=0.5, torch__step__rule__revision=1)
    found = explained(trace.steps(30, data=0.5, torch__step__rule__revision=2))
    assert "the rule of steps is ambiguous: it changed" in found.headline


def usage(runnable, blocked=0.0):
    """Attributes of a step for shares of it: ready to run without a processor, and blocked."""
    of_step = {"runnable": runnable, "blocked": blocked}
    return {f"torch__step__{name}_duration": share * STEP_MS / 1e3 for name, share in of_step.items()}


def test_a_busy_machine(explained):
    """More than a fifth of the time ready to run is the verdict itself, and the headline if no fault takes as much."""
    trace = Trace().steps(60, **usage(0.3))
    assert verdicts(explained(trace)) == ["machine-busy"]
    # Very short steps do not say it: those that do are judged, if they are half of all.
    assert verdicts(explained(trace.steps(30))) == ["machine-busy"]
    assert verdicts(explained(trace.steps(60))) == []
    found = explained(Trace().steps(60, data=0.5, **usage(0.6)))
    assert verdicts(found) == ["machine-busy", "input-bound"]
    assert found.headline == (
        "machine-busy: 60% of the time the loop's thread was ready to run, and other threads had the processor; "
        "input-bound: 50% of step time waits for data, of which 30 points are the busy machine, tentative"
    )


@pytest.mark.parametrize(
    ("shares", "caveat", "confidence"),
    [
        ((0.5, 0.5, 0.3), "", "firm"),  # it was blocked all the while, not ready to run
        ((0.5, 0.0, 0.3), ", of which 15 points are the busy machine", "firm"),
        ((0.4, 0.0, 0.3), ", of which 12 points are the busy machine", "tentative"),  # 14 % if all of it fell there
        ((0.5, 0.0, 0.05), "", "firm"),  # the machine is not busy
        ((0.18, 0.18, 0.3), ", 26% without the time in which the machine was busy", "tentative"),
    ],
)
def test_caveats_of_a_busy_machine(explained, shares, caveat, confidence):
    """A verdict holds as measured and without the time ready to run, in proportion to what was not blocked; it is said how much that was."""
    share, blocked, runnable = shares
    [found] = [
        each
        for each in explained(Trace().steps(60, data=share, **usage(runnable, blocked))).faults
        if each.verdict == "input-bound"
    ]
    assert found.statement == f"{share:.0%} of step time waits for data{caveat}"
    assert found.confidence == confidence


def test_a_verdict_that_depends_on_the_machine(explained):
    """It is withheld with that reason: a fifth of the step waits for other ranks, which may have had no processor either."""
    found = explained(Trace().steps(60, collective=0.25, **usage(0.15, 0.25)))
    assert verdicts(found) == []
    [reason] = found.abstentions
    said = "communication-bound depends on the machine: 25% of step time, 14% without the time in which the machine was busy"
    assert (reason.reason, reason.way_out) == (said, "record while nothing else runs")
    assert found.headline == f"no verdict: {said}"
    trace = Trace()
    for number in range(60):
        trace.span("aten::sort", trace.now, (0.18, 0.32)[number % 2] * STEP_MS)
        trace.step(**usage(0.3))
    [reason] = explained(trace).abstentions
    assert reason.reason.startswith("operator-bound, aten::sort, depends on the machine: 32% of step time")


def test_device_that_waits_for_a_host_without_a_processor(explained):
    """All of the time ready to run is taken from that in which a device has no work."""
    for drained, said in ((0.3, []), (0.6, ["host-bound"])):
        seconds = {"torch__device__drained_duration": drained * STEP_MS / 1e3}
        assert verdicts(explained(Trace().steps(60, **seconds, **usage(0.18)))) == said


def test_own_threads_or_other_processes(explained):
    """What to do about a busy machine depends on whether the process's own threads can have had the processors that the loop's waits for."""
    other, own = "look for other processes", "the process's own threads take processors"
    for runnable, others, said in ((0.3, 0.0, other), (0.3, 0.9, own), (0.6, 0.9, other)):
        more = {"torch__step__other_threads_duration": others * STEP_MS / 1e3}
        [found] = explained(Trace().steps(60, **usage(runnable), **more)).faults
        assert found.next_action.startswith(said)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_waits_in_bursts(explained, workers):
    """A loader's workers have their batches at one time: most steps wait for nothing, and the loop for data half of its time."""
    trace = Trace()
    for number in range(65):
        if number % workers:
            trace.step(STEP_MS, data=0.0)
        else:
            trace.step((workers + 1) * STEP_MS, data=workers / (workers + 1))
    [found] = explained(trace).faults
    assert found.verdict == "input-bound"
    assert found.share == pytest.approx(0.5, abs=0.1)


def test_one_long_wait(explained):
    """A single wait, however long, binds no steps."""
    trace = Trace().steps(30)
    for times in (2.5, 20):
        trace.step(times * STEP_MS, data=0.9)
        assert verdicts(explained(trace.steps(30))) == []


@pytest.mark.parametrize(("pages", "said"), [(900, []), (1_500, []), (5_000, ["allocation-churn"])])
def test_memory_that_is_taken_anew(explained, pages, said):
    """Page faults of a step at half a microsecond each are a verdict like a phase, and evidence from 1,000 on."""
    found = explained(Trace().steps(60, torch__step__page_faults__minor=pages))
    assert verdicts(found) == said
    texts = [text for each in found.findings for text in each.evidence]
    assert any(f"{pages:,} pages of memory a step" in text for text in texts) is (pages >= 1000)


def test_the_caveat_beside_spikes_of_a_busy_machine(explained):
    """Few steps without a processor, which are most of the time, make the caveat no larger than the share that it is part of."""
    trace = Trace()
    for number in range(60):
        times = 60 if number in {20, 40} else 1
        trace.span("aten::sort", trace.now, (0.9 * times if times > 1 else 0.5) * STEP_MS)
        trace.step(times * STEP_MS, **usage(0.9 * times if times > 1 else 0.3))
    [found] = [each for each in explained(trace).findings if each.name == "aten::sort"]
    assert found.statement == "50% of step time is the operator aten::sort, of which 15 points are the busy machine"


def test_spikes_of_a_busy_machine(explained):
    """Time ready to run is a cause of spikes as phases are."""
    trace = Trace()
    for number in range(70):
        is_slow = number in {20, 40, 60}
        runnable = (0.9 * 10 if is_slow else 0.01) * STEP_MS / 1e3
        trace.step(10 * STEP_MS if is_slow else STEP_MS, torch__step__runnable_duration=runnable)
    assert verdicts(explained(trace)) == ["machine-busy"]


def test_waits_in_spikes_of_a_busy_machine(explained):
    """Steps that wait for data are named beside a busy machine; those that had no processor for as long are that machine's."""
    for runnable, blocked, said in ((0.5, 0.9, "input-bound"), (0.5, 0.0, "input-bound"), (9.3, 0.0, "machine-busy")):
        trace = Trace()
        for number in range(70):
            is_slow = number >= 10 and number % 10 == 0
            duration = (10 if is_slow else 1) * STEP_MS
            more = usage(runnable if is_slow else 0.01, blocked * duration / STEP_MS if is_slow else 0.0)
            trace.step(duration, **({"data": 0.95} if is_slow else {}), **more)
        assert verdicts(explained(trace)) == [said]


def test_what_a_busy_machine_does_besides(explained):
    """How long the thread was blocked in no phase is evidence: the machine is not all that makes it slow."""
    usage = {
        "torch__step__runnable_duration": 0.3 * STEP_MS / 1e3,
        "torch__step__blocked_duration": 0.5 * STEP_MS / 1e3,
    }
    [found] = explained(Trace().steps(60, rest=0.5, **usage)).findings
    assert "the loop's thread was blocked for 50% of the time, 50% in no phase that waits" in found.evidence


def with_slow_steps(count, **phases):
    """Steps of which every tenth after the warm-up is ten times as long."""
    trace = Trace()
    for number in range(70):
        is_slow = number >= 10 and number % 10 == 0 and number // 10 <= count
        trace.step(*((10 * STEP_MS,) if is_slow else ()), **(phases if is_slow else {}))
    return trace


@pytest.mark.parametrize(("count", "share", "named"), [(3, 0.9, True), (2, 0.9, False), (3, 0.6, False)])
def test_causes_of_spikes(explained, count, share, named):
    """A cause that covers 80 % of the excess in three of them is a verdict; fewer, or less, is a note without a cause."""
    found = explained(with_slow_steps(count, gc=share))
    assert verdicts(found) == (["gc-bound"] if named else [])
    if named:
        assert any("gc covers 80%" in text for text in found.faults[0].evidence)
        assert any("10, 20, 30 (every 10)" in text for text in found.faults[0].evidence)
    else:
        assert "cause unknown" in found.notes[-1].evidence[0]
        assert found.headline.startswith("no cause found; spikes: ")
    assert found.slow_steps[0].more[0] == ("gc", pytest.approx(10 * share * STEP_MS / 1e3))


def test_what_is_no_cause_of_spikes(explained):
    """What usually takes most of a step is delayed most often, and is no cause of that; nor is the model's computing."""
    assert verdicts(explained(with_slow_steps(4, forward=0.95, data=0.05))) == []
    trace = Trace()
    for number in range(70):
        is_slow = number >= 10 and number % 10 == 0
        trace.step(10 * STEP_MS if is_slow else STEP_MS, optimizer=0.95 if is_slow and number < 50 else 0.4)
    found = explained(trace)
    assert [each.share for each in found.faults] == [pytest.approx(0.4)]
    assert found.notes[-1].verdict == "spikes"


def test_what_slow_steps_had(explained):
    """What the system counts of a step is told where it is far more than usual."""
    trace = Trace().steps(59, torch__step__page_faults__major=1)
    trace.step(10 * STEP_MS, data=0.95, torch__step__page_faults__major=500)
    [slow] = explained(trace).slow_steps
    assert (slow.number, slow.ratio, slow.counts) == (59, pytest.approx(10), (("major page faults", 500),))
    assert slow.more == (("data", pytest.approx(0.095)),)


def test_causes_of_one_slow_step(explained):
    """An operator, and no module, that is most of a phase is named instead of it, and three causes at most, the largest first."""
    trace = Trace()
    for number in range(60):
        slow = number == 40
        trace.span("0", trace.now + 5 * STEP_MS, 4.5 * STEP_MS if slow else 0.1)
        trace.span("aten::sort", trace.now, 4.0 * STEP_MS if slow else 0.1)
        phases = {"forward": 0.42, "backward": 0.2, "optimizer": 0.18, "gc": 0.15} if slow else {}
        trace.step(10 * STEP_MS if slow else STEP_MS, rest=0.05, **phases)
    [step] = explained(trace).slow_steps
    assert [name for name, _ in step.more] == ["aten::sort", "backward", "optimizer"]


def test_table_of_slow_steps(explained):
    """It has a title for each column, one unit for its times, and the same rows as text and as Markdown."""
    trace = Trace().steps(59)
    trace.step(123.456, data=0.95)
    found = explained(trace)
    *_, titles, row = str(found).splitlines()
    assert titles == "Slowest step  Duration, ms  x median  More than usual, ms (may overlap)"
    assert row.split() == ["step", "59", "123", "12.3", "data", "117"]
    assert found._repr_markdown_().splitlines()[-1] == "| step 59 | 123 | 12.3 | data 117 |"
    [as_json] = found.as_json()["slow_steps"]
    assert as_json["more"] == {"data": pytest.approx(0.117, abs=1e-3)}


def test_parts_of_steps_are_no_steps(explained):
    """Roots of parts repeat the number, and what a step does inside a span of the application has the kind only."""
    trace = Trace()
    for number in range(60):
        trace.span("torch.step", trace.now, 0.1, torch__step__number=number, torch__part=1)
        trace.span("torch.step", trace.now, 0.2, torch__step__number=number, torch__step__kind="training")
        trace.step(data=0.5)
    found = explained(trace)
    assert (found.steps, found.abstentions) == (60, ())
    assert verdicts(found) == ["input-bound"]


def test_recompiling_steps_are_not_steady(explained):
    """They are left out of the levels, and are spikes with a cause."""
    found = explained(with_slow_steps(5, compile=0.95))
    assert found.steady_steps == 60
    assert verdicts(found) == ["compile-bound"]


@pytest.mark.parametrize(("duration", "bound", "noted"), [(50, True, False), (30, False, True), (10, False, False)])
def test_pauses_between_steps(explained, duration, bound, noted):
    """Checkpoints between steps are judged by their share of the loop's time."""
    trace = Trace()
    for number in range(65):
        trace.step()
        if number > 5 and number % 20 == 0:
            trace.pause("checkpoint", duration)
    found = explained(trace)
    assert verdicts(found) == (["checkpoint-bound"] if bound else [])
    assert [each.verdict for each in found.notes] == (["checkpoint-bound"] if noted else [])


# ---- several ranks ----


def with_collectives(rank, late=0.0, skew=0.0, count=60):
    """A rank that comes late to the collective of each step; all leave it together."""
    trace = Trace(rank, skew)
    for number in range(count):
        trace.span(
            "c10d::allreduce_",
            trace.now + 2 + late,
            STEP_MS - 3 - late + (number % 3) / 100,
            torch__collective__name="all_reduce",
            torch__collective__group="0",
            torch__collective__sequence_nr=number,
        )
        trace.step(data=(1 + late) / STEP_MS, collective=(STEP_MS - 3 - late) / STEP_MS)
    return trace


def test_a_straggler_on_another_clock(explained):
    """The late rank is named with its phase, though its clock is a second ahead."""
    found = explained(*(with_collectives(rank, 3.0 * (rank == 2), 1000.0 * (rank == 2)) for rank in (3, 0, 2, 1)))
    assert found.ranks == ("rank 0", "rank 1", "rank 2", "rank 3")
    late, waits = found.findings
    assert (waits.verdict, waits.share) == ("communication-bound", pytest.approx(0.7))  # 40 % beyond those for it
    assert late.ranks == ("rank 2",)
    assert late.share == pytest.approx(0.3)
    assert late.sentence == "straggler: rank 2 is late: 40% of its step waits for data"
    assert "before that it spends 3.00ms a step more than the others in data" in late.evidence


@pytest.mark.parametrize("late", [0.0, 0.02, 0.4])
def test_no_straggler(explained, late):
    """Ranks that come together, or within the error of the clocks, or whose lateness costs under a twentieth."""
    found = explained(*(with_collectives(rank, late * (rank == 2)) for rank in range(4)))
    assert "straggler" not in verdicts(found)
    assert found.abstentions == ()


def test_collectives_of_steps_without_details(explained):
    """Times of collectives that stand on their steps count as those of spans."""
    traces = []
    for rank in range(4):
        trace = Trace(rank, 1000.0 * (rank == 2))
        for number in range(60):
            came = 5000 if rank == 2 else 2000
            trace.step(data=0.2, torch__collectives=json.dumps([["0", number, came, 9000 + number % 3 * 10]]))
        traces.append(trace)
    [late] = [each for each in explained(*traces).faults if each.verdict == "straggler"]
    assert late.ranks == ("rank 2",)


def test_too_few_collectives(explained):
    """Without 20 that all ranks have, no rank is called late, and that is said."""
    found = explained(with_collectives(0), Trace(1).steps(60))
    [reason] = found.abstentions
    assert (reason.subject, reason.reason[:13]) == ("stragglers", "0 collectives")
    assert not found.headline.startswith("no verdict")


def test_ranks_of_one_verdict(explained):
    """What is true of some ranks names them."""
    found = explained(Trace(0).steps(60, data=0.5), Trace(1).steps(60), Trace(2).steps(60, data=0.4))
    [fault] = found.faults
    assert (fault.ranks, fault.share) == (("rank 0", "rank 2"), pytest.approx(0.5))
    assert fault.evidence[-1] == "these are the figures of rank 0, which has the largest share of 2 ranks"


# ---- files ----


def test_ranks_in_one_file(tmp_path):
    """A Collector's file has the spans of several processes, told apart by their resources, in any order."""
    parts = [Trace(rank).steps(60, data=0.1 + 0.4 * rank).lines(tmp_path / str(rank)).read_text() for rank in (1, 0)]
    (tmp_path / "all.jsonl").write_text("".join(parts))
    found = otp.explain(tmp_path / "all.jsonl")
    assert found.ranks == ("rank 0", "rank 1")
    assert [(each.verdict, each.ranks) for each in found.faults] == [("input-bound", ("rank 1",))]


def test_formats_say_the_same(tmp_path):
    """A Chrome file and lines of OTLP with the same steps."""
    trace = with_slow_steps(4, gc=0.9)
    found = [otp.explain(trace.chrome(tmp_path / "t")).as_json(), otp.explain(trace.lines(tmp_path / "t")).as_json()]
    assert found[0] == found[1]
    assert found[0]["rules"]["version"] == RULES.version
    json.dumps(found[0], allow_nan=False)


def test_an_operator_in_no_phase(explained):
    """Where most of a step is in no phase, an operator that takes it is a verdict all the same."""
    trace = Trace()
    for _ in range(60):
        trace.span("aten::fill_", trace.now, 0.9 * STEP_MS)
        trace.step(rest=0.5)
    found = explained(trace)
    assert [(each.verdict, round(each.share, 3)) for each in found.faults] == [("operator-bound", 0.9)]
    assert found.abstentions


def test_a_gap(tmp_path):
    """Time in which no operator runs has no known cause; without operators nothing is known of it."""
    found = otp.explain(kineto(tmp_path / "t.json", 60, lambda begin: [piece("aten::mm", begin, 4)]))
    assert found.headline == "python-gap: 60% of step time no operator runs, cause unknown"
    assert verdicts(otp.explain(kineto(tmp_path / "t.json", 60))) == []


def averages(*entries):
    """The attribute of a step without details: names, seconds, and whether it waited for data."""
    return json.dumps(
        [{"name": name, "count": 2, "self": own, **({"phase": "data"} if data else {})} for name, own, data in entries]
    )


def test_steps_without_details(explained):
    """Operators of steps that lost their details are known from their sums; those of the loader are none of the loop's."""
    trace = Trace()
    for number in range(60):
        of_loop = averages(("aten::sort", 0.006, False), ("aten::stack", 0.003, True), ("my label", 0.001, False))
        whole = {"torch__averages": of_loop} if number % 20 else {}
        trace.span("torch.phase.data", trace.now, 0.3 * STEP_MS, torch__self_duration=0.0)
        trace.span("torch.phase.forward", trace.now + 0.3 * STEP_MS, 0.7 * STEP_MS, torch__self_duration=0.0001)
        if not whole:
            trace.span("aten::sort", trace.now + 0.3 * STEP_MS, 0.6 * STEP_MS)
        trace.step(data=0.3, **whole)
    found = explained(trace)
    assert verdicts(found) == ["operator-bound", "input-bound"]
    assert found.faults[0].name == "aten::sort"
    assert found.faults[1].evidence[-1] == "longest by self time: aten::stack 29%"


@pytest.mark.parametrize("text", ["[1]", "{", '[{"name": 3}]', '[{"name": "a", "count": -1, "self": 1}]', "[" * 5000])
def test_sums_that_are_none(explained, text):
    """A step whose sums cannot be read is not counted, and that is said."""
    trace = Trace().steps(60, data=0.5)
    trace.step(data=0.5, torch__averages=text)
    found = explained(trace)
    assert found.steps == 60
    assert "not counted: 1" in found.problems[0]


def test_files_that_follow_one_another(tmp_path):
    """Files whose names differ in their number are one recording of one rank, whatever their order."""
    trace, paths = Trace(rank=3), []
    for part in range(3):
        trace.spans = []
        paths.append(trace.steps(20, data=0.5).chrome(tmp_path / f"t.00000{part}.json"))
    found = otp.explain(*reversed(paths))
    assert (found.ranks, found.steps, found.steady_steps) == (("rank 3",), 60, 55)
    assert verdicts(found) == ["input-bound"]


@pytest.mark.parametrize(
    ("waits", "blocked", "others", "said"),
    [
        (20, 0.5, 0.5, ["gil"]),
        (20, 0.5, 0.05, ["python-gap"]),  # nobody else ran: it waited for something else
        (1, 0.5, 0.5, ["python-gap"]),  # one long wait is for a thread that works, not for a lock that is given up
        (500, 0.5, 0.5, ["python-gap"]),  # very short waits are not for it either
        (20, 0.05, 0.5, ["python-gap"]),  # it ran Python itself
    ],
)
def test_pythons_lock(explained, waits, blocked, others, said):
    """It is named only where the thread was blocked often, for about as long as the lock is held, and others ran meanwhile."""
    trace, duration = Trace(), 10 * STEP_MS
    seconds = duration / 1e3
    for _ in range(60):
        trace.span("aten::mm", trace.now, 0.4 * duration)
        usage = {"torch__step__runnable_duration": 0.0, "torch__step__context_switches__voluntary": waits}
        usage |= {"torch__step__blocked_duration": blocked * seconds}
        trace.step(duration, rest=0.1, torch__step__other_threads_duration=others * seconds, **usage)
    found = explained(trace)
    assert verdicts(found) == said
    if said == ["gil"]:
        assert found.faults[0].share == pytest.approx(0.5)
        assert found.faults[0].evidence[2].startswith("the loop's thread waits 20 times a step, 2.50ms each")


def test_steps_beyond_the_most_are_said(tmp_path, monkeypatch):
    """The text, not only a problem of the file, says that later steps were not looked at."""
    monkeypatch.setattr("otel_torchprof._answers.step_list.MOST_STEPS", 40)
    explanation = otp.explain(Trace().steps(60).chrome(tmp_path / "t.json"))
    assert (explanation.steps, explanation.left_out_steps) == (40, 20)
    assert "\n40 steps (the first of 60), " in str(explanation)
