"""``otel-torchprof send``: files of every form to real receivers, what cannot be read, and what cannot be delivered."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc

import grpc
import pytest
from explained_files import kineto, piece
from fault_server import Abort, GrpcReceiver, HttpReceiver, free_port, partial_success, status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows

from otel_torchprof import OTLPFileExporter, TorchProfError
from otel_torchprof._cli.main import main
from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.otlp_file import requests_of
from otel_torchprof._export.otlp_reading import pieces

RECEIVERS = {"grpc": GrpcReceiver, "http/protobuf": HttpReceiver}
FORMS = ["a.otlp", "a.binpb.gz", "a.json", "a.jsonl.gz"]
RESOURCE = Resource({"service.name": "trainer"}, "https://r")
SCOPE = InstrumentationScope("otel_torchprof", "1", "https://s")
METRICS = b'{"resourceMetrics":[{}]}\n'


def span_list(*names):
    return SpanList(span_rows(names), resource=RESOURCE, scope=SCOPE)


def written(path, names, at_a_time=3):
    """A file with these spans, some with each export; its uncompressed content."""
    exporter = OTLPFileExporter(path)
    for first in range(0, len(names), at_a_time):
        exporter.export(span_list(*names[first : first + at_a_time]))
    exporter.shutdown()
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(".gz") else data


def send(receiver, *arguments):
    protocol = next(name for name, kind in RECEIVERS.items() if isinstance(receiver, kind))
    endpoint = ("--endpoint", receiver.url, "--protocol", protocol)
    return main(["send", *endpoint, *map(str, arguments)])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("protocol", RECEIVERS)
def test_every_form(tmp_path, protocol, name, capsys):
    """All spans of a file of any form arrive in order with resource and scope, and the last line has the counts."""
    names = [f"span {number}" for number in range(20)]
    written(tmp_path / name, names)
    with RECEIVERS[protocol]() as receiver:
        assert send(receiver, tmp_path / name) == 0
    assert receiver.names == names
    assert len(receiver.arrived) == 1
    (line,) = capsys.readouterr().err.splitlines()
    expected = r"otel-torchprof: 20 spans sent to \S+:\d+\S*, 0 rejected, 0 failed; 1 requests, 0.0 MiB"
    assert re.fullmatch(expected, line)


def test_what_a_collector_writes(tmp_path):
    """A Collector's JSON lines with members of a newer OTLP, and its protobuf with sizes, are read as well."""
    message = b"".join(otlp.encode(span_rows(["a"]), resource=RESOURCE, scope=SCOPE))
    lines = otlp_json.encode_counted(span_rows(["b"]), resource=RESOURCE, scope=SCOPE)
    [found] = [json.loads(bytes(line)) for line, _ in lines]
    found["resourceSpans"][0]["entityRefs"] = [{"new": 1}]
    found["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] = "A5" * 16
    (tmp_path / "sized").write_bytes(len(message).to_bytes(4, "big") + message)
    (tmp_path / "lines").write_text(json.dumps(found) + "\n\n")
    with HttpReceiver() as receiver:
        assert send(receiver, tmp_path / "sized", tmp_path / "lines") == 0
    assert receiver.names == ["a", "b"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_of_torch(tmp_path, pack, capsys):
    """A Chrome trace arrives as spans with the rank in it, between the files of OTLP; what is not sent is said; --from is refused."""
    rank = {"distributedInfo": {"rank": 3, "world_size": 4}}
    kernel = {"cat": "kernel", "pid": 0, "tid": 7, "args": {"stream": 7}}
    kineto(tmp_path / "t.json", 2, lambda begin: [piece("aten::x", begin, 1), piece("k", begin, 1, **kernel)], **rank)
    (tmp_path / "t.json").write_bytes(pack((tmp_path / "t.json").read_bytes()))
    written(tmp_path / "a.otlp", ["before"])
    written(tmp_path / "b.otlp", ["after"])
    files = [tmp_path / name for name in ("a.otlp", "t.json", "b.otlp")]
    with HttpReceiver() as receiver:
        assert send(receiver, *files) == 0
        assert send(receiver, "--from", 9, *files[1:]) == 1
    assert (receiver.names[0], receiver.names[-1], receiver.names.count("aten::x")) == ("before", "after", 2)
    resource = ExportTraceServiceRequest.FromString(receiver.arrived[1].body).resource_spans[0].resource
    assert {each.key: each.value.int_value for each in resource.attributes}["torch.distributed.rank"] == 3
    said = capsys.readouterr().err
    assert "t.json': not in the output: work of devices (2)" in said
    assert "t.json' is converted as a whole" in said


def test_a_trace_that_is_cut_off(tmp_path, capsys):
    """What can be read of a Chrome trace is sent, what cannot is said, and the status is 1; a receiver that is gone is, too."""
    kineto(tmp_path / "t.json", 2)
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text[:-10])
    with HttpReceiver() as receiver:
        assert send(receiver, tmp_path / "t.json") == 1
    assert receiver.names
    assert "what comes before that is counted" in capsys.readouterr().err
    (tmp_path / "no.json").write_text('{"traceEvents": 7}')
    with HttpReceiver() as receiver:
        assert send(receiver, tmp_path / "no.json") == 1
    assert not receiver.names


@pytest.mark.parametrize("name", FORMS)
def test_requests_keep_the_limit(tmp_path, name):
    """Small pieces go together and large ones apart, within the limit; every span once, in order."""
    names = [f"span {number}" for number in range(100)]
    written(tmp_path / name, names[:60], at_a_time=60)
    written(tmp_path / f"b{name}", names[60:], at_a_time=1)
    with HttpReceiver() as receiver:
        files = tmp_path / name, tmp_path / f"b{name}"
        assert send(receiver, "--max-request-bytes", 1000, *files) == 0
    assert receiver.names == names
    assert max(len(arrived.body) for arrived in receiver.arrived) <= 1000
    assert len(receiver.arrived) < 20


@pytest.mark.parametrize("name", FORMS)
def test_cut_off(tmp_path, name, capsys):
    """Of a file that is cut off anywhere, what is whole before that is sent, and the error names file, byte and what is missing."""
    path = tmp_path / name
    names = [f"span {number}" for number in range(9)]
    whole = written(path, names)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - len(data) // 6])
    with HttpReceiver() as receiver:
        assert send(receiver, path) == 1
    assert receiver.names == names[:6]
    error, counts = capsys.readouterr().err.splitlines()
    offset = int(re.search(r"at byte (\d+)(?: after decompression)?: the file is cut off: here begins a ", error)[1])
    assert error.startswith(f"otel-torchprof: {str(path)!r}: at byte ")
    assert 0 < offset < len(whole)
    assert "6 spans sent" in counts


FOREIGN = {
    "text": (b"hello\n", "at byte 0: expected OTLP for traces, as protobuf or as lines of JSON, maybe compressed"),
    "metrics": (METRICS, "at byte 0: expected an object with resourceSpans, found resourceMetrics"),
    "json": (
        b'{\n "a": 1\n}\n',
        "at byte 10: expected an object with traceEvents of a Chrome trace, or resourceSpans of OTLP, found",
    ),
    "protobuf": (
        b"\x0a\x04abcd",
        "at byte 0: expected an OTLP message, found a field that is 5 bytes longer than its message",
    ),
    "no ids": (
        b"\x0a\x06\x12\x04\x12\x02\x2a\x00",
        "expected spans with ids of 16 and 8 bytes, found one with 0 and 0",
    ),
    "too large": (b"\x0a\xff\xff\xff\xff\x0f", "expected pieces of at most 16777216 bytes, found one of 4294967295"),
    "endless size": (b"\x0a" + b"\xff" * 12, "at byte 0: expected the size of a message"),
    "no gzip": (
        b"\x1f\x8bxxxxxxxxxxxxxxxxx",
        "at byte 0 after decompression: expected gzip, found something else after this byte",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files(tmp_path, kind, capsys):
    """What is no OTLP file is an error with its name, the byte and what was expected; the files after it are sent."""
    content, text = FOREIGN[kind]
    (tmp_path / "foreign").write_bytes(content)
    written(tmp_path / "good.otlp", ["a"])
    with HttpReceiver() as receiver:
        assert send(receiver, tmp_path / "foreign", tmp_path / "missing", tmp_path / "good.otlp") == 1
    assert receiver.names == ["a"]
    error, missing, _ = capsys.readouterr().err.splitlines()
    assert text in error
    assert (
        missing
        == f"otel-torchprof: cannot read {str(tmp_path / 'missing')!r}: No such file or directory; check the name"
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_receiver_that_is_gone(tmp_path, name, capsys):
    """It stops, says where to go on, and from there the rest arrives and nothing twice."""
    path = tmp_path / name
    names = [f"span {number}" for number in range(30)]
    written(path, names)
    turns = [None, *[status(503, {"Retry-After": "3600"})] * 5]
    with HttpReceiver(turns=turns) as receiver:
        assert send(receiver, "--max-request-bytes", 1000, path) == 1
        sent = len(receiver.arrived[0].names)
        reason, again, counts = capsys.readouterr().err.splitlines()
        assert "503" in reason
        assert f"{sent} spans sent" in counts
        receiver.turns, receiver.arrived = [], receiver.arrived[:1]
        offset = re.search(rf"continue with: otel-torchprof send --from (\d+) {re.escape(str(path))}$", again)[1]
        assert send(receiver, "--from", offset, path) == 0
    assert receiver.names == names


def test_refused_and_rejected(tmp_path, capsys):
    """What is refused for good is counted as failed and what is after it is sent; rejected spans are counted; both are exit 1."""
    written(tmp_path / "a.otlp", ["a", "b"], at_a_time=1)
    for turn, counts in (
        (Abort(grpc.StatusCode.INVALID_ARGUMENT, "no: secret-token"), "1 spans sent to \\S+, 0 rejected, 1 failed"),
        (None, "2 spans sent to \\S+, 0 rejected, 0 failed"),
    ):
        with GrpcReceiver(turns=[turn]) as receiver:
            arguments = ("--max-request-bytes", 1, "--headers", "x=secret-token", tmp_path / "a.otlp")
            assert send(receiver, *arguments) == (turn is not None)
            displayed = capsys.readouterr().err
            assert re.search(counts, displayed)
            assert "secret" not in displayed
    with HttpReceiver(turns=[status(200, body=partial_success(1, "too old"))]) as receiver:
        assert send(receiver, tmp_path / "a.otlp") == 1
    assert "1 spans sent" in (displayed := capsys.readouterr().err)
    assert "1 rejected" in displayed


def test_too_large_for_the_receiver(tmp_path):
    """A request that the receiver finds too large goes in halves."""
    written(tmp_path / "a.otlp", list("abcd"))
    with HttpReceiver(turns=[status(413)]) as receiver:
        assert send(receiver, tmp_path / "a.otlp") == 0
    assert receiver.names == [*"abcd", *"abcd"]


@pytest.mark.parametrize("size", [1_500_000, 5_000_000])
def test_a_large_resource(tmp_path, size):
    """A file whose resource is above a MiB is sent whole, and not its resource with each span."""
    spans = SpanList(span_rows(list("abcdefgh")), resource=Resource({"large": "x" * size}), scope=SCOPE)
    (tmp_path / "a.otlp").write_bytes(
        b"".join(otlp.encode(spans.table, resource=spans.resource, scope=SCOPE, max_bytes=1 << 24))
    )
    with HttpReceiver() as receiver:
        assert send(receiver, tmp_path / "a.otlp") == 0
    assert (receiver.names, len(receiver.arrived)) == ([*"abcdefgh"], 1)


def test_a_large_resource_that_is_refused(tmp_path, capsys):
    """Where a single span with its resource is too large for the receiver, the others are not tried one by one."""
    spans = SpanList(
        span_rows([f"{n:04}" for n in range(256)]), resource=Resource({"large": "x" * 100_000}), scope=SCOPE
    )
    (tmp_path / "a.otlp").write_bytes(b"".join(otlp.encode(spans.table, resource=spans.resource, scope=SCOPE)))
    with HttpReceiver(turns=[status(413)] * 1000) as receiver:
        assert send(receiver, tmp_path / "a.otlp") == 1
    assert len(receiver.arrived) == 5
    assert "256 failed; 5 requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--protocol", "smoke"], "protocol is 'smoke'; allowed are"),
        (["--max-request-bytes", "0"], "max_request_bytes is 0; allowed is"),
        (["--from", "-1"], "--from is -1: allowed is"),
    ],
)
def test_bad_options(arguments, text, capsys):
    """They are an error that names the option, its value and what is allowed, and exit 1."""
    assert main(["send", *arguments, "--endpoint", f"http://localhost:{free_port()}", "file"]) == 1
    assert text in capsys.readouterr().err


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of many times the size of what is held is read in less than that."""
    exporter = OTLPFileExporter(tmp_path / "a.otlp.gz")
    spans = span_list(*[f"a name of some length {number}" for number in range(2000)])
    for _ in range(40):
        exporter.export(spans)
    exporter.shutdown()
    tracemalloc.start()
    try:
        found = requests_of(pieces(str(tmp_path / "a.otlp.gz")), 1 << 20)
        size = sum(len(request.body) for request in found)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 6 << 20
    assert most < 12 << 20


def test_an_error_comes_after_what_is_before_it(tmp_path):
    """What was readable is given before the error is raised."""
    data = written(tmp_path / "a.json", ["a"])
    (tmp_path / "a.json").write_bytes(data + METRICS)
    found = requests_of(pieces(str(tmp_path / "a.json")), 1 << 20)
    assert next(found).spans == 1
    with pytest.raises(TorchProfError, match=f"at byte {len(data)}: expected an object"):
        next(found)
