"""Where an exporter sends to, as far as it says: this package's and OpenTelemetry's."""

from __future__ import annotations

from otel_torchprof.errors import without_credentials


def destination(exporter: object) -> str:
    """Host, port and path of one that has an endpoint, the same for all that send there; else the name of its class."""
    endpoint = getattr(exporter, "displayed_endpoint", None) or getattr(exporter, "_endpoint", None)
    if not isinstance(endpoint, str):
        return type(exporter).__name__
    place = without_credentials(endpoint).rpartition("//")[2].rpartition("@")[2].rstrip("/")
    return place.replace("127.0.0.1", "localhost")


def described(exporter: object) -> str:
    """The name of its class, with where it sends to."""
    name, place = type(exporter).__name__, destination(exporter)
    return name if place == name else f"{name} ({place})"
