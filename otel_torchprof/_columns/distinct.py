"""The different values of an array, for threads that may still run when the interpreter ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def distinct_values(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The different values in ascending order, of integers or booleans: as ``np.unique``, which threads of ours must not call.

    Since numpy 2.3 that lets go of Python's lock in C++ and takes it again in a destructor. Up to Python 3.13 a daemon thread that
    does so while the interpreter ends is made to end there, which no destructor may: the process aborts. With ``return_inverse``
    or the like numpy sorts, in C, as is done here.
    """
    ordered = np.sort(values, axis=None)
    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
