"""``otel-torchprof show --trace``: the spans of one trace as a tree."""

from __future__ import annotations

import string
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import Segment
from otel_torchprof._encode.table import format_time
from otel_torchprof._files import event_columns
from otel_torchprof._files.attribute_keys import LINKS, STEP
from otel_torchprof._files.trace_events import TraceEventKind
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.step_spans import JOB_NAME, PROFILE_NAME
from otel_torchprof.errors import TorchProfError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from otel_torchprof._columns.batch import Array
    from otel_torchprof._files.trace_events import TraceEvents

WANTED = (*event_columns.WANTED, LINKS)
"""Attributes to read for :func:`text_of`."""
SLOWEST = "slowest"
"""In the place of an id: the trace with the longest root that is a request, a step or another event."""
_AROUND = frozenset((JOB_NAME, OPERATORS_NAME, PROFILE_NAME, Segment.SETUP.span_name))
"""Roots that are no request and no step: the slowest trace is not one of these."""
_MOST_NAMED = 5
_MOST_LINKS = 3
_DIGITS = 8
"""Of the id of a linked trace: enough for ``--trace``."""


class _Tree(NamedTuple):
    roots: Sequence[int]
    children: Mapping[int, Sequence[int]]
    """Rows of the children of a row, by start."""

    @classmethod
    def of(cls, events: TraceEvents, rows: Sequence[int]) -> _Tree:
        """The tree of some rows; one whose parent is not among them is a root."""
        known, roots = set(rows), list[int]()
        children: dict[int, list[int]] = defaultdict(list)
        for row in sorted(rows, key=events.start.item):
            parent = events.parent.item(row)
            (children[parent] if parent in known else roots).append(row)
        return cls(roots or [rows[0]], children)

    def by_depth(self, duration: Array) -> list[int]:
        """The rows, roots first, then their children, and so on, each time the longest first; each once, also in circles."""
        found: dict[int, None] = {}
        level = self.roots
        while level:
            found |= dict.fromkeys(sorted(level, key=lambda row: -duration.item(row)))
            level = [child for row in level for child in self.children.get(row, ()) if child not in found]
        return list(found)

    def lines(self, shown: set[int], below: Mapping[int, int]) -> Iterator[tuple[int, str, str]]:
        """Yields the shown rows in the order of the tree, each with its branches, and the number of rows below it that are not shown."""
        waiting = [(row, "", "") for row in reversed(self.roots) if row in shown]
        while waiting:
            row, before, branch = waiting.pop()
            shown.discard(row)
            yield row, before + branch, f"  … {below[row]:,} more" if below.get(row) else ""
            inside = before + {"├─ ": "│  ", "└─ ": "   "}.get(branch, "")
            own = [child for child in self.children.get(row, ()) if child in shown]
            branches = ["├─ "] * (len(own) - 1) + ["└─ "]
            waiting += [(child, inside, of_child) for child, of_child in zip(own, branches, strict=False)][::-1]


def text_of(events: TraceEvents, name: str, wanted: str, limit: int) -> str:
    """A trace as a tree with the offset, the duration and the self time of each span: those nearest to the root, the longest first, up to a limit.

    ``wanted``: its id, the first digits of it, or :data:`SLOWEST`. Costs some us per span of the trace.

    Raises:
        TorchProfError: the file has no trace ids, or not this one, or several that begin so.
    """
    trace = _chosen(events, name, wanted.lower())
    rows = np.flatnonzero((events.trace == trace) & (events.kind == TraceEventKind.SPAN))
    tree = _Tree.of(events, rows.tolist())
    order = tree.by_depth(events.duration)
    shown = order[: None if limit < 0 else limit]
    totals = events.totals()
    own = events.self_times(totals, events.kind == TraceEventKind.SPAN)
    first, end = events.start[rows].min(), (events.start[rows] + events.duration[rows]).max()
    lines = [
        f"Trace {printable(str(events.traces[trace]))}: {len(rows):,} spans, {format_time((end - first) / 1000)}",
        f"{'Offset':>12}  {'Duration':>12}  {'Self':>12}  Span",
    ]
    linked = _linked(events, shown)
    for row, branches, more in tree.lines(set(shown), _left_out(events, order, set(shown))):
        times = (events.start.item(row) - first, totals.item(row), own.item(row))
        columns = "  ".join(f"{format_time(time / 1000):>12}" for time in times)
        lines.append(
            f"{columns}  {branches}{printable(_named(events, row))}{_moved(events, row)}{linked.get(row, '')}{more}"
        )
    if len(shown) < len(order):
        lines.append(f"and {len(order) - len(shown):,} more: --rows -1")
    return "\n".join((*lines, ""))


def _chosen(events: TraceEvents, name: str, wanted: str) -> int:
    """The index of the trace."""
    is_root = (events.kind == TraceEventKind.SPAN) & (events.parent < 0) & ~events.named(_AROUND.__contains__)
    longest = np.zeros(len(events.traces), np.int64)
    np.maximum.at(longest, events.trace[is_root], events.duration[is_root])
    ids = {at: str(trace).lower() for at, trace in enumerate(events.traces) if trace is not None}
    slowest = sorted(ids, key=lambda at: -longest.item(at))
    if not slowest:
        raise TorchProfError(f"{name} has no spans with trace ids; without --trace its averages are shown")
    found = slowest[:1] if wanted == SLOWEST else [at for at in slowest if wanted and ids[at].startswith(wanted)]
    if len(found) != 1:
        named = ", ".join(
            f"{printable(ids[at])} ({format_time(longest.item(at) / 1000)})" for at in (found or slowest)[:_MOST_NAMED]
        )
        said = f"{len(found):,} traces that begin with" if found else "no trace"
        raise TorchProfError(f"{name} has {said} {wanted!r}; the slowest: {named}; or use --trace {SLOWEST}")
    return found[0]


def _linked(events: TraceEvents, shown: Sequence[int]) -> Mapping[int, str]:
    """Where the links of each shown row lead, as far as it has any: the first digits of the traces, and the names of spans in these files."""
    rows, links = events.attributes.get(LINKS, (np.empty(0, np.int64), ()))
    rows_shown = set(shown)
    of_row = {row: found for row, found in zip(rows.tolist(), links, strict=True) if row in rows_shown}
    targets = {link.rpartition("/")[2] for found in of_row.values() for link in found[:_MOST_LINKS]}
    ids = np.array([int(target, 16) for target in targets if _is_id(target)], np.uint64)
    at = np.flatnonzero(np.isin(events.span_id, ids) & (events.kind == TraceEventKind.SPAN))
    name_of = {f"{events.span_id.item(row):016x}": events.names[events.name.item(row)] for row in at.tolist()}
    return {row: _arrows(found, name_of) for row, found in of_row.items()}


def _is_id(text: str) -> bool:
    return len(text) == 16 and set(text) <= set(string.hexdigits)  # noqa: PLR2004 - digits


def _arrows(links: Sequence[str], name_of: Mapping[str, str]) -> str:
    """``-> torch.batch in 2b2eb455, ...`` of the first links."""
    parts = []
    for link in links[:_MOST_LINKS]:
        trace, _, span = link.rpartition("/")
        name = name_of.get(span)
        parts.append(printable(f"{name} in {trace[:_DIGITS]}" if name else f"trace {trace[:_DIGITS]}"))
    more = f" and {len(links) - _MOST_LINKS:,} more" if len(links) > _MOST_LINKS else ""
    return f"  -> {', '.join(parts)}{more}"


def _left_out(events: TraceEvents, order: Sequence[int], shown: set[int]) -> Mapping[int, int]:
    """The number of rows below each shown row that are not shown."""
    below: dict[int, int] = defaultdict(int)
    for row in reversed(order):
        if row not in shown:
            below[events.parent.item(row)] += 1 + below[row]
    return below


def _named(events: TraceEvents, row: int) -> str:
    """The name of a span, of a step with its number."""
    text = events.names[events.name.item(row)]
    number = events.attributes_of(np.array([row])) if text == STEP_NAME else [{}]
    return " ".join((text, *(str(value) for key, value in number[0].items() if key == STEP)))


def _moved(events: TraceEvents, row: int) -> str:
    """The thread of a span whose parent is on another one."""
    parent, track = events.parent.item(row), events.track.item(row)
    _, thread = events.tracks[track]
    return "" if parent < 0 or thread is None or events.track.item(parent) == track else f"  [thread {thread}]"
