"""``otp.load`` of OTLP: files of this package and of a Collector as profiles, what they lack, what is wrong in them."""

from __future__ import annotations

import gzip
import json
import random
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed_files import VALUES, bytes_changed
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read
from otel_torchprof._columns.schema import CollectiveFlag, Flag, Kind
from otel_torchprof._encode import otlp_json

BASE = 1_790_000_000_000_000_000


def request(*spans, scope="otel_torchprof", first=1, **resource):
    """A request with spans of one resource."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    add(resource_spans.resource, resource)
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = scope
    for number, (name, start, end, others) in enumerate(spans, first):
        attributes = dict(others)
        span = scope_spans.spans.add(name=name, trace_id=b"t" * 16, span_id=number.to_bytes(8, "big"))
        span.start_time_unix_nano, span.end_time_unix_nano = BASE + start, BASE + end
        parent = attributes.pop("parent", None)
        span.parent_span_id = b"" if parent is None else parent.to_bytes(8, "big")
        add(span, {"thread.id": 140_000_000_000_000, "thread.name": "main", **attributes})
    return request


def add(message, attributes):
    """Adds attributes to a message."""
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    for key, value in attributes.items():
        setattr(message.attributes.add(key=key).value, kinds[type(value)], value)


def framed(*requests):
    """As a Collector's file exporter writes requests: each after its size."""
    bodies = [each.SerializeToString() for each in requests]
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


PACKINGS = {
    "protobuf": lambda each: each.SerializeToString(),
    "sized": framed,
    "lines": otlp_json.line_of,
    "gzip": lambda each: gzip.compress(each.SerializeToString()),
    "gzip lines": lambda each: gzip.compress(b"\xef\xbb\xbf" + otlp_json.line_of(each)),
}
SCOPE = {"torch.op.scope": "function"}


@pytest.fixture
def loaded(tmp_path):
    """Loads bytes, or a request."""

    def load(content):
        path = tmp_path / "t.otlp"
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        return otp.load(path)

    return load


def named(text):
    """A name without the address that spans do not have."""
    return re.sub(r" at 0x[0-9a-f]+>", ">", text)


def figures(prof):
    """Calls, total and self time of each name, ns."""
    return {
        named(average.key): (
            average.count,
            round(average.cpu_time_total * 1000),
            round(average.self_cpu_time_total * 1000),
        )
        for average in prof.key_averages()
    }


def test_spans_of_the_application(loaded):
    """Spans of another scope are labels, as those of ``record_function`` are, and no operators."""
    prof = loaded(request(("POST /predict", 0, 100, {}), scope="shop"))
    assert [(event.name, event.is_user_annotation) for event in prof.events()] == [("POST /predict", True)]


@pytest.mark.parametrize("name", ["t.otlp", "t.jsonl", "t.otlp.gz", "t.jsonl.gz"])
def test_averages_of_a_recording_are_the_same(tmp_path, name):
    """Averages, names, threads and steps of a loaded profile are those of the profile that wrote the file, to the nanosecond."""
    with otp.profile(operators=False, with_stack=True, frames=otp.FrameFilter(include=["json"])) as prof:
        for _ in range(3):
            with otp.record_function("outer"), otp.record_function("inner"):
                json.dumps({"a": [1, 2]})
            prof.step()
    prof.export_otlp(tmp_path / name, detail="frames")
    loaded = otp.load(tmp_path / name)
    assert figures(loaded) == figures(prof)
    assert [each.name for each in loaded.events()] == [named(each.name) for each in prof.events()]
    assert [list(map(named, each.stack)) for each in prof.events()] == [each.stack for each in loaded.events()]
    assert [tuple(step) for step in loaded.steps] == [tuple(step) for step in prof.steps]
    assert [(thread.ident, thread.name) for thread in loaded.threads] == [(prof.threads[0].ident, "MainThread")]
    loaded.export_otlp(tmp_path / "again.otlp", detail="frames")
    assert figures(otp.load(tmp_path / "again.otlp")) == figures(prof)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_any_packing_is_the_same(loaded, packing):
    """Spans are events, however the requests are written: kinds, parents, inputs, errors, memory, resource."""
    prof = loaded(
        packing(
            request(
                ("torch.step", 0, 100, {"torch.step.number": 4}),
                ("label", 10, 90, {"parent": 1, "torch.op.scope": "user_scope", "torch.memory.allocated": 70}),
                (
                    "aten::add",
                    20,
                    50,
                    {
                        "parent": 2,
                        **SCOPE,
                        "torch.op.input_shapes": "[[2, 3], []]",
                        "torch.op.input_dtypes": "['float', 'Scalar']",
                        "torch.op.concrete_inputs": "[None, 0.5]",
                        "torch.memory.allocated": 50,
                        "torch.memory.released": 8,
                        "torch.memory.peak": 60,
                        "error.type": "ValueError",
                    },
                ),
                ("f.py(3): f", 60, 80, {"parent": 2, "code.function.name": "f", "torch.async": True}),
                **{"process.pid": 7, "service.name": "s"},
            )
        )
    )
    assert figures(prof) == {"label": (1, 80, 50), "aten::add": (1, 30, 30), "f.py(3): f": (1, 20, 0)}
    assert prof.columns["kind"].tolist() == [Kind.LABEL, Kind.OPERATOR, Kind.FRAME]
    assert prof.columns["flags"].tolist() == [0, Flag.ERROR, Flag.ASYNC]
    memory = {each.key: (each.self_cpu_memory_usage, each.cpu_memory_peak) for each in prof.key_averages()}
    assert memory == {"label": (20, 60), "aten::add": (42, 60), "f.py(3): f": (0, 0)}
    event = prof.events()[1]
    assert (event.input_shapes, event.input_dtypes, event.concrete_inputs) == (
        [[2, 3], []],
        ["float", "Scalar"],
        [None, 0.5],
    )
    assert [tuple(step)[:3] for step in prof.steps] == [(4, BASE, BASE + 100)]
    assert prof.spans()[0].resource.attributes["service.name"] == "s"
    assert prof.health.notes == ("allocations are sums per event, at its end: OTLP has no others",)


def test_processes_are_apart(loaded):
    """Threads of two resources with the same id are two; requests of one resource are one process."""
    one, other = request(("a", 0, 10, SCOPE), rank=0), request(("b", 0, 10, SCOPE), rank=1)
    prof = loaded(framed(one, other, request(("a", 20, 30, SCOPE), first=2, rank=0)))
    assert prof.columns["thread"].tolist() == [0, 0, 1]
    assert figures(prof) == {"a": (2, 20, 20), "b": (1, 10, 10)}


def test_what_a_file_lacks_is_said(loaded):
    """Dropped events count with their number."""
    prof = loaded(request(("a", 0, 10, {**SCOPE, "torch.dropped_events": 5})))
    assert prof.health.dropped == {"the reason is not in the file": 5}


AGGREGATE = {"torch.aggregated.count": 5, "torch.aggregated.duration": 4e-8}
COLLAPSED = {"torch.collapsed.count": 3, "torch.collapsed.duration": 2e-8}


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_spans_that_stand_for_many(loaded, packing):
    """Their calls count, in themselves and in their parents; a namesake is not left out where others were beside it, or may have been."""
    spans = [
        ("torch.job", 0, 900, COLLAPSED),
        ("a", 0, 500, {"parent": 1, **SCOPE, **COLLAPSED}),
        ("a", 0, 100, {"parent": 2, **SCOPE, **AGGREGATE}),
        ("a", 0, 90, {"parent": 3, **SCOPE}),
        ("b", 600, 700, {"parent": 1, **SCOPE, "torch.aggregated.count": 2}),
        ("b", 600, 700, {"parent": 5, **SCOPE, "torch.aggregated.count": 2}),
        ("c", 800, 830, {"parent": 1, **SCOPE}),
        ("c", 800, 820, {"parent": 7, **SCOPE}),
    ]
    prof = loaded(packing(request(*spans)))
    assert figures(prof) == {
        "a": (7, 630, 530),
        "b": (4, 200, 100),
        "c": (1, 30, 30),
        "(collapsed into others)": (6, 40, 40),
    }
    assert [(event.name, event.count) for event in prof.events()] == [
        ("a", 1),
        ("a", 5),
        ("a", 1),
        ("b", 2),
        ("b", 2),
        ("c", 1),
    ]
    assert prof.columns["end"].tolist()[:2] == [BASE + 500, BASE + 100]
    durations = [
        (span.name, span.attributes["torch.self_duration"])
        for span in prof.spans()
        if span.name not in {"torch.profile", "torch.job"}
    ]
    assert durations[:2] == [("a", 440e-9), ("a", 0.0)]
    (root,) = (span for span in prof.spans() if span.name == "torch.profile")
    assert root.attributes["torch.collapsed.count"] == 3


@pytest.mark.parametrize("value", [-1, 1 << 62, "many"])
def test_a_count_that_is_none(loaded, value):
    """A span whose count cannot be used is left out, as ``show`` leaves it out, and the note says where it is."""
    prof = loaded(request(("a", 0, 10, SCOPE), ("b", 10, 20, {**SCOPE, **COLLAPSED, "torch.aggregated.count": value})))
    assert figures(prof) == {"a": (1, 10, 10)}
    assert "not counted: 1; the first: torch.aggregated.count" in prof.health.notes[0]
    assert prof.is_partial


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("torch.aggregated.count", (1 << 61) - 9),
        ("torch.aggregated.duration", 2.3e9),
        ("torch.collapsed.count", (1 << 61) - 9),
        ("torch.collapsed.duration", 2.3e9),
    ],
)
def test_counts_whose_sum_is_too_large(loaded, key, value):
    """Spans with which a sum would not fit into 64 bits are left out, as ``show`` leaves them out; all others count."""
    spans = [
        (f"s{number}", 10 * number, 10 * number + 9, {**SCOPE, **AGGREGATE, **COLLAPSED, key: value})
        for number in range(5)
    ]
    prof = loaded(request(*spans, ("small", 90, 99, {**SCOPE, key: 1 if type(value) is int else 1e-9})))
    assert [event.name for event in prof.events()] == ["s0", "small"]
    assert f"not counted: 4; the first: {key} is" in prof.health.notes[0]
    assert all(count > 0 and total >= 0 <= own for count, total, own in figures(prof).values())
    sums, problems = read(prof.path)
    for row in sums.averages():
        assert figures(prof)[row.name] == pytest.approx((row.calls, row.total, row.self_time))
    assert problems == list(prof.health.notes[:1])


INPUTS = {"torch.op.input_shapes": "[[2, 3], [3, 4]]", "torch.op.input_dtypes": "['float', 'float']"}


@pytest.mark.parametrize("ending", [".otlp", ".jsonl", ".json"])
def test_operations_of_calls_are_added_up(loaded, tmp_path, ending):
    """The floating-point operations of an aggregate span are those that it says, as its calls may differ in shapes; no less after a conversion."""
    spans = [
        ("aten::mm", 0, 10, {**SCOPE, **INPUTS, "torch.op.flops": 48}),
        ("aten::mm", 10, 20, {**SCOPE, **AGGREGATE, "torch.op.flops": 1000}),
        ("aten::mm", 20, 30, {**SCOPE, **AGGREGATE, **INPUTS, "torch.op.flops": 240}),
        ("aten::mm", 30, 40, {**SCOPE, **AGGREGATE, **INPUTS}),
        ("aten::mm", 40, 50, {**SCOPE, **AGGREGATE, "torch.op.flops": -1}),
    ]
    prof = loaded(request(*spans))
    expected = [48, 1000, 240, 240, 0]
    assert [event.flops for event in prof.events()] == expected
    assert prof.reductions["flops"].tolist() == [1000, 240, -1, -1]
    assert not prof.is_partial
    path, again = tmp_path / f"out{ending}", tmp_path / f"again{ending}"
    assert cli.main(["convert", "-q", prof.path, "-o", str(path)]) == 0
    assert cli.main(["convert", "-q", str(path), "-o", str(again)]) == 0
    for output in (path, again):
        assert [event.flops for event in otp.load(output).events()] == expected


def test_what_chrome_lacks_of_reduced_traces_is_said(loaded, tmp_path, capfd):
    """A reduced trace is Chrome JSON of spans: all that is lost on the way is said, memory and numbers of dropped events are not lost, and nothing is said twice."""
    device = {"torch.device.type": "cuda", "torch.device.index": 0, "torch.device.stream": 7}
    spans = [
        ("f.py(1): f", 0, 5000, {"code.function.name": "f", "code.file.path": "f.py", "code.line.number": 1}),
        (
            "AddBackward0",
            100,
            200,
            {"torch.op.scope": "backward_function", "torch.op.forward_thread": 1, "torch.op.sequence_nr": 7},
        ),
        ("small", 300, 400, {**SCOPE, **AGGREGATE, "torch.dropped_before": True, "torch.memory.allocated": 64}),
        ("timed", 500, 600, {**SCOPE, **device, "torch.device.duration": 3e-8, "torch.dropped_events": 5}),
        ("0", 700, 800, {"torch.module": "a.0"}),
    ]
    prof = loaded(request(*spans))
    output, again = tmp_path / "out.json", tmp_path / "again.json"
    assert cli.main(["convert", "-q", prof.path, "-o", str(output)]) == 0
    said = capfd.readouterr().err
    for loss in (
        "device times are only attributes",
        "Python functions are labels in the output, and no stacks",
        "where events were dropped",
    ):
        assert said.count(loss) == 1
    assert "sums per event in the output" not in said
    back = otp.load(output)
    assert back.health.dropped == prof.health.dropped == {"the reason is not in the file": 5}
    assert (back.devices, back.memory["bytes"].tolist(), back.with_stack) == (None, [64], False)
    assert cli.main(["convert", "-q", str(output), "-o", str(again)]) == 0
    said = capfd.readouterr().err
    assert said.count("in the output") == said.count("not in the output: links and kinds of spans") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\x0a\x08", "at byte 0: the file is cut off: here begins a message of 10 bytes"),
        (b"\x00\x00\x00\x00", "at byte 0: expected the size of a message, found 0"),
        (b"\x7f\xff", "expected a Chrome trace, or OTLP for traces, found"),
        (b"\x00\xff\xff\xff", "the file is cut off: here begins a message of 16777215 bytes"),
        (b"\n\xff\xff\xff\xff\x0f", "expected pieces of at most 16777216 bytes"),
        (b"\n\x02\x12\x00", ""),
        (b"\n\x02\xff\xff", "not counted: 1; the first: bytes that are no OTLP for traces, event 1, at byte"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 5}]}]}]}', "name is no text, event 1"),
        (b'{"resourceSpans": [{"scopeSpans": [', "at byte 0: the file is cut off: here begins a line of JSON"),
        (b"\n\x0a\x12\x08\x12\x06\x0a\x00\x12\x00\x2a\x00", "a span without ids of 16 and 8 bytes"),
    ],
)
def test_a_file_without_a_span_is_refused(loaded, content, message):
    """If nothing can be read, the error names the file, the byte and what was expected; a file without spans is an empty profile."""
    if not message:
        assert len(loaded(content).events()) == 0
        return
    with pytest.raises(otp.TorchProfError, match=r"t\.otlp'") as raised:
        loaded(content)
    assert message in str(raised.value)


def test_what_comes_before_a_fault_counts(loaded):
    """Of a file that is cut off the requests before count, and the message says where; requests after a bad one count too."""
    one, other = request(("a", 0, 10, SCOPE)), request(("a", 20, 30, SCOPE), first=2)
    prof = loaded(framed(one, other)[:-3])
    assert figures(prof) == {"a": (1, 10, 10)}
    assert f"at byte {len(framed(one))}: the file is cut off" in prof.health.notes[0]
    prof = loaded(otlp_json.line_of(one) + b'{"resourceSpans": 5}\n' + otlp_json.line_of(other))
    assert figures(prof) == {"a": (2, 20, 20)}
    assert "not counted: 1; the first: bytes that are no OTLP for traces" in prof.health.notes[0]


def test_memory_stays_below_the_limit(tmp_path):
    """At the limit of memory reading stops; the spans before that count, and the message says the limit."""
    body = request(*[(f"n{index}", 0, 1, SCOPE) for index in range(20_000)]).SerializeToString()
    (tmp_path / "t.otlp").write_bytes(body)
    prof = otp.load(tmp_path / "t.otlp", memory_limit=200_000)
    assert 0 < len(prof.events()) < 20_000
    assert "the columns would need more than the limit of" in prof.health.notes[0]


def changed(seed):
    """A file with other values, or with other bytes."""
    number = random.Random(seed)
    attributes = {**SCOPE, "torch.op.input_shapes": "[[2, 3], []]", "torch.step.number": 3, "torch.memory.allocated": 5}
    attributes |= {**AGGREGATE, **COLLAPSED} if number.random() < 0.5 else {}
    one = request(("torch.step", 0, 9, attributes), ("b", 1, 5, {"parent": 1, **attributes}), **{"process.pid": 3})
    if number.random() < 0.3:
        document = json.loads(otlp_json.line_of(one))
        target = number.choice(document["resourceSpans"][0]["scopeSpans"][0]["spans"])
        target = number.choice([target, *target["attributes"]])
        target[number.choice(list(target))] = number.choice(VALUES)
        return json.dumps(document).encode()
    return bytes_changed(number, number.choice(list(PACKINGS.values()))(one))[0]


def error_or_profile(path):
    """The profile in a file, and the error if it was refused."""
    try:
        return otp.load(path), None
    except otp.TorchProfError as error:
        return None, str(error)


@given(st.integers(0, 1 << 40))
def test_whatever_the_file(tmp_path_factory, seed):
    """Whatever values and bytes a file has, it is refused with its name, or it is a profile of which everything can be read."""
    path = tmp_path_factory.mktemp("changed") / "t.otlp"
    path.write_bytes(changed(seed))
    prof, error = error_or_profile(path)
    if prof is None:
        assert repr(str(path)) in error
        return
    counts = [row.count for row in prof.key_averages() if row.key != "(collapsed into others)"]
    assert sum(counts) == prof.total_average().count == sum(event.count for event in prof.events())
    assert len(prof.events()) == len(prof.to_pandas())
    assert len(list(prof.spans())) >= len(prof.events())
    prof.export_chrome_trace(path.with_name("again.json"))
    prof.export_otlp(path.with_name("again.otlp"))
    assert all(repr(each) for each in (*prof.events()[:50], prof.steps, prof.health, prof.spans()))


def test_collectives_and_the_rank_of_lines_of_json(tmp_path):
    """Group, number, size and backend of a collective are those of its span, also in a file that ``convert`` makes of it."""
    attributes = {"name": "all_reduce", "group": "0", "sequence_nr": 7, "rank": 3, "size": 4096, "group_size": 4}
    attributes |= {"backend": "nccl", "dtype": "float", "reduce_op": "sum", "async": True}
    of_span = {f"torch.collective.{key}": value for key, value in attributes.items()}
    spans = [("aten::mm", 0, 5, SCOPE), ("c10d::allreduce_", 10, 20, of_span | SCOPE)]
    line = otlp_json.line_of(request(*spans, **{"torch.distributed.rank": 3}))
    (tmp_path / "t.jsonl").write_bytes(line.replace(b'"intValue":3}', b'"intValue":"3"}'))
    otp.load(tmp_path / "t.jsonl").export_as(tmp_path / "again.otlp")
    for prof in map(otp.load, (tmp_path / "t.jsonl", tmp_path / "again.otlp")):
        found = {name: column.tolist() for name, column in prof.collectives.items()}
        names = {name: prof.names[found[name][0]] for name in ("group", "backend", "dtype", "reduce_op")}
        assert names == {"group": "0", "backend": "nccl", "dtype": "float", "reduce_op": "sum"}
        assert prof.names[prof.columns["name"][prof.columns["id"] == found["event"][0]][0]] == "c10d::allreduce_"
        numbers = [
            found[name] for name in ("sequence_nr", "bytes_in", "bytes_out", "group_size", "rank", "peer", "flags")
        ]
        assert numbers == [[7], [4096], [4096], [4], [3], [-1], [CollectiveFlag.ASYNC]]
        assert prof.rank == 3
