"""A receiver that is down for a while: what waits, what arrives when it is back, what is lost and counted, and what is said."""

from __future__ import annotations

import threading
import weakref

import grpc
import pytest
from fault_server import LONG, SILENCE, Abort, GrpcReceiver, HttpReceiver, silence, status
from opentelemetry.sdk.trace.export import SpanExportResult
from outages import BATCH, Receiver, World, adds_up, finished
from span_tables import span_list

from otel_torchprof import OTLPExporter
from otel_torchprof._export import queue as queue_module
from otel_torchprof._export.ledger import Delivery
from otel_torchprof._export.queue import Deadline, ExportQueue, QueueSettings
from otel_torchprof._export.response import Backoff, Outcome, Response
from otel_torchprof._process import threads

SHORT = 0.3
"""Seconds until a deadline that is meant to be missed."""


def test_a_minute(caplog):
    """What came while the receiver was down for 60 s arrives once and in order, with what came later behind it."""
    world = World(seconds_of_training=60)
    receiver = Receiver(world, down=[(0, 60)])
    queue = world.started(receiver)
    world.put_batch()
    assert queue.force_flush(Deadline.after(LONG * 1000, world.clock))
    finished(queue)
    stats = adds_up(world)
    # The first two change places with every fourth attempt, and how many attempts there were is a matter of the jitter.
    assert sorted(receiver.arrived[: 2 * BATCH]) + receiver.arrived[2 * BATCH :] == list(range(world.put))
    assert world.put > 40 * BATCH
    assert (stats.failed_spans, stats.dropped_spans, stats.waiting_bytes, stats.outage_seconds) == (0, 0, 0, 0)
    assert receiver.again == sum(at < 60 for at in receiver.attempts[:-1])
    begin, end = caplog.messages
    assert "nothing was delivered for" in begin
    assert "it is tried again: UNAVAILABLE: down" in begin
    assert "delivers again after 6" in end
    assert "0 spans were dropped meanwhile" in end


def test_growing_pauses():
    """While nobody waits, each pause is about twice the one before, up to 30 s."""
    world = World()
    receiver = Receiver(world, down=[(0, 200)])
    queue = world.started(receiver)
    world.put_batch()
    assert receiver.came.wait(LONG)
    pauses = [later - at for at, later in zip(receiver.attempts, receiver.attempts[1:], strict=False)]
    for expected, pause in zip((0.5, 1, 2, 4, 8, 16, 30, 30, 30), pauses, strict=False):
        assert 0.8 * expected <= pause <= 1.2 * expected
    assert len(pauses) >= 9
    finished(queue)


def test_what_the_receiver_asks_for():
    """A receiver that names a time is not asked before it, not even for a flush."""
    world = World()
    receiver = Receiver(world, down=[(0, 90)], asks=45.0)
    queue = world.started(receiver)
    world.put_batch()
    assert queue.force_flush(Deadline.after(LONG * 1000, world.clock))
    assert receiver.attempts == [0.0, 45.0, 90.0]
    finished(queue)


def test_a_part(caplog):
    """What was accepted of a batch is not sent again, and what was refused for good is counted at once."""
    world = World()
    receiver = Receiver(world, at_once=4)
    receiver.bad = {5}
    queue = world.started(receiver)
    world.put_batch()
    assert not queue.force_flush(Deadline.after(LONG * 1000, world.clock))
    assert receiver.arrived == [number for number in range(BATCH) if number != 5]
    stats = adds_up(world)
    assert (stats.exported_spans, stats.failed_spans) == (BATCH - 1, 1)
    finished(queue)
    assert caplog.messages == []


@pytest.mark.parametrize("bound", [{"max_queue_bytes": 205}, {"max_queue_size": 205}], ids=str)
def test_a_long_outage(bound, caplog):
    """Beyond the bound the oldest go and are counted as such; never is more held; what is left arrives."""
    world = World(seconds_of_training=600)
    receiver = Receiver(world, down=[(0, 600)])
    queue = world.started(receiver, **bound)
    most = []
    put = world.put_batch
    world.put_batch = lambda: (put(), most.append((adds_up(world).waiting_spans, queue.stats.waiting_bytes)))
    world.put_batch()
    assert receiver.came.wait(LONG)
    finished(queue)
    stats = adds_up(world)
    assert max(most) == (200, 200)
    assert receiver.arrived == list(range(world.put - 200, world.put))
    assert stats.dropped == {"outage": world.put - 200}
    assert f"{world.put - 200} spans were dropped meanwhile" in caplog.text
    assert "10 spans were dropped: nothing can be delivered, and no more may wait" in caplog.text


def test_a_shutdown_during_an_outage(caplog):
    """It tries until its time is over, then drops what waits and counts it; the exporter is shut down."""
    world = World(until_shutdown=True)
    receiver = Receiver(world, down=[(0, 10_000)])
    queue = world.started(receiver)
    world.put_batch()
    assert not queue.shutdown(Deadline.after(30, world.clock))
    assert receiver.is_down.wait(LONG)
    stats = adds_up(world)
    assert (stats.dropped, stats.waiting_spans, stats.waiting_bytes) == ({"shutdown": BATCH}, 0, 0)
    assert receiver.attempts[-2] > 25
    assert "10 waiting spans were dropped: the shutdown's time was over: UNAVAILABLE: down" in caplog.text


@pytest.mark.parametrize(
    "response",
    [
        Delivery(BATCH - 3),
        Delivery(failed=BATCH - 3),
        Delivery(stopped_by=Response(Outcome.RETRY, "no")),
        RuntimeError("no"),
    ],
    ids=["accepted", "refused", "retry", "raised"],
)
def test_a_shutdown_with_a_batch_in_hand(response, caplog):
    """What is being sent when the time is over may arrive, the rest does not; a later response changes no count."""

    class Hangs(Receiver):
        def export_some(self, spans, timeout_millis, *, again):
            yield Delivery(1)
            yield Delivery(sending=BATCH - 3)
            self.came.set()
            assert self.may_go_on.wait(LONG)
            if isinstance(response, Exception):
                raise response
            yield response

    world = World()
    receiver = Hangs(world)
    receiver.may_go_on = threading.Event()
    queue = world.started(receiver)
    world.put_batch()
    assert receiver.came.wait(LONG)
    world.put_batch()
    assert not queue.shutdown(Deadline.after(0, world.clock))
    dropped = {"shutdown": BATCH + 2, "no_response": BATCH - 3}
    assert adds_up(world).dropped == dropped
    receiver.may_go_on.set()
    queue._thread.join(LONG)
    stats = adds_up(world)
    assert (stats.dropped, stats.waiting_spans, stats.waiting_bytes) == (dropped, 0, 0)
    text = "19 waiting spans were dropped: the shutdown's time was over (7 of them were sent and had no response"
    assert [message for message in caplog.messages if text in message]


def test_a_shutdown_where_nobody_has_answered_yet():
    """A receiver that has never answered is given less time than one that did: it is probably not there."""
    world = World(until_shutdown=True)
    receiver = Receiver(world, down=[(0, 10_000)])
    queue = world.started(receiver)
    world.put_batch()
    assert not queue.shutdown(Deadline.after(30, world.clock), 5)
    assert receiver.is_down.wait(LONG)
    assert 2 < receiver.attempts[-2] < 5
    assert adds_up(world).dropped == {"shutdown": BATCH}


def test_a_shutdown_late_in_an_outage():
    """What was tried in vain before the shutdown counts: then one more attempt is all that it waits for."""
    world, late = World(), threading.Event()

    class Down(Receiver):
        def export_some(self, *arguments, **keywords):
            if world.now > 60 and not late.is_set():
                world.stands_still = True
                late.set()
            yield from super().export_some(*arguments, **keywords)

    receiver = Down(world, down=[(0, 10_000)])
    queue = world.started(receiver)
    world.put_batch()
    assert late.wait(LONG)
    before = world.now
    assert not queue.shutdown(Deadline.after(30, world.clock), 5)
    assert receiver.is_down.wait(LONG)
    assert before < receiver.attempts[-2] <= before + 1
    assert adds_up(world).dropped == {"shutdown": BATCH}


@pytest.mark.parametrize("answer", ["accepted", "asked for time"])
def test_a_shutdown_after_an_answer(answer):
    """A receiver that has accepted something, or asked for time, is there: it has all the time of the shutdown."""
    world = World()
    receiver = Receiver(world, down=[(0, 20)] if answer == "asked for time" else [], asks=1.0)
    queue = world.started(receiver)
    if answer == "accepted":
        world.put_batch()
        assert receiver.came.wait(LONG)
        receiver.down, receiver.asks = [(0, 20)], None
    world.stands_still = True
    world.put_batch()
    assert queue.shutdown(Deadline.after(30, world.clock), 5)
    assert receiver.arrived == list(range(world.put))


def test_a_shutdown_before_the_receiver_may_be_asked():
    """Where the receiver does not want to be asked before the deadline, the shutdown does not wait for it."""
    world = World(until_shutdown=True)
    receiver = Receiver(world, down=[(0, 10_000)], asks=3600.0)
    queue = world.started(receiver)
    world.put_batch()
    assert not queue.shutdown(Deadline.after(30, world.clock))
    assert receiver.is_down.wait(LONG)
    assert receiver.attempts == [0.0, "shutdown"]
    assert adds_up(world).dropped == {"shutdown": BATCH}


def test_without_threads(monkeypatch):
    """Where no thread can be started, a flush and the shutdown try on their caller's, each within its time."""

    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.Thread, "start", refused)
    world = World()
    receiver = Receiver(world, down=[(0, 40)])
    queue = world.started(receiver)
    world.put_batch()
    assert not queue.force_flush(Deadline.after(10, world.clock))
    assert adds_up(world).waiting_spans == BATCH
    assert queue.shutdown(Deadline.after(60, world.clock))
    assert receiver.arrived == list(range(BATCH))


def test_an_exporter_of_somebody_elses_making():
    """A class derived from ours with an export of its own is used by that, and what it refuses is lost at once, as ever."""

    class Counting(Receiver):
        def export(self, spans):
            self.arrived += spans
            return SpanExportResult.FAILURE

    world = World()
    queue = world.started(Counting(world, down=[(0, 100)]))
    world.put_batch()
    assert not queue.force_flush(Deadline.after(LONG, world.clock))
    assert adds_up(world).failed_spans == BATCH
    finished(queue)


# ---- real receivers ----


REAL = {
    "grpc": (GrpcReceiver, SILENCE, Abort(grpc.StatusCode.UNAVAILABLE, "going down")),
    "http/protobuf": (HttpReceiver, silence, status(503)),
}


@pytest.mark.parametrize("protocol", REAL)
def test_it_stalls_dies_and_returns(protocol, monkeypatch):
    """A receiver that says nothing, refuses, is gone and comes back has every span in order; none is lost, few came twice."""
    for pauses in ("_NORMAL_BACKOFF", "_URGENT_BACKOFF"):
        monkeypatch.setattr(queue_module, pauses, Backoff(first=0.05, longest=0.2))
    kind, stalls, refuses = REAL[protocol]
    names = [f"span {number}" for number in range(40)]
    with kind() as receiver:
        exporter = OTLPExporter(receiver.url, protocol=protocol, timeout=SHORT, max_request_bytes=200)
        queue = ExportQueue(exporter, QueueSettings())
        receiver.turns = [None, stalls, refuses]
        for first in range(0, 20, 10):
            queue.put(span_list(*names[first : first + 10]), 1000)
        receiver.wait_for(3)
        receiver.stop()
        for first in range(20, 40, 10):
            queue.put(span_list(*names[first : first + 10]), 1000)
        assert not queue.force_flush(Deadline.after(SHORT))
        during = queue.stats
        assert 0 < during.waiting_spans < 40
        assert during.outage_seconds > 0
        assert during.last_error
        receiver.start()
        assert queue.force_flush(Deadline.after(LONG))
        assert queue.shutdown(Deadline.after(LONG))
    stats, sent = queue.stats, exporter.stats
    assert (stats.exported_spans, stats.failed_spans, stats.dropped_spans, stats.waiting_spans) == (40, 0, 0, 0)
    assert (sent.accepted_spans, sent.failed_spans) == (40, 0)
    assert list(dict.fromkeys(receiver.names)) == names
    assert sent.requests - sent.retries == sum(1 for _ in _messages(names))


def _messages(names):
    """What 40 spans in four lists make with at most 200 bytes to a message."""
    from otel_torchprof._export.messages import messages

    for first in range(0, 40, 10):
        yield from messages(span_list(*names[first : first + 10]), 200)


def test_what_is_dropped_is_let_go():
    """A batch that was tried and then had to go is not held through the pause before the next attempt."""

    class Spans(list):
        def __getitem__(self, index):
            return Spans(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    world, gone = World(), []
    queue = world.started(Receiver(world, down=[(0, 1)]), max_queue_size=1)
    first = Spans([0])
    first_gone = weakref.ref(first)

    def wait(condition, seconds):
        if not gone:
            queue.put(Spans([1]), 1)
            gone.append(first_gone() is None)
        world.now += seconds

    queue._pause_for = wait
    queue.put(first, 1)
    del first
    world.put = 2
    assert queue.exporter.came.wait(LONG)
    finished(queue)
    assert gone == [True]
    assert adds_up(world).dropped == {"outage": 1}


def test_secrets_stay_secret(caplog):
    """What a receiver says of an outage is shown without what the headers hold."""
    with HttpReceiver(turns=[status(503, body=b"no: secret-token")] * 100) as receiver:
        exporter = OTLPExporter(
            receiver.url, protocol="http/protobuf", headers={"authorization": "Bearer secret-token"}
        )
        queue = ExportQueue(exporter, QueueSettings())
        queue.put(span_list("a"), 100)
        assert not queue.force_flush(Deadline.after(SHORT))
        assert "no: ***" in queue.stats.last_error
        assert not queue.shutdown(Deadline.after(SHORT))
    assert "secret" not in caplog.text + repr(queue.stats) + repr(exporter.stats)


class Allergic(Receiver):
    """Never takes a message with a certain span, whatever else it takes: the message is too much for it.

    Each attempt takes a second, and every other second a batch is put, until something was given up.
    """

    poison = 3
    is_late = False

    def export_some(self, spans, timeout_millis, *, again):
        self.world.now += 1
        stats = adds_up(self.world)
        if int(self.world.now) % 2 and not stats.failed_spans + stats.dropped_spans:
            self.world.put_batch()
        if self.poison in spans:
            response = Response(Outcome.RETRY, "DEADLINE_EXCEEDED: too much", may_have_arrived=self.is_late)
            yield Delivery(stopped_by=response, stopped_at=BATCH // 2)
            return
        if not self.arrived:
            self.first_at = self.world.now
        yield from super().export_some(spans, timeout_millis, again=again)


@pytest.mark.parametrize("is_late", [False, True], ids=["refused for now", "never answered"])
def test_a_message_that_is_never_taken(caplog, is_late):
    """It holds up the others for seconds only, and is given up after minutes: its own spans, no others, counted and told."""
    world = World()
    receiver = Allergic(world)
    receiver.is_late = is_late
    queue = world.started(receiver)
    world.put_batch()
    while not queue.stats.failed_spans + queue.stats.dropped_spans:
        with queue._changed:
            queue._changed.wait(0.001)
    stats = finished(queue)
    assert sorted(receiver.arrived) == list(range(5, world.put))
    assert (stats.failed_spans, stats.dropped) == ((0, {"no_response": 5}) if is_late else (5, {}))
    assert stats.waiting_spans == 0
    assert receiver.first_at < 15
    assert 300 <= world.now < 400
    assert "5 spans were lost: they were not taken in any attempt, and others were meanwhile: DEADLINE" in caplog.text
