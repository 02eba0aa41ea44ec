"""Passes over columns block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 1 << 16
"""Rows per pass: the temporaries of a block stay in the L2 cache and in memory that the process has touched already. The first touch of
a page costs 1 to 3 us in a virtual machine, and the temporaries of a pass over everything are fresh pages each time."""


def blocks(rows: int) -> Iterator[slice]:
    """So many rows, block by block."""
    return (slice(begin, min(begin + BLOCK, rows)) for begin in range(0, rows, BLOCK))


def find(rows: int, test: Callable[[slice], npt.NDArray[np.bool_]]) -> npt.NDArray[np.intp]:
    """The rows for which the test holds; it is asked for a block at a time."""
    found = [np.flatnonzero(test(block)) + block.start for block in blocks(rows)]
    return np.concatenate(found) if found else np.empty(0, dtype=np.intp)


def take(values: npt.NDArray[Any], index: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Writes the values at an index in range."""
    for block in blocks(len(index)):
        np.take(values, index[block], out=out[block], mode="clip")  # by default it writes to a copy of ``out`` first
