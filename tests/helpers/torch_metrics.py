"""What a reader of metrics has, for tests."""

from __future__ import annotations

from typing import Any


def data_points(reader: Any, name: str) -> list[Any]:
    """The points of one metric, collected now; none where there is no such metric."""
    data = reader.get_metrics_data()
    if data is None:
        return []
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


def points(reader: Any, name: str) -> list[tuple[dict[str, Any], Any]]:
    """Attributes and value of each."""
    return [(dict(point.attributes), point.value) for point in data_points(reader, name)]


def value(reader: Any, name: str) -> Any:
    """The only point."""
    (point,) = data_points(reader, name)
    return point
