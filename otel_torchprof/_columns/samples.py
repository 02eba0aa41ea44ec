"""Samples of Python stacks: in which line a loop's thread was, some times a second."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .arrays import Flags, Integers


SAMPLES = "torch.samples"
"""Key of the attribute with the samples of a span."""
WAITS_FOR_LOCK = "<waits for GIL>"
"""Begin of the file of an innermost call that stands for a wait for the interpreter's lock: the rest is the line of the thread that has it."""
COMPREHENSIONS = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"))
"""Names of functions that are a part of the one that calls them."""
MOST_CALLS = 64
"""Calls of a stack that trace files have."""


def kept_calls(stack: tuple[Call, ...], most: int = MOST_CALLS) -> tuple[Call, ...]:
    """The innermost calls of a stack; of one with more than ``most``, a quarter are the outermost: the program's, around a compiler's."""
    outer = most // 4
    return stack if len(stack) <= most else (*stack[: most - outer], *stack[-outer:])


class Call(NamedTuple):
    """A call in a stack, at the line that it has come to."""

    file: str
    """``co_filename`` of its code."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as columns, a row each, ordered by time. Immutable."""

    time: Integers
    """Unix ns."""
    duration: Integers
    """The time that it stands for, ns: from the sample before it, at most some intervals."""
    thread: Integers
    """Index into ``Batch.threads``; of the events of a trace file, into their tracks."""
    stack: Integers
    """Index into :attr:`stacks`."""
    stacks: Sequence[tuple[Call, ...]]
    """The different stacks, each with the innermost call first. Those of a recorder grow meanwhile, and keep their indices."""

    def __len__(self) -> int:
        return len(self.time)

    def chosen(self, rows: Flags | Integers) -> Samples:
        """The samples of a mask, or of some rows in ascending order."""
        time, duration, thread, stack = (getattr(self, field.name)[rows] for field in fields(self)[:-1])
        return Samples(time, duration, thread, stack, self.stacks)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples | None:
        """The samples of several, by time; those of the same ``stacks`` share them. None of none."""
        if not parts:
            return None
        stacks = parts[0].stacks
        columns = [np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)[:-1]]
        if any(part.stacks is not stacks for part in parts):
            firsts = np.cumsum([0, *(len(part.stacks) for part in parts[:-1])])
            columns[-1] = columns[-1] + np.repeat(firsts, [len(part) for part in parts])
            stacks = [stack for part in parts for stack in part.stacks]
        order = np.argsort(columns[0], kind="stable")
        time, duration, thread, stack = (column[order] for column in columns)
        return cls(time, duration, thread, stack, stacks)
