"""Which of Python's calls belong to what a live recording shows, drain by drain.

A service runs inside of calls that last as long as it does: its main function, its event loop, the loop over its steps. They
are no part of a request or of a step, and as spans they would hold everything and end with the process. So a call is kept

- in a span of the service, always;
- where there are steps, if it ends in the step in which it began or in the next one;
- elsewhere, if it is inside of a module, a label or an operator.

What ran inside of the others is placed as if they were not there. A call that a drain has kept while it was open stays,
however long it lasts: others were said to be its children.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import NEVER, Kind
from otel_torchprof._tree.forest import contexts_of_nodes, enclosing_of, ends_of_nodes, of_nodes

from .frame_spans import module_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Nodes = npt.NDArray[np.int64]


class CallRules(NamedTuple):
    """Which of the calls that belong to a span or a step become spans."""

    shortest_ns: int = 0
    """Calls of functions that take less are left out."""
    keeps_bare: bool = False
    """Keep those that are in no step, no span and nothing else: of a program that is nothing but calls."""


def without_loose_calls(
    batch: Batch,
    reported: npt.NDArray[np.uint64],
    rules: CallRules,
    *,
    lasting: Callable[[Array, Array | None], Array],
    is_foreign: Callable[[Array], Mask],
) -> Batch:
    """A drained batch without the calls that belong to nothing; itself where it has no calls.

    Calls of modules go too: the hooks of modules report them, by their full names.

    Args:
        batch: the drain.
        reported: ids of what was open, and kept, in the drain before.
        rules: which of them are wanted.
        lasting: the number of the step for times and contexts: 0 in the first one that there is, -1 before those that are known, one
            more than the last for :data:`~.forest.NEVER`; -1 for both ends where there are no steps.
        is_foreign: of contexts, whether they are spans of the service that are no part of steps.
    """
    is_frame = of_nodes(batch, "kind") == Kind.FRAME
    if not is_frame.any():
        return batch
    ids, name = of_nodes(batch, "id"), of_nodes(batch, "name")
    start, end = of_nodes(batch, "start"), ends_of_nodes(batch)
    found = contexts_of_nodes(batch)
    context = np.zeros(len(ids), dtype=np.uint32) if found is None else found
    enclosing = enclosing_of(batch, ids)
    first, last = lasting(start, context), lasting(end, context)
    in_step = last >= 0
    loose = in_step & ((last - first > 1) | (first < 0) | ((first == 0) & (end == NEVER)))
    bare = is_frame & ~in_step & ~is_foreign(context)
    if bare.any() and not rules.keeps_bare:
        loose |= bare & ~_inside_of_others(enclosing, is_frame, context, start, end)
    loose |= (end - start < rules.shortest_ns) | module_calls(batch.names, name)
    return without_nodes(batch, ids, enclosing, loose & is_frame & ~np.isin(ids, reported))


def without_nodes(batch: Batch, ids: npt.NDArray[np.uint64], enclosing: Nodes, dropped: Mask) -> Batch:
    """A drained batch without some of its rows and open events, which are its nodes, in this order.

    What was inside of them hangs under what was around them, also where that is open or was drained before.
    """
    if not dropped.any():
        return batch
    rows = len(batch)
    outer = np.zeros(len(ids), dtype=np.uint64)  # what is around a node and ended before
    outer[batch.outer_rows.astype(np.intp)] = batch.outer_parents
    outer[rows:] = batch.opens.parent
    outer[enclosing >= 0] = 0
    enclosing = enclosing.copy()
    moving = np.flatnonzero((enclosing >= 0) & dropped[enclosing])
    while moving.size:
        above = enclosing[moving]
        outer[moving], enclosing[moving] = outer[above], enclosing[above]
        moving = moving[(enclosing[moving] >= 0) & dropped[enclosing[moving]]]
    parents = np.where(enclosing >= 0, ids[enclosing], outer)
    beyond = np.flatnonzero((enclosing[:rows] >= rows) | (outer[:rows] != 0))
    opens = batch.opens.chosen(~dropped[rows:])
    return without(
        replace(
            batch,
            columns={
                **batch.columns,
                "parent": np.where(enclosing[:rows] < rows, enclosing[:rows], -1).astype(np.int32),
            },
            outer_rows=beyond.astype(np.uint64),
            outer_parents=parents[beyond],
            opens=replace(opens, parent=parents[rows:][~dropped[rows:]]),
        ),
        dropped[:rows],
    )


def _inside_of_others(enclosing: Nodes, is_frame: Mask, context: Array, start: Array, end: Array) -> Mask:
    """Whether anything that is no call, of the same context, is open around a node."""
    found = enclosing.copy()
    moving = np.flatnonzero(found >= 0)
    while moving.size:
        above = found[moving]
        misses = is_frame[above] | (context[above] != context[moving]) | (end[above] < start[moving])
        moving = moving[misses]
        found[moving] = enclosing[found[moving]]
        moving = moving[found[moving] >= 0]
    return found >= 0
