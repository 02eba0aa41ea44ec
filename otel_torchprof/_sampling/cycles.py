"""Schedules: which steps of a loop are recorded, and what has to be done between two of them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.caller_warnings import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    Do = Callable[["Move", bool], None]


class ProfilerAction(enum.Enum):
    """What is done in a step: the values of ``torch.profiler.ProfilerAction``, without torch.

    Equal to torch's of the same value, whichever stands first, so that schedules of one work with profilers of the other.
    """

    NONE = 0
    """Nothing is recorded."""
    WARMUP = 1
    """Everything is made ready; nothing is recorded."""
    RECORD = 2
    """Everything is recorded."""
    RECORD_AND_SAVE = 3
    """Everything is recorded, and at the end of the step ``on_trace_ready`` is called."""
    DEVICE_STOPPED = 4
    """Torch's own, for a device that gave up; no schedule may return it."""

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "ProfilerAction" and self.value == getattr(other, "value", None)

    __hash__ = enum.Enum.__hash__


def schedule(
    *, wait: int, warmup: int, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Callable[[int], ProfilerAction]:
    """A schedule for :class:`profile`: cycles of ``wait`` idle steps, ``warmup`` steps, and ``active`` recorded ones.

    Args:
        wait: steps of each cycle in which nothing happens.
        warmup: steps after these in which the profile makes itself ready.
        active: steps after these that are recorded; at the end of the last one ``on_trace_ready`` is called.
        repeat: number of cycles; 0 for as many as there are steps.
        skip_first: steps before the first cycle.
        skip_first_wait: not 0: the first cycle has no ``wait``.

    Raises:
        AssertionError: a negative number, or nothing active; as torch's.
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
    """As :func:`schedule`, of numbers that are right, and without a word about warming up, of which a recorder needs none."""
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
    """The schedule of a profile that was given none: every step is recorded."""
    return ProfilerAction.RECORD


class Move(enum.Enum):
    """What a profile does between two steps."""

    PREPARE = enum.auto()
    START = enum.auto()
    STOP = enum.auto()
    READY = enum.auto()


_RECORDED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def moves(before: ProfilerAction, after: ProfilerAction | None) -> list[Move]:
    """What lies between a step and the next one; ``after`` None for the end of the profile.

    Warns of an order that no cycle has: a warm-up or a recording that breaks off.
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
    # What was prepared in a warm-up, or is left over from a recording that broke off, is not prepared again.
    found = []
    if before in {ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE} and after not in {None, ProfilerAction.NONE}:
        found.append(Move.PREPARE)
    if after in _RECORDED:
        found.append(Move.START)
    return found


class Cycles:
    """Where a profile is in its schedule.

    Args:
        schedule: gets the number of a step and returns a ProfilerAction, ours or torch's.

    What does the moves is passed by each call and not kept: a profile that kept one that does its own would be freed by
    a collection only, with all that it has recorded. It gets a move, and whether a step brought it.

    Raises:
        TypeError, ValueError: the schedule answers with something else, or with DEVICE_STOPPED.
    """

    def __init__(self, schedule: Callable[[int], Any]) -> None:
        self.schedule = schedule
        self.step_num = 0
        self.current = self._asked(0)

    def begin(self, do: Do) -> None:
        """The profile starts."""
        for move in moves(ProfilerAction.NONE, self.current):
            do(move, False)

    def advance(self, do: Do) -> None:
        """The next step begins. A schedule that fails leaves everything as it was."""
        following = self._asked(self.step_num + 1)
        before, self.current = self.current, following
        self.step_num += 1
        for move in moves(before, following):
            do(move, True)

    def end(self, do: Do) -> None:
        """The profile ends; a later begin continues with the step that it ended in."""
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
