"""Calls of generate with hundreds of tokens: their traces stay within their limits, and the slowest tokens are whole."""

from __future__ import annotations

from collections import defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("transformers")

from generating import DECODE, GENERATE, PREFILL, below, decoder, named, prompts  # noqa: E402
from instrumented import Instrumented  # noqa: E402

import otel_torchprof as otp  # noqa: E402

TOKENS = 80


@pytest.mark.parametrize(("detail", "is_request"), [("modules", False), ("modules", True), ("ops", False)])
def test_the_slowest_tokens_are_whole(detail, is_request):
    """One trace of at most its number of spans: slow tokens with all that ran in them, between them one span for all others."""
    model, inputs, policy = decoder(), prompts(), otp.SpanPolicy(max_spans=3_500 if detail == "ops" else 500)
    service = Instrumented()
    with service.on(detail, policy=policy):
        with service.tracer.start_as_current_span("request") if is_request else torch.no_grad():
            model.generate(inputs, max_new_tokens=TOKENS + 1)
        spans = _of_the_call(service)
    assert len({span.context.trace_id for span in spans}) == 1
    assert policy.max_spans / 3 < len(spans) <= policy.max_spans
    (root,) = named(spans, GENERATE)
    tokens = [span for span in below(spans, root) if span.name == DECODE]
    counts = [span.attributes.get("torch.aggregated.count", 1) for span in tokens]
    assert sum(counts) == TOKENS
    whole = [span for span, count in zip(tokens, counts, strict=True) if count == 1]
    sums = [span.attributes["torch.aggregated.duration"] for span in tokens if span not in whole]
    average = sum(sums) / (TOKENS - len(whole))
    assert len(whole) >= 2
    slow = [span for span in whole if (span.end_time - span.start_time) / 1e9 > average]
    assert len(slow) > len(whole) / 2  # one that stands alone between two of them is whole, however long it took
    children = defaultdict(list)
    for span in spans:
        if span.parent is not None and span.name != "torch.phase.gc":
            children[span.parent.span_id].append(span)
    ran = [_all_below(children, span) for span in whole]
    assert len({len(found) for found in ran}) == 1
    assert not any("torch.aggregated.count" in span.attributes for found in ran for span in found)


def test_a_call_that_is_not_kept():
    """Where only slow ones keep their detail, the others are a span and its prefill however many tokens they have, and say how many spans there were."""
    model, policy = decoder(), otp.SpanPolicy(keep="slow", slow_limit=1e6)
    service = Instrumented()
    with service.on("modules", policy=policy):
        model.generate(prompts(), max_new_tokens=TOKENS + 1)
        spans = service.spans()
    assert [span.name for span in spans if span.name != "torch.phase.gc"] == [GENERATE, PREFILL]
    assert spans[0].attributes["torch.recorded_spans"] > 20 * TOKENS
    assert f'"count":{TOKENS + 1}' in spans[0].attributes["torch.averages"]


def test_many_tokens_of_little_detail():
    """With phases alone, too, more tokens than a trace may have spans are one trace."""
    model, policy = decoder(), otp.SpanPolicy(max_spans=50)
    service = Instrumented()
    with service.on("steps", policy=policy):
        model.generate(prompts(), max_new_tokens=TOKENS + 1)
        spans = _of_the_call(service)
    assert len({span.context.trace_id for span in spans}) == 1
    assert policy.max_spans / 3 < len(spans) <= policy.max_spans
    assert sum(span.attributes.get("torch.aggregated.count", 1) for span in named(spans, DECODE)) == TOKENS


def _all_below(children, span):
    found = children[span.context.span_id]
    return [*found, *(each for child in found for each in _all_below(children, child))]


def _of_the_call(service):
    """All spans but those of garbage that was collected before the call or after it, which are traces of their own."""
    return [span for span in service.spans() if span.parent is not None or span.name != "torch.phase.gc"]
