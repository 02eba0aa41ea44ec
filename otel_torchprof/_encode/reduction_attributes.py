"""Attributes of traces that were cut down, which :mod:`~otel_torchprof._sampling.policy` adds: for the documentation."""

from __future__ import annotations

from otel_torchprof._tree.span_table import AttributeType

_INT64, _DOUBLE, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.NAME
_IF_REDUCED = "on roots (of steps) of which spans were aggregated, collapsed or split off"

REDUCTIONS: tuple[tuple[str, AttributeType, str, str], ...] = (
    ("torch.aggregated.count", _INT64, "on aggregate spans", "spans that this one stands for, itself among them"),
    (
        "torch.aggregated.duration",
        _DOUBLE,
        "on aggregate spans",
        "seconds that these took together; from the start to the end of the aggregate span there may be more",
    ),
    (
        "torch.collapsed.count",
        _INT64,
        "on spans under which others were left out",
        "spans left out under it, at any depth; all that an aggregate span among them stood for",
    ),
    (
        "torch.collapsed.duration",
        _DOUBLE,
        "on spans under which others were left out",
        "seconds that the top-level of these took together: what ran inside of them is part of it and not added again",
    ),
    (
        "torch.recorded_spans",
        _INT64,
        f"{_IF_REDUCED}; on steps without details",
        "spans that were recorded, itself among them: those sent, aggregated and collapsed together",
    ),
    ("torch.aggregated_spans", _INT64, _IF_REDUCED, "spans that are not sent because aggregate spans stand for them"),
    (
        "torch.collapsed_spans",
        _INT64,
        _IF_REDUCED,
        "spans that were left out and are counted by `torch.collapsed.count`",
    ),
    ("torch.parts", _INT64, _IF_REDUCED, "further traces that hold the rest, linked both ways"),
    ("torch.part", _INT64, "on the roots of these", "number of the part, from 1"),
    (
        "torch.averages",
        _NAME,
        "on steps without details",
        (
            'names by the time without what they called, `[{"name":"aten::mm","count":12,"self":0.0123}]`: the longest first, '
            '`self` in seconds, with `"phase":"data"` what ran while the loop waited for data; under 2,048 bytes, which is what Tempo keeps'
        ),
    ),
    (
        "torch.collectives",
        _NAME,
        "on steps without details, where a backend of `torch.distributed` worked on threads of its own",
        (
            '`[["0",123,5000.1,5200.7]]`: group, `torch.collective.sequence_nr`, when this rank came to it and when all had come, in us since '
            "the step began; under 1,024 bytes, which is some 30 of them"
        ),
    ),
)
"""Key, type, when it is there and what it means, in the order in which the page has them."""
