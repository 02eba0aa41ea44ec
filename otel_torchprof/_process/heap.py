"""Memory outside of the C library's heap, and release of free memory in that heap to the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALLEST_OWN = 64 << 10
"""Smallest size in bytes of a block with pages of its own; on average half of the last page is unused."""


def own_memory(size: int) -> npt.NDArray[np.uint8]:
    """Allocates ``size`` bytes, mostly in huge pages, that return to the system as soon as nothing refers to them.

    numpy's memory is ``malloc``'s, which takes blocks of up to 32 MiB from its heap once one of that size was freed.
    """
    if size < _SMALLEST_OWN:
        return np.empty(size, np.uint8)
    return _huge_pages(size) if size >= _HUGE_PAGE else np.frombuffer(_mapped(size), np.uint8)


def _mapped(size: int) -> mmap.mmap:
    try:
        # Private: by default a forked child would write to the parent's memory.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory left for {size} bytes of columns; read fewer events at a time") from error


_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
"""Bytes to which the arrays of an arena are aligned: a cache line."""


class Arena:
    """Arrays that are made for one purpose, such as the columns of a table, side by side in huge pages. Not thread-safe.

    The first touch of a page costs 2 us in a virtual machine, that of a huge page a fifth as much per byte (measured: 20 MiB in 10.2 and
    2.3 ms), and numpy asks for huge pages from arrays of 4 MiB on. An array keeps the block alive that it is in.

    Args:
        expected: bytes of all arrays together. Below the size of a huge page numpy allocates them as usual.
    """

    def __init__(self, expected: int) -> None:
        self._size = -(-expected // _HUGE_PAGE) * _HUGE_PAGE if expected >= _HUGE_PAGE else 0
        self._block: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialized array of ``count`` values."""
        size = count * np.dtype(dtype).itemsize
        if not _SMALLEST_OWN <= size <= self._size:
            return np.empty(count, dtype)
        if self._used + size > len(self._block):
            self._block, self._used = _used_before.take(self._size), 0
        array = self._block[self._used : self._used + size].view(dtype)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return array


def _huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Allocates ``size`` bytes aligned to huge pages, in as many as they fill, if the system has them.

    Up to an eighth of the last one may be unused.
    """
    filled = (size + _HUGE_PAGE // 8) // _HUGE_PAGE * _HUGE_PAGE
    mapped = _mapped(max(size, filled) + _HUGE_PAGE)
    block = np.frombuffer(mapped, np.uint8)
    first = -block.ctypes.data % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without it
            mapped.madvise(mmap.MADV_HUGEPAGE, first, filled)
    return block[first : first + size]


class _UsedBlocks:
    """Blocks of earlier arenas, for later ones once no array uses them: each drain needs as much memory as the drain before.

    The first touch of fresh memory is expensive in a virtual machine: the columns of a table of 43,000 spans took 3.3 ms, and take 0.7 ms
    in memory that was used before (profiled, on a busy machine). Thread-safe without a
    lock, which a forked child might inherit: a thread that examines a block has removed it from the list.
    """

    _MOST_BYTES = 48 << 20
    """Limit of the blocks in the list, in use or free."""
    _LARGEST = 16 << 20

    def __init__(self) -> None:
        self._blocks: deque[npt.NDArray[np.uint8]] = deque()

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Returns a block of at least ``size`` bytes that no array refers to."""
        for block in self._removed():
            # The array that counts as a reference is made before anybody else can take the block out of the list.
            array = block[:] if size <= len(block) <= 2 * size and _is_free(block) else None
            self._blocks.append(block)
            if array is not None:
                return array
        block = _huge_pages(size)
        array = block[:]
        if size <= self._LARGEST and self._make_room(size):
            self._blocks.append(block)
        return array

    def _make_room(self, size: int) -> bool:
        """Drops free blocks, whose sizes nobody asks for any more, for one of ``size`` bytes; returns whether there is room for it."""
        left = self._MOST_BYTES - size - sum(map(len, tuple(self._blocks)))
        for block in self._removed():
            if left < 0 and _is_free(block):
                left += len(block)
            else:
                self._blocks.append(block)
        return left >= 0

    def _removed(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Removes and yields the blocks in the list, each once, the oldest first."""
        for _ in range(len(self._blocks)):
            try:
                block = self._blocks.popleft()
            except IndexError:  # another thread has it
                return
            yield block

    def forget(self) -> None:
        """Empties the list: the blocks return to the system once no array refers to them."""
        self._blocks.clear()


_REFERENCES_OF_NO_ARRAY = 2
"""References to the memory of a block without arrays: that of the block, and that of the argument of ``sys.getrefcount``. In numpy,
all views of the same memory refer to its owner, not to each other."""


def _is_free(block: npt.NDArray[np.uint8]) -> bool:
    return sys.getrefcount(block.base) == _REFERENCES_OF_NO_ARRAY


_used_before = _UsedBlocks()

_WORTH_IT = 64 << 20
"""Least peak of the buffered bytes for which the heap is trimmed."""


class Heap:
    """Trims the heap once most of a backlog is freed, and the program is not recording. Not thread-safe.

    glibc keeps the freed memory of a backlog: 340 of 600 MiB after an outage (measured). Trimming these takes some 80 ms on the caller's
    thread, and locks one arena after another: with 1.5 GiB of holes in the heap, the program waits 100 ms for an allocation (measured), so
    it is not done during a recording. No effect if the C library has no ``malloc_trim``.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._most = 0

    def look(self, held: int, *, is_idle: bool = True) -> None:
        """Reports that ``held`` bytes are in use; trims the heap if it was much, is little, and the program is idle."""
        self._most = max(self._most, held)
        if not is_idle:
            return
        _used_before.forget()
        if self._most >= _WORTH_IT and held < self._most // 4:
            self._most = held
            if self._trim is not None:
                self._trim(0)
