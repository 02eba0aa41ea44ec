"""Functions that a test calls on threads of their own, and waits for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from forked import LONG

if TYPE_CHECKING:
    from collections.abc import Callable


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each returns, called on a new thread of its own, all at once."""
    returned: list[Any] = [None] * len(functions)

    def call(place: int) -> None:
        returned[place] = functions[place]()

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return returned
