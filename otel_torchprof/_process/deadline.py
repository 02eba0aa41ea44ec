"""A moment until which several waits together may last."""

from __future__ import annotations

import contextvars
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import threads

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

THREAD_NAME = "otel-torchprof-call"


class Deadline(NamedTuple):
    """A moment on a monotonic clock. Immutable, hence thread-safe."""

    at: float
    """Time of the deadline, in seconds of ``clock``; ``math.inf`` for none."""
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """The moment that is ``seconds`` away (``math.inf`` for no deadline)."""
        return cls(clock() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, never below 0 and never more than ``wait`` of the threading module takes."""
        return min(max(0.0, self.at - self.clock()), threads.TIMEOUT_MAX)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0

    def bound(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a function without a deadline of its own, on a daemon thread with the caller's context; raises its exceptions.

        Raises TimeoutError at the deadline; the call then continues in the background. If no thread can be started (at interpreter
        shutdown), calls the function directly.
        """
        results: list[_Result] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                results.append(function(*arguments))
            except Exception as error:  # noqa: BLE001 (raised by the caller's thread)
                errors.append(error)

        thread = threads.Thread(target=contextvars.copy_context().run, args=(call,), name=THREAD_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            call()
        else:
            thread.join(self.remaining())
        for error in errors:
            raise error
        for result in results:
            return result
        raise TimeoutError("timed out")
