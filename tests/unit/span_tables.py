"""Span tables for tests: made by hand, and of any content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torchprof._columns.batch import Names
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType, SpanTable

if TYPE_CHECKING:
    from collections.abc import Sequence


def span_rows(names: Sequence[str | bytes], **columns: Any) -> SpanTable:
    """A table of independent spans with these names; every column can be replaced."""
    count = len(names)
    neutral: dict[str, Any] = {
        "name": np.arange(1, count + 1, dtype=np.uint32),
        "start": np.arange(1, count + 1, dtype=np.int64),
        "end": np.arange(1, count + 1, dtype=np.int64) * 3,
        "trace": np.zeros(count, dtype=np.uint32),
        "trace_ids": np.full((1, 16), 0xA5, dtype=np.uint8),
        "span_id": np.arange(1, count + 1, dtype=np.uint64),
        "parent_span_id": np.zeros(count, dtype=np.uint64),
        "error": np.zeros(count, dtype=np.uint8),
        "row": np.arange(count),
        "step": np.full(count, -1),
        "links": np.zeros(0, dtype=LINK),
        "names": Names.of(["", *names]),
    }
    return SpanTable(**{**neutral, **columns})


RESOURCE = Resource({"service.name": "träiner", "rank": 3, "share": 0.5, "on": True, "list": ["a", "b"]}, "https://r")
SCOPE = InstrumentationScope("otel_torchprof", "1.2", "https://s", {"x": True})


def span_list(*names: str | bytes, **columns: Any) -> SpanList:
    """Such spans, with a resource and a scope that have something of everything."""
    return SpanList(span_rows(names, **columns), resource=RESOURCE, scope=SCOPE)


TEXT = st.one_of(st.text(), st.binary(max_size=20), st.sampled_from(["\0", '"', "\x1b[0m", b"\xf0\x9f\x94", "🔥" * 50]))
INT64 = st.integers(-(2**63), 2**63 - 1)
ID = st.integers(1, 2**64 - 1)
STATE = st.sampled_from(["", "vendor=1", "tenant@vendor=x y,other=2", ",".join(f"key{i}=value" for i in range(32))])


@st.composite
def tables(draw: Any) -> SpanTable:
    """Tables of any content: names of any bytes, attributes of every type with gaps, errors, parents and links."""
    names = draw(st.lists(TEXT, max_size=6))
    count = len(names)

    def column(values: Any, dtype: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype)

    values = {
        AttributeType.INT64: INT64,
        AttributeType.DOUBLE: st.floats(allow_nan=False),
        AttributeType.BOOL: st.integers(0, 1),
        AttributeType.NAME: st.integers(0, count),
    }
    keys = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=200), unique=True, max_size=5))
    kinds = [draw(st.sampled_from(list(AttributeType))) for _ in keys]
    links = (
        draw(st.lists(st.tuples(st.integers(0, count - 1), st.binary(min_size=16, max_size=16), ID), max_size=4))
        if count
        else []
    )
    counts = st.none() | st.just(column(st.sampled_from([0, 0, 1, 127, 128, 2**32 - 1]), np.uint32))
    return span_rows(
        names,
        start=column(st.integers(0, 2**63 - 1), np.int64),
        end=column(st.integers(0, 2**63 - 1), np.int64),
        trace=column(st.integers(0, 2), np.uint32),
        trace_ids=np.array([[1] * 16, [255] * 16, [1] * 16], dtype=np.uint8),
        trace_states=draw(st.just(()) | st.tuples(STATE, STATE, STATE)),
        span_id=column(ID, np.uint64),
        parent_span_id=column(st.just(0) | ID, np.uint64),
        parent_is_remote=draw(st.none() | st.just(column(st.integers(0, 1), np.uint8))),
        error=column(st.integers(0, 1), np.uint8),
        attributes=tuple(
            AttributeColumn.where(key, kind, column(values[kind], kind.dtype), column(st.integers(0, 1), np.uint8))
            if draw(st.booleans())
            else AttributeColumn(key, kind, column(values[kind], kind.dtype))
            for key, kind in zip(keys, kinds, strict=True)
        ),
        links=np.array([(row, np.frombuffer(t, np.uint8), s) for row, t, s in sorted(links)], dtype=LINK),
        dropped_attributes=draw(counts),
        dropped_links=draw(counts),
    )
