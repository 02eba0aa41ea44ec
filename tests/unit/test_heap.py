"""Memory beside the heap is the system's again at once, and what is free in the heap once a backlog is over."""

from __future__ import annotations

import gc
import mmap
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from forked import in_child
from frame_trees import no_collections

import otel_torchprof as otp
from otel_torchprof._native.recorder import Session
from otel_torchprof._process import heap as heap_module
from otel_torchprof._process.heap import Arena, Heap, own_memory

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


def mapped_bytes():
    """What this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_own_memory_is_given_back():
    """Once the last view of it is gone, a large block is not mapped any more."""
    gc.collect()
    before = mapped_bytes()
    view = own_memory(100 * MIB)[5:10].view()
    assert mapped_bytes() - before >= 100 * MIB
    del view
    assert mapped_bytes() - before < MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("events", [12_000, 25_000, 60_000], ids=["pages", "a huge page and some", "several"])
def test_the_memory_of_a_drained_batch_is_that_of_the_next(events):
    """Whatever its size; the system has it again with a small batch, as an idle program's, and with the last one of the recording."""
    session = Session(64 * MIB)

    def drained(count=events):
        for _ in range(count):
            with otp.record_function("label"):
                pass
        return session.drain()

    with no_collections():
        session.start()
        gc.collect()
        drained()  # what the first one makes besides stays
        drained(1)
        before = mapped_bytes()
        batch = drained()
        mapped, address = mapped_bytes() - before, batch["id"].ctypes.data
        assert mapped >= sum(batch[name].nbytes for name in ("id", "start", "end", "parent"))
        assert len(batch) == events
        del batch
        batch = drained()
        assert (batch["id"].ctypes.data, mapped_bytes() - before) == (address, mapped)
        del batch
        drained(1)
        assert mapped_bytes() - before < mapped // 8
        drained()
        session.stop()
        session.drain()
        assert mapped_bytes() - before < mapped // 8


def test_a_forked_child_has_its_own():
    """What a forked child writes there is not written in its parent."""
    block = own_memory(MIB)
    block[0] = 1

    def write():
        block[0] = 2
        return int(block[0])

    assert (in_child(write), int(block[0])) == ("2", 1)


@pytest.mark.parametrize("expected", [0, MIB, 3 * MIB, 100 * MIB], ids=["nothing", "numpy's own", "small", "large"])
def test_arrays_of_an_arena_share_nothing(expected):
    """Each array has the values that were written to it, however many there are and whatever was expected; they outlive the arena."""
    arena = Arena(expected)
    sizes = [
        (1, np.uint8),
        (100_001, np.uint8),
        (3, np.int64),
        (200_000, np.int64),
        (400_000, np.uint32),
        (150_000, np.float64),
    ]
    made = [arena.empty(count, dtype) for count, dtype in sizes]
    for number, array in enumerate(made):
        array[:] = number + 1
    del arena
    for number, ((count, dtype), array) in enumerate(zip(sizes, made, strict=True)):
        assert (array.shape, array.dtype) == ((count,), np.dtype(dtype))
        assert (array == number + 1).all()
        assert array.flags.writeable
        assert array.flags.aligned


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_arena_is_the_systems_again():
    """Its blocks go with the last of its arrays, and not before."""
    gc.collect()
    before = mapped_bytes()
    arena = Arena(64 * MIB)
    first, last = arena.empty(4 * MIB, np.uint64), arena.empty(4 * MIB, np.uint64)
    assert first.nbytes + last.nbytes == 64 * MIB
    assert 64 * MIB <= mapped_bytes() - before < 70 * MIB
    del arena, first
    assert mapped_bytes() - before >= 64 * MIB
    del last
    assert mapped_bytes() - before < MIB


def test_no_block_is_used_twice_at_once():
    """Whoever looks for a block while another is handed one out finds that one in use."""
    blocks = heap_module._UsedBlocks()
    taken = []

    class Blocks(deque):
        """A list of blocks, whose every change lets somebody else ask for a block."""

        def append(self, block):
            super().append(block)
            if len(taken) < 8:
                taken.append(None)
                taken[-1] = blocks.take(2 * MIB)

    blocks._blocks = Blocks()
    arrays = [blocks.take(2 * MIB) for _ in range(4)]
    arrays += [array for array in taken if array is not None]
    assert len({array.ctypes.data for array in arrays}) == len(arrays) > 4


def test_small_blocks_are_used_again(heap):
    """An arena takes memory that no array of an earlier one uses any more, and no other; once the program is idle it is returned."""
    first = Arena(3 * MIB).empty(MIB, np.uint8)
    address = first.ctypes.data
    second = Arena(3 * MIB).empty(MIB, np.uint8)
    assert not np.shares_memory(first, second)
    view = first[1:].view()
    del first
    assert Arena(3 * MIB).empty(MIB, np.uint8).ctypes.data != address
    del view
    assert address in {Arena(3 * MIB).empty(MIB, np.uint8).ctypes.data for _ in range(8)}
    del second
    gc.collect()
    before = mapped_bytes()
    heap.look(0, is_idle=False)
    assert mapped_bytes() == before
    heap.look(0)
    assert mapped_bytes() <= before - 4 * MIB


def test_blocks_of_sizes_that_nobody_asks_for_make_room():
    """Tables grow after the first drains: their blocks are used again however many smaller ones were before."""
    small = [Arena(size * MIB).empty(size * MIB, np.uint8) for size in (2, 4, 6, 8, 10, 12)]
    del small
    gc.collect()
    Arena(15 * MIB).empty(15 * MIB, np.uint8)[0] = 7
    assert Arena(15 * MIB).empty(15 * MIB, np.uint8)[0] == 7  # fresh memory is 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_where_memory_is_short():
    """What is not to be had is a MemoryError, as numpy's is."""

    def short():
        import resource

        limit = mapped_bytes() + 8 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(MemoryError, match="no memory left"):
            own_memory(64 * MIB)
        with pytest.raises(MemoryError, match="no memory left"):
            Arena(64 * MIB).empty(32 * MIB, np.uint8)
        return True

    assert in_child(short) == "True"
