"""Instrumented programs without torch, whose spans come when they say so, for tests of policies."""

from __future__ import annotations

import time
from contextlib import contextmanager

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import new_provider

import otel_torchprof as otp

AN_HOUR = 3_600_000


class Whole(InMemorySpanExporter):
    takes_whole_traces = True


def pause():
    """As long as the clock that ends of steps are read from may be off from the recorder's, and longer."""
    until = time.perf_counter() + 2e-4
    while time.perf_counter() < until:
        pass


class Job:
    """An instrumented program whose spans come when it says so. ``takes_whole``: an exporter takes whole traces too."""

    def __init__(self, policy, *, exporters=(), takes_whole=True, **options):
        self.exporter, self.whole = InMemorySpanExporter(), Whole()
        exporters = (self.exporter, *([self.whole] if takes_whole else []), *exporters)
        self.processor = otp.TorchSpanProcessor(*exporters, schedule_delay_millis=AN_HOUR)
        self.provider = new_provider(self.processor, **options)
        self.instrumentor = otp.TorchInstrumentor()
        self.instrumentor.instrument(
            tracer_provider=self.provider, detail="modules", policy=policy, skip_dep_check=True
        )

    def step(self, *labels):
        """A step that begins and ends with something else than a label, as any real one does."""
        pause()
        for label in labels:
            with otp.record_function(label):
                pass
        pause()
        self.instrumentor.step()

    def drain(self):
        assert self.provider.force_flush()

    def spans(self):
        """All, after the end."""
        self.instrumentor.uninstrument()
        self.provider.shutdown()
        return self.exporter.get_finished_spans()


@contextmanager
def job(policy=None, **options):
    found = Job(policy, **options)
    try:
        yield found
    finally:
        found.spans()
