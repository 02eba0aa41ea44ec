"""Turns the phases of a drain into tokens, from which the cycle of a training loop is learned."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.arrays import is_any_of
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER, Flag, Kind
from otel_torchprof._native.python_sources import untracked
from otel_torchprof._process.give_way import with_pauses

from .step_rules import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_torchprof._columns.batch import Array, Batch

_KNOWN = {int(part): part for part in Part} | {
    int(Part.GENERATE): Part.INFERENCE,
    int(Part.EVALUATING_GENERATE): Part.EVALUATION,
}
"""By number of a phase, its part in a training loop. A call of ``generate`` counts as a call of its model."""
_COLUMNS = ("id", "fwd_thread", "sequence_nr", "start", "end", "thread")
_UNFINISHED, _PHASE = int(Flag.UNFINISHED), int(Kind.PHASE)
_MOST_THREADS = 1000
"""Number of threads for which the end of the last phase is remembered."""


def _unknown(_context: int) -> None:
    """Returns None: no application span is known."""


class PhaseTokens:
    """Selects the top-level phases of drained batches. Not thread-safe.

    Between drains it stores only the open phases, and the end of the last phase of each thread.

    Args:
        began: returns the start of the application span of a context, Unix ns; None if unknown.
    """

    def __init__(self, began: Callable[[int], int | None] = _unknown) -> None:
        self._began = began
        self._holders: set[int] = set()
        self._ends: dict[int, int] = {}

    def take(self, batch: Batch) -> list[Token]:
        """Returns the top-level phases of a batch as tokens, by start, including open ones.

        A token begins with its enclosing calls, labels and spans if these began after the end of the previous phase: a step begins with
        the call of the model, not inside it. Costs 2 us per phase, nothing per operator.
        """
        rows = batch.of_kind(Kind.PHASE)
        if not rows.size and not (batch.opens.kind == Kind.PHASE).any():
            return []
        above = _Above(batch)
        around: dict[int, tuple[_Event, ...]] = {}
        tokens = self._ended(batch, rows, above, around)
        for token, enclosing in self._opens(batch, above):
            tokens.append(token)
            around[token.id] = enclosing
        tokens.sort(key=attrgetter("start"))
        is_known = self._ends.keys() >= {token.thread for token in tokens}
        next_begins = {} if is_known else _second_begins(tokens)
        for token in with_pauses(tokens):
            begin = token.start
            if (enclosing := around.get(token.id, ())) or token.context:
                token.start = min([begin, *self._starts(token, enclosing, next_begins)])
            if self._holders:
                token.holds_backward = token.id in self._holders
            self._ends[token.thread] = begin if token.end == NEVER else token.end
        self._holders &= set(batch.opens.id.tolist())
        while len(self._ends) > _MOST_THREADS:
            del self._ends[next(iter(self._ends))]
        return tokens

    def _starts(self, token: Token, enclosing: Iterable[_Event], next_begins: Mapping[int, int]) -> list[int]:
        """Returns the starts of the enclosing events with which a token begins. ``next_begins``: from :func:`_second_begins`."""
        last = self._ends.get(token.thread)
        if last is None:  # an ancestor that does not end before the phase repeats may be the whole program
            return [event.start for event in enclosing if event.end <= next_begins.get(token.thread, NEVER - 1)]
        starts = [event.start for event in enclosing if event.start >= last]
        of_span = self._began(token.context) if token.context else None
        return starts if of_span is None or of_span < last else [*starts, of_span]

    def _ended(self, batch: Batch, rows: Array, above: _Above, around: dict[int, tuple[_Event, ...]]) -> list[Token]:
        """Returns the top-level phases among the rows, and adds the ancestors of each, by id; notes those that contain a backward pass."""
        numbers = batch["fwd_thread"][rows]
        rows = rows[(numbers >= min(_KNOWN)) & (numbers <= max(_KNOWN))]
        idents = [thread.ident for thread in batch.threads]
        ids, parts, *columns, threads = (batch[name][rows].tolist() for name in _COLUMNS)
        contexts = batch.columns.get("context")
        columns += [map(idents.__getitem__, threads), repeat(0) if contexts is None else contexts[rows].tolist()]
        tokens = list(with_pauses(map(Token, ids, map(_KNOWN.__getitem__, parts), *columns)))
        for at in np.flatnonzero(batch["flags"][rows] & _UNFINISHED).tolist():
            tokens[at].is_cut = True
        inside: set[int] = set()
        places = np.flatnonzero(above.is_any(rows))
        for at, enclosing in zip(with_pauses(places.tolist()), above.of_rows(rows[places]), strict=True):
            token = tokens[at]
            around[token.id] = enclosing
            holders = [event.id for event in enclosing if event.kind == _PHASE]
            if holders:
                inside.add(token.id)
            if holders and token.part is Part.BACKWARD:
                self._holders.add(holders[-1])
        return [token for token in tokens if token.id not in inside] if inside else tokens

    def _opens(self, batch: Batch, above: _Above) -> Iterator[tuple[Token, tuple[_Event, ...]]]:
        """Yields the top-level phases among the open events, and their ancestors."""
        opens = batch.opens
        for at in np.flatnonzero(opens.kind == Kind.PHASE).tolist():
            part = _KNOWN.get(int(opens.fwd_thread[at]))
            enclosing = tuple(above.open(int(opens.parent[at])))
            if part is None or any(event.kind == Kind.PHASE for event in enclosing):
                continue
            ident, context = batch.threads[opens.thread[at]].ident, int(opens.context[at])
            key, start = int(opens.sequence_nr[at]), int(opens.start[at])
            yield Token(int(opens.id[at]), part, key, start, NEVER, ident, context), enclosing


def _second_begins(tokens: Iterable[Token]) -> dict[int, int]:
    """Returns, by thread, when a phase with part and key of the thread's first one begins again."""
    firsts: dict[int, Token] = {}
    begins: dict[int, int] = {}
    for token in tokens:
        first = firsts.setdefault(token.thread, token)
        if token is not first and (token.part, token.key) == (first.part, first.key):
            begins.setdefault(token.thread, token.start)
    return begins


@untracked
@dataclass(eq=False)
class _Event:
    """An ancestor of a phase."""

    id: int
    kind: int
    start: int
    end: int
    """:data:`NEVER` while it is open."""


class _Above:
    """Enclosing events of an event, innermost first: rows of the batch, then open events."""

    def __init__(self, batch: Batch) -> None:
        self._opened = batch.opens
        self._columns = tuple(batch[name] for name in ("parent", "id", "kind", "start", "end"))
        self._outer = dict(zip(batch.outer_rows.tolist(), batch.outer_parents.tolist(), strict=True))
        self._opens = {id_: at for at, id_ in enumerate(batch.opens.id.tolist())}

    def is_any(self, rows: Array) -> Array:
        """Mask of the rows that have a parent."""
        return (self._columns[0][rows] >= 0) | is_any_of(rows, tuple(self._outer))

    def of_rows(self, rows: Array) -> list[tuple[_Event, ...]]:
        """Returns the ancestors of each row."""
        parents, *columns = self._columns
        above: list[tuple[_Event, ...]] = [()] * len(rows)  # lists would be tracked by the garbage collector
        places = np.arange(len(rows))
        while places.size:
            for place, row in zip(places.tolist(), rows.tolist(), strict=True) if self._outer else ():
                above[place] += tuple(self.open(self._outer.get(row, 0)))
            rows = parents[rows]
            places, rows = places[rows >= 0], rows[rows >= 0]
            events = map(_Event, *(column[rows].tolist() for column in columns))
            for place, event in zip(places.tolist(), events, strict=True):
                above[place] += (event,)
        return above

    def open(self, id_: int) -> Iterator[_Event]:
        """Yields the open event with an id, then its ancestors; nothing if it has ended."""
        opens = self._opened
        while (at := self._opens.get(id_)) is not None:
            yield _Event(id_, int(opens.kind[at]), int(opens.start[at]), NEVER)
            id_ = int(opens.parent[at])
