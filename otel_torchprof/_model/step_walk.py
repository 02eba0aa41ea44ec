"""Finds the begins of a training loop's segments, given the rule that ends a step."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import NEVER

from .step_rules import OPTIMIZERS, Boundary

if TYPE_CHECKING:
    from .step_rules import Rule, Token

_SILENCE = 30_000_000_000
"""ns without a token after which a loop is over; a shorter stall is a part of its step."""
_SILENT_PERIODS = 3
"""The same, in periods, for loops whose steps are longer."""
_BEFORE_STEPS = (None, Segment.SETUP)
_MOST_PENDING = 1024
_MOST_KEYS = 64


class Walk:
    """Walks the tokens of one thread, in order, and creates the boundaries.

    A step begins with the first batch, pass or zeroing after the anchor of the previous step. Only a later pass shows
    whether these are for training; until then they are pending.

    Args:
        rule: the rule that ends a step; it may be replaced.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.boundaries: list[Boundary] = []
        """Boundaries not yet taken."""
        self.begins: deque[int] = deque(maxlen=2)
        """Ids of the tokens with which the latest segments began, since this was last cleared."""
        self.has_ended_period = False
        """Whether a period ended with the latest token."""
        self.waits = True
        """Whether the next pass of training begins a step."""
        self._segment: Segment | None = None
        self._first: Token | None = None
        self._latest: Token | None = None
        self._end = 0  # end of the segment's latest token, NEVER while that is open
        self._trained_end = 0
        """End of the latest training pass or optimizer step."""
        self._pauses: deque[int] = deque(maxlen=8)
        """Times from ``_trained_end`` to the start of the next step, for the latest steps."""
        self._segment_start = self._period = 0
        self._has_compute = self._has_backward = False
        self._strange: int | None = None
        """Key of an optimizer that the rule does not have, and that stepped in the current step."""
        self._pending: list[Token] = []
        self._zeroing_ends_steps = False
        self._of_training: dict[int, None] = {}
        self._of_evaluation: dict[int, None] = {}
        self._inferred = 0
        """End of the latest call without gradients since the latest token; 0 for none."""
        self._anew = 0
        """Id of the latest batch that continues no evaluation: it follows training, or is its loader's first."""

    def walk(self, token: Token) -> None:
        """Takes the next token."""
        part = token.part
        is_own_inference = part is Part.INFERENCE and self._is_given_loader
        if part is Part.INFERENCE and not is_own_inference:
            self._inferred = token.end
            if self.waits and self._segment is Segment.EVALUATION:
                self._end = token.end
            return
        if self._first is None:
            self._first = token
        before, self._latest = self._latest, token
        self.has_ended_period = self._precedes_step(token)
        if self.has_ended_period:
            self.waits = True
            self._pending.clear()
        if part is Part.NEXT:
            self._ask(token, before)
        elif part is Part.ZEROING:
            self._zero(token)
        elif part is Part.EVALUATION:
            self._evaluate(token)
        elif part is Part.SAVE:
            self._release()
            self._cut(token, Segment.CHECKPOINT, token.end)
        else:
            self._train(token)
        self._inferred = 0

    @property
    def state(self) -> tuple[object, ...] | None:
        """Between two steps, all on which the decisions about the next tokens depend, without times; None elsewhere."""
        if not self.waits or self._segment is not Segment.STEP or self._pending or self._inferred:
            return None
        keys = tuple(self._of_training), tuple(self._of_evaluation)
        return *keys, self._zeroing_ends_steps, self._strange, self._has_compute, self._has_backward

    def repeat(self, first: Token, last: Token) -> None:
        """Walks a whole period that is like the one before: its step begins with ``first`` and ends with ``last``."""
        self._note_pause(first)
        self._emit(first.start, first, Segment.STEP)
        self._latest, self._end, self._trained_end = last, last.end, last.end

    def close(self, end: int) -> None:
        """Sets the end of the latest token, which was open."""
        if self._pending and self._pending[-1].end == NEVER:
            self._pending[-1] = replace(self._pending[-1], end=end)
        if self._inferred == NEVER:
            self._inferred = end
        if self._end == NEVER:
            self._end = end
        if self._trained_end == NEVER:
            self._trained_end = end

    def is_settled(self, watermark: int) -> bool:
        """Whether everything up to the watermark belongs to the current segment."""
        if self.waits and (self._pending or (self._segment is Segment.STEP and self._end < watermark)):
            return False
        return not self._is_silent(watermark)

    def settle(self, watermark: int) -> None:
        """Decides pending tokens: a batch that is still loading is for training if its loader was, and a silent loop is over."""
        if self.waits and self._is_asking and self._pending[-1].key in self._of_training:
            self._begin(self._pending[-1])
            self._end = NEVER
            return
        self._release()
        if self._is_silent(watermark):
            self.finish(watermark)

    def finish(self, end: int) -> None:
        """Ends the loop: its last segment ends with its last token."""
        self._release()
        if self._segment is not None and self._latest is not None:
            self._emit(min(self._end, end), self._latest, None)
        self._pending.clear()
        self.waits = True

    @property
    def _is_given_loader(self) -> bool:
        return self.rule.is_given and self.rule.part is Part.NEXT

    @property
    def _is_asking(self) -> bool:
        """Whether a loader is still loading the batch requested last."""
        return bool(self._pending) and self._pending[-1].part is Part.NEXT and self._pending[-1].end == NEVER

    def _is_silent(self, watermark: int) -> bool:
        if self._segment is None or self._is_asking:
            return False
        return watermark - self._end > max(_SILENCE, _SILENT_PERIODS * self._period)

    def _is_of_evaluation(self, key: int) -> bool:
        return key in self._of_evaluation and key not in self._of_training

    def _is_of_training(self, key: int) -> bool:
        return key in self._of_training and key not in self._of_evaluation

    def _precedes_step(self, token: Token) -> bool:
        """Whether a step ended before this token, in a loop without an optimizer, or with one that the rule does not have."""
        rule = self.rule
        if self._strange is not None and not self.waits:
            is_alone = token.part is Part.ZEROING and token.key == self._strange and not self._of_training
            return is_alone or token.part is Part.NEXT
        if rule.part in OPTIMIZERS or self.waits or not (self._has_backward or (rule.is_given and self._has_compute)):
            return False
        if token.part is rule.part:
            return rule.key in {0, token.key}
        return token.part in {Part.EVALUATION, Part.SAVE}

    def _ask(self, token: Token, before: Token | None) -> None:
        """Makes a batch pending until a pass shows whether it is for training or evaluation."""
        self._release(token.key)
        key = token.key
        is_evaluating = bool(self._inferred) or (before is not None and before.part is Part.EVALUATION)
        if not is_evaluating and (before is None or before.part is not Part.NEXT or before.key == key):
            self._anew = token.id
        elif self._segment is Segment.EVALUATION and self._is_of_evaluation(key):
            self._end = token.end
            return
        if self._segment in _BEFORE_STEPS:
            self._try(key)
        else:
            self._evaluate_batches(key)
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(token)

    def _try(self, key: int) -> None:
        """Handles a batch before all steps: a pass between two batches of a loader without training, such as a dry run, is evaluation."""
        batch = next((one for one in reversed(self._pending) if one.part is Part.NEXT), None)
        has_passed = bool(self._pending) and self._pending[-1].part is Part.FORWARD
        if (self._inferred or has_passed) and batch is not None and batch.key == key:
            _add(self._of_evaluation, key)
        if has_passed:
            self._pending.clear()

    def _evaluate_batches(self, key: int = 0) -> None:
        """Makes pending batches with passes and no training an evaluation, when their loader or that of training gets the next request.

        A single batch of another loader may be for training, such as the dataset of the next epoch.
        """
        pending = self._pending
        has_passed = bool(pending) and pending[-1].part is Part.FORWARD
        if not (self._inferred or has_passed) or self._is_given_loader or not (self.waits or self._is_done):
            return
        batches = [place for place, one in enumerate(pending) if one.part is Part.NEXT]
        batch = pending[batches[-1]] if batches else None
        if batch is None or batch.key in self._of_training or not (key in {0, batch.key} or key in self._of_training):
            return
        if not key and has_passed and batch.key not in self._of_evaluation:
            return
        first = batches[-1]
        for place in reversed(batches):
            if pending[place].key != batch.key:
                break
            first = place
        _add(self._of_evaluation, batch.key)
        self._pending, self.waits = pending[:first], True
        self._cut(pending[first], Segment.EVALUATION, max(self._inferred, pending[-1].end))

    @property
    def _is_done(self) -> bool:
        """Whether the backward pass of a step without an optimizer has come."""
        return self.rule.part not in OPTIMIZERS and self._has_backward

    def _zero(self, token: Token) -> None:
        if self.waits and len(self._pending) < _MOST_PENDING:
            self._pending.append(token)
        self._end = token.end

    def _evaluate(self, token: Token) -> None:
        """Begins an evaluation with the batches just before it, unless their dataset is only used for training.

        After a training batch it may be a pass over that batch, for labels or actions; the following tokens decide.
        """
        pending, first = self._pending, token
        latest = pending[-1] if pending else None
        if self.waits and latest is not None and latest.part is Part.EVALUATION:
            pending[-1] = replace(latest, end=token.end)
            return
        if self.waits and latest is not None and latest.part is Part.NEXT and self._is_of_training(latest.key):
            pending.append(token)
            return
        while pending and pending[-1].part is Part.NEXT and (first is token or pending[-1].key == first.key):
            first = pending.pop()
            _add(self._of_evaluation, first.key)
        self._cut(first, Segment.EVALUATION, token.end)

    def _release(self, key: int = 0) -> None:
        """Makes pending evaluation passes after a training batch an evaluation, as no training followed them."""
        places = [place for place, one in enumerate(self._pending) if one.part is Part.EVALUATION]
        if places:
            before, first, after = (
                self._pending[places[0] - 1],
                self._pending[places[0]],
                self._pending[places[0] + 1 :],
            )
            if self._segment is Segment.EVALUATION and before.key == key:
                _add(self._of_evaluation, key)
            self._cut(first, Segment.EVALUATION, first.end)
            self._pending += after
        elif not key:
            self._evaluate_batches()

    def _cut(self, first: Token, segment: Segment, end: int) -> None:
        """Begins an evaluation or a checkpoint; inside a step with training passes, it stays a part of the step."""
        begin = self._end_of_step(first) if self._segment is Segment.STEP else first.start
        self._pending.clear()
        self._end = end
        if not self.waits and self._has_compute:
            return
        if self._segment is not segment:
            self._emit(begin, first, segment)
        self.waits = True

    def _end_of_step(self, first: Token) -> int:
        """Returns the end of a step before another segment: after all its phases, with the usual pause after its passes.

        The time after that, such as the wait for another loader's workers, belongs to the next segment.
        """
        usual = round(statistics.median(self._pauses)) if self._pauses else 0
        ends = [self._end, *(one.end for one in self._pending if one.start < first.start)]
        return min(first.start, max(self._trained_end + usual, max(ends) + 1))

    def _train(self, token: Token) -> None:
        """Takes a training pass or an optimizer step."""
        part = token.part
        is_optimizer = part in OPTIMIZERS
        if self._is_given_loader and self.waits and not self._nexts():
            return
        if part is Part.FORWARD and self._segment in {None, Segment.SETUP} and not self._is_given_loader:
            if not self._pending or self._pending[-1].part is not Part.FORWARD:
                self._pending.append(token)
            return
        if part is Part.FORWARD and self.waits and self._may_evaluate:
            if len(self._pending) < _MOST_PENDING:
                self._pending.append(token)
            return
        if self.waits and (not is_optimizer or token.holds_backward or self._nexts()):
            self._begin(token)
        if not self.waits:
            if self._pending and not self._is_of_evaluation(self._pending[-1].key):
                _add(self._of_training, self._pending[-1].key)
            self._pending.clear()
            self._has_compute = True
            self._has_backward |= part is Part.BACKWARD or token.holds_backward
            self._note_strange(token)
        self._end = self._trained_end = token.end
        if is_optimizer and (part, token.key) == (self.rule.part, self.rule.key):
            self.waits = self.has_ended_period = True

    def _note_strange(self, token: Token) -> None:
        """Stores an optimizer whose step may have ended a training step, though the rule does not have it."""
        rule = self.rule
        is_known = rule.is_given or rule.part not in OPTIMIZERS or (token.part, token.key) in rule.optimizers
        if token.part in OPTIMIZERS and self._has_backward and not is_known:
            self._strange = token.key

    def _begin(self, token: Token) -> None:
        """Begins a step with this token as its first pass."""
        first = self._first_of_step(token)
        if self._segment is Segment.STEP:
            self._note_pause(first)
        self._emit(first.start, first, Segment.STEP)
        self._pending.clear()
        self.waits = self._has_compute = self._has_backward = False
        self._strange = None

    def _note_pause(self, first: Token) -> None:
        if first.start >= self._trained_end:
            self._pauses.append(first.start - self._trained_end)

    def _first_of_step(self, token: Token) -> Token:
        """Returns the first batch, else the first zeroing, else the pass itself.

        Zeroing before the batch belongs to the step that ends; in such a loop also if no batch follows because it was prefetched.
        """
        nexts = self._nexts()
        zeroing = next((place for place, one in enumerate(self._pending) if one.part is Part.ZEROING), None)
        if nexts:
            if zeroing is not None and self._segment is Segment.STEP:
                self._zeroing_ends_steps = zeroing < self._pending.index(nexts[0])
            for one in nexts:
                _add(self._of_training, one.key)
            return nexts[0]
        for one in self._pending:
            if one.part is Part.FORWARD or (one.part is Part.ZEROING and not self._zeroing_ends_steps):
                return one
        return token

    @property
    def _may_evaluate(self) -> bool:
        """Whether the latest batch is from a loader that the loop has not used for training."""
        batch = next((one for one in reversed(self._pending) if one.part is Part.NEXT), None)
        is_unknown = batch is not None and batch.key not in self._of_training
        return is_unknown and bool(self._of_training) and not self._is_given_loader

    def _nexts(self) -> list[Token]:
        """Returns the pending batches that are for training: not those of an evaluation, nor the ones before them.

        Called when a training pass follows. A batch of a dataset used for evaluation is for training if it continues no evaluation.
        """
        if self._is_given_loader:
            return [one for one in self._pending if (one.part, one.key) == (Part.NEXT, self.rule.key)]
        nexts: list[Token] = []
        for one in reversed(self._pending):
            if one.part is not Part.NEXT:
                continue
            if self._is_of_evaluation(one.key) and one.id != self._anew:
                break
            nexts.append(one)
        nexts.reverse()
        if self._segment is not Segment.STEP and len(nexts) > 1 and nexts[0].key in self._of_evaluation:
            del nexts[0]  # the request that found the evaluation's loader exhausted
        return nexts

    def _emit(self, time: int, token: Token, segment: Segment | None) -> None:
        if self._segment is None and self._segment_start == 0 and self._first is not None and self._first.start < time:
            first = self._first
            self.boundaries.append(Boundary(first.start, first.thread, first.id, Segment.SETUP))
        if self._segment is Segment.STEP:
            self._period = time - self._segment_start
        self._segment_start = time
        self._segment = segment
        self.boundaries.append(Boundary(time, token.thread, token.id, segment))
        self.begins.append(token.id)


def _add(keys: dict[int, None], key: int) -> None:
    """Adds a key and drops the oldest ones: a program may create a dataset for every epoch."""
    keys.pop(key, None)
    keys[key] = None
    if len(keys) > _MOST_KEYS:
        del keys[next(iter(keys))]
