"""Python's calls among the spans: at which detail they are spans, what their attributes say, and what is said where they are none."""

from __future__ import annotations

import itertools

import pytest
from recorded_tables import recorded_table
from test_attributes import shown_by

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.frame_info import FrameInfo, FunctionInfo, ModuleInfo
from otel_torchprof._columns.schema import Flag, Scope
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.frame_spans import displayed

NAMES = [
    "",
    "train.py(3): forward",
    "<built-in method relu of Tensor object at 0x7f00aa>",
    "nn.Module: Linear_0",
    "gc.collect: generation 2",
    "aten::relu",
    "encoder.linear1",
    "label",
    "ValueError",
]
FORWARD, RELU, LINEAR, COLLECT, OP, MODULE, LABEL, ERROR = range(1, 9)
INFO_FIELDS = FrameInfo(
    functions={FORWARD: FunctionInfo("app.Net.forward", "/srv/train.py", 3)},
    modules={LINEAR: ModuleInfo("encoder.linear1", "Net", "torch.nn.Linear", ())},
)


def batch_of(*rows, info=INFO_FIELDS, threads=(), **columns):
    """Rows of a name, a kind and a parent, each inside the time of the one before."""
    name, kind, parent = zip(*rows, strict=True)
    times = {"start": range(len(rows)), "end": [100 - at for at in range(len(rows))]}
    return Batch.of({**times, "name": name, "kind": kind, "parent": parent} | columns, NAMES, threads, frame_info=info)


def spans_of(batch, detail):
    """Name and attributes of each span below the root."""
    events, callers = displayed(batch, detail)
    ids = itertools.count(1)
    table = recorded_table(events, start=0, end=100, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    table = add_attributes(table, events, callers=callers)
    plain = {"torch.self_duration", "thread.id", "thread.name", "torch.op.scope"}
    found = [{key: value for key, value in event.items() if key not in plain} for event in shown_by(table)]
    return [(table.names[name], event) for name, event in zip(table.name.tolist(), found, strict=True)][1:]


def test_at_the_detail_of_frames_calls_are_spans():
    """A function's span has its name, file and line, a module's its full name; names have no addresses."""
    batch = batch_of((LINEAR, 4, -1), (FORWARD, 4, 0), (RELU, 4, 1), (OP, 1, 2))
    assert spans_of(batch, "frames") == [
        ("nn.Module: Linear_0", {"torch.module": "encoder.linear1"}),
        (
            "train.py(3): forward",
            {"code.function.name": "app.Net.forward", "code.file.path": "/srv/train.py", "code.line.number": 3},
        ),
        ("<built-in method relu of Tensor object>", {}),
        ("aten::relu", {}),
    ]


def test_where_calls_are_no_spans_what_they_called_says_by_whom():
    """What a Python function called directly, or by way of C functions, has its name; what an operator called has none."""
    batch = batch_of((FORWARD, 4, -1), (RELU, 4, 0), (OP, 1, 1), (OP, 1, 2), (LABEL, 2, 0), (OP, 1, -1))
    caller = {"code.function.name": "app.Net.forward", "code.file.path": "/srv/train.py", "code.line.number": 3}
    assert spans_of(batch, "ops") == [
        ("aten::relu", caller),
        ("aten::relu", {}),
        ("label", caller),
        ("aten::relu", {}),
    ]


def test_without_info_spans_are_as_they_are():
    """A recording that knows nothing of its functions has spans for its calls all the same."""
    batch = batch_of((LINEAR, 4, -1), (FORWARD, 4, 0), (OP, 1, 1), info=None)
    assert [attributes for _, attributes in spans_of(batch, "frames")] == [{}, {}, {}]
    assert spans_of(batch, "ops") == [("aten::relu", {})]


def test_at_the_detail_of_modules():
    """Modules and labels are spans, torch's own labels too; of hooks and tracer, which both tell of modules, the hooks count."""
    rows = (FORWARD, 4, -1), (LINEAR, 4, 0), (OP, 1, 1), (LABEL, 2, 2), (LABEL, 1, 3)
    scope = [0, 0, 0, 0, Scope.USER_SCOPE]
    caller = {"code.function.name": "app.Net.forward", "code.file.path": "/srv/train.py", "code.line.number": 3}
    names = [name for name, _ in spans_of(batch_of(*rows, scope=scope), "modules")]
    assert names == ["nn.Module: Linear_0", "label", "label"]
    hooks = batch_of((FORWARD, 4, -1), (LINEAR, 4, 0), (MODULE, 3, 1), (OP, 1, 2))
    assert spans_of(hooks, "modules") == [("encoder.linear1", {"torch.module": "encoder.linear1", **caller})]
    assert [name for name, _ in spans_of(hooks, "frames")] == ["train.py(3): forward", "encoder.linear1", "aten::relu"]


def test_modules_on_threads_of_which_hooks_do_not_tell():
    """Hooks tell of the threads that a recording follows, calls of all: where there are only calls, these are the spans."""
    threads = RecordedThread(1, 1, 1, "main"), RecordedThread(2, 2, 2, "other")
    rows = (LINEAR, 4, -1), (MODULE, 3, 0), (LINEAR, 4, -1)
    batch = batch_of(*rows, thread=[0, 0, 1], threads=threads)
    for detail in ("modules", "frames"):
        assert [name for name, _ in spans_of(batch, detail)] == ["encoder.linear1", "nn.Module: Linear_0"], detail


def test_collections_generators_and_errors():
    """A collection has its generation, segments of a generator its number and no forward thread; an unknown class is _OTHER."""
    batch = batch_of(
        (FORWARD, 4, -1),
        (COLLECT, 4, 0),
        (RELU, 4, 0),
        (OP, 1, 0),
        fwd_thread=[5, 0, 0, 7],
        flags=[Flag.ERROR, 0, Flag.ERROR, 0],
        error_type=[ERROR, 0, 0, 0],
        info=None,
    )
    assert [attributes for _, attributes in spans_of(batch, "frames")] == [
        {"torch.frame.identity": 5, "error.type": "ValueError"},
        {"cpython.gc.generation": 2},
        {"error.type": "_OTHER"},
        {"torch.op.forward_thread": 7},
    ]


def test_calls_that_exceptions_leave_are_no_errors():
    """An exception that leaves a label or a module is an error of that, and of no call that it passed on its way."""
    rows = (LABEL, 2, -1), (MODULE, 3, 0), (FORWARD, 4, 1), (RELU, 4, 2), (OP, 1, 3)
    events, _ = displayed(batch_of(*rows, error_type=[ERROR] * 5), "frames")
    ids = itertools.count(1)
    table = recorded_table(events, start=0, end=100, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    assert table.error.tolist() == [0, 1, 1, 0, 0, 1]


def test_modules_of_several_recordings():
    """Where a name means one module in one recording and another in the next, each call has its own."""
    parts = [FrameInfo(modules={LINEAR: ModuleInfo(name, "", "", ())}, since=at) for at, name in ((0, "a"), (2, "b"))]
    batch = batch_of(*[(LINEAR, 4, -1)] * 4, info=FrameInfo.joined(parts))
    assert [attributes["torch.module"] for _, attributes in spans_of(batch, "frames")] == ["a", "a", "b", "b"]


def test_attributes_that_are_hidden(monkeypatch):
    """OTEL_TORCHPROF_HIDDEN_ATTRIBUTES names attributes that no span has."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "code.file.path, torch.op.scope,nothing.of.ours")
    [(_, attributes)] = spans_of(batch_of((FORWARD, 4, -1)), "frames")
    assert attributes == {"code.function.name": "app.Net.forward", "code.line.number": 3}


# ---- profiles ----


def leaf():
    return len("leaf")


def numbers():
    yield leaf()
    yield leaf()


def work():
    list(numbers())
    with otp.record_function("inner"):
        leaf()


@pytest.fixture(scope="module")
def prof():
    """Labels around calls around labels."""
    with otp.profile(operators=False, with_stack=True) as prof, otp.record_function("outer"):
        work()
    return prof


def named(spans):
    return [span.name.rpartition(": ")[2] for span in spans]


def test_calls_are_no_spans_unless_asked_for(prof):
    """By default a profile's spans are its labels, under each other, and say by whom they were called."""
    root, outer, inner = prof.spans()
    assert named((root, outer, inner)) == ["torch.profile", "outer", "inner"]
    assert inner.parent.span_id == outer.context.span_id
    assert inner.attributes["code.function.name"] == f"{__name__}.work"
    assert inner.attributes["code.file.path"] == __file__
    assert inner.attributes["code.line.number"] == work.__code__.co_firstlineno


def test_calls_are_spans_where_asked_for(prof):
    """With detail "frames" every call is a span under the one around it, and each event has the ids that it always has."""
    spans = prof.spans(detail="frames")
    by_id = {span.context.span_id: span for span in spans}
    assert {span.context.trace_id for span in spans} == {span.context.trace_id for span in prof.spans()}
    assert all(by_id[span.context.span_id].name == span.name for span in prof.spans())
    at, above = next(span for span in spans if span.name.endswith(": leaf")), []
    while at.parent is not None:
        at = by_id[at.parent.span_id]
        above += named([at])
    assert above[:3] == ["numbers", "work", "outer"]
    segments = [span.attributes["torch.frame.identity"] for span in spans if span.name.endswith(": numbers")]
    assert len(segments) == 3
    assert len(set(segments)) == 1


def test_every_way_out_takes_a_detail(prof, tmp_path):
    """Messages, files and exporters have the spans of the detail that they are asked for; another one is refused by name."""
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    prof.export_otlp(tmp_path / "spans", detail="frames")
    read = TracesData.FromString((tmp_path / "spans").read_bytes()).resource_spans[0].scope_spans[0].spans
    assert prof.export(exporter, detail="frames") == len(prof.spans(detail="frames")) == len(read)
    assert named(exporter.get_finished_spans()) == named(prof.spans(detail="frames"))
    assert named(prof.spans(detail="modules")) == ["torch.profile", "outer", "inner"]
    for ask in (prof.spans, prof.to_otlp):
        with pytest.raises(ValueError, match="detail is 'steps'; it must be one of 'modules', 'ops', 'frames'"):
            ask(detail="steps")
