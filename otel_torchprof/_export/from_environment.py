"""The exporters of ``OTEL_TRACES_EXPORTER``, as in the SDK's own configuration, and the destination of any exporter."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from otel_torchprof.errors import warn_once, without_credentials

from .formats import FILE_EXPORTERS
from .otlp import OTLPExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_logger = logging.getLogger("otel_torchprof")

OTEL_TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
OTEL_CONFIG_FILE = "OTEL_CONFIG_FILE"
_GROUP = "opentelemetry_traces_exporter"


def exporters_from_environment() -> list[SpanExporter]:
    """Creates an exporter for each name in ``OTEL_TRACES_EXPORTER``; ``otlp`` if it is not set; no exporter for ``none``.

    ``otlp``, ``otlp_file`` and ``chrome`` are this package's own, which take spans as columns; any other name is looked up among the
    installed packages' entry points. A name that leads nowhere is warned of and left out. A name that is there twice
    counts once, as in the SDK, and so do names of one receiver (``otlp`` and ``otlp_proto_grpc``).
    """
    if file := os.environ.get(OTEL_CONFIG_FILE):
        warn_once(
            f"{OTEL_CONFIG_FILE}={file}: sampler, limits and resource are the file's, but torch's spans do not go to its "
            f"exporters: they go to those that {OTEL_TRACES_EXPORTER} names, or to a TorchSpanProcessor of your own"
        )
    names = dict.fromkeys(name.strip() for name in os.environ.get(OTEL_TRACES_EXPORTER, "otlp").split(","))
    made = [_made(name) for name in names if name.lower() not in {"", "none"}]
    exporters: dict[object, SpanExporter] = {}
    for exporter in made:
        if exporter is not None:
            place = exporter.displayed_endpoint if isinstance(exporter, OTLPExporter) else id(exporter)
            if exporters.setdefault(place, exporter) is not exporter:
                exporter.shutdown()
    return list(exporters.values())


def _made(name: str) -> SpanExporter | None:
    try:
        if name == "otlp":
            return OTLPExporter()
        if name in {"otlp_proto_grpc", "otlp_proto_http"}:
            return OTLPExporter(protocol="grpc" if name == "otlp_proto_grpc" else "http/protobuf")
        if name in FILE_EXPORTERS:
            return FILE_EXPORTERS[name].load()()
        from importlib.metadata import entry_points  # OpenTelemetry's instrumentor has imported it

        entries = entry_points(group=_GROUP, name=name)
        if entries:
            exporter: SpanExporter = next(iter(entries)).load()()
            return exporter
    except Exception:  # of any exporter, or about a bad variable: the application must still start
        _logger.exception("%s=%r: this exporter could not be made", OTEL_TRACES_EXPORTER, name)
        return None
    _logger.warning("%s=%r is ignored: no installed package has an exporter of that name", OTEL_TRACES_EXPORTER, name)
    return None


# ---- where an exporter sends to, as far as it says: this package's and OpenTelemetry's ----


def destination(exporter: object) -> str:
    """Returns host, port and path of an exporter's endpoint, equal for all that send there; without one, its class name."""
    endpoint = getattr(exporter, "displayed_endpoint", None) or getattr(exporter, "_endpoint", None)
    if not isinstance(endpoint, str):
        return type(exporter).__name__
    place = without_credentials(endpoint).rpartition("//")[2].rpartition("@")[2].rstrip("/")
    return place.replace("127.0.0.1", "localhost")


def described(exporter: object) -> str:
    """The name of its class, with where it sends to."""
    name, place = type(exporter).__name__, destination(exporter)
    return name if place == name else f"{name} ({place})"
