"""Whose process id a forked child tells: its own, by every way out."""

from __future__ import annotations

import json
import os

import pytest
from forked import in_child
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import ProcessResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from providers import instrumented

import otel_torchprof as otp
from otel_torchprof._encode.process_resource import of_this_process

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SERVICE = Resource({"service.name": "shop"})


def ids(resource) -> list[int | None]:
    return [resource.get("process.pid"), resource.get("process.parent_pid")]


def expected() -> list[int]:
    return [os.getpid(), os.getppid()]


def otlp_resource(path) -> dict[str, int]:
    request = ExportTraceServiceRequest.FromString(path.read_bytes())
    return {each.key: each.value.int_value for spans in request.resource_spans for each in spans.resource.attributes}


def test_a_forked_child_tells_its_own_process_id(tmp_path):
    """OTLP and Chrome JSON have the child's ids where a detector found the parent's; the document's process has the same."""
    provider = TracerProvider(resource=SERVICE.merge(ProcessResourceDetector().detect()), shutdown_on_exit=False)
    otlp, chrome = otp.OTLPFileExporter(tmp_path / "t.otlp"), otp.ChromeTraceExporter(tmp_path / "t.json")
    processor = otp.TorchSpanProcessor(otlp, chrome)
    provider.add_span_processor(processor)

    def work():
        with otp.record_function("label"):
            pass
        with provider.get_tracer("test").start_as_current_span("request"):
            pass
        assert provider.force_flush()
        document = json.loads((tmp_path / chrome.path).read_text())
        reported = [
            ids(otlp_resource(tmp_path / otlp.path)),
            ids(document["otherData"]["resource"]),
        ]
        labels = [event for event in document["traceEvents"] if event["name"] == "process_labels"]
        return (
            reported == [expected()] * 2,
            {event["pid"] for event in document["traceEvents"]} == {os.getpid()},
            labels,
        )

    with instrumented(provider, detail="ops", gpu_metrics=False, skip_dep_check=True):
        assert work() == (True, True, [])
        assert in_child(work) == repr((True, True, []))
        assert in_child(lambda: in_child(work)) == repr(repr((True, True, [])))


def test_an_id_that_the_program_gave_stays():
    """Without what a detector finds besides, the id is the program's own word; so is one that no ancestor had."""
    given = Resource({"process.pid": os.getpid()})
    other = ProcessResourceDetector().detect().merge(Resource({"process.pid": 7}))

    def kept():
        return of_this_process(given) is given, of_this_process(other) is other, of_this_process(SERVICE) is SERVICE

    assert in_child(kept) == repr((True, True, True))


def test_a_resource_changes_once():
    """The child's resource is one object as long as the provider's is, so that who compares it need not look into it."""
    found = ProcessResourceDetector().detect()

    def same():
        own = of_this_process(found)
        return own is of_this_process(found), own is not found, own.attributes["process.runtime.name"]

    assert of_this_process(found) is found
    assert in_child(same) == repr((True, True, found.attributes["process.runtime.name"]))
