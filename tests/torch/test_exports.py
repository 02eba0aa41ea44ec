"""Steps, spans, OTLP and Chrome JSON of real training steps, and the memory limit."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import models  # noqa: E402
from observed import recorded_names  # noqa: E402
from odd_programs import ended_by_future, left_elsewhere, misnested  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData  # noqa: E402
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from trace_validator import validate  # noqa: E402

import otel_torchprof as otp  # noqa: E402


@pytest.fixture(scope="module")
def trained():
    """Three steps of a small convolutional network, told apart by step()."""
    body = models.convnet()
    body()
    with otp.profile(record_shapes=True) as prof:
        for _ in range(3):
            with otp.record_function("training step"):
                body()
            prof.step()
    return prof


def decoded(prof):
    """The spans of all messages."""
    requests = [ExportTraceServiceRequest.FromString(message) for message in prof.to_otlp()]
    return [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_each_step_is_a_trace(trained):
    """Every step is a whole trace of its own under one root, linked to the step before it."""
    spans = decoded(trained)
    known = {(span.trace_id, span.span_id) for span in spans}
    assert len(known) == len(spans) == len(trained.events()) + 3
    assert all((span.trace_id, span.parent_span_id) in known for span in spans if span.parent_span_id)
    roots = [span for span in spans if not span.parent_span_id]
    assert [root.name for root in roots] == ["torch.step"] * 3
    assert len({root.trace_id for root in roots}) == 3
    for earlier, later in itertools.pairwise(roots):
        assert earlier.span_id in [link.span_id for link in later.links]
    for span in spans:
        root = next(root for root in roots if root.trace_id == span.trace_id)
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano


def test_links_lead_to_the_forward(trained):
    """Backward functions link to an operator of the forward pass of their own step."""
    spans = {(span.trace_id, span.span_id): span for span in decoded(trained)}
    for name, forward in (
        ("ConvolutionBackward0", "aten::convolution"),
        ("MaxPool2DWithIndicesBackward0", "aten::max_pool2d_with_indices"),
    ):
        backward = [span for span in spans.values() if span.name == name]
        assert len(backward) == 3
        for span in backward:
            (link,) = span.links
            assert link.trace_id == span.trace_id
            assert spans[link.trace_id, link.span_id].name == forward


def test_exporter_and_bytes_agree(trained):
    """export() hands an SDK exporter the same spans as to_otlp() encodes."""
    exporter = InMemorySpanExporter()
    sent = trained.export(exporter, batch_size=100)
    ours = exporter.get_finished_spans()
    assert sent == len(ours) == len(decoded(trained))

    def of_sdk(span):
        return (span.context.trace_id, span.context.span_id, span.name, span.start_time, span.end_time, len(span.links))

    def of_proto(span):
        ids = int.from_bytes(span.trace_id, "big"), int.from_bytes(span.span_id, "big")
        return (*ids, span.name, span.start_time_unix_nano, span.end_time_unix_nano, len(span.links))

    assert sorted(map(of_sdk, ours)) == sorted(map(of_proto, decoded(trained)))


def test_the_file_is_one_message(trained, tmp_path):
    """The OTLP file decodes as TracesData with the same spans."""
    trained.export_otlp(tmp_path / "trace.otlp")
    data = TracesData.FromString((tmp_path / "trace.otlp").read_bytes())
    spans = [s.span_id for r in data.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert sorted(spans) == sorted(span.span_id for span in decoded(trained))


def test_the_file_as_json(trained, tmp_path):
    """By its name the file is OTLP/JSON, with the same spans."""
    trained.export_otlp(tmp_path / "trace.json.gz")
    lines = gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).splitlines()
    found = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines]
    ids = [bytes.fromhex(span["spanId"]) for spans in found for span in spans]
    assert sorted(ids) == sorted(span.span_id for span in decoded(trained))


class _Fails(SpanExporter):
    def export(self, spans):
        return SpanExportResult.FAILURE


class _Raises(SpanExporter):
    def export(self, spans):
        raise ConnectionError("nobody there")


@pytest.mark.parametrize("exporter", [_Fails(), _Raises()])
def test_an_exporter_that_fails(trained, exporter):
    """A failing exporter is an ExportError; what was recorded is still there."""
    with pytest.raises((otp.ExportError, ConnectionError)):
        trained.export(exporter)
    assert len(trained.spans()) == len(decoded(trained))


def test_chrome_trace_of_real_steps(trained, tmp_path):
    """The Chrome trace of real steps keeps every rule, and has each event, step and arrow."""
    path = tmp_path / "trace.json"
    trained.export_chrome_trace(path)
    events = validate(path.read_bytes())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "Trace"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in slices) == 3
    assert len(slices) == len(recorded_names(trained)) + 3
    assert sum(event["ph"] == "s" for event in events) >= 3 * 5


def test_chrome_trace_of_odd_events(tmp_path):
    """Asynchronous, misnested, unfinished and failed events, on several threads, make a trace that keeps every rule."""
    with otp.profile(all_threads=True, record_shapes=True) as prof:
        ended_by_future()
        misnested()
        left_elsewhere()
        with pytest.raises(KeyError), otp.record_function("fails"):
            raise KeyError
        otp.record_function("open").__enter__()
    prof.export_chrome_trace(tmp_path / "trace.json")
    validate((tmp_path / "trace.json").read_bytes())
    assert len(decoded(prof)) == len(recorded_names(prof)) + 1


def test_a_small_memory_limit():
    """Of operators too, recorded + dropped is what another profile beside it recorded; ends are the same in both."""
    body = models.convnet()
    body()
    with otp.profile() as whole, otp.profile(memory_limit=65536) as small:
        for _ in range(20):
            body()
    kept, health = len(recorded_names(small)), small.health
    assert kept + health.dropped["budget"] == len(recorded_names(whole))
    assert health.dropped["budget"] > 0
    ends = dict(zip(whole.columns["id"].tolist(), whole.columns["end"].tolist(), strict=True))
    assert [ends[event] for event in small.columns["id"].tolist()] == small.columns["end"].tolist()
    assert not (small.columns["flags"] & 2).any()


@pytest.mark.parametrize(
    "requested", [["CPU_OP", "USER_ANNOTATION", "PYTHON_FUNCTION"], ["USER_ANNOTATION", "PYTHON_FUNCTION"]]
)
def test_torchs_labels_stay_on_their_thread(tmp_path, requested):
    """Beside calls, a label of torch's is a slice of its thread; the calls that begin it, and end before it, are asynchronous."""
    with otp.profile(with_stack=True, activities=[{otp.ProfilerActivity.CPU: requested}]) as prof:
        torch.ones(2)
        for _ in range(2):
            with torch.profiler.record_function("torch's label"):
                torch.ones(2)
    prof.export_chrome_trace(path := tmp_path / "trace.json")
    phases = {}
    for event in validate(path.read_bytes())["traceEvents"]:
        phases.setdefault(event["name"].rpartition(": ")[2], []).append(event["ph"])
    assert phases["torch's label"] == ["X", "X"]
    assert phases["__enter__"].count("b") == 2
    assert ("aten::ones" in phases) == ("CPU_OP" in requested)
