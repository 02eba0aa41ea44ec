"""Wrong setups: each says what ``docs/troubleshooting.md`` says that it does. And the right ones say nothing."""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import preloaded
import pytest
from fault_server import LONG, Abort, GrpcReceiver, HttpReceiver, free_port, status
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import new_provider
from slow_receiver import SlowReceiver, answering

import otel_torchprof as otp
from otel_torchprof._export.from_environment import destination
from otel_torchprof._instrument import processor as processors
from otel_torchprof.errors import forget_warnings
from otel_torchprof.integrations.loop import Loop

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
HTTP_1 = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
SHORT = 0.2


def rows() -> dict[str, str]:
    """What is said, by what was done: the last text in code of each row."""
    found = re.findall(r"^\| (.+?) \| .*?(`+)([^`].*?)\2 \|$", PAGE.read_text(), re.MULTILINE)
    return {done: said for done, _, said in found}


SAID = rows()


def matches(done: str, text: str) -> bool:
    """Whether a text has what the page says, with other numbers of ports and something for each ellipsis."""
    parts = re.sub(r"(port |localhost:)\d+", r"\1N", SAID[done]).split("...")
    return re.search(".*".join(map(re.escape, parts)), re.sub(r"(port |localhost:)\d+", r"\1N", text)) is not None


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch):
    """No variables of OpenTelemetry's, nothing said yet, and nothing instrumented afterwards."""
    for name in [name for name in os.environ if name.startswith("OTEL_") and "BUILD_DIR" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(processors, "_UNANSWERED_SECONDS", SHORT)
    forget_warnings()
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    forget_warnings()


def instrumented(provider: TracerProvider, **given) -> None:
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **given)


def recorded() -> otp.profile:
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    return prof


def exported(**given) -> None:
    """Sends a root and a label, with one attempt's time."""
    recorded().export(otp.OTLPExporter(timeout=given.pop("timeout", LONG), **given))


# ---- the wrong ones ----


def console(_) -> None:
    provider = new_provider(BatchSpanProcessor(ConsoleSpanExporter(out=io.StringIO())))
    instrumented(provider, detail="modules")
    with otp.record_function("label"):
        pass
    provider.force_flush(10)
    otp.TorchInstrumentor().uninstrument()
    provider.shutdown()


def two_processors(_) -> None:
    instrumented(new_provider(otp.TorchSpanProcessor(), otp.TorchSpanProcessor()))


def unknown_exporter(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    instrumented(new_provider())


def second_time(_) -> None:
    instrumented(new_provider(otp.TorchSpanProcessor()))
    otp.TorchInstrumentor().instrument(detail="modules")


def variable(name: str, value: str):
    def run(monkeypatch) -> None:
        monkeypatch.setenv(name, value)
        instrumented(new_provider(otp.TorchSpanProcessor()))

    return run


def never_stopped(_) -> None:
    otp.profile(operators=False).start()


def grpc_to_http(_) -> None:
    with SlowReceiver(answering(HTTP_1)) as server:
        exported(endpoint=f"http://localhost:{server.port}")


def grpc_to_pages(_) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            exported(endpoint=f"http://localhost:{server.server_port}", timeout=1)
        finally:
            server.shutdown()
            serving.join()


def http_to_grpc(_) -> None:
    with GrpcReceiver() as server:
        exported(endpoint=f"http://localhost:{server.port}/v1/traces", protocol="http/protobuf")


def no_path(_) -> None:
    with HttpReceiver(turns=[status(404)]) as server:
        exported(endpoint=f"http://localhost:{server.port}", protocol="http/protobuf")


def path_twice(_) -> None:
    with HttpReceiver(turns=[status(404)]) as server:
        exported(endpoint=f"http://localhost:{server.port}/v1/traces/v1/traces", protocol="http/protobuf")


def no_receiver(_) -> None:
    with HttpReceiver(turns=[status(404)]) as server:
        exported(endpoint=f"http://localhost:{server.port}/v1/traces", protocol="http/protobuf")


def no_pipeline(_) -> None:
    with GrpcReceiver(turns=[Abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service")]) as server:
        exported(endpoint=f"http://localhost:{server.port}")


def no_headers(_) -> None:
    with HttpReceiver(turns=[status(401)]) as server:
        exported(endpoint=f"http://localhost:{server.port}/v1/traces", protocol="http/protobuf")


def other_headers(_) -> None:
    given = {"headers": {"Authorization": "Bearer old"}, "protocol": "http/protobuf"}
    with HttpReceiver(turns=[status(403)]) as server:
        exported(endpoint=f"http://localhost:{server.port}/v1/traces", **given)


def no_tls(_) -> None:
    with HttpReceiver() as server:
        exported(endpoint=f"https://localhost:{server.port}/v1/traces", protocol="http/protobuf")


def nobody(_) -> None:
    exported(endpoint=f"http://localhost:{free_port()}/v1/traces", protocol="http/protobuf", timeout=SHORT)


def after_the_shutdown(_) -> None:
    provider = new_provider(otp.TorchSpanProcessor(InMemorySpanExporter()))
    provider.shutdown()
    instrumented(provider)
    instrumented(provider)


HERE = {
    "`instrument()` after the provider's shutdown": after_the_shutdown,
    "the application's spans go to the console, and nothing says where torch's go": console,
    "`instrument(tracer_provider=...)` with a provider of the API": lambda _: instrumented(trace.NoOpTracerProvider()),
    "two `TorchSpanProcessor` on one provider": two_processors,
    "`HuggingFaceCallback()` or `LightningProfiler()` where nothing records": lambda _: Loop().begin(),
    '`TorchSpanProcessor("trace.json")`': lambda _: otp.TorchSpanProcessor("trace.json"),
    "`OTEL_TRACES_EXPORTER=jaeger`": unknown_exporter,
    '`instrument(detial="ops")`': lambda _: otp.TorchInstrumentor().instrument(detial="ops"),
    '`instrument(detail="operators")`': lambda _: otp.TorchInstrumentor().instrument(detail="operators"),
    "a second `instrument()`, with another `detail`": second_time,
    "`profile(enargy=True)`": lambda _: otp.profile(enargy=True),
    "`OTEL_TORCHPROF_DETIAL=ops`": variable("OTEL_TORCHPROF_DETIAL", "ops"),
    "`OTEL_TORCHPROF_MAX_SPANS=100`": variable("OTEL_TORCHPROF_MAX_SPANS", "100"),
    "`OTEL_EXPORTER_OTLP_ENDPIONT=http://localhost:4317`": variable(
        "OTEL_EXPORTER_OTLP_ENDPIONT", "http://localhost:4317"
    ),
    "`OTEL_TROCHPROF_DETAIL=ops`": variable("OTEL_TROCHPROF_DETAIL", "ops"),
    "`OTEL_TORCHPROFILER_DETAIL=ops`": variable("OTEL_TORCHPROFILER_DETAIL", "ops"),
    "`OTEL_LOGS_EXPORTERS=otlp`": variable("OTEL_LOGS_EXPORTERS", "otlp"),
    "`OTEL_TORCHPROF_DETAIL=operators`": variable("OTEL_TORCHPROF_DETAIL", "operators"),
    "`prof.start()` and no `stop()`": never_stopped,
    "gRPC, the default, to a port of HTTP": grpc_to_http,
    "gRPC to a server of web pages, as Python's `http.server`": grpc_to_pages,
    "HTTP to a port of gRPC": http_to_grpc,
    "HTTP to `http://localhost:4318` without a path": no_path,
    "HTTP, and `OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318/v1/traces`": path_twice,
    "HTTP to a server that has no receiver": no_receiver,
    "gRPC to a collector without a pipeline for traces": no_pipeline,
    "no headers, to a receiver that wants credentials": no_headers,
    "headers that the receiver does not accept": other_headers,
    "`https://` to a port without TLS": no_tls,
    "nobody listens there": nobody,
}
PROGRAM = """
import torch
import otel_torchprof as otp

otp.TorchInstrumentor().instrument()
prof = otp.profile(operators=False)
prof.start()
"""
WITHOUT_CODE = """
import opentelemetry.instrumentation.auto_instrumentation.sitecustomize
import torch
"""
NO_CALL = """
import torch
import otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider

provider = TracerProvider()
provider.add_span_processor(otp.TorchSpanProcessor())
"""
AT_EXIT = {
    "`instrument()` in a program that sets no `TracerProvider`": PROGRAM,
    "`prof.start()` and no `stop()`": PROGRAM,
    "`opentelemetry-instrument python train.py` without the package `opentelemetry-distro`": WITHOUT_CODE,
    "a `TorchSpanProcessor` on the provider of a program with torch, and no `instrument()`": NO_CALL,
}


@pytest.mark.parametrize("done", HERE)
def test_it_says_so(done, monkeypatch, caplog):
    """A wrong setup raises, or logs once, what the page says."""
    try:
        HERE[done](monkeypatch)
    except (TypeError, ValueError, otp.ExportError) as error:
        said = [str(error)]
    else:
        said = [record.getMessage() for record in caplog.records if record.name == "otel_torchprof"]
    assert [matches(done, text) for text in said].count(True) == 1, said


def test_the_reason_is_apart_too():
    """Of a receiver that did not take what was sent, the error has what the transport said, for programs."""
    with pytest.raises(otp.ExportError) as raised:
        http_to_grpc(None)
    assert raised.value.reason.endswith("speaks gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc")
    assert raised.value.reason in str(raised.value)


@pytest.mark.parametrize("program", dict.fromkeys(AT_EXIT.values()))
def test_at_exit(program):
    """What a program has forgotten is said when it ends, once, and no other row; and the program ends as it would."""
    environment = {**os.environ, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi"}
    done = preloaded.run(program, environment=environment, has_package=True)
    assert done.returncode == 0
    said = [sum(matches(row, line) for line in done.stderr.splitlines()) for row in AT_EXIT]
    assert said == [AT_EXIT[row] == program for row in AT_EXIT], done.stderr


def test_every_row_is_run():
    """No row of the page is only a promise, and there are fifteen and more."""
    assert set(SAID) == {*HERE, *AT_EXIT}
    assert len(SAID) >= 15


# ---- the right ones ----


def in_code(_) -> None:
    provider = new_provider(otp.TorchSpanProcessor(InMemorySpanExporter()), BatchSpanProcessor(InMemorySpanExporter()))
    instrumented(provider, detail="modules")
    otp.TorchInstrumentor().instrument()
    instrumented(provider, detail="modules")
    with otp.record_function("label"):
        pass
    provider.shutdown()


def added_later(_) -> None:
    provider = new_provider(BatchSpanProcessor(InMemorySpanExporter()))
    instrumented(provider, detail="modules")
    provider.add_span_processor(otp.TorchSpanProcessor(InMemorySpanExporter()))
    with otp.record_function("label"):
        pass
    provider.shutdown()


def by_variables(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_TORCHPROF_DETAIL", "modules")
    provider = new_provider(BatchSpanProcessor(InMemorySpanExporter()))
    instrumented(provider)
    with otp.record_function("label"):
        pass
    provider.shutdown()


def profiles(_) -> None:
    recorded().export(InMemorySpanExporter())


@pytest.mark.parametrize("run", [in_code, added_later, by_variables, profiles])
def test_right_setups_say_nothing(run, monkeypatch, caplog):
    """The documented ways of setting it up log nothing at all."""
    with caplog.at_level(logging.WARNING):
        run(monkeypatch)
    assert caplog.messages == []


FORKS = """
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
"""
SPAWNS = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
"""
LOADS = """
list(torch.utils.data.DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"))
"""
INSTRUMENTS = """
otp.TorchInstrumentor().instrument(tracer_provider=TracerProvider(), detail="steps")
otp.TorchInstrumentor().uninstrument()
"""


@pytest.mark.parametrize(
    ("then", "is_wrong"),
    [
        (FORKS, False),
        (SPAWNS, False),
        (INSTRUMENTS, False),
        (f"provider.shutdown(){INSTRUMENTS}", False),
        (LOADS, True),
    ],
    ids=["forks", "spawns", "instruments", "instruments after a shutdown", "loads"],
)
def test_who_may_leave_a_processor_unused(then, is_wrong):
    """A process whose children may record, and one that did record elsewhere; none that has workers to load its data."""
    row = "a `TorchSpanProcessor` on the provider of a program with torch, and no `instrument()`"
    done = preloaded.run(f"import os\n{NO_CALL}{then}", environment=dict(os.environ), has_package=True)
    assert done.returncode == 0, done.stderr
    assert matches(row, done.stderr) is is_wrong, done.stderr


def test_both_to_the_default_is_one_place():
    """OpenTelemetry's exporter and ours, both set to nothing, go to the same receiver: no reason for a warning."""
    theirs, ours = OTLPSpanExporter(), otp.OTLPExporter()
    assert destination(theirs) == destination(ours) == "localhost:4317"
    theirs.shutdown()
    ours.shutdown()
