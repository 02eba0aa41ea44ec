"""The recipes for serving frameworks in docs/services.md: each request's trace has its stay in a batch, which links to it."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from page_blocks import blocks_of  # noqa: E402

import otel_torchprof as otp  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "services.md"
BATCH, QUEUE, STAY = "torch.batch", "torch.request.queue", "torch.request.batch"
CLIENTS = 5
VALUES = [0.5] * 4


@pytest.fixture
def service(monkeypatch):
    """A provider and torch's spans; torch is instrumented once the recipe asks for it, as if nobody had made an optimizer yet."""
    monkeypatch.setattr("otel_torchprof._record.step_marks._optimizer_classes", lambda: iter(()))
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(exporter))
    yield SimpleNamespace(exporter=exporter, provider=provider, tracer=provider.get_tracer("service"))
    otp.TorchInstrumentor().uninstrument()
    provider.shutdown()


class Here:
    """A function that is pickled without what it calls: Ray Serve pickles a class when it decorates it."""

    def __init__(self, call=None):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)

    def __reduce__(self):
        return Here, ()


def recipe(package, service, monkeypatch):
    """The names that the page's code for a package defines, in a module of its own."""
    (block,) = [block for block in blocks_of(PAGE) if block.reason and f"import {package}" in block.text]
    module = ModuleType(f"recipe_{package}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # pickle looks for its classes there
    module.__dict__.update(
        otp=otp,
        torch=torch,
        trace=SimpleNamespace(get_tracer=Here(service.provider.get_tracer)),
        provider=service.provider,
        FastAPIInstrumentor=SimpleNamespace(instrument_app=lambda *_, **__: None),
        instrument=Here(lambda: otp.TorchInstrumentor().instrument(tracer_provider=service.provider, detail="modules")),
        make_model=Here(lambda: torch.nn.Linear(len(VALUES), 2).eval()),
    )
    exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - the page's own
    return module


def check(service, parents, *, queues):
    """Each of these spans has one stay below it; batches link to all of them, and have the model below them."""
    assert service.provider.force_flush()
    spans = service.exporter.get_finished_spans()
    batches = {span.context.span_id: span for span in spans if span.name == BATCH}
    stays = {span.parent.span_id: span for span in spans if span.name == STAY}
    assert stays.keys() == {context.span_id for context in parents}
    assert len([span for span in spans if span.name == QUEUE]) == queues
    assert {link.context.span_id for batch in batches.values() for link in batch.links} == stays.keys()
    assert {link.context.span_id for stay in stays.values() for link in stay.links} == batches.keys()
    assert {span.parent.span_id for span in spans if span.name == "torch.phase.inference"} == batches.keys()
    assert all(batch.parent is None or batch.attributes["torch.batch.size"] == 1 for batch in batches.values())
    return list(batches.values())


@pytest.mark.filterwarnings("ignore")
def test_litserve(service, monkeypatch):
    """A ticket that the server makes with a request reaches the worker's process in it."""
    pytest.importorskip("litserve", reason="LitServe is not installed")
    module = recipe("litserve", service, monkeypatch)
    requests, parents = [], []
    for _ in range(CLIENTS):
        with service.tracer.start_as_current_span("POST /predict") as span:
            requests.append(pickle.dumps(module.Values(values=VALUES)))
        parents.append(span.get_span_context())
    api = module.Scorer(max_batch_size=CLIENTS)
    api.setup("cpu")
    scores = api.predict(api.batch([api.decode_request(pickle.loads(each)) for each in requests]))  # noqa: S301 - our own
    assert len(scores) == CLIENTS
    (batch,) = check(service, parents, queues=CLIENTS)
    assert batch.attributes["torch.batch.size"] == CLIENTS


@pytest.mark.filterwarnings("ignore")
def test_ray_serve(service, monkeypatch):
    """Calls that Ray Serve's decorator gathers are one batch, whose trace is not that of the call which began its task."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    replica = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=100))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: replica)
    module = recipe("serve", service, monkeypatch)
    parents = []

    class Request:
        def __init__(self, number):
            self.headers = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}

        async def json(self):
            parents.append(trace.get_current_span().get_span_context())
            return VALUES

    async def serve_all():
        scorer = module.Scorer.func_or_class()
        return [await asyncio.gather(*(scorer(Request(number)) for number in range(CLIENTS))) for _ in range(2)]

    assert [len(scores) for scores in asyncio.run(serve_all())] == [CLIENTS] * 2
    assert {context.trace_id for context in parents} == set(range(1, CLIENTS + 1))
    check(service, parents, queues=2 * CLIENTS)


def test_triton(service, monkeypatch):
    """Requests to a model of Triton's Python backend, of which one has no trace."""
    fake = ModuleType("triton_python_backend_utils")
    fake.Tensor = lambda name, values: SimpleNamespace(name=lambda: name, as_numpy=lambda: values)
    fake.InferenceResponse = lambda tensors: SimpleNamespace(output_tensors=lambda: tensors)
    fake.get_input_tensor_by_name = lambda request, name: {each.name(): each for each in request.inputs()}[name]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    module = recipe(fake.__name__, service, monkeypatch)

    def request(number):
        tensor = fake.Tensor("VALUES", torch.full((number, len(VALUES)), 0.5).numpy())
        carrier = json.dumps({"traceparent": f"00-{number:032x}-{number:016x}-01"}) if number > 1 else None
        return SimpleNamespace(inputs=lambda: [tensor], trace=lambda: SimpleNamespace(get_context=lambda: carrier))

    model = module.TritonPythonModel()
    model.initialize({})
    responses = model.execute([request(number) for number in (1, 2, 3)])
    shapes = [response.output_tensors()[0].as_numpy().shape for response in responses]
    assert shapes == [(1, 2), (2, 2), (3, 2)]
    (batch,) = check(service, [SimpleNamespace(span_id=2), SimpleNamespace(span_id=3)], queues=0)
    assert batch.attributes["torch.batch.size"] == 3
