"""Roots that operators without a parent share: one per thread and slice of time, each a trace of its own.

A root per operator costs a trace id, a question to the sampler and a trace group of the span buffer each, which is twenty times what
the operator's own span costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Kind, Scope

from .forest import at_nodes
from .span_table import event_span_ids
from .step_spans import StepSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from otel_torchprof._columns.batch import Batch, RecordedThread

    from .step_spans import Trace

Array = npt.NDArray[Any]

OPERATORS_NAME = "torch.operators"
SLICE_NS = 1_000_000_000
"""Longest time from the begin of a root's first operator to the begin of its last."""
_SYNTHETIC = np.uint64(1 << 63)
"""Set in no event's id: with it, the id of a root's first operator gives the root a span id of its own."""


@dataclass(eq=False)
class _RootSlice:
    """The latest of its thread."""

    root: StepSpan
    until: int
    """Unix ns; what begins then is in the next one."""
    first: int
    """Its first operator among the events of a drain, by their begin; below 0 when that came in an earlier drain."""


class OperatorRoots:
    """The shared roots of operators in one recording. Not thread-safe; memory is bounded by the threads with open roots.

    An operator and its descendants belong to the slice in which it began. Slices depend only on the starts of events, not on the
    times of drains.

    Args:
        key: key of the span ids of events.
        new_trace: creates the trace of a root from its name, -1, and None.
        max_spans: limit of the spans in a trace; a slice ends before the operator that would exceed it.
    """

    def __init__(
        self,
        key: int,
        new_trace: Callable[[str, int, tuple[int, int] | None], Trace],
        max_spans: Callable[[], int],
    ) -> None:
        self._key = key
        self._new_trace = new_trace
        self._max_spans = max_spans
        self._latest: dict[tuple[int, int], _RootSlice] = {}
        self._open: list[StepSpan] = []

    def shared(self, batch: Batch, new: Array, is_root: Array) -> tuple[list[StepSpan], Array]:
        """The roots of operators, and for each of these operators, by rising node, which root it has.

        Args:
            batch: that is drained.
            new: nodes of trees below shared roots that no drain has seen before.
            is_root: for each of them whether it is an operator that needs such a root.
        """
        roots_found: list[StepSpan] = []
        which = np.empty(len(new), dtype=np.int64)
        limit = max(self._max_spans() - 1, 1)
        thread, start, ids = (at_nodes(batch, column, new) for column in ("thread", "start", "id"))
        order = np.lexsort((ids, start, thread))
        for events in _runs(order, thread[order]):
            roots = np.flatnonzero(is_root[events])
            own, began_on = events[roots], batch.threads[int(thread[events[0]])]
            for begin, end, root in self._cut(began_on, start[own], roots, ids[own], limit):
                which[own[begin:end]] = len(roots_found)
                roots_found.append(root)
            if (latest := self._latest.get(_key(began_on))) is not None:
                latest.first -= len(events)
        return roots_found, which[is_root]

    def _cut(
        self, thread: RecordedThread, start: Array, position: Array, ids: Array, limit: int
    ) -> Iterator[tuple[int, int, StepSpan]]:
        """Begin, end and root of each slice of a thread's operators. ``position``: index of each among the thread's events."""
        begin, latest = 0, self._latest.get(_key(thread))
        while begin < len(start):
            if latest is None or start[begin] >= latest.until or position[begin] >= latest.first + limit:
                root = self._begun(thread, int(start[begin]), ids[begin : begin + 1])
                latest = self._latest[_key(thread)] = _RootSlice(root, root.start + SLICE_NS, int(position[begin]))
            end = int(min(np.searchsorted(start, latest.until), np.searchsorted(position, latest.first + limit)))
            yield begin, end, latest.root
            begin = end

    def _begun(self, thread: RecordedThread, start: int, first: Array) -> StepSpan:
        trace = self._new_trace(OPERATORS_NAME, -1, None)
        span_id = int(event_span_ids(first | _SYNTHETIC, self._key)[0])
        root = StepSpan(-1, trace, span_id, start, start, None, None, name=OPERATORS_NAME)
        root.attributes = {"thread.id": thread.ident} | ({"thread.name": thread.name} if thread.name else {})
        self._open.append(root)
        return root

    def ended(self, watermark: int, busy: Collection[StepSpan], *, final: bool) -> Sequence[StepSpan]:
        """Returns the ended roots; repeatedly, until they are forgotten.

        A root ends when the next one begins on its thread, or when its time is over and no descendant is open.

        Args:
            watermark: Unix ns; all earlier events are drained.
            busy: roots with open descendants.
            final: whether there are no more events.
        """
        if final:
            return list(self._open)
        lasting = {latest.root for latest in self._latest.values() if latest.until > watermark or latest.root in busy}
        return [root for root in self._open if root not in lasting]

    def forget(self, ended: Iterable[StepSpan]) -> None:
        """Drops ended roots after they were sent."""
        gone = set(ended)
        self._open = [root for root in self._open if root not in gone]
        self._latest = {thread: latest for thread, latest in self._latest.items() if latest.root not in gone}


def _key(thread: RecordedThread) -> tuple[int, int]:
    """Identifies a thread in every drain; its name may change."""
    return thread.os_tid, thread.ident


def operators(batch: Batch, nodes: Array) -> npt.NDArray[np.bool_]:
    """Mask of the operators and backward functions among ``nodes``: rows, then open events.

    Labels of torch and functions of TorchScript are not, though torch reports them in the same way: each may be a request.
    """
    kind, scope = at_nodes(batch, "kind", nodes), at_nodes(batch, "scope", nodes)
    is_operator: npt.NDArray[np.bool_] = (kind == Kind.OPERATOR) & (
        (scope == Scope.FUNCTION) | (scope == Scope.BACKWARD_FUNCTION)
    )
    return is_operator


def _runs(order: Array, key: Array) -> Iterable[Array]:
    """``order`` in pieces of equal ``key``."""
    return np.split(order, np.flatnonzero(np.diff(key)) + 1) if len(order) else ()
