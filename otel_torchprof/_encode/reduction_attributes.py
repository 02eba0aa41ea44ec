"""Attributes of traces that were cut down, which :mod:`~otel_torchprof._sampling.policy` adds: for the documentation."""

from __future__ import annotations

from otel_torchprof._tree.span_table import AttributeType

_INT64, _DOUBLE, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.NAME
_IF_REDUCED = "on roots (of steps) whose spans were aggregated, collapsed or split off"

REDUCTIONS: tuple[tuple[str, AttributeType, str, str], ...] = (
    (
        "torch.aggregated.count",
        _INT64,
        "on aggregate spans",
        "number of spans that the aggregate span replaces, including itself",
    ),
    (
        "torch.aggregated.duration",
        _DOUBLE,
        "on aggregate spans",
        "total duration of these spans in seconds; the aggregate span itself may last longer",
    ),
    (
        "torch.collapsed.count",
        _INT64,
        "on spans with collapsed descendants",
        "number of collapsed spans below the span, at any depth, including all spans of collapsed aggregate spans",
    ),
    (
        "torch.collapsed.duration",
        _DOUBLE,
        "on spans with collapsed descendants",
        "total duration in seconds of the top-level collapsed spans, which includes the spans inside them",
    ),
    (
        "torch.recorded_spans",
        _INT64,
        f"{_IF_REDUCED}; on steps without detail",
        "number of recorded spans, including the root: sent, aggregated and collapsed spans together",
    ),
    (
        "torch.aggregated_spans",
        _INT64,
        _IF_REDUCED,
        "number of spans that are not sent because aggregate spans replace them",
    ),
    (
        "torch.collapsed_spans",
        _INT64,
        _IF_REDUCED,
        "number of spans that are left out and counted in `torch.collapsed.count`",
    ),
    ("torch.parts", _INT64, _IF_REDUCED, "number of further traces with the other spans, linked in both directions"),
    ("torch.part", _INT64, "on the roots of these traces", "number of the part, from 1"),
    (
        "torch.averages",
        _NAME,
        "on steps without detail",
        (
            'names by self time, the longest first: `[{"name":"aten::mm","count":12,"self":0.0123}]`, `self` in '
            'seconds, with `"phase":"data"` for events during the wait for data; at most 1,279 bytes together with '
            "`torch.collectives` (Tempo cuts attributes at 2,048 bytes)"
        ),
    ),
    (
        "torch.collectives",
        _NAME,
        "on steps without detail, if a backend of `torch.distributed` worked on its own threads",
        (
            '`[["0",123,5000.1,5200.7]]`: group, `torch.collective.sequence_nr`, arrival of this rank and of the '
            "last rank, in µs since the step began; at most 511 bytes"
        ),
    ),
)
"""Key, type, when it is there and what it means, in the order in which the page has them."""
