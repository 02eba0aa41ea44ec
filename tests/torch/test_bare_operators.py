"""Torch's operators outside of any span and step: a trace per thread and second."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
import torch
from instrumented import Instrumented
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult

import otel_torchprof as otp
from otel_torchprof._model.operator_roots import OPERATORS_NAME as ROOT
from otel_torchprof._native.recorder import now_ns

HOUR = 3_600_000


class Asked(Sampler):
    """Says the same of every trace, and keeps the names that it was asked about."""

    def __init__(self, decision=Decision.RECORD_AND_SAMPLE):
        self.names = []
        self._decision = decision

    def should_sample(self, parent_context, trace_id, name, *_, **__):
        self.names.append(name)
        return SamplingResult(self._decision)

    def get_description(self):
        return "Asked"


@pytest.fixture
def clock(monkeypatch):
    """The recorder's, as the drain reads it, and seconds ahead of it."""
    ahead = [0]
    monkeypatch.setattr(
        "otel_torchprof._instrument.live_recording.LiveRecording.now", lambda self: now_ns() + ahead[0] * 10**9
    )
    return ahead


def neg(times=3):
    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(times):
            x.neg()


def negs(spans):
    return [span for span in spans if span.name == "aten::neg"]


def roots(spans):
    return [span for span in spans if span.name == ROOT]


def below(root, spans):
    """The children of a root, all of them in its trace."""
    found = [span for span in spans if span.parent and span.parent.span_id == root.context.span_id]
    assert {span.context.trace_id for span in found} <= {root.context.trace_id}
    return found


def test_threads_have_roots_of_their_own():
    """Each thread's operators are below its own roots, about each of which the sampler was asked once."""
    sampler = Asked()
    service = Instrumented(drained_every=HOUR, sampler=sampler)
    with service.on():
        neg()
        worker = threading.Thread(target=neg, name="worker")
        worker.start()
        worker.join()
    spans = service.spans_at_end()
    found = Counter()
    for root in roots(spans):
        assert (root.parent, root.links) == (None, ())
        children = below(root, spans)
        assert {span.attributes["thread.id"] for span in children} == {root.attributes["thread.id"]}
        assert root.start_time == min(span.start_time for span in children)
        assert root.end_time == max(span.end_time for span in children)
        found[root.attributes["thread.id"]] += len(negs(children))
    assert found == {threading.get_ident(): 3, worker.ident: 3}
    assert sampler.names == [ROOT] * len(roots(spans))


def test_a_refused_root_has_no_operators():
    """Where the sampler refuses, nothing is sent, and it was not asked about single operators."""
    sampler = Asked(Decision.DROP)
    service = Instrumented(drained_every=HOUR, sampler=sampler)
    with service.on():
        neg()
    assert service.spans_at_end() == []
    assert set(sampler.names) == {ROOT}
    assert not service.processor.key_averages()


def test_a_silent_threads_operators_are_sent_a_second_later(clock):
    """A flush within the second sends nothing of a root that goes on; one after it sends all."""
    service = Instrumented(drained_every=HOUR, sampler=ALWAYS_ON)
    with service.on():
        clock[0] = -HOUR
        neg()
        assert service.spans() == []
        clock[0] = 2
        spans = service.spans()
        assert len(negs(spans)) == 3
        assert sum(len(negs(below(root, spans))) for root in roots(spans)) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_labels_and_torchscript_are_no_operators():
    """A label of torch's and a scripted function are each the root of a trace, with their operators below them."""

    def doubled(x):
        return x + x

    scripted = torch.jit.script(doubled)
    scripted(torch.ones(2))
    service = Instrumented(drained_every=HOUR)
    with service.on():
        neg(1)
        with torch.profiler.record_function("request"):
            neg(1)
        scripted(torch.ones(2))
    spans = service.spans_at_end()
    alone = {span.name: span for span in spans if span.parent is None and span.name != ROOT}
    assert {"request", "doubled"} <= set(alone)
    assert len(negs(below(alone["request"], spans))) == 1
    assert [span.name for span in below(alone["doubled"], spans)].count("aten::add") == 1
    assert len({span.context.trace_id for span in (*alone.values(), *roots(spans))}) == len(alone) + len(roots(spans))


def test_backward_functions_are_below_their_phase():
    """What autograd runs for a backward pass outside of any span is below the phase, and links to the forward operators."""
    service = Instrumented(drained_every=HOUR)
    with service.on():
        x = torch.ones(2, requires_grad=True)
        x.mul(2).sum().backward()
    spans = service.spans_at_end()
    assert {span.name for span in spans if span.parent is None} == {ROOT, "torch.phase.backward"}
    (backward,) = [span for span in spans if span.name == "MulBackward0"]
    forward = {span.context.span_id: span.name for span in spans}
    assert [forward[link.context.span_id] for link in backward.links] == ["aten::mul"]


def test_averages_have_no_row_for_roots():
    """The averages are torch's operators, as often as they ran, and no row for the roots."""
    service = Instrumented(drained_every=HOUR)
    with service.on():
        neg(5)
        rows = {average.key: average.count for average in service.processor.key_averages()}
    assert rows["aten::neg"] == 5
    assert ROOT not in rows


def test_a_chrome_file_shows_roots_on_their_threads(tmp_path):
    """The root is a slice on the track of its thread, around its operators."""
    path = tmp_path / "trace.json"
    service = Instrumented(drained_every=HOUR)
    service.provider = TracerProvider(shutdown_on_exit=False)
    service.provider.add_span_processor(otp.TorchSpanProcessor(otp.ChromeTraceExporter(str(path))))
    with service.on():
        neg()
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    found = [event for event in events if event["name"] == ROOT]
    inside = [event for event in events if event["name"] == "aten::neg"]
    assert len(inside) == 3
    assert found
    for event in inside:
        assert any(
            root["tid"] == event["tid"]
            and root["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= root["ts"] + root["dur"] + 1e-3
            for root in found
        )
