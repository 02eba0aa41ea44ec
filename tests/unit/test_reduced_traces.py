"""Traces that were reduced, from the table to the bytes that receivers decode and on to every exporter."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chrome_files import slices
from fault_server import LONG, GrpcReceiver, HttpReceiver
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from policy_jobs import job
from span_tables import span_rows
from trace_group_tables import TARGET, cut, ids, random_trace_group

import otel_torchprof as otp
from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.chrome_spans import CLOSING, ChromeSpans
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.queue import Deadline, ExportQueue
from otel_torchprof._sampling.aggregating import aggregated
from otel_torchprof._sampling.collapsing import collapsed
from otel_torchprof._sampling.policy import Reduction
from otel_torchprof._sampling.root_only import root_only
from otel_torchprof._sampling.splitting import split, with_links
from otel_torchprof._spans.budget import Budget
from otel_torchprof._spans.limits import limited
from otel_torchprof._spans.span_tables import joined_tables

COMMON = {"resource": Resource({}), "scope": InstrumentationScope("")}


def never(*_):
    return False


def parts_of(table):
    """In traces of ten spans, with links from the root to the others."""
    found, parts = split(table, TARGET, (10, 9999), (10, 9999), before=0, stays=True, **ids())
    return with_links(found, 0, parts)


def in_two_tables(table):
    """In traces of ten spans, of which some went before."""
    budget, before = Budget(max_spans=10), Reduction(recorded=1, parts=1)
    return joined_tables([cut(table, budget)[0], cut(random_trace_group(99), budget, before=before)[0]])


ALONE = {
    "aggregate": lambda table: aggregated(table, 0, 1e9, never),
    "collapse": lambda table: collapsed(table, 0, 1e9, never),
    "split": parts_of,
    "roots": lambda table: root_only(table, TARGET),
    "limits": lambda table: limited(table, max_attributes=2, max_links=1, max_attribute_length=1),
}
TOGETHER = {
    "all": lambda table: cut(table, Budget(max_spans=10, short=2e-6))[0],
    "bytes": lambda table: cut(table, Budget(max_bytes=2000))[0],
    "tables": in_two_tables,
    "collapse, split": lambda table: parts_of(ALONE["collapse"](table)),
    "aggregate, split": lambda table: parts_of(ALONE["aggregate"](table)),
    "split twice": lambda table: ALONE["limits"](joined_tables([parts_of(table), parts_of(random_trace_group(98))])),
}


def in_request(request):
    """Ids, the parent, the name and the links of each span of a message."""
    spans = [s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]
    return [
        (s.trace_id, s.span_id, s.parent_span_id, s.name, [(link.trace_id, link.span_id) for link in s.links])
        for s in spans
    ]


def in_table(table):
    links = {row: [] for row in range(len(table))}
    for link in table.links:
        links[int(link["row"])].append((link["trace_id"].tobytes(), int(link["span_id"]).to_bytes(8, "big")))
    return [
        (
            table.trace_ids[table.trace[row]].tobytes(),
            int(table.span_id[row]).to_bytes(8, "big"),
            int(table.parent_span_id[row]).to_bytes(8, "big") if table.parent_span_id[row] else b"",
            table.names[table.name[row]],
            links[row],
        )
        for row in range(len(table))
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduction", (ALONE | TOGETHER).values(), ids=ALONE | TOGETHER)
def test_reduced_spans_are_decoded_as_they_are(reduction, seed):
    """After each reduction, and after several, every format has all spans with their ids, parents and links."""
    table = reduction(random_trace_group(seed))
    expected = in_table(table)
    assert expected
    (message,) = otlp.encode(table, **COMMON)
    assert in_request(ExportTraceServiceRequest.FromString(message)) == expected
    ((line, _),) = otlp_json.encode_counted(table, **COMMON)
    assert in_request(otlp_json.request_of(line)) == expected
    spans = SpanList(table, **COMMON)
    assert [(span.name, len(span.links)) for span in spans] == [(name, len(links)) for *_, name, links in expected]
    events = json.loads(b"".join((*ChromeSpans(7).encode(spans, begin=True), CLOSING)))["traceEvents"]
    drawn = [e["args"] for e in events if "span_id" in e.get("args", {})]
    assert sorted(
        (
            *(said["trace_id"], said["span_id"], said.get("parent_id", "")),
            [(link["trace_id"], link["span_id"]) for link in said.get("links", ())],
        )
        for said in drawn
    ) == sorted(
        (trace.hex(), span_id.hex(), parent.hex(), [(t.hex(), target.hex()) for t, target in links])
        for trace, span_id, parent, _, links in expected
    )


@pytest.fixture
def every_exporter(tmp_path):
    """All exporters of this package, and what gives the names of the spans that each delivered."""
    with GrpcReceiver() as grpc, HttpReceiver() as http:
        wire, text, chrome = (str(tmp_path / name) for name in ("x.otlp", "x.jsonl", "x.json"))
        exporters = (
            otp.OTLPExporter(grpc.url, protocol="grpc"),
            otp.OTLPExporter(http.url, protocol="http/protobuf"),
            otp.OTLPFileExporter(wire),
            otp.OTLPFileExporter(text),
            otp.ChromeTraceExporter(chrome),
        )

        def delivered():
            requests = [ExportTraceServiceRequest.FromString(b"".join(a.body for a in r.arrived)) for r in (grpc, http)]
            requests.append(ExportTraceServiceRequest.FromString(Path(wire).read_bytes()))
            found = [[name for *_, name, _ in in_request(request)] for request in requests]
            lines = Path(text).read_bytes().splitlines()
            found.append([name for line in lines for *_, name, _ in in_request(otlp_json.request_of(line))])
            return [*found, [event["name"] for event in slices(json.loads(Path(chrome).read_bytes())["traceEvents"])]]

        yield exporters, delivered


def test_every_exporter_delivers_traces_that_were_split(every_exporter):
    """Where each step is several traces nothing fails, and every receiver and file has each span."""
    exporters, delivered = every_exporter
    with job(otp.SpanPolicy(max_spans=10, short=0), exporters=exporters) as program:
        for number in range(3):
            program.step(*(f"label {number}.{i}" for i in range(30)))
            program.drain()
        spans = program.spans()
        health = program.processor.health
    assert health.spans["parts"] >= 9
    assert [(stats.failed_spans, stats.dropped_spans) for stats in health.exporters.values()] == [(0, 0)] * 7
    *requests, chrome = delivered()
    for names in requests:
        assert Counter(names) == Counter(span.name for span in spans)
    assert {name for name in chrome if name.startswith("label")} == {
        f"label {n}.{i}" for n in range(3) for i in range(30)
    }


def test_a_table_that_cannot_be_encoded_is_counted_and_the_rest_is_delivered(every_exporter):
    """Spans that do not fit together have failed, for every exporter; those before and after them arrive."""
    exporters, delivered = every_exporter
    torn = replace(span_rows(["torn", "too"]), start=np.zeros(3, np.int64))
    for exporter in exporters:
        queue = ExportQueue(exporter)
        for table in (span_rows(["before"]), torn, span_rows(["after"])):
            queue.put(SpanList(table, **COMMON), table.nbytes)
        assert not queue.force_flush(Deadline.after(LONG))
        queue.shutdown(Deadline.after(LONG))
        assert (queue.stats.exported_spans, queue.stats.failed_spans, queue.stats.dropped_spans) == (2, 2, 0)
    assert [sorted(names) for names in delivered()] == [["after", "before"]] * 5
