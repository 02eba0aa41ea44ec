"""Chrome JSON of spans that are columns: everything per span is done by numpy and natively."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Names
from otel_torchprof._native.chrome_encoders import EscapedNames, SpanTexts, encode_spans, link_targets
from otel_torchprof._spans.span_tables import narrowed
from otel_torchprof._tree.span_table import AttributeType, extend_names

from .checked_spans import CheckedSpans
from .chrome_json import compact, valid
from .chrome_objects import ANNOTATION, OPERATOR, category_of, slice_name
from .chrome_tracks import Outlines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._tree.span_table import AttributeColumn, SpanTable

    from .spans import SpanList

Array = npt.NDArray[Any]


class Columns:
    """The spans of a SpanList on their way into a trace file. For one thread; lives as long as its pieces are made.

    Raises ValueError for a table that does not fit together.
    """

    def __init__(self, spans: SpanList) -> None:
        self._table, rows = _with_numbered_steps(narrowed(spans.table)), spans.rows
        self._spans = spans
        self._rows = np.arange(rows.start, rows.stop, rows.step)
        self._checked_spans = CheckedSpans(self._table, range(int(self._rows.min()), int(self._rows.max()) + 1))
        # Nearly always all rows in their order: a slice copies nothing.
        self._picked: slice | Array = slice(rows.start, rows.stop) if rows.step == 1 else self._rows
        self.outlines = self._outlines()
        self._layout: dict[str, Array] = {}

    def lay_out(self, order: npt.NDArray[np.int64], tids: npt.NDArray[np.int64]) -> int:
        """Settles the order of the spans and their tracks; returns the number of arrows between them."""
        self._layout = {
            "rows": self._rows[order].astype(np.uint64),
            "tid": tids[order],
            "category": self._categories()[order],
        }
        self._layout |= self._arrows()
        return len(self._layout["arrow_from"])

    def pieces(self, pid: int, base: int, first_arrow: int) -> Iterator[bytes]:
        """The lines of JSON."""
        names = EscapedNames(self._checked_spans.all_names)
        keys = Names.of([f"{compact(column.key)}:" for column in self._table.attributes])
        texts = SpanTexts(names, EscapedNames(Names.of(self._category_names())), keys=keys)
        return encode_spans(
            self._checked_spans.spans, self._layout, texts, first_arrow=first_arrow, base_ns=base, pid=pid
        )

    def _outlines(self) -> Outlines:
        table, picked = self._table, self._picked
        start, end = table.start[picked], table.end[picked]
        thread, threads = self._threads()
        return Outlines(
            start, np.maximum(start, end), table.span_id[picked], table.parent_span_id[picked], thread, threads
        )

    def _threads(self) -> tuple[npt.NDArray[np.int64], Sequence[tuple[int, str]]]:
        """Which thread each span ran on from begin to end, as an index into the threads' ids and names.

        Spans of a thread stand in runs, mostly long ones; only the runs are looked at one by one.
        """
        number, on_thread = self._attribute("thread.id", AttributeType.INT64)
        moved, is_moved = self._attribute("torch.async", AttributeType.BOOL)
        name, named = self._attribute("thread.name", AttributeType.NAME)
        on_thread &= ~(is_moved & (moved != 0))
        number, name = np.where(on_thread, number, 0), np.where(on_thread & named, name, 0)
        changes = (number[1:] != number[:-1]) | (name[1:] != name[:-1]) | (on_thread[1:] != on_thread[:-1])
        first = np.concatenate(([0], np.flatnonzero(changes) + 1))
        threads: dict[int, tuple[int, str]] = {}
        index = []
        runs = zip(number[first].tolist(), name[first].tolist(), on_thread[first].tolist(), strict=True)
        for run_number, run_name, known in runs:
            if not known:
                index.append(-1)
                continue
            place, text = threads.get(run_number, (len(threads), ""))
            threads[run_number] = (place, text or self._table.names[run_name])
            index.append(place)
        lengths = np.diff(np.append(first, len(number)))
        return np.repeat(np.array(index, dtype=np.int64), lengths), [(n, text) for n, (_, text) in threads.items()]

    def _attribute(self, key: str, kind: AttributeType) -> tuple[Array, npt.NDArray[np.bool_]]:
        """The values of an attribute, and which spans have it."""
        column = self._column(key, kind)
        if column is None:
            return np.zeros(len(self._rows), dtype=kind.dtype), np.zeros(len(self._rows), dtype=bool)
        if column.present is None:
            return column.values[self._picked], np.ones(len(self._rows), dtype=bool)
        return column.values[self._picked], column.present[self._picked] != 0

    def _column(self, key: str, kind: AttributeType) -> AttributeColumn | None:
        return next((c for c in self._table.attributes if c.key == key and c.type == kind), None)

    def _category_names(self) -> list[str]:
        return list(dict.fromkeys((valid(category_of(self._spans.scope)), OPERATOR, ANNOTATION)))

    def _categories(self) -> npt.NDArray[np.uint32]:
        """Per span, an index into the names of categories: as :func:`category_of` has it."""
        names = self._category_names()
        values, present = self._attribute("torch.op.scope", AttributeType.NAME)
        used = np.flatnonzero(np.bincount(values)).tolist()
        of_name = np.zeros(used[-1] + 1, dtype=np.uint32)
        for index in used:
            of_name[index] = names.index(valid(category_of(self._spans.scope, self._table.names[index])))
        found: npt.NDArray[np.uint32] = of_name[values] * present
        return found

    def _arrows(self) -> dict[str, Array]:
        """Links between two of the spans, as places in the order of writing, by the span that has the link."""
        rows, links = self._layout["rows"], self._table.links
        if not len(links):
            return {"arrow_from": np.empty(0, dtype=np.uint64), "arrow_to": np.empty(0, dtype=np.uint64)}
        target = link_targets(self._checked_spans.spans, rows, len(links))
        place = np.full(len(self._table), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        source = place[links["row"]]
        linked = np.zeros(len(rows), dtype=np.uint8)
        linked[source[source >= 0]] = 1
        start = self._table.start[rows]
        drawn = (target >= 0) & (source >= 0) & (target != source) & (start[target] <= start[source])
        source, target = source[drawn], target[drawn]
        order = np.argsort(source, kind="stable")
        arrows = {"arrow_from": target[order].astype(np.uint64), "arrow_to": source[order].astype(np.uint64)}
        return arrows | {"linked": linked}


def _with_numbered_steps(table: SpanTable) -> SpanTable:
    """The same spans, those of steps by the names that readers of torch's traces look for: see :func:`slice_name`."""
    rows = np.flatnonzero(table.step >= 0).tolist()
    names = [slice_name(table.names[table.name[row]], int(table.step[row])) for row in rows]
    if not rows:
        return table
    name = table.name.copy()
    name[rows] = np.arange(len(table.names), len(table.names) + len(rows))
    return replace(table, name=name, names=extend_names(table.names, names))
