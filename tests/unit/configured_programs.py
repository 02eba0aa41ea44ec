"""Programs that change no code, each in a process of its own: forked from one that has imported everything, which takes long.

As a program: reads what is to be run from standard input, a mapping of names to environments, and answers with what each said.
"""

from __future__ import annotations

import itertools
import json
import logging
import logging.handlers
import os
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource, ResourceDetector
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from torch_metrics import data_points

import otel_torchprof as otp

HERE = Path(__file__).resolve().parent
STEPS = 6
ENTRY_POINTS = """
[opentelemetry_configurator]
sdk = opentelemetry.sdk._configuration:_OTelSDKConfigurator
[opentelemetry_instrumentor]
torch = otel_torchprof._instrument.zero_code:ZeroCodeInstrumentor
[opentelemetry_id_generator]
in-turn = configured_programs:InTurn
[opentelemetry_resource_detector]
place = configured_programs:Place
"""


class InTurn(IdGenerator):
    """Trace ids of which every other one is among the lower half, which a ratio of 0.5 samples; that comes first."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._traces = itertools.count(1)

    def generate_trace_id(self) -> int:
        number = next(self._traces)
        return number << 64 | (number if number % 2 else (1 << 64) - number)

    def generate_span_id(self) -> int:
        return next(self._numbers)


class Place(ResourceDetector):
    """Finds out where it is."""

    def detect(self) -> Resource:
        return Resource({"place": "here"})


def run(folder: Path, environments: dict[str, dict[str, str]]) -> dict[str, dict[str, object]]:
    """What programs in these environments say, with the entry points above as if installed."""
    info = folder / "parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    keep = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    path = os.pathsep.join(map(str, (HERE.parent.parent, HERE, HERE.parent / "helpers", folder)))
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(environments),
        env={**keep, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def configuration() -> types.ModuleType:
    """A stand-in for the package that makes providers as a file describes them: this file is a resource."""
    module = types.ModuleType("opentelemetry.configuration")

    def configure(attributes: dict[str, str]) -> None:
        trace.set_tracer_provider(TracerProvider(resource=Resource(attributes)))

    module.load_config_file = lambda path: json.loads(Path(path).read_text())
    module.configure_sdk = configure
    return module


def program() -> dict[str, object]:
    """What a training script does, with a profile of its own; and what it sees of it."""
    sys.modules["opentelemetry.configuration"] = configuration()
    warnings = logging.handlers.BufferingHandler(1000)
    logging.getLogger("otel_torchprof").addHandler(warnings)
    import_module("opentelemetry.instrumentation.auto_instrumentation.sitecustomize")
    instrumentor = otp.TorchInstrumentor()
    for _ in range(STEPS):
        instrumentor.step()
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    return {
        "recording": instrumentor.health.sources["recording"],
        "gpus": instrumentor.health.sources.get("gpus"),
        "averages": [row.key for row in prof.key_averages()],
        "spans": [span.name for span in prof.spans()],
        "exported": prof.export(otp.ChromeTraceExporter(os.devnull)),
        "warnings": [record.getMessage() for record in warnings.buffer],
    }


def meters_later() -> dict[str, object]:
    """Makes steps before and after it sets a MeterProvider: how many of either its reader sees."""
    reader = InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, skip_dep_check=True)

    def durations() -> int:
        for _ in range(STEPS):
            instrumentor.step()
        tracers.force_flush()
        return sum(point.count for point in data_points(reader, "torch.step.duration"))

    unheard = durations()
    metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
    return {"before": unheard, "after": durations()}


def main() -> None:
    """Each in a child, which ends as programs do: what is still to be sent is sent then."""
    for name, environment in json.load(sys.stdin).items():
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            run_here = meters_later if environment.get("PROGRAM") == "meters_later" else program
            sys.stdout.write(json.dumps([name, run_here()]) + "\n")
            sys.stdout.flush()
            return
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"{name} ended with {status}")


if __name__ == "__main__":
    main()
