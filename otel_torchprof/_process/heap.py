"""Memory beside the C library's heap, and what is free in that heap returned to the system."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_SMALLEST_OWN = 64 << 10
"""Bytes from which on a block is worth pages of its own, of which the last one is used by half."""


def own_memory(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes that the system has back as soon as nothing refers to them; few of them are of the heap.

    numpy's memory is ``malloc``'s, which takes blocks of up to 32 MiB from its heap once one of that size was freed.
    """
    if size < _SMALLEST_OWN:
        return np.empty(size, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default a forked child would write into the parent's
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


_WORTH_IT = 64 << 20
"""Bytes that have to have been held."""


class Heap:
    """Trims the heap once most of what was held is gone, and the program records nothing. For one thread at a time.

    glibc keeps what a backlog leaves free: of 600 MiB after an outage 340 (measured). Trimming takes some 80 ms for these, on the
    caller's thread, and locks one arena after the other: a program whose own heap has 1.5 GiB of holes waits 100 ms for an allocation
    then (measured), hence not amid its work. Without effect where the C library has no ``malloc_trim``.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._most = 0

    def look(self, held: int, *, is_idle: bool = True) -> None:
        """So many bytes are held now; trims where it was much, and is little, and the program is idle."""
        self._most = max(self._most, held)
        if is_idle and self._most >= _WORTH_IT and held < self._most // 4:
            self._most = held
            if self._trim is not None:
                self._trim(0)
