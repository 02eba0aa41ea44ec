"""Metrics that come by OTLP/HTTP, as a page that a Prometheus scrapes: distributions have one that takes no OTLP."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import yaml
from dashboards import EXAMPLE, prometheus_name
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROMOTED = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text("utf-8"))["otlp"]["promote_resource_attributes"]
_LABELS = {"service.name": "job", "service.instance.id": "instance"}


def _value(value: Any) -> str:
    kind = value.WhichOneof("value")
    return str(getattr(value, kind)).lower() if kind == "bool_value" else str(getattr(value, kind))


def _labels(attributes: Any, chosen: list[str] | None = None) -> dict[str, str]:
    return {
        _LABELS.get(each.key, each.key.replace(".", "_")): _value(each.value)
        for each in attributes
        if chosen is None or each.key in chosen
    }


def _series(metric: Any, resource: dict[str, str]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Names, labels and values of the points of a metric, as Prometheus 3 makes them of cumulative ones."""
    kind = metric.WhichOneof("data")
    data = getattr(metric, kind)
    of_kind = {"sum": "counter" if getattr(data, "is_monotonic", False) else "updowncounter"}.get(kind, kind)
    name = prometheus_name(metric.name, metric.unit, of_kind)
    for point in data.data_points:
        labels = {**resource, **_labels(point.attributes)}
        if kind != "histogram":
            yield name, labels, getattr(point, point.WhichOneof("value"))
            continue
        yield f"{name}_sum", labels, point.sum
        yield f"{name}_count", labels, point.count
        count = 0
        for bound, more in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
            count += more
            yield f"{name}_bucket", {**labels, "le": "+Inf" if bound == float("inf") else f"{bound:g}"}, count


class Scraped:
    """The newest value of every series."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, body: bytes) -> None:
        """Takes a request."""
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            resource = _labels(of_resource.resource.attributes, _PROMOTED)
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    for name, labels, value in _series(metric, resource):
                        text = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
                        self._values[f"{name}{{{text}}}"] = value

    def page(self) -> bytes:
        """What is scraped."""
        return "".join(f"{series} {value}\n" for series, value in sorted(self._values.copy().items())).encode()


@contextlib.contextmanager
def serving() -> Iterator[tuple[Scraped, int]]:
    """Takes OTLP/HTTP and is scraped at one port."""
    scraped = Scraped()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            scraped.add(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(b"", "application/x-protobuf")

        def do_GET(self) -> None:
            self._answer(scraped.page(), "text/plain; version=0.0.4")

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(ConnectionError):  # whoever asked has not waited
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield scraped, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
