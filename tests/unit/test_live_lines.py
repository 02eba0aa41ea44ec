"""Lines of a program that runs: samples of drains with their phases, what ``explain`` says of them, and their metric."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from policy_jobs import job
from sampled_profiles import LOG, MAIN, MS, STACKS, THREADS, sampled_drains, samples
from torch_metrics import points

from otel_torchprof._answers.line_reading import TAKEN, TakenSamples, taken_samples
from otel_torchprof._answers.rank_reading import LiveSteps
from otel_torchprof._answers.steps import PLACE_OF
from otel_torchprof._answers.verdicts import explained
from otel_torchprof._columns.batch import Batch, OpenEvents
from otel_torchprof._columns.phases import PHASE_PREFIX, Part, Segment
from otel_torchprof._columns.samples import Call
from otel_torchprof._columns.schema import Kind
from otel_torchprof._instrument.operator_metrics import metrics_of
from otel_torchprof._model.step_spans import StepSpan, Trace
from otel_torchprof._native.recorder import now_ns

LINES = "torch.line.time"
COMPUTE = (Call("train.py", 20, "main"),)
FILE, LINE, FUNCTION, PHASE = "code.file.path", "code.line.number", "code.function.name", "torch.phase.name"


def phases(taken, *ended, opens=()):
    """A batch of phases: part, start, end and thread of those that have ended; without an end of those that are open."""
    part, start, end, thread = zip(*ended, strict=True) if ended else ((), (), (), ())
    kind = [Kind.PHASE] * len(part)
    columns = {"start": start, "end": end, "thread": thread, "fwd_thread": part, "kind": kind, "name": [1] * len(kind)}
    of_opens = [np.array(column) for column in zip(*opens, strict=True)] if opens else [np.empty(0, np.int64)] * 3
    still = OpenEvents(
        id=np.arange(len(of_opens[0]), dtype=np.uint64) + 100,
        kind=np.full(len(of_opens[0]), Kind.PHASE, np.uint8),
        fwd_thread=of_opens[0].astype(np.uint32),
        start=of_opens[1].astype(np.int64),
        thread=of_opens[2].astype(np.uint32),
    )
    return Batch.of(columns, ["", "phase"], THREADS, samples=taken, opens=still)


def taken(*rows, stacks=STACKS):
    """Samples of 10 ms: time, thread, phase or none, and stack."""
    found = [(time, 10 * MS, thread, PLACE_OF.get(phase, -1), stack) for time, thread, phase, stack in rows]
    return TakenSamples(np.array(found, TAKEN), stacks)


def test_samples_have_the_innermost_phase_of_their_thread():
    """Whether it has ended or is still open, and whatever other threads do; between phases there is none."""
    times = [5, 15, 25, 35, 45, 15]
    batch = phases(
        samples(times, [0] * 6, [0, 0, 0, 0, 0, 1]),
        (Part.NEXT, 10, 40, 0),
        (Part.COLLECTION, 20, 30, 0),
        (Part.STEP, 0, 100, 1),
        opens=[(Part.FORWARD, 42, 0)],
    )
    found = taken_samples(batch)
    names = {place: phase for phase, place in PLACE_OF.items()} | {-1: ""}
    assert [names[phase] for phase in found.rows["phase"].tolist()] == [
        "",
        "data",
        "gc",
        "data",
        "forward",
        "optimizer",
    ]
    assert found.rows["thread"].tolist() == [70] * 5 + [80]
    assert found.stacks is STACKS
    assert taken_samples(phases(None)) is None
    assert taken_samples(phases(samples([5], [0]))).rows["phase"].tolist() == [-1]


def step(number, *, thread=70, **shares):
    """A training step of 100 ms with shares of phases."""
    trace, start = Trace(1, True, True), number * 100 * MS
    attributes = {f"{PHASE_PREFIX}{phase}.duration": share / 10 for phase, share in shares.items()}
    span = StepSpan(number, trace, number + 1, start, start + 100 * MS, None, None, segment=Segment.STEP, thread=thread)
    span.attributes = attributes
    return span


def loop(count, *, thread=70):
    """Steps that compute for 60 % of their time and log for the rest, and their samples, ten a step."""
    stacks = [COMPUTE, (LOG, MAIN)]
    rows = [
        (number * 100 * MS + at * 10 * MS + 5 * MS, thread, "forward" if at < 6 else "", int(at >= 6))
        for number in range(count)
        for at in range(10)
    ]
    return [step(number, thread=thread, forward=0.6) for number in range(count)], taken(*rows, stacks=stacks)


def said(live):
    return explained([live.rank(events=0, dropped=0)])


def test_a_running_program_has_lines():
    """A gap names its line as that of a file does, from the samples of the loop's thread only."""
    live = LiveSteps()
    spans, found = loop(60)
    other = taken(*((number * 10 * MS, 80, "", 2) for number in range(600)))
    live.add(spans[:30], found._replace(rows=found.rows[:300]))
    live.add(
        spans[30:], found._replace(rows=np.concatenate((found.rows[300:], other.rows)), stacks=[*found.stacks, *STACKS])
    )
    [fault] = said(live).faults
    assert (fault.verdict, fault.line, fault.cause) == ("python-gap", "train.py:5 log_metrics", "logging")
    assert "40% of step time in train.py:5 log_metrics, called from train.py:22 main" in fault.evidence[1]


def test_a_running_program_without_samples():
    """Phases alone say nothing of a gap."""
    live = LiveSteps()
    live.add(loop(60)[0])
    assert (said(live).faults, said(live).steps) == ((), 60)
    live.add([], taken((5, 80, "", 0)))
    assert said(live).faults == ()


def test_memory_that_is_allocated_again():
    """A verdict from counters, which needs operators to have a line, is said without one."""
    live = LiveSteps()
    spans, found = loop(60)
    for span in spans:
        span.attributes |= {"torch.step.page_faults.minor": 80_000}
    live.add(spans, found)
    assert {fault.verdict: fault.line for fault in said(live).faults}["allocation-churn"] == ""


def test_samples_of_the_last_steps_are_kept():
    """65,536 samples are kept, the latest."""
    live = LiveSteps()
    live.add([step(0)], taken(*((time, 70, "", 0) for time in range(70_000))))
    live.add([step(1)], taken((70_000, 70, "", 0)))
    [lines] = live.rank(events=0, dropped=0).lines
    assert lines.time[[0, -1]].tolist() == [70_001 - 65_536, 70_000]


def test_a_processor_has_the_samples_of_its_drains():
    """Samples that a drain brings are lines of the processor's steps, each once."""
    with job() as found:
        given = sampled_drains(found.processor)
        for _ in range(3):
            found.step("label")
            given.append(now_ns())
            found.drain()
        expected = len(given)
        [lines] = found.processor._steps.rank(events=0, dropped=0).lines
    assert expected == 0
    assert len(lines) == 3
    assert (np.diff(lines.time) > 0).all()
    assert {lines.stacks[stack] for stack in lines.stack.tolist()} == {(LOG, MAIN)}


# ---- the metric ----


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def metrics(reader):
    return metrics_of(MeterProvider([reader], shutdown_on_exit=False))


def by_line(reader):
    """Seconds by line and phase; of the others, by a name."""
    return {
        (about.get(FILE), about.get(LINE), about[FUNCTION], about.get(PHASE)): round(seconds, 3)
        for about, seconds in points(reader, LINES)
    }


def test_the_time_of_lines(reader, metrics):
    """Innermost lines of the program by phase; what came before a line was known to be large is with the others."""
    assert points(reader, LINES) == []
    metrics.add_spans(*loop(60))
    assert by_line(reader) == {
        ("train.py", 20, "main", "forward"): 3.6,
        ("train.py", 5, "log_metrics", "unattributed"): 2.4,
    }
    for at in range(30):
        metrics.add_spans([], taken((at, 70, "data", 2)))
    found = by_line(reader)
    assert found[("a dir/x:3.py", 9, "f.<locals>.<lambda>", "data")] == 0.11
    assert found[None, None, "other", None] == 0.19
    assert sum(found.values()) == pytest.approx(6.3)


def test_lines_are_few(reader, metrics):
    """Twenty lines have a series, all others are one; none ever decreases, however many there are."""
    stacks = [(Call("train.py", line, f"f{line}"),) for line in range(1, 6_001)]
    before = {}
    for begin in (0, 0, 40, 3_000, 0):
        rows = [(at, 70, "", at // 25 % 40 + begin) for at in range(1_000)]
        metrics.add_spans([step(0)], taken(*rows, stacks=stacks))
        found = by_line(reader)
        assert len(found) <= 21
        assert all(found[key] >= seconds for key, seconds in before.items())
        before = found
    assert sum(before.values()) == pytest.approx(50.0)
    metrics.add_spans([], taken(*((at, 70, "", at) for at in range(6_000)), stacks=stacks))
    assert len(by_line(reader)) == 21


def test_threads_that_wait_for_requests(reader, metrics):
    """Threads without steps count in their phases only; a thread with steps counts always, also in later drains."""
    metrics.add_spans(
        [], taken(*((at, 80, "", 0) for at in range(50)), *((at, 80, "inference", 1) for at in range(50)))
    )
    assert [about[PHASE] for about, _ in points(reader, LINES)] == ["inference"]
    metrics.add_spans([step(0)], None)
    metrics.add_spans([], taken(*((at, 70, "", 0) for at in range(50))))
    assert by_line(reader)[("train.py", 5, "log_metrics", "unattributed")] == 0.5


def test_a_stack_of_no_program(reader, metrics):
    """Code that has no file is with the others."""
    metrics.add_spans([step(0)], taken(*((at, 70, "", 0) for at in range(50)), stacks=[(Call("<string>", 1, "f"),)]))
    assert points(reader, LINES) == [({FUNCTION: "other"}, 0.5)]
