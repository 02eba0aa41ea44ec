"""The exporters that ``OTEL_TRACES_EXPORTER`` names, as the SDK's own configuration would make them."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from .chrome import ChromeTraceExporter
from .otlp import OTLPExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_logger = logging.getLogger("otel_torchprof")

OTEL_TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
_GROUP = "opentelemetry_traces_exporter"


def exporters_from_environment() -> list[SpanExporter]:
    """One exporter for each name in ``OTEL_TRACES_EXPORTER``, ``otlp`` where it is not set, none for ``none``.

    ``otlp`` and ``chrome`` are this package's own, which take spans as columns; any other name is looked up among the
    installed packages' entry points. A name that leads nowhere is warned of and left out.
    """
    names = [name.strip() for name in os.environ.get(OTEL_TRACES_EXPORTER, "otlp").split(",")]
    made = [_made(name) for name in names if name not in {"", "none"}]
    return [exporter for exporter in made if exporter is not None]


def _made(name: str) -> SpanExporter | None:
    try:
        if name == "otlp":
            return OTLPExporter()
        if name in {"otlp_proto_grpc", "otlp_proto_http"}:
            return OTLPExporter(protocol="grpc" if name == "otlp_proto_grpc" else "http/protobuf")
        if name == "chrome":
            return ChromeTraceExporter()
        found = entry_points(group=_GROUP, name=name)
        if found:
            exporter: SpanExporter = next(iter(found)).load()()
            return exporter
    except Exception:  # somebody else's exporter, or a variable that it does not like: the application must still start
        _logger.exception("%s=%r: this exporter could not be made", OTEL_TRACES_EXPORTER, name)
        return None
    _logger.warning("%s=%r is ignored: no installed package has an exporter of that name", OTEL_TRACES_EXPORTER, name)
    return None
