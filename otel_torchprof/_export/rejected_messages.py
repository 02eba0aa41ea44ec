"""Messages that their receiver never accepts: whether one is itself at fault, and not the receiver."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backlog import Batch

_ATTEMPTS = 4
"""In a row; then another message shows whether it is the receiver that takes nothing."""
_ALONE = 5
"""Attempts, each after others were accepted: a receiver that refuses some at random does not refuse the same ones so often."""
_SECONDS = 300.0
"""From the first of its attempts, all of which failed. Meanwhile it keeps nobody waiting: all others go before it."""


class RejectedMessages:
    """The poison message policy: one that crashes its receiver, or takes it longer than we wait, must not hold up all that follow.

    In an outage no other message is accepted either: then the order stays, and nothing is given up. Not thread-safe: its queue locks.
    """

    def __init__(self) -> None:
        self._accepted = 0

    def accepted(self, batch: Batch) -> None:
        """The receiver has done with the first of its spans."""
        self._accepted += 1
        batch.attempts = batch.alone = 0

    def failed(self, batch: Batch, began: float) -> float:
        """Behind how many others the batch is to wait now: its first message was not accepted in an attempt that began then."""
        if not batch.attempts:
            batch.since = began
        elif self._accepted > batch.others_accepted:
            batch.alone += 1
        batch.attempts += 1
        batch.others_accepted = self._accepted
        if batch.alone:
            return math.inf
        return 1 if batch.attempts % _ATTEMPTS == 0 else 0

    def is_over(self, batch: Batch, now: float) -> bool:
        """Whether its first message is to be given up."""
        return batch.alone >= _ALONE and now - batch.since >= _SECONDS
