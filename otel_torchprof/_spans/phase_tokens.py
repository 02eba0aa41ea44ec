"""The phases of a drain, as the cycle of a training loop is learned from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER, Kind

from .step_tokens import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.batch import Batch

_KNOWN = {int(part): part for part in Part}
_MOST_THREADS = 1000
"""Of which it is known when their last phase ended."""


def _unknown(_context: int) -> None:
    """No span of the application is known."""


class PhaseTokens:
    """Picks the top-level phases out of drained batches, one after another. For one thread at a time.

    What it remembers from one drain to the next is about the phases that are open, and when the last ones ended.

    Args:
        began: when the span of the application that a context stands for began, Unix ns, where that is known.
    """

    def __init__(self, began: Callable[[int], int | None] = _unknown) -> None:
        self._began = began
        self._holders: set[int] = set()
        self._ends: dict[int, int] = {}

    def of(self, batch: Batch) -> list[Token]:
        """The phases that are in no other, in the order in which they began; those that are open too.

        A token begins with the calls, labels and spans that it is in, as far as these began after the phase before it had ended: a step
        begins with the call of the model, and not somewhere inside of it. Some us per phase, nothing per operator.
        """
        if not (batch["kind"] == Kind.PHASE).any() and not (batch.opens.kind == Kind.PHASE).any():
            return []
        found = sorted(self._top_level(batch), key=lambda one: one.token.start)
        tokens = []
        for token, starts in found:
            last = self._ends.get(token.thread, token.start)  # what is around the first may be the whole program
            of_span = self._began(token.context) if token.context else None
            around = [*starts, of_span] if of_span is not None else starts
            begin = min([start for start in around if start >= last], default=token.start)
            tokens.append(token._replace(start=min(begin, token.start), holds_backward=token.id in self._holders))
            self._ends[token.thread] = token.start if token.end == NEVER else token.end
        self._holders &= set(batch.opens.id.tolist())
        while len(self._ends) > _MOST_THREADS:
            del self._ends[next(iter(self._ends))]
        return tokens

    def _top_level(self, batch: Batch) -> Iterator[_Found]:
        above = _Above(batch)
        for row in np.flatnonzero(batch["kind"] == Kind.PHASE).tolist():
            part = _KNOWN.get(int(batch["fwd_thread"][row]))
            enclosing = list(above.row(row))
            holder = next((event.id for event in reversed(enclosing) if event.kind == Kind.PHASE), None)
            if part is not None and holder is None:
                yield _Found(_of_row(batch, row, part), [event.start for event in enclosing])
            elif part is Part.BACKWARD and holder is not None:
                self._holders.add(holder)
        for at in np.flatnonzero(batch.opens.kind == Kind.PHASE).tolist():
            part = _KNOWN.get(int(batch.opens.fwd_thread[at]))
            enclosing = list(above.open(int(batch.opens.parent[at])))
            if part is not None and not any(event.kind == Kind.PHASE for event in enclosing):
                yield _Found(_of_open(batch, at, part), [event.start for event in enclosing])


class _Found(NamedTuple):
    token: Token
    starts: list[int]
    """Of what it is in, Unix ns."""


class _Event(NamedTuple):
    """Something that a phase is in."""

    id: int
    kind: int
    start: int


def _of_row(batch: Batch, row: int, part: Part) -> Token:
    context = batch.columns.get("context")
    return Token(
        int(batch["id"][row]),
        part,
        int(batch["sequence_nr"][row]),
        int(batch["start"][row]),
        int(batch["end"][row]),
        batch.threads[batch["thread"][row]].ident,
        0 if context is None else int(context[row]),
    )


def _of_open(batch: Batch, at: int, part: Part) -> Token:
    opens = batch.opens
    ident = batch.threads[opens.thread[at]].ident
    return Token(
        int(opens.id[at]),
        part,
        int(opens.sequence_nr[at]),
        int(opens.start[at]),
        NEVER,
        ident,
        int(opens.context[at]),
    )


class _Above:
    """What an event is in, innermost first: rows of the batch, and what is open."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._outer = dict(zip(batch.outer_rows.tolist(), batch.outer_parents.tolist(), strict=True))
        self._opens = {id_: at for at, id_ in enumerate(batch.opens.id.tolist())}

    def row(self, row: int) -> Iterator[_Event]:
        """Of a row."""
        batch = self._batch
        while (parent := int(batch["parent"][row])) >= 0:
            yield _Event(int(batch["id"][parent]), int(batch["kind"][parent]), int(batch["start"][parent]))
            row = parent
        yield from self.open(self._outer.get(row, 0))

    def open(self, id_: int) -> Iterator[_Event]:
        """An open event and what that is in, by its id; nothing of one that has ended."""
        opens = self._batch.opens
        while (at := self._opens.get(id_)) is not None:
            yield _Event(id_, int(opens.kind[at]), int(opens.start[at]))
            id_ = int(opens.parent[at])
