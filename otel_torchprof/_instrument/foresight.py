"""Predicts steps that a policy leaves out, so that their operators are not even recorded.

Steps are learned from drained events, long after they began. If the latest steps had the same phases, the next one will have them too:
native code counts the phase with which steps begin, and mutes events outside of contexts in steps that are not selected; the policy is
asked beforehand. A phase that is none of these ends that at once: a wrong prediction loses detail of a step, and never a step.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._model.step_rules import RELEVANT
from otel_torchprof._native import python_sources
from otel_torchprof._process import threads
from otel_torchprof._process.give_way import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from otel_torchprof._model.step_rules import Boundary, Token
    from otel_torchprof._native.recorder import Session

_ALIKE = 3
"""Steps with the same phases after which the next one is foreseen."""
_MOST_TOKENS = 10_000
"""Phases that wait for the step that they are of to end."""
_LONGEST_STEPS = 5
"""Durations of a step after which it is over, though nothing has ended it: what follows may be no step."""
_SHORTEST_NS = 1_000_000_000
_FIRST_LOOKS = 16
"""Drains of the recorder within which the first steps are foreseen, if they ever are."""
_AHEAD = 8_192
"""Steps for which the policy is asked beforehand; of more between two drains, those after them are recorded."""
_ASKED_AT_ONCE = 64
"""Steps for which it is asked between two pauses."""
_ASKING_SECONDS = 0.02
"""Time for that in a drain: ten times what it takes, if the policy is no slow code of the user's."""
_RELEVANT = sum(1 << part for part in (*RELEVANT, Part.GENERATE, Part.EVALUATING_GENERATE))


class Foresight:
    """Predicts the next steps of a loop. Only for the draining thread, except :meth:`stop`.

    Args:
        session: session that leaves steps out.
        selects: whether the step of a number is selected; may be user code.
    """

    def __init__(self, session: Session, selects: Callable[[int], bool]) -> None:
        self._session = session
        self._selects = selects
        self._tokens: deque[Token] = deque(maxlen=_MOST_TOKENS)
        self._steps: deque[tuple[Token, ...]] = deque(maxlen=_ALIKE)
        self._latest = 0  # the phase with which the latest step began
        self._first: int | None = None  # number of the first step that was counted
        self._selected = bytearray()  # the latest decisions, of steps from this count on
        self._selected_from = 1
        self._expected = 0, 0  # a phase with which a later one began, and its number by the count; 0: none
        self._began = 0
        self._longest = self._looks = 0
        self._lock = threads.RLock()
        self._stopped = False

    @property
    def is_near(self) -> bool:
        """Whether steps may be left out soon, for the first time: what was drained can wait for that, at most for some drains."""
        return self._looks < _FIRST_LOOKS and not self._stopped

    def take(self, tokens: Iterable[Token]) -> None:
        """Those of a drain; one that is open comes again when it has ended."""
        self._tokens.extend(token for token in tokens if token.part in RELEVANT and token.end != NEVER)

    def step_began(self, boundary: Boundary, number: int) -> None:
        """A segment began, which is the step of that number if it is one; what came before is the one before it."""
        own = []
        while self._tokens and self._tokens[0].start < boundary.time:
            token = self._tokens.popleft()
            if token.thread == boundary.thread:
                own.append(token)
        if boundary.segment is not Segment.STEP:
            self._steps.clear()
            self._began = 0
            return
        if self._began:
            self._longest = max(boundary.time - self._began, self._longest // 2)
            self._steps.append(tuple(own))
        self._began = boundary.time
        self._latest = boundary.token
        if boundary.token and (self._first is None or self._expected[0] == boundary.token):
            self._match(boundary.token, number)

    def _match(self, token: int, number: int) -> None:
        """Compares the number of the step that began with ``token`` with the count of steps; says it at the first one that was counted."""
        with self._lock:
            if (
                self._stopped
                or not (consumer := self._session.consumer)
                or (state := python_sources.foreseen(consumer)) is None
            ):
                return
            if self._first is None and state[0] == token:
                self._first, self._looks = number, _FIRST_LOOKS
                self._selected.clear()
                self._selected_from = 0
            elif self._first is not None and self._expected[1] != number:
                python_sources.forget_foresight(consumer)
            self._expected = 0, 0

    def look(self, now: int) -> None:
        """After a drain: foresees what can be foreseen, or no more."""
        self._looks += 1
        with self._lock:
            if (
                self._stopped
                or not (consumer := self._session.consumer)
                or (count := self._look(consumer, now)) is None
            ):
                return
        self._ask(count)  # it takes a while, and may be the user's code
        with self._lock:
            if not self._stopped:
                python_sources.select_foreseen(consumer, count, bytes(self._selected))

    def _look(self, consumer: int, now: int) -> int | None:
        """Returns how many steps have begun, if the number of the first is known."""
        state = python_sources.foreseen(consumer)
        is_late = now - self._began > max(_LONGEST_STEPS * self._longest, _SHORTEST_NS)
        if not self._is_alike() or is_late:
            python_sources.forget_foresight(consumer)
        elif state is None:
            step = self._steps[-1]
            phases = tuple((int(token.part), token.key) for token in step)
            python_sources.foresee(consumer, step[0].thread, phases, _RELEVANT)
            self._first, self._expected = None, (0, 0)
        elif self._first is None:
            if 0 < state[0] < self._latest:  # ids of a thread ascend: the first step was lost
                python_sources.forget_foresight(consumer)
        else:
            if self._expected[0] <= self._latest:
                self._expected = state[1], self._first + state[2] - 1
            return state[2]
        return None

    def _ask(self, count: int) -> None:
        """Asks the policy for the steps from the one of that count on."""
        del self._selected[: count - self._selected_from]
        self._selected_from = count
        asking = 0.0  # without the pauses, or few steps would be asked about while the program works
        while len(self._selected) < _AHEAD and asking < _ASKING_SECONDS:
            give_way()
            begin = time.monotonic()
            number = (self._first or 0) + count - 1 + len(self._selected)
            self._selected += bytes(map(self._is_selected, range(number, number + _ASKED_AT_ONCE)))
            asking += time.monotonic() - begin

    def _is_selected(self, number: int) -> bool:
        try:
            return bool(self._selects(number))
        except Exception:  # noqa: BLE001 - logged where the step's spans are chosen, which asks once more
            return True

    def stop(self) -> None:
        """Before another session may have the bit; nothing is foreseen any more. Any thread."""
        with self._lock:
            self._stopped = True
            if consumer := self._session.consumer:
                python_sources.forget_foresight(consumer)

    def _is_alike(self) -> bool:
        """Whether the last steps had the same phases, the first and the last of them once, and were in no span of the application."""
        if len(self._steps) < _ALIKE:
            return False
        first, *others = ([(token.part, token.key, token.thread) for token in step] for step in self._steps)
        if not first or first.count(first[0]) > 1 or first.count(first[-1]) > 1:
            return False
        return others == [first] * len(others) and not any(token.context for step in self._steps for token in step)
