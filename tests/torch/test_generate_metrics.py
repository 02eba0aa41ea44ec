"""Metrics of calls of transformers' generate, as OpenTelemetry's conventions for generative AI have them."""

from __future__ import annotations

import pytest
from providers import instrumented

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("transformers")

from generating import decoder, prompts  # noqa: E402
from instrumented import Collecting, Instrumented  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF  # noqa: E402
from opentelemetry.trace import StatusCode  # noqa: E402
from torch_metrics import data_points  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._instrument import default_processor  # noqa: E402
from otel_torchprof._instrument import operator_metrics as metrics  # noqa: E402

ABOUT = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "huggingface.transformers",
    "gen_ai.request.model": "LlamaForCausalLM",
}
SERVER = ("gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token")
USAGE = "gen_ai.client.token.usage"


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def service(reader):
    found = Instrumented()
    with found.on("steps", meter_provider=MeterProvider([reader], shutdown_on_exit=False)):
        yield found


def generate(model, tokens=4, **options):
    return model.generate(prompts(2, 3), max_new_tokens=tokens, **options)


def test_a_call_is_a_request_to_a_server(reader, service, model):
    """Its duration, the time to its first token and per further token are in the conventions' buckets, its tokens by their type."""
    generate(model)
    generate(model)
    expected = (metrics.DURATION_BUCKETS, metrics.FIRST_TOKEN_BUCKETS, metrics.PER_TOKEN_BUCKETS)
    for name, bounds in zip(SERVER, expected, strict=True):
        (point,) = data_points(reader, name)
        assert (dict(point.attributes), point.count, tuple(point.explicit_bounds)) == (ABOUT, 2, bounds)
    tokens = {point.attributes["gen_ai.token.type"]: point for point in data_points(reader, USAGE)}
    assert {kind: point.sum for kind, point in tokens.items()} == {"input": 12, "output": 16}
    assert tuple(tokens["input"].explicit_bounds) == metrics.TOKEN_BUCKETS


def test_their_scope(reader, service, model):
    """They have a scope of their own, with the schema of these conventions, and descriptions and units of them."""
    generate(model)
    (resource,) = reader.get_metrics_data().resource_metrics
    (found,) = [scope for scope in resource.scope_metrics if scope.scope.name == "otel_torchprof.generate"]
    assert found.scope.schema_url == "https://opentelemetry.io/schemas/gen-ai/1.42.0"
    assert {metric.name: metric.unit for metric in found.metrics} == {**dict.fromkeys(SERVER, "s"), USAGE: "{token}"}


def test_a_call_that_fails(reader, service, model):
    """It has a duration, by the class of the exception, and nothing else."""
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, tokens=0)
    (point,) = data_points(reader, SERVER[0])
    assert dict(point.attributes) == {**ABOUT, "error.type": "ValueError"}
    assert [data_points(reader, name) for name in (*SERVER[1:], USAGE)] == [[], [], []]


def test_a_generator_that_is_closed(reader, service, model):
    """A call that a GeneratorExit leaves has not failed: neither its span nor its metric says so."""

    def leave(*_):
        raise GeneratorExit

    hook = model.model.norm.register_forward_hook(leave)
    with pytest.raises(GeneratorExit):
        generate(model)
    hook.remove()
    (point,) = data_points(reader, SERVER[0])
    (span,) = [each for each in service.spans() if each.name == "text_completion LlamaForCausalLM"]
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in {**point.attributes, **span.attributes}


def test_tokens_that_somebody_else_counts(reader, service, model):
    """Where another instrumentation has a span for the call, it counts its tokens; that of an agent is none for a call, and an assistant's are no request's."""
    with service.tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
        generate(model)
    assert (len(data_points(reader, SERVER[0])), data_points(reader, USAGE)) == (1, [])
    with service.tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
        generate(model)
    assert sorted(point.sum for point in data_points(reader, USAGE)) == [6, 8]
    model.generate(prompts(), max_new_tokens=4, assistant_model=decoder())
    (point,) = data_points(reader, SERVER[0])
    assert point.count == 3


def test_an_unsampled_call(reader, model):
    """Metrics count it; what is recorded in its place is nothing."""
    service = Instrumented(sampler=ALWAYS_OFF)
    with service.on("steps", meter_provider=MeterProvider([reader], shutdown_on_exit=False)):
        with service.tracer.start_as_current_span("request"):
            generate(model)
        assert service.spans() == []
    assert data_points(reader, SERVER[0])[0].count == 1


def test_exemplars_point_to_the_request(reader, service, model):
    """A duration's exemplar is in the trace of the application's span."""
    with service.tracer.start_as_current_span("request") as request:
        generate(model)
    (point,) = data_points(reader, SERVER[0])
    assert [exemplar.trace_id for exemplar in point.exemplars] == [request.get_span_context().trace_id]


def test_a_processor_that_comes_later(reader, model, monkeypatch):
    """Requests are counted once, also where another processor gets the spans from then on."""
    monkeypatch.setattr(default_processor, "exporters_from_environment", list)
    provider, meters = TracerProvider(shutdown_on_exit=False), MeterProvider([reader], shutdown_on_exit=False)
    with instrumented(provider, meter_provider=meters, detail="steps"):
        provider.add_span_processor(otp.TorchSpanProcessor(Collecting()))
        assert provider.force_flush()
        generate(model)
    (point,) = data_points(reader, SERVER[0])
    assert point.count == 1


def test_a_listener_that_fails(model, monkeypatch):
    """What the SDK raises costs the program nothing."""

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(metrics.GenerationMetrics, "record", fail)
    service = Instrumented()
    with service.on("steps", meter_provider=MeterProvider(shutdown_on_exit=False)):
        generate(model)
        assert any(span.name == "text_completion LlamaForCausalLM" for span in service.spans())


def test_buckets_are_the_conventions():
    """The upper bounds that the conventions recommend at the version of the schema."""
    assert metrics.TOKEN_BUCKETS[:3] == (1, 4, 16)
    assert metrics.TOKEN_BUCKETS[-1] == 67_108_864
    assert metrics.DURATION_BUCKETS[-1] == 81.92
    assert [
        len(each) for each in (metrics.DURATION_BUCKETS, metrics.FIRST_TOKEN_BUCKETS, metrics.PER_TOKEN_BUCKETS)
    ] == [
        14,
        16,
        13,
    ]
