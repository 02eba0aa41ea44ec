"""Columns with the number of operators, and of those that ran in compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._native.loops import roots_of

from .tree import HIDDEN_NAMES

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch, Names

    from .span_table import SpanTable

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

COMPILATION_PREFIX = "TorchDynamo Compile: "
"""A compilation: what torch runs inside it is none of the program's work."""
BREAK_PREFIX = "TorchDynamo Graph Break: "
"""A graph break, and the first line of its reason."""
GRAPH_LABEL = "TORCHDYNAMO"
"""Label that ``fx_insert_profiling`` puts around every call of a graph."""

_REGION_PREFIX = "Torch-Compiled Region"
_NAMESPACE = "::"
"""Part of every operator's name, but not of names of ``torch.compile``'s regions, look-ups, phases and kernels."""
_COMPILED_FUNCTIONS = ("CompiledFunction", "CompiledFunctionBackward")
"""AOTAutograd's names of graphs with a backward pass."""


_REGION_NAMES = (GRAPH_LABEL, *_COMPILED_FUNCTIONS, f"autograd::engine::evaluate_function: {_COMPILED_FUNCTIONS[1]}")


class Captured(NamedTuple):
    """One entry per row of a batch."""

    counts: Mask
    """Mask of the top-level operators, which the program called itself."""
    captured: Mask
    """The counted operators that ran in a compiled region."""
    region: Mask
    """The regions themselves."""


def captured(batch: Batch, *, parent: npt.NDArray[np.int64] | None = None, graph_labels_only: bool = False) -> Captured:
    """Returns masks of a batch's operators, and of those that ran in compiled regions.

    Operators are torch's operators and backward functions, without the utility operators of torch's profiler and those that ran
    while dynamo compiled. ``graph_labels_only``: only events inside labels of ``fx_insert_profiling`` are in regions. ``parent``: parents of the
    rows, then of ``batch.opens``, as positions among both; default: those of the batch.

    Costs some 50 ns per event. Thread-safe.
    """
    rows = len(batch)
    name, operator = batch["name"], _operators(batch)
    if parent is None:
        parent = batch["parent"].astype(np.int64)
    else:
        name = np.concatenate((name, batch.opens.name))
        operator = np.concatenate((operator, np.zeros(len(batch.opens), dtype=np.bool_)))

    def named(by_name: Mask | None) -> Mask:
        return np.zeros(len(name), dtype=np.bool_) if by_name is None else by_name[name]

    region = named(_regions(batch.names))
    compilation = named(batch.names.matching((), (COMPILATION_PREFIX,)))
    operator &= ~(region | named(batch.names.matching(HIDDEN_NAMES)))
    counts = operator & ~_inside(operator, parent)
    if compilation.any():
        counts &= ~_inside(compilation, parent)
    if graph_labels_only:
        region = named(batch.names.matching((GRAPH_LABEL,)))
    return Captured(counts[:rows], (counts & _inside(region, parent))[:rows], region[:rows])


def _operators(batch: Batch) -> Mask:
    by_name = batch.names.matching((), parts=(_NAMESPACE,))
    is_operator: Mask = batch["scope"] == Scope.BACKWARD_FUNCTION
    if by_name is not None:
        is_operator |= by_name[batch["name"]]
    is_operator &= (batch["kind"] == Kind.OPERATOR) & (batch["scope"] != Scope.USER_SCOPE)
    return is_operator


@dataclass(frozen=True, eq=False)
class Shares:
    """One entry per group of rows. Durations are sums in ns."""

    regions: npt.NDArray[np.int64]
    operators: npt.NDArray[np.int64]
    captured: npt.NDArray[np.int64]
    duration: npt.NDArray[np.int64]
    captured_duration: npt.NDArray[np.int64]

    def chosen(self, group: int) -> Shares:
        """The shares of one group."""
        return Shares(*(getattr(self, f.name)[group : group + 1] for f in fields(self)))

    def plus(self, other: Shares) -> Shares:
        """The sums of these and the others."""
        return Shares(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def attributes(self) -> dict[str, Array]:
        """Attributes of spans, where there are regions."""
        return {
            "torch.compile.captured_operators": self.captured,
            "torch.compile.captured_share": self.captured / np.maximum(self.operators, 1),
            "torch.compile.captured_duration_share": self.captured_duration / np.maximum(self.duration, 1),
        }


def shares(
    batch: Batch, group: npt.NDArray[np.int64], groups: int, parent: npt.NDArray[np.int64] | None = None
) -> Shares | None:
    """Adds up what :func:`captured` finds; None in a program that has had no region. ``group``: of each row, -1 for none."""
    if _regions(batch.names) is None:
        return None
    selection, duration = captured(batch, parent=parent), batch["end"] - batch["start"]

    def added(mask: Mask, values: Array | None = None) -> npt.NDArray[np.int64]:
        rows = np.flatnonzero(mask & (group >= 0))
        sums = np.zeros(groups, dtype=np.int64)
        np.add.at(sums, group[rows], 1 if values is None else values[rows])
        return sums

    return Shares(
        added(selection.region),
        added(selection.counts),
        added(selection.captured),
        added(selection.counts, duration),
        added(selection.captured, duration),
    )


def shares_of_roots(batch: Batch, table: SpanTable) -> Shares | None:
    """Shares by synthetic root: one entry per span of the table; None without compiled regions."""
    region = _regions(batch.names)
    if region is None or not region[batch["name"]].any():
        return None
    roots, events = np.flatnonzero(table.row < 0), np.flatnonzero(table.row >= 0)
    roots = roots[np.argsort(table.span_id[roots])]
    events = events[batch["parent"][table.row[events]] < 0]
    group = np.full(len(batch), -1, dtype=np.int64)
    if len(roots):
        above = table.parent_span_id[events]
        at = roots[np.minimum(np.searchsorted(table.span_id[roots], above), len(roots) - 1)]
        group[table.row[events]] = np.where(table.span_id[at] == above, at, -1)
    return shares(batch, group[roots_of(batch["parent"])], len(table))


def _regions(names: Names) -> Mask | None:
    return names.matching(_REGION_NAMES, (_REGION_PREFIX,))


def _inside(mask: Mask, parent: npt.NDArray[np.int64]) -> Mask:
    """Mask of the rows below a row of ``mask``."""
    # Chains of parents end at rows of the mask: a row is inside if its chain ends at one.
    nearest = roots_of(np.where(mask, -1, parent))
    is_inside: Mask = mask[nearest[parent]] & (parent >= 0)
    return is_inside
