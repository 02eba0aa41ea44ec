"""The phases of a drain, as the cycle of a training loop is learned from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER, Kind

from .step_tokens import Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch

_KNOWN = {int(part): part for part in Part}


class PhaseTokens:
    """Picks the top-level phases out of drained batches, one after another. For one thread at a time.

    What it remembers from one drain to the next is about the phases that are open.
    """

    def __init__(self) -> None:
        self._holders: set[int] = set()

    def of(self, batch: Batch) -> list[Token]:
        """The phases that are in no other, in the order in which they began; those that are open too. Some us per phase, nothing per operator."""
        rows = np.flatnonzero(batch["kind"] == Kind.PHASE)
        if not rows.size and not (batch.opens.kind == Kind.PHASE).any():
            return []
        around = _Around(batch)
        tokens = []
        for row in rows.tolist():
            part = _KNOWN.get(int(batch["fwd_thread"][row]))
            if part is None:
                continue
            above = around.row(row)
            if above is None:
                tokens.append((part, _row(batch, row)))
            elif part is Part.BACKWARD:
                self._holders.add(above)
        for at in np.flatnonzero(batch.opens.kind == Kind.PHASE).tolist():
            part = _KNOWN.get(int(batch.opens.fwd_thread[at]))
            if part is not None and around.open(at) is None:
                tokens.append((part, _open(batch, at)))
        found = [
            Token(id_, part, key, start, end, thread, context, id_ in self._holders)
            for part, (id_, key, start, end, thread, context) in tokens
        ]
        self._holders &= set(batch.opens.id.tolist())
        return sorted(found, key=lambda token: token.start)


def _row(batch: Batch, row: int) -> tuple[int, ...]:
    context = batch.columns.get("context")
    return (
        int(batch["id"][row]),
        int(batch["sequence_nr"][row]),
        int(batch["start"][row]),
        int(batch["end"][row]),
        batch.threads[batch["thread"][row]].ident,
        0 if context is None else int(context[row]),
    )


def _open(batch: Batch, at: int) -> tuple[int, ...]:
    opens = batch.opens
    ident = batch.threads[opens.thread[at]].ident
    return (
        int(opens.id[at]),
        int(opens.sequence_nr[at]),
        int(opens.start[at]),
        NEVER,
        ident,
        int(opens.context[at]),
    )


class _Around:
    """Which phase is around an event, the outermost one."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._outer = dict(zip(batch.outer_rows.tolist(), batch.outer_parents.tolist(), strict=True))
        self._row_of = {int(batch["id"][row]): row for row in _phase_rows(batch)}
        opens = batch.opens
        self._opens = {int(id_): at for at, id_ in enumerate(opens.id.tolist())}

    def row(self, row: int) -> int | None:
        """The id of the outermost phase that a row is in; None where it is in none."""
        found = None
        for kind, id_ in self._above(row):
            if kind == Kind.PHASE:
                found = id_
        return found

    def open(self, at: int) -> int | None:
        """The same of an open event."""
        found = None
        for kind, id_ in self._above_open(int(self._batch.opens.parent[at])):
            if kind == Kind.PHASE:
                found = id_
        return found

    def _above(self, row: int) -> Iterator[tuple[int, int]]:
        batch = self._batch
        while (parent := int(batch["parent"][row])) >= 0:
            yield int(batch["kind"][parent]), int(batch["id"][parent])
            row = parent
        yield from self._above_open(self._outer.get(row, 0))

    def _above_open(self, id_: int) -> Iterator[tuple[int, int]]:
        """Of an event that is open, or a row of this batch though it began before what is in it."""
        opens = self._batch.opens
        while id_:
            at = self._opens.get(id_)
            if at is None:
                if (row := self._row_of.get(id_)) is not None:
                    yield Kind.PHASE, id_
                    yield from self._above(row)
                return
            yield int(opens.kind[at]), id_
            id_ = int(opens.parent[at])


def _phase_rows(batch: Batch) -> list[int]:
    found: list[int] = np.flatnonzero(batch["kind"] == Kind.PHASE).tolist()
    return found
