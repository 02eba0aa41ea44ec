"""Passes over columns block by block, and the different values of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BLOCK = 1 << 16
"""Rows per pass: the temporaries of a block stay in the L2 cache and in memory that the process has touched already. The first touch of
a page costs 1 to 3 us in a virtual machine, and the temporaries of a pass over everything are fresh pages each time."""


def blocks(rows: int, size: int = BLOCK) -> Iterator[slice]:
    """Slices that split ``rows`` rows into blocks."""
    return (slice(begin, min(begin + size, rows)) for begin in range(0, rows, size))


def find(rows: int, test: Callable[[slice], npt.NDArray[np.bool_]]) -> npt.NDArray[np.intp]:
    """The rows for which the test is true; it is called for one block at a time."""
    row_blocks = [np.flatnonzero(test(block)) + block.start for block in blocks(rows)]
    return np.concatenate(row_blocks) if row_blocks else np.empty(0, dtype=np.intp)


_MANY = 64
"""Values for which a pass each over 10,000 others takes as long as a search."""


def is_any_of(values: npt.NDArray[Any], few: Sequence[Any] | npt.NDArray[Any]) -> Flags:
    """Returns a mask of the integers that are one of a few: as ``np.isin``, whose overhead alone is 15 us."""
    if not len(few):
        return np.zeros(len(values), dtype=np.bool_)
    is_any: Flags
    if len(few) > _MANY:  # such as the contexts of thousands of requests
        ordered = np.sort(np.array(few, dtype=values.dtype))
        is_any = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
        return is_any
    is_any = values == few[0]
    for one in few[1:]:
        is_any |= values == one
    return is_any


# ---- Distinct values ----


def distinct_values(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Distinct integers or booleans in ascending order: as ``np.unique``, which this package's threads must not call.

    Since numpy 2.3 that lets go of Python's lock in C++ and takes it again in a destructor. Up to Python 3.13 a daemon thread that
    does so while the interpreter ends is made to end there, which no destructor may: the process aborts. With ``return_inverse``
    or the like numpy sorts, in C, as is done here.
    """
    if len(values) and (values == values.flat[0]).all():  # as most columns of contexts and threads
        return values.reshape(-1)[:1].copy()
    ordered = np.sort(values, axis=None)
    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def used_numbers(values: npt.NDArray[Any], bound: int) -> npt.NDArray[np.intp]:
    """Distinct values in ascending order, of integers from 0 to below a bound that is not much above their count."""
    is_used = np.zeros(bound, dtype=np.bool_)
    is_used[values] = True
    return np.flatnonzero(is_used)
