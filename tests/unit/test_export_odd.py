"""Exporters of other makers that do what none should: each span is counted, and nobody waits."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_torchprof._export.ledger import Delivery
from otel_torchprof._export.queue import Deadline, ExportQueue
from otel_torchprof.health import QueueStats


class Exporter(SpanExporter):
    """Takes everything."""

    def __init__(self):
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


class Exits(Exporter):
    """Ends the thread, it thinks."""

    def export(self, spans):
        raise SystemExit

    def shutdown(self):
        raise SystemExit


class Overcounts(Exporter):
    """Tells of more than it was given."""

    takes_span_lists = True

    def export_some(self, spans, timeout_millis, *, again):
        self.spans += spans
        yield Delivery(1000)


class OfItsOwn(Exporter):
    """Has a method of our name that is another."""

    def export_some(self, spans, count):
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Exits, QueueStats(failed_spans=4)),
        (Overcounts, QueueStats(exported_spans=4)),
        (OfItsOwn, QueueStats(exported_spans=4)),
    ],
    ids=["exits", "overcounts", "a method of its own"],
)
def test_each_span_is_counted_and_nobody_waits(kind, expected):
    """Long before the deadline, by a flush and a shutdown."""
    deadline = Deadline.after(60)
    queue = ExportQueue(kind())
    queue.put(["a", "b"], 2)
    queue.force_flush(deadline)
    queue.put(["c", "d"], 2)
    queue.shutdown(deadline)
    assert queue.stats == expected
    assert deadline.remaining() > 30


def test_a_second_shutdown_waits_for_the_first():
    """Who shuts down at the same time is back when the exporter is down, not before."""
    queue = ExportQueue(Exporter())
    queue.put(["a"], 1)
    assert queue.shutdown(Deadline.after(60))
    assert queue.shutdown(Deadline.after(60))
    assert queue.exporter.spans == ["a"]
