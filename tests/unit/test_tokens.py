"""Generated tokens in traces that are too large: the slowest stay, the others become sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trace_group_tables import TARGET, attribute, cut, displayed, trace_group, trace_group_of

from otel_torchprof._model.limits import Budget
from otel_torchprof._model.span_table import AttributeType

GENERATE, PREFILL, DECODE = "text_completion tiny", "torch.phase.prefill", "torch.phase.decode"


def token(start, length=2.0):
    """A token with a layer, and what chooses it."""
    end = start + length
    return (DECODE, start, end, ("layer", start, end, ("mm", start, start + 1))), ("argmax", end, end + 0.5)


def generated(*lengths, begin=10):
    """A call with a prefill and tokens of these lengths, ten ms apart."""
    tokens = [span for at, length in enumerate(lengths) for span in token(begin + 10 * at, length)]
    return GENERATE, 0, begin + 10 * len(lengths), (PREFILL, 1, 9, ("layer", 1, 9)), *tokens


def names_and_counts(table):
    """Of each span its name, and how many it stands for."""
    return [(name, info.get("torch.aggregated.count", 1)) for name, *_, info in displayed(table)]


def test_slow_tokens_stay():
    """As many of the slowest as fit are as they were, with what chose them; what is between them is one span of each name."""
    table = trace_group(generated(2, 2, 7, 2, 2, 2))
    found, done = cut(table, Budget(max_spans=16))
    assert names_and_counts(found) == [
        *((GENERATE, 1), (PREFILL, 1), ("layer", 1)),
        *((DECODE, 2), ("layer", 2), ("mm", 2), ("argmax", 2)),
        *((DECODE, 1), ("layer", 1), ("mm", 1)),
        *(("argmax", 4), (DECODE, 3), ("layer", 3), ("mm", 3)),
    ]
    assert (done.recorded, done.aggregated, done.collapsed, done.parts) == (27, 13, 0, 0)


def test_all_become_one_where_there_is_no_room():
    """Times are sums, and what was recorded is told."""
    found, done = cut(trace_group(generated(2, 2, 2, 6)), Budget(max_spans=8))
    assert names_and_counts(found) == [
        *((GENERATE, 1), (PREFILL, 1), ("layer", 1)),
        *((DECODE, 4), ("layer", 4), ("mm", 4), ("argmax", 4)),
    ]
    tokens = displayed(found)[3]
    assert tokens[1:3] == (10, 46)
    assert tokens[4]["torch.aggregated.duration"] == 0.012
    assert done.recorded == len(trace_group(generated(2, 2, 2, 6)))


def test_tokens_that_may_not_be_aggregated():
    """Where each has a collective below it, which other ranks look for, only what is beside them is collapsed."""
    table = trace_group((GENERATE, 0, 100, *((DECODE, i, i + 1, ("c10d", i, i + 0.5)) for i in range(10))))
    numbered = attribute("torch.collective.sequence_nr", AttributeType.INT64, None, *[None, 7] * 10)
    found, done = cut(replace(table, attributes=(numbered,)), Budget(max_spans=15))
    assert len(found) == 15
    assert (done.recorded, done.aggregated, done.collapsed, done.parts) == (21, 0, 6, 0)


@pytest.mark.parametrize("name", [GENERATE, "text_completion", "torch.phase.generate"])
def test_calls_stay(name):
    """However short, a call of generate is a phase, and no part of an aggregate span."""
    calls, others = ([(each, at, at + 1) for at in range(first, first + 5)] for each, first in ((name, 1), ("mm", 10)))
    found, _ = cut(trace_group(("POST /chat", 0, 20, *calls, *others)), Budget(max_spans=8))
    assert [count for each, count in names_and_counts(found) if each == name] == [1] * 5
    assert ("mm", 5) in names_and_counts(found)


def test_what_fits_is_left_alone():
    """Nothing is aggregated that need not be."""
    table = trace_group(generated(2, 2, 7))
    found, _ = cut(table, Budget(max_spans=len(table)))
    assert found is table


def test_calls_are_apart():
    """Tokens of two calls are not put together, nor with those of other threads."""
    tree = ("step", 0, 300, generated(2, 2, 2), generated(2, 2, 2, begin=100))
    found, _ = cut(trace_group(tree), Budget(max_spans=16, short=0.0))
    assert [count for name, count in names_and_counts(found) if name == DECODE] == [3, 3]


def test_what_others_look_for_stays():
    """A token with a collective stays whole, and one that failed is not put together with others."""
    table = trace_group(generated(2, 2, 2, 2, 2))
    rows = np.flatnonzero(table.name == table.names[:].index("mm"))
    group = [None] * len(table)
    group[rows[1]] = 1
    error = np.zeros(len(table), np.uint8)
    error[np.flatnonzero(table.name == table.names[:].index(DECODE))[3]] = 1
    table = trace_group(
        generated(2, 2, 2, 2, 2),
        error=error,
        attributes=(attribute("torch.collective.group_size", AttributeType.INT64, *group),),
    )
    found, _ = cut(table, Budget(max_spans=len(table) - 1, short=0.0))
    tokens = [
        (start, count)
        for (_, start, *_), (name, count) in zip(displayed(found), names_and_counts(found), strict=True)
        if name == DECODE
    ]
    assert (20.0, 1) in tokens
    assert (40.0, 1) in tokens


def test_a_call_that_continues():
    """Tokens of a call that is sent in parts are put together before that has ended."""
    rows = [(name, at, at + 1, 99) for at in range(0, 40, 4) for name in (DECODE, "argmax")]
    found, done = cut(trace_group_of(rows), Budget(max_spans=6), TARGET._replace(span_id=99))
    assert sum(count for name, count in names_and_counts(found) if name == DECODE) == 10
    assert len(found) <= 6
    assert (done.recorded, done.parts) == (20, 1)
