"""TorchInstrumentor: what it switches on, in which order things may come, and that it takes everything back."""

from __future__ import annotations

import enum
import logging
import threading

import pytest
import torch
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import NoOpTracerProvider, TraceState
from torch.optim.optimizer import _global_optimizer_post_hooks

import otel_torchprof as otp
from otel_torchprof._instrument.live_recording import LiveRecording
from otel_torchprof._native.recorder import SLICE_BYTES
from otel_torchprof._record.recording import Recording


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


class Bench:
    """A provider with a torch processor and an exporter in memory; instruments on entry, takes it back on exit."""

    def __init__(self, **options) -> None:
        provider_options = {
            key: options.pop(key) for key in ("sampler", "resource", "id_generator", "span_limits") if key in options
        }
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **provider_options)
        self.processor = otp.TorchSpanProcessor(self.exporter)
        self.provider.add_span_processor(self.processor)
        self.tracer = self.provider.get_tracer("test")
        self.options = options

    def __enter__(self):
        otp.TorchInstrumentor().instrument(tracer_provider=self.provider, **self.options)
        return self

    def __exit__(self, *_):
        otp.TorchInstrumentor().uninstrument()
        self.provider.shutdown()

    def spans(self):
        assert self.provider.force_flush()
        found = self.exporter.get_finished_spans()
        self.exporter.clear()
        return found

    def names(self):
        return [span.name for span in self.spans()]


@pytest.fixture
def model() -> Model:
    return Model()


def infer(model: Model) -> None:
    with torch.no_grad():
        model(torch.ones(3, 4))


def train(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def no_optimizers(monkeypatch) -> None:
    """As in a process in which nobody made an optimizer yet."""
    monkeypatch.setattr("otel_torchprof._record.step_marks._optimizer_classes", lambda: iter(()))


# ---- details ----


def test_steps_is_the_default(model):
    """A loop gives one span per step, linked to the one before, each in a trace of its own, with its phases below it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Bench() as bench:
        train(model, optimizer, 3)
    spans = bench.exporter.get_finished_spans()
    (job,) = (s.context.span_id for s in spans if s.name == "torch.job")
    (setup,) = (s.context.span_id for s in spans if s.name == "torch.setup")
    steps = [s for s in spans if s.name == "torch.step"]
    assert [s.attributes["torch.step.number"] for s in steps] == [0, 1, 2]
    assert len({s.context.trace_id for s in steps}) == 3
    assert [[link.context.span_id for link in s.links] for s in steps] == [
        [setup, job],
        [steps[0].context.span_id, job],
        [steps[1].context.span_id, job],
    ]
    below = [s.name for s in spans if s.parent is not None and s.parent.span_id == steps[1].context.span_id]
    assert below == [f"torch.phase.{name}" for name in ("optimizer", "forward", "backward", "optimizer")]


def test_phases_stand_for_steps_where_there_are_none(model, monkeypatch):
    """Inference: one span per call of the root module, inside a request or as a root."""
    no_optimizers(monkeypatch)
    with Bench() as bench:
        with bench.tracer.start_as_current_span("request") as request:
            infer(model)
        infer(model)
        inside, alone = bench.spans()
    assert (inside.name, inside.parent.span_id) == ("torch.phase.inference", request.get_span_context().span_id)
    assert (alone.name, alone.parent) == ("torch.phase.inference", None)


def test_modules_have_their_full_names(model, monkeypatch):
    """With detail "modules" each module is a span, named by its place in the outermost one, nested as they call."""
    no_optimizers(monkeypatch)
    with Bench(detail="modules") as bench:
        with otp.record_function("preprocess"):
            pass
        infer(model)
        spans = {span.name: span for span in bench.spans()}
    assert list(spans) == [
        "preprocess",
        "torch.phase.inference",
        "Model",
        "encoder",
        "encoder.0",
        "encoder.1",
        "head",
    ]
    ids = {name: span.context.span_id for name, span in spans.items()}
    parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
    assert parents["encoder.0"] == parents["encoder.1"] == ids["encoder"]
    assert parents["encoder"] == parents["head"] == ids["Model"]
    assert spans["encoder.1"].attributes["torch.module"] == "encoder.1"


def test_ops_has_operators_under_their_modules(model, monkeypatch):
    """With detail "ops" operators hang under the module that called them, with shapes where asked."""
    no_optimizers(monkeypatch)
    with Bench(detail="ops", record_shapes=True) as bench:
        infer(model)
        spans = bench.spans()
    head = next(span for span in spans if span.name == "head")
    linear = next(s for s in spans if s.name == "aten::linear" and s.parent.span_id == head.context.span_id)
    assert linear.attributes["torch.op.input_shapes"] == "[[3, 4], [2, 4], [2]]"


def test_off_does_nothing(model):
    """With detail "off" nothing is recorded and nothing is registered."""
    with Bench(detail="off") as bench:
        infer(model)
        assert bench.names() == []
    assert not _global_optimizer_post_hooks


def test_the_switch_in_the_environment_wins(model, monkeypatch):
    """OTEL_TORCHPROF_ENABLED=false switches off what the code switches on."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    with Bench(detail="modules") as bench:
        infer(model)
        assert bench.names() == []


def test_detail_comes_from_the_environment(model, monkeypatch, caplog):
    """OTEL_TORCHPROF_DETAIL sets the default; a value that is none is warned of and ignored."""
    no_optimizers(monkeypatch)
    monkeypatch.setenv("OTEL_TORCHPROF_DETAIL", "modules")
    with Bench() as bench:
        infer(model)
        assert "encoder.0" in bench.names()
    monkeypatch.setenv("OTEL_TORCHPROF_DETAIL", "everything")
    with caplog.at_level(logging.WARNING, "otel_torchprof"), Bench() as bench:
        infer(model)
        assert bench.names() == ["torch.phase.inference"]
    assert "OTEL_TORCHPROF_DETAIL='everything' is ignored" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"detail": "operators"},
            ValueError,
            "detail is 'operators'; it must be one of 'off', 'metrics', 'steps', 'modules', 'ops', 'frames'",
        ),
        ({"tracer_provider": NoOpTracerProvider()}, TypeError, "it must be a TracerProvider of opentelemetry-sdk"),
        ({"details": "ops"}, TypeError, "details"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    """A bad argument raises, naming itself; nothing is instrumented then."""
    instrumentor = otp.TorchInstrumentor()
    with pytest.raises(error, match=message):
        instrumentor.instrument(**options)
    assert not instrumentor.is_instrumented_by_opentelemetry


# ---- the provider's rules ----


class Asked(Sampler):
    """Remembers what it was asked about; says yes to steps with an even number."""

    def __init__(self) -> None:
        self.questions = []

    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None):  # noqa: PLR0917 - the SDK's
        self.questions.append((name, dict(attributes or {}), len(links or ())))
        even = (attributes or {}).get("torch.step.number", 0) % 2 == 0
        decision = Decision.RECORD_AND_SAMPLE if even else Decision.DROP
        return SamplingResult(decision, {"sampler.note": "even"}, TraceState([("vendor", "1")]))

    def get_description(self):
        return "even steps"


def test_the_sampler_decides_about_whole_steps(model):
    """The sampler is asked once per step; a step that it refuses has no span at all, and nobody links to it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = Asked()
    with Bench(sampler=sampler, detail="ops") as bench:
        train(model, optimizer, 4)
        spans = bench.spans()
    steps = {s.attributes["torch.step.number"]: s for s in spans if s.name == "torch.step"}
    assert set(steps) == {0, 2}
    assert [
        number for name, attributes, _ in sampler.questions if name == "torch.step" for number in attributes.values()
    ] == [0, 1, 2, 3]
    traces = {s.context.trace_id for s in spans if s.attributes.get("torch.step.number") is not None}
    assert traces == {s.context.trace_id for s in steps.values()}
    assert {s.context.trace_state.get("vendor") for s in spans if s.name != "torch.job"} == {"1"}
    assert all(s.attributes["sampler.note"] == "even" for s in steps.values())
    assert not {link.context.span_id for link in steps[2].links} & {s.context.span_id for s in steps.values()}


def test_an_unsampled_request_records_nothing(model, monkeypatch):
    """Under a span that is not sampled the recorder takes nothing: not one event, not one sum."""
    no_optimizers(monkeypatch)
    with Bench(sampler=ParentBased(ALWAYS_OFF), detail="ops") as bench:
        with bench.tracer.start_as_current_span("request"):
            infer(model)
        assert bench.names() == []
        assert bench.processor.health.recorded == 0
        assert list(bench.processor.key_averages()) == []


def test_resource_ids_scope_and_limits_are_the_providers(model, monkeypatch):
    """Spans carry the provider's resource, its ids, this package's scope, and no more attributes than its limits allow."""
    from opentelemetry.sdk.trace import SpanLimits

    class Ids(RandomIdGenerator):
        def generate_trace_id(self):
            return 77

    no_optimizers(monkeypatch)
    options = {
        "resource": Resource({"service.name": "shop"}),
        "id_generator": Ids(),
        "span_limits": SpanLimits(max_span_attributes=2),
    }
    with Bench(detail="ops", **options) as bench:
        infer(model)
        span = bench.spans()[-1]
    assert span.resource.attributes["service.name"] == "shop"
    assert span.context.trace_id == 77
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("otel_torchprof", otp.__version__)
    assert span.instrumentation_scope.schema_url.startswith("https://opentelemetry.io/schemas/")
    assert len(span.attributes) == 2


def test_a_provider_that_is_switched_off_is_respected(model, monkeypatch):
    """With OTEL_SDK_DISABLED the provider gives no tracer, so torch is not instrumented."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Bench(detail="modules") as bench:
        infer(model)
        assert bench.processor.health.sources["recording"] == "off: not instrumented"


# ---- steps ----


def test_the_programs_own_steps_win(model):
    """Once step() is called, nothing else ends steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Bench() as bench:
        for _ in range(2):
            train(model, optimizer, 2)
            otp.TorchInstrumentor().step()
        steps = [s.attributes["torch.step.number"] for s in bench.spans() if s.name == "torch.step"]
        state = bench.processor.health.sources["steps"]
    assert steps == [0, 1]
    assert state == "on: the program says where steps end"


def test_steps_inside_a_span_are_its_children(model):
    """A loop inside a span: the steps belong to its trace, and hold the operators."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Bench(detail="ops") as bench:
        with bench.tracer.start_as_current_span("epoch") as epoch:
            train(model, optimizer, 2)
        spans = bench.spans()
    steps = [s for s in spans if s.name == "torch.step" and s.attributes["torch.step.number"] < 2]
    context = epoch.get_span_context()
    assert {s.parent.span_id for s in steps} == {context.span_id}
    assert {s.context.trace_id for s in spans if s.name != "torch.setup"} == {context.trace_id}
    ids = {s.context.span_id for s in spans} | {context.span_id}
    assert all(s.parent.span_id in ids for s in spans if s.name.startswith("aten"))


def test_a_step_is_counted_once_however_many_spans_it_is_in(model):
    """With a span around each forward, a step is shown in that span too; in the averages it is one step, with its whole time."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Bench(detail="modules") as bench:
        for _ in range(3):
            with bench.tracer.start_as_current_span("forward"):
                loss = model(torch.ones(3, 4)).sum()
            loss.backward()
            optimizer.step()
    steps = [span for span in bench.exporter.get_finished_spans() if span.name == "torch.step"]
    averages = {average.key: average for average in bench.processor.key_averages()}
    whole = [span for span in steps if span.parent is None]
    assert (len(steps), len(whole)) == (6, 3)
    assert averages["torch.step"].count == 3
    total = sum(span.end_time - span.start_time for span in whole)
    assert averages["torch.step"].cpu_time_total == pytest.approx(total / 1000)
    assert averages["forward"].cpu_time_total > averages["torch.phase.forward"].cpu_time_total
    assert averages["torch.phase.forward"].cpu_time_total > averages["Model"].cpu_time_total


# ---- order and repetition ----


def test_uninstrument_takes_everything_back(model, monkeypatch):
    """After uninstrument torch has none of our hooks, our threads have ended, and calls record nothing."""
    no_optimizers(monkeypatch)
    threads = set(threading.enumerate())
    bench = Bench(detail="ops")
    with bench:
        infer(model)
        bench.spans()
        assert _global_optimizer_post_hooks
    assert not _global_optimizer_post_hooks
    assert set(threading.enumerate()) <= threads
    found = bench.exporter.get_finished_spans()  # operators whose root ended with the recording
    infer(model)
    assert bench.exporter.get_finished_spans() == found


def test_it_can_be_switched_on_again(model, monkeypatch):
    """A processor outlives an uninstrument: after the next instrument it goes on, with sums over both segments."""
    no_optimizers(monkeypatch)
    bench = Bench(detail="modules")
    instrumentor = otp.TorchInstrumentor()
    for _ in range(2):
        instrumentor.instrument(tracer_provider=bench.provider, detail="modules")
        infer(model)
        instrumentor.uninstrument()
    counts = {average.key: average.count for average in bench.processor.key_averages()}
    assert counts["Model"] == 2
    bench.provider.shutdown()


def test_the_providers_shutdown_stops_it(model, monkeypatch):
    """When the provider shuts down, what was recorded is sent and torch is left alone."""
    no_optimizers(monkeypatch)
    bench = Bench(detail="modules")
    with bench:
        infer(model)
        bench.provider.shutdown()
        assert not _global_optimizer_post_hooks
        assert bench.processor.health.exporters["0 InMemorySpanExporter"].exported_spans == 6


def test_two_processors_are_warned_of(model, monkeypatch, caplog):
    """A second TorchSpanProcessor on a provider gets nothing, which is said."""
    bench = Bench()
    bench.provider.add_span_processor(otp.TorchSpanProcessor())
    with caplog.at_level(logging.WARNING, "otel_torchprof"), bench:
        pass
    assert "has 2 TorchSpanProcessors; the first gets torch's spans" in caplog.text


def test_labels_of_an_exception_and_a_module_that_raises(monkeypatch):
    """A module that raises is a span with an error, and the exception reaches its caller."""
    no_optimizers(monkeypatch)

    class Broken(torch.nn.Module):
        def forward(self, _):
            raise ArithmeticError("no")

    with Bench(detail="modules") as bench:
        with pytest.raises(ArithmeticError):
            Broken()(1)
        phase, span = bench.spans()
    for found, name in ((phase, "torch.phase.forward"), (span, "Broken")):
        assert (found.name, found.status.is_ok, found.attributes["error.type"]) == (name, False, "ArithmeticError")


def test_attributes_of_steps_whose_keys_are_no_plain_text():
    """Each step of a drain has them, by the texts of the keys."""

    class Key(str, enum.Enum):
        LOSS = "loss"

    with Bench() as bench:
        for number in range(4):
            otp.TorchInstrumentor().step({Key.LOSS: 0.5 + number, 7: number})
        steps = [span.attributes for span in bench.spans() if span.name == "torch.step"]
    assert [(step[str(Key.LOSS)], step["7"]) for step in steps] == [(0.5 + number, number) for number in range(4)]


@pytest.fixture
def taken(monkeypatch):
    """The bytes that drains were to take at most."""
    limits, drain = [], Recording.drain
    monkeypatch.setattr(Recording, "drain", lambda recording, most: limits.append(most) or drain(recording, most))
    return limits


def test_the_first_drains_are_due_early(taken, monkeypatch):
    """The rule that ends steps is learned from the first drains: they take all there is, of which ever more is waited for, to a limit."""
    buffered, due = 0, []
    monkeypatch.setattr(LiveRecording, "bytes_buffered", property(lambda _recording: buffered))
    with Bench(detail="modules") as bench:
        recording = bench.processor._attached
        for _ in range(8):
            for exponent in range(10, 30):
                buffered = 1 << exponent
                if recording.is_due:
                    break
            due.append(buffered)
            bench.provider.force_flush()
    assert due == [min(SLICE_BYTES // 32 << drain, SLICE_BYTES) for drain in range(8)]
    assert set(taken) == {SLICE_BYTES}


@pytest.mark.parametrize("detail", ["ops", "metrics"])
def test_a_drain_takes_a_quarter_of_a_small_memory_limit(taken, monkeypatch, detail):
    """Whatever becomes of the events: a drain of all that may wait would end when the memory is full again."""
    monkeypatch.setenv("OTEL_TORCHPROF_MEMORY_LIMIT", "4M")
    with Bench(detail=detail) as bench:
        for _ in range(4):
            bench.provider.force_flush()
    assert max(taken) == 1 << 20


def test_a_flush_takes_all_slices_that_wait_to_be_told_their_step(monkeypatch):
    """A pass that might become a step holds up what follows, slice by slice; a flush takes all of it."""
    monkeypatch.setattr("otel_torchprof._export.draining.SLICE_BYTES", 1)
    with Bench(detail="modules") as bench:
        Model()(torch.ones(1, 4))
        for _ in range(3000):
            with otp.record_function("mine"):
                pass
        assert bench.provider.force_flush()
        assert bench.processor.health.recorded >= 3000
