"""Chrome JSON of spans: every field, both ways of encoding, and what viewers ask of a track."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from chrome_files import (
    PID,
    RESOURCE,
    SCOPE,
    TRACE_ID,
    UNIX_NS,
    context,
    events_of,
    metadata,
    names_by_track,
    slices,
    span,
    trace_of,
)
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceState
from span_tables import span_rows, tables

from otel_torchprof._columns.batch import Names
from otel_torchprof._encode.chrome_spans import ChromeSpans, json_value
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType, SpanTable
from otel_torchprof._native import encoders

WEEK_NS = 7 * 24 * 3600 * 10**9
BASE = (UNIX_NS // WEEK_NS - 8) * WEEK_NS


def spans_of(table: SpanTable, scope: InstrumentationScope | None = None) -> SpanList:
    return SpanList(table, resource=RESOURCE, scope=scope or instrumentation_scope())


def test_a_span_has_all_its_fields():
    """Everything that OpenTelemetry has of a span stands in the event or in its arguments, times to the nanosecond."""
    links = BoundedList.from_seq(1, [Link(context(9, 7), {"why": "retry"})])
    links.dropped = 3
    (found,) = slices(
        events_of(
            [
                span(
                    "GET /",
                    UNIX_NS,
                    UNIX_NS + 1001,
                    number=0xAB,
                    context=context(0xAB, trace_state=TraceState([("vendor", "1")])),
                    parent=0xCD,
                    kind=SpanKind.SERVER,
                    status=Status(StatusCode.ERROR, "broken"),
                    attributes={"http.route": "/", "sizes": (1, 2)},
                    links=links,
                )
            ]
        )
    )
    assert found == {
        "ph": "X",
        "cat": "app",
        "name": "GET /",
        "pid": PID,
        "tid": 1,
        "ts": Decimal(UNIX_NS - BASE) / 1000,
        "dur": Decimal("1.001"),
        "args": {
            "trace_id": "a5" * 16,
            "span_id": "00000000000000ab",
            "parent_id": "00000000000000cd",
            "trace_state": "vendor=1",
            "kind": "SERVER",
            "status": "ERROR",
            "status_description": "broken",
            "dropped_links": 3,
            "attributes": {"http.route": "/", "sizes": [1, 2]},
            "links": [{"trace_id": f"{7:032x}", "span_id": f"{9:016x}", "attributes": {"why": "retry"}}],
        },
    }


def test_what_is_ordinary_is_not_mentioned():
    """A span without anything to say has its ids as arguments, and none where it has no context."""
    plain = span("x", 1, 2, number=3, instrumentation_scope=None)
    (found,) = slices(events_of([plain]))
    assert (found["cat"], found["args"]) == ("span", {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{3:016x}"})
    (found,) = slices(events_of([span("x", 1, 2, context=None)]))
    assert found["args"] == {}


def test_span_events_are_instants_on_the_track():
    """At their own time, with the ids of their span and their attributes."""
    events = events_of([span("x", 10, 20, events=[Event("tick", {"n": 1}, 15), Event("tock", None, 25)])])
    ids = {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{1:016x}"}
    assert [(e["name"], e["tid"], e["cat"], e["s"], e["args"]) for e in events if e["ph"] == "i"] == [
        ("tick", slices(events)[0]["tid"], "app", "t", ids | {"attributes": {"n": 1}}),
        ("tock", slices(events)[0]["tid"], "app", "t", ids),
    ]
    assert [e["ts"] - slices(events)[0]["ts"] for e in events if e["ph"] == "i"] == [Decimal("0.005"), Decimal("0.015")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (1.5, 1.5),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (2**63 - 1, 2**63 - 1),
        (2**63, str(2**63)),
        (-(10**5000), hex(-(10**5000))),
        (b"\xff\x00", "/wA="),
        ("\ud800 \u2028", "? \u2028"),
        (("a", None, [True, b"x"]), ["a", None, [True, "eA=="]]),
        ({"k": {1: float("inf")}}, {"k": {"1": "Infinity"}}),
        (SpanKind.SERVER, "SpanKind.SERVER"),
        (np.float64(0.5), 0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attributes_of_any_type(value, expected):
    """Whatever somebody put into an attribute, the JSON is valid and loses nothing that a viewer could show."""
    assert json_value(value) == expected
    (found,) = slices(events_of([span("x", 1, 2, attributes={"key": value})]))
    assert found["args"]["attributes"] == {"key": expected if not isinstance(expected, float) else Decimal(expected)}


@pytest.mark.parametrize(
    ("times", "expected"),
    [((None, 5), (5, 5)), ((5, None), (5, 5)), ((None, None), (0, 0)), ((9, 5), (9, 9))],
)
def test_times_that_are_missing_or_run_backwards(times, expected):
    """A span without an end, or with one before its start, takes no time."""
    trace = trace_of([span("x", *times)])
    (found,) = slices(trace["traceEvents"])
    start = found["ts"] * 1000 + trace["baseTimeNanoseconds"]
    assert (start, start + found["dur"] * 1000) == expected


def test_the_process_is_named_after_its_service():
    """Its resource and the time that "ts" counts from stand at the top; another provider's resource is a label, told once."""
    other = Resource({"service.name": "other", "n": (1, 2)})
    trace = trace_of(
        [span("a", UNIX_NS, UNIX_NS + 1)],
        [span("b", UNIX_NS, UNIX_NS + 1, resource=other), span("c", UNIX_NS, UNIX_NS + 1)],
        [span("d", UNIX_NS, UNIX_NS + 1, resource=Resource({"service.name": "shop"}))],
    )
    assert (trace["baseTimeNanoseconds"], trace["otherData"]) == (BASE, {"resource": {"service.name": "shop"}})
    assert metadata(trace["traceEvents"], "process_name") == [{"name": "shop"}]
    assert metadata(trace["traceEvents"], "process_labels") == [
        {"labels": "other", "resource": {"service.name": "other", "n": [1, 2]}}
    ]
    assert metadata(events_of([span("a", 1, 2, resource=Resource({}))]), "process_name")[0]["name"] == "python"


def test_a_span_that_began_weeks_before_the_first_one_has_its_time():
    """A job that began long ago ends in the file of today, and viewers drop negative times."""
    started = UNIX_NS - 7 * WEEK_NS
    first, job = slices(events_of([span("a", UNIX_NS, UNIX_NS + 1)], [span("job", started, UNIX_NS, number=2)]))
    assert 0 < job["ts"] == first["ts"] - Decimal(7 * WEEK_NS) / 1000


def test_links_within_an_export_are_arrows():
    """From what the link points to, if that began first; a link to anything else is an argument only."""
    events = events_of(
        [
            span("forward", 10, 20, number=1),
            span("backward", 30, 40, number=2, links=[Link(context(1)), Link(context(8)), Link(context(1, 5))]),
            span("other", 50, 60, number=3, links=[Link(context(1)), Link(context(3)), Link(context(4))]),
            span("late", 70, 80, number=4),
        ],
        [span("next", 90, 95, number=5, links=[Link(context(1))])],
        [span("x", 91, 99, number=6), span("y", 92, 98, number=7, links=[Link(context(6))])],
    )
    tids = {e["name"]: (e["tid"], e["ts"]) for e in slices(events)}
    arrows = [(e["ph"], e["id"], (e["tid"], e["ts"])) for e in events if e["ph"] in "sf"]
    assert arrows == [
        ("s", 0, tids["forward"]),
        ("f", 0, tids["backward"]),
        ("s", 1, tids["forward"]),
        ("f", 1, tids["other"]),
        ("s", 2, tids["x"]),
        ("f", 2, tids["y"]),
    ]
    assert [len(e["args"].get("links", ())) for e in slices(events)] == [0, 3, 3, 0, 1, 0, 1]


def torch_table(scopes: list[str | None]) -> SpanTable:
    texts = [scope or "" for scope in scopes]
    count = len(scopes)
    table = span_rows([f"op{i}" for i in range(count)])
    names = Names.of([*table.names, *texts])
    values = np.arange(count + 1, 2 * count + 1, dtype=np.uint32)
    present = np.array([scope is not None for scope in scopes], dtype=np.uint8)
    column = AttributeColumn.where("torch.op.scope", AttributeType.NAME, values, present)
    return replace(table, names=names, attributes=(column,))


def test_category():
    """Torch's categories for this package's spans; the name of the instrumentation scope for any other's."""
    table = torch_table(["function", "user_scope", None, "backward_function"])
    for scope, expected in (
        (instrumentation_scope(), ["cpu_op", "user_annotation", "user_annotation", "cpu_op"]),
        (SCOPE, ["app"] * 4),
        (InstrumentationScope('a"b'), ['a"b'] * 4),
    ):
        assert [e["cat"] for e in slices(events_of(spans_of(table, scope)))] == expected


@pytest.mark.parametrize("as_objects", [False, True])
def test_steps_have_the_names_that_torchs_readers_look_for(as_objects):
    """The span of a step is ``ProfilerStep#N`` in a file, as in a profile's; another span of its name or with its number is not."""
    table = span_rows(["torch.step", "torch.step", "aten::mm"], step=np.array([7, -1, -1]))
    numbers = AttributeColumn("torch.step.number", AttributeType.INT64, np.array([7, 7]), np.array([0, 2]))
    spans = spans_of(replace(table, attributes=(numbers,)))
    found = slices(events_of(list(spans) if as_objects else spans))
    assert [e["name"] for e in found] == ["ProfilerStep#7", "torch.step", "aten::mm"]


def test_a_table_that_does_not_fit_together_is_an_error():
    """Native code follows the columns without looking, so they are looked at before."""
    with pytest.raises(ValueError, match="column name points to entry 9"):
        events_of(spans_of(span_rows(["a"], name=np.array([9], dtype=np.uint32))))


def test_pieces_are_small_and_make_the_whole(monkeypatch):
    """However long an export, what is in memory at a time is a piece, and where pieces end leaves no mark."""
    count = 300
    links = np.zeros(count - 1, dtype=LINK)
    links["row"], links["span_id"], links["trace_id"] = np.arange(1, count), np.arange(1, count), 0xA5
    spans = spans_of(span_rows(["n" * 50] * count, links=links))
    whole, objects = events_of(spans), events_of(list(spans))
    assert len([e for e in whole if e["ph"] == "s"]) == count - 1
    monkeypatch.setattr(encoders, "PIECE_SIZE", 2000)
    for way, expected in ((spans, whole), (list(spans), objects)):
        pieces = list(ChromeSpans(PID).encode(way, begin=True))
        assert all(len(piece) < 3000 for piece in pieces[1:])
        assert len(pieces) > 20
        assert events_of(way) == expected


def test_what_was_lost_is_told_again():
    """After an export that could not be written, the next one names its tracks once more; a new document names all."""
    encoder = ChromeSpans(PID)
    list(encoder.encode([span("lost", 1, 2)], begin=True))
    assert names_by_track(events_of([span("kept", 3, 4)], encoder=encoder)) == {"spans 1": ["kept"]}
    lost = list(encoder.encode([span("lost", 5, 6), span("too", 5, 6, resource=Resource({}))], begin=False))
    encoder.report_again()
    again = list(encoder.encode([span("kept", 7, 8)], begin=False))
    exports = [b"".join(pieces).decode() for pieces in (lost, again)]
    reported = [export.count(word) for export in exports for word in ("thread_name", "process_labels")]
    assert reported == [1, 1, 2, 1]


@given(st.lists(st.floats(allow_nan=False) | st.integers(-(10**17), 10**17).map(lambda ns: ns / 1e9), min_size=1))
def test_doubles_read_back_as_themselves(values):
    """Also the many that were nanoseconds once, which are written in a way of their own."""
    column = AttributeColumn("d", AttributeType.DOUBLE, np.array(values))
    found = slices(events_of(spans_of(span_rows(["x"] * len(values), attributes=(column,)))))
    read = [event["args"]["attributes"]["d"] for event in found]
    assert [value if isinstance(value, str) else float(value) for value in read] == [json_value(v) for v in values]
    assert not any(isinstance(value, int) for value in read)


@st.composite
def torch_tables(draw: Any) -> SpanTable:
    """Tables of any content whose spans are on threads, inside one another and beside, parents and links of each other."""
    table = draw(tables())
    count = len(table)

    def column(values: Any, dtype: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype)

    texts = ["function", "user_scope", "", "MainThread"]
    names = Names.of([table.names.raw(i) for i in range(len(table.names))] + [text.encode() for text in texts])
    index = st.integers(len(table.names), len(names) - 1)
    present = st.one_of(st.just(np.ones(count)), st.just(column(st.integers(0, 1), np.uint8)))
    added = (
        ("thread.id", AttributeType.INT64, st.sampled_from([-1, 7, PID, 2**47 + 8, 2**47 + 2**32 + 8])),
        ("thread.name", AttributeType.NAME, index),
        ("torch.op.scope", AttributeType.NAME, index),
        ("torch.async", AttributeType.BOOL, st.sampled_from([0, 0, 0, 1])),
    )
    start = column(st.integers(0, 20), np.int64)
    links = np.zeros(len(table.links), dtype=LINK)
    targets = draw(st.lists(st.integers(1, count or 1), min_size=len(links), max_size=len(links)))
    links["row"], links["trace_id"], links["span_id"] = table.links["row"], 1, targets
    return replace(
        table,
        names=names,
        start=start,
        end=start + column(st.integers(-1, 10), np.int64),
        span_id=np.arange(1, count + 1, dtype=np.uint64),
        parent_span_id=column(st.integers(0, count), np.uint64),
        attributes=tuple(
            AttributeColumn.where(key, kind, column(v, kind.dtype), draw(present)) for key, kind, v in added
        ),
        links=links,
    )


def as_floats(events: list[dict[str, Any]]) -> Any:
    """Attributes as the floats that they are: the same one may be written with more digits or fewer."""
    return json.loads(
        json.dumps(events, default=lambda number: str(number) if number.as_tuple().exponent == -3 else float(number))
    )


@given((tables() | torch_tables()).filter(len), st.integers(1, 4), st.booleans())
def test_columns_and_objects_give_the_same_events(table, step, backwards):
    """The native encoder and the one for objects write the same file, field by field, over several exports."""
    spans = spans_of(table)
    cuts = [spans[i : i + step] for i in range(0, len(spans), step)]
    if backwards:
        cuts = [cut[::-1] for cut in cuts]
    columns = events_of(*cuts)
    assert as_floats(columns) == as_floats(events_of(*(list(cut) for cut in cuts)))
    assert len(slices(columns)) == len(table)


def test_names_and_moments_that_cannot_be():
    """An event of a span with a time that no clock shows is drawn at the end of time; names are UTF-8, a lone surrogate a question mark."""
    late = span("größe \ud800", 1, 2, events=[Event("late", None, 1 << 80)])
    assert [event["name"] for event in events_of([late]) if event["ph"] in "Xi"] == ["größe ?", "late"]
    assert "größe ?".encode() in b"".join(ChromeSpans(PID).encode([late], begin=True))
