"""Continuous batching of transformers: each request's trace has its queue, its prefill and its tokens, and steps link to requests."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from generating import decoder  # noqa: E402
from instrumented import instrumented  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

BATCH, QUEUE, STAY = "torch.batch", "torch.request.queue", "torch.request.batch"
REQUEST = "text_completion LlamaForCausalLM"
TOKENS = 6
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [1 + number % 9 for number in range(39)]]
DEADLINE = 60


def config(**options):
    """A small cache: by default the engine takes most of the memory."""
    values = {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 16, "allow_block_sharing": False}
    return ContinuousBatchingConfig(**values | options)


def generation(tokens=TOKENS, **options):
    """So many tokens, whatever they are."""
    values = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**values | options)


@pytest.fixture
def model():
    return decoder()


@pytest.fixture
def service():
    """A service with torch instrumented."""
    with instrumented(detail="steps") as service:
        yield service


def named(spans, name):
    """The spans of a name, by start."""
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time)


def below(spans, parent, name):
    """The spans of a name directly below another one, by start."""
    return [span for span in named(spans, name) if span.parent.span_id == parent.context.span_id]


def check_steps(spans):
    """Steps have a forward pass below them, and their shares and links are those of their requests."""
    stays = defaultdict(list)
    for stay in named(spans, STAY):
        (link,) = stay.links
        stays[link.context.span_id].append(stay)
    steps = named(spans, BATCH)
    assert steps
    for step in steps:
        own = stays.pop(step.context.span_id)
        assert len(own) == len(step.links) == step.attributes["torch.batch.size"]
        assert {link.context.span_id for link in step.links} == {stay.parent.span_id for stay in own}
        shares = sum(stay.attributes["torch.batch.share_duration"] for stay in own)
        assert shares == pytest.approx((step.end_time - step.start_time) / 1e9)
        assert sum(stay.attributes["torch.batch.tokens"] for stay in own) == step.attributes["torch.batch.tokens"]
        assert 0 < step.attributes["torch.batch.cache_usage_ratio"] <= 1
        assert [span.parent.span_id for span in below(spans, step, "torch.phase.inference")] == [step.context.span_id]
    assert not stays


def test_generate_batch(model, service):
    """Each prompt is a request below the caller's span: queue, prefill in chunks of what fits, a stay per token, and the first token's time."""
    with service.tracer.start_as_current_span("POST") as caller:
        model.generate_batch(PROMPTS, generation_config=generation(), continuous_batching_config=config())
    spans = service.spans()
    check_steps(spans)
    requests = {span.attributes["gen_ai.usage.input_tokens"]: span for span in below(spans, caller, REQUEST)}
    assert requests.keys() == {len(prompt) for prompt in PROMPTS}
    for length, request in requests.items():
        assert request.attributes["gen_ai.usage.output_tokens"] == TOKENS
        (queued,), stays = below(spans, request, QUEUE), below(spans, request, STAY)
        assert request.start_time == queued.start_time
        assert queued.end_time == stays[0].start_time
        assert stays[-1].end_time <= request.end_time
        phases = [stay.attributes["torch.phase.name"] for stay in stays]
        prefills = [stay for stay in stays if stay.attributes["torch.phase.name"] == "prefill"]
        assert phases == ["prefill"] * len(prefills) + ["decode"] * (TOKENS - 1)
        assert sum(stay.attributes["torch.batch.tokens"] for stay in prefills) == length
        assert len(prefills) > 2 or length < 16
        first = request.attributes["torch.generate.time_to_first_token"] * 1e9
        assert prefills[-1].end_time - request.start_time <= first + 1000
        assert request.attributes["torch.generate.time_per_output_token"] > 0


def test_preemption(model, service):
    """A request that gives up its cache to others is in the queue again, and says how often."""
    settings = config(page_size=8, num_blocks=6, max_batch_tokens=32, safety_margin=0.0)
    model.generate_batch(
        [[1] * 8, [2] * 8, [3] * 8], generation_config=generation(16), continuous_batching_config=settings
    )
    spans = service.spans()
    check_steps(spans)
    requests = named(spans, REQUEST)
    assert len(requests) == 3
    preempted = [request.attributes.get("torch.request.preemptions", 0) for request in requests]
    assert sum(preempted) > 0
    for request, times in zip(requests, preempted, strict=True):
        assert len(below(spans, request, QUEUE)) == 1 + times
        assert request.attributes["gen_ai.usage.output_tokens"] == 16
        assert request.attributes["gen_ai.usage.input_tokens"] == 8
        phases = [stay.attributes["torch.phase.name"] for stay in below(spans, request, STAY)]
        assert phases.count("prefill") >= 1 + times


def test_sequences_of_a_prompt_are_one_request(model, service):
    """With several sequences per prompt the tokens of all are those of its request."""
    model.generate_batch(
        PROMPTS[:2],
        generation_config=generation(do_sample=True, num_return_sequences=2),
        continuous_batching_config=config(),
    )
    spans = service.spans()
    check_steps(spans)
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in named(spans, REQUEST)] == [2 * TOKENS] * 2


def manager_of(model):
    """A running engine."""
    manager = model.init_continuous_batching(generation_config=generation(), continuous_batching_config=config())
    manager.start()
    return manager


def test_a_request_that_is_cancelled(model, service):
    """A client that leaves ends its request with the reason; others stay as they are; without a caller's span each is a trace."""
    manager = manager_of(model)
    left = manager.add_request([1, 2, 3], max_new_tokens=10_000, streaming=True)
    assert next(manager.request_id_iter(left)).request_id == left
    manager.cancel_request(left)
    manager.add_request([4, 5])
    for _ in range(DEADLINE * 1000):
        result = manager.get_result(timeout=1)
        if result is not None and result.request_id != left:
            break
    manager.stop(block=True, timeout=DEADLINE)
    spans = service.spans()
    cancelled, other = named(spans, REQUEST)
    assert cancelled.attributes["error.type"] == "cancelled"
    assert cancelled.attributes["gen_ai.request.stream"]
    assert "error.type" not in other.attributes
    assert cancelled.parent is other.parent is None
    assert len({cancelled.context.trace_id, other.context.trace_id}) == 2


def test_a_step_that_fails(model, service, monkeypatch):
    """An error of the model is that of its step and of the requests in it, and the engine ends as it would without us."""
    calls = Counter()
    forward = type(model).forward

    def failing(*arguments, **options):
        calls["forward"] += 1
        if calls["forward"] == 3:
            raise OverflowError("too much")
        return forward(*arguments, **options)

    monkeypatch.setattr(type(model), "forward", failing)
    manager = manager_of(model)
    manager.add_request([1, 2, 3])
    result = None
    for _ in range(DEADLINE * 10):
        result = manager.get_result(timeout=0.1)
        if result is not None:
            break
    manager.stop(block=True, timeout=DEADLINE)
    assert result.error
    spans = service.spans()
    assert [span.attributes.get("error.type") for span in named(spans, BATCH)] == [None, None, "OverflowError"]
    (request,) = named(spans, REQUEST)
    assert request.attributes["error.type"] == "OverflowError"
    assert request.attributes["gen_ai.usage.output_tokens"] == 2


def test_what_is_not_sampled(model):
    """Without a sampled request there are no spans; the results are the same."""
    expected = model.generate_batch(PROMPTS, generation_config=generation(), continuous_batching_config=config())
    with instrumented(detail="steps", sampler=ALWAYS_OFF) as service:
        results = model.generate_batch(PROMPTS, generation_config=generation(), continuous_batching_config=config())
        assert not service.spans()
    assert [each.generated_tokens for each in results.values()] == [each.generated_tokens for each in expected.values()]
