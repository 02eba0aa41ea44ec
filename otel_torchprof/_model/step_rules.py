"""Tokens, from which the cycle of a training loop is learned, and the rule that says what ends a training step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.phases import Part
from otel_torchprof._native.python_sources import untracked

if TYPE_CHECKING:
    from otel_torchprof._columns.phases import Segment

# ---- What the cycle of a training loop is learned from, and what it gives: tokens and boundaries ----

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
"""Parts that say something about the cycle; the others may come anywhere."""


@untracked
@dataclass
class Token:
    """A phase event that is in no other phase of its thread."""

    id: int
    """Id of the event."""
    part: Part
    key: int
    """Address of its dataset, root module, optimizer or scaler; 0 where it is unknown."""
    start: int
    """Unix ns."""
    end: int
    """Unix ns; NEVER while it is open."""
    thread: int
    """``threading.get_ident()``."""
    context: int
    """Number of the OpenTelemetry span, 0 for none."""
    holds_backward: bool = False
    """A backward pass ran in it: an optimizer was given a closure."""
    is_cut: bool = False
    """Whether an exception ended it."""


@untracked
@dataclass
class Boundary:
    """A segment begins, and the one before ends."""

    time: int
    """Unix ns."""
    thread: int
    token: int
    """Id of the phase that begins it; 0 where it begins with none."""
    segment: Segment | None
    """Kind of the following segment; None if nothing follows."""


# ---- The rule that says what ends a step of training, and whether a loop still goes by it ----

MANY_ROUNDS = 256
"""Backward passes without an optimizer's step after which an optimizer that is there is not used."""
_FEW_ROUNDS = 3
_MISFITS = 3
_AGE = (1 << 32) - 1
"""Misfits count among the last 32 periods: what an optimizer does once in a thousand steps is no new loop."""

Anchor = tuple[Part, int]
"""A part and the object that it is of."""


class Rule(NamedTuple):
    """A rule that says what ends a step."""

    part: Part
    """STEP, SCALER_STEP, SCALER_UPDATE: it ends with that object's; NEXT, FORWARD: the next one begins with it, after a backward pass."""
    key: int
    """The object; 0 for any module, or for an optimizer that is not known yet."""
    optimizers: frozenset[Anchor]
    """The optimizers that step in a period."""
    text: str
    """The rule and its reason, for people."""
    is_given: bool = False
    """Whether the program has set the rule; then it is never replaced."""

    @property
    def is_provisional(self) -> bool:
        """Whether the first step of an optimizer replaces it: none has stepped so far."""
        return not self.optimizers and not self.is_given

    @property
    def rounds(self) -> int:
        """After how many backward passes without an optimizer a rule without one may replace it."""
        return MANY_ROUNDS if self.part in OPTIMIZERS else _FEW_ROUNDS


class RuleFit:
    """Checks whether the loop still follows its rule.

    Args:
        rule: the current rule.
        work: backward passes and steps of optimizers in the longest period that it was learned from.
    """

    def __init__(self, rule: Rule, work: int = 0) -> None:
        self._rule = rule
        self._learned_work = work
        self._misfits = 0
        self._is_odd = False
        self._work = 0
        self._usual: deque[int] = deque(maxlen=8)

    @property
    def is_doubtful(self) -> bool:
        """Whether another rule may have to be learned."""
        return self._is_odd or self._misfits > 0 or self._is_overdue

    @property
    def is_broken(self) -> bool:
        """Whether three periods did not fit."""
        return self._is_overdue or self._misfits.bit_count() + self._is_odd >= _MISFITS

    @property
    def _is_overdue(self) -> bool:
        return bool(self._usual) and self._work > _MISFITS * max(self._learned_work, *self._usual)

    def take(self, token: Token, ended: bool) -> None:
        """A token that was walked, and whether a period ended with it."""
        is_optimizer = token.part in OPTIMIZERS
        if ended and not is_optimizer:
            self._end()
        if is_optimizer or token.part is Part.BACKWARD:
            self._work += 1
        if is_optimizer and (token.part, token.key) not in self._rule.optimizers:
            self._is_odd = True
        if ended and is_optimizer:
            self._end()

    def _end(self) -> None:
        self._usual.append(self._work)
        ages = self._rule.part in OPTIMIZERS
        if ages or self._is_odd:  # a loop without an optimizer has none, however rarely it steps
            self._misfits = (self._misfits << 1 | self._is_odd) & _AGE
        self._work, self._is_odd = 0, False
