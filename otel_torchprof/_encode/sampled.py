"""Samples of Python stacks as an attribute of the spans during which they were taken: ``torch.samples``."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.samples import MOST_CALLS, SAMPLES, Samples, kept_calls
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._model.live_table import with_attributes
from otel_torchprof._model.span_tree import rows_of_spans
from otel_torchprof._model.step_spans import PROFILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._columns.batch import Array, Batch, RecordedThread
    from otel_torchprof._columns.samples import Call
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import StepSpan

MOST_TEXT = 15_000
"""Bytes of the attribute: the sizes of traces are only computed if spans of 16,000 bytes might exceed them. Of more samples, fewer calls
of each are written, then each stands for its neighbours."""
_DEPTHS = (MOST_CALLS, MOST_CALLS // 2, MOST_CALLS // 4)
_MOST_SAMPLES = 512
"""Samples that may fit."""
_MOST_WAITING = 1 << 16
"""Samples that wait for the end of their span: ten minutes of a thread at 100 a second."""
_FEWEST_SHARED = 3
_SPREAD = 2_654_435_761
"""Knuth's multiplier, whose products have bits without a period."""


class _Taken(NamedTuple):
    """Which span each sample belongs to."""

    span_id: Array
    """Of each step, segment between steps or request that has ended."""
    start: Integers
    """Unix ns."""
    span: Integers
    """Of each sample, the index of its span; -1 for none."""


def _taken(samples: Samples, placed: Placed, ended: Sequence[StepSpan]) -> _Taken:
    """The spans that ended in a drain, or in a recording, and the samples of the thread of each."""
    groups = placed.trace_groups
    is_own = np.array([group.step is None and group.is_traced for group in groups], np.bool_)
    roots = np.flatnonzero(is_own[placed.trace_group] & placed.is_root) if is_own.any() else np.empty(0, np.int64)
    spans = [span for span in ended if span.thread is not None]
    anywhere = [span for span in ended if span.name == PROFILE_NAME and span.thread is None]
    batch, spans = placed.batch, [*spans, *anywhere]
    idents = np.array([thread.ident for thread in batch.threads], np.int64)
    span_id = np.concatenate((np.array([span.span_id for span in spans], np.uint64), placed.span_id[roots]))
    start = np.concatenate((np.array([span.start for span in spans], np.int64), batch["start"][roots]))
    end = np.concatenate((np.array([span.end for span in spans], np.int64), batch["end"][roots]))
    own = np.array([-1 if span.thread is None else span.thread for span in spans], np.int64)
    thread = np.concatenate((own, idents[batch["thread"][roots]]))
    taken, of_sample = np.full(len(samples), -1, np.int64), idents[samples.thread]
    for ident in distinct_values(of_sample).tolist():
        at = np.flatnonzero((thread == ident) | (thread < 0))
        if at.size:
            at, here = at[np.argsort(start[at], kind="stable")], np.flatnonzero(of_sample == ident)
            latest = at[np.maximum(np.searchsorted(start[at], samples.time[here], side="right") - 1, 0)]
            is_within = (start[latest] <= samples.time[here]) & (samples.time[here] < end[latest])
            taken[here] = np.where(is_within, latest, -1)
    return _Taken(span_id, start, taken)


def with_samples(table: SpanTable, placed: Placed, ended: Sequence[StepSpan]) -> SpanTable:
    """Adds :data:`SAMPLES` to the spans of steps, of segments between steps and of requests: the samples of their thread.

    None if an attribute with names of files or functions is hidden. Costs some 10 us per sample, and nothing without any.
    """
    samples = placed.batch.samples
    if samples is None or not len(samples) or config.HIDDEN_ATTRIBUTES.read() & (config.CODE | {SAMPLES}):
        return table
    taken = _taken(samples, placed, ended)
    rows = rows_of_spans(table, taken.span_id)
    texts = ((rows.item(span), text) for span, text in _texts(samples, taken) if rows[span] >= 0)
    return with_attributes(table, ((row, {SAMPLES: text}) for row, text in texts if text))


def _texts(samples: Samples, taken: _Taken) -> Iterator[tuple[int, str]]:
    order = np.argsort(taken.span, kind="stable")
    order = order[np.searchsorted(taken.span[order], 0) :]
    span = taken.span[order]
    times = samples.time[order] - taken.start[span], samples.duration[order]
    columns = (*(np.rint(column / 1e3).astype(np.int64) for column in times), samples.stack[order])
    entries = list(zip(*(column.tolist() for column in columns), strict=True))
    edges = [0, *(np.flatnonzero(np.diff(span)) + 1).tolist(), len(order)] if order.size else []
    for begin, end in pairwise(edges):
        yield span.item(begin), _text(entries[begin:end], samples.stacks)


_Entries = Sequence[tuple[int, int, int]]
"""Times since the span began and durations, us, and indices of stacks."""


def _text(entries: _Entries, stacks: Sequence[tuple[Call, ...]]) -> str:
    """The samples as JSON of at most :data:`MOST_TEXT` bytes; empty if not even one fits."""
    while len(entries) > _MOST_SAMPLES:
        entries = _halved(entries)
    while True:
        for depth in _DEPTHS:
            text = _json(entries, stacks, depth)
            if len(text) <= MOST_TEXT:
                return text
        if len(entries) == 1:
            return ""
        entries = _halved(entries)


def _halved(entries: _Entries) -> _Entries:
    """One of every two neighbours, which stands for both. Not always the same of them: what a loop does is periodic."""
    halved = []
    for at in range(0, len(entries), 2):
        pair = entries[at : at + 2]
        time, _, stack = pair[min(at // 2 * _SPREAD >> 16 & 1, len(pair) - 1)]
        halved.append((time, sum(duration for _, duration, _ in pair), stack))
    return halved


def _json(entries: _Entries, stacks: Sequence[tuple[Call, ...]], depth: int) -> str:
    if len(entries) == 1:  # as of most steps that last some milliseconds
        time, duration, number = entries[0]
        stack = _whole_json(kept_calls(stacks[number], depth))
        return f'{{"stacks":[{stack}],"samples":[[{time / 1e6},{duration / 1e6},0]]}}'
    places = {number: place for place, number in enumerate(dict.fromkeys([stack for _, _, stack in entries]))}
    texts = [f"[{time / 1e6},{duration / 1e6},{places[stack]}]" for time, duration, stack in entries]
    used = [kept_calls(stacks[number], depth) for number in places]
    first = _whole_json(used[0])
    others = (_stack_json(stack, before) for before, stack in pairwise(used))
    return f'{{"stacks":[{",".join((first, *others))}],"samples":[{",".join(texts)}]}}'


@functools.lru_cache(maxsize=512)
def _whole_json(stack: tuple[Call, ...]) -> str:
    """The calls of a stack as a JSON list."""
    return f"[{','.join(map(_call_json, stack))}]"


def _stack_json(stack: tuple[Call, ...], before: tuple[Call, ...]) -> str:
    """The calls of a stack as a JSON list; instead of outer calls that it shares with the stack before, their number."""
    shared = 0
    for call, other in zip(reversed(stack), reversed(before), strict=False):
        if call != other:
            break
        shared += 1
    if shared < _FEWEST_SHARED:
        return _whole_json(stack)
    return f"[{','.join([*map(_call_json, stack[: len(stack) - shared]), str(shared)])}]"


@functools.lru_cache(maxsize=4096)
def _call_json(call: Call) -> str:
    """A loop has the same calls in each of its steps."""
    return json.dumps(str(call))


class LiveSamples:
    """Samples of a running recording that no span has taken yet: those of a step come with earlier drains than its end. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: Samples | None = None
        self._threads: Sequence[RecordedThread] = ()

    def joined(self, batch: Batch) -> Batch:
        """The batch, with the samples of earlier drains that wait. Costs a copy of their columns."""
        waiting = self._waiting
        if waiting is None or not len(waiting):
            return batch
        threads, place = list(batch.threads), np.zeros(len(self._threads), np.int64)
        known = {thread.ident: at for at, thread in enumerate(threads)}
        for at in distinct_values(waiting.thread).tolist():
            thread = self._threads[at]
            place[at] = known.setdefault(thread.ident, len(threads))
            threads += [thread] if place[at] == len(threads) else []
        parts = [replace(waiting, thread=place[waiting.thread]), *([] if batch.samples is None else [batch.samples])]
        return replace(batch, samples=Samples.joined(parts), threads=threads)

    def keep(self, placed: Placed, ended: Sequence[StepSpan], since: int) -> None:
        """Keeps those that no span has taken that ended in this drain, and that one may take that has not ended.

        Args:
            placed: the drain.
            ended: the spans of steps and roots that ended in it.
            since: when the earliest segment began that has not ended, Unix ns; :data:`NEVER` without any.
        """
        batch = placed.batch
        samples = batch.samples
        if samples is not None and len(samples):
            open_since = np.full(len(batch.threads), NEVER, np.int64)
            np.minimum.at(open_since, batch.opens.thread, batch.opens.start)
            is_free: Flags = _taken(samples, placed, ended).span < 0
            is_free &= samples.time >= np.minimum(open_since[samples.thread], since)
            self._waiting, self._threads = samples.chosen(np.flatnonzero(is_free)[-_MOST_WAITING:]), batch.threads
