"""Requests in batches: which spans there are for which requests, in every odd case."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Instrumented, instrumented  # noqa: E402
from opentelemetry import context, trace  # noqa: E402
from opentelemetry.sdk.trace import SpanLimits  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased  # noqa: E402
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._cli import main as cli  # noqa: E402
from otel_torchprof._instrument import request_log  # noqa: E402

BATCH, QUEUE, STAY = "torch.batch", "torch.request.queue", "torch.request.batch"


@pytest.fixture
def service():
    """A service with torch instrumented."""
    with instrumented(detail="ops") as service:
        yield service


def enqueued(service, count):
    """So many requests: their spans, which are open, and their tickets."""
    spans = [service.tracer.start_span(f"request {number}") for number in range(count)]
    tickets = []
    for span in spans:
        with trace.use_span(span):
            tickets.append(otp.enqueue())
    return spans, tickets


def named(spans, name):
    """The spans of a name, by start."""
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time)


def remote(number, flags=TraceFlags.SAMPLED):
    """A span of another process."""
    return SpanContext(number, number + 1, is_remote=True, trace_flags=TraceFlags(flags))


def test_any_of_the_forms_of_a_request(service):
    """Tickets, spans, contexts and span contexts, of this process or another, from a generator too; only tickets were in a queue."""
    (one, two, three), (ticket, *_) = enqueued(service, 3)
    forms = [ticket, two, trace.set_span_in_context(three), remote(7)]
    with otp.batch(form for form in forms) as serving:
        assert serving.size == 4
    spans = service.spans()
    (batch,) = named(spans, BATCH)
    assert [link.context.span_id for link in batch.links] == [
        *(span.context.span_id for span in (one, two, three)),
        8,
    ]
    assert [span.parent.span_id for span in named(spans, QUEUE)] == [one.context.span_id]
    stays = {span.parent.span_id: span for span in named(spans, STAY)}
    assert stays.keys() == {one.context.span_id, two.context.span_id, three.context.span_id, 8}
    assert stays[8].parent.is_remote
    assert not stays[one.context.span_id].parent.is_remote
    assert batch.parent is None


def test_anything_else_is_refused(service):
    """What is no request, and a count of tokens too few, are errors that say what to pass; nothing is recorded."""
    with pytest.raises(TypeError, match=r"batch\(\) takes tickets .* not 'x'"):
        otp.batch(["x"])
    with pytest.raises(ValueError, match="1 counts of tokens for 2 requests"):
        otp.batch([otp.enqueue(), otp.enqueue()], tokens=[3])
    assert not service.spans()


def test_no_request_is_no_batch(service):
    """A batch of nothing runs its block as it would run without it."""
    with service.tracer.start_as_current_span("loop") as loop, otp.batch([]) as serving:
        assert trace.get_current_span() is loop
        torch.ones(2).neg()
    assert serving.size == 0
    assert not named(service.spans(), BATCH)


def test_one_request_twice_counts_once(service):
    """A request that has two rows is one of the batch, with the tokens of both; two tickets of a span are two, with one link."""
    (span,), (ticket,) = enqueued(service, 1)
    with trace.use_span(span):
        other = otp.enqueue()
    with otp.batch([ticket, other, ticket], tokens=[1, 2, 3]) as serving:
        pass
    assert serving.size == 2
    spans = service.spans()
    (batch,) = named(spans, BATCH)
    assert len(batch.links) == 1
    assert batch.attributes["torch.batch.size"] == 2
    assert [(s.attributes["torch.batch.position"], s.attributes["torch.batch.tokens"]) for s in named(spans, STAY)] == [
        (0, 4),
        (1, 2),
    ]
    assert len(named(spans, QUEUE)) == 2


def test_shares_are_by_tokens_and_by_time(service):
    """Without tokens shares are even; with them by tokens, also if all are 0; padding is to the longest."""
    for tokens, expected, padding in (
        (None, [1 / 3, 1 / 3, 1 / 3], None),
        ([1, 2, 5], [1 / 8, 2 / 8, 5 / 8], [0.8, 0.6, 0]),
        ([0, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 0]),
    ):
        service.spans()
        service.exporter.spans.clear()
        with otp.batch(enqueued(service, 3)[1], tokens=tokens, model="m"):
            torch.ones(2).neg()
        spans = service.spans()
        (batch,) = named(spans, BATCH)
        stays = sorted(named(spans, STAY), key=lambda span: span.attributes["torch.batch.position"])
        duration = (batch.end_time - batch.start_time) / 1e9
        shares = [span.attributes["torch.batch.share_duration"] for span in stays]
        assert shares == pytest.approx([duration * share for share in expected])
        assert sum(shares) == pytest.approx(duration, rel=1e-12)
        assert [span.attributes.get("torch.batch.padding_ratio") for span in stays] == (padding or [None] * 3)
        assert {span.attributes["gen_ai.request.model"] for span in (batch, *stays)} == {"m"}
        assert batch.attributes.get("torch.batch.tokens") == (None if tokens is None else sum(tokens))


def test_one_sampled_request_is_enough():
    """A batch is recorded if any request is sampled, and then links to those; if none is, nothing below it is recorded."""
    with instrumented(detail="ops", sampler=ParentBased(ALWAYS_OFF)) as service:
        with otp.batch([remote(1, 0), remote(2), remote(3, 0)]):
            torch.ones(2).neg()
        with otp.batch([remote(1, 0), remote(3, 0)]):
            torch.ones(2).abs()
        with otp.batch([trace.INVALID_SPAN_CONTEXT]):  # nobody has decided: the sampler does
            torch.ones(2).sin()
        spans = service.spans()
    (batch,), (stay,) = named(spans, BATCH), named(spans, STAY)
    assert [link.context.trace_id for link in batch.links] == [2]
    assert stay.context.trace_id == 2
    assert batch.attributes["torch.batch.size"] == 3
    assert stay.attributes["torch.batch.share_duration"] == pytest.approx((batch.end_time - batch.start_time) / 3e9)
    assert {span.name for span in spans if span.name.startswith("aten::")} == {"aten::ones", "aten::neg"} | {
        span.name for span in spans if span.name in ("aten::empty", "aten::fill_")
    }


def test_without_spans_the_sampler_decides():
    """Requests without spans make a batch that is a trace of its own, if the sampler says so, with no span of theirs."""
    for ratio, count in ((1.0, 1), (0.0, 0)):
        with instrumented(detail="ops", sampler=TraceIdRatioBased(ratio)) as service:
            with otp.batch([otp.enqueue(), otp.enqueue()]):
                torch.ones(2).neg()
            spans = service.spans()
        assert len(named(spans, BATCH)) == count
        assert not named(spans, QUEUE)
        assert not named(spans, STAY)


def test_below_a_current_span(service):
    """Inside a span, a batch is its child; a batch in a batch is below that."""
    _, tickets = enqueued(service, 2)
    with (
        service.tracer.start_as_current_span("loop") as loop,
        otp.batch(tickets),
        otp.batch(tickets[:1]),
        service.tracer.start_as_current_span("inner"),
    ):
        torch.ones(2).neg()
        inner = trace.get_current_span()
    spans = service.spans()
    outer, nested = named(spans, BATCH)
    assert outer.parent.span_id == loop.context.span_id
    assert nested.parent.span_id == outer.context.span_id
    assert inner.parent.span_id == nested.context.span_id
    assert {span.context.trace_id for span in (outer, nested, inner)} == {loop.context.trace_id}
    assert len(named(spans, QUEUE)) == 2  # once in a queue, twice in a batch
    assert len(named(spans, STAY)) == 3
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_who_failed_and_why(service):
    """A request that fails in a batch ends there with the reason; an exception of the block is that of all others, and propagates."""
    _, (left, first, second) = enqueued(service, 3)
    left.fail("client_disconnected")
    left.fail("too late")
    with pytest.raises(ZeroDivisionError), otp.batch([left, first, second]) as serving:  # noqa: PT012 - the batch is tested
        assert serving.size == 2
        serving.fail(first, KeyError("bad"))
        serving.fail("unknown", "x")
        1 / 0  # noqa: B018
    second.fail("too late")
    spans = service.spans()
    (batch,), (one, two) = named(spans, BATCH), sorted(named(spans, STAY), key=lambda span: span.end_time)
    assert batch.attributes["error.type"] == "ZeroDivisionError"
    assert batch.attributes["torch.batch.failed_requests"] == 1
    assert [(s.attributes["error.type"], s.attributes["torch.batch.position"]) for s in (one, two)] == [
        ("KeyError", 0),
        ("ZeroDivisionError", 1),
    ]
    assert one.end_time < two.end_time == batch.end_time
    assert all(span.status.status_code is StatusCode.ERROR for span in (batch, one, two))
    shares = [span.attributes["torch.batch.share_duration"] for span in (one, two)]
    assert shares[0] < shares[1]
    assert sum(shares) == pytest.approx((batch.end_time - batch.start_time) / 1e9)
    queued = [span.attributes.get("error.type") for span in named(spans, QUEUE)]
    assert queued == ["client_disconnected", None, None]
    assert left.failed == "client_disconnected"


def test_links_are_as_many_as_the_provider_allows():
    """Links beyond the limit are counted; the requests themselves have all of their spans."""
    with instrumented(detail="steps", span_limits=SpanLimits(max_links=2)) as service:
        with otp.batch(enqueued(service, 5)[1]):
            pass
        spans = service.spans()
    (batch,) = named(spans, BATCH)
    assert (len(batch.links), batch.dropped_links) == (2, 3)
    assert len(named(spans, STAY)) == 5


def test_nothing_happens_while_torch_is_not_instrumented(service):
    """Without a recording a batch changes no context; tickets from before one are good for it."""
    _, (ticket,) = enqueued(service, 1)
    otp.TorchInstrumentor().uninstrument()
    early = otp.enqueue()
    with otp.batch([early, ticket]) as serving:
        assert trace.get_current_span() is trace.INVALID_SPAN
        serving.fail(early, "x")
    assert not named(service.spans(), BATCH)


def test_a_recording_that_ends_in_a_batch(service):
    """The batch's end is harmless after the recording; its spans are not sent."""
    _, tickets = enqueued(service, 2)
    with otp.batch(tickets):
        otp.TorchInstrumentor().uninstrument()
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert not named(service.spans(), BATCH)


def test_threads_and_tasks(service):
    """Batches of many threads and tasks at once each have their own operators, and every ticket is in its own."""
    errors = []

    def serve(ticket):
        try:
            with otp.batch([ticket]):
                torch.ones(2).neg()
        except Exception as error:  # noqa: BLE001 - for the assertion
            errors.append(error)

    async def serve_all(tickets):
        async def one(ticket):
            with otp.batch([ticket]):
                await asyncio.to_thread(torch.ones(2).cos)
                torch.ones(2).neg()

        await asyncio.gather(*map(one, tickets))

    _, tickets = enqueued(service, 40)
    threads = [threading.Thread(target=serve, args=(ticket,)) for ticket in tickets[:20]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(serve_all(tickets[20:]))
    spans = service.spans()
    assert not errors
    batches = {span.context.span_id for span in named(spans, BATCH)}
    assert len(batches) == len(named(spans, STAY)) == 40
    for name, count in (("aten::neg", 40), ("aten::cos", 20)):
        parents = [span.parent.span_id for span in spans if span.name == name]
        assert len(parents) == len(set(parents)) == count
        assert set(parents) <= batches


def test_a_task_that_is_cancelled_in_its_batch(service):
    """A batch whose task is cancelled has ended with that as its error, and so have its requests."""
    _, tickets = enqueued(service, 2)

    async def serve(begun):
        with otp.batch(tickets):
            begun.set()
            await asyncio.Event().wait()

    async def cancel():
        begun = asyncio.Event()
        task = asyncio.create_task(serve(begun))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel())
    spans = service.spans()
    errors = [span.attributes["error.type"] for span in (*named(spans, BATCH), *named(spans, STAY))]
    assert errors == ["asyncio.exceptions.CancelledError"] * 3


def test_clients_that_leave_at_any_moment(service):
    """Whenever a ticket fails, beside the thread that takes it, it has one time in the queue, and is in its batch or not."""
    _, tickets = enqueued(service, 300)
    barrier = threading.Barrier(2)

    def leave():
        barrier.wait()
        for ticket in tickets:
            ticket.fail("left")

    thread = threading.Thread(target=leave)
    thread.start()
    barrier.wait()
    for start in range(0, 300, 10):
        with otp.batch(tickets[start : start + 10]):
            pass
    thread.join()
    spans = service.spans()
    stays = {span.parent.span_id for span in named(spans, STAY)}
    queues = [span.parent.span_id for span in named(spans, QUEUE)]
    assert len(queues) == len(set(queues)) == 300
    left = {span.parent.span_id for span in named(spans, QUEUE) if span.attributes.get("error.type") == "left"}
    assert stays | left == set(queues)
    assert not stays & left


def test_averages_have_them(service):
    """Averages count queues and stays, whose waits overlap and are nobody's self time; a batch's own is what its operators leave."""
    with otp.batch(enqueued(service, 3)[1]):
        torch.ones(2).neg()
    rows = {row.key: row for row in service.processor.key_averages()}
    assert (rows[BATCH].count, rows[QUEUE].count, rows[STAY].count) == (1, 3, 3)
    assert 0 < rows[BATCH].self_cpu_time_total < rows[BATCH].cpu_time_total
    assert rows[STAY].self_cpu_time_total == rows[QUEUE].self_cpu_time_total == 0 < rows[STAY].cpu_time_total


def test_averages_of_a_file_of_them(tmp_path, capsys):
    """The command show and load say the same of a file: queues and stays have no self time."""
    path = tmp_path / "t.otlp"
    with otp.stream(otp.OTLPFileExporter(path)), otp.batch([remote(1), otp.enqueue()]):
        torch.ones(2).neg()
    assert cli.main(["show", "--json", str(path)]) == 0
    shown = {row["key"]: row["self_cpu_time_total"] for row in json.loads(capsys.readouterr().out)}
    loaded = {row.key: row.self_cpu_time_total for row in otp.load(path).key_averages()}
    assert shown[STAY] == loaded[STAY] == 0 < shown[BATCH]


def test_too_many_batches_are_dropped_and_counted(service, monkeypatch):
    """Beyond the limit the oldest batches are dropped; the health counts their spans."""
    monkeypatch.setattr(request_log, "_MOST", 6)
    with service.processor._drainer.draining:
        for number in range(5):
            with otp.batch([remote(number + 1)]):
                pass
    assert sorted(span.context.trace_id for span in named(service.spans(), STAY)) == [3, 4, 5]
    assert service.processor.health.dropped["unseen_spans"] == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_a_batch(service):
    """The child of a fork in a batch leaves it without an error, and has batches of its own; the parent's are the parent's."""
    _, tickets = enqueued(service, 2)
    read, write = os.pipe()
    with otp.batch(tickets[:1]):
        child = os.fork()
        if child == 0:
            code = b"bad"
            try:
                with otp.batch(tickets[1:]):
                    torch.ones(2).neg()
                code = b"good"
            finally:
                os.write(write, code)
                os._exit(0)
        os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"good"
    assert len(named(service.spans(), BATCH)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_child_of_a_fork_does_not_end_its_parents_batch(service):
    """A batch that both processes leave is the parent's alone; the child records its own later ones."""
    _, tickets = enqueued(service, 2)
    read, write = os.pipe()
    with otp.batch(tickets[:1]):
        child = os.fork()
    if child == 0:
        try:
            with otp.batch(tickets[1:]):
                pass
            count = len(named(service.spans(), BATCH))
            os.write(write, b"%d" % count)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"1"
    assert len(named(service.spans(), BATCH)) == 1


def test_a_queue_between_processes(service):
    """A ticket that was pickled is the same request, whose span is in another process."""
    (span,), (ticket,) = enqueued(service, 1)
    with otp.batch([pickle.loads(pickle.dumps(ticket))]):  # noqa: S301 - our own
        pass
    (queued,), (stay,) = (named(service.spans(), name) for name in (QUEUE, STAY))
    assert queued.parent.span_id == stay.parent.span_id == span.context.span_id
    assert queued.parent.is_remote
    assert queued.end_time == stay.start_time


def test_one_object_is_one_batch(service):
    """A batch that is used again, inside of itself or later, is an error that says so, and leaves no span current."""
    serving = otp.batch(enqueued(service, 1)[1])
    with serving:
        with pytest.raises(RuntimeError, match="for one with statement"), serving:
            pass
        assert trace.get_current_span() is not trace.INVALID_SPAN
    with pytest.raises(RuntimeError, match="for one with statement"), serving:
        pass
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert len(named(service.spans(), BATCH)) == 1


def test_a_worker_that_a_request_began(service):
    """Its current span, one of the requests or one that has ended, is not above the batches of all; that of a single request is."""
    (first, *_), tickets = enqueued(service, 3)
    with trace.use_span(first):
        with otp.batch(tickets[:1]):
            pass
        with otp.batch(tickets[:2]):
            pass
        first.end()
        with otp.batch(tickets[2:]):
            torch.ones(2).neg()
    spans = service.spans()
    assert [batch.parent and batch.parent.span_id for batch in named(spans, BATCH)] == [
        first.context.span_id,
        None,
        None,
    ]
    (operator,) = named(spans, "aten::neg")
    assert operator.context.trace_id == named(spans, BATCH)[-1].context.trace_id


def test_a_request_of_very_many_batches():
    """Its trace has a fifth of what the policy allows of a trace; the batches link to it all the same, and averages have all."""
    service = Instrumented()
    with service.on("steps", policy=otp.SpanPolicy(max_spans=20)):
        _, tickets = enqueued(service, 2)
        for count in (3, 4):  # in two drains
            for _ in range(count):
                with otp.batch(tickets[:1]):
                    pass
            spans = service.spans()
        with otp.batch(tickets[1:]):
            pass
        spans = service.spans()
        rows = {row.key: row.count for row in service.processor.key_averages()}
        health = service.processor.health
    of_first = [span for span in spans if span.context.trace_id == tickets[0].span_context.trace_id]
    assert [len(named(of_first, name)) for name in (QUEUE, STAY)] == [1, 3]
    assert [len(batch.links) for batch in named(spans, BATCH)] == [1] * 8
    assert len(named(spans, STAY)) == 4
    assert (rows[STAY], health.spans["collapsed"]) == (8, 4)


def test_hostile_values(service):
    """A model of any type, absurd counts and reasons lose nothing else, and raise nothing."""
    for model, tokens, reason in itertools.product(
        (7, "\udc80", "x" * 10_000), ([-3, 4], [1 << 62, 5]), ("", KeyError)
    ):
        _, tickets = enqueued(service, 2)
        with otp.batch(tickets, tokens=tokens, model=model):
            tickets[0].fail(reason)
    with otp.batch(enqueued(service, 1)[1], tokens=[1 << 80]):
        torch.ones(2).neg()
    with otp.batch(enqueued(service, 1)[1]):
        pass
    spans = service.spans()
    assert any(span.name == "aten::neg" for span in spans)
    assert len(named(spans, BATCH)) == 14


def test_suppressed_and_foreign_spans(service):
    """A span of another SDK is a request as any other, and an attached context outlives nothing."""
    before = context.get_current()
    with otp.batch([NonRecordingSpan(remote(5))]):
        torch.ones(2).neg()
    assert context.get_current() == before
    assert [span.context.trace_id for span in named(service.spans(), STAY)] == [5]
