"""Traces with more spans than their limit: a step of a hundred thousand operators on its way to a receiver, links that many spans had."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fault_server import GrpcReceiver  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from providers import new_provider  # noqa: E402

import otel_torchprof as otp  # noqa: E402

OPERATORS = 100_000
AN_HOUR = 3_600_000


class Whole(SpanExporter):
    """Counts every span by name, before anything is reduced."""

    takes_span_lists = takes_whole_traces = True

    def __init__(self):
        self.counts = Counter()

    def export(self, spans):
        names, counts = np.unique(spans.table.name, return_counts=True)
        for name, count in zip(names.tolist(), counts.tolist(), strict=True):
            self.counts[spans.table.names[name]] += count
        return SpanExportResult.SUCCESS


def attributes(span):
    return {pair.key: pair.value.int_value for pair in span.attributes}


def test_a_step_of_a_hundred_thousand_operators():
    """It arrives as one trace of 5,000 spans and under 4 MB, whose composites and folded spans add up to what was recorded."""
    whole, x = Whole(), torch.ones(2)
    with GrpcReceiver() as receiver:
        processor = otp.TorchSpanProcessor(otp.OTLPExporter(receiver.url), whole, schedule_delay_millis=AN_HOUR)
        provider = new_provider(processor)
        otp.TorchInstrumentor().instrument(
            tracer_provider=provider, detail="ops", policy=otp.SpanPolicy(job_interval=0)
        )
        otp.TorchInstrumentor().step()
        assert provider.force_flush()
        whole.counts.clear()
        receiver.arrived.clear()
        for number in range(OPERATORS // 20):
            with otp.record_function(f"part {number % 100}"):
                for _ in range(10):
                    x.add(1)
                    x.mul(1)
        otp.TorchInstrumentor().step()
        assert provider.force_flush()
        otp.TorchInstrumentor().uninstrument()
        messages = [request.body for request in receiver.arrived]
        provider.shutdown()
    requests = [ExportTraceServiceRequest.FromString(message) for message in messages]
    spans = [
        s for r in requests for resource in r.resource_spans for scope in resource.scope_spans for s in scope.spans
    ]
    (root,) = (span for span in spans if span.name == "torch.step")
    assert len({span.trace_id for span in spans}) == 1
    assert len(spans) <= 5_000
    assert sum(map(len, messages)) <= 4_000_000
    found = Counter()
    for span in spans:
        reported = attributes(span)
        found[span.name] += reported.get("torch.aggregated.count", 1)
        found["collapsed"] += reported.get("torch.collapsed.count", 0)
    collapsed = found.pop("collapsed")
    assert sum(found.values()) + collapsed == sum(whole.counts.values()) == attributes(root)["torch.recorded_spans"]
    assert all(count <= whole.counts[name] for name, count in found.items())
    assert whole.counts["aten::add"] == whole.counts["aten::mul"] == OPERATORS // 2
    assert attributes(root)["torch.collapsed_spans"] == collapsed


def test_opentelemetrys_limit_of_links_holds_for_aggregate_spans(monkeypatch):
    """A span that stands for several backward functions has no more links than OpenTelemetry's limit, and counts the others."""
    with otp.profile() as prof:
        result = torch.ones(3, requires_grad=True)
        for part in range(100):
            with otp.record_function(f"part {part}"):
                result = torch.sin(result)
        result.sum().backward()

    def links():
        exporter = InMemorySpanExporter()
        prof.export(exporter, policy=otp.SpanPolicy(max_spans=100))
        return [(len(span.links), span.dropped_links) for span in exporter.get_finished_spans()]

    most = max(count for count, _ in links())
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "1")
    assert max(count for count, _ in links()) == 1
    assert max(count + dropped for count, dropped in links()) == most > 1
