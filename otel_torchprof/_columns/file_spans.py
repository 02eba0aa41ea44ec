"""The spans of a file that was read: their traces, their ids and those of their parents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class FileSpans:
    """An entry per span; those that are steps, or no events, such as the job, come first. Immutable."""

    event: npt.NDArray[np.uint64]
    """Id of the event; 0: it is none."""
    trace: npt.NDArray[np.uint32]
    """Index into ``Batch.names``: the trace id, in 32 hexadecimal digits."""
    span_id: npt.NDArray[np.uint64]
    parent_id: npt.NDArray[np.uint64]
    """0 for the root of a trace; its span may be in no file."""
    name: npt.NDArray[np.uint32]
    """Index into ``Batch.names``; as ``start`` and ``end``, of the spans that come first only."""
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.event)

    @property
    def has_requests(self) -> bool:
        """Whether an event has no span above it, as in a service: a profile and a training loop have steps around all."""
        of_events = slice(len(self.name), None)
        return not np.isin(self.parent_id[of_events], self.span_id).all()
