"""A drain in slices tells what one drain tells: the same spans with the same ids, parents, traces, attributes, links and averages."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native.recorder import CHUNK_BYTES, Session  # noqa: E402

ROUNDS = 60
FORWARDING = {"aten::sum"}
"""What only calls one of its own name, and is one operator with that in torch's lists: two where a slice ends between their ends."""


class Streamed:
    """A stream that is drained ``max_bytes`` at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.exporter = Collecting()
        self.slices = 0
        self._max_bytes = max_bytes
        self.stream = otp.stream(self.exporter, detail="ops", record_shapes=True)
        recording = self.stream._instrumentation._live
        recording._trees._key = 4711  # span ids are made of it and the event's id
        self._session = self.stream._instrumentation._session
        self._session.drain = self._drain

    def _drain(self, _max_bytes: int) -> Any:
        batch = Session.drain(self._session, self._max_bytes)
        self.slices += not batch.is_last
        return batch

    def reported(self) -> dict[Any, Any]:
        """What is said of each span, by what it is in both."""
        spans = self.exporter.spans
        steps = [s for s in spans if s.name == "torch.step"]
        known = {s.context.span_id: ("step", s.attributes["torch.step.number"], s.parent is None) for s in steps} | {
            s.context.span_id: (s.name,) for s in spans if s.name in {"torch.job", "torch.setup"}
        }
        traces = {
            s.context.trace_id: known[s.context.span_id] for s in spans if s.context.span_id in known and not s.parent
        }

        def named(span_id: int) -> Any:
            return known.get(span_id, span_id)

        return {
            named(s.context.span_id): (
                s.name,
                traces.get(s.context.trace_id, s.context.trace_id),
                s.parent and named(s.parent.span_id),
                sorted(str(named(link.context.span_id)) for link in s.links),
                # What memory is free is that of the drain.
                {
                    name: value
                    for name, value in s.attributes.items()
                    if name not in {"thread.name", "torch.step.memory.free"}
                },
                # Each stream reads the clock itself when a step ends, and another thread may run in between.
                None if s.name == "torch.step" else (s.start_time, s.end_time),
            )
            for s in spans
            if known.get(s.context.span_id) not in {("torch.job",), ("torch.setup",)}  # these began with the streams
        }

    def averages(self) -> dict[str, Any]:
        rows = self.stream.key_averages()
        return {
            row.key: (row.count, row.cpu_time_total, row.self_cpu_time_total) for row in rows if row.key != "torch.step"
        }


def worked(tracer: Any, model: Any, x: Any) -> None:
    """Another thread's work, in spans of the application."""
    with torch.no_grad():
        for number in range(ROUNDS):
            with tracer.start_as_current_span("request"), otp.record_function(f"label {number % 7}"):
                model(x)


def trained(tracer: Any, model: Any, x: Any) -> None:
    """Steps, with a label around several of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(x)  # outside of the labels: around the first phase of all, a slice may end in the middle of one
    for number in range(ROUNDS):
        with ExitStack() as stack:
            if number % 10 == 3:
                stack.enter_context(tracer.start_as_current_span("evaluation"))
            with otp.record_function("part"):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_slices_tell_what_one_drain_tells():
    """Steps, requests of two threads, backward passes and labels: the same spans and averages from many drains of 64 KB and from one."""
    provider = TracerProvider(shutdown_on_exit=False)
    tracer = provider.get_tracer("application")
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)), torch.ones(2, 4)
    trained(tracer, model, x)
    whole, sliced = Streamed(0), Streamed(CHUNK_BYTES)
    try:
        whole.stream.start()
        sliced.stream.start()
        threads = [threading.Thread(target=worked, args=(tracer, model, x)) for _ in range(2)]
        for thread in threads:
            thread.start()
        trained(tracer, model, x)
        for thread in threads:
            thread.join()
    finally:
        sliced.stream.stop(600)  # on a busy machine 40 drains take longer than the usual 30 s
        whole.stream.stop(600)
    reported, expected = sliced.reported(), whole.reported()
    assert reported.keys() == expected.keys()
    assert {key: reported[key] for key in reported if reported[key] != expected[key]} == {
        key: expected[key] for key in reported if reported[key] != expected[key]
    }
    averages, expected = sliced.averages(), whole.averages()
    assert averages.keys() == expected.keys()
    for name, (count, total, own) in averages.items():
        # torch's rule for what is inside looks at times
        cut = count - expected[name][0]
        assert (name, own) == (name, pytest.approx(expected[name][2], rel=1e-3))
        assert (name, cut, total >= expected[name][1]) == (name, cut if name in FORWARDING else 0, True)
        assert 0 <= cut <= sliced.slices
        assert cut or total == expected[name][1]
    assert whole.slices == 0
    assert sliced.slices > 3
