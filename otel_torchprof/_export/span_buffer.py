"""Buffers spans until their trace group has ended, then applies tail sampling and the trace size limit.

A *trace group* is a step, the operators below a shared root, or else the tree of a top-level event. Its key is the span id of its root.
A drain brings pieces of trace groups. The pieces of a running trace group are buffered. When the trace group has ended, tail sampling may
reduce it to its root and phases, and the trace size limit applies. A trace group that is complete in one drain and within the limit passes
through unchanged, as most do.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import is_any_of
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._model.limits import most_bytes, span_sizes
from otel_torchprof._model.live_table import failed_events
from otel_torchprof._model.span_tables import joined_tables, picked, taken, without_rows
from otel_torchprof._model.span_tree import rows_of_spans
from otel_torchprof._process.give_way import give_way

from .aggregating import tokens
from .moved_spans import MovedSpans, without_links_to
from .policy import ReducedTogether, Reduction, TargetTrace, reduced, reduced_together, row_of
from .root_only import Chosen, left_out, root_only
from .span_policy import SelectionRules, TailSampler
from .trace_capacity import TraceCapacity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from otel_torchprof._model.limits import Budget
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import StepSpan

    from .span_policy import TraceChoice


Array = npt.NDArray[Any]

# ---- Buffering ----

MAX_BUFFERED_BYTES = 64 << 20
MAX_BUFFERED_NS = 60_000_000_000
"""Duration after which a trace group that is no step is sent in parts: a label around a whole program must not delay all spans."""
MAX_BUFFERED_STEP_NS = 600_000_000_000
"""The same for a step."""
PART_NAME = "torch.part"
"""Name of the roots of parts that are sent before the root of their trace group has ended."""
_MOST_PAST = 1_000
"""Most ended trace groups whose outcome is stored, for late spans."""
_LARGEST_SPAN = 16_000
"""Bytes of a large span: sizes are not computed if even such spans would fit."""
_MIN_CAPACITY_DIVISOR = 10
"""If less than this part of a trace's span limit is left, spans that do not fit all go to new, linked traces."""
_REQUESTS_DIVISOR = 5
"""Part of a trace's span limit that a request's waits and stays may take."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The spans of a drain."""

    table: SpanTable
    roots: npt.NDArray[np.uint64]
    """Trace group of each span, except of the first spans if these are roots of trace groups."""
    open_roots: Collection[int]
    """Trace groups that continue and have no synthetic root."""
    enclosing: npt.NDArray[np.uint64]
    """For each entry of ``table.trace_ids``, the application span above it; 0 for none."""
    is_segment: npt.NDArray[np.bool_]
    """For each entry of ``table.trace_ids``, whether it is the trace of a step or of another segment of the job."""
    steps: Mapping[int, StepSpan]
    """Synthetic roots by trace group."""
    ended: Sequence[StepSpan]
    """Roots that have ended; their spans are in the table."""
    chosen: Chosen = field(default_factory=Chosen)
    final: bool = False
    """Whether this is the last drain."""
    keys: npt.NDArray[np.uint64] | None = None
    """For each entry of ``table.trace_ids``, the trace group of all of its spans, 0 if they are of several; None if unknown."""
    counts: npt.NDArray[np.int64] | None = None
    """For each entry of ``table.trace_ids``, the number of its spans; None to count them."""

    @cached_property
    def trace_group(self) -> npt.NDArray[np.uint64]:
        """Trace group of each span. Costs a copy."""
        return np.concatenate((self.table.span_id[: len(self.table) - len(self.roots)], self.roots))

    def rows_of(self, keys: Collection[int]) -> npt.NDArray[np.int64]:
        """Rows of some trace groups, rising. Costs a comparison of a column with each, or of two where entries have several."""
        if not keys:
            return np.empty(0, dtype=np.int64)
        few, rest = np.fromiter(keys, np.uint64, len(keys)), set(keys)
        is_any = np.zeros(len(self.table), dtype=np.bool_)
        if self.keys is not None:
            entries = np.flatnonzero(is_any_of(self.keys, few))
            is_any |= is_any_of(self.table.trace, entries.astype(np.uint32))
            rest.difference_update(self.keys[entries].tolist())
        if rest and (self.keys is None or not self.keys.all()):
            is_any |= is_any_of(self.trace_group, np.fromiter(rest, np.uint64, len(rest)))
        return np.flatnonzero(is_any)

    def groups(self, rows: Array) -> Iterator[tuple[int, Array]]:
        """Yields the rows of each trace group among some rising rows, rising."""
        first = len(self.table) - len(self.roots)
        has_roots = len(rows) > 0 and rows[0] < first
        return _groups(self.trace_group[rows] if has_roots else self.roots[rows - first], rows)


class _Outcome(enum.Enum):
    """Outcome of an ended trace group, which also applies to its late spans."""

    WHOLE = "whole"
    REDUCED = "reduced"
    ROOT_ONLY = "root_only"


def _alone() -> int:
    """The default share: this process alone."""
    return 1


def _all(_trace_id: int) -> bool:
    """The default selection of traces."""
    return True


class SpanBuffer:
    """Buffers the spans of one recording until they are sent. Not thread-safe, except ``sampler.ask()``.

    Args:
        rules: rules of tail sampling, and size limits.
        new_trace_id: as ``generate_trace_id`` of OpenTelemetry's IdGenerator.
        new_span_id: as ``generate_span_id``.
        share: number of processes that share one trace's size limit; may grow when they find each other.
        traces: selects traces where there are no steps. Default: all.
    """

    def __init__(
        self,
        rules: SelectionRules,
        new_trace_id: Callable[[], int],
        new_span_id: Callable[[], int],
        share: Callable[[], int] = _alone,
        traces: TraceChoice | None = None,
    ) -> None:
        self._share = share
        self._rules = rules
        self._new_trace_id = new_trace_id
        self._new_span_id = new_span_id
        self._capacity, self._capacity_of_requests = TraceCapacity(), TraceCapacity()
        self.max_bytes = MAX_BUFFERED_BYTES
        """Limit of the buffered spans' memory; beyond it the largest trace group is sent in parts while it runs."""
        self.sampler = TailSampler(rules)
        self.traces = traces
        """As given."""
        self._keeps_all = rules.keep_all
        self._selects: Callable[[int], bool] = _all
        self._buffered: dict[int, list[SpanTable]] = {}
        self._running: dict[int, StepSpan] = {}
        self._failed: set[int] = set()
        self._decided: dict[int, bool] = {}
        """Decisions on the steps of the latest drain: if it fails, they come again."""
        self._sent_early: dict[int, Reduction] = {}
        self._reduced_now: set[int] = set()
        self._moved = MovedSpans()
        self._past: OrderedDict[int, _Outcome] = OrderedDict()
        self._figures: Counter[str] = Counter()
        self.dropped = 0
        """Number of buffered spans that failed calls of :meth:`decide` dropped."""

    @property
    def budget(self) -> Budget:
        """The size limit of a trace that begins here, or the share of it that this process has now."""
        return self._budget_of(b"")

    def join(self, trace_id: int) -> None:
        """The trace began in another process: others add to it, too. Any thread."""
        self._capacity.join(trace_id)

    def _budget_of(self, trace_id: bytes) -> Budget:
        budget, share = self._rules.budget, self._share() * self._capacity.processes(trace_id)
        if share <= 1:
            return budget
        return budget._replace(max_spans=max(budget.max_spans // share, 2), max_bytes=max(budget.max_bytes // share, 1))

    @property
    def figures(self) -> Mapping[str, int]:
        """So far: spans ``aggregated``, ``collapsed`` and ``detail_dropped``, ``parts``; trace groups ``sampled`` and ``root_only``."""
        return +(self._figures + self.sampler.figures)

    @property
    def spans(self) -> int:
        """Spans that are buffered."""
        return sum(len(table) for tables in self._buffered.values() for table in tables)

    @property
    def nbytes(self) -> int:
        """Bytes that are buffered."""
        return sum(map(_nbytes, self._buffered.values()))

    def choose(
        self,
        placed: Placed,
        steps: Mapping[int, StepSpan],
        ended: Sequence[StepSpan],
        *,
        final: bool,
        has_steps: bool = True,
    ) -> Chosen:
        """Applies tail sampling to the events of a drain, before they become spans; for :meth:`decide`.

        ``steps``, ``ended`` and ``final``: as in :class:`Pieces`. ``has_steps``: whether steps were selected, so that traces are not.
        """
        self._selects = _all if has_steps or self.traces is None else self.traces.selects
        self._keeps_all = self._rules.keep_all and self._selects is _all
        if self._keeps_all:
            return Chosen()
        is_traced = np.array([trace_group.is_traced for trace_group in placed.trace_groups], dtype=np.bool_)
        failed = np.flatnonzero(failed_events(placed.batch))
        self._failed.update(placed.root[failed[is_traced[placed.trace_group[failed]]]].tolist())
        has_to_be = self._failed | self._sent_early.keys()
        waiting = self._open_trace_groups(steps, ended, placed.open_roots, final=final)
        waiting |= self._buffered.keys() | self._sent_early.keys()
        new = [step for step in ended if step.span_id not in self._decided]
        sampled = self._decided | self.sampler.of_steps(new, has_to_be, self._selects)
        self._decided = {step.span_id: sampled[step.span_id] for step in ended}
        left = [
            step for step in ended if not (sampled[step.span_id] or step.span_id in waiting) and step.trace.exported
        ]

        def keeps(key: int, name: str, duration: int, trace_id: int) -> bool:
            is_selected = self._selects(trace_id)
            return key in waiting or self.sampler.of_trace_group(
                name, duration, failed=key in has_to_be, selected=is_selected
            )

        return Chosen(self._decided, left_out(placed, left, keeps))

    def within_requests(self, table: SpanTable, is_inside: npt.NDArray[np.bool_]) -> SpanTable:
        """Leaves out spans that would be more than a fifth of the size limit of a request's trace: the last ones, counted as collapsed.

        Costs half a microsecond per request.

        Args:
            table: spans of batches and of requests in them.
            is_inside: mask of the spans that are limited: each request's waits and stays.
        """
        rows, most = np.flatnonzero(is_inside), max(self._rules.budget.max_spans // _REQUESTS_DIVISOR, 2)
        counts = np.bincount(table.trace[rows], minlength=len(table.trace_ids))
        over = self._capacity_of_requests.overflowing(table.trace_ids, counts, np.full(len(counts), most))
        removed = rows[over[table.trace[rows]]]
        self._figures["collapsed"] += len(removed)
        return without_rows(table, removed)

    def decide(self, pieces: Pieces) -> list[SpanTable]:
        """Adds the spans of a drain; returns the spans that are due, in up to two tables.

        One table has the spans that pass through unchanged, the other those that were buffered or reduced. Joining them would copy
        the first.

        If it raises, the spans of this drain are not buffered. Spans of earlier drains stay buffered, except those that this call has
        already taken out of the buffer: :attr:`dropped` counts them.
        """
        before, figures = {key: list(tables) for key, tables in self._buffered.items()}, self._figures.copy()
        try:
            return self._decide(pieces)
        except BaseException:
            self.dropped += sum(len(table) for key in before.keys() - self._buffered.keys() for table in before[key])
            self._buffered = {key: before[key] for key in self._buffered if key in before}
            self._figures = figures
            raise

    def _decide(self, pieces: Pieces) -> list[SpanTable]:
        self._capacity.learn_joined()
        table, sampled = pieces.table, pieces.chosen.sampled
        open_trace_groups = self._open_trace_groups(pieces.steps, pieces.ended, pieces.open_roots, final=pieces.final)
        open_rows = pieces.rows_of(open_trace_groups)
        for key, rows in pieces.groups(open_rows):
            self._buffered.setdefault(key, []).append(taken(table, rows))
        whole = [key for key in dict.fromkeys([*self._buffered, *self._sent_early]) if key not in open_trace_groups]
        if (left := pieces.chosen.left_out) is not None:
            self._figures["detail_dropped"] += left.size
            self._moved.note_left(*left.moved)
        give_way()
        alone, whole_as_is = self._needs_processing(pieces, open_trace_groups, open_rows, whole)
        others = [part for key in whole_as_is for part in self._buffered.pop(key)]
        whole = [key for key in whole if key not in whole_as_is]
        if whole or alone.size:
            others += self._decide_groups(pieces, alone, whole, sampled)
        others += self._sent_in_parts()
        out = [joined_tables(others)] if others else []
        removed = np.sort(np.concatenate((open_rows, alone))) if alone.size else open_rows
        out += [passing] if len(passing := without_rows(table, removed)) else []
        for step in pieces.ended:
            step.is_sent = True
        outcomes = dict.fromkeys([step.span_id for step in pieces.ended], _Outcome.WHOLE)
        outcomes |= dict.fromkeys(self._reduced_now & outcomes.keys(), _Outcome.REDUCED)
        self._past |= outcomes | {key: _Outcome.ROOT_ONLY for key in outcomes if not sampled.get(key, True)}
        self._reduced_now.clear()
        self._failed &= open_trace_groups
        while len(self._past) > _MOST_PAST:
            self._past.popitem(last=False)
        return [without_links_to(self._moved.followed(due), self._buffered) for due in out]

    # ---- selection of trace groups that need processing ----

    def _open_trace_groups(
        self, steps: Mapping[int, StepSpan], ended: Sequence[StepSpan], open_roots: Collection[int], *, final: bool
    ) -> set[int]:
        """Keys of the trace groups whose spans are buffered."""
        self._running |= {key: step for key, step in steps.items() if not step.is_sent}
        for step in ended:
            self._running.pop(step.span_id, None)
        if final:
            self._running.clear()
            return set()
        return self._running.keys() | set(open_roots)

    def _needs_processing(
        self, pieces: Pieces, open_trace_groups: Collection[int], open_rows: Array, whole: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], set[int]]:
        """Returns the rows that are not open and cannot pass through unchanged, rising, and which of the whole trace groups can."""
        table, sampled = pieces.table, pieces.chosen.sampled
        first, traces = _first_of_each(table.trace_ids), len(table.trace_ids)
        plain = [key for key in whole if self._is_plain(pieces, key, sampled, was_buffered=True)]
        buffered = {
            key: (int(first[table.trace[row]]), self._buffered.get(key, []))
            for key, row in self._own_roots(pieces, plain).items()
        }
        late = [key for key in pieces.steps if self._past.get(key, _Outcome.WHOLE) is not _Outcome.WHOLE]
        processed = {*(key for key in whole if key not in buffered), *late}.difference(open_trace_groups)
        alone = pieces.rows_of(processed)
        # By entry of the table, of which few are the same trace, and then by trace.
        of_entries = np.bincount(table.trace, minlength=traces) if pieces.counts is None else pieces.counts
        of_entries = of_entries - np.bincount(table.trace[np.concatenate((open_rows, alone))], minlength=traces)
        counts = np.bincount(first, weights=of_entries, minlength=traces).astype(np.int64)
        for at, parts in buffered.values():
            counts[at] += sum(map(len, parts))
        max_spans, max_bytes = self._limits_of(table.trace_ids)
        large = counts > max_spans
        most, allowed = int(counts.max(initial=0)), max_bytes.min(initial=np.iinfo(np.int64).max)
        tables = [table, *(part for _, parts in buffered.values() for part in parts)]
        if most * _LARGEST_SPAN > allowed and max(most_bytes(part, most) for part in tables) > allowed:
            of_spans = span_sizes(table)
            of_spans[open_rows] = 0
            sizes = np.bincount(first[table.trace], weights=of_spans, minlength=traces)
            for at, parts in buffered.values():
                sizes[at] += sum(int(span_sizes(part).sum()) for part in parts)
            large |= sizes > max_bytes
        grows = pieces.enclosing != 0
        grows[first[pieces.is_segment]] = True
        large |= self._capacity.overflowing(table.trace_ids, np.where(grows & ~large, counts, 0), max_spans)
        if large.any():
            needs_processing = large[first][table.trace]
            needs_processing[open_rows], needs_processing[alone] = False, True
            alone = np.flatnonzero(needs_processing)
        return alone, {key for key, (at, _) in buffered.items() if not large[at]}

    def _limits_of(self, trace_ids: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Spans and bytes that each trace may have."""
        if not self._capacity.has_joined:
            budget, traces = self.budget, len(trace_ids)
            return np.full(traces, budget.max_spans, np.int64), np.full(traces, budget.max_bytes, np.int64)
        budgets = [self._budget_of(trace_id.tobytes()) for trace_id in trace_ids]
        spans, sizes = [budget.max_spans for budget in budgets], [budget.max_bytes for budget in budgets]
        return np.array(spans, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def _decide_groups(
        self, pieces: Pieces, rows: Array, whole: Sequence[int], sampled: Mapping[int, bool]
    ) -> Iterator[SpanTable]:
        table, enclosing = pieces.table, pieces.enclosing[pieces.table.trace]
        singly = np.isin(pieces.trace_group[rows], np.array([*whole, *pieces.steps], dtype=np.uint64))
        singly |= enclosing[rows] == 0
        groups, buffered = dict(pieces.groups(rows[singly])), set(whole)
        together: Collection[int] = ()
        if not tokens(table.names, table.name).any():
            plain = [key for key in groups if self._is_plain(pieces, key, sampled, was_buffered=key in buffered)]
            together = self._own_roots(pieces, plain)
        if together:
            yield from self._reduced_together(pieces, {key: groups.pop(key) for key in together})
        below: dict[int, list[SpanTable]] = {}
        for key in dict.fromkeys([*(key for key in whole if key not in together), *groups]):
            give_way()
            parts, own = self._buffered.pop(key, []), groups.get(key)
            if own is not None:
                parts.append(taken(table, own))
            if not parts:  # it was sent early, and its root was lost
                del self._sent_early[key]
                continue
            trace_group = _TraceGroupSpans.of(
                parts, key, pieces.steps.get(key), 0 if own is None else int(enclosing[own[0]])
            )
            in_parts = key in self._sent_early
            if (spans := self._spans_to_send(trace_group, sampled, was_buffered=key in buffered)) is None:
                continue
            if trace_group.is_segment or not trace_group.enclosing or in_parts:
                yield spans
            else:
                below.setdefault(trace_group.enclosing, []).append(spans)
        for key, own in _groups(enclosing[rows[~singly]], rows[~singly]):
            below.setdefault(key, []).append(taken(table, own))
        for key, parts in below.items():
            yield self._in_application(_in_one_trace(joined_tables(parts)), key)

    def _is_plain(self, pieces: Pieces, key: int, sampled: Mapping[int, bool], *, was_buffered: bool) -> bool:
        """Whether only its size may prevent a trace group from being sent unchanged: it was not reduced before, and is sampled.

        Not if earlier drains brought tokens of ``generate``, which are aggregated trace group by trace group.
        """
        if (
            key in self._past
            or key in self._sent_early
            or any(tokens(part.names, part.name).any() for part in self._buffered.get(key, ()))
        ):
            return False
        step = pieces.steps.get(key)
        is_decided = self._keeps_all or not was_buffered or (step is not None and step.segment is not None)
        return is_decided and (self._keeps_all or sampled.get(key, True))

    @staticmethod
    def _own_roots(pieces: Pieces, keys: Sequence[int]) -> dict[int, int]:
        """Returns the rows of the roots of trace groups: those that are in this drain, and in a trace of their own."""
        table = pieces.table
        rows = rows_of_spans(table, np.array(keys, dtype=np.uint64)).tolist()
        is_own = [row >= 0 and not pieces.enclosing[table.trace[row]] for row in rows]
        return {key: row for key, row, own in zip(keys, rows, is_own, strict=True) if own}

    def _reduced_together(self, pieces: Pieces, own: Mapping[int, Array]) -> Iterator[SpanTable]:
        """Reduces complete trace groups, each in its own trace, to the trace size limit. ``own``: their rows in this drain."""
        give_way()
        keys = np.fromiter(sorted(own), np.uint64, len(own))
        rows = np.sort(np.concatenate([*own.values()]))
        numbers = [np.searchsorted(keys, pieces.trace_group[rows])]
        tables = [pieces.table if len(rows) == len(pieces.table) else picked(pieces.table, rows)]
        for number, key in enumerate(keys.tolist()):
            parts = self._buffered.pop(key, [])
            tables = [*parts, *tables]
            numbers = [*(np.full(len(part), number) for part in parts), *numbers]
        table, of_row = joined_tables(tables), np.concatenate(numbers)
        while len(keys):
            roots = rows_of_spans(table, keys)
            budgets = [self._budget_of(table.trace_ids[table.trace[row]].tobytes()) for row in roots.tolist()]
            done = reduced_together(table, of_row, budgets, roots)
            give_way()
            if done.is_within.all():
                self._note_reduced(pieces, table, of_row, keys, done)
                yield done.table
                return
            # Each of these is split by itself, and the others are reduced anew: a link to a span of it leads where it goes.
            for number in np.flatnonzero(~done.is_within).tolist():
                part, key = taken(table, np.flatnonzero(of_row == number)), int(keys[number])
                yield self._within_limit(_TraceGroupSpans.of([part], key, pieces.steps.get(key), 0), 0)
            rows = np.flatnonzero(done.is_within[of_row])
            table, of_row = picked(table, rows), (np.cumsum(done.is_within) - 1)[of_row[rows]]
            keys = keys[done.is_within]

    def _note_reduced(
        self, pieces: Pieces, table: SpanTable, of_row: Array, keys: Array, done: ReducedTogether
    ) -> None:
        """Counts what was done to trace groups, and stores where their spans are now. ``table``, ``of_row``: before."""
        counts, rows = np.bincount(of_row, minlength=len(keys)).tolist(), rows_of_spans(table, keys).tolist()
        for key, row, count in zip(keys.tolist(), rows, counts, strict=True):
            if (step := pieces.steps.get(key)) is not None and step.segment is not None:
                trace_id = table.trace_ids[table.trace[row]].tobytes()
                self._capacity.spend(trace_id, min(count, self._budget_of(trace_id).max_spans))
        self._figures.update(aggregated=int(done.aggregated.sum()), collapsed=int(done.collapsed.sum()))
        is_changed = done.aggregated + done.collapsed > 0
        self._reduced_now.update(keys[is_changed].tolist())
        changed = np.flatnonzero(is_changed[of_row])
        if changed.size:
            before = table if len(changed) == len(table) else picked(table, changed)
            self._moved.note(before, done.table, keys[of_row[changed]], became=done.became[changed])

    # ---- processing of trace groups ----

    def _spans_to_send(
        self, trace_group: _TraceGroupSpans, sampled: Mapping[int, bool], *, was_buffered: bool
    ) -> SpanTable | None:
        """Returns the spans of a trace group to send; None for none."""
        table, key = trace_group.table, trace_group.target.span_id
        if key in self._past:
            return self._late(trace_group, self._past[key])
        if trace_group.at is None:
            return (
                self._reduced(trace_group, self._budget_of(trace_group.trace_id))
                if trace_group.is_segment or key in self._sent_early
                else table
            )
        if was_buffered and not self._keeps_all and not self._is_sampled(trace_group, trace_group.at, sampled):
            left = root_only(table, trace_group.target)
            self._figures["detail_dropped"] += len(table) - len(left)
            self._moved.note(table, left, key)
            trace_group = trace_group._replace(table=left, at=row_of(left, key))
        if trace_group.is_segment or not trace_group.enclosing or key in self._sent_early:
            return self._within_limit(trace_group, trace_group.at or 0)
        return trace_group.table

    def _late(self, trace_group: _TraceGroupSpans, outcome: _Outcome) -> SpanTable | None:
        """Handles spans that arrive after the decision on their step: dropped if only its root was sent, else sent in linked traces."""
        if outcome is _Outcome.ROOT_ONLY:
            self._figures["detail_dropped"] += len(trace_group.table)
            self._moved.note(
                trace_group.table, taken(trace_group.table, np.empty(0, np.int64)), trace_group.target.span_id
            )
            return None
        return self._reduced(trace_group, self._budget_of(trace_group.trace_id))

    def _is_sampled(self, trace_group: _TraceGroupSpans, at: int, sampled: Mapping[int, bool]) -> bool:
        table = trace_group.table
        if table.row[at] < 0:
            return sampled.get(trace_group.target.span_id, True)
        duration = int(table.end[at] - table.start[at])
        has_to_be = trace_group.target.span_id in self._failed | self._sent_early.keys()
        is_selected = self._selects(trace_group.target.trace_id)
        return self.sampler.of_trace_group(trace_group.target.name, duration, failed=has_to_be, selected=is_selected)

    def _within_limit(self, trace_group: _TraceGroupSpans, at: int) -> SpanTable:
        """Reduces a trace group to the trace size limit; in a trace of the application, to the rest of that trace's limit."""
        target, trace_id = trace_group.target, trace_group.trace_id
        budget = self._budget_of(trace_id)
        if trace_group.enclosing:
            left = self._capacity.left(trace_id, budget.max_spans)
            is_linked = target.span_id in self._sent_early  # by the parts that were sent before
            if left < len(trace_group.table) and left * _MIN_CAPACITY_DIVISOR < budget.max_spans and not is_linked:
                above = target._replace(span_id=int(trace_group.table.parent_span_id[at]))
                return self._reduced(trace_group, budget, target=above)
            budget = budget._replace(max_spans=max(min(budget.max_spans, left), 1))
        if trace_group.enclosing or trace_group.is_segment:
            self._capacity.spend(trace_id, min(len(trace_group.table), budget.max_spans))
        return self._reduced(trace_group, budget)

    def _in_application(self, table: SpanTable, enclosing: int) -> SpanTable:
        """The spans below an application span: in its trace as far as they fit, the rest in linked traces."""
        trace_group = _TraceGroupSpans.of([table], enclosing, None, enclosing)
        trace_id = trace_group.trace_id
        budget = self._budget_of(trace_id)
        left = self._capacity.left(trace_id, budget.max_spans)
        if left < len(table) and left * _MIN_CAPACITY_DIVISOR < budget.max_spans:
            return self._reduced(trace_group, budget)
        reduced_table = self._reduced(trace_group, budget._replace(max_spans=min(budget.max_spans, left)), stays=True)
        self._capacity.spend(trace_id, min(len(table), left))
        return reduced_table

    def _reduced(
        self,
        trace_group: _TraceGroupSpans,
        budget: Budget,
        *,
        target: TargetTrace | None = None,
        continues: bool = False,
        stays: bool = False,
    ) -> SpanTable:
        """Reduces a trace group to the budget. ``target``: the root to which its parts link, if not its own."""
        key = trace_group.target.span_id
        before = self._sent_early.pop(key, Reduction())
        reduced_table, done = reduced(
            trace_group.table,
            budget,
            target or trace_group.target,
            new_trace_id=self._new_trace_id,
            new_span_id=self._new_span_id,
            before=before,
            stays=stays,
        )
        self._figures.update(aggregated=done.aggregated, collapsed=done.collapsed, parts=done.parts)
        if continues:
            self._sent_early[key] = before + done
        elif reduced_table is not trace_group.table:
            self._reduced_now.add(key)
        if reduced_table is not trace_group.table:
            self._moved.note(trace_group.table, reduced_table, key, became=done.became)
        return reduced_table

    def _sent_in_parts(self) -> Iterator[SpanTable]:
        """Yields the buffered spans of trace groups that run for too long, then of the largest ones until the buffer is within its limit."""
        sizes = {key: _nbytes(tables) for key, tables in self._buffered.items()}
        late = [key for key, tables in self._buffered.items() if _lasts(tables) > self._max_buffered_ns(key)]
        while late or sum(sizes.values()) > self.max_bytes:
            key = late.pop() if late else max(sizes, key=sizes.__getitem__)
            del sizes[key]
            trace_group = _TraceGroupSpans.of(self._buffered.pop(key), key, self._running.get(key), 0)
            if trace_group.at is not None:  # the root has ended, but not all descendants: the root is sent last
                self._buffered[key] = [taken(trace_group.table, np.array([trace_group.at]))]
                trace_group = trace_group._replace(
                    table=taken(trace_group.table, np.delete(np.arange(len(trace_group.table)), trace_group.at)),
                    at=None,
                )
            if len(trace_group.table):
                yield self._reduced(trace_group, self._budget_of(trace_group.trace_id), continues=True)

    def _max_buffered_ns(self, trace_group: int) -> int:
        step = self._running.get(trace_group)
        return MAX_BUFFERED_STEP_NS if step is not None and step.segment is not None else MAX_BUFFERED_NS


class _TraceGroupSpans(NamedTuple):
    """The spans of one trace group, as one table with one trace."""

    table: SpanTable
    target: TargetTrace
    at: int | None
    """Index of its root in the table; None if missing."""
    is_segment: bool
    """Whether it is a step, or what stands between steps."""
    enclosing: int
    """The span of the application that it is below, 0 for none."""

    @property
    def trace_id(self) -> bytes:
        return self.target.trace_id.to_bytes(16, "big")

    @classmethod
    def of(cls, parts: Sequence[SpanTable], key: int, step: StepSpan | None, enclosing: int) -> _TraceGroupSpans:
        table = _in_one_trace(joined_tables(parts))
        row = row_of(table, key)
        at = row if row >= 0 else None
        trace_id = int.from_bytes(table.trace_ids[0].tobytes(), "big")
        state = table.trace_states[0] if table.trace_states else ""
        name = step.name if step is not None else PART_NAME if at is None else table.names[table.name[at]]
        number = -1 if step is None and at is None else int(table.step[at]) if step is None else step.number
        target = TargetTrace(trace_id, key, name, number, state)
        return cls(table, target, at, step is not None and step.segment is not None, enclosing)


def _nbytes(tables: Sequence[SpanTable]) -> int:
    return sum(table.nbytes for table in tables)


def _lasts(tables: Sequence[SpanTable]) -> int:
    """Nanoseconds from the first begin to the last end."""
    return max(int(table.end.max()) for table in tables) - min(int(table.start.min()) for table in tables)


def _first_of_each(trace_ids: Array) -> npt.NDArray[np.int64]:
    """Returns for each entry the first one with the same id: a step span and its events may have different entries."""
    known: dict[bytes, int] = {}
    ids = np.ascontiguousarray(trace_ids).view("V16").reshape(-1).tolist()
    return np.fromiter(map(known.setdefault, ids, range(len(ids))), np.int64, len(ids))


def _groups(trace_group: Array, rows: Array) -> Iterator[tuple[int, Array]]:
    """Yields the rows of each trace group, rising. ``trace_group``: of each row."""
    if len(rows) and (trace_group == trace_group[0]).all():
        yield int(trace_group[0]), rows
    elif len(rows):
        order = np.argsort(trace_group, kind="stable")
        cuts = np.flatnonzero(np.diff(trace_group[order])) + 1
        for part in np.split(order, cuts):
            yield int(trace_group[part[0]]), rows[part]


def _in_one_trace(table: SpanTable) -> SpanTable:
    """Returns the table with a single entry for its trace."""
    if len(table.trace_ids) == 1:
        return table
    return replace(
        table,
        trace=np.zeros(len(table), dtype=np.uint32),
        trace_ids=table.trace_ids[:1],
        trace_states=table.trace_states[:1],
    )


def bounded(
    table: SpanTable,
    root: npt.NDArray[np.uint64],
    budget: Budget,
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
) -> SpanTable:
    """Returns the spans of a profile with every trace within the size limit; the table itself if all are.

    Args:
        table: spans of a whole recording, synthetic roots first; all roots have the same parent, or none.
        root: for each span, the id of its synthetic root.
        budget: size limit of each trace.
        new_trace_id: as ``generate_trace_id`` of OpenTelemetry's IdGenerator.
        new_span_id: as ``generate_span_id``.
    """
    enclosing = np.full(len(table.trace_ids), table.parent_span_id[0])
    pieces = Pieces(table, root, (), enclosing, np.zeros(len(enclosing), np.bool_), {}, [], final=True)
    return joined_tables(SpanBuffer(SelectionRules(budget), new_trace_id, new_span_id).decide(pieces))
