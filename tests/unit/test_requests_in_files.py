"""Requests of a service in a file: traces and parents after ``convert``, in tables, and as a tree of ``show --trace``."""

from __future__ import annotations

import json

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._encode import otlp_json
from otel_torchprof._export.formats import TRACE_ENDINGS

BASE = 1_790_000_000_000_000_000
POOL = {"thread.id": 140_000_000_001_000, "thread.name": "pool"}


def written(path, *spans):
    """Writes spans as OTLP: scope, name, trace, id, parent, start, end and attributes of each."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for scope_name, name, trace, number, parent, start, end, attributes in spans:
        scope = resource.scope_spans.add()
        scope.scope.name = scope_name
        span = scope.spans.add(name=name, trace_id=bytes([trace]) * 16, span_id=number.to_bytes(8, "big"))
        span.parent_span_id = parent.to_bytes(8, "big") if parent else b""
        span.start_time_unix_nano, span.end_time_unix_nano = BASE + start, BASE + end
        for key, value in attributes.items():
            of_type = "int_value" if isinstance(value, int) else "string_value"
            setattr(span.attributes.add(key=key).value, of_type, value)
    path.write_bytes(request.SerializeToString())
    return path


def request_of(trace, start, parent=0):
    """A request of a server, whose model runs on a thread of a pool."""
    server, own, first = "opentelemetry.instrumentation.asgi", "otel_torchprof", trace * 16
    end = start + 500_000 + trace * 1000
    return [
        (server, "GET /predict", trace, first, parent, start, end, {}),
        (own, "torch.phase.inference", trace, first + 1, first, start + 1000, end - 5000, {**POOL, "torch.phase.name": "inference"}),
        (own, "Linear", trace, first + 2, first + 1, start + 2000, end - 6000, {**POOL, "torch.module": "Linear"}),
        (own, "aten::addmm", trace, first + 3, first + 2, start + 3000, end - 7000, {**POOL, "torch.op.scope": "function"}),
        (own, "label", trace, first + 4, first + 3, start + 4000, end - 8000, {**POOL, "torch.op.scope": "user_scope"}),
        (server, "GET /predict http send", trace, first + 5, first, end - 2000, end - 1000, {}),
    ]  # fmt: skip


@pytest.fixture
def service(tmp_path):
    """Three requests, one of them of another service, and an operator below a root that operators share."""
    own = "otel_torchprof"
    shared = [
        (own, "torch.operators", 9, 0x901, 0, 8_000_000, 9_000_000, POOL),
        (own, "aten::ones", 9, 0x902, 0x901, 8_100_000, 8_200_000, {**POOL, "torch.op.scope": "function"}),
    ]
    requests = [*request_of(1, 0), *request_of(2, 1_000_000, parent=0x777), *request_of(3, 2_000_000)]
    return written(tmp_path / "service.otlp", *requests, *shared)


def spans_in(path):
    """Trace, id, parent and name of each span of an OTLP file, in order."""
    request = ExportTraceServiceRequest.FromString(path.read_bytes())
    return sorted(
        (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


def converted(source, target):
    assert cli.main(["convert", "-q", str(source), "-o", str(target)]) == 0
    return target


@pytest.mark.parametrize("ending", TRACE_ENDINGS)
def test_conversion_keeps_traces_and_parents(tmp_path, capsys, service, ending):
    """Requests have their traces, ids and parents in each format that is read, over threads too, and roots of operators are there."""
    again = converted(converted(service, tmp_path / f"out{ending}"), tmp_path / "again.otlp")
    assert spans_in(again) == spans_in(service)
    assert "links and kinds of spans" in capsys.readouterr().err


def test_chrome_has_the_ids_of_spans(tmp_path, service):
    """Chrome JSON of a service's file has trace, span and parent ids as arguments, as that of the exporter."""
    events = json.loads(converted(service, tmp_path / "t.json").read_text())["traceEvents"]
    [phase] = [e["args"] for e in events if e["name"] == "torch.phase.inference" and e["args"]["trace_id"] == "01" * 16]
    assert (phase["span_id"], phase["parent_id"]) == (f"{17:016x}", f"{16:016x}")


def test_a_profile_keeps_its_ids(tmp_path):
    """A profile's steps, and what is in them, have the ids of its file when that is converted; so has a profile without steps."""
    for steps in (3, 0):
        with otp.profile(operators=False) as prof:
            for _ in range(steps or 1):
                with otp.record_function("outer"), otp.record_function("inner"):
                    pass
                if steps:
                    prof.step()
        prof.export_otlp(tmp_path / "a.otlp")
        assert spans_in(converted(tmp_path / "a.otlp", tmp_path / "b.otlp")) == spans_in(tmp_path / "a.otlp")


def test_the_table_of_events_has_traces_and_parents(service):
    """The parent of an event without one on its thread is that by span ids; an event below a span that is none has none."""
    rows = otp.load(service).to_arrow().select(["id", "parent", "trace", "name"]).to_pylist()
    names = {row["id"]: row["name"] for row in rows}
    found = {(row["trace"], row["name"]): names.get(row["parent"]) for row in rows}
    of_request = {name: parent for (trace, name), parent in found.items() if trace == "01" * 16}
    assert of_request == {
        "GET /predict": None,
        "torch.phase.inference": "GET /predict",
        "Linear": "torch.phase.inference",
        "aten::addmm": "Linear",
        "label": "aten::addmm",
        "GET /predict http send": "GET /predict",
    }
    assert found["09" * 16, "aten::ones"] is None


def test_requests_at_the_same_time(tmp_path):
    """Requests that a thread serves at the same time are not below one another, and their self times are their own."""
    path = written(tmp_path / "t.otlp", *request_of(1, 0), *request_of(2, 100))
    roots = [row for row in otp.load(path).to_arrow().to_pylist() if row["name"] == "GET /predict"]
    assert [(row["parent"], row["self"]) for row in roots] == [(None, 500_000), (None, 501_000)]


def test_what_is_below_a_span_that_is_left_out(service):
    """With less detail, a span is below the nearest one of the file that is there."""
    parents = {span.name: span.parent for span in otp.load(service).spans(detail="modules")}
    assert "aten::addmm" not in parents
    assert parents["label"].span_id % 16 == 2
    assert parents["torch.phase.inference"].span_id % 16 == 0  # spans of other libraries are like labels


def test_parents_in_a_circle(tmp_path):
    """Spans that are their own ancestors become roots, in the output as in the tree, which ends."""
    own = "otel_torchprof"
    spans = [(own, f"l{n}", 1, n, 1 + n % 3, n, 100 - n, {**POOL, "torch.op.scope": "user_scope"}) for n in (1, 2, 3)]
    path = written(tmp_path / "t.otlp", *spans, (own, "own", 1, 4, 4, 0, 9, POOL))
    loaded = otp.load(path).spans(detail="frames")
    assert {span.name: span.parent for span in loaded} == {"l1": None, "l2": None, "l3": None, "own": None}
    assert cli.main(["show", "-q", "--trace", "slowest", str(path)]) == 0


def shown(capsys, path, *words):
    """What ``show --trace`` prints for some words, without the columns of times."""
    status = cli.main(["show", "-q", *map(str, words), str(path)])
    out, err = capsys.readouterr()
    return status, [line[42:] for line in out.splitlines()[1:]], err


@pytest.mark.parametrize("ending", ["", *TRACE_ENDINGS])
def test_the_slowest_request_as_a_tree(tmp_path, capsys, service, ending):
    """The slowest request, not a longer root of operators, is printed with what ran on another thread, of the file and of what it is converted to."""
    path = converted(service, tmp_path / f"out{ending}") if ending else service
    capsys.readouterr()
    status, lines, _ = shown(capsys, path, "--trace", "slowest")
    assert status == 0
    assert lines == [
        "Span",
        "GET /predict",
        "├─ torch.phase.inference  [thread 140000000001000]",
        "│  └─ Linear",
        "│     └─ aten::addmm",
        "│        └─ label",
        "└─ GET /predict http send",
    ]


@pytest.mark.parametrize("form", ["t.otlp", "t.jsonl"])
def test_links_of_a_tree(tmp_path, capsys, form):
    """A request says in which trace its batch is, and a batch where its first requests are; of spans outside of the file only the trace is known."""
    own, address = "otel_torchprof", tmp_path / form
    path = written(
        tmp_path / "t.otlp",
        *request_of(1, 0),
        *request_of(2, 0),
        (own, "torch.request.batch", 1, 0x1F, 16, 100, 200, {}),
        (own, "torch.batch", 3, 0x30, 0, 100, 200, {}),
    )
    request = ExportTraceServiceRequest.FromString(path.read_bytes())
    targets = {0x1F: [(3, 0x30)], 0x30: [(1, 16), (2, 32), (7, 0x70), (8, 0x80), (9, 0x90)]}
    for scope in request.resource_spans[0].scope_spans:
        for trace, number in targets.get(int.from_bytes(scope.spans[0].span_id, "big"), ()):
            scope.spans[0].links.add(trace_id=bytes([trace]) * 16, span_id=number.to_bytes(8, "big"))
    address.write_bytes(request.SerializeToString() if form == "t.otlp" else otlp_json.line_of(request))
    assert "├─ torch.request.batch  -> torch.batch in 03030303" in shown(capsys, address, "--trace", "01")[1]
    assert shown(capsys, address, "--trace", "03")[1][1:] == [
        "torch.batch  -> GET /predict in 01010101, GET /predict in 02020202, trace 07070707 and 2 more"
    ]


def test_rows_of_a_tree(capsys, service):
    """Spans nearest to the root, the longest first, are printed up to a limit, with the number of those left out below each; times are offset, duration and self."""
    assert shown(capsys, service, "--trace", "0101", "--rows", "2")[1][1:] == [
        "GET /predict  … 1 more",
        "└─ torch.phase.inference  [thread 140000000001000]  … 3 more",
        "",
    ]
    assert cli.main(["show", "-q", "--trace", "0101", "--rows", "3", str(service)]) == 0
    first, _, *lines, last = capsys.readouterr().out.splitlines()
    assert first == f"Trace {'01' * 16}: 6 spans, 501.000us"
    assert lines[0].split() == ["0.000us", "501.000us", "5.000us", "GET", "/predict"]
    assert lines[1].endswith("├─ torch.phase.inference  [thread 140000000001000]  … 3 more")
    assert len(lines) == 3
    assert last == "and 3 more: --rows -1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "abc"], f"no trace 'abc'; the slowest: {'03' * 16} (503.000us), {'02' * 16} "),
        (["--trace", "0"], "4 traces that begin with '0'; the slowest: "),
        (["--trace", ""], "no trace ''"),
        (["--trace", "slowest", "--json"], "--trace prints no JSON"),
        (["--trace", "slowest", "--by", "module"], "--trace print no averages"),
    ],
)
def test_errors(capsys, service, words, message):
    """An id that is unknown, or of several traces, is an error that names the slowest traces; so are options that exclude each other."""
    status, lines, err = shown(capsys, service, *words)
    assert (status, lines) == (1, [])
    assert message in err


def test_a_file_without_traces(tmp_path, capsys):
    """A trace of torch.profiler has no trace ids: the error says what is displayed instead."""
    (tmp_path / "t.json").write_text(json.dumps([{"ph": "X", "name": "op", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]))
    status, _, err = shown(capsys, tmp_path / "t.json", "--trace", "slowest")
    assert status == 1
    assert "no spans with trace ids; without --trace its averages are shown" in err
