"""The events of one live drain, and those still open around them, as one forest whose trees stay inside their context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native.loops import positions_of
from otel_torchprof._native.placing import LongNodes, Trees, lasting_rows, trees

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


class Forest(NamedTuple):
    """Nodes: the rows of the batch, then the events that are open."""

    trees: Trees
    enclosing: npt.NDArray[np.int32]
    """Node that encloses each node on its thread, regardless of context and duration; -1 for none."""
    known: npt.NDArray[np.int64]
    """Nodes that were open in the previous drain."""
    beyond: npt.NDArray[np.int64]
    """Nodes whose parent ended in an earlier drain, and so is not among the nodes."""
    beyond_parents: Ids
    """Event ids of the parents of ``beyond``."""
    decided: OpenEventInfo
    """Parents of the open events, for the next drain."""


def of_nodes(batch: Batch, column: str) -> Array:
    """Returns a column of the rows of a batch, then of its open events; without a copy if there are none."""
    own, opened = batch[column], getattr(batch.opens, column)
    return np.concatenate((own, opened)) if len(opened) else own


def at_nodes(batch: Batch, column: str, nodes: Array) -> Array:
    """Returns a column of the rows and open events of a batch at some of these nodes."""
    rows = len(batch)
    is_open = nodes >= rows
    if not is_open.any():
        return batch[column][nodes]
    values = np.empty(len(nodes), dtype=batch[column].dtype)
    values[~is_open] = batch[column][nodes[~is_open]]
    values[is_open] = NEVER if column == "end" else getattr(batch.opens, column)[nodes[is_open] - rows]
    return values


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

    ``lasting``: None if no event spans more than a whole step. Costs some ns per event, and more if one does.
    """
    rows, at = len(batch), nodes_of(batch, decided.id)
    was_open, known = at >= 0, at[at >= 0]
    parents = decided.parent[was_open]
    enclosing, known_parent = enclosing_of(batch), nodes_of(batch, parents).astype(np.int32)
    enclosing[known] = nodes_of(batch, decided.enclosing[was_open])
    made = trees(batch, enclosing, known, known_parent, None if lasting is None else _long(batch, lasting))
    is_beyond = (known_parent < 0) & (parents != 0)
    beyond, beyond_parents = known[is_beyond], parents[is_beyond]
    far = np.zeros(len(batch.opens), dtype=np.uint64)
    far[beyond[beyond >= rows] - rows] = beyond_parents[beyond >= rows]
    outer = enclosing[rows:]
    while (ended := (outer >= 0) & (outer < rows)).any():
        outer = np.where(ended, enclosing[outer], outer)
    following = OpenEventInfo(
        batch.opens.id, _ids(batch, made.parent[rows:], far), _ids(batch, outer, np.zeros(len(outer), dtype=np.uint64))
    )
    return Forest(made, enclosing, known, beyond, beyond_parents, following)


def _long(batch: Batch, lasting: Lasting) -> LongNodes | None:
    """Returns which nodes span more than one whole step, and where all began; None if none does."""
    rows, count = len(batch), len(batch) + len(batch.opens)

    def steps(column: str, at: Array) -> Array:
        contexts = at_nodes(batch, "context", at) if "context" in batch.columns else None
        return lasting.step_of(at_nodes(batch, column, at), contexts)

    # Few last as long as a step: it is not asked for all.
    candidates = np.concatenate((lasting_rows(batch, lasting.shortest), np.arange(rows, count)))
    long = candidates[steps("end", candidates) - steps("start", candidates) > 1]
    if not long.size:
        return None
    is_long = np.zeros(count, dtype=np.uint8)
    is_long[long] = 1
    return LongNodes(is_long, steps("start", np.arange(count)))


def enclosing_of(batch: Batch) -> npt.NDArray[np.int32]:
    """Returns for each node the node that enclosed it at its start; -1 for none, or if it ended in an earlier drain."""
    rows, opens = len(batch), batch.opens
    enclosing = np.empty(rows + len(opens), dtype=np.int32)
    enclosing[:rows] = batch["parent"]
    if len(opens):
        enclosing[batch.outer_rows.astype(np.intp)] = nodes_of(batch, batch.outer_parents)
        enclosing[rows:] = nodes_of(batch, opens.parent)
    return enclosing


def nodes_of(batch: Batch, requested: Ids) -> npt.NDArray[np.int64]:
    """Returns the node with each requested id, mostly an open one; -1 for missing ids, and for 0."""
    nodes = positions_of(batch.opens.id, requested)
    nodes[nodes >= 0] += len(batch)
    lost = np.flatnonzero((nodes < 0) & (requested != 0))
    if lost.size:
        nodes[lost] = positions_of(batch["id"], requested[lost])
    return nodes


def _ids(batch: Batch, nodes: Array, otherwise: Ids) -> Ids:
    """Returns the id of each node; the entry of ``otherwise`` for -1."""
    ids, at = otherwise.copy(), np.flatnonzero(nodes >= 0)
    ids[at] = at_nodes(batch, "id", nodes[at])
    return ids
