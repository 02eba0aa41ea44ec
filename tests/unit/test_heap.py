"""Memory that is free is given back once a backlog is over."""

from __future__ import annotations

import pytest

from otel_torchprof._process.heap import Heap

MIB = 1 << 20


@pytest.fixture
def heap():
    """One that notes when it is trimmed."""
    found = Heap()
    found.trims = 0

    def trim(_pad):
        found.trims += 1

    found._trim = trim
    return found


@pytest.mark.parametrize(
    ("held", "trims"),
    [
        ([10, 0, 63, 0], 0),
        ([10, 200, 100, 51, 49, 10, 0], 1),
        ([200, 0, 200, 0, 10, 0], 2),
        ([200, 60], 0),
    ],
    ids=["little", "falls by degrees", "twice", "not yet"],
)
def test_when_it_is_trimmed(heap, held, trims):
    """Once, when most of much is gone; not again before there was much again."""
    heap.look(0)
    for size in held:
        heap.look(size * MIB)
    assert heap.trims == trims


def test_not_amid_the_programs_work(heap):
    """Trimming may hold up an allocation, so it waits until nothing is recorded."""
    heap.look(200 * MIB)
    heap.look(0, is_idle=False)
    assert heap.trims == 0
    heap.look(0)
    assert heap.trims == 1


def test_without_the_function():
    """A C library that has none is left alone, and not asked again."""
    heap = Heap()
    heap._trim = None
    heap.look(200 * MIB)
    heap.look(0)
    assert heap._most == 0
