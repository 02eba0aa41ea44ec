"""The events of one live drain, and those still open around them, as one forest whose trees stay inside their context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import find
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native.loops import positions_of, roots_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class OpenEventInfo:
    """Decisions of a drain about events that were open then; one entry per event, with event ids or 0."""

    id: Ids = field(default_factory=lambda: np.empty(0, np.uint64))
    parent: Ids = field(default_factory=lambda: np.empty(0, np.uint64))
    """Final parent: children drained since then depend on it."""
    enclosing: Ids = field(default_factory=lambda: np.empty(0, np.uint64))
    """The nearest event around it that was still open, whatever its context."""


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes: the rows of the batch, then the events that are open. One entry per node."""

    rows: int
    """Number of nodes that are rows; they come first."""
    id: Ids
    start: npt.NDArray[np.int64]
    context: npt.NDArray[np.uint32] | None
    """Context of each node; None if contexts were not recorded."""
    name: npt.NDArray[np.uint32]
    parent: npt.NDArray[np.int64]
    """Parent of each node; -1 for none."""
    enclosing: npt.NDArray[np.int64]
    """Node that encloses it on its thread, regardless of context and duration; -1 for none."""
    beyond: npt.NDArray[np.int64]
    """Nodes whose parent ended in an earlier drain, and so is not among the nodes."""
    beyond_parents: Ids
    """Event ids of the parents of ``beyond``."""
    decided: OpenEventInfo
    """Parents of the open events, for the next drain."""

    def __len__(self) -> int:
        return len(self.id)

    @cached_property
    def roots(self) -> npt.NDArray[np.int64]:
        """Nodes without a parent among the nodes."""
        return np.flatnonzero(self.parent < 0)

    @cached_property
    def root(self) -> npt.NDArray[np.int64]:
        """Topmost ancestor of each node, or itself."""
        return roots_of(self.parent)

    @property
    def row_parent(self) -> npt.NDArray[np.int32]:
        """For each row the row of its parent; -1 for none, or if it is not in the batch."""
        parent = self.parent[: self.rows]
        if len(parent) == len(self.parent):
            return parent.astype(np.int32, copy=False)
        return np.where(parent < self.rows, parent, -1).astype(np.int32)


def of_nodes(batch: Batch, column: str) -> Array:
    """Returns a column of the rows of a batch, then of its open events; without a copy if there are none."""
    own, opened = batch[column], getattr(batch.opens, column)
    return np.concatenate((own, opened)) if len(opened) else own


def ends_of_nodes(batch: Batch) -> npt.NDArray[np.int64]:
    """Returns the end of each row, then :data:`NEVER` for each open event."""
    return np.concatenate((batch["end"], np.full(len(batch.opens), NEVER))) if len(batch.opens) else batch["end"]


def contexts_of_nodes(batch: Batch) -> npt.NDArray[np.uint32] | None:
    """Returns the contexts of rows and open events; None if contexts were not recorded."""
    return of_nodes(batch, "context") if "context" in batch.columns else None


class Lasting(NamedTuple):
    """How events that span many steps are found."""

    step_of: Callable[[Array, Array | None], Array]
    """Maps times and contexts to step numbers, with one number for times outside of steps."""
    shortest: int
    """Duration of the shortest step, ns: an event that spans a whole step lasts as long at least."""


def forest(batch: Batch, decided: OpenEventInfo, lasting: Lasting | None) -> Forest:
    """Builds the forest of a batch and its open events. Parents in ``decided``, from the previous drain, stay.

    The recorder's parent is the event that was open on the thread. That may belong to another task of the thread, or span many steps.
    So the parent here is the nearest enclosing event that has the same context, had not ended when the event began and, if it spans
    more than one whole step, began in the same step. An event without such a parent is a root.

    ``lasting``: None if no event spans more than a whole step. Costs a few numpy passes.
    """
    rows, ids = len(batch), of_nodes(batch, "id")
    at = _nodes(ids, rows, decided.id)
    known, at = at >= 0, at[at >= 0]
    enclosing = enclosing_of(batch, ids)
    enclosing[at] = _nodes(ids, rows, decided.enclosing[known])
    context, start, end = contexts_of_nodes(batch), of_nodes(batch, "start"), ends_of_nodes(batch)
    is_long, is_in_same_step = (None, None) if lasting is None else _long(lasting, start, end, context)
    compared = context if context is not None and (context != context[:1]).any() else None

    def holds(above: Array, nodes: Array | slice) -> Array:
        encloses: Array = end[above] >= start[nodes]
        if compared is not None:
            encloses &= compared[above] == compared[nodes]
        if is_long is not None and is_in_same_step is not None:
            far = np.flatnonzero(is_long[above])
            below = nodes.start + far if isinstance(nodes, slice) else nodes[far]
            encloses[far] &= is_in_same_step(above[far], below)
        return encloses

    parent = _nearest(enclosing, holds)
    if at.size and parent is enclosing:
        parent = enclosing.copy()
    parent[at] = _nodes(ids, rows, decided.parent[known])
    is_beyond = (parent[at] < 0) & (decided.parent[known] != 0)
    beyond, beyond_parents = at[is_beyond], decided.parent[known][is_beyond]
    far = np.zeros(len(batch.opens), dtype=np.uint64)
    far[beyond[beyond >= rows] - rows] = beyond_parents[beyond >= rows]
    following = _decided(ids, rows, enclosing, parent, far)
    return Forest(
        rows, ids, start, context, of_nodes(batch, "name"), parent, enclosing, beyond, beyond_parents, following
    )


def _long(
    lasting: Lasting, start: Array, end: Array, context: Array | None
) -> tuple[npt.NDArray[np.bool_] | None, Callable[[Array, Array], npt.NDArray[np.bool_]]]:
    """Returns which nodes span more than one whole step, None for none, and a function that tells if nodes and others began in one step."""

    def step(times: Array, nodes: Array) -> Array:
        return lasting.step_of(times[nodes], None if context is None else context[nodes])

    # Few last as long as a step: it is not asked for all.
    candidates = np.flatnonzero((end - start >= lasting.shortest) | (end == NEVER))
    long = candidates[step(end, candidates) - step(start, candidates) > 1]
    is_long = np.zeros(len(start), dtype=np.bool_)
    is_long[long] = True
    return is_long if long.size else None, lambda nodes, others: step(start, nodes) == step(start, others)


def enclosing_of(batch: Batch, ids: Ids) -> npt.NDArray[np.int64]:
    """Returns for each node the node that enclosed it at its start; -1 for none, or if it ended in an earlier drain."""
    rows, opens = len(batch), batch.opens
    enclosing = np.empty(len(ids), dtype=np.int64)
    enclosing[:rows] = batch["parent"]
    if len(opens):
        enclosing[batch.outer_rows.astype(np.intp)] = _nodes(ids, rows, batch.outer_parents)
        enclosing[rows:] = _nodes(ids, rows, opens.parent)
    return enclosing


def _nearest(enclosing: Array, holds: Callable[[Array, Array | slice], Array]) -> npt.NDArray[np.int64]:
    """Returns the nearest enclosing node for which ``holds`` is true, -1 for none; ``enclosing`` itself if that is true for all."""
    moving = find(len(enclosing), lambda block: (enclosing[block] >= 0) & ~holds(enclosing[block], block))
    if not moving.size:
        return enclosing
    parent = enclosing.copy()
    while moving.size:
        above = parent[moving] = enclosing[parent[moving]]
        moving = moving[(above >= 0) & ~holds(above, moving)]
    return parent


def _decided(ids: Ids, rows: int, enclosing: Array, parent: Array, far: Ids) -> OpenEventInfo:
    """Returns the parents of the open events. ``far``: for each the id of a parent that ended in an earlier drain, or 0."""
    outer = enclosing[rows:]
    while (ended := (outer >= 0) & (outer < rows)).any():
        outer = np.where(ended, enclosing[outer], outer)
    return OpenEventInfo(
        ids[rows:],
        np.where(parent[rows:] >= 0, ids[parent[rows:]], far),
        np.where(outer >= 0, ids[outer], np.uint64(0)),
    )


def _nodes(ids: Ids, rows: int, requested: Ids) -> npt.NDArray[np.int64]:
    """Returns the index of each requested id in ``ids``, mostly after the first ``rows``; -1 for missing ids, and for 0."""
    nodes = positions_of(ids[rows:], requested)
    nodes[nodes >= 0] += rows
    lost = np.flatnonzero((nodes < 0) & (requested != 0))
    if lost.size:
        nodes[lost] = positions_of(ids[:rows], requested[lost])
    return nodes
