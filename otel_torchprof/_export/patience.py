"""Whether a message that is not taken is itself at fault, and not its receiver."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backlog import Batch

_ATTEMPTS = 4
"""In a row; then another message shows whether it is the receiver that takes nothing."""
_ALONE = 5
"""Attempts, each after others were taken: a receiver that refuses some at random does not refuse the same ones so often."""
_SECONDS = 300.0
"""From the first of its attempts, all of which failed. Meanwhile it keeps nobody waiting: all others go before it."""


class Patience:
    """A message that crashes its receiver, or that takes it longer than we wait, must not hold up all that come after it.

    In an outage no other message is taken either: then the order stays, and nothing is given up. Not thread-safe: its queue locks.
    """

    def __init__(self) -> None:
        self._taken = 0

    def taken(self, batch: Batch) -> None:
        """The receiver has done with the first of its spans."""
        self._taken += 1
        batch.attempts = batch.alone = 0

    def not_taken(self, batch: Batch, began: float) -> float:
        """Behind how many others the batch is to wait now: its first message was not taken, in an attempt that began then."""
        if not batch.attempts:
            batch.since = began
        elif self._taken > batch.others_taken:
            batch.alone += 1
        batch.attempts += 1
        batch.others_taken = self._taken
        if batch.alone:
            return math.inf
        return 1 if batch.attempts % _ATTEMPTS == 0 else 0

    def is_over(self, batch: Batch, now: float) -> bool:
        """Whether its first message is to be given up."""
        return batch.alone >= _ALONE and now - batch.since >= _SECONDS
