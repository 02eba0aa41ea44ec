"""Tokens, from which the cycle of a training loop is learned, and the rule that ends a training step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.phases import Part
from otel_torchprof._native.python_sources import untracked

if TYPE_CHECKING:
    from otel_torchprof._columns.phases import Segment

# ---- Input and output of learning: tokens and boundaries ----

OPTIMIZERS = frozenset({Part.STEP, Part.SCALER_STEP, Part.SCALER_UPDATE})
"""Parts that can end a step of training."""

RELEVANT = OPTIMIZERS | {
    Part.NEXT,
    Part.FORWARD,
    Part.INFERENCE,
    Part.EVALUATION,
    Part.BACKWARD,
    Part.ZEROING,
    Part.SAVE,
}
"""Parts that are evidence of the cycle; the others may be anywhere in it."""


@untracked
@dataclass
class Token:
    """A top-level phase of a thread."""

    id: int
    """Id of the event."""
    part: Part
    key: int
    """Address of its dataset, root module, optimizer or scaler; 0 if unknown."""
    start: int
    """Unix ns."""
    end: int
    """Unix ns; :data:`NEVER` while it is open."""
    thread: int
    """``threading.get_ident()``."""
    context: int
    """Number of the OpenTelemetry span, 0 for none."""
    holds_backward: bool = False
    """Whether a backward pass ran in it, as in an optimizer step with a closure."""
    is_cut: bool = False
    """Whether an exception ended it."""


@untracked
@dataclass
class Boundary:
    """The end of a segment and the start of the next."""

    time: int
    """Unix ns."""
    thread: int
    token: int
    """Id of the phase with which the segment begins; 0 if it begins with none."""
    segment: Segment | None
    """Kind of the following segment; None if nothing follows."""


# ---- The rule that ends a training step, and whether a loop still follows it ----

MANY_ROUNDS = 256
"""Backward passes without an optimizer step after which an existing optimizer counts as unused."""
_FEW_ROUNDS = 3
_MISFITS = 3
_AGE = (1 << 32) - 1
"""Mask of the last 32 periods, in which misfits count: a rare event every thousand steps is no new loop."""

Anchor = tuple[Part, int]
"""A part, and the key of its object."""


class Rule(NamedTuple):
    """A rule that ends a step."""

    part: Part
    """With STEP, SCALER_STEP and SCALER_UPDATE the step ends with it; with NEXT and FORWARD the next step begins with it, after a backward pass."""
    key: int
    """Key of the object; 0 for any module, or for an optimizer that is not known yet."""
    optimizers: frozenset[Anchor]
    """Optimizers that step in a period."""
    text: str
    """The rule and its reason, for users."""
    is_given: bool = False
    """Whether the program has set the rule; then it is never replaced."""

    @property
    def is_provisional(self) -> bool:
        """Whether the first step of an optimizer replaces the rule, as none has stepped so far."""
        return not self.optimizers and not self.is_given

    @property
    def rounds(self) -> int:
        """Backward passes without an optimizer after which a rule without one may replace this rule."""
        return MANY_ROUNDS if self.part in OPTIMIZERS else _FEW_ROUNDS


class RuleFit:
    """Checks whether the loop still follows its rule.

    Args:
        rule: the current rule.
        work: backward passes and optimizer steps in the longest period from which the rule was learned.
    """

    def __init__(self, rule: Rule, work: int = 0) -> None:
        self._rule = rule
        self._learned_work = work
        self._misfits = 0
        self._is_odd = False
        self._work = 0
        self._usual: deque[int] = deque(maxlen=8)
        self._most_work = math.inf
        """Work of a period beyond which it is overdue."""

    @property
    def is_doubtful(self) -> bool:
        """Whether another rule may have to be learned."""
        return self._is_odd or self._misfits > 0 or self._is_overdue

    @property
    def is_broken(self) -> bool:
        """Whether three recent periods did not fit."""
        return self._is_overdue or self._misfits.bit_count() + self._is_odd >= _MISFITS

    @property
    def _is_overdue(self) -> bool:
        return self._work > self._most_work

    def take(self, token: Token, ended: bool) -> None:
        """Takes a token after the walk; ``ended``: whether a period ended with it."""
        is_optimizer = token.part in OPTIMIZERS
        if ended and not is_optimizer:
            self._end()
        if is_optimizer or token.part is Part.BACKWARD:
            self._work += 1
        if is_optimizer and (token.part, token.key) not in self._rule.optimizers:
            self._is_odd = True
        if ended and is_optimizer:
            self._end()

    def repeat(self) -> None:
        """Takes a whole period that is like the one before."""
        self._work = self._usual[-1]
        self._end()

    def _end(self) -> None:
        self._usual.append(self._work)
        self._most_work = _MISFITS * max(self._learned_work, *self._usual)
        ages = self._rule.part in OPTIMIZERS
        if ages or self._is_odd:  # without an optimizer, misfits do not age: however rarely one steps, the loop has one
            self._misfits = (self._misfits << 1 | self._is_odd) & _AGE
        self._work, self._is_odd = 0, False
