"""Calls of transformers' generate: one span each, whatever runs in it below it, with what the call was asked for and gave."""

from __future__ import annotations

import contextvars
import inspect
import threading
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
transformers = pytest.importorskip("transformers")

from generating import DECODE, GENERATE, PREFILL, Letters, below, calls, decoder, named, phases, prompts, translator  # noqa: E402
from instrumented import Collecting, Instrumented, instrumented  # noqa: E402

import otel_torchprof as otp  # noqa: E402

OWN = ("torch.generate.batch_size", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")


@pytest.fixture(scope="module")
def model():
    return decoder()


def spans_of(service):
    """Torch's spans but collections of garbage, which may come at any time, also where no call is."""
    return [span for span in service.spans() if span.name != "torch.phase.gc"]


def generate(model, tokens=4, inputs=None, **options):
    """So many tokens for each of some prompts."""
    return model.generate(prompts() if inputs is None else inputs, max_new_tokens=tokens, **options)


@pytest.mark.parametrize("detail", ["steps", "modules", "ops"])
def test_one_trace_per_call(model, detail):
    """Without a span of the application each call is a trace: the prefill, a phase for each further token, and all operators below."""
    with instrumented(detail=detail) as service:
        generate(model)
        generate(model)
        spans = spans_of(service)
    assert len({span.context.trace_id for span in spans}) == 2
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == [GENERATE] * 2
    for root in roots:
        found = phases(spans, root)
        assert [span.name for span in found] == [PREFILL, *[DECODE] * 3]
        assert {span.attributes["torch.module"] for span in (root, *found)} == {"LlamaForCausalLM"}
    assert any(span.name == "model.layers.1.mlp" for span in spans) is (detail != "steps")
    assert any(span.name == "aten::argmax" for span in spans) is (detail == "ops")


def test_inside_a_request(model):
    """A call joins the trace of the application's span that is current, as its child."""
    with instrumented(detail="modules") as service:
        with service.tracer.start_as_current_span("request") as request:
            generate(model)
        spans = spans_of(service)
    assert {span.context.trace_id for span in spans} == {request.get_span_context().trace_id}
    assert [span.name for span in below(spans, request)] == [GENERATE]


def test_with_calls_of_functions(model):
    """With `detail="frames"` the functions of transformers are below the call, and none that we call ourselves."""
    service = Instrumented()
    with service.on("frames", policy=otp.SpanPolicy(max_spans=50_000, max_bytes=50_000_000)):
        generate(model)
        spans = spans_of(service)
    (root,) = calls(spans)
    functions = [span.attributes["code.function.name"] for span in below(spans, root) if "(" in span.name]
    assert functions == ["torch.utils._contextlib.context_decorator.<locals>.decorate_context"]
    assert any(span.name.startswith("transformers/generation/utils.py") for span in spans)
    assert len(named(spans, DECODE)) == 3


@pytest.fixture
def nothing_is_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()  # or roots would not be searched any more


@pytest.mark.usefixtures("nothing_is_compiled")
def test_a_compiled_model(model):
    """Calls of a compiled model are phases too; the graph is one, as it is without a recording."""
    asked = transformers.CompileConfig(backend="eager", fullgraph=True)
    asked._compile_all_devices = True
    with instrumented(detail="steps") as service:
        for _ in range(2):
            generate(model, cache_implementation="static", compile_config=asked)
        spans = spans_of(service)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for root in calls(spans):
        assert [span.name for span in phases(spans, root) if span.name != "torch.phase.compile"] == [
            PREFILL,
            *[DECODE] * 3,
        ]


def test_a_stream_has_them_too(model):
    """`stream`, and so `otel-torchprof run`, records calls as the instrumentation does, beside that too."""
    streamed = Collecting()
    with instrumented(detail="steps") as service, otp.stream(streamed, detail="modules"):
        generate(model)
        spans = spans_of(service)
    for found in (spans, streamed.spans):
        (root,) = calls(found)
        assert root.attributes["gen_ai.usage.output_tokens"] == 4
        assert [span.name for span in phases(found, root)] == [PREFILL, *[DECODE] * 3]


@pytest.mark.parametrize("is_request", [False, True], ids=["alone", "in a request"])
def test_a_call_over_many_drains(model, is_request):
    """A call that lasts for many drains is one trace, and its span has its attributes."""
    inputs = prompts()
    with instrumented(detail="modules", drained_every=1) as service:
        with service.tracer.start_as_current_span("request") if is_request else nullcontext():
            generate(model, tokens=20, inputs=inputs)
        spans = spans_of(service)
    (root,) = calls(spans)
    assert len({span.context.trace_id for span in spans}) == 1
    assert [span.name for span in phases(spans, root)] == [PREFILL, *[DECODE] * 19]
    assert root.attributes["gen_ai.usage.output_tokens"] == 20
    assert root.attributes["torch.generate.time_per_output_token"] > 0


def test_generate_is_as_it_was():
    """Results, the signature and exceptions are those of transformers; afterwards the function is."""
    before = vars(transformers.GenerationMixin)["generate"]
    model = decoder()
    plain, signature = generate(model), inspect.signature(model.generate)
    with instrumented() as service:
        assert vars(transformers.GenerationMixin)["generate"] is not before
        assert inspect.signature(model.generate) == signature
        assert torch.equal(generate(model), plain)
        with pytest.raises(ValueError, match="max_new_tokens"):
            generate(model, tokens=0)
        failed = calls(service.spans())[-1]
    assert vars(transformers.GenerationMixin)["generate"] is before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert failed.attributes["error.type"] == "ValueError"
    assert "gen_ai.usage.output_tokens" not in failed.attributes


ASKED = {
    "one prompt": ({}, (1, 5, 4)),
    "prompts": ({"inputs": prompts(3, 2)}, (3, 6, 12)),
    "by name": ({"inputs": None, "input_ids": prompts(2, 3)}, (2, 6, 8)),
    "choices": ({"do_sample": True, "num_return_sequences": 2}, (1, 5, 8)),
    "beams": ({"num_beams": 3, "num_return_sequences": 2}, (1, 5, 8)),
    "a dictionary": ({"return_dict_in_generate": True}, (1, 5, 4)),
    "embeddings": ({"inputs": None, "inputs_embeds": torch.ones(2, 3, 16)}, (2, 6, 8)),
    "nothing": ({"inputs": None}, (1, 1, 4)),
    "a cache": ({"use_cache": False}, (1, 5, 4)),
    "chunks": ({"prefill_chunk_size": 2, "past_key_values": None}, (1, 5, 4)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_call_was_asked_for(model, asked):
    """Prompts, tokens in and tokens out are counted from shapes, however they are given and returned."""
    options, expected = ASKED[asked]
    if "past_key_values" in options:
        options = {**options, "past_key_values": transformers.DynamicCache(config=model.config)}
    arguments = {"inputs": prompts(), **options}
    with instrumented(detail="steps") as service:
        model.generate(**{key: value for key, value in arguments.items() if value is not None}, max_new_tokens=4)
        spans = spans_of(service)
    (root,) = calls(spans)
    assert tuple(root.attributes[key] for key in OWN) == expected
    choices = options.get("num_return_sequences")
    assert root.attributes.get("gen_ai.request.choice.count") == choices
    assert len(named(spans, PREFILL)) == (3 if asked == "chunks" else 1)
    assert root.attributes["torch.generate.time_per_output_token"] > 0


def test_an_encoder_is_part_of_the_prefill():
    """Of a model with an encoder that is the begin of the prefill; its tokens are the input, and the decoder's first is not generated."""
    model = translator()
    with instrumented(detail="steps") as service:
        generate(model, inputs=prompts(2, 6))
        spans = spans_of(service)
    (root,) = calls(spans)
    found = [(span.name, span.attributes["torch.module"]) for span in phases(spans, root)]
    assert found[:3] == [
        (PREFILL, "T5Stack"),
        (PREFILL, "T5ForConditionalGeneration"),
        (DECODE, "T5ForConditionalGeneration"),
    ]
    assert tuple(root.attributes[key] for key in OWN) == (2, 12, 8)


def test_times(model):
    """The first token is there when the model is called for the second; the others share the rest of the call."""
    with instrumented(detail="steps") as service:
        generate(model, tokens=5)
        generate(model, tokens=1)
        spans = spans_of(service)
    several, one = calls(spans)
    prefill, second = phases(spans, several)[:2]
    first = several.attributes["torch.generate.time_to_first_token"]
    assert (prefill.end_time - several.start_time) / 1e9 <= first <= (second.start_time - several.start_time) / 1e9
    rest = (several.end_time - several.start_time) / 1e9 - first
    assert several.attributes["torch.generate.time_per_output_token"] == pytest.approx(rest / 4, rel=0.2)
    assert one.attributes["torch.generate.time_to_first_token"] <= (one.end_time - one.start_time) / 1e9
    assert "torch.generate.time_per_output_token" not in one.attributes


def test_names(model):
    """The conventions' names say what it was, of which model: one of a configuration is named by its class, of a path the last part; a streamer is seen by name and by position."""
    here = decoder(name_or_path="/home/me/models/tiny")
    with instrumented(detail="steps") as service:
        generate(model)
        generate(here, streamer=transformers.TextStreamer(Letters()))
        here.generate(prompts(), *[None] * 6, transformers.TextStreamer(Letters()), max_new_tokens=4)
        spans = calls(service.spans())
    assert [span.attributes["gen_ai.request.model"] for span in spans] == ["LlamaForCausalLM", "tiny", "tiny"]
    assert [span.attributes.get("gen_ai.request.stream") for span in spans] == [None, True, True]
    assert {span.attributes["gen_ai.operation.name"] for span in spans} == {"text_completion"}
    assert [span.name for span in spans] == [GENERATE, *["text_completion tiny"] * 2]
    assert {span.attributes["gen_ai.provider.name"] for span in spans} == {"huggingface.transformers"}


def test_another_instrumentations_span(model):
    """A span for the call gets what it lacks and keeps what it has; ours has nothing of the conventions then, so nothing counts twice."""
    with instrumented(detail="steps") as service:
        about = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "mine"}
        with service.tracer.start_as_current_span("chat mine", attributes=about) as chat:
            generate(model)
        (root,) = calls(service.spans())
    assert dict(chat.attributes).items() >= about.items()
    assert {key: chat.attributes[key] for key in OWN} == dict(zip(OWN, (1, 5, 4), strict=True))
    assert chat.attributes["torch.generate.time_to_first_token"] > 0
    assert [key for key in root.attributes if key.startswith("gen_ai.")] == []
    assert (root.name, root.attributes["torch.generate.batch_size"]) == ("torch.phase.generate", 1)


@pytest.mark.parametrize(("operation", "first"), [("invoke_agent", [5, 4]), ("chat", [])])
def test_further_calls_in_another_instrumentations_span(model, operation, first):
    """That of an agent, which calls a model any number of times, is none's; one of a call is the first one's only."""
    with instrumented(detail="steps") as service:
        about = {"gen_ai.operation.name": operation}
        with service.tracer.start_as_current_span(operation, attributes=about) as outer:
            for _ in range(3):
                generate(model)
        spans = calls(service.spans())
    tokens = [[span.attributes[key] for key in OWN[1:] if key in span.attributes] for span in spans]
    assert tokens == [first, [5, 4], [5, 4]]
    assert (dict(outer.attributes) == about) is (operation == "invoke_agent")


def test_an_assistant(model):
    """What an assistant generates is inside of the call that it helps, and no request of its own."""
    with instrumented(detail="steps") as service:
        generate(model, assistant_model=decoder())
        spans = spans_of(service)
    (root,) = [span for span in spans if span.parent is None]
    inner = [span for span in calls(spans) if span is not root]
    assert inner
    assert {span.parent.span_id for span in inner} == {root.context.span_id}
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert not any(key.startswith("gen_ai.") for span in inner for key in span.attributes)


@pytest.mark.parametrize("detail", ["steps", "modules"])
def test_a_module_that_generates(model, detail):
    """A module whose forward generates is around the call, whose model's calls are phases in it all the same."""

    class Chat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            return generate(self.model, inputs=inputs)

    chat = Chat()
    with instrumented(detail=detail) as service:
        for _ in range(2):
            with torch.no_grad():
                chat(prompts())
        spans = spans_of(service)
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == ["torch.phase.inference"] * 2
    for call in calls(spans):
        assert [span.name for span in phases(spans, call)] == [PREFILL, *[DECODE] * 3]
        assert call.attributes["torch.generate.time_to_first_token"] > 0


def test_an_interrupt(model):
    """After one that leaves a call from inside of the model the next call is a trace of its own, with all its phases."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with instrumented(detail="steps") as service:
        hook = model.model.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(model)
        hook.remove()
        generate(model)
        spans = spans_of(service)
    left, whole = [span for span in spans if span.parent is None]
    assert (left.name, left.attributes["error.type"]) == (GENERATE, "KeyboardInterrupt")
    assert [span.name for span in phases(spans, whole)] == [PREFILL, *[DECODE] * 3]


@pytest.mark.parametrize("detail", ["steps", "ops"])
def test_streams_at_once(model, detail):
    """Three streaming requests, whose contexts were carried into threads, are three traces; each has the operators of one alone."""
    barrier, requests, inputs = threading.Barrier(3), {}, prompts()

    def answer(service, number):
        with service.tracer.start_as_current_span("request") as requests[number]:
            streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
            arguments = {"inputs": inputs, "max_new_tokens": 8, "streamer": streamer}
            barrier.wait(60)
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: context.run(model.generate, **arguments))
            thread.start()
            assert len("".join(streamer).split()) == 8
            thread.join()

    with instrumented(detail=detail) as service:
        answering = [threading.Thread(target=answer, args=(service, number)) for number in range(3)]
        for thread in answering:
            thread.start()
        for thread in answering:
            thread.join()
        with service.tracer.start_as_current_span("alone") as requests[3]:
            streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True)
            generate(model, tokens=8, inputs=inputs, streamer=streamer)
        spans = spans_of(service)
    traces = [request.get_span_context().trace_id for request in requests.values()]
    assert {span.context.trace_id for span in spans} == set(traces)
    counts = [sorted(span.name for span in spans if span.context.trace_id == trace) for trace in traces]
    assert counts[0] == counts[1] == counts[2] == counts[3]
    assert counts[0].count(DECODE) == 7
    for request in requests.values():
        assert [span.name for span in below(spans, request)] == [GENERATE]


def test_continuous_batching(model):
    """Work that the thread of a continuous batch does for several requests is in the trace of none of them."""
    with instrumented(detail="ops") as service:
        with service.tracer.start_as_current_span("request") as request:
            batching = decoder(attn_implementation="sdpa")
            config = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
            found = batching.generate_batch(
                [[1, 2, 3], [4, 5]], max_new_tokens=4, continuous_batching_config=config, warmup=False
            )
        spans = [span for span in service.spans() if "thread.id" in span.attributes]
    assert [len(one.generated_tokens) for one in found.values()] == [4, 4]
    own = {
        span.attributes["thread.id"] for span in spans if span.context.trace_id == request.get_span_context().trace_id
    }
    assert own <= {threading.get_ident()}
    others = [span for span in spans if span.attributes["thread.id"] != threading.get_ident()]
    assert any(span.name == "torch.phase.inference" for span in others)


def test_generation_in_training():
    """A loop that generates and trains has steps as before, and an evaluation that only generates is one."""
    model = decoder()
    loader = torch.utils.data.DataLoader([prompts()[0]] * 3, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrumented(detail="steps") as service:
        for _ in range(3):
            model.train()
            for batch in loader:
                rollout = generate(model, tokens=2, inputs=batch)
                model(rollout, labels=rollout).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            for batch in loader:
                generate(model, tokens=2, inputs=batch)
    spans = service.spans_at_end()
    steps = sorted(named(spans, "torch.step"), key=lambda span: span.start_time)
    assert [step.attributes["torch.step.number"] for step in steps] == list(range(9))
    for step in steps[1:]:
        phases_of_step = {key.split(".")[2] for key in step.attributes if key.startswith("torch.phase.")}
        assert {"data", "generate", "prefill", "decode", "forward", "backward", "optimizer"} <= phases_of_step
    evaluations = named(spans, "torch.evaluation")
    assert len(evaluations) == 3
    assert all("torch.phase.generate.duration" in span.attributes for span in evaluations)
    assert len(calls(spans)) == 18
