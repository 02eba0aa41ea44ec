"""Phases, recorded and written as text."""

from __future__ import annotations

import gc
import itertools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from recorded_tables import recorded_table
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._native.recorder import Session
from otel_torchprof._process import wrapped_calls
from otel_torchprof._record import phase_calls
from otel_torchprof._record.phases import Phases

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorded:
    """The phases of a block, of all threads, but for collections of garbage."""

    def __init__(self, session: Session, source: Phases) -> None:
        self._session, self._source = session, source
        self._batch: Any = None

    def end(self) -> None:
        """No more are recorded."""
        self._session.stop()
        self._batch = self._source.decorate(self._session.final_batch())

    def rows(self) -> list[tuple[int, str, int, str]]:
        """Of each its depth, part, object, and its end where that is not plain."""
        depth: list[int] = []
        found = []
        columns = ("kind", "fwd_thread", "sequence_nr", "parent", "error_type", "flags")
        for kind, part, owner, parent, error, flags in zip(
            *(self._batch[name].tolist() for name in columns), strict=True
        ):
            outer = depth[parent] if parent >= 0 else 0
            depth.append(outer + (kind == Kind.PHASE))
            if kind == Kind.PHASE and part != Part.COLLECTION:
                ending = f" !{self._batch.names[error]}" if flags & Flag.ERROR else ""
                found.append((outer, Part(part).name, owner, ending + (" ..." if flags & Flag.UNFINISHED else "")))
        return found

    def lines(self) -> list[str]:
        """A line each, indented by depth, with error and ``...`` if unfinished."""
        return [f"{'  ' * depth}{part}{ending}" for depth, part, _, ending in self.rows()]

    def modules(self) -> list[tuple[str, str | None]]:
        """Parts, each with the attribute ``torch.module`` of its span."""
        ids = itertools.count(1)
        spans = recorded_table(self._batch, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
        table = add_attributes(spans, self._batch)
        columns = {column.key: column.spread(len(table)) for column in table.attributes}
        modules, named = columns["torch.module"]
        found = []
        for span in np.flatnonzero((table.row >= 0) & columns["torch.phase.name"][1]):
            row, name = table.row[span], table.names[modules[span]] if named[span] else None
            found.append((Part(int(self._batch["fwd_thread"][row])).name, name))
        return found

    def objects(self) -> dict[str, set[int]]:
        """By part, the objects that its phases were of."""
        found: dict[str, set[int]] = {}
        for _, part, owner, _ in self.rows():
            found.setdefault(part, set()).add(owner)
        return found


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Records phases in the block; they can be read after it."""
    session = Session(1 << 24, all_threads=True, kinds=[Kind.PHASE, Kind.MODULE, Kind.LABEL])
    source = Phases()
    session.start()
    result = Recorded(session, source)
    try:
        source.start(session)
        yield result
    finally:
        source.stop()
        result.end()


def model_and(kind: Any = torch.optim.SGD) -> tuple[nn.Module, Any]:
    """A model of three layers and its optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return model, kind(model.parameters(), lr=0.1)


def state_of_torch() -> Any:
    """All that a recording of phases changes in torch, and in Python."""
    places = {}
    for call in phase_calls._CALLS:
        owner, name = wrapped_calls.place(call, sys.modules.get(call.module))
        places[call.module, call.path] = owner is not None and vars(owner).get(name)
    hooks = {
        name: list(getattr(owner, name).values())
        for owner, names in (
            (torch_modules, [name for name in vars(torch_modules) if name.startswith("_global_") and "hooks" in name]),
            (torch_optimizers, ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"]),
        )
        for name in names
        if hasattr(getattr(owner, name), "values")
    }
    return places, hooks, list(gc.callbacks)
