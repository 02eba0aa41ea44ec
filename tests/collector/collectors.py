"""Real collectors as child processes: they take OTLP by gRPC and HTTP, and hand everything on to receivers of ours."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fault_server import LONG, GrpcReceiver, HttpReceiver, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIGURATION = Path(__file__).resolve().parents[2] / "collector-config.yaml"


@dataclass(frozen=True)
class Ports:
    """What a collector is told."""

    grpc: int
    """Where it takes OTLP, and by HTTP:"""
    http: int
    stores: list[int]
    """Where it sends traces to, by gRPC."""
    metrics: str
    """The URL that it sends metrics below."""


@dataclass(frozen=True)
class Collector:
    """Where a running collector takes telemetry, and where it sends it."""

    endpoints: dict[str, str]
    """Of traces, by protocol."""
    stores: list[GrpcReceiver]
    """Each gets all spans."""
    metrics: HttpReceiver
    log: Path


Start = tuple[list[str], dict[str, str]]
"""A command and what it needs in its environment."""


def _otelcol() -> str | None:
    return os.environ.get("OTELCOL") or shutil.which("otelcol")


def _rotel() -> str | None:
    package = importlib.util.find_spec("rotel")
    return str(Path(str(package.origin)).parent / "rotel-agent") if package else None


def _start_otelcol(binary: str, _folder: Path, ports: Ports) -> Start:
    """The repository's own configuration, told by its variables where to listen and send; it only waits less for more."""
    tempo, jaeger = ports.stores
    environment = {
        "COLLECTOR_GRPC_PORT": str(ports.grpc),
        "COLLECTOR_HTTP_PORT": str(ports.http),
        "COLLECTOR_METRICS_INTERVAL": "500",
        "TEMPO_ENDPOINT": f"127.0.0.1:{tempo}",
        "JAEGER_ENDPOINT": f"127.0.0.1:{jaeger}",
        "PROMETHEUS_OTLP_ENDPOINT": ports.metrics,
    }
    sooner = [f"--set=processors.{batch}.timeout=50ms" for batch in ("batch", "batch/metrics")]
    return [binary, "--config", str(CONFIGURATION), *sooner], environment


def _start_rotel(binary: str, folder: Path, ports: Ports) -> Start:
    (store,) = ports.stores
    options = {
        "--otlp-grpc-endpoint": f"127.0.0.1:{ports.grpc}",
        "--otlp-http-endpoint": f"127.0.0.1:{ports.http}",
        "--exporter": "otlp",
        "--otlp-exporter-endpoint": f"http://127.0.0.1:{store}",
        "--otlp-exporter-protocol": "grpc",
        "--pid-file": str(folder / "rotel.pid"),
        "--log-file": str(folder / "rotel.log"),
    }
    return [binary, "start", *(word for option in options.items() for word in option)], {}


@dataclass(frozen=True)
class Kind:
    """A collector that may be on this machine."""

    find: Callable[[], str | None]
    start: Callable[[str, Path, Ports], Start]
    stores: int
    """How many it sends traces to."""
    missing: str
    """What to say where it is not."""


OTELCOL = Kind(
    _otelcol,
    _start_otelcol,
    2,
    "no OpenTelemetry Collector: name its binary in OTELCOL, or put otelcol on the path",
)
KINDS = {"otelcol": OTELCOL, "rotel": Kind(_rotel, _start_rotel, 1, "the rotel package is not installed")}


@contextlib.contextmanager
def running(kind: Kind, binary: str, folder: Path, metrics_below: str | None = None) -> Iterator[Collector]:
    """Starts receivers and, before them, a collector; it may not listen yet.

    Metrics go to a receiver, too, or below the URL that is given.
    """
    log = folder / "output"
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(GrpcReceiver()) for _ in range(kind.stores)]
        metrics = stack.enter_context(HttpReceiver())
        below = metrics_below or f"http://127.0.0.1:{metrics.port}/api/v1/otlp"
        ports = Ports(free_port(), free_port(), [store.port for store in stores], below)
        command, environment = kind.start(binary, folder, ports)
        process = subprocess.Popen(
            command,
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
        )
        try:
            endpoints = {
                "grpc": f"http://127.0.0.1:{ports.grpc}",
                "http/protobuf": f"http://127.0.0.1:{ports.http}/v1/traces",
            }
            yield Collector(endpoints, stores, metrics, log)
        finally:
            process.terminate()
            process.wait(LONG)
