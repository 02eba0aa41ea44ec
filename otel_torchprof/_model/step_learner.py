"""Learns what ends a training step from the order of optimizers, backward passes and loaders."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.phases import Part

from .step_rules import MANY_ROUNDS, OPTIMIZERS, Anchor, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .step_rules import Token

_RARE = 16
"""Periods within which every optimizer of the loop is expected to step: a WGAN trains its critic 5 or 10 times per step."""
_SURE_TIME = 2_000_000_000
"""ns after which the learner waits for no other optimizer."""
_ROUNDS = 32
"""Backward passes without an optimizer after which a loop counts as one without, if the learner must decide."""
_FEW_PERIODS = 3
"""Periods, counted by backward passes, after which an optimizer that has stepped is no longer expected."""
_FIRST = frozenset({Part.FORWARD, Part.BACKWARD, Part.ZEROING})
_MOST_OPTIMIZERS = 1024
_MOST_LOADERS = 64
_NOT_YET = "a step ends with an optimizer's step (none has stepped yet)"
_NAMES = {
    Part.SCALER_UPDATE: "GradScaler.update",
    Part.SCALER_STEP: "GradScaler.step",
    Part.STEP: "an optimizer's step",
}


class _Optimizer(NamedTuple):
    """A step of an optimizer, and the events since the previous step of any optimizer."""

    anchor: Anchor
    backwards: int
    has_forward: bool
    has_next: bool


def _shape(period: Sequence[_Optimizer]) -> list[tuple[Anchor, bool]]:
    """Returns the order of a period's optimizers and backward passes without repetitions, to compare periods."""
    shape: list[tuple[Anchor, bool]] = []
    for anchor, backwards, _, _ in period:
        if not shape or shape[-1] != (anchor, backwards > 0):
            shape.append((anchor, backwards > 0))
    return shape


def _last_of_round(period: Sequence[_Optimizer]) -> Anchor:
    """Returns the optimizer that steps once in the period and is followed by a new batch or pass; by default the period's last."""
    counts = Counter(step.anchor for step in period)
    last = period[-1].anchor
    best, best_score = last, _newness(period[0])
    for step, following in pairwise(period):
        if counts[step.anchor] == 1 and step.anchor[0] is last[0] and _newness(following) > best_score:
            best, best_score = step.anchor, _newness(following)
    return best


def _newness(step: _Optimizer) -> int:
    return 2 * step.has_next + (step.has_forward or step.backwards > 0)


class Learner:
    """Learns the rule that ends a step of one thread's loop.

    Args:
        optimizer: key of the optimizer that the program named; then no other one is an anchor.
        loader: key of the loader that the program named; likewise.
        rounds: number of backward passes without an optimizer after which the loop has none. Default: an optimizer may always follow.
    """

    def __init__(self, optimizer: int | None = None, loader: int | None = None, *, rounds: float = math.inf) -> None:
        self._optimizer = optimizer
        self._loader = None if optimizer is not None else loader
        self._rounds_needed = rounds
        self._optimizers: list[_Optimizer] = []
        self._waiting: Rule | None = None
        self._former: Rule | None = None
        """The waiting rule from before another optimizer stepped: that one may step rarely, or be of the next loop."""
        self._began = 0
        self._first: Anchor | None = None
        self._modules: set[int] = set()
        self._zeroed: set[int] = set()
        self.backwards = 0
        """Number of backward passes so far."""
        self._zeroings = 0
        self._without_optimizer = self._most_backwards = 0
        self._has_backward = self._has_forward = self._has_next = False
        self._rounds: dict[int, tuple[int, int, int]] = {}
        self._passes: set[int] = set()
        self._pattern: set[int] = set()
        self._pattern_rounds = self._pattern_zeroings = 0

    def take(self, token: Token) -> Rule | None:
        """Takes the next token; returns the rule if it is known now."""
        part = token.part
        if part is Part.INFERENCE:
            _add(self._modules, token.key)
            return None
        self._began = self._began or token.start
        if self._first is None and part in _FIRST:
            self._first = part, token.key
        if part in OPTIMIZERS:
            return self._step(token)
        if part is Part.NEXT:
            return self._next(token)
        if part is Part.FORWARD:
            return self._forward(token)
        if part is Part.BACKWARD:
            self._backward()
        elif part is Part.ZEROING:
            _add(self._zeroed, token.key)
            self._zeroings += 1
        return None

    def settle(self) -> Rule | None:
        """Returns the likeliest rule so far, although an optimizer that steps rarely, or has not stepped yet, may still follow."""
        rule = self._likeliest(_ROUNDS)
        accumulates = self._zeroed and self.backwards and not self._optimizers
        if rule is None and accumulates and not self._is_given:
            return Rule(Part.STEP, 0, frozenset(), _NOT_YET)
        return rule

    def finish(self) -> Rule | None:
        """Returns the likeliest rule at the end of the tokens."""
        return self._likeliest(2)

    def of_optimizer(self, token: Token) -> Rule | None:
        """Returns the rule from one period of optimizers, if the latest token begins the loop anew; else None.

        That token is a batch or, for a loop without batches, the loop's first token.
        """
        if not self._optimizers:
            return None
        is_first = (token.part, token.key) == self._first and not self._optimizers[-1].has_next
        return self._single() if token.part is Part.NEXT or is_first else None

    def of_misfits(self) -> Rule | None:
        """Returns the waiting rule of two equal periods, to replace one that does not fit; None if the loop has batches."""
        has_batches = any(step.has_next for step in self._optimizers)
        return None if has_batches else self._waiting

    def most_work(self, anchor: Anchor) -> int:
        """Returns the number of backward passes and optimizer steps in the longest period of an anchor."""
        most = work = 0
        for step in self._optimizers:
            work += step.backwards + 1
            if step.anchor == anchor:
                most, work = max(most, work), 0
        return most

    @property
    def _is_given(self) -> bool:
        return self._optimizer is not None or self._loader is not None

    def _likeliest(self, least: int) -> Rule | None:
        """Returns the likeliest rule; one without an optimizer needs ``least`` rounds."""
        if self._is_given:
            return None
        if self._waiting is not None or self._optimizers:
            return self._waiting or self._single() or self._former
        rounds = {key: count for key, (count, *_) in self._rounds.items() if count >= least}
        if rounds:
            return self._loader_rule(max(rounds, key=lambda key: rounds[key]))
        return self._forward_rule() if self._pattern_rounds >= least and not self._rounds else None

    def _backward(self) -> None:
        self.backwards += 1
        self._without_optimizer += 1
        if self._without_optimizer > MANY_ROUNDS and self._without_optimizer > _FEW_PERIODS * self._most_backwards:
            self._optimizers.clear()
        self._has_backward = True

    def _step(self, token: Token) -> Rule | None:
        if token.holds_backward:
            self._backward()
        backwards, self._without_optimizer = self._without_optimizer, 0
        self._most_backwards = max(self._most_backwards, backwards)
        self._rounds.clear()
        self._pattern_rounds = 0
        anchor = (token.part, token.key)
        if self._waiting is not None and anchor not in self._waiting.optimizers:
            self._former, self._waiting = self._waiting, None
        elif self._former is not None and anchor in self._former.optimizers:
            self._former = None
        self._optimizers.append(_Optimizer(anchor, backwards, self._has_forward, self._has_next))
        del self._optimizers[: -_MOST_OPTIMIZERS if len(self._optimizers) > 2 * _MOST_OPTIMIZERS else 0]
        self._has_backward = self._has_forward = self._has_next = False
        if self._optimizer is not None:
            return self._given(anchor)
        return None if self._loader is not None else self._periodic(token)

    def _given(self, anchor: Anchor) -> Rule | None:
        """Returns the rule of the given optimizer after its step. If a scaler steps it, only calls of the scaler are seen."""
        if anchor == (Part.STEP, self._optimizer):
            text = "a step ends with the step of the given optimizer"
        elif anchor[0] is Part.SCALER_UPDATE and sum(step.anchor == anchor for step in self._optimizers) > 1:
            text = "a step ends with GradScaler.update, which steps the given optimizer"
        else:
            return None
        return Rule(*anchor, frozenset(), text, is_given=True)

    def _periodic(self, token: Token) -> Rule | None:
        """Returns the rule if this optimizer ends the same period for the second time, and the period has every other optimizer."""
        anchor = self._optimizers[-1].anchor
        periods = self._periods(anchor)
        shape = _shape(periods[0])
        if shape not in map(_shape, periods[1:2]) or not any(has_backward for _, has_backward in shape):
            return None
        if self._former is not None:
            return self._former
        present = {step.anchor for step in periods[0]}
        is_update = anchor[0] is Part.SCALER_UPDATE
        for other in {step.anchor for period in periods for step in period}:
            if other not in present or (other[0] is Part.SCALER_UPDATE and not is_update):
                return None
        rule = self._optimizer_rule(periods[0], "learned from 2 equal periods")
        is_one_of_several = sum(part is not Part.SCALER_UPDATE for part, _ in present) > 1
        is_alone = not _is_several(self._modules) and not _is_several(self._zeroed) and self._asks_alike(periods)
        is_late = len(periods) >= _RARE or token.start - self._began >= _SURE_TIME
        if is_one_of_several or is_alone or is_late:
            return rule
        self._waiting = rule
        return None

    def _periods(self, anchor: Anchor) -> list[list[_Optimizer]]:
        """Returns the optimizer steps up to each step of the anchor, the latest period first; at most :data:`_RARE` periods."""
        steps = self._optimizers
        periods: list[list[_Optimizer]] = []
        end = len(steps)
        for place in range(len(steps) - 2, -1, -1):
            if steps[place].anchor == anchor:
                periods.append(steps[place + 1 : end])
                end = place + 1
                if len(periods) == _RARE:
                    return periods
        return [*periods, steps[:end]]

    def _asks_alike(self, periods: list[list[_Optimizer]]) -> bool:
        """Whether both of the latest periods have a batch, or no period has one: else one batch may last for several periods."""
        asks = [any(step.has_next for step in period) for period in periods]
        return all(asks[:2]) or not any(asks)

    def _single(self) -> Rule | None:
        """Returns the rule of the rarest optimizer whose latest period has a backward pass and every other optimizer."""
        counts = Counter(step.anchor for step in self._optimizers)
        updates = [anchor for anchor in counts if anchor[0] is Part.SCALER_UPDATE]
        for anchor in sorted(updates or counts, key=lambda anchor: counts[anchor]):
            places = [place for place, step in enumerate(self._optimizers) if step.anchor == anchor]
            period = self._optimizers[places[-2] + 1 if len(places) > 1 else 0 : places[-1] + 1]
            if {step.anchor for step in period} == set(counts) and any(step.backwards for step in period):
                return self._optimizer_rule(period, "guessed from 1 period, there were no 2 equal ones")
        return None

    def _optimizer_rule(self, period: Sequence[_Optimizer], why: str) -> Rule:
        anchor = _last_of_round(period)
        present = frozenset(step.anchor for step in period)
        count = sum(part is anchor[0] for part, _ in present)
        which = f", the last or rarest of {count}" if count > 1 else ""
        return Rule(*anchor, present, f"a step ends with {_NAMES[anchor[0]]}{which} ({why})")

    def _next(self, token: Token) -> Rule | None:
        self._has_next = True
        key = token.key
        if key == self._loader:
            return Rule(Part.NEXT, key, frozenset(), "a step begins with a batch of the given loader", is_given=True)
        if self._is_given or self._optimizers:
            return None
        count, backwards, zeroings = self._rounds.get(key, (0, self.backwards, self._zeroings))
        count += backwards < self.backwards and self._is_round(zeroings)
        if len(self._rounds) < _MOST_LOADERS or key in self._rounds:
            self._rounds[key] = (count, self.backwards, self._zeroings)
        return self._loader_rule(key) if count >= self._needed() else None

    def _forward(self, token: Token) -> Rule | None:
        _add(self._modules, token.key)
        self._has_forward = True
        if self._optimizers or self._is_given:
            return None
        if self._has_backward:
            self._has_backward = False
            is_like = self._passes == self._pattern and self._is_round(self._pattern_zeroings)
            self._pattern_rounds = self._pattern_rounds + 1 if is_like else 1
            self._pattern, self._passes, self._pattern_zeroings = self._passes, set(), self._zeroings
        _add(self._passes, token.key)
        return self._forward_rule() if self._pattern_rounds >= self._needed() and not self._rounds else None

    def _is_round(self, zeroings: int) -> bool:
        """Whether a step without an optimizer may have ended: not if gradients accumulate, without a zeroing since ``zeroings``."""
        return not self._zeroed or zeroings < self._zeroings

    def _needed(self) -> float:
        return MANY_ROUNDS if self._zeroed else self._rounds_needed

    def _loader_rule(self, key: int) -> Rule:
        return Rule(
            Part.NEXT,
            key,
            frozenset(),
            "a step begins with a loader's batch (no optimizer steps between backward passes)",
        )

    def _forward_rule(self) -> Rule:
        return Rule(
            Part.FORWARD,
            0,
            frozenset(),
            "a step begins with the forward pass after a backward pass (no optimizer, no loader)",
        )


def _add(keys: set[int], key: int) -> None:
    """Adds a key to a small set: callers only need to know whether there is more than one."""
    if len(keys) <= 1:
        keys.add(key)


def _is_several(keys: set[int]) -> bool:
    return len(keys) > 1
