"""Selects the events that become spans if Python calls were recorded, and finds the callers of the others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import Kind, Scope

from .frames import MODULE_PREFIX, distinct, frames_of
from .span_table import extend_names
from .tree import lifted

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch, Names

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

DETAILS = ("modules", "ops", "frames")
"""Levels of detail: modules and labels become spans; also operators; also calls."""

_ADDRESS = re.compile(rb" at 0x[0-9a-fA-F]+")


def check_detail(detail: str) -> None:
    """Raises ValueError unless ``detail`` is in :data:`DETAILS`."""
    if detail not in DETAILS:
        raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, DETAILS))}")


class Displayed(NamedTuple):
    """The events that become spans."""

    batch: Batch
    callers: npt.NDArray[np.uint32] | None
    """Per row, the name of the Python function that directly contains it, 0 for none; None if calls are spans themselves, or
    were not recorded."""


def displayed(batch: Batch, detail: str) -> Displayed:
    """Returns the events of a batch that become spans at a level of detail; the parent is the nearest enclosing one of them.

    On threads with events from the hooks of modules, which have full names, the tracer's calls of modules are left out. Costs a few
    numpy passes; nothing if no calls were recorded and the level is the default or higher.
    """
    is_frame = frames_of(batch)
    left_out = _left_out(batch, is_frame, detail)
    if left_out is None:
        return Displayed(batch, None)
    callers = None if is_frame is None or detail == "frames" else _callers(batch, is_frame)
    return Displayed(without(batch, left_out), None if callers is None else callers[~left_out])


def module_calls(names: Names, of: Array) -> Mask:
    """Returns a mask of the names (by index) that are calls of modules."""
    by_name = names.matching((), (MODULE_PREFIX,))
    return np.zeros(len(of), dtype=np.bool_) if by_name is None else by_name[of]


def plain_names(batch: Batch) -> tuple[Array, Names]:
    """Returns the name of each row, and the names, which begin with those of the batch, without addresses of C functions.

    These are in names such as ``<built-in method relu of Tensor object>``. Span names should be few, and equal in all processes.
    """
    of_frame = batch.of_kind(Kind.FRAME)
    if not of_frame.size:
        return batch["name"], batch.names
    used, which = distinct(batch["name"][of_frame])
    new, added = used.copy(), dict[str, int]()
    for at, index in enumerate(used.tolist()):
        raw = batch.names.raw(index)
        plain = _ADDRESS.sub(b"", raw)
        if plain != raw:
            new[at] = added.setdefault(plain.decode("utf-8", "replace"), len(batch.names) + len(added))
    name = batch["name"].copy()
    name[of_frame] = new[which]
    return name, extend_names(batch.names, list(added))


def _left_out(batch: Batch, is_frame: Mask | None, detail: str) -> Mask | None:
    """Returns a mask of the rows that do not become spans; None if all do."""
    kind = batch["kind"]
    if detail == "modules":
        left_out: Mask = (kind == Kind.OPERATOR) & (batch["scope"] != Scope.USER_SCOPE)
        if is_frame is not None:
            left_out |= is_frame & ~module_calls(batch.names, batch["name"])
            left_out |= reported_by_hooks(batch, is_frame)
        return left_out
    if detail == "ops" or is_frame is None:
        return is_frame
    twice = reported_by_hooks(batch, is_frame)
    return twice if twice.any() else None


def reported_by_hooks(batch: Batch, is_frame: Mask) -> Mask:
    """Returns a mask of the tracer's calls of modules on threads that also have events from the hooks of modules."""
    has_hooks = np.zeros(len(batch.threads), dtype=np.bool_)
    has_hooks[batch["thread"][batch["kind"] == Kind.MODULE]] = True
    if not has_hooks.any():
        return np.zeros(len(batch), dtype=np.bool_)
    return is_frame & has_hooks[batch["thread"]] & module_calls(batch.names, batch["name"])


def _callers(batch: Batch, is_frame: Mask) -> npt.NDArray[np.uint32] | None:
    """Returns by row the name of the nearest ancestor that is no C function, if it is a Python function; else 0."""
    info = batch.frame_info
    if info is None or not info.functions:
        return None
    used, which = distinct(batch["name"])
    is_function = is_frame & np.array([name in info.functions for name in used.tolist()], dtype=np.bool_)[which]
    enclosing = lifted(batch["parent"], is_frame & ~is_function)
    callers = np.where((enclosing >= 0) & is_function[enclosing], batch["name"][enclosing], np.uint32(0))
    return callers.astype(np.uint32, copy=False)
