"""Traces that were reduced, and links in them, on to every exporter."""

from __future__ import annotations

import json
import random
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
from opentelemetry.trace import SpanContext
from policy_jobs import job
from span_tables import span_rows
from trace_group_tables import TRACE, ids, random_trace_group, trace_group_of

import otel_torchprof as otp
from otel_torchprof._columns.phases import Segment
from otel_torchprof._encode import otlp_json
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export import span_buffer
from otel_torchprof._export.queue import Deadline, ExportQueue
from otel_torchprof._export.span_buffer import Pieces, SpanBuffer
from otel_torchprof._export.span_policy import SelectionRules
from otel_torchprof._model.limits import Budget
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType
from otel_torchprof._model.span_tables import joined_tables, taken
from otel_torchprof._model.step_spans import StepSpan, Trace

COMMON = {"resource": Resource({}), "scope": InstrumentationScope("")}


APPLICATION = 7 << 60


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


class Program:
    """Steps made by chance whose spans come in drains by their ends, with links from later spans to earlier ones."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        budget = Budget(
            max_spans=self.chance.choice([5, 12, 60]),
            max_bytes=self.chance.choice([4_000, 40_000]),
            short=self.chance.choice([None, 0.0, 2e-6, 1.0]),
        )
        rules = SelectionRules(budget, keep_all=self.chance.random() < 0.7, quantile=0.5)
        made = ids()
        self.buffer = SpanBuffer(rules, made["new_trace_id"], made["new_span_id"])
        self.enclosing = self.chance.choice([0, 0, APPLICATION])
        """The span of the application that all steps are in."""
        self.sent = []
        self.linked = []
        """Trace and span ids of what has ended, to which later spans link."""

    def step(self, number):
        """The spans of a step; ids are those of no other step."""
        table = random_trace_group(self.chance.randrange(1000), self.chance.choice([3, 40, 150]))
        base = np.uint64(number + 1 << 32)
        parents = np.where(table.parent_span_id > 0, table.parent_span_id + base, np.uint64(self.enclosing))
        trace_id = TRACE if self.enclosing else TRACE << 64 | number
        trace_ids = np.frombuffer(trace_id.to_bytes(16, "big"), np.uint8).reshape(1, 16)
        synthetic = np.arange(len(table)) == 0
        kind = AttributeType.INT64
        numbered = AttributeColumn.where("torch.op.sequence_nr", kind, np.arange(len(table)), ~synthetic)
        return replace(
            table,
            start=table.start + number * 10**10,
            end=table.end + number * 10**10,
            span_id=table.span_id + base,
            parent_span_id=parents,
            trace_ids=trace_ids,
            row=np.where(synthetic, -1, np.arange(len(table))),
            step=np.where(synthetic, number, -1),
            attributes=(*table.attributes, numbered),
            links=table.links[:0],
        )

    def run(self, steps):
        """Several, of which a few may be open at a time; a drain brings a piece of one of them, or of several."""
        running = []
        for number in range(steps):
            running.append(self.drains(number))
            while len(running) > self.chance.choice([0, 1, 3]):
                self.drain(running)
        while running:
            self.drain(running)

    def drain(self, running):
        """A piece of some of the steps that run."""
        brought = []
        for one in self.chance.sample(running, self.chance.randint(1, len(running))):
            if (pieces := next(one, None)) is None:
                running.remove(one)
            else:
                brought.append(pieces)
        if not brought:
            return
        columns = ("roots", "enclosing", "is_segment")
        arrays = (np.concatenate([getattr(pieces, name) for pieces in brought]) for name in columns)
        group, enclosing, is_segment = arrays
        steps = {key: step for pieces in brought for key, step in pieces.steps.items()}
        ended = [step for pieces in brought for step in pieces.ended]
        table = joined_tables([pieces.table for pieces in brought])
        with pytest.MonkeyPatch.context() as patch:
            if self.chance.random() < 0.6:
                patch.setattr(span_buffer, "MAX_BUFFERED_BYTES", 0)
            self.sent += self.buffer.decide(Pieces(table, group, (), enclosing, is_segment, steps, ended))

    def drains(self, number):
        """The pieces of a step, of which each may be the one that is too much."""
        table = self.step(number)
        order = np.lexsort((-np.arange(len(table)), table.end))
        if self.chance.random() < 0.3:  # some spans come late
            order = np.insert(order[:-1], self.chance.randrange(len(order)), order[-1])
        root, trace_id = int(table.span_id[0]), int.from_bytes(table.trace_ids[0].tobytes(), "big")
        parent = SpanContext(TRACE, APPLICATION, is_remote=False) if self.enclosing else None
        step = StepSpan(number, Trace(trace_id, True, True), root, int(table.start[0]), int(table.end[0]), parent, None)
        step.segment = Segment.STEP
        cuts = sorted(self.chance.randrange(len(order)) for _ in range(self.chance.choice([0, 1, 6])))
        for rows in np.split(order, cuts):
            piece = self.with_links(taken(table, rows))
            ended = [step] if root in piece.span_id else []
            group = np.full(len(piece), root, np.uint64)
            enclosing = np.full(len(piece.trace_ids), self.enclosing, np.uint64)
            yield Pieces(piece, group, (), enclosing, enclosing >= 0, {root: step}, ended)

    def with_links(self, piece):
        """The spans of a drain, some of which link to what ended before them, in this drain too."""
        links = []
        for row in range(len(piece)):
            if self.linked and piece.row[row] > 0 and self.chance.random() < 0.5:
                trace_id, span_id = self.chance.choice(self.linked[-200:])
                links.append((row, np.frombuffer(trace_id, np.uint8), span_id))
            if piece.row[row] > 0:
                self.linked.append((piece.trace_ids[piece.trace[row]].tobytes(), int(piece.span_id[row])))
        return replace(piece, links=np.array(links, dtype=LINK))


@pytest.mark.parametrize("seed", range(60))
def test_every_link_leads_to_a_span_that_was_sent(seed):
    """However a job's steps are cut into drains and sent in parts, reduced or without detail, no link leads nowhere."""
    program = Program(seed)
    program.run(4)
    spans = [span for table in program.sent for span in in_table(table)]
    there = {(trace, span_id) for trace, span_id, *_ in spans}
    assert len(there) == len(spans)
    there.add((TRACE.to_bytes(16, "big"), APPLICATION.to_bytes(8, "big")))
    assert [link for *_, links in spans for link in links if link not in there] == []
    assert all((trace, span_id) not in links and len(set(links)) == len(links) for trace, span_id, *_, links in spans)


def test_a_step_that_is_split_beside_one_that_is_not():
    """Of two steps in one drain the first has to be split, and a link of the second to a span of it leads to where that goes."""
    made = ids()
    buffer = SpanBuffer(SelectionRules(Budget(max_spans=10, short=5e-4)), made["new_trace_id"], made["new_span_id"])
    # Long spans in the first, which stay, with a short one below each; short ones in the second.
    long = [("long", at, at + 1, 1) for at in range(20)]
    first = trace_group_of([("torch.step", 0, 100, 0), *long, *(("short", at, at + 0.1, at + 2) for at in range(20))])
    second = trace_group_of([("torch.step", 200, 300, 0), *(("short", 200 + at, 200.1 + at, 1) for at in range(30))])
    targets = first.span_id[21:]
    links = [(0, target) for target in targets]
    tables, steps = [], {}
    for number, (table, made_links) in enumerate([(first, []), (second, links)]):
        base, trace_id = np.uint64(number << 32), TRACE << 64 | number
        short = np.array([table.names[name] == "short" for name in table.name.tolist()])
        numbered = AttributeColumn.where("torch.op.sequence_nr", AttributeType.INT64, np.arange(len(table)), short)
        moved = replace(
            table,
            span_id=table.span_id + base,
            parent_span_id=np.where(table.parent_span_id > 0, table.parent_span_id + base, np.uint64(0)),
            trace_ids=np.frombuffer(trace_id.to_bytes(16, "big"), np.uint8).reshape(1, 16),
            row=np.where(np.arange(len(table)) == 0, -1, np.arange(len(table))),
            attributes=(numbered,),
            links=np.array(
                [(row, np.frombuffer((TRACE << 64).to_bytes(16, "big"), np.uint8), span) for row, span in made_links],
                dtype=LINK,
            ),
        )
        root = int(moved.span_id[0])
        steps[root] = StepSpan(number, Trace(trace_id, True, True), root, 0, 0, None, None)
        steps[root].segment = Segment.STEP
        tables.append(moved)
    group = np.repeat(np.array(list(steps), np.uint64), [len(table) for table in tables])
    none = np.zeros(2, np.uint64)
    sent = buffer.decide(Pieces(joined_tables(tables), group, (), none, none == 0, steps, list(steps.values())))
    spans = [span for table in sent for span in in_table(table)]
    there = {(trace, span_id) for trace, span_id, *_ in spans}
    found = [link for *_, span_links in spans for link in span_links]
    assert found
    assert [link for link in found if link not in there] == []
