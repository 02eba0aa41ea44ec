"""Segments of a framework's training loop: reported to all running recordings, and to one profile."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import Segment, SegmentChange
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.wrapped_calls import WrappedCalls
from otel_torchprof._record.step_marks import loop_marks
from otel_torchprof.errors import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_torchprof._process.wrapped_calls import Wrapper
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's


_UNHEARD = (
    "a trainer marks its steps, and no recording with steps runs: call TorchInstrumentor().instrument(), use otel_torchprof.stream(), or "
    "give the adapter profile=otel_torchprof.profile()"
)


class Loop:
    """The segments of one loop, as its framework reports them. For the thread of the loop.

    Args:
        profile: a profile that gets the steps, and runs with the loop if it is not running. Default: None.

    Raises:
        TypeError: ``profile`` is not a profile of this package.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        if profile is not None:
            from otel_torchprof._profile.profile import profile as kind  # most of the package

            if not isinstance(profile, kind):
                raise TypeError(f"profile is {profile!r}; it must be an otel_torchprof.profile, or None")
        self._profile = profile
        self._has_started = self._is_marked = False
        self.is_silent = False
        """Whether another integration reports this loop."""
        self.current: Segment | None = None
        """The segment that began last; None outside of the loop."""

    def begin(self) -> None:
        """Begins the loop and starts the profile.

        A loop that was interrupted before ends, and its last segment is not a step.
        """
        if self._is_marked:
            self.change(None, replaces_step=True)
        self.current = None
        _calls.note(self)
        if self._profile is None and not loop_marks.has_listeners:
            warn_once(_UNHEARD)
        if self._profile is not None and not self._profile.is_running:
            self._has_started = True
            self._profile.start()

    def end(self) -> None:
        """Ends the loop and stops the profile that :meth:`begin` has started. A second call has no effect."""
        if self._is_marked:
            self._is_marked, self.current = False, None
            loop_marks.end()
        if self._profile is not None and self._has_started:
            self._has_started = False
            self._profile.stop()

    def change(
        self,
        segment: Segment | None,
        *,
        ends_step: bool = False,
        replaces_step: bool = False,
        is_evaluation: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a segment, which ends the one before; :class:`SegmentChange` describes the arguments."""
        self.current = segment
        if self.is_silent:
            return
        if not self._is_marked:
            self._is_marked = True
            _calls.note(self)
        loop_marks.change(
            SegmentChange(segment, ends_step, replaces_step, attributes, is_of_loop=True, is_evaluation=is_evaluation)
        )
        if ends_step and self._profile is not None:
            self._profile.step()


class _Calls(threads.local):
    """The trainer call that this thread is in."""

    loops: list[Loop] | None = None
    """Loops that have begun in the call; None outside of one."""

    def note(self, loop: Loop) -> None:
        if self.loops is not None and loop not in self.loops:
            self.loops.append(loop)


_calls = _Calls()


@contextmanager
def _ending_loops() -> Iterator[bool]:
    """Ends the loops that begin in the block when it is left.

    Yields whether it is the top-level block of its thread.
    """
    outer, _calls.loops = _calls.loops, []
    try:
        yield outer is None
    finally:
        for loop in reversed(_calls.loops):
            loop.end()
        _calls.loops = outer


def number(value: object) -> float | None:
    """Converts a Python number to float, without synchronizing with a device; None for other values."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---- calls of trainers ----


class _TrainerCall(NamedTuple):
    """A method of a framework's trainer."""

    module: str
    """Module with the class."""
    path: str
    segment: Segment | None = None
    """Segment of the whole call, if it is called directly and the framework does not report its begin."""


_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_CALLS = (
    _TrainerCall("transformers.trainer", "Trainer.train"),
    _TrainerCall("transformers.trainer", "Trainer.evaluate", Segment.EVALUATION),
    *(_TrainerCall(module, f"Trainer.{name}") for module in _LIGHTNING for name in ("fit", "validate", "test")),
)


def _ending(call: _TrainerCall, function: Callable[..., Any]) -> Wrapper:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        with _ending_loops() as is_top_level:
            if call.segment is not None and is_top_level:
                Loop().change(call.segment, is_evaluation=True)
            return function(*arguments, **keywords)

    return wrapper, lambda: None  # a call that is still wrapped only ends its loops


trainer_calls = WrappedCalls(_CALLS, _ending)
"""Wrapped calls of the process: loops that an adapter begins in a call of a trainer end with it, also after an exception."""
process_changes.at_fork(process_changes.Order.STATE, in_child=trainer_calls.renew_lock)
