"""Schedules: which steps of a loop are recorded, and the actions between two steps."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    Do = Callable[["Move", bool], None]


class ProfilerAction(enum.Enum):
    """Action of a profile in one step: the members and values of ``torch.profiler.ProfilerAction``, without torch.

    Equal to torch's member of the same value in either order, so schedules of one package work with profilers of the
    other.

    Examples:
        >>> otp.ProfilerAction.RECORD == torch.profiler.ProfilerAction.RECORD
        True
    """

    NONE = 0
    """Records nothing."""
    WARMUP = 1
    """Prepares the recording; records nothing."""
    RECORD = 2
    """Records the step."""
    RECORD_AND_SAVE = 3
    """Records the step and calls ``on_trace_ready`` at its end."""
    DEVICE_STOPPED = 4
    """Set by torch for a device that stopped; a schedule must not return it."""

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "ProfilerAction" and self.value == getattr(other, "value", None)

    __hash__ = enum.Enum.__hash__


def schedule(
    *, wait: int, warmup: int, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Callable[[int], ProfilerAction]:
    """Returns a schedule for :class:`profile`: cycles of ``wait`` idle, ``warmup`` and ``active`` recorded steps.

    Same arguments as ``torch.profiler.schedule``.

    Args:
        wait: idle steps at the start of each cycle.
        warmup: steps after these in which the profile prepares itself.
        active: recorded steps after these; ``on_trace_ready`` is called at the end of the last one.
        repeat: number of cycles. Default: 0, no limit.
        skip_first: steps before the first cycle. Default: 0.
        skip_first_wait: if not 0, the first cycle has no ``wait``. Default: 0.

    Returns:
        A function from the number of a step, from 0 on, to its :class:`ProfilerAction`. Thread-safe.

    Raises:
        AssertionError: a number is negative, or ``active`` is 0; torch's error.

    Examples:
        >>> action = otp.schedule(wait=1, warmup=1, active=2, repeat=1)
        >>> [action(step).name for step in range(5)]
        ['NONE', 'WARMUP', 'RECORD', 'RECORD_AND_SAVE', 'NONE']
    """
    if wait < 0 or warmup < 0 or active <= 0 or repeat < 0 or skip_first < 0:
        raise AssertionError(
            f"Invalid profiler schedule arguments. Got wait={wait} (need >= 0), warmup={warmup} (need >= 0), "
            f"active={active} (need > 0), repeat={repeat} (need >= 0), skip_first={skip_first} (need >= 0)."
        )
    if warmup == 0:
        warn_caller("Profiler won't be using warmup, this can skew profiler results")
    return plan(
        wait=wait,
        warmup=warmup,
        active=active,
        repeat=repeat,
        skip_first=skip_first,
        skip_first_wait=skip_first_wait,
    )


def plan(
    *, wait: int, warmup: int, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Callable[[int], ProfilerAction]:
    """The function of :func:`schedule`, for checked numbers and without its warning about a missing warm-up."""
    length = wait + warmup + active

    def action(step: int) -> ProfilerAction:
        if step < 0:
            raise AssertionError(f"Step must be non-negative. Got {step}.")
        if step < skip_first:
            return ProfilerAction.NONE
        step += (wait if skip_first_wait else 0) - skip_first
        cycle, place = divmod(step, length)
        if (repeat and cycle >= repeat) or place < wait:
            return ProfilerAction.NONE
        if place < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if place < length - 1 else ProfilerAction.RECORD_AND_SAVE

    return action


def always(_step: int) -> ProfilerAction:
    """Schedule of a profile without one: records every step."""
    return ProfilerAction.RECORD


class Move(enum.Enum):
    """Action of a profile between two steps."""

    PREPARE = enum.auto()
    START = enum.auto()
    STOP = enum.auto()
    READY = enum.auto()


_RECORDED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def moves(before: ProfilerAction, after: ProfilerAction | None) -> list[Move]:
    """Returns the moves between a step and the next one; ``after`` is None at the end of the profile.

    Warns of orders that no cycle has: a warm-up or a recording that is cut short.
    """
    if before is after and before is not ProfilerAction.RECORD_AND_SAVE:
        return []
    broken_off = before in {ProfilerAction.WARMUP, ProfilerAction.RECORD} and (
        after == ProfilerAction.NONE or (before, after) == (ProfilerAction.RECORD, ProfilerAction.WARMUP)
    )
    if broken_off and after is not None:
        warn_caller(f"Incorrect schedule: {before.name} followed by {after.name}")
    if before == ProfilerAction.RECORD and after == ProfilerAction.RECORD_AND_SAVE:
        return []
    return _leaving(before, after) + _entering(before, after)


def _leaving(before: ProfilerAction, after: ProfilerAction | None) -> list[Move]:
    if before == ProfilerAction.WARMUP and after in {None, ProfilerAction.NONE}:
        return [Move.START, Move.STOP]
    if before == ProfilerAction.RECORD and after is not None:
        return [Move.STOP]
    return [Move.STOP, Move.READY] if before in _RECORDED else []


def _entering(before: ProfilerAction, after: ProfilerAction | None) -> list[Move]:
    # After a warm-up, or after a recording that was cut short, the recording is prepared already.
    entering = []
    if before in {ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE} and after not in {None, ProfilerAction.NONE}:
        entering.append(Move.PREPARE)
    if after in _RECORDED:
        entering.append(Move.START)
    return entering


class Cycles:
    """Position of a profile in its schedule.

    Args:
        schedule: function from the number of a step to a ProfilerAction, of this package or of torch.

    Each call passes the function that performs the moves, and no reference to it is kept: a profile in a reference
    cycle would keep its recording until a garbage collection. The function gets the move and whether a step caused it.

    Raises:
        TypeError, ValueError: the schedule returns another type, or DEVICE_STOPPED.
    """

    def __init__(self, schedule: Callable[[int], Any]) -> None:
        self.schedule = schedule
        self.step_num = 0
        self.current = self._asked(0)

    def begin(self, do: Do) -> None:
        """Starts the profile."""
        for move in moves(ProfilerAction.NONE, self.current):
            do(move, False)

    def advance(self, do: Do) -> None:
        """Begins the next step. If the schedule raises, the position is unchanged."""
        following = self._asked(self.step_num + 1)
        before, self.current = self.current, following
        self.step_num += 1
        for move in moves(before, following):
            do(move, True)

    def end(self, do: Do) -> None:
        """Ends the profile; a later :meth:`begin` continues with the step in which it ended."""
        for move in moves(self.current, None):
            do(move, False)

    def _asked(self, step: int) -> ProfilerAction:
        answer = self.schedule(step)
        if answer is ProfilerAction.RECORD:
            return answer
        if type(answer).__name__ != "ProfilerAction":
            raise TypeError(f"the schedule returned {answer!r} for step {step}; it must return a ProfilerAction")
        action = ProfilerAction(answer.value)
        if action == ProfilerAction.DEVICE_STOPPED:
            raise ValueError(
                "ProfilerAction.DEVICE_STOPPED is set internally by the profiler and must not be returned by a "
                "user-provided schedule"
            )
        return action
