"""A queue in a world of its own, whose clock goes on while the queue pauses, and a receiver that is down by that clock."""

from __future__ import annotations

import threading

from fault_server import LONG
from opentelemetry.sdk.trace.export import SpanExporter

from otel_torchprof._export.ledger import Delivery
from otel_torchprof._export.queue import Deadline, ExportQueue, QueueSettings
from otel_torchprof._export.response import Outcome, Response

BATCH = 10
"""Spans in each put, of one byte each."""


class World:
    """A clock that goes on only while the queue pauses; at every full second a batch is put, as a training loop would."""

    def __init__(self, seconds_of_training=0, *, until_shutdown=False):
        self.now = 0.0
        self.stands_still = until_shutdown
        """Until the shutdown has begun."""
        self.put = 0
        self.training = seconds_of_training
        self.queue = None

    def clock(self):
        return self.now

    def wait(self, condition, seconds):
        """As ``Condition.wait``: lets others in, and as long as nobody comes the time passes by itself."""
        if self.stands_still:
            condition.wait_for(lambda: self.queue._closing, LONG)
            self.stands_still = False
        condition.wait(0.001 if seconds > LONG else 0)
        until = self.now + min(seconds, 1.0)
        if int(until) > int(self.now) and until <= self.training:
            self.put_batch()
        self.now = until

    def put_batch(self):
        self.queue.put(list(range(self.put, self.put + BATCH)), BATCH)
        self.put += BATCH

    def started(self, exporter, **settings):
        self.queue = ExportQueue(exporter, QueueSettings(**settings), clock=self.clock, wait=self.wait)
        return self.queue


class Receiver(SpanExporter):
    """Takes a few spans at a time, and nothing at all while it is down by the clock; each attempt takes no time."""

    takes_span_lists = True

    def __init__(self, world, down=(), at_once=1000, asks=None):
        self.world = world
        self.down = down
        self.at_once = at_once
        self.asks = asks
        self.arrived = []
        self.attempts = []
        self.again = 0
        self.bad = set()
        self.came = threading.Event()
        self.is_down = threading.Event()

    def export(self, spans):
        raise AssertionError("the queue uses export_some")

    def export_some(self, spans, timeout_millis, *, again):
        now = self.world.now
        self.attempts.append(now)
        self.again += again
        taken = list(spans)[: self.at_once]
        if any(first <= now < last for first, last in self.down):
            yield Delivery(stopped_by=Response(Outcome.RETRY, "UNAVAILABLE: down", wait=self.asks))
            return
        good = [span for span in taken if span not in self.bad]
        self.arrived += good
        self.came.set()
        rest = len(taken) < len(spans)
        stopped = Response(Outcome.RETRY, "busy") if rest else None
        yield Delivery(len(good), len(taken) - len(good), stopped_by=stopped)

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self):
        self.attempts.append("shutdown")
        self.is_down.set()


def adds_up(world):
    """Every span that was put is in one count; of those that were passed to the exporter, none is in flight that does not wait."""
    stats = world.queue.stats
    assert world.put == stats.exported_spans + stats.failed_spans + stats.dropped_spans + stats.waiting_spans
    in_flight = stats.passed_spans - stats.exported_spans - stats.failed_spans - sum(stats.dropped_passed.values())
    assert 0 <= in_flight <= stats.waiting_spans
    assert all(count <= stats.dropped.get(reason, 0) for reason, count in stats.dropped_passed.items())
    return stats


def finished(queue, seconds=1000.0):
    assert queue.shutdown(Deadline.after(seconds, queue._clock))
    return queue.stats
