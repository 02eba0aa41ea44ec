"""Every program with every option, under both profilers: the same facts, sums, tables and stacks."""

from __future__ import annotations

import sys
from typing import Any

import models
import pytest
from harness import (
    ALWAYS,
    CHANGING,
    INFO_FIELDS,
    MISTAKEN,
    OPTIONS,
    Option,
    Order,
    both,
    configured,
    is_told,
    possible,
    reported,
    stack_lines,
    sums,
    tables,
    torchs,
)
from observed import run

from examples import one_in

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of features that are deprecated or in beta


BOUND = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 14),
    reason="these interpreters do not tell torch's tracer of C functions that are bound to an object, which ours has",
)

MERGED = pytest.mark.skipif(
    not is_told("python_module_id"),
    reason="without the call between them, this torch makes one event of an operator and the same one that it calls again",
)


def _case(number: int, program: Any, option: Option, order: Order) -> Any:
    """Which of the two profilers is inside matters to whether they meet, not to what an option adds: once is enough.

    Likewise every program meets a third of the options, and every option a third of the programs; without any all meet, in every order.
    """
    is_one_more = (order is not Order.OURS_INSIDE and option.together) or number % 3
    marks = [pytest.mark.exhaustive] if is_one_more and option is not OPTIONS[0] else []
    if (program, option.name) == (models.modes, "with_stack"):
        marks += [BOUND, MERGED]
    return pytest.param(program, option, order, marks=marks, id=f"{program.__name__}, {option}, {order.value}")


CASES = [
    _case(row + column, program, option, order)
    for row, program in enumerate(models.ALL)
    for column, option in enumerate(OPTIONS)
    for order in (Order if option.together else [Order.ALONE])
]


@pytest.mark.parametrize(("program", "option", "order"), CASES, indirect=["program"])
def test_the_same_is_told(program, step, option, order, tmp_path):
    """Facts of every event, averages, tables and stacks are torch's, whichever profiler runs inside the other."""
    ours, theirs = both(step, possible(program.__name__, order, option), option)
    stacks = "stack" not in option.info or (program.__name__, "stack") not in MISTAKEN
    names = tuple(name for name in (*ALWAYS, *option.info) if name != "stack" or stacks)
    mine, expected = reported(ours, names), reported(theirs, names)
    assert {name: mine[name] for name in expected if mine[name] != expected[name]} == {}
    assert len(expected["name"]) > 3
    assert sums(ours) == sums(theirs)
    assert tables(ours, stacks=stacks) == tables(theirs, stacks=stacks)
    if stacks:
        assert stack_lines(ours, tmp_path) == stack_lines(theirs, tmp_path)


EVERYTHING = Option(
    "everything",
    dict.fromkeys(("record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules"), True),
    tuple(INFO_FIELDS),
    {"experimental_config": configured(verbose=True, capture_overload_names=True)},
)


WITH_STACKS = (models.labelled, models.gpt2, models.convnet, models.checkpointed, models.lstm, models.modes)


@pytest.mark.parametrize("program", one_in(3, WITH_STACKS), indirect=True, ids=lambda factory: factory.__name__)
def test_every_fact_can_be_compared(program, step, tmp_path):
    """Torch's profiler tells the same twice, with everything on, so that a difference to ours is never torch's own."""
    profiles = [torchs(EVERYTHING) for _ in range(3)]
    for prof in profiles:
        with prof:
            run(step)
    profiles = profiles[1:]  # see both()
    names = [name for name in INFO_FIELDS if (program.__name__, name) not in CHANGING or "shapes" in name]
    first, second = (reported(prof, names) for prof in profiles)
    assert {name: first[name] for name in first if first[name] != second[name]} == {}
    assert sums(profiles[0]) == sums(profiles[1])
    assert tables(profiles[0]) == tables(profiles[1])
    assert stack_lines(profiles[0], tmp_path) == stack_lines(profiles[1], tmp_path)
