"""The collectives of a recording, put beside the events of its batches."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._native.torch_library import MOST_COLLECTIVES, no_collectives
from otel_torchprof._process import threads
from otel_torchprof.errors import TorchLibraryError

from .source import Source

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import Session
    from otel_torchprof._native.torch_library import Collecting, Collectives, TorchLibrary

_logger = logging.getLogger("otel_torchprof")

_OPERATORS = "c10d::"
_NAMES = ("group", "ranks", "backend", "dtype", "reduce_op")
"""The columns that are indices into the names."""


class CollectiveSource(Source):
    """Records details of the collectives of one session, whose operators must be recorded. Thread-safe.

    Args:
        library: records torch's operators.
        most: maximum number of records that wait for their batch; the black box stores its own.
    """

    def __init__(self, library: TorchLibrary, most: int = MOST_COLLECTIVES) -> None:
        self._library = library
        self._most = most
        self._collecting: Collecting | None = None
        self._lock = threads.RLock()  # a signal handler may stop it in the middle of a drain
        self._waiting = no_collectives()
        self._unplaced = 0

    def start(self, session: Session) -> None:
        """Starts recording; without effect if torch was built without distributed."""
        try:
            self._collecting = self._library.report_collectives(session, self._most)
        except TorchLibraryError as error:  # torch was built without distributed, so there are no collectives
            _logger.info("collectives are recorded as any operator: %s", error)

    def stop(self) -> None:
        """Stops recording; :meth:`decorate` still adds the collectives so far. Repeated calls have no effect."""
        with self._lock:
            if self._collecting is not None:
                self._waiting = _both(self._waiting, self._collecting.stop())

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with details of its collectives, open ones included."""
        if self._collecting is None:
            return batch
        with self._lock:
            known, self._waiting = _both(self._waiting, self._collecting.take()), no_collectives()
        if not len(known["event"]):
            return replace(batch, collectives=known)
        row, is_open = rows_of(batch, known["event"]), np.isin(known["event"], batch.opens.id)
        # Collectives with names newer than the batch's are open; the next drain has them.
        here = ((row >= 0) | is_open) & (np.stack([known[name] for name in _NAMES]).max(axis=0) < len(batch.names))
        self._keep(known, row < 0)
        displayed = _chosen(known, here & _is_collective(batch, known["event"], row))
        return replace(batch, collectives=displayed)

    def notes(self) -> list[str]:
        """Notes for readers of the recording, one sentence each."""
        lost = self._unplaced + (0 if self._collecting is None else self._collecting.lost)
        return [f"collectives without group, number and size: {lost}; there was no room for more"] if lost else []

    def _keep(self, known: Collectives, waits: npt.NDArray[np.bool_]) -> None:
        """Stores collectives until their event is drained; a limited number, since a dropped event is never drained."""
        waiting = np.flatnonzero(waits)
        self._unplaced += max(len(waiting) - MOST_COLLECTIVES, 0)
        with self._lock:
            self._waiting = _both(_chosen(known, waiting[-MOST_COLLECTIVES:]), self._waiting)


def _is_collective(batch: Batch, events: npt.NDArray[np.uint64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mask of the events that are operators of c10d. If torch does not record such an operator, its enclosing event has its place."""
    opens = batch.opens
    name_of = dict(zip(opens.id.tolist(), opens.name.tolist(), strict=True))
    names = np.array([name_of.get(event, 0) for event in events.tolist()], dtype=np.int64)
    if len(batch):
        names = np.where(row >= 0, batch["name"][row], names)
    used, which = np.unique(names, return_inverse=True)
    is_operator = np.array([batch.names[name].startswith(_OPERATORS) for name in used.tolist()], dtype=np.bool_)
    return is_operator[which]


def _both(one: Collectives, other: Collectives) -> Collectives:
    if not len(one["event"]) or not len(other["event"]):
        return one if len(one["event"]) else other
    return {name: np.concatenate((column, other[name])) for name, column in one.items()}


def _chosen(known: Collectives, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Collectives:
    return {name: column[rows] for name, column in known.items()}
