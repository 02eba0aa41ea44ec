"""Roots of trace groups that went to another trace than was thought when others linked to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from otel_torchprof._tree.span_table import SpanTable

_MOST = 1_000


class MovedRoots:
    """The last thousand of them. For one thread at a time."""

    def __init__(self) -> None:
        self._traces: OrderedDict[int, bytes] = OrderedDict()

    def note(self, table: SpanTable, root: int) -> None:
        """The root with this span id is in the trace that the table has it in."""
        at = int(np.flatnonzero(table.span_id == np.uint64(root))[0])
        self._traces[root] = table.trace_ids[table.trace[at]].tobytes()
        if len(self._traces) > _MOST:
            self._traces.popitem(last=False)

    def followed(self, table: SpanTable) -> SpanTable:
        """The table, whose links lead to where these roots are; the table itself where none leads to one."""
        if not self._traces or not len(table.links):
            return table
        targets = table.links["span_id"]
        there = np.flatnonzero(np.isin(targets, np.fromiter(self._traces, np.uint64, len(self._traces))))
        if not there.size:
            return table
        links = table.links.copy()
        found = b"".join(self._traces[target] for target in targets[there].tolist())
        links["trace_id"][there] = np.frombuffer(found, np.uint8).reshape(-1, 16)
        return replace(table, links=links)
