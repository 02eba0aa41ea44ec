"""The tokens of a thread whose rule is not known yet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._spans.step_tokens import OPTIMIZERS

if TYPE_CHECKING:
    from otel_torchprof._spans.step_tokens import Token

_MOST_TOKENS = 1 << 14
_FEW_TOKENS = 256
"""Tokens that are held before the first backward pass."""
_PASSES_IN_VAIN = 64
"""Passes without a backward pass after which none is waited for."""
_LONGEST = 8
"""Tokens of the longest sequence that is shortened: a batch, and the passes over it."""
_WITHOUT_GRADIENTS = frozenset({Part.INFERENCE, Part.EVALUATION})
_BEGINS = frozenset({Part.NEXT, Part.FORWARD})
_PASSES = _WITHOUT_GRADIENTS | {Part.FORWARD}


class Held:
    """What may become steps: little of a thread that does not train, and of a sequence that repeats the first and the last."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self._passes_in_vain = 0
        self._trains = self._is_idle = self._is_settled = False
        self._has_zeroed = self._has_stepped = False
        self._idle: set[tuple[Part, int]] = set()
        """What it does then, of what a step could begin with."""

    @property
    def is_hopeful(self) -> bool:
        """Whether what is held may become steps."""
        return bool(self.tokens) and not self._is_idle and not self._is_settled

    @property
    def is_full(self) -> bool:
        """Whether the older half goes with the next token."""
        return len(self.tokens) == _MOST_TOKENS

    def take(self, token: Token) -> None:
        """Keeps a token; of a thread that has not trained, only what a step could begin with."""
        part = token.part
        if part in OPTIMIZERS or part is Part.BACKWARD:
            self._passes_in_vain, self._is_idle, self._trains = 0, False, True
            self._has_stepped |= part in OPTIMIZERS
        self._has_zeroed |= part is Part.ZEROING
        if part is not Part.INFERENCE:
            self._is_settled &= part in {Part.EVALUATION, Part.SAVE}
        elif not self.tokens or not (self._trains or self.tokens[-1].part is Part.NEXT):
            return  # of several the one after a batch shows what that was for
        if part in _BEGINS and (part, token.key) not in self._idle:
            self._is_idle = False
        self._append(token)
        if part in _PASSES:
            self._passes_in_vain += 1
            if self._passes_in_vain >= _PASSES_IN_VAIN and not self._trains:
                self._rest()

    def close(self, end: int) -> None:
        """The latest token, which was open, has ended."""
        if self.tokens and self.tokens[-1].end == NEVER:
            self.tokens[-1] = replace(self.tokens[-1], end=end)

    def settle(self) -> None:
        """What is held can be held no longer; after many passes without a backward pass none is waited for."""
        self._is_settled = True
        if self._passes_in_vain >= _PASSES_IN_VAIN:
            self._rest()

    def _append(self, token: Token) -> None:
        tokens = self.tokens
        if token.part in _WITHOUT_GRADIENTS and tokens and tokens[-1].part is token.part:
            tokens[-1] = replace(tokens[-1], end=token.end)
            return
        tokens.append(token)
        for length in range(2, _LONGEST + 1):
            if self._repeats(length):
                del tokens[-2 * length : -length]
                break
        most = _MOST_TOKENS if self._trains else _FEW_TOKENS
        if len(tokens) > most:
            del tokens[: -most // 2]

    def _repeats(self, length: int) -> bool:
        """Whether the last tokens are a sequence of this length for the third time that is a part of a step, or of an evaluation."""
        tokens = self.tokens
        if len(tokens) < 3 * length or not _is_like(tokens[-1], tokens[-1 - length], tokens[-1 - 2 * length]):
            return False
        first, second, third = tokens[-3 * length : -2 * length], tokens[-2 * length : -length], tokens[-length:]
        parts = {token.part for token in third}
        if parts & OPTIMIZERS or not all(map(_is_like, first, second, third)):
            return False
        # Without an optimizer a backward pass may be all there is of a step; what is not zeroed meanwhile accumulates.
        accumulates = self._has_stepped or (self._has_zeroed and Part.ZEROING not in parts)
        return Part.BACKWARD not in parts or accumulates

    def _rest(self) -> None:
        self._idle = {(token.part, token.key) for token in self.tokens if token.part in _BEGINS}
        self._is_idle, self._passes_in_vain, self._trains = True, 0, False


def _is_like(*tokens: Token) -> bool:
    return len({(token.part, token.key) for token in tokens}) == 1
