"""Of steps that ``every`` or a schedule leaves out no operators are recorded, once the loop goes round the same way; nothing else is lost."""

from __future__ import annotations

import collections
import contextlib
import os
from types import SimpleNamespace

import preloaded
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from providers import new_provider  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._columns.phases import Part, Segment  # noqa: E402
from otel_torchprof._instrument import foresight  # noqa: E402
from otel_torchprof._instrument.foresight import Foresight  # noqa: E402
from otel_torchprof._model.step_rules import Boundary, Token  # noqa: E402
from otel_torchprof._native import python_sources  # noqa: E402

EVERY = 5
STEPS = 30


class Job:
    """A small model that is trained, instrumented, and drained at every other step."""

    def __init__(self, **policy):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.exporter = InMemorySpanExporter()
        self.processor = otp.TorchSpanProcessor(self.exporter)
        self.provider = new_provider(self.processor)
        self.policy = otp.SpanPolicy(**policy)
        self.done = 0

    def __enter__(self):
        otp.TorchInstrumentor().instrument(tracer_provider=self.provider, detail="ops", policy=self.policy)
        return self

    def __exit__(self, *_):
        otp.TorchInstrumentor().uninstrument()
        self.provider.shutdown()

    def backward(self):
        self.model(torch.ones(3, 4)).sum().backward()

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def train(self, step=None, steps=STEPS):
        for _ in range(steps):
            (step or self.step)()
            self.done += 1
            if self.done % 2:
                assert self.processor.force_flush(20_000)

    def spans(self):
        """How often there is a span of each name in each step, and elsewhere (-1); not of collections, which come when they come."""
        finished = [span for span in self.exporter.get_finished_spans() if span.name != "torch.phase.gc"]
        numbers = {s.context.trace_id: s.attributes["torch.step.number"] for s in finished if s.name == "torch.step"}
        return collections.Counter((numbers.get(span.context.trace_id, -1), span.name) for span in finished)

    @property
    def left_out(self):
        """Events that were recorded, and made no span."""
        return self.processor.health.spans["filtered"]


def plain(job):
    job.train()


def evaluated(job):
    job.train()
    with torch.no_grad():
        job.model.eval()
        job.model(torch.ones(7, 4))
    job.model.train()
    job.train()


def accumulated(job):
    def step():
        job.optimizer.zero_grad()
        for _ in range(3):
            job.backward()
        job.optimizer.step()

    job.train(step)


def with_batches(job):
    loader = torch.utils.data.DataLoader(torch.ones(3 * STEPS, 4), batch_size=3)
    for batch in loader:
        job.train(lambda batch=batch: (job.model(batch).sum().backward(), job.optimizer.step()), 1)


def other_optimizer(job):
    job.train()
    job.optimizer = torch.optim.Adam(job.model.parameters())
    job.train()


def skipped(job):
    """One batch makes no step, as where its loss is not finite."""
    job.train()
    job.optimizer.zero_grad()
    job.backward()
    job.train()


def failed(job):
    """One step is left by an exception before its backward pass, and begun anew."""
    job.train()
    job.optimizer.zero_grad()
    with contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    job.train()


def ends_with_operators(job):
    job.train()
    with otp.record_function("after the loop"):
        torch.ones(3).cumsum(0)


@pytest.mark.parametrize(
    "program", [plain, evaluated, accumulated, with_batches, other_optimizer, skipped, failed, ends_with_operators]
)
def test_the_same_spans(program, monkeypatch):
    """Each program has the spans that it has where all of its events are recorded: of every step one, of every fifth all."""
    with Job(every=EVERY) as job:
        program(job)
    monkeypatch.setattr(Foresight, "_is_alike", lambda _foresight: False)
    with Job(every=EVERY) as whole:
        program(whole)
    assert job.spans() == whole.spans()
    assert job.left_out <= whole.left_out


def one_of_five(step):
    """As ``schedule(wait=4, warmup=0, active=1)``, but for what it does when it is asked about step 20."""
    if step == 4 * EVERY:
        raise RuntimeError("no step 20")
    return otp.ProfilerAction.RECORD_AND_SAVE if step % EVERY == EVERY - 1 else otp.ProfilerAction.NONE


@pytest.mark.parametrize("program", [plain, skipped, accumulated])
def test_the_same_spans_by_a_schedule(program, monkeypatch, caplog):
    """A schedule leaves out what it leaves out where all events are recorded; a step about which it fails is recorded."""
    with Job(schedule=one_of_five) as job:
        program(job)
    monkeypatch.setattr(Foresight, "_is_alike", lambda _foresight: False)
    with Job(schedule=one_of_five) as whole:
        program(whole)
    assert job.spans() == whole.spans()
    assert job.spans()[4 * EVERY, "aten::addmm"]
    assert "no step 20" in caplog.text


@pytest.mark.parametrize("policy", [{"every": EVERY}, {"schedule": otp.schedule(wait=3, warmup=1, active=1)}])
def test_operators_of_other_steps_are_not_recorded(policy):
    """Of a loop that goes round the same way less than half of all events are recorded."""
    with Job() as whole:
        plain(whole)
    with Job(**policy) as job:
        plain(job)
    assert job.left_out + sum(job.spans().values()) < sum(whole.spans().values()) / 2


def test_a_share_of_the_steps():
    """Which steps are traced in full follows from the trace ids that they have, and the others are hardly recorded."""
    with Job(ratio=0.3) as job:
        job.train(steps=3 * STEPS)
    finished = job.exporter.get_finished_spans()
    operators = {span.context.trace_id for span in finished if span.name == "aten::addmm"}
    steps = {span.context.trace_id for span in finished if span.name == "torch.step"}
    assert len(steps) > 2 * STEPS
    assert operators & steps == {trace for trace in steps if trace & (1 << 64) - 1 < 0.3 * (1 << 64)}
    assert job.left_out < 50 * STEPS


def test_pauses_do_not_keep_the_policy_from_being_asked(monkeypatch):
    """It is asked about all the next steps, however long the drain pauses for the program; of a slow schedule about some."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(foresight, "time", clock)

    def pass_time(seconds, answer=True):
        clock.now += seconds
        return answer

    monkeypatch.setattr(foresight, "give_way", lambda: pass_time(1.0))
    asked = []
    for seconds in (0.0, 0.001):
        foreseeing = Foresight(SimpleNamespace(consumer=1), lambda _number, seconds=seconds: pass_time(seconds))
        foreseeing._ask(1)
        asked.append(len(foreseeing._selected))
    assert asked[0] >= foresight._AHEAD > 20 * asked[1] > 0


def test_steps_of_which_the_policy_was_not_asked_are_recorded(monkeypatch):
    """Of more steps between two drains than it was asked for beforehand, the later ones have their operators, which make no spans."""
    monkeypatch.setattr(foresight, "_AHEAD", 64)
    recorded = []
    for steps in (60, 200):
        with Job(every=1_000_000) as job:
            plain(job)
            assert job.processor.force_flush(20_000)
            before = job.left_out
            for _ in range(steps):
                job.step()
            assert job.processor.force_flush(20_000)
            recorded.append(job.left_out - before)
    assert recorded[1] > 3 * recorded[0]


def test_what_is_in_a_span_of_the_application_is_recorded():
    """Steps below a span of the application are recorded as before: nothing is foreseen there."""
    with Job(every=EVERY) as job, job.provider.get_tracer("app").start_as_current_span("job"):
        plain(job)
        assert python_sources.foreseen(1) is None
    assert job.left_out > 20 * STEPS


@pytest.mark.parametrize("more", [0, 1, 3])
def test_the_next_recording_has_everything(more):
    """What was foreseen for one recording leaves nothing out of the next one, wherever in a step the first one stopped."""
    with Job(every=1_000_000) as job:
        plain(job)
        job.train(steps=more)
    with Job() as following:
        following.train(steps=20)
    of_step = collections.Counter(number for (number, _), count in following.spans().items() for _ in range(count))
    assert min(of_step[number] for number in range(18)) > 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_foresees_nothing():
    """In a child of a loop whose steps are foreseen none is, and its phases find that out without harm."""
    with Job(every=1_000_000) as job:
        plain(job)
        child = os.fork()
        if child == 0:
            job.optimizer.zero_grad()
            os._exit(python_sources.foreseen(1) is not None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LEFT_OUT = """
import os, sys, threading
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import otel_torchprof as otp
from otel_torchprof._native import python_sources

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = InMemorySpanExporter()
processor = otp.TorchSpanProcessor(exporter)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(processor)
otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", policy=otp.SpanPolicy(every=1_000_000))

def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()

for _ in range(30):
    step()
    assert processor.force_flush(20_000)
    step()
assert python_sources.foreseen(1)
assert processor.force_flush(20_000)
exporter.clear()
optimizer.zero_grad()  # in the middle of a step that is left out
torch.ones(3).cumsum(0)

def names():
    assert processor.force_flush(20_000)
    return [span.name for span in exporter.get_finished_spans()]
"""


def _says(program):
    """What a program in a process of its own says, in which there was never a span of an application."""
    done = preloaded.run(LEFT_OUT + program, environment=dict(os.environ), has_package=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SPANS = {
    "of the provider": "provider.get_tracer('app').start_as_current_span('request')",
    "of another provider": "TracerProvider(shutdown_on_exit=False).get_tracer('app').start_as_current_span('request')",
    "of another process": "trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1 << 100, 1 << 50, True, trace.TraceFlags(1))))",
}


@pytest.mark.parametrize("span", SPANS)
def test_a_span_that_is_current_in_a_step_that_is_left_out_has_its_operators(span):
    """Torch is not asked for operators there, until a span is current: what is in that is recorded, on any thread, whoever began it."""
    assert _says(f"""
from opentelemetry import context, trace

def serve():
    with {SPANS[span]}:
        torch.ones(3).cumprod(0)

assert "aten::cumsum" not in names()
assert "attach" in vars(context._RUNTIME_CONTEXT)
thread = threading.Thread(target=serve)
thread.start()
thread.join()
assert "attach" not in vars(context._RUNTIME_CONTEXT)
for _ in range(4):
    step()
print(names().count("aten::cumprod"))
""") == ["1"]


def test_a_profile_in_a_step_that_is_left_out_has_its_operators():
    """What one recording leaves out another one has: of the same thread, and of all threads."""
    assert _says("""
with otp.profile() as prof:
    torch.ones(3).cumprod(0)
with torch.profiler.profile() as kineto:
    torch.ones(3).cumprod(0)
for events in (prof.key_averages(), kineto.key_averages()):
    print(sum(event.count for event in events if event.key == "aten::cumprod"))
assert "aten::cumsum" not in names()
""") == ["1", "1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_is_forked_in_a_step_that_is_left_out_records():
    """The child's first operators are there, and its parent's next steps are as they were."""
    assert _says("""
child = os.fork()
torch.ones(3).cumprod(0)
if child == 0:
    assert processor.force_flush(20_000)
    print("child", processor.health.recorded > 1, flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(4):
    step()
print("parent", names().count("aten::cumprod"), names().count("torch.step"))
""") == ["child", "True", "parent", "0", "4"]


def test_a_step_that_was_lost_before_it_was_drained(monkeypatch):
    """If the first step that was counted is never drained, nothing would ever be left out: the steps are counted anew."""
    calls, first = [], 5
    monkeypatch.setattr(python_sources, "foreseen", lambda _consumer: first and (first, first, 1))
    monkeypatch.setattr(python_sources, "forget_foresight", lambda _consumer: calls.append("forget"))
    monkeypatch.setattr(python_sources, "foresee", lambda *_arguments: calls.append("foresee"))
    monkeypatch.setattr(
        python_sources, "select_foreseen", lambda _consumer, count, selected: calls.append((count, *selected[:EVERY]))
    )
    foreseeing = Foresight(SimpleNamespace(consumer=1), lambda number: number % EVERY == 0)

    def drain(event, number):
        foreseeing.take([Token(event, Part.BACKWARD, 7, event * 10, event * 10 + 5, 1, 0)])
        foreseeing.step_began(Boundary(event * 10, 1, event, Segment.STEP), number)
        foreseeing.look(event * 10 + 9)

    for number, event in enumerate((1, 2, 3, 4, 9)):
        drain(event, number)
    assert calls == ["forget", "forget", "forget", "forget"]
    first = None
    drain(10, 5)
    first = 11
    drain(11, 6)
    drain(12, 7)
    assert calls[4:] == ["foresee", (1, 0, 0, 0, 0, 1), (1, 0, 0, 0, 0, 1)]


@pytest.mark.parametrize("is_alike", [True, False])
def test_it_is_near_until_steps_are_counted(is_alike, monkeypatch):
    """Spans wait for the first step that is counted, and not for a loop that goes round in another way each time."""
    calls = []
    monkeypatch.setattr(python_sources, "foreseen", lambda _consumer: (6, 6, 1) if "foresee" in calls else None)
    monkeypatch.setattr(python_sources, "forget_foresight", lambda _consumer: None)
    monkeypatch.setattr(python_sources, "foresee", lambda *_arguments: calls.append("foresee"))
    monkeypatch.setattr(python_sources, "select_foreseen", lambda *_arguments: None)
    foreseeing, near = Foresight(SimpleNamespace(consumer=1), lambda number: number % EVERY == 0), []
    for number, event in enumerate(range(1, 21)):
        near.append(foreseeing.is_near)
        foreseeing.take([Token(event, Part.BACKWARD, 7 if is_alike else event, event * 10, event * 10 + 5, 1, 0)])
        foreseeing.step_began(Boundary(event * 10, 1, event, Segment.STEP), number)
        foreseeing.look(event * 10 + 9)
    assert near.count(True) == (6 if is_alike else 16)
    assert near == sorted(near, reverse=True)
