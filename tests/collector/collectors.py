"""Real collectors as child processes: they take OTLP by gRPC and HTTP, and hand everything on by gRPC."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fault_server import LONG, GrpcReceiver, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIGURATION = Path(__file__).resolve().parents[2] / "collector-config.yaml"

_OVERRIDES = """\
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: "127.0.0.1:{grpc}"}}
      http: {{endpoint: "127.0.0.1:{http}"}}
processors:
  batch: {{timeout: 50ms}}
exporters:
  otlp_grpc/test: {{endpoint: "127.0.0.1:{behind}", tls: {{insecure: true}}}}
service:
  pipelines:
    traces: {{exporters: [otlp_grpc/test]}}
"""


@dataclass(frozen=True)
class Collector:
    """Where a running collector takes spans, and where it sends them."""

    endpoints: dict[str, str]
    """By protocol."""
    behind: GrpcReceiver
    log: Path


def _otelcol() -> str | None:
    return os.environ.get("OTELCOL") or shutil.which("otelcol")


def _rotel() -> str | None:
    package = importlib.util.find_spec("rotel")
    return str(Path(str(package.origin)).parent / "rotel-agent") if package else None


def _otelcol_command(binary: str, folder: Path, grpc: int, http: int, behind: int) -> list[str]:
    """The repository's own configuration, with other ports and a receiver of ours behind it."""
    overrides = folder / "overrides.yaml"
    overrides.write_text(_OVERRIDES.format(grpc=grpc, http=http, behind=behind))
    return [binary, "--config", str(CONFIGURATION), "--config", str(overrides)]


def _rotel_command(binary: str, folder: Path, grpc: int, http: int, behind: int) -> list[str]:
    options = {
        "--otlp-grpc-endpoint": f"127.0.0.1:{grpc}",
        "--otlp-http-endpoint": f"127.0.0.1:{http}",
        "--exporter": "otlp",
        "--otlp-exporter-endpoint": f"http://127.0.0.1:{behind}",
        "--otlp-exporter-protocol": "grpc",
        "--pid-file": str(folder / "rotel.pid"),
        "--log-file": str(folder / "rotel.log"),
    }
    return [binary, "start", *(word for option in options.items() for word in option)]


@dataclass(frozen=True)
class Kind:
    """A collector that may be on this machine."""

    find: Callable[[], str | None]
    command: Callable[[str, Path, int, int, int], list[str]]
    missing: str
    """What to say where it is not."""


KINDS = {
    "otelcol": Kind(
        _otelcol, _otelcol_command, "no OpenTelemetry Collector: name its binary in OTELCOL, or put otelcol on the path"
    ),
    "rotel": Kind(_rotel, _rotel_command, "the rotel package is not installed"),
}


@contextlib.contextmanager
def running(kind: Kind, binary: str, folder: Path) -> Iterator[Collector]:
    """Starts a collector and, behind it, a receiver; it may not listen yet."""
    grpc, http, log = free_port(), free_port(), folder / "output"
    with GrpcReceiver() as behind, log.open("wb") as output:
        command = kind.command(binary, folder, grpc, http, behind.port)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            endpoints = {"grpc": f"http://127.0.0.1:{grpc}", "http/protobuf": f"http://127.0.0.1:{http}/v1/traces"}
            yield Collector(endpoints, behind, log)
        finally:
            process.terminate()
            process.wait(LONG)
