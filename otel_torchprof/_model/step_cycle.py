"""Detects the steps of a training loop that does not report them: learns from its phases what ends a step, then applies that rule."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._process.give_way import give_way, with_pauses

from .step_learner import Learner
from .step_walk import Walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


from .step_rules import OPTIMIZERS, RELEVANT, Boundary, Rule, RuleFit, Token

# ---- Tokens of a thread whose rule is not known yet ----

_MOST_TOKENS = 1 << 14
_FEW_TOKENS = 256
"""Tokens that are buffered before the first backward pass."""
_PASSES_WITHOUT_BACKWARD = 64
"""Module calls without a backward pass after which a thread counts as not training."""
_LONGEST = 8
"""Tokens of the longest repeated sequence that is shortened: a batch, and the passes over it."""
_WITHOUT_GRADIENTS = frozenset({Part.INFERENCE, Part.EVALUATION})
_BEGINS = frozenset({Part.NEXT, Part.FORWARD})
_PASSES = _WITHOUT_GRADIENTS | {Part.FORWARD}


class TokenBuffer:
    """Buffers the tokens of a thread until the rule that ends its steps is known.

    Memory is bounded: keeps few tokens of a thread that does not train, and only the first and last copy of a repeated sequence.
    """

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self._passes_without_backward = 0
        self._trains = self._is_idle = self._is_settled = False
        self._has_zeroed = self._has_stepped = False
        self._idle: set[tuple[Part, int]] = set()
        """Part and key of the batches and forward passes that were seen while the thread did not train."""

    @property
    def is_hopeful(self) -> bool:
        """Whether the buffered tokens may become steps."""
        return bool(self.tokens) and not self._is_idle and not self._is_settled

    @property
    def is_full(self) -> bool:
        """Whether the next token drops the older half."""
        return len(self.tokens) == _MOST_TOKENS

    def take(self, token: Token) -> None:
        """Buffers a token; before the thread trains, only a token with which a step could begin."""
        part = token.part
        if part in OPTIMIZERS or part is Part.BACKWARD:
            self._passes_without_backward, self._is_idle, self._trains = 0, False, True
            self._has_stepped |= part in OPTIMIZERS
        self._has_zeroed |= part is Part.ZEROING
        if part is not Part.INFERENCE:
            self._is_settled &= part in {Part.EVALUATION, Part.SAVE}
        elif not self.tokens or not (self._trains or self.tokens[-1].part is Part.NEXT):
            return  # one after each batch is enough: it shows that the batch is for inference
        if part in _BEGINS and (part, token.key) not in self._idle:
            self._is_idle = False
        self._append(token)
        if part in _PASSES:
            self._passes_without_backward += 1
            if self._passes_without_backward >= _PASSES_WITHOUT_BACKWARD and not self._trains:
                self._rest()

    def close(self, end: int) -> None:
        """Sets the end of the latest token, which was open."""
        if self.tokens and self.tokens[-1].end == NEVER:
            self.tokens[-1] = replace(self.tokens[-1], end=end)

    def settle(self) -> None:
        """Marks the buffer as settled; after many passes without a backward pass, no longer expects one."""
        self._is_settled = True
        if self._passes_without_backward >= _PASSES_WITHOUT_BACKWARD:
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
        """Whether the last tokens repeat a sequence of this length for the third time, and it is only part of a step or evaluation."""
        tokens = self.tokens
        if len(tokens) < 3 * length or not _is_like(tokens[-1], tokens[-1 - length], tokens[-1 - 2 * length]):
            return False
        first, second, third = tokens[-3 * length : -2 * length], tokens[-2 * length : -length], tokens[-length:]
        parts = {token.part for token in third}
        if parts & OPTIMIZERS or not all(map(_is_like, first, second, third)):
            return False
        # Without an optimizer, a backward pass may be a whole step, unless gradients accumulate: no zeroing in between.
        accumulates = self._has_stepped or (self._has_zeroed and Part.ZEROING not in parts)
        return Part.BACKWARD not in parts or accumulates

    def _rest(self) -> None:
        self._idle = {(token.part, token.key) for token in self.tokens if token.part in _BEGINS}
        self._is_idle, self._passes_without_backward, self._trains = True, 0, False


def _is_like(*tokens: Token) -> bool:
    return len({(token.part, token.key) for token in tokens}) == 1


# ---- Periods that are like the one before ----

_LONGEST_PERIOD = 1024


class LatestPeriod:
    """The latest period of a loop. If the walk is in the same state after it as before it, it decides the same in those that are like it."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._state: tuple[object, ...] | None = None
        """State of the walk before these tokens."""
        self._known: list[tuple[object, ...]] = []
        """All on which decisions about the tokens of the latest period depend; none if the state was another one before it."""
        self.first = 0
        """Place of the token in it with which its step begins."""

    def take(self, token: Token, walk: Walk, *, is_known: bool) -> None:
        """Takes a token after the walk. ``is_known``: the rule is not being learned."""
        self._tokens.append(token)
        if not walk.has_ended_period and len(self._tokens) < _LONGEST_PERIOD:
            return
        tokens, before = self._tokens, self._state
        self._tokens, self._state = [], walk.state if is_known and walk.has_ended_period else None
        firsts = [place for place, one in enumerate(tokens) if one.id in walk.begins]
        is_same = before is not None and before == self._state and len(firsts) == len(walk.begins) == 1
        self._known = list(map(_LIKENESS, tokens)) if is_same and _begins_with_work(tokens) else []
        self.first = sum(firsts)
        walk.begins.clear()

    def repeats(self, tokens: Sequence[Token], at: int, walk: Walk) -> Iterator[Sequence[Token]]:
        """Yields the periods from a place on that are like the latest one."""
        known = [] if self._tokens or walk.state != self._state else self._known
        while known and list(map(_LIKENESS, period := tokens[at : at + len(known)])) == known:
            if NEVER in map(_END, period):
                return
            yield period
            at += len(known)


def _begins_with_work(tokens: Iterable[Token]) -> bool:
    """Whether all tokens have ended, and no optimizer steps before the first backward pass, with which the step begins at the latest."""
    work = next((token for token in tokens if token.part is Part.BACKWARD or token.part in OPTIMIZERS), None)
    is_backward = work is not None and (work.part is Part.BACKWARD or work.holds_backward)
    return is_backward and all(token.end != NEVER and not token.is_cut for token in tokens)


_LIKENESS = attrgetter("part", "key", "thread", "holds_backward", "is_cut")
_END = attrgetter("end")


# ---- Loops, and the active one ----

_MOST_THREADS = 64
_QUIET_PERIODS = 3
"""Periods of another thread's loop after which a loop without tokens is over."""


class _Loop:
    """The training loop of one thread."""

    def __init__(self, optimizer: int | None, loader: int | None) -> None:
        self.learner: Learner | None = Learner(optimizer, loader)
        self._buffer = TokenBuffer()
        self.walk: Walk | None = None
        self.adopted = 0
        """Rules that were adopted since :class:`StepCycle` last read and reset this."""
        self.steps = 0
        """Steps of this loop since the latest token of the active loop."""
        self.since = 0
        """Number of tokens that the active loop had when ``steps`` was last reset."""
        self._fit: RuleFit | None = None
        self.latest = 0
        """Id of its latest token."""
        self._open: Token | None = None
        self._has_closures = False
        self._period = LatestPeriod()

    def repeat(self, tokens: Sequence[Token], at: int) -> int:
        """Takes the periods from a place on that are like the latest one; returns the place after them."""
        walk, fit, period = self.walk, self._fit, self._period
        if walk is None or fit is None or self._open is not None or tokens[at].id == self.latest:
            return at
        for repeated in with_pauses(period.repeats(tokens, at, walk)):
            walk.repeat(repeated[period.first], repeated[-1])
            if not walk.rule.is_given:
                fit.repeat()
            self.latest = repeated[-1].id
            at += len(repeated)
        return at

    def take(self, token: Token) -> None:
        """Takes the next token, or the latest one again, with its end."""
        waiting, self._open = self._open, None
        if token.is_cut and token.part in OPTIMIZERS:  # a failed iteration is part of the next step
            if waiting is not None and waiting.id != token.id:
                self._take(waiting)
            self.latest = token.id
            return
        if token.id != self.latest:
            if waiting is not None:
                self._take(waiting)
            self.latest = token.id
        elif waiting is None:
            self._close(token.end)
            return
        if token.end == NEVER and token.part in OPTIMIZERS:
            self._open = token  # only its end shows whether a backward pass ran in it
        else:
            self._take(token)

    def is_progress(self, token: Token) -> bool:
        """Whether the token shows that the loop still runs: an optimizer's step that has ended, or another new token, not of inference."""
        if token.part in OPTIMIZERS:
            return token.end != NEVER
        return token.part is not Part.INFERENCE and token.id != self.latest

    def is_settled(self, watermark: int) -> bool:
        """Whether everything up to the watermark has its segment."""
        if self.walk is None:
            return self._open is None and not self._buffer.is_hopeful
        return (self._open is None or not self.walk.waits) and self.walk.is_settled(watermark)

    def settle(self, watermark: int) -> None:
        """Decides ambiguous boundaries."""
        self._take_open()
        if self.walk is not None:
            self.walk.settle(watermark)
        elif self.learner is not None:
            self._adopt(self.learner.settle())
            self._buffer.settle()

    def finish(self, end: int) -> None:
        """Decides everything."""
        self._take_open()
        if self.walk is None and self.learner is not None:
            self._adopt(self.learner.finish())
        if self.walk is not None:
            self.walk.finish(end)

    @property
    def weight(self) -> float:
        """Number of backward passes, to compare loops; infinite once the end of a step is known."""
        return math.inf if self.walk is not None or self.learner is None else self.learner.backwards

    def _close(self, end: int) -> None:
        if end != NEVER:
            (self.walk or self._buffer).close(end)

    def _take_open(self) -> None:
        if self._open is not None:
            token, self._open = self._open, None
            self._take(replace(token, holds_backward=self._has_closures))

    def _take(self, token: Token) -> None:
        self._has_closures |= token.holds_backward
        if self.walk is not None:
            self._follow(token)
        elif self.learner is not None:
            rule = self.learner.take(token)
            self._buffer.take(token)
            self._adopt(self.learner.settle() if rule is None and self._buffer.is_full else rule)

    def _adopt(self, rule: Rule | None) -> None:
        """Adopts the first rule, and applies it to the buffered tokens."""
        if rule is None or self.learner is None:
            return
        self.adopted += 1
        self.walk, self._fit = Walk(rule), RuleFit(rule, self.learner.most_work(rule[:2]))
        self.learner = Learner(rounds=rule.rounds) if rule.is_provisional else None
        held, self._buffer = self._buffer, TokenBuffer()
        for token in with_pauses(held.tokens):
            self._follow(token)

    def _follow(self, token: Token) -> None:
        """Applies the rule to a token; replaces the rule if the loop no longer fits it."""
        learner, walk = self.learner, self.walk
        if walk is None or self._fit is None:
            return
        new_rule = None if learner is None else learner.take(token)
        if new_rule is None and learner is not None and self._fit.is_broken:
            new_rule = learner.of_misfits()
        late = None if learner is None or not walk.rule.is_provisional else learner.of_optimizer(token)
        if late is not None:
            self._replace(late, walk)
            walk.waits = True
        elif new_rule is not None and (self._fit.is_broken or walk.rule.is_provisional > new_rule.is_provisional):
            self._replace(new_rule, walk)
            walk.walk(token)  # not given to the new rule's fit: its period is not complete
            return
        walk.walk(token)
        if not walk.rule.is_given:
            self._fit.take(token, walk.has_ended_period)
            if not self._fit.is_doubtful and not walk.rule.is_provisional:
                self.learner = None
            elif self.learner is None:
                self.learner = Learner(rounds=walk.rule.rounds)
                self.learner.take(token)
        self._period.take(token, walk, is_known=self.learner is None)

    def _replace(self, rule: Rule, walk: Walk) -> None:
        """Replaces the rule for all later tokens."""
        if rule[:2] != walk.rule[:2]:
            self.adopted += 1
            is_late = walk.rule.is_provisional > rule.is_provisional
            why = "it has stepped after all" if is_late else "three periods did not fit the rule before"
            rule = rule._replace(text=f"{rule.text}; {why}")
        walk.rule, self._fit = rule, RuleFit(rule, 0 if self.learner is None else self.learner.most_work(rule[:2]))
        self.learner = Learner(rounds=rule.rounds) if rule.is_provisional else None
        self._period = LatestPeriod()


class StepCycle:
    """Learns what ends a step of the training loop, and returns where its segments begin. Not thread-safe.

    The active loop is that of the thread whose rule is known first. A loop on another thread becomes the active one when it has made
    more than three steps since the latest token of the active loop.

    Args:
        optimizer: key of the optimizer that ends a step.
        loader: key of the loader whose batches begin a step; ignored if there is an optimizer.
    """

    def __init__(self, *, optimizer: int | None = None, loader: int | None = None) -> None:
        self.revision = 0
        """Number of rules so far."""
        self._given = optimizer, loader
        self._loops: dict[int, _Loop] = {}
        self._active: _Loop | None = None
        self._watermark = 0
        self._settled = 0
        self._forgotten = 0
        self._latest = 0
        self._own_tokens = 0
        self._has_segments = False

    def feed(self, tokens: Iterable[Token], watermark: int) -> list[Boundary]:
        """Takes the tokens that began or ended since the last call; returns the boundaries that are certain now, by time.

        Args:
            tokens: top-level phases of their threads; an open one is passed again when it has ended.
            watermark: time until which all tokens are known, Unix ns.
        """
        boundaries: list[Boundary] = []
        tokens = _in_order([token for token in tokens if token.part in RELEVANT])
        at = 0
        while at < len(tokens):
            give_way()
            loop = self._loop_of(tokens[at])
            at = at + 1 if loop is None else self._take(loop, tokens, at, boundaries)
        self._watermark = max(self._watermark, watermark)
        if self._knows_all():
            self._settled = self._watermark
        return boundaries

    @property
    def is_settled(self) -> bool:
        """Whether everything up to the watermark has its segment."""
        return self._settled >= self._watermark

    def settle(self) -> list[Boundary]:
        """Decides ambiguous boundaries, when tokens can be buffered no longer; tokens before the first rule are in no step."""
        boundaries: list[Boundary] = []
        loops = list(self._loops.values()) if self._active is None else [self._active]
        for loop in loops:
            loop.settle(self._watermark)
            self._collect(loop, boundaries)
        if self._active is None:
            self._forgotten = self._watermark
        self._settled = self._watermark
        return boundaries

    def finish(self, end: int) -> list[Boundary]:
        """Decides everything, since the recording ends; the last segment ends with its last token."""
        boundaries: list[Boundary] = []
        loops = sorted(self._loops.values(), key=_weight, reverse=True) if self._active is None else [self._active]
        for loop in loops:
            if self._active in {None, loop}:
                loop.finish(end)
                self._collect(loop, boundaries, self._latest)
        return boundaries

    @property
    def has_trained(self) -> bool:
        """Whether a backward pass was seen, or a rule is known."""
        return self._active is not None or any(loop.weight for loop in self._loops.values())

    @property
    def anchor(self) -> tuple[Part, int] | None:
        """Part and key of the current rule's anchor; None without a rule."""
        return None if self._active is None or self._active.walk is None else self._active.walk.rule[:2]

    @property
    def rule(self) -> str:
        """The current rule and its reason, as text for users."""
        if self._active is not None and self._active.walk is not None:
            return self._active.walk.rule.text
        if not self.has_trained:
            return "no steps: no backward pass was seen"
        if self._given != (None, None):
            what = "optimizer has not stepped" if self._given[0] is not None else "loader was not asked for a batch"
            return f"no steps: the given {what}"
        return "no steps yet: no two equal periods were seen"

    def _take(self, loop: _Loop, tokens: Sequence[Token], at: int, collected: list[Boundary]) -> int:
        """Gives a loop the token at a place, or the periods there that are like its latest one; returns the place after them."""
        is_active = loop is self._active
        end = loop.repeat(tokens, at) if is_active else at
        if end > at:
            parts = [token.part for token in tokens[at:end]]
            self._own_tokens += len(parts) - parts.count(Part.INFERENCE)
        else:
            self._own_tokens += is_active and loop.is_progress(tokens[at])
            loop.take(tokens[at])
            end += 1
        self._collect(loop, collected)
        return end

    def _loop_of(self, token: Token) -> _Loop | None:
        loop = self._loops.get(token.thread)
        if loop is None and token.part is not Part.INFERENCE:
            if len(self._loops) >= _MOST_THREADS:
                others = [thread for thread, one in self._loops.items() if one is not self._active]
                del self._loops[min(others, key=lambda thread: self._loops[thread].weight)]
            loop = self._loops[token.thread] = _Loop(*self._given)
        return loop

    def _knows_all(self) -> bool:
        loops = self._loops.values() if self._active is None else [self._active]
        return all(loop.is_settled(self._watermark) for loop in loops)

    def _collect(self, loop: _Loop, collected: list[Boundary], end: int | None = None) -> None:
        """Adds a loop's boundaries to ``collected`` if it is the active loop; else counts its steps, and may make it the active loop.

        No boundary is earlier than the one before it, or than the time that is settled. ``end`` replaces the latter for the end of the
        last segment, when the recording ends.
        """
        if loop.walk is None:
            return
        boundaries, loop.walk.boundaries = loop.walk.boundaries, []
        if self._active is None:
            self._active = loop
        if loop is self._active:
            self.revision += loop.adopted
            loop.adopted = 0
            for boundary in boundaries:
                if boundary.time >= self._forgotten and (self._has_segments or boundary.segment is not None):
                    self._has_segments = True
                    earliest = self._settled if end is None or boundary.segment is not None else end
                    self._latest = max(boundary.time, self._latest, earliest)
                    # The token's data describe the time at which it began.
                    boundary.token = boundary.token if boundary.time == self._latest else 0
                    boundary.time = self._latest
                    collected.append(boundary)
            return
        if loop.since != self._own_tokens:
            loop.since, loop.steps = self._own_tokens, 0
        loop.steps += sum(boundary.segment is Segment.STEP for boundary in boundaries)
        if loop.steps > _QUIET_PERIODS:
            self._active, loop.adopted = loop, 0
            self.revision += 1


def _in_order(tokens: list[Token]) -> list[Token]:
    """Sorts tokens by start; an optimizer step by its end, which shows whether a backward pass ran in it."""
    times = [token.end if token.part in OPTIMIZERS else token.start for token in tokens]
    return [tokens[at] for at in sorted(range(len(tokens)), key=times.__getitem__)]


def _weight(loop: _Loop) -> float:
    return loop.weight
