"""A fork while a thread of the parent is at each stage: the child records, flushes and shuts down, and the parent loses nothing."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
import types

import pytest
from forked import LONG, Pause, in_child
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics._internal.aggregation import _ExplicitBucketHistogramAggregation
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import new_provider

import otel_torchprof as otp
from otel_torchprof._encode import attribute_source
from otel_torchprof._export.backlog import Backlog
from otel_torchprof._export.span_buffer import SpanBuffer
from otel_torchprof._instrument import gpu_metrics, instrumentor, processor
from otel_torchprof._instrument.instrumentation import Instrumentation
from otel_torchprof._instrument.live_recording import LiveRecording
from otel_torchprof._model.averages import RunningAverages
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._native.recorder import Session
from otel_torchprof._process.after_import import when_imported
from otel_torchprof._record.contexts import ContextTable

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

STAGES = {
    "taking events from the recorder": (Session, "drain"),
    "placing spans": (LiveTrees, "place"),
    "computing a cached property": (attribute_source, "device_times"),
    "deciding what is sent": (SpanBuffer, "decide"),
    "adding up averages": (RunningAverages, "add"),
    "asking for contexts": (ContextTable, "end_drain"),
    "queueing": (Backlog, "append"),
    "taking from the queue": (Backlog, "take"),
    "exporting": (InMemorySpanExporter, "export"),
}


class Exporter(InMemorySpanExporter):
    """Keeps spans, or fails."""

    fails = False

    def export(self, spans):
        if self.fails:
            raise OSError("as told")
        return super().export(spans)


class Service:
    """An instrumented program with labels for operators."""

    def __init__(self) -> None:
        self.exporter = Exporter()
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.processor = otp.TorchSpanProcessor(self.exporter, schedule_delay_millis=3_600_000)
        self.provider = new_provider(self.processor)

    def instrument(self) -> None:
        otp.TorchInstrumentor().instrument(
            tracer_provider=self.provider,
            meter_provider=self.meters,
            detail="ops",
            gpu_metrics=False,
            skip_dep_check=True,
        )

    def work(self, name: str) -> None:
        with otp.record_function(name):
            pass

    def finish(self) -> tuple[bool, list[str]]:
        """Whether a flush succeeds; then what was exported up to the end."""
        flushed = self.provider.force_flush()
        self.processor.key_averages()
        otp.TorchInstrumentor().step()
        self.end()
        return flushed, self.exported()

    def stop(self) -> None:
        otp.TorchInstrumentor().uninstrument()

    def end(self) -> None:
        self.stop()
        self.provider.shutdown()
        self.meters.shutdown()

    def exported(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans() if span.name != "torch.job"]

    def child(self) -> tuple[bool, list[str]]:
        """What a child does that is not at fault for anything."""
        self.work("child")
        return self.finish()


@pytest.fixture
def service():
    found = Service()
    yield found
    found.end()


CHILD_IS_RIGHT = repr((True, ["child", "torch.step"]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_fork_while_a_thread_is(stage, service, monkeypatch):
    """The child's spans are its own and all there, within its deadlines; the parent's flush goes on as if nothing had been."""
    service.instrument()
    service.work("parent")
    pause = Pause(monkeypatch, *STAGES[stage])
    flush = threading.Thread(target=service.provider.force_flush)
    flush.start()
    assert pause.reached.wait(LONG)
    assert in_child(service.child) == CHILD_IS_RIGHT
    pause.let_go.set()
    flush.join(LONG)
    assert service.finish() == (True, ["parent", "torch.step"])


def test_a_worker_of_multiprocessing_ends(service, monkeypatch):
    """A worker that is forked in the middle of a drain sends what it has when it ends, and does end."""
    service.instrument()
    service.work("parent")
    pause = Pause(monkeypatch, *STAGES["computing a cached property"])
    flush = threading.Thread(target=service.provider.force_flush)
    flush.start()
    assert pause.reached.wait(LONG)
    worker = multiprocessing.get_context("fork").Process(target=service.work, args=("worker",))
    worker.start()
    worker.join(LONG)
    worker.kill()
    assert worker.exitcode == 0
    pause.let_go.set()
    flush.join(LONG)
    assert service.finish() == (True, ["parent", "torch.step"])


LIFE = {
    "starting": (Instrumentation, "_attach", Service.instrument),
    "stopping the recording": (LiveRecording, "stop", Service.stop),
    "sending the rest": (otp.TorchSpanProcessor, "detach", Service.stop),
}


@pytest.mark.parametrize("stage", LIFE)
def test_a_fork_while_a_thread_starts_or_stops(stage, service, monkeypatch):
    """Half a start or stop of the parent leaves the child one that can be stopped, started anew and ended; the parent ends its own."""
    owner, name, call = LIFE[stage]
    if call is Service.stop:
        service.instrument()
        service.work("parent")
    pause = Pause(monkeypatch, owner, name)
    thread = threading.Thread(target=call, args=(service,))
    thread.start()
    assert pause.reached.wait(LONG)

    def child():
        service.stop()
        service.instrument()
        return service.child()

    assert in_child(child) == CHILD_IS_RIGHT
    pause.let_go.set()
    thread.join(LONG)
    if call is Service.stop:
        service.end()
        assert service.exported() == ["parent"]
    else:
        service.work("parent")
        assert service.finish() == (True, ["parent", "torch.step"])


def test_a_fork_while_a_provider_is_waited_for(monkeypatch):
    """What the thread that looks for a TracerProvider holds, a child that is instrumented no more does not wait for."""
    monkeypatch.setattr(instrumentor.trace, "get_tracer_provider", object)
    found = otp.TorchInstrumentor()
    found.instrument(detail="ops", gpu_metrics=False, skip_dep_check=True)
    with found._waiting._given_up._cond, gpu_metrics._lock, otp.KinetoStepTracker._lock:
        said = in_child(lambda: (found.uninstrument(), otp.KinetoStepTracker.current_step()))
    found.uninstrument()
    assert said == "(None, 0)"


READING = {
    "what is shown": (processor, "exporter_figures"),
    "the durations of steps": (_ExplicitBucketHistogramAggregation, "collect"),
}


@pytest.mark.parametrize("stage", READING)
def test_a_fork_while_a_thread_reads_metrics(stage, service, monkeypatch):
    """A reader holds the SDK's locks while it asks: the child records durations of its steps, and its own reader can ask."""
    service.instrument()
    otp.TorchInstrumentor().step()
    service.provider.force_flush()
    pause = Pause(monkeypatch, *READING[stage])
    thread = threading.Thread(target=service.reader.get_metrics_data)
    thread.start()
    assert pause.reached.wait(LONG)

    def child():
        service.work("child")
        otp.TorchInstrumentor().step()
        return service.provider.force_flush(), service.reader.get_metrics_data() is not None, service.finish()[0]

    assert in_child(child) == repr((True, True, True))
    pause.let_go.set()
    thread.join(LONG)
    assert service.finish()[0]


@pytest.mark.parametrize("holder", ["the handler", "the limit of warnings"])
def test_a_fork_while_a_thread_logs(holder, service, monkeypatch, caplog):
    """What a thread holds while it warns of an exporter, of logging's or ours, a child that warns as well does not wait for."""
    service.exporter.fails = True
    service.instrument()
    service.work("parent")
    log = service.processor._queues[0]._log._log
    pause = Pause(monkeypatch, *((caplog.handler, "emit") if holder == "the handler" else (log, "_clock")))
    flush = threading.Thread(target=service.provider.force_flush)
    flush.start()
    assert pause.reached.wait(LONG)
    assert in_child(service.child) == repr((False, []))
    pause.let_go.set()
    flush.join(LONG)
    assert not flush.is_alive()


def test_a_fork_while_a_thread_imports(service, tmp_path, monkeypatch):
    """A child needs nothing that some other thread was importing: Python leaves such a module locked for ever."""
    (tmp_path / "slowly_imported.py").write_text("import gate\ngate.entered.set()\ngate.open.wait(60)\n")
    gate = types.ModuleType("gate")
    gate.entered, gate.open = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    service.instrument()
    thread = threading.Thread(target=importlib.import_module, args=("slowly_imported",))
    thread.start()
    assert gate.entered.wait(LONG)

    def child():
        seen = []
        when_imported("slowly_imported", seen.append)()
        return seen, service.child()

    assert in_child(child) == repr(([], (True, ["child", "torch.step"])))
    gate.open.set()
    thread.join(LONG)
    monkeypatch.delitem(sys.modules, "slowly_imported")
    assert service.finish() == (True, ["torch.step"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="a torch that is there is imported once")
def test_a_fork_while_a_thread_looks_for_torch():
    """Where there is none, a child does not wait for the lock under which a thread of the parent was trying to import it."""
    locked, end = threading.Event(), threading.Event()

    def look() -> None:
        with importlib._bootstrap._ModuleLockManager("torch"):
            locked.set()
            end.wait(LONG)

    thread = threading.Thread(target=look)
    thread.start()
    assert locked.wait(LONG)

    def child() -> int:
        with otp.profile() as prof, otp.record_function("label"):
            pass
        return len(prof.events())

    assert in_child(child) == "1"
    end.set()
    thread.join(LONG)


EXPORTERS = {
    "grpc": "otp.OTLPExporter('http://127.0.0.1:9', protocol='grpc')",
    "http": "otp.OTLPExporter('http://localhost:9/v1/traces', protocol='http/protobuf')",
    "otlp": "otp.OTLPFileExporter('trace.otlp')",
    "json": "otp.OTLPFileExporter('trace.jsonl.gz')",
    "chrome": "otp.ChromeTraceExporter('trace.json.gz')",
}
IMPORTS = """
import sys, threading
import otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider

class Watch:
    def find_spec(self, name, *_):
        if threading.current_thread() is not threading.main_thread():
            print(name)

provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(otp.TorchSpanProcessor({exporter}, sdk_spans=True, schedule_delay_millis=1))
otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", skip_dep_check=True)
sys.meta_path.insert(0, Watch())
with provider.get_tracer("test").start_as_current_span("request"), otp.record_function("label"):
    pass
otp.TorchInstrumentor().step()
provider.force_flush(1)
provider.force_flush(1000)
otp.TorchInstrumentor().uninstrument()
otp.TorchSpanProcessor.shutdown_within(provider._active_span_processor._span_processors[0], 1)
"""


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_our_threads_import_nothing(exporter, tmp_path):
    """What draining and exporting need is imported before their threads begin, so that no fork finds them importing it."""
    program = IMPORTS.format(exporter=EXPORTERS[exporter])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        arguments, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
