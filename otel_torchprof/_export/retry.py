"""One message, sent until it is taken, refused for good, or out of time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from .response import Outcome, Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.deadline import Deadline


class Backoff(NamedTuple):
    """Waits between attempts, each twice as long as the one before, up to ``longest``, give or take ``jitter``."""

    first: float = 0.5
    """Seconds, as all of these."""
    longest: float = 5.0
    jitter: float = 0.2
    """As a share of the wait: those that a receiver refused together do not come back together."""
    shortest: float = 0.1
    """Even where the receiver asks for no wait at all, it is not hammered."""

    def wait(self, retries: int, asked: float | None) -> float:
        """Seconds to wait after ``retries`` retries; what the receiver ``asked`` for counts before our own."""
        if asked is not None:
            return max(asked, self.shortest)
        # The exponent is bounded: 2.0 ** 1024 is an OverflowError.
        whole = min(self.longest, self.first * 2.0 ** min(retries, 32))
        return whole * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311 (nothing secret)


def deliver(
    attempt: Callable[[float], Response],
    *,
    deadline: Deadline,
    wait: Callable[[float], bool],
    backoff: Backoff,
    retrying: Callable[[Response, float], None],
) -> Response:
    """Attempts until the response is final; never answers RETRY.

    Args:
        attempt: sends once, within so many seconds.
        deadline: for everything together. A wait that would pass it is not begun.
        wait: waits so many seconds; True when it was woken because no more is to be sent.
        backoff: how long to wait.
        retrying: called with each wait before it begins.
    """
    retries = 0
    while True:
        response = attempt(deadline.remaining())
        if response.outcome is not Outcome.RETRY:
            return response
        seconds = backoff.wait(retries, response.wait)
        if seconds >= deadline.remaining():
            tried = f"after {retries + 1} attempts, with no time left to wait {seconds:.1f} s for another"
            return _given_up(response, tried)
        retrying(response, seconds)
        if wait(seconds):
            return _given_up(response, "shut down while waiting to try again")
        retries += 1


def _given_up(response: Response, why: str) -> Response:
    return Response(Outcome.REFUSED, f"{response.reason} ({why})", may_pass=True, advice=response.advice)
