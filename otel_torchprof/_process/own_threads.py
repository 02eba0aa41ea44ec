"""Threads of this package: the system knows them by one name, by which a reader of a black box leaves them out."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "otel-torchprof"
"""Begins the names of all of them; as long as the system allows."""
_SET_NAME = 15
"""Of ``prctl``: before 3.14 Python tells the system nothing of names."""


def own(run: Callable[[], None]) -> Callable[[], None]:
    """What such a thread runs, after it has got its name."""

    @functools.wraps(run)
    def named() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, NAME.encode(), 0, 0, 0)
        run()

    return named
