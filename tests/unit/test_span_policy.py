"""A policy decides which steps are told in detail and how much of them: by labels, steps and a processor, without torch."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from policy_jobs import Whole, job

import otel_torchprof as otp
from otel_torchprof.errors import forget_warnings

SETTINGS = {
    "wait": ("1,active=1", "1"),
    "active": ("2,wait=1", "0"),
    "every": ("3", "0"),
    "ratio": ("0.5", "2"),
    "keep": ("slow", "fast"),
    "slow_quantile": ("0.5", "1"),
    "slow_limit": ("0.5", "-1"),
    "max_spans": ("100", "1"),
    "max_bytes": ("100000", "1"),
    "short": ("0.001", "-1"),
    "job_interval": ("60", "-1"),
}


def by_step(spans):
    """Names of the spans below each step, by number."""
    steps = {s.context.trace_id: s.attributes["torch.step.number"] for s in spans if s.name == "torch.step"}
    found = {number: [] for number in steps.values()}
    for span in spans:
        if span.parent is not None:
            found[steps[span.context.trace_id]].append(span.name)
    return found


def test_schedule_chooses_steps():
    """Steps in which the schedule does not record have their span and nothing below it."""
    with job(otp.SpanPolicy(schedule=otp.schedule(wait=1, warmup=1, active=2))) as program:
        for number in range(6):
            program.step(f"label {number}")
        found = by_step(program.spans())
    assert {number: names for number, names in found.items() if number < 6} == {
        0: [],
        1: [],
        2: ["label 2"],
        3: ["label 3"],
        4: [],
        5: [],
    }


def test_every_so_manieth_step():
    """Of every third step the detail is told."""
    with job(otp.SpanPolicy(every=3)) as program:
        for number in range(5):
            program.step(f"label {number}")
        found = by_step(program.spans())
    assert [number for number, names in sorted(found.items()) if names] == [0, 3]


class Counting(RandomIdGenerator):
    """Trace ids whose lower half goes evenly through all values."""

    def __init__(self):
        self.made = 0

    def generate_trace_id(self):
        self.made += 1
        return self.made << 64 | (self.made * (1 << 64) // 16) % (1 << 64)


def test_ratio_chooses_among_the_steps_that_the_provider_samples():
    """A quarter by the policy and a half by the provider leave a quarter of the steps in detail, and a half at all."""
    options = {"sampler": TraceIdRatioBased(0.5), "id_generator": Counting()}
    with job(otp.SpanPolicy(ratio=0.25, job_interval=0), **options) as program:
        for _ in range(32):
            program.step("label")
        spans = program.spans()
    found = by_step(spans)
    assert len(found) == 16
    assert sum(bool(names) for names in found.values()) == 8
    detailed = {s.context.trace_id for s in spans if s.name == "label"}
    assert all((trace_id & (1 << 64) - 1) < 1 << 62 for trace_id in detailed)


def test_a_schedule_that_fails_stops_no_training(caplog):
    """What a schedule raises is told once, and the step is recorded."""

    def broken(step):
        raise RuntimeError(f"no step {step}")

    with job(otp.SpanPolicy(schedule=broken)) as program:
        program.step("label")
        program.step("label")
        found = by_step(program.spans())
    assert found[0] == found[1] == ["label"]
    assert "no step" in caplog.text


@pytest.mark.parametrize("takes_whole", [False, True])
def test_only_what_was_asked_for_or_failed_is_kept(takes_whole):
    """With ``keep="slow"`` and no slow step: of the one asked for, and the one that failed, every span; of others averages."""
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None), takes_whole=takes_whole) as program:
        program.step("a", "b", "a")
        program.instrumentor.keep_step()
        program.step("asked")
        with pytest.raises(KeyError), otp.record_function("failing"):
            raise KeyError
        program.step("after")
        program.step("c")
        health = None
        program.drain()
        health = program.processor.health
        spans = program.spans()
    found = by_step(spans)
    assert (found[0], found[1], found[2], found[3]) == ([], ["asked"], ["failing", "after"], [])
    first = next(s for s in spans if s.attributes.get("torch.step.number") == 0)
    averages = json.loads(first.attributes["torch.averages"])
    assert {each["name"]: each["count"] for each in averages} == {"a": 2, "b": 1}
    assert first.attributes["torch.recorded_spans"] == 4
    assert (health.spans["sampled"], health.spans["root_only"], health.spans["detail_dropped"]) == (2, 2, 4)
    assert "2 root_only" in str(health)


@pytest.mark.parametrize("takes_whole", [False, True])
@pytest.mark.parametrize("drains", [False, True])
def test_a_step_without_detail_keeps_its_phases(drains, takes_whole):
    """Of a step that shrinks the phases stay, and what ran inside of them goes; whether it came in one drain or in several."""
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None), takes_whole=takes_whole) as program:
        program.step()  # from now on it is known that there are steps
        for _ in range(2):
            with otp.record_function("torch.phase.forward"), otp.record_function("layer"):
                pass
            if drains:
                program.drain()
            program.step("torch.phase.optimizer", "label")
        program.drain()
        health = program.processor.health
        spans = program.spans()
    found = by_step(spans)
    assert found[1] == found[2] == ["torch.phase.forward", "torch.phase.optimizer"]
    steps = [s for s in spans if s.name == "torch.step" and s.attributes["torch.step.number"] in {1, 2}]
    assert {s.attributes["torch.recorded_spans"] for s in steps} == {5}
    assert {entry["name"] for entry in json.loads(steps[0].attributes["torch.averages"])} == {"layer", "label"}
    assert health.spans["detail_dropped"] == 4


def test_slow_steps_are_kept():
    """A step above the limit keeps its detail, those below it do not; whole traces go to who takes them."""
    held = threading.Event()
    with job(otp.SpanPolicy(keep="slow", slow_limit=0.05)) as program:
        program.step("quick")
        with otp.record_function("slow"):
            held.wait(0.06)
        program.step()
        program.step("quick too")
        spans = program.spans()
    assert by_step(spans)[1] == ["slow"]
    assert not any(names for number, names in by_step(spans).items() if number != 1)
    assert by_step(program.whole.get_finished_spans())[0] == ["quick"]


def test_a_step_is_held_until_it_ends():
    """Flushes in the middle of a step send nothing of it; with its end all comes, once, and only then."""
    with job() as program:
        program.step("first")
        with otp.record_function("outer"):
            with otp.record_function("inner"):
                pass
            program.drain()
            assert by_step(program.exporter.get_finished_spans()) == {0: ["first"]}
            assert [s.name for s in program.whole.get_finished_spans()].count("inner") == 1
        program.step()
        program.drain()
        assert by_step(program.exporter.get_finished_spans()) == {0: ["first"], 1: ["inner", "outer"]}
        spans = program.spans()
    assert len({s.context.span_id for s in spans}) == len(spans)


def test_a_step_above_the_budget_is_reduced_and_says_so():
    """A step of many spans arrives within its budget, with sums that are those of all; Chrome's file has every one."""
    with job(otp.SpanPolicy(max_spans=20, short=1)) as program:
        program.step(*["a"] * 50, *["b"] * 60)
        spans, whole = program.spans(), program.whole.get_finished_spans()
    (root,) = (s for s in spans if s.attributes.get("torch.step.number") == 0 and "torch.part" not in s.attributes)
    counts = Counter()
    for span in spans:
        counts[span.name] += span.attributes.get("torch.aggregated.count", 1)
        counts["collapsed"] += span.attributes.get("torch.collapsed.count", 0)
    assert len([s for s in spans if s.context.trace_id == root.context.trace_id]) <= 20
    assert (counts["a"], counts["b"], counts["collapsed"]) == (50, 60, 0)
    assert root.attributes["torch.recorded_spans"] == 111
    assert Counter(s.name for s in whole)["b"] == 60


def test_a_step_too_large_to_be_held_is_sent_in_parts(monkeypatch):
    """Of a step beyond what may be held, linked parts go out while it runs; in the end everything is accounted for, once."""
    monkeypatch.setattr("otel_torchprof._export.span_buffer.MAX_BUFFERED_BYTES", 20_000)
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None, max_spans=100, short=0)) as program:
        program.step()  # from now on it is known that there are steps
        program.drain()
        program.exporter.clear()
        for _ in range(4):
            for _ in range(80):
                with otp.record_function("label"):
                    pass
            program.drain()
        early = program.exporter.get_finished_spans()
        program.step()
        program.drain()
        health = program.processor.health
        spans = program.spans()
    assert {s.name for s in early} == {"torch.step", "label"}
    (root,) = (s for s in spans if s.attributes.get("torch.step.number") == 1 and "torch.part" not in s.attributes)
    parts = [s for s in spans if s.attributes.get("torch.step.number") == 1 and "torch.part" in s.attributes]
    assert sorted(s.attributes["torch.part"] for s in parts) == list(range(1, len(parts) + 1))
    assert root.attributes["torch.parts"] == len(parts) == health.spans["parts"] > 1
    assert {link.context.span_id for s in parts for link in s.links} == {root.context.span_id}
    assert sum(s.name == "label" for s in spans) == 320 == root.attributes["torch.recorded_spans"] - 1
    assert (health.spans["sampled"], health.spans["root_only"]) == (1, 1)
    assert max(Counter(s.context.trace_id for s in spans).values()) <= 100


@pytest.mark.parametrize("keep", ["all", "slow"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_label_that_goes_on_and_on_hides_nothing(monkeypatch, keep, inside):
    """What is below a label around the whole program is sent in linked parts, also in a request; then the label, with the sum."""
    monkeypatch.setattr("otel_torchprof._export.span_buffer.MAX_BUFFERED_NS", 0)
    with job(otp.SpanPolicy(keep=keep, slow_quantile=None)) as program:
        request = program.provider.get_tracer("app").start_as_current_span("request") if inside else nullcontext()
        with request, otp.record_function("program"):
            for _ in range(3):
                with otp.record_function("label"):
                    pass
                program.drain()
            assert [s.name for s in program.exporter.get_finished_spans()] == ["torch.part", "label"] * 3
        spans = program.spans()
    (last,) = (s for s in spans if s.name == "program")
    assert {link.context.span_id for s in spans if s.name == "torch.part" for link in s.links} == {last.context.span_id}
    assert (last.attributes["torch.parts"], last.attributes["torch.recorded_spans"]) == (3, 4)


def test_a_recording_that_ends_in_the_middle_lets_go_of_all(monkeypatch):
    """A step that has not ended when the program does is sent, with what was held of it, and marked as unfinished."""
    with job(otp.SpanPolicy(keep="slow", slow_quantile=None)) as program:
        program.step("first")
        with otp.record_function("held"):
            pass
        program.drain()
        program.instrumentor.keep_step()
        with otp.record_function("open"):
            spans = program.spans()
    last = next(s for s in spans if s.attributes.get("torch.step.number") == 1)
    assert last.attributes["torch.unfinished"]
    assert sorted(by_step(spans)[1]) == ["held", "open"]


def test_a_request_above_the_budget_is_reduced_inside_its_trace():
    """What is below a span of the application is one unit, and what would be too much for its trace goes to linked ones."""
    with job(otp.SpanPolicy(max_spans=30)) as program:
        with program.provider.get_tracer("app").start_as_current_span("request") as request:
            for number in range(10):
                with otp.record_function(f"call {number}"):
                    for _ in range(9):
                        with otp.record_function(f"part {number}"):
                            pass
        spans = program.spans()
    inside = [s for s in spans if s.context.trace_id == request.get_span_context().trace_id]
    assert 0 < len(inside) <= 30
    others = {s.context.trace_id for s in spans} - {request.get_span_context().trace_id}
    roots = [s for s in spans if s.parent is None]
    assert {s.context.trace_id for s in roots} == others
    assert all(s.links[0].context.span_id == request.get_span_context().span_id for s in roots)
    assert sum(s.attributes.get("torch.aggregated.count", 1) for s in spans if s.name.startswith("call")) == 10


@pytest.mark.parametrize("is_in_span", [True, False])
def test_a_trace_that_began_elsewhere_leaves_room_for_other_processes(is_in_span):
    """Of a trace whose parent is in another process, each process takes a quarter of the limit, drain after drain."""
    remote = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    caller = set_span_in_context(NonRecordingSpan(remote))
    with job(otp.SpanPolicy(max_spans=80)) as program:
        tracer = program.provider.get_tracer("app")
        for around in (caller, None):
            server = tracer.start_as_current_span("request", context=around)
            with server if is_in_span or around is None else attached(caller):
                for number in range(6):
                    for i in range(10):
                        with otp.record_function(f"label {number}.{i}"):
                            pass
                    program.drain()
        spans = program.spans()
        whole = program.whole.get_finished_spans()
    sent = Counter(s.context.trace_id for s in spans if s.name.startswith("label"))
    (here,) = {s.context.trace_id for s in whole if s.name.startswith("label")} - {remote.trace_id}
    assert 10 <= sent[remote.trace_id] <= 20
    assert sent[here] == 60
    assert {s.name for s in spans if s.name.startswith("label")} == {
        f"label {n}.{i}" for n in range(6) for i in range(10)
    }


@contextmanager
def attached(current):
    """As what takes a parent from a message does, without a span of its own."""
    token = otel_context.attach(current)
    yield
    otel_context.detach(token)


def test_the_job_is_told_in_sections(monkeypatch):
    """When its time has come, a section ends and the next begins, linked; steps link to the one in which they began."""
    now = [0]
    monkeypatch.setattr("otel_torchprof._instrument.live_recording.LiveRecording.now", lambda self: now[0])
    with job(otp.SpanPolicy(job_interval=600)) as program:
        program.step("label")
        program.drain()
        now[0] = int(4e18)  # later than any start
        program.step("label")
        program.drain()
        program.step("label")
        spans = program.spans()
    first, second = (s for s in spans if s.name == "torch.job")
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert dict(first.attributes)["torch.job.steps"] == 2
    assert (first.attributes["torch.job.first_step"], first.attributes["torch.job.last_step"]) == (0, 1)
    assert (second.attributes["torch.job.section"], second.attributes["torch.job.first_step"]) == (1, 2)
    steps = {s.attributes["torch.step.number"]: s.links[-1].context.span_id for s in spans if s.name == "torch.step"}
    assert (steps[0], steps[1], steps[2]) == (first.context.span_id,) * 3


def test_no_job_where_nobody_wants_one():
    """With an interval of 0 there is no span of the job, and no link to one."""
    with job(otp.SpanPolicy(job_interval=0)) as program:
        program.step("label")
        program.step("label")
        spans = program.spans()
    assert "torch.job" not in {s.name for s in spans}
    assert [len(s.links) for s in spans if s.name == "torch.step"][:2] == [0, 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_variable(monkeypatch, caplog, name):
    """Each setting is read from its part of the variable; a bad one is warned of by name, and the default holds."""
    forget_warnings()
    good, bad = SETTINGS[name]
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", f"{name}={good}")
    assert otp.SpanPolicy.from_environment() != otp.SpanPolicy()
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", f"{name}={bad}")
    assert otp.SpanPolicy.from_environment() == otp.SpanPolicy()
    assert f"OTEL_TORCHPROF_POLICY: {name}={bad!r} is ignored" in caplog.text


def test_the_other_parts_of_the_variable_count(monkeypatch, caplog):
    """A part that is bad, one that there is not, and text that belongs to none are each warned of, and the others are read."""
    forget_warnings()
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", "slow, every=3 ,maxspans=7,ratio=2,keep=slow")
    assert otp.SpanPolicy.from_environment() == otp.SpanPolicy(every=3, keep="slow")
    assert "OTEL_TORCHPROF_POLICY='maxspans=7' is ignored: did you mean max_spans?" in caplog.text
    assert "OTEL_TORCHPROF_POLICY='slow' is ignored: allowed are active=, every=, " in caplog.text
    assert "OTEL_TORCHPROF_POLICY: ratio='2' is ignored" in caplog.text
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", "active=3,repeat=two,wait=1")
    schedule = otp.SpanPolicy.from_environment().schedule
    assert [schedule(step).name for step in range(4)] == ["NONE", "RECORD", "RECORD", "RECORD_AND_SAVE"]
    assert "OTEL_TORCHPROF_POLICY: repeat='two' is ignored" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("schedule", 3),
        ("every", 0),
        ("ratio", 0.0),
        ("keep", "none"),
        ("slow_quantile", 1),
        ("slow_limit", float("inf")),
        ("max_spans", 9),
        ("max_bytes", 1e6),
        ("short", -1),
        ("job_interval", None),
    ],
)
def test_bad_settings(option, value):
    """A bad value raises, naming the setting and the value."""
    with pytest.raises((TypeError, ValueError), match=f"{option} is .*must be"):
        otp.SpanPolicy(**{option: value})


def test_a_policy_of_another_kind():
    """What is no SpanPolicy is refused by name."""
    with pytest.raises(TypeError, match="policy is 'slow'"):
        otp.TorchInstrumentor().instrument(policy="slow", skip_dep_check=True)


def test_a_profile_is_exported_within_the_budget():
    """A profile's export keeps to the budget, unless the exporter takes whole traces; its spans are all there."""
    with otp.profile(use_cpu=True) as prof:
        for _ in range(300):
            with otp.record_function("label"):
                pass
    small, whole = InMemorySpanExporter(), Whole()
    assert prof.export(small, policy=otp.SpanPolicy(max_spans=100)) == len(small.get_finished_spans()) <= 100
    assert prof.export(whole, policy=otp.SpanPolicy(max_spans=100)) == len(prof.spans()) == 301
    assert {s.attributes.get("torch.recorded_spans", 301) for s in small.get_finished_spans()} == {301}


def test_opentelemetrys_limits_come_after_the_size_of_a_trace(monkeypatch):
    """No span that a profile exports has more attributes than OpenTelemetry's limit, those that say what was left out included."""
    with otp.profile(operators=False) as prof:
        for number in range(300):
            with otp.record_function(f"label {number % 2}"):
                pass
    exporter = InMemorySpanExporter()
    prof.export(exporter, policy=otp.SpanPolicy(max_spans=100))
    most = max(len(span.attributes) for span in exporter.get_finished_spans())
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    exporter.clear()
    prof.export(exporter, policy=otp.SpanPolicy(max_spans=100))
    found = [(len(span.attributes), span.dropped_attributes) for span in exporter.get_finished_spans()]
    assert max(count for count, _ in found) == 2
    assert max(count + dropped for count, dropped in found) == most > 2
