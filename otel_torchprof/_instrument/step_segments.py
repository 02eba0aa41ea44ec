"""Begins and ends of steps: reported by the program or its framework, else learned from phases. Drained events wait for them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import Part, Segment, SegmentChange
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._model.phase_tokens import PhaseTokens
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._model.step_rules import OPTIMIZERS, Token
from otel_torchprof._process import threads
from otel_torchprof._process.give_way import with_pauses, without_yielding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.phases import Usage
    from otel_torchprof._model.step_rules import Boundary
    from otel_torchprof._model.steps import Steps
    from otel_torchprof._record.step_marks import StepMark

    from .foresight import Foresight

MAX_HELD_NS = 30_000_000_000
"""Longest time that events are buffered until the rule that ends steps is learned, which needs two steps."""
HELD_BETWEEN_STEPS_NS = 4_000_000_000
"""The same if the rule is known and the loop is between two steps, where it may be waiting for a long time."""
MAX_HELD_EVENTS = 1 << 18
"""Most events that are buffered: 16 MiB of columns, which is more than a drain has."""
_MOST_CONTEXTS = MAX_HELD_EVENTS
"""Most phases whose contexts are stored: those of a drain, each until its segment is known."""
_BEGINS = {segment: SegmentChange(segment, ends_step=False) for segment in Segment}
_TRAINING = frozenset({Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.ZEROING})


class StepRule(NamedTuple):
    """Rule that ends a step: a learned one, ``step()`` of the program, an optimizer, or the next batch of a loader."""

    is_program: bool = False
    """Whether only ``step()`` ends a step."""
    optimizer: Any = None
    loader: Any = None

    @property
    def is_learned(self) -> bool:
        """Whether the rule is to be learned."""
        return not self.is_program and self.optimizer is None and self.loader is None

    @classmethod
    def checked(cls, steps: Any) -> StepRule:
        """Checks the argument ``steps`` of ``instrument()``.

        Raises:
            TypeError, ValueError: it is no allowed value; the message has the value.
        """
        allowed = "'auto', 'program', an optimizer of torch's, or a DataLoader"
        if isinstance(steps, str):
            if steps not in {"auto", "program"}:
                raise ValueError(f"steps is {steps!r}; it must be {allowed}")
            return cls(steps == "program")
        if hasattr(steps, "param_groups") and callable(getattr(steps, "step", None)):
            return cls(optimizer=steps)
        if hasattr(steps, "dataset") and hasattr(steps, "__iter__"):
            return cls(loader=steps)
        raise TypeError(f"steps is {steps!r}; it must be {allowed}")

    def cycle(self) -> StepCycle | None:
        """A new cycle that learns or follows the rule; None if the program ends steps itself."""
        if self.is_program:
            return None
        loader = None if self.loader is None else id(self.loader.dataset)
        return StepCycle(optimizer=None if self.optimizer is None else id(self.optimizer), loader=loader)


class HeldBatch(NamedTuple):
    """A drained batch that is buffered until the segments of its events are known."""

    batch: Batch
    final: bool
    """Whether it is the last one."""
    known_until: int
    """Unix ns: all events up to then are in it, or in earlier batches. The program continues while a batch is processed."""


class StepSegments:
    """The segments of one recording. Not thread-safe, except :meth:`report`.

    Segments have two sources, merged in order of time: reports, and a rule that is learned while there are no reports. A framework
    reports its loop from begin to end; the rule for loops before and after it is learned anew for each. ``step()`` of the program
    ends all learning. The begin of a framework's loop waits until earlier events are drained, since they may contain the end of
    another loop. An evaluation that a framework reports outside of its training loop is treated like a hand-written evaluation.

    Args:
        steps: gets the segments.
        on_first: called with the time at which the first one begins, Unix ns.
        rule: what ends a step.
        began: returns the start of the span of a context, Unix ns; None if unknown.
        usage: returns the operating system's counters of the thread at the begin of the phase with an id, if they were read.
        mute: called at a reported begin with True if events outside of contexts are not to be recorded, else with False.
        foresight: gets what is learned; None if every step is recorded.
    """

    def __init__(
        self,
        steps: Steps,
        on_first: Callable[[int], None],
        rule: StepRule,
        began: Callable[[int], int | None],
        usage: Callable[[int], Usage | None],
        *,
        mute: Callable[[bool], None] | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        self._steps = steps
        self._foresight = foresight
        self._mute = mute
        self._on_first = on_first
        self._began = began
        self._usage = usage
        self._tokens = PhaseTokens(began)
        self._given = rule
        self._cycle: StepCycle | None = rule.cycle()
        """Learns the rule; None if the program marks the ends of steps."""
        self._reports: deque[tuple[StepMark, int]] = deque()
        self._reports_lock = threads.RLock()  # a signal handler may shut down in the middle
        self._is_in_loop = self._had_loop = False
        """Whether a framework's loop runs, and whether one has run."""
        self._evaluation: StepMark | None = None
        """Start of the latest evaluation that a framework reported outside of a training loop."""
        self._evaluates = self._is_own_segment = False
        """Whether that evaluation runs, and whether it is a segment of its own."""
        self._learned_from = self._revisions = self._missing = 0
        self._later: list[Token] = []
        self._waiting: deque[HeldBatch] = deque()
        self._ready = 0
        self._has_drained = False
        self._since = NEVER
        self._first: int | None = None
        self._latest: list[tuple[Part, int]] = []
        self._passed: Counter[tuple[Part, int]] = Counter()
        self._contexts: deque[tuple[int, int, int]] = deque(maxlen=_MOST_CONTEXTS)

    @property
    def rule(self) -> str:
        """The rule in force, for health."""
        cycle = self._cycle
        if cycle is None:
            return "the program says where steps end"
        if self._is_in_loop or (self._had_loop and not cycle.revision):
            return "a trainer says where its steps end"
        is_unknown = not cycle.revision and (self._waiting or not self._has_drained)
        missing = f"; {self._missing} steps before it was known have no span" if self._missing else ""
        return (
            "not known yet, since too little was taken from the recorder so far" if is_unknown else cycle.rule + missing
        )

    @property
    def events(self) -> int:
        """Number of buffered events. Thread-safe."""
        return sum(len(held.batch) for held in tuple(self._waiting))

    @property
    def is_foreseeing(self) -> bool:
        """Whether steps of the learned rule are about to be foreseen: what was drained is not looked at before, as that takes far longer.

        Not before a backward pass: a service has no steps, and its spans would wait.
        """
        cycle, foresight = self._cycle, self._foresight
        is_learned = cycle is not None and cycle.has_trained and not self._is_in_loop
        return is_learned and foresight is not None and foresight.is_near

    def first_training(self, batch: Batch) -> int | None:
        """Start of the first training phase in a batch, Unix ns; None without one."""
        return _first_of(PhaseTokens(self._began).take(batch))

    @property
    def begins_at(self) -> int:
        """Begin of the framework's loop that waits for earlier events, Unix ns; NEVER if none waits."""
        with self._reports_lock:
            return self._reports[0][0].time_ns if self._reports else NEVER

    def report(self, mark: StepMark, context: int) -> None:
        """Takes a report by the program or a framework of what ends and what begins, in a context. Thread-safe."""
        with self._reports_lock:
            self._reports.append((mark, context))
            is_of_program = not mark.change.is_of_loop
            if is_of_program or self._is_in_loop or self._cycle is None:
                self._apply_reports(everything=is_of_program)

    def _apply_reports(self, *, everything: bool = False) -> None:
        """Applies reports up to the begin of the next loop, which waits for earlier events; with ``everything``, all."""
        is_first = True
        while self._reports and (is_first or everything or self._is_in_loop or self._cycle is None):
            self._change(*self._reports[0])
            self._reports.popleft()
            is_first = False

    def _change(self, mark: StepMark, context: int) -> None:
        change, now = mark.change, mark.time_ns
        if self._cycle is not None and not self._is_in_loop:
            self._leave_cycle(self._cycle, change)
        if change.is_of_loop:
            self._is_in_loop, self._learned_from = not change.ends_loop, now
        self._on_first(now)
        self._begin(mark, now, context)

    def _begin(self, mark: StepMark, now: int, context: int) -> None:
        is_detailed = self._steps.change(mark.change, now, context, mark.thread, mark.usage)
        if self._mute is not None:
            self._mute(not is_detailed)

    def _leave_cycle(self, cycle: StepCycle, change: SegmentChange) -> None:
        """Ends the learned rule; loops after a framework's loop are learned anew."""
        self._steps.revision = 0
        self._revisions += cycle.revision
        self._cycle = self._given.cycle() if change.is_of_loop else None
        self._had_loop = True
        if change.ends_step:  # of a step whose begin was not reported
            self._steps.first_step_is(self._first)

    def add(self, batch: Batch, now: int, *, settle: bool, final: bool) -> None:
        """Adds a drained batch.

        Args:
            batch: a batch with the phases of all threads.
            now: time of the drain, Unix ns.
            settle: whether to stop buffering, because a flush was requested.
            final: whether it is the last batch.
        """
        # An exhausted recorder has no watermark, so events until now are known at most.
        if self._cycle is not None:
            self._learn(self._tokens.take(batch), min(batch.watermark, now), final=final)
        if self._foresight is not None:
            self._foresight.look(now)
        cycle = self._cycle  # once: a report on another thread may remove it
        if final and cycle is not None:
            self._apply(cycle, cycle.finish(now))
        is_settled = cycle is None or (cycle.is_settled and self.begins_at == NEVER and not self.is_foreseeing)
        is_known = is_settled or settle or final or self._is_full(now)
        if not final and (self._waiting or not is_known):
            # Returned later by next(): events recorded until then are not in it, even if it was complete when drained.
            batch = replace(batch, watermark=min(batch.watermark, now))
        self._waiting.append(HeldBatch(batch, final, NEVER if final else min(batch.watermark, now)))
        self._has_drained = True
        if not is_known:
            self._since = min(self._since, now)
            return
        if cycle is not None and not cycle.is_settled:
            self._apply(cycle, cycle.settle())
        if self._counts_passed:
            self._passed.update(self._latest)
        self._latest.clear()
        self._ready, self._since, self._first = len(self._waiting), NEVER, None

    def next(self) -> HeldBatch | None:
        """The oldest batch whose segments are known; None if there is none."""
        if not self._ready:
            return None
        self._ready -= 1
        return self._waiting.popleft()

    def _is_full(self, now: int) -> bool:
        longest = HELD_BETWEEN_STEPS_NS if self._cycle is not None and self._cycle.revision else MAX_HELD_NS
        return self.events > MAX_HELD_EVENTS or now - self._since > longest

    def _learn(self, tokens: list[Token], known_until: int, *, final: bool) -> None:
        """Learns from tokens outside of frameworks' loops, and begins each such loop once all earlier tokens are known."""
        tokens = self._later + tokens
        while (cycle := self._cycle) is not None and not self._is_in_loop:
            begins_at = self.begins_at
            own, tokens = tokens, []
            if begins_at != NEVER:
                # By the end of the token: its begin may be that of a call inside which the loop begins.
                own, tokens = _parted(own, begins_at)
            own = self._learned_from_these(own)
            self._note(own)
            self._apply(cycle, cycle.feed(own, min(known_until, begins_at)))
            if begins_at == NEVER or (begins_at > known_until and not final):
                self._later = tokens
                return
            with self._reports_lock, without_yielding():
                if cycle is self._cycle and (self._evaluates or self._reports[0][0].change.is_evaluation):
                    self._evaluate(cycle, *self._reports.popleft())
                elif cycle is self._cycle:
                    if not self._reports[0][0].change.ends_step:
                        self._apply(cycle, cycle.finish(begins_at))
                    self._apply_reports()
        self._later = []

    def _learned_from_these(self, tokens: list[Token]) -> list[Token]:
        """The tokens outside of frameworks' loops, and of the evaluation that one has reported."""
        since, mark = self._learned_from, self._evaluation if self._evaluates else None
        own = [token for token in tokens if token.start >= since] if since else tokens
        if mark is None:
            return own
        return [token for token in own if token.thread != mark.thread or token.start < mark.time_ns]

    def _evaluate(self, cycle: StepCycle, mark: StepMark, context: int) -> None:
        """Handles a reported begin or end of an evaluation outside of a training loop.

        It is one token for the learned rule, and replaces the tokens of its thread; if nothing was trained, it is a segment.
        """
        now = mark.time_ns
        if begins := not self._evaluates or self._evaluation is None:
            self._evaluation, self._is_own_segment = mark, not cycle.has_trained
        self._evaluates, begun = not mark.change.ends_loop, self._evaluation or mark
        if not self._is_own_segment:  # its time is its id, which differs from the small ids of events
            end = NEVER if self._evaluates else now
            token = Token(begun.time_ns, Part.EVALUATION, 0, begun.time_ns, end, begun.thread, context)
            self._note([token])
            self._apply(cycle, cycle.feed([token], now))
        elif begins:
            self._cycle, self._learned_from = self._given.cycle(), now
            self._on_first(now)
            self._begin(mark, now, context)
        elif not cycle.revision:  # else a step that began on another thread has ended it
            self._steps.end(now, context, mark.thread, mark.usage)

    @property
    def _counts_passed(self) -> bool:
        """Whether steps pass that have no number, since no rule is known yet."""
        return self._cycle is not None and not (self._cycle.revision or self._had_loop)

    def _note(self, tokens: Sequence[Token]) -> None:
        if self._foresight is not None:
            self._foresight.take(tokens)
        if self._counts_passed:
            self._latest.extend(
                (token.part, token.key) for token in tokens if token.part in OPTIMIZERS and token.end != NEVER
            )
        self._contexts.extend(
            (token.start, token.thread, token.context) for token in tokens if token.context or self._contexts
        )
        if self._first is None:
            self._first = _first_of(tokens)

    def _context_before(self, time: int, thread: int) -> int:
        """The last context of a thread before a time: that of the segment that ends there."""
        before = 0
        while self._contexts and self._contexts[0][0] < time:
            _, ident, context = self._contexts.popleft()
            before = context if ident == thread else before
        return before

    def _apply(self, cycle: StepCycle, boundaries: Iterable[Boundary]) -> None:
        if cycle is not self._cycle:
            return
        self._steps.revision = self._revisions + cycle.revision
        if self._passed and cycle.anchor is not None:
            self._missing = self._passed[cycle.anchor]
            self._steps.skip(self._missing)
            self._passed.clear()
        for boundary in with_pauses(boundaries):
            time, thread, token = boundary.time, boundary.thread, boundary.token
            segment = boundary.segment
            context, mark = self._context_before(time, thread) if self._contexts else 0, self._evaluation
            usage = mark.usage if mark is not None and token == mark.time_ns else self._usage(token)
            # 1 ns before its first phase: of two slices with the same start, viewers nest the later one inside the earlier one,
            # and a span inside a running step is sent before that of the step.
            before = time - 1
            if segment is None:
                self._steps.end(time, context, thread)
            elif segment is not Segment.SETUP or not self._steps.begun:  # set-up exists only before all steps
                if not self._steps.begun:
                    self._on_first(before)
                self._steps.change(_BEGINS[segment], before, context, thread, usage)
            if self._foresight is not None:
                self._foresight.step_began(boundary, self._steps.next_number - 1)


def _parted(tokens: Sequence[Token], time: int) -> tuple[list[Token], list[Token]]:
    """The tokens that have ended until a time, and the others."""
    return [token for token in tokens if token.end <= time], [token for token in tokens if token.end > time]


def _first_of(tokens: Iterable[Token]) -> int | None:
    return next((token.start for token in tokens if token.part in _TRAINING), None)
