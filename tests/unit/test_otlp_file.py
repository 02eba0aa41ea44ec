"""OTLP files: what is in them, in either form, when they begin anew, and what is left when the writer is killed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from pathlib import Path

import forked_programs
import pytest
from chrome_files import events_in, slices
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from providers import new_provider
from span_tables import RESOURCE, SCOPE, span_list, span_rows

from otel_torchprof import ChromeTraceExporter, OTLPFileExporter
from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.from_environment import exporters_from_environment

SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
FORMS = ["trace.otlp", "trace.binpb.gz", "trace.json", "trace.jsonl.gz"]
LONG = 60.0


def content(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(".gz") else data


def request(path):
    """All that a file holds as one request."""
    if not otlp_json.is_json(path.name):
        return ExportTraceServiceRequest.FromString(content(path))
    found = ExportTraceServiceRequest()
    for line in content(path).splitlines():
        found.MergeFrom(otlp_json.request_of(line))
    return found


def spans_of(found):
    return [span for r in found.resource_spans for scope in r.scope_spans for span in scope.spans]


def names_of(*paths):
    return [span.name for path in paths for span in spans_of(request(path))]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_in_it(tmp_path, name):
    """Either form holds the spans with resource and scope, those of torch and those of the SDK, in order; again after the end none."""
    path = tmp_path / name
    exporter = OTLPFileExporter(path)
    assert not path.exists()
    spans = span_list("a", 'b\n\u2028"')
    assert [exporter.export(spans), exporter.export(list(spans)), exporter.export(spans[1:])] == [SUCCESS] * 3
    expected = ExportTraceServiceRequest.FromString(
        b"".join(otlp.encode(spans.table, resource=RESOURCE, scope=SCOPE))
    ).resource_spans[0]
    first, second, third = request(path).resource_spans
    assert first == second == expected
    assert third.scope_spans[0].spans[0] == expected.scope_spans[0].spans[1]
    exporter.shutdown()
    exporter.shutdown()
    assert exporter.export(spans) is FAILURE
    assert len(spans_of(request(path))) == 5


def test_lines_of_json(tmp_path):
    """Each line is a request in the specification's JSON, and reads back by protobuf's own reader but for the ids."""
    path = tmp_path / "trace.jsonl"
    exporter = OTLPFileExporter(path)
    exporter.export(span_list("a"))
    exporter.export(list(span_list("b")))
    native, theirs = map(json.loads, path.read_text().splitlines())
    for found in (native, theirs):
        (span,) = found["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert len(bytes.fromhex(span["traceId"])) == 16
        assert len(bytes.fromhex(span["spanId"])) == 8
        assert span["kind"] == 1
        assert isinstance(span["startTimeUnixNano"], str)
        for key in ("traceId", "spanId", "parentSpanId"):
            span.pop(key, None)
        json_format.ParseDict(found, ExportTraceServiceRequest())


def test_spans_of_the_sdk(tmp_path):
    """It serves the SDK's own span processors."""
    provider = new_provider(SimpleSpanProcessor(OTLPFileExporter(tmp_path / "x.json")))
    with provider.get_tracer("test").start_as_current_span("request") as span:
        span.add_event("event", {"raw": b"\x00"})
    provider.shutdown()
    (found,) = spans_of(request(tmp_path / "x.json"))
    assert (found.name, found.span_id) == ("request", span.get_span_context().span_id.to_bytes(8, "big"))
    assert found.events[0].attributes[0].value.bytes_value == b"\x00"


@pytest.mark.parametrize("name", FORMS)
def test_rotation(tmp_path, name):
    """No file is larger than was asked for, the oldest go, those that are left hold what came last, in order."""
    exporter = OTLPFileExporter(tmp_path / name, max_bytes="2K", max_files=3)
    for first in range(0, 200, 5):
        exporter.export(span_list(*[f"span {number}" for number in range(first, first + 5)]))
    files = [tmp_path / file for file in exporter.files]
    exporter.shutdown()
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert len(files) == 3
    assert files[-1].name.startswith("trace.0000")
    assert files[-1].name.endswith(name.removeprefix("trace"))
    assert all(0 < file.stat().st_size <= 2048 for file in files)
    numbers = [int(found.split()[1]) for found in names_of(*files)]
    assert numbers == list(range(numbers[0], 200))


KILLED = """
import os, signal, sys
from otel_torchprof import ChromeTraceExporter
from otel_torchprof import OTLPFileExporter
from span_tables import span_list
for path in sys.argv[1:]:
    exporter = (ChromeTraceExporter if "chrome" in path else OTLPFileExporter)(path)
    for name in "ab":
        exporter.export(span_list(name))
os.kill(os.getpid(), signal.SIGKILL)
"""


def child(program, *arguments):
    """What a program of these tests says, and its exit status."""
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = forked_programs.run(words, env=environ, timeout=LONG)
    return done.stderr, done.returncode


def test_killed(tmp_path):
    """A writer that is killed leaves every export that returned, in files that can be read."""
    paths = [tmp_path / name for name in (*FORMS, "chrome.json", "chrome.json.gz")]
    assert child(KILLED, *paths) == ("", -signal.SIGKILL)
    for path in paths[:-2]:
        assert names_of(path) == ["a", "b"]
    for path in paths[-2:]:
        assert [event["name"] for event in slices(events_in(path))] == ["a", "b"]


FORKED = """
import os, sys
from otel_torchprof import OTLPFileExporter
from span_tables import span_list
path = sys.argv[1]
first = OTLPFileExporter(path, max_bytes=2000)
others = [OTLPFileExporter(path) for _ in range(3)]
first.export(span_list("parent"))
child = os.fork()
if not child:
    first.export(span_list("a"))
    shared, again = first.shared(), OTLPFileExporter(path)
    for exporter, name in zip((shared, again, *others), "bcdef"):
        exporter.export(span_list(name))
    assert {exporter.path for exporter in (first, shared, again, *others)} == {first.path}
    assert ".000000." in first.path
    os.rename(first.path, path + ".child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for exporter in (first, *others):
    exporter.shutdown()
late = first.shared()
assert late.export(span_list("late")).name == "FAILURE"
os.rename(first.path, path + ".parent")
"""


def test_all_exporters_of_one_name_share_its_file_in_a_forked_child_too(tmp_path):
    """Those that were there, shared and new ones, with the limits of the first; one that is shut down leaves the finished file alone."""
    path = str(tmp_path / "t.otlp")
    said, code = child(FORKED, path)
    assert code == 0, said
    assert names_of(Path(path + ".child")) == list("abcdef")
    assert names_of(Path(path + ".parent")) == ["parent"]


def test_a_link_with_another_suffix_is_no_shared_file(tmp_path):
    """What a name says of the format and of compression holds for its exporter alone."""
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "a.otlp").symlink_to("b.jsonl")
    first, second = OTLPFileExporter(tmp_path / "a.otlp"), OTLPFileExporter(tmp_path / "b.jsonl")
    first.export(span_list("first"))
    second.export(span_list("second"))
    assert first.path != second.path
    assert names_of(Path(second.path)) == ["second"]
    for exporter in (first, second):
        exporter.shutdown()


def test_the_variables(tmp_path, monkeypatch, caplog):
    """``OTEL_TRACES_EXPORTER=otlp_file`` writes where ``OTEL_TORCHPROF_OTLP_FILE`` says, or to a default; a bad one is warned of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    (exporter,) = exporters_from_environment()
    assert exporter.path == str(tmp_path / f"trace-{os.getpid()}.otlp")
    monkeypatch.setenv("OTEL_TORCHPROF_OTLP_FILE", str(tmp_path / "no folder" / "{pid}.json"))
    (exporter,) = exporters_from_environment()
    assert exporter.path.endswith(f"/no folder/{os.getpid()}.json")
    assert "create the folder first" in caplog.text
    assert exporter.export(span_list("a")) is FAILURE
    assert "1 spans are not written" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"path": 5}, TypeError, "expected str"),
        ({"path": "x", "max_bytes": 0}, ValueError, "max_bytes is 0; allowed is a whole number of bytes"),
        ({"path": "x", "max_bytes": "1K", "max_files": 0}, ValueError, "max_files is 0; allowed is a whole number"),
        ({"path": "x", "max_files": 2}, ValueError, "max_files is 2; it needs max_bytes"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, error, text):
    """The error names the argument, its value and what is allowed."""
    with pytest.raises(error, match=text):
        OTLPFileExporter(**arguments)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"[]", "expected an object with resourceSpans, found list"),
        (b'{"resourceMetrics": []}', "expected an object with resourceSpans, found resourceMetrics"),
        (b'{"resourceSpans": [{"scopeSpans": 5}]}', "expected an ExportTraceServiceRequest"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', "hexadecimal"),
        (b'{"resourceSpans"', "delimiter"),
    ],
)
def test_what_is_no_line(line, text):
    """A line that is no request for traces is a ValueError that says what was expected."""
    with pytest.raises(ValueError, match=text):
        otlp_json.request_of(line)


SECOND = """
import os, sys
from otel_torchprof import OTLPFileExporter
from span_tables import span_list
second = OTLPFileExporter(sys.argv[1], max_bytes=2000)
for number in range(40):
    second.export(span_list(f"b{number}"))
assert all(f"trace.{os.getpid()}.0" in name for name in second.files), second.files
"""


def test_two_that_write_parts_of_one_name(tmp_path):
    """A second process leaves the parts alone that the first is done with: it writes a series of its own, and says so."""
    path = tmp_path / "trace.otlp"
    first = OTLPFileExporter(path, max_bytes=2000)
    for number in range(40):
        first.export(span_list(f"a{number}"))
    said, code = child(SECOND, path)
    assert (code, "another writer has" in said) == (0, True), said
    for number in range(40):
        first.export(span_list(f"c{number}"))
    assert len(first.files) > 2
    found = names_of(*sorted(tmp_path.iterdir()))
    assert sorted(found) == sorted(f"{name}{number}" for name in "abc" for number in range(40))


@pytest.mark.parametrize("name", ["a.otlp", "a.json"])
def test_a_large_resource(tmp_path, name):
    """A resource above a MiB is in the file once, and not with each span."""
    spans = SpanList(span_rows(list("abcdefgh")), resource=Resource({"large": "x" * 1_500_000}), scope=SCOPE)
    exporter = OTLPFileExporter(tmp_path / name)
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert exporter.export(list(spans)) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert (tmp_path / name).stat().st_size < 3_100_000


class Interrupting(list):
    """Spans in the middle of whose export a signal handler of the same thread does something."""

    def __init__(self, spans, handler):
        super().__init__(spans)
        self._handler = handler

    def __iter__(self):
        handler, self._handler = self._handler, lambda: None
        handler()
        return super().__iter__()


@pytest.mark.parametrize("exporter_class", [OTLPFileExporter, ChromeTraceExporter])
def test_a_signal_handler_in_the_middle_of_an_export(tmp_path, exporter_class):
    """It waits for nothing: a shutdown has the export close the file when it is written, another export fails and is counted."""
    path = tmp_path / "trace.json"
    exporter = exporter_class(path)
    done = []

    def handler():
        done.append(exporter.export(span_list("too late")))
        done.append(exporter.force_flush())
        exporter.shutdown()

    assert exporter.export(Interrupting(span_list("a", "b"), handler)) is SUCCESS
    assert done == [FAILURE, True]
    assert exporter.export(span_list("after")) is FAILURE
    text = path.read_text()
    assert '"a"' in text
    assert '"b"' in text
    assert "too late" not in text
    for document in text.splitlines() if exporter_class is OTLPFileExporter else [text]:
        json.loads(document)
    another = exporter_class(path)
    assert another.export(span_list("of another")) is SUCCESS
    another.shutdown()
    assert "of another" in path.read_text()
