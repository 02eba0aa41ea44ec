"""Whether a receiver takes anything, since when it does not, and when to try again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.quiet import Unsaid

_PATIENT = Backoff(longest=30.0)
"""While nobody waits. The longest one is how late it may be noticed that a receiver is back."""
_HURRIED = Backoff(longest=2.0)
"""While somebody waits for a flush or the shutdown."""
_WORTH_TELLING = 5.0
"""Seconds; shorter outages are nobody's trouble."""


class Outage:
    """The time from the first attempt that failed to the next one that did not. Not thread-safe: its queue locks."""

    def __init__(self, name: str, log: Unsaid, clock: Callable[[], float]) -> None:
        self.reason = ""
        """Why the last attempt that failed did."""
        self._name = name
        self._log = log
        self._clock = clock
        self._since: float | None = None
        self._failures = 0
        self._dropped = 0
        self._reported = False

    @property
    def seconds(self) -> float:
        """How long it has lasted; 0 where there is none."""
        return 0.0 if self._since is None else max(self._clock() - self._since, 1e-9)

    def failed(self, began: float, reason: str, waiting: int) -> None:
        """An attempt that began then was not taken; so many spans wait."""
        self._since = began if self._since is None else self._since
        self._failures += 1
        self.reason = reason
        if not self._reported and self.seconds >= _WORTH_TELLING:
            self._reported = True
            text = "%s: nothing was delivered for %.0f s, %d spans wait and it is tried again: %s"
            self._log.warning(text, self._name, self.seconds, waiting, reason)

    def dropped(self, spans: int) -> None:
        """So many that waited had to go."""
        self._dropped += spans

    def over(self) -> None:
        """The receiver has answered; without effect where there was no outage."""
        if self._reported:
            text = "%s: delivers again after %.0f s; %d spans were dropped meanwhile"
            self._log.warning(text, self._name, self.seconds, self._dropped)
        self._since = None
        self._failures = self._dropped = 0
        self._reported = False

    def pause(self, asked: float | None, *, hurried: bool) -> float:
        """Seconds until the next attempt; what the receiver ``asked`` for counts before our own."""
        return (_HURRIED if hurried else _PATIENT).wait(max(self._failures - 1, 0), asked)
