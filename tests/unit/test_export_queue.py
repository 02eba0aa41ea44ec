"""The queue in front of an exporter: order, bounds, deadlines, and exporters that misbehave."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import forked_programs
import pytest
from opentelemetry import context
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from threaded import in_threads

from otel_torchprof._export.ledger import Delivery
from otel_torchprof._export.queue import THREAD_NAME, Deadline, ExportQueue, QueueSettings
from otel_torchprof._process import threads
from otel_torchprof.health import QueueStats

LONG = 60.0
"""Seconds after which a test that waits for something has failed; no test takes that long."""
SHORT = 0.02
"""Seconds until a deadline that is meant to be missed."""


def soon():
    return Deadline.after(SHORT)


def in_time():
    return Deadline.after(LONG)


class Exporter(SpanExporter):
    """Keeps what it is given; can be held up, can fail, can raise."""

    def __init__(self, result=SpanExportResult.SUCCESS, whole=False):
        self.result = result
        self.takes_span_lists = whole
        self.batches = []
        self.calls = []
        self.suppressed = set()
        self.threads = set()
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans):
        self.calls.append("export")
        self.threads.add(threading.current_thread())
        self.suppressed.add(context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY))
        self.began.set()
        assert self.may_go_on.wait(LONG)
        self.batches.append(list(spans))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def force_flush(self, timeout_millis=30_000):
        self.calls.append("flush")
        self.flush_millis = timeout_millis
        return True

    def shutdown(self):
        self.calls.append("shutdown")

    def held(self):
        """As one that is busy from now on, until it may go on."""
        self.may_go_on.clear()
        return self


@pytest.fixture
def made():
    """Makes queues, and ends them after the test."""
    queues = []

    def make(exporter, **settings):
        queues.append(ExportQueue(exporter, QueueSettings(**settings)))
        return queues[-1]

    yield make
    for queue in queues:
        may_go_on = getattr(queue.exporter, "may_go_on", None)
        if may_go_on:
            may_go_on.set()
        queue.shutdown(in_time())


def busy(queue):
    """Puts a span that the exporter holds in its hands until it may go on."""
    queue.exporter.held()
    queue.put(["busy"], 1)
    assert queue.exporter.began.wait(LONG)


def test_in_order(made):
    """Everything is exported, in the order in which it came, on a thread of its own with instrumentation suppressed."""
    exporter = Exporter()
    queue = made(exporter)
    for batch in (["a", "b"], ["c"], [], ["d"]):
        queue.put(batch, 10)
    assert queue.force_flush(in_time())
    assert exporter.batches == [["a", "b"], ["c"], ["d"]]
    assert exporter.suppressed == {True}
    (thread,) = exporter.threads
    assert (thread.name, thread.daemon) == (THREAD_NAME, True)
    assert queue.stats == QueueStats(exported_spans=4)
    assert queue.stats.passed_spans == 4


def test_no_thread_before_the_first_put(made):
    """A queue that nobody uses costs no thread."""
    before = threading.active_count()
    queue = made(Exporter())
    assert threading.active_count() == before
    assert queue.stats == QueueStats()


def test_batches(made):
    """An exporter gets at most a batch at a time, unless it takes everything at once."""
    parts, whole = made(Exporter(), max_export_batch_size=2), made(Exporter(whole=True), max_export_batch_size=2)
    for queue in (parts, whole):
        queue.put(list("abcde"), 1)
        assert queue.force_flush(in_time())
    assert parts.exporter.batches == [["a", "b"], ["c", "d"], ["e"]]
    assert whole.exporter.batches == [["a", "b", "c", "d", "e"]]


def test_the_exporters_timeout(made):
    """An exporter that can be told how long it may take is told."""

    class Told(Exporter):
        def export(self, spans, timeout_millis=None):
            self.reported = timeout_millis
            return super().export(spans)

    queue = made(Told(), export_timeout_millis=1234)
    queue.put(["a"], 1)
    assert queue.force_flush(in_time())
    assert queue.exporter.reported == 1234


def test_what_waits_is_counted(made):
    """Spans and bytes that wait are known, what the exporter has in its hands among them."""
    queue = made(Exporter())
    busy(queue)
    queue.put(["a", "b"], 300)
    queue.put(["c"], 200)
    assert queue.stats == QueueStats(waiting_spans=4, waiting_bytes=501)


@pytest.mark.parametrize("settings", [{"max_queue_size": 5}, {"max_queue_bytes": 401}], ids=str)
def test_the_oldest_go_when_it_is_full(made, settings, caplog):
    """A full queue drops the oldest batches until the new one fits, and counts their spans; put does not wait."""
    queue = made(Exporter(), **settings)
    busy(queue)
    for batch in ("ab", "cd", "ef", "g"):
        queue.put(list(batch), 100 * len(batch))
    assert queue.stats == QueueStats(dropped={"queue_full": 4}, waiting_spans=4, waiting_bytes=301)
    queue.exporter.may_go_on.set()
    assert [queue.force_flush(in_time()) for _ in range(2)] == [False, True]
    assert queue.exporter.batches == [["busy"], ["e", "f"], ["g"]]
    assert queue.stats == QueueStats(exported_spans=4, dropped={"queue_full": 4})
    assert caplog.messages == ["Exporter: 2 spans were dropped: it is slower than the spans come"]


def test_a_batch_larger_than_the_queue(made):
    """It pushes out all others and is then taken, as else it would never be exported."""
    queue = made(Exporter(), max_queue_size=2)
    busy(queue)
    queue.put(["a"], 1)
    queue.put(list("bcde"), 4)
    assert queue.stats == QueueStats(dropped={"queue_full": 1}, waiting_spans=5, waiting_bytes=5)


def test_requests_to_flush_are_not_dropped(made):
    """A flush that waits in a queue that fills up is answered: False, as spans were lost."""
    queue = made(Exporter(), max_queue_size=2)
    busy(queue)
    queue.put(["a"], 1)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(queue.force_flush(in_time())))
    with queue._changed:
        thread.start()
        assert queue._changed.wait_for(lambda: len(queue._backlog) == 2, LONG)
    queue.put(["b"], 1)
    queue.exporter.may_go_on.set()
    thread.join(LONG)
    assert answers == [False]
    assert queue.stats.dropped_spans == 1


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("no"), None], ids=str)
def test_an_exporter_that_fails(made, result, caplog):
    """What it refuses is counted as failed, whatever it raises; the thread goes on, and the next flush is False, once."""
    exporter = Exporter(result)
    queue = made(exporter, max_export_batch_size=1)
    queue.put(["a", "b"], 1)
    assert not queue.force_flush(in_time())
    exporter.result = SpanExportResult.SUCCESS
    queue.put(["c"], 1)
    assert queue.force_flush(in_time())
    assert queue.stats == QueueStats(exported_spans=1, failed_spans=2)
    raised = isinstance(result, Exception)
    assert caplog.messages == ["Exporter: 1 spans were lost: it raised RuntimeError: no"] * raised


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exporter_that_exits(made, error):
    """Whatever it raises, its spans have failed, none stays in its hands, who waits is told, and the next put is exported."""
    exporter = Exporter()

    def exiting(*_):
        raise error

    exporter.export = exiting
    if error is SystemExit:
        exporter.shutdown = exiting
    queue = made(exporter, max_export_batch_size=1)
    queue.put(["a", "b"], 1)
    assert not queue.force_flush(in_time())
    assert queue.stats == QueueStats(failed_spans=2)
    assert (queue.stats.passed_spans, queue.stats.dropped_passed) == (2, {})
    del exporter.export
    queue.put(["c"], 1)
    assert queue.shutdown(in_time())
    assert queue.stats == QueueStats(exported_spans=1, failed_spans=2)


class Overcounts(Exporter):
    """Tells of more than it was given."""

    takes_span_lists = True

    def export_some(self, spans, timeout_millis, *, again):
        yield Delivery(1000)


class OfItsOwn(Exporter):
    """Has a method of our name that is another."""

    def export_some(self, spans, count):
        raise AssertionError


@pytest.mark.parametrize("kind", [Overcounts, OfItsOwn])
def test_exporters_of_other_makers(made, kind):
    """One that tells of more than it was given, or has a method of our name that is another: each span is counted, once."""
    queue = made(kind())
    queue.put(["a", "b"], 2)
    queue.force_flush(in_time())
    assert queue.stats == QueueStats(exported_spans=2)


def test_a_flush_reaches_the_exporter(made):
    """The exporter is flushed after the last span, with the time that is left."""
    queue = made(Exporter())
    queue.put(["a"], 1)
    assert queue.force_flush(in_time())
    assert queue.exporter.calls == ["export", "flush"]
    assert LONG * 500 < queue.exporter.flush_millis <= LONG * 1000


@pytest.mark.parametrize("answer", [False, RuntimeError("no")], ids=str)
def test_an_exporter_that_cannot_flush(made, answer):
    """Its False, and its exception, make the flush False."""

    class Bad(Exporter):
        def force_flush(self, timeout_millis=30_000):
            if isinstance(answer, Exception):
                raise answer
            return answer

    queue = made(Bad())
    queue.put(["a"], 1)
    assert not queue.force_flush(in_time())
    assert queue.stats.exported_spans == 1


def test_a_flush_keeps_its_deadline(made):
    """With an exporter that hangs, the flush returns False at its deadline; what waits is still exported later."""
    queue = made(Exporter())
    busy(queue)
    queue.put(["a"], 1)
    assert not queue.force_flush(soon())
    queue.exporter.may_go_on.set()
    assert queue.force_flush(in_time())
    assert queue.exporter.batches == [["busy"], ["a"]]


def test_a_flush_that_hangs_in_the_exporter(made):
    """Nor does an exporter that hangs in its own flush hold up the caller."""

    class Hangs(Exporter):
        def force_flush(self, timeout_millis=30_000):
            return self.may_go_on.wait(LONG)

    queue = made(Hangs())
    queue.exporter.held()
    assert not queue.force_flush(soon())


def test_shutdown(made):
    """What waits is exported and the exporter shut down, once; later spans are dropped and counted; the thread has ended."""
    queue = made(Exporter())
    queue.put(["a"], 1)
    assert queue.shutdown(in_time())
    assert queue.shutdown(in_time())
    queue.put(["b", "c"], 1)
    assert queue.force_flush(in_time())
    assert queue.exporter.calls == ["export", "shutdown"]
    assert queue.stats == QueueStats(exported_spans=1, dropped={"already_shutdown": 2})
    assert (queue.stats.passed_spans, queue.stats.dropped_passed) == (1, {})
    (thread,) = queue.exporter.threads
    thread.join(LONG)
    assert not thread.is_alive()


def test_shutdown_of_an_unused_queue(made):
    """The exporter is shut down also where there was nothing to export."""
    queue = made(Exporter())
    assert queue.shutdown(in_time())
    assert queue.exporter.calls == ["shutdown"]


def test_shutdown_keeps_its_deadline(made, caplog):
    """At the deadline all spans are counted as dropped, also those with an exporter that hangs, whatever it answers later."""
    exporter = Exporter()
    reported = threading.Event()
    exporter.shutdown = lambda: (exporter.calls.append("shutdown"), reported.set())
    queue = made(exporter, max_export_batch_size=1)
    exporter.held()
    queue.put(["busy", "cut off"], 2)
    assert exporter.began.wait(LONG)
    queue.put(["a", "b"], 1)
    assert not queue.shutdown(soon())
    assert reported.wait(LONG)
    assert queue.stats == QueueStats(dropped={"shutdown": 3, "no_response": 1})
    assert (
        "4 waiting spans were dropped: the shutdown's time was over (1 of them were sent and had no response"
        in caplog.text
    )
    exporter.may_go_on.set()
    (thread,) = exporter.threads
    thread.join(LONG)
    assert queue.stats == QueueStats(dropped={"shutdown": 3, "no_response": 1})
    assert (queue.stats.passed_spans, queue.stats.dropped_passed) == (1, {"no_response": 1})
    assert exporter.calls == ["export", "shutdown"]


def test_a_shutdown_that_hangs_in_the_exporter(made, caplog):
    """An exporter that hangs in its own shutdown does not hold up the caller, and is not called a second time."""
    exporter = Exporter().held()
    exporter.shutdown = lambda: (exporter.calls.append("shutdown"), exporter.may_go_on.wait(LONG))
    queue = made(exporter)
    assert not queue.shutdown(soon())
    assert exporter.calls == ["shutdown"]
    assert caplog.messages == []


def test_an_exporter_that_cannot_shut_down(made, caplog):
    """What its shutdown raises is logged and ends there."""

    class Bad(Exporter):
        def shutdown(self):
            raise RuntimeError("no")

    assert made(Bad()).shutdown(in_time())
    assert "its shutdown raised RuntimeError: no" in caplog.text


@pytest.fixture
def _no_threads(monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.Thread, "start", refused)


@pytest.mark.usefixtures("_no_threads")
def test_without_threads(made):
    """Where no thread can be started, as in an interpreter that is going down, flush and shutdown do the work themselves."""
    queue = made(Exporter())
    queue.put(["a"], 1)
    assert queue.force_flush(in_time())
    queue.put(["b"], 1)
    assert queue.shutdown(in_time())
    assert queue.exporter.calls == ["export", "flush", "export", "shutdown"]
    assert queue.exporter.threads == {threading.current_thread()}
    assert queue.exporter.suppressed == {True}
    assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is None


@pytest.mark.usefixtures("_no_threads")
def test_without_threads_or_time(made):
    """A deadline that has passed then leaves the spans where they are, and at the shutdown drops them."""
    queue = made(Exporter())
    queue.put(["a"], 1)
    assert not queue.force_flush(Deadline.after(0))
    assert queue.stats.waiting_spans == 1
    assert not queue.shutdown(Deadline.after(0))
    assert queue.stats == QueueStats(dropped={"shutdown": 1})


def test_what_was_exported_is_let_go(made):
    """A queue that waits for more does not keep the last batch, which may be large."""

    class Batch(list):
        pass

    batch = Batch(["a"])
    gone = weakref.ref(batch)
    queue = made(Exporter(whole=True))
    queue.put(batch, 1)
    del batch
    assert queue.force_flush(in_time())
    gc.collect()
    assert gone() is None


def test_many_threads(made):
    """Spans put by many threads are all exported, dropped or failed: none is lost from the counts."""
    queue = made(Exporter(), max_queue_size=20)
    in_threads(*[lambda: [queue.put(["x", "y"], 2) for _ in range(50)]] * 8)
    queue.force_flush(in_time())
    stats = queue.stats
    assert stats.exported_spans + stats.dropped_spans == 800
    assert sum(map(len, queue.exporter.batches)) == stats.exported_spans


def test_fork():
    """In a child the queue is empty and works, even if it was locked at the fork; the parent's goes on undisturbed."""
    program = """
import os, sys
from test_export_queue import Exporter, ExportQueue, QueueSettings, QueueStats, busy, in_time
queue = ExportQueue(Exporter(), QueueSettings())
busy(queue)
queue.put(["waits"], 1)
queue._changed.acquire()
child = os.fork()
if not child:
    queue.exporter.may_go_on.set()
    empty = queue.stats == QueueStats()
    queue.put(["child"], 1)
    ok = empty and queue.force_flush(in_time()) and queue.exporter.batches == [["child"]]
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
queue._changed.release()
queue.exporter.may_go_on.set()
assert queue.shutdown(in_time())
assert queue.exporter.batches == [["busy"], ["waits"]]
"""
    arguments = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = forked_programs.run(arguments, env=environ, timeout=LONG)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("last_words", ["", "queue.shutdown(Deadline.after(0.05))"], ids=["silent", "shut down"])
def test_an_exporter_that_hangs_at_the_end(last_words):
    """An interpreter with a queue whose exporter hangs ends all the same."""
    program = f"""
from test_export_queue import Deadline, Exporter, ExportQueue, QueueSettings, busy
queue = ExportQueue(Exporter(), QueueSettings())
busy(queue)
{last_words}
"""
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = forked_programs.run([sys.executable, "-c", program], env=environ, timeout=LONG)
    assert done.returncode == 0
