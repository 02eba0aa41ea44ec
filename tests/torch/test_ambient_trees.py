"""Which span an operator hangs under: tasks, threads and callers in other processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Instrumented, instrumented, under  # noqa: E402
from odd_programs import scripted_fork  # noqa: E402
from opentelemetry import context as otel_context  # noqa: E402
from opentelemetry import trace  # noqa: E402
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: E402

import otel_torchprof as otp  # noqa: E402

X = torch.ones(3)
ROUNDS = 50


class Turns:
    """Lets asyncio tasks go on strictly by turns, so that each interruption happens."""

    def __init__(self, tasks: int) -> None:
        self._turn = [asyncio.Event() for _ in range(tasks)]
        self._turn[0].set()

    async def take(self, task: int) -> None:
        """Waits until it is this task's turn, and gives the next turn to the next one."""
        await self._turn[task].wait()
        self._turn[task].clear()
        self._turn[(task + 1) % len(self._turn)].set()


def test_interleaved_tasks():
    """Two tasks that take turns on one thread, each inside a span of its own, each get their own operators."""
    with instrumented() as service:

        async def work(task, turns, operator):
            with service.tracer.start_as_current_span(f"task {task}") as span:
                for _ in range(ROUNDS):
                    await turns.take(task)
                    operator(X)
            return span

        async def both():
            turns = Turns(2)
            return await asyncio.gather(work(0, turns, torch.neg), work(1, turns, torch.sin))

        first, second = asyncio.run(both())
        assert service.operators() == under(first, neg=ROUNDS) + under(second, sin=ROUNDS)


@pytest.mark.parametrize("drained_every", [None, 1])
def test_labels_held_across_awaits(drained_every):
    """A label that a task holds while another runs is the parent of its own task's operators, and of no others."""
    with instrumented(drained_every=drained_every) as service:

        async def work(task, turns, operator):
            with service.tracer.start_as_current_span(f"task {task}") as span:
                await turns.take(task)
                with otp.record_function(f"label {task}"):
                    for _ in range(ROUNDS):
                        await turns.take(task)
                        operator(X)
                await turns.take(task)
                operator(X)
            return span

        async def both():
            turns = Turns(2)
            return await asyncio.gather(work(0, turns, torch.neg), work(1, turns, torch.sin))

        first, second = asyncio.run(both())
        spans = service.spans()
        labels = [next(span for span in spans if span.name == f"label {task}") for task in range(2)]
        assert [label.parent.span_id for label in labels] == [s.context.span_id for s in (first, second)]
        inside = under(labels[0], neg=ROUNDS) + under(labels[1], sin=ROUNDS)
        assert service.operators() == inside + under(first, neg=1) + under(second, sin=1)


def test_a_span_inside_a_label():
    """The nearest wins: an operator in a span that began inside a label hangs under that span."""
    with instrumented() as service:
        with service.tracer.start_as_current_span("outer"), otp.record_function("label"):
            X.neg()
            with service.tracer.start_as_current_span("inner") as inner:
                X.sin()
            X.neg()
        (label,) = [span for span in service.spans() if span.name == "label"]
        assert service.operators() == under(label, neg=2) + under(inner, sin=1)


def test_a_pool_without_propagation():
    """Where nobody carries the context over, the work is no part of the request: the pool's operators share a root of their own."""
    with (
        instrumented() as service,
        service.tracer.start_as_current_span("request") as request,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(X.neg).result()
        pool.submit(X.neg).result()
    spans = service.spans_at_end()
    roots = {span.context.span_id for span in spans if span.name == "torch.operators" and span.parent is None}
    operators = [span for span in spans if span.name == "aten::neg"]
    assert len(operators) == 2
    assert {span.parent.span_id for span in operators} == roots
    assert request.context.trace_id not in {span.context.trace_id for span in spans}


def caller(*, sampled: bool):
    """The context of a request whose caller, in another process, said in which trace it is."""
    header = f"00-{0xABC:032x}-{0xDEF:016x}-0{int(sampled)}"
    return TraceContextTextMapPropagator().extract({"traceparent": header, "tracestate": "vendor=value"})


def test_remote_parent():
    """Without a span of this process, operators are children of the caller's: its ids, its trace state, marked remote."""
    with instrumented() as service:
        token = otel_context.attach(caller(sampled=True))
        X.neg()
        otel_context.detach(token)
        X.sin()
    found = {span.name: span for span in service.spans_at_end()}
    neg, sin, root = (found[name] for name in ("aten::neg", "aten::sin", "torch.operators"))
    remote = trace.get_current_span(caller(sampled=True)).get_span_context()
    assert (neg.name, neg.parent.span_id, neg.context.trace_id) == ("aten::neg", remote.span_id, remote.trace_id)
    assert neg.parent.is_remote
    assert neg.context.trace_state == remote.trace_state
    assert (sin.parent.span_id, root.parent) == (root.context.span_id, None)
    assert sin.context.trace_id == root.context.trace_id != remote.trace_id


def test_unsampled_caller():
    """What a caller has not sampled is not recorded, in the same thread as what is."""
    with instrumented() as service:
        for sampled in (False, True, False):
            token = otel_context.attach(caller(sampled=sampled))
            X.neg()
            otel_context.detach(token)
        remote = trace.get_current_span(caller(sampled=True)).get_span_context()
        assert service.operators() == under(remote, neg=1)
        assert service.processor.health.recorded == 1


def forked(x: torch.Tensor) -> torch.Tensor:
    """For TorchScript: an operator on one of its own threads."""
    return x.neg()


def test_jit_fork():
    """What TorchScript runs on its own threads is part of the request that forked it."""
    scripted = scripted_fork(forked)
    with instrumented() as service:
        scripted(X)
        with service.tracer.start_as_current_span("request") as request:
            for _ in range(5):
                scripted(X)

        def negated():
            mine = request.get_span_context().trace_id
            return sum(span.name == "aten::neg" and span.context.trace_id == mine for span in service.spans())

        # torch tells who waits before the function that it ran has ended, and what is inside waits for that.
        deadline = time.monotonic() + 60
        while negated() < 5 and time.monotonic() < deadline:
            pass
        assert negated() == 5


def test_backward():
    """A backward pass is part of the request that asks for it, though the graph was made in another."""
    with instrumented() as service:
        with service.tracer.start_as_current_span("forward") as forward:
            y = torch.ones(3, requires_grad=True).sin()
        with service.tracer.start_as_current_span("backward") as backward:
            y.backward(X)
        spans = service.spans()
    (sine,) = [span for span in spans if span.name == "aten::sin"]
    (node,) = [span for span in spans if span.name == "autograd::engine::evaluate_function: SinBackward0"]
    assert sine.parent.span_id == forward.get_span_context().span_id
    (phase,) = [span for span in spans if span.name == "torch.phase.backward"]
    assert phase.parent.span_id == backward.get_span_context().span_id
    assert node.parent.span_id == phase.context.span_id
    (function,) = [span for span in spans if span.name == "SinBackward0"]
    assert [link.context.span_id for link in function.links] == [sine.context.span_id]


EVERY = 10
REQUESTS = 40


def answer(service, model):
    """Answers a request; returns the trace id."""
    with service.tracer.start_as_current_span("request") as span, torch.inference_mode():
        model(X)
        model(X)
    return span.get_span_context().trace_id


@pytest.mark.parametrize("keep", ["all", "slow"])
@pytest.mark.parametrize("share", [{"every": EVERY}, {"ratio": 1 / EVERY}], ids=["every", "ratio"])
def test_a_policy_counts_requests_where_there_are_no_steps(share, keep):
    """Of requests on a pool's threads that ``every`` or ``ratio`` leaves out, the calls of the model have their spans, and nothing inside."""
    service, model = Instrumented(), torch.nn.Linear(3, 3)
    policy = otp.SpanPolicy(**share, keep=keep, slow_limit=1e-9)
    with service.on(policy=policy), ThreadPoolExecutor(4) as pool:
        traces = [pool.submit(answer, service, model).result() for _ in range(REQUESTS)]
        spans = service.spans()
        calls = Counter(span.context.trace_id for span in spans if span.name == "torch.phase.inference")
        assert calls == dict.fromkeys(traces, 2)
        inside = Counter(span.context.trace_id for span in spans if span.name == "aten::addmm")
        below = {trace for trace in traces if trace % 2**64 < round(2**64 / EVERY)}
        chosen = set(traces[::EVERY]) if "every" in share else below
        assert inside == dict.fromkeys(chosen, 2)
        note = f"{REQUESTS - len(chosen)} of {REQUESTS} traces without steps are not selected by the policy"
        assert note in str(otp.TorchInstrumentor().health)


def test_a_request_with_an_error_is_whole_though_it_is_not_selected():
    """An error in a request that ``every`` leaves out keeps everything below the call that failed."""
    service, failing = Instrumented(), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(2, 2))
    with service.on(policy=otp.SpanPolicy(every=EVERY)):
        answer(service, torch.nn.Linear(3, 3))
        with pytest.raises(RuntimeError):
            answer(service, failing)
        assert [span.name for span in service.spans()].count("Sequential") == 1
        assert sum(span.name == "aten::addmm" for span in service.spans()) >= 3
