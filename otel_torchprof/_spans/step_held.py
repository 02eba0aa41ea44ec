"""The tokens of a thread whose rule is not known yet."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._spans.step_tokens import OPTIMIZERS

if TYPE_CHECKING:
    from otel_torchprof._spans.step_tokens import Token

_MOST_TOKENS = 4096
_FEW_TOKENS = 256
"""Tokens that are held before the first backward pass."""
_PASSES_IN_VAIN = 64
"""Passes without a backward pass after which none is waited for."""


class Held:
    """What may become steps: little of a thread that does not train."""

    def __init__(self) -> None:
        self.tokens: deque[Token] = deque(maxlen=_FEW_TOKENS)
        self._passes_in_vain = 0
        self._is_idle = self._is_settled = False
        self._idle_keys: set[int] = set()

    @property
    def is_hopeful(self) -> bool:
        """Whether what is held may become steps."""
        return bool(self.tokens) and not self._is_idle and not self._is_settled

    def take(self, token: Token) -> None:
        """Keeps a token; of a thread that is idle, only what a step could begin with."""
        part = token.part
        if part is Part.INFERENCE:
            self._infer(token)
            return
        self._is_settled &= part in {Part.EVALUATION, Part.SAVE}
        if part in OPTIMIZERS or part is Part.BACKWARD:
            self._passes_in_vain, self._is_idle = 0, False
            if self.tokens.maxlen == _FEW_TOKENS:
                self.tokens = deque(self.tokens, maxlen=_MOST_TOKENS)
        elif part is Part.NEXT and token.key not in self._idle_keys:
            self._is_idle = False
        if self._is_idle and part not in {Part.NEXT, Part.FORWARD}:
            return
        if self._is_idle and part is Part.NEXT:
            self.tokens.clear()
        self.tokens.append(token)
        if part in {Part.FORWARD, Part.EVALUATION}:
            self._pass_in_vain()

    def close(self, end: int) -> None:
        """The latest token, which was open, has ended."""
        if self.tokens and self.tokens[-1].end == NEVER:
            self.tokens[-1] = replace(self.tokens[-1], end=end)

    def settle(self) -> None:
        """What is held can be held no longer."""
        self._is_settled = True

    def _infer(self, token: Token) -> None:
        """Of calls without gradients one after a batch is kept: it shows what the batch was for."""
        if self.tokens and self.tokens[-1].part is Part.NEXT and not self._is_idle:
            self.tokens.append(token)
            self._pass_in_vain()

    def _pass_in_vain(self) -> None:
        """Lets go of all that is held, after many passes without a backward pass."""
        self._passes_in_vain += 1
        if self._passes_in_vain >= _PASSES_IN_VAIN:
            self._idle_keys = {token.key for token in self.tokens if token.part is Part.NEXT}
            self._is_idle, self._passes_in_vain = True, 0
            self.tokens.clear()
