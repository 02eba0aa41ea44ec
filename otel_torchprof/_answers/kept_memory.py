"""Memory that was allocated in the steps of a profile and not freed until the last one ended: by phase, module and operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind, MemoryFlag
from otel_torchprof._model.memory import device_number
from otel_torchprof._model.modules import module_hierarchy

from .steps import KeptMemory, phase_of

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Batch


def kept_memory(batch: Batch, since: int, until: int, end: int) -> list[KeptMemory]:
    """The blocks that were allocated from ``since`` to ``until`` and are in use at ``end``, Unix ns; the largest sums first.

    A block that was freed on a thread that is not recorded counts as kept. Costs a sort of the records, and some 10 us per kept block.
    """
    memory = batch.memory
    if memory is None or not len(memory["time"]):
        return []
    kept = _kept(batch, end)
    kept = kept[(memory["time"][kept] >= since) & (memory["time"][kept] < until)]
    rows = rows_of(batch, memory["event"][kept])
    modules = module_hierarchy(batch)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row, size in zip(rows.tolist(), memory["bytes"][kept].tolist(), strict=True):
        module = modules.texts[modules.rows.item(row)] if row >= 0 else ""
        phase, operator = _around(batch, row)
        entry = sums.setdefault((phase, module, operator), [0, 0])
        entry[0], entry[1] = entry[0] + size, entry[1] + 1
    found = [KeptMemory(*names, *entry) for names, entry in sums.items()]
    return sorted(found, key=lambda each: -each.bytes)


def _kept(batch: Batch, end: int) -> Integers:
    """The records until then that are the last of their address, and no release."""
    memory = batch.memory or {}
    device = device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64))
    order = np.lexsort((memory["time"], memory["address"], device))
    order = order[memory["time"][order] <= end]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (memory["address"][order][1:] != memory["address"][order][:-1]) | (
        device[order][1:] != device[order][:-1]
    )
    last: Integers = order[is_last]
    failed = (memory["flags"][last] & MemoryFlag.OUT_OF_MEMORY) != 0
    found: Integers = last[(memory["bytes"][last] > 0) & ~failed]
    return found


def _around(batch: Batch, row: int) -> tuple[str, str]:
    """The phase and the outermost operator around an event; empty if there is none."""
    phase = operator = ""
    while row >= 0:
        name = batch.names[batch["name"].item(row)]
        phase = phase or phase_of(name) or ""
        if batch["kind"].item(row) == int(Kind.OPERATOR) and not phase_of(name):
            operator = name
        row = batch["parent"].item(row)
    return phase, operator
