"""A training loop whose backend goes wrong: what the exporter did, and that the loop has not noticed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import grpc  # noqa: E402
from fault_server import LONG, SILENCE, Abort, GrpcReceiver, HttpReceiver, silence, status  # noqa: E402
from providers import new_provider  # noqa: E402

import otel_torchprof as otp  # noqa: E402

PROTOCOLS = {"http/protobuf": HttpReceiver, "grpc": GrpcReceiver}
EVERY_TIME = 1_000
"""Turns: more than there are requests."""
SHORT = 0.2
"""Seconds until a deadline that is meant to be missed."""


def losses(steps=5):
    """A training loop with dropout, so that nothing may draw a random number of its own; what it came to, exactly."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


WITHOUT = losses()


class Service:
    """A program that is instrumented in full and sends to one receiver."""

    def __init__(self, receiver, protocol, timeout=LONG):
        self.exporter = otp.OTLPExporter(receiver.url, protocol=protocol, timeout=timeout)
        # Nothing is sent but by a flush or the end, so that it is known what is in which message.
        self.processor = otp.TorchSpanProcessor(self.exporter, schedule_delay_millis=LONG * 1000)
        self.provider = new_provider(self.processor)
        otp.TorchInstrumentor().instrument(tracer_provider=self.provider, detail="ops")

    @property
    def queue(self):
        (stats,) = self.processor.health.exporters.values()
        return stats

    def __enter__(self):
        return self

    def __exit__(self, *_):
        otp.TorchInstrumentor().uninstrument()
        self.provider.shutdown()


def all_are_accounted_for(service):
    """Every span that was recorded is in one count, and what was accepted is what the receiver has."""
    stats, queue = service.exporter.stats, service.queue
    assert service.processor.health.dropped == {}
    assert queue.dropped_spans == 0
    assert stats.accepted_spans + stats.rejected_spans + stats.failed_spans == queue.exported_spans + queue.failed_spans
    assert stats.accepted_spans + stats.failed_spans + queue.waiting_spans > 0
    return stats


LASTING = {
    "503": ("http/protobuf", status(503)),
    "429": ("http/protobuf", status(429, {"Retry-After": "3600"})),
    "no answer by HTTP": ("http/protobuf", silence),
    "UNAVAILABLE": ("grpc", Abort(grpc.StatusCode.UNAVAILABLE, "busy")),
    "no answer by gRPC": ("grpc", SILENCE),
}


@pytest.mark.parametrize("case", LASTING)
def test_lasting(case):
    """What does not pass waits, as health says, and is dropped and counted when the program ends before it has passed."""
    protocol, turn = LASTING[case]
    with (
        PROTOCOLS[protocol](turns=[turn] * EVERY_TIME) as receiver,
        Service(receiver, protocol, timeout=SHORT) as service,
    ):
        assert losses() == WITHOUT
        assert not service.processor.force_flush(int(2 * SHORT * 1000))
        stats = all_are_accounted_for(service)
        waiting = service.queue.waiting_spans
        assert (stats.accepted_spans, stats.failed_spans) == (0, 0)
        assert waiting > 0
        assert "it is tried again: " in str(service.processor.health)
        assert losses() == WITHOUT
        service.processor.shutdown_within(SHORT)
        assert service.queue.dropped["shutdown"] >= waiting


@pytest.mark.parametrize(("protocol", "turn"), [("http/protobuf", silence), ("grpc", SILENCE)])
def test_deadlines(monkeypatch, protocol, turn):
    """While the receiver says nothing, force_flush and shutdown come back when their time is over, not when the exporter's is."""
    monkeypatch.setattr("otel_torchprof._instrument.processor._SHUTDOWN_SECONDS", SHORT)
    with PROTOCOLS[protocol](turns=[turn] * EVERY_TIME) as receiver, Service(receiver, protocol) as service:
        assert losses() == WITHOUT
        assert not service.processor.force_flush(int(SHORT * 1000))
        receiver.wait_for(1)
        assert (service.exporter.stats.requests, service.exporter.stats.failed_spans) == (1, 0)  # it is still at it
        assert losses() == WITHOUT
        service.provider.shutdown()
        assert service.queue.dropped["shutdown"] > 0  # those of the second loop
        assert losses() == WITHOUT


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dies_and_returns(protocol):
    """What was recorded while the receiver was away arrives when it is back, once."""
    with PROTOCOLS[protocol]() as receiver, Service(receiver, protocol) as service:
        assert losses() == WITHOUT
        assert service.processor.force_flush()
        before = len(receiver.names)
        receiver.stop()
        assert losses() == WITHOUT
        assert not service.processor.force_flush(int(SHORT * 1000))
        assert service.exporter.stats.accepted_spans == before
        receiver.start()
        assert losses() == WITHOUT
        assert service.processor.force_flush(int(LONG * 1000))
        stats = all_are_accounted_for(service)
        assert (stats.failed_spans, service.queue.waiting_spans) == (0, 0)
        assert stats.accepted_spans == len(receiver.names) > before
