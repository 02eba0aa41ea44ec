"""Spans of batches of requests, and of the requests in them, as a table."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.batch import Names
from otel_torchprof._columns.phases import PHASE_NAME

from .span_table import LINK, AttributeColumn, AttributeType, SpanTable
from .span_tables import joined_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import SpanContext

    from otel_torchprof._columns.generation import Generation

    from .span_table import Array

BATCH_NAME = "torch.batch"
"""Name of the span of a batch, above its modules and operators."""
QUEUE_NAME = "torch.request.queue"
"""Name of the span from a request's arrival until a batch took it."""
STAY_NAME = "torch.request.batch"
"""Name of the span of a request in a batch."""
_NAMES = ("", BATCH_NAME, QUEUE_NAME, STAY_NAME)

_SIZE, _FAILED, _POSITION = "torch.batch.size", "torch.batch.failed_requests", "torch.batch.position"
_SHARE, _TOKENS, _PADDING = "torch.batch.share_duration", "torch.batch.tokens", "torch.batch.padding_ratio"
_CACHE, _PREEMPTIONS = "torch.batch.cache_usage_ratio", "torch.request.preemptions"
_MODEL, _ERROR_TYPE, _ASYNC = "gen_ai.request.model", "error.type", "torch.async"
_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME

_ON_BOTH = "on [batches and requests in them](services.md#requests-in-one-batch)"
_ON_REQUESTS = "on requests in batches"

REQUESTS: tuple[tuple[str, AttributeType, str, str], ...] = (
    (_SIZE, _INT64, _ON_BOTH, "number of requests in the batch"),
    (_FAILED, _INT64, "on batches, if there are any", "number of requests that failed before the batch ended"),
    (_POSITION, _INT64, _ON_REQUESTS, "place of the request in the batch, from 0"),
    (
        _SHARE,
        _DOUBLE,
        _ON_REQUESTS,
        "share of the batch's duration in seconds, by time in the batch times tokens, if known; the shares add up to the duration",
    ),
    (_TOKENS, _INT64, f"{_ON_BOTH}, if given", "number of tokens without padding"),
    (_PADDING, _DOUBLE, f"{_ON_BOTH}, with tokens", "share of padding, if all are padded to the longest request"),
    (_CACHE, _DOUBLE, "on steps of continuous batching", "share of the cache that is in use"),
    (
        _PREEMPTIONS,
        _INT64,
        "on requests to continuous batching, if any",
        "number of times that it was put back into the queue",
    ),
)
"""Key, type, when a span has it, and meaning; in the order of the documentation page."""


class EndedBatch(NamedTuple):
    """A batch that has ended, or requests that have left their queue without one. Each list has an entry per request."""

    begin: int
    """Unix ns, as all times."""
    end: int
    own: SpanContext | None
    """Its span; None without a batch."""
    parent: SpanContext
    """The span that it is below; an invalid one for none."""
    contexts: Sequence[SpanContext]
    """The spans of the requests; invalid ones for none."""
    put: Sequence[int]
    """When they were put into the queue; -1 if unknown."""
    failures: Mapping[int, tuple[int, str]]
    """End and ``error.type`` of requests that failed, by place."""
    tokens: Sequence[int] | None = None
    error_type: str = ""
    """Of the exception that ended it; empty for none."""
    model: str = ""
    phases: Sequence[str] | None = None
    """What a step of continuous batching did for each request, without padding; None for another batch."""
    cache_usage: float = 0.0
    """Share of the cache that such a step uses."""


class EndedRequest(NamedTuple):
    """A request to continuous batching that has ended."""

    begin: int
    """Unix ns."""
    end: int
    own: SpanContext
    parent: SpanContext
    """The span that it is below; an invalid one for none."""
    name: str
    generation: Generation
    preemptions: int


class RequestSpans(NamedTuple):
    """Spans of some batches."""

    table: SpanTable
    is_inside: Array
    """Mask of queues and stays, of which a request may have any number."""
    sums: Mapping[str, list[int]]
    """Count, duration and self time in ns by name, of queues and stays, which overlap and have no self time."""
    child_time: Mapping[int, int]
    """Time in ns that the spans take in those above them, by span id."""
    others: Sequence[tuple[str, int, int]]
    """Name, span id and duration of batches and whole requests."""


def request_spans(ended: Sequence[EndedBatch | EndedRequest], new_ids: Callable[[int], Array]) -> RequestSpans:
    """Returns the spans of at least one batch or request.

    Costs a microsecond per request in a batch. ``new_ids``: returns so many new span ids.
    """
    batches = [each for each in ended if isinstance(each, EndedBatch)]
    requests = [each for each in ended if isinstance(each, EndedRequest)]
    tables = [_spans_of_batches(batches, new_ids)] if batches else []
    table = joined_tables(tables + ([_whole_requests(requests)] if requests else []))
    names, duration = table.name.tolist(), table.end - table.start
    leaves = [number for number, name in enumerate(table.names) if name in (QUEUE_NAME, STAY_NAME)]
    sums = {}
    for number in leaves:
        of_name = duration[table.name == number]
        sums[table.names[number]] = [len(of_name), int(of_name.sum()), 0]
    child_time: dict[int, int] = {}
    others = []
    spans = zip(names, table.span_id.tolist(), table.parent_span_id.tolist(), duration.tolist(), strict=True)
    for number, span_id, parent, each in spans:
        if parent:
            child_time[parent] = child_time.get(parent, 0) + each
        if number not in leaves:
            others.append((table.names[number], span_id, each))
    return RequestSpans(table, np.isin(table.name, leaves), sums, child_time, others)


def _spans_of_batches(ended: Sequence[EndedBatch], new_ids: Callable[[int], Array]) -> SpanTable:
    """The spans of at least one batch: first the batches, then times in the queue, then in batches; only of sampled requests."""
    requests = _Requests(ended)
    batches = np.flatnonzero(requests.has_own)
    queues = np.flatnonzero(requests.is_sampled & (requests.put >= 0))
    stays = np.flatnonzero(requests.is_sampled & requests.has_own[requests.of])
    blocks = _Blocks(requests, batches, queues, stays)
    own = [batch.own for batch in ended if batch.own is not None]
    name = np.repeat(np.arange(1, len(_NAMES), dtype=np.uint32), [len(batches), len(queues), len(stays)])
    above = [batch.parent for batch in ended if batch.own is not None]
    start = blocks.of(requests.begin, requests.put, requests.begin[requests.of])
    end = blocks.of(requests.end, requests.begin[requests.of], requests.stay_end)
    start = np.minimum(start, end)
    of_batches = np.array([each.span_id for each in above], np.uint64)
    parent = np.concatenate((of_batches, requests.span_id[queues], requests.span_id[stays]))
    texts = {text: place for place, text in enumerate(_NAMES)}
    attributes = tuple(blocks.attributes(ended, texts))
    states = [each.trace_state for each in own] + requests.states
    remote = blocks.of(np.zeros(len(ended), np.uint8), requests.is_remote, requests.is_remote)
    remote[: len(own)] = [each.is_remote for each in above]
    return SpanTable(
        name=name,
        start=start,
        end=end,
        trace=np.concatenate((np.arange(len(own)), len(own) + queues, len(own) + stays)),
        trace_ids=_ids([*(each.trace_id for each in own), *requests.trace_ids]),
        span_id=np.concatenate(
            (np.array([each.span_id for each in own], np.uint64), new_ids(len(queues) + len(stays)))
        ),
        parent_span_id=parent,
        error=(blocks.error_type > 0).astype(np.uint8),
        row=np.full(len(name), -1),
        step=np.full(len(name), -1),
        links=_links(requests, own, batches, stays, len(queues)),
        attributes=attributes,
        names=Names.of(list(texts)),
        trace_states=tuple(state.to_header() if state else "" for state in states) if any(states) else (),
        parent_is_remote=remote if remote.any() else None,
    )


class _Requests:
    """The requests of all batches as columns."""

    def __init__(self, ended: Sequence[EndedBatch]) -> None:
        sizes = np.array([len(batch.contexts) for batch in ended])
        chained = itertools.chain.from_iterable
        ids, span_ids, remote, flags, states, _ = zip(*chained(batch.contexts for batch in ended), strict=True)
        self.trace_ids, self.states = ids, list(states)
        self.span_id = np.array(span_ids, np.uint64)
        self.is_remote = np.array(remote, np.uint8)
        self.is_sampled = np.array(flags, np.uint8) & 1 > 0
        self.put = np.array([*chained(batch.put for batch in ended)], np.int64)
        self.begin = np.array([batch.begin for batch in ended], np.int64)
        self.end = np.array([batch.end for batch in ended], np.int64)
        self.has_own = np.array([batch.own is not None for batch in ended])
        self.of = np.repeat(np.arange(len(ended)), sizes)
        """The batch of each."""
        self.first, self.sizes = np.cumsum(sizes) - sizes, sizes
        self.position = np.arange(len(self.of)) - self.first[self.of]
        self.has_tokens = np.array([batch.tokens is not None for batch in ended])
        counts = (batch.tokens or itertools.repeat(0, len(batch.contexts)) for batch in ended)
        self.tokens = np.array([*chained(counts)], np.int64)
        self.longest = np.maximum.reduceat(self.tokens, self.first)
        self.stay_end = self.end[self.of]
        for batch, place in zip(ended, self.first.tolist(), strict=True):
            for number, (end, _) in batch.failures.items():
                self.stay_end[place + number] = min(max(end, batch.begin), batch.end)

    def shares(self) -> Array:
        """Seconds of each batch's duration that are each request's."""
        duration = (self.end - self.begin) / 1e9
        tokens = np.where(self.longest[self.of] > 0, self.tokens, 1)
        weights = (self.stay_end - self.begin[self.of]) * tokens.astype(np.float64)
        whole = np.bincount(self.of, weights, len(self.sizes))[self.of]
        even = 1 / self.sizes[self.of]
        shares: Array = duration[self.of] * np.divide(weights, whole, out=even, where=whole > 0)
        return shares

    def padding(self) -> tuple[Array, Array]:
        """Share of padding of each batch, and of each request."""
        longest, is_known = np.maximum(self.longest, 1), self.longest > 0
        total = np.bincount(self.of, self.tokens, len(self.sizes))
        of_requests = (1 - self.tokens / longest[self.of]) * is_known[self.of]
        return (1 - total / (longest * self.sizes)) * is_known, of_requests


class _Blocks:
    """The rows of a table: batches, times in the queue, times in batches."""

    def __init__(self, requests: _Requests, batches: Array, queues: Array, stays: Array) -> None:
        self._requests = requests
        self._batches, self._queues, self._stays = batches, queues, stays
        self.error_type = np.zeros(0, np.uint32)
        """Index of the text of each row's ``error.type``; 0 for none."""

    def of(self, of_batches: Array, of_queues: Array, of_stays: Array) -> Array:
        """Values of all rows. The first are one per batch, the others one per request."""
        return np.concatenate((of_batches[self._batches], of_queues[self._queues], of_stays[self._stays]))

    def attributes(self, ended: Sequence[EndedBatch], texts: dict[str, int]) -> Iterable[AttributeColumn]:
        """Yields the columns, and adds texts."""
        requests, of = self._requests, self._requests.of
        none, no_queue = np.zeros(len(ended), np.int64), np.zeros(len(of), np.int64)
        model = np.array([texts.setdefault(batch.model, len(texts)) for batch in ended], np.uint32)
        errors = np.array([texts.setdefault(batch.error_type, len(texts)) for batch in ended], np.uint32)
        of_requests, failed = errors[of], none.copy()
        for number, (batch, first) in enumerate(zip(ended, requests.first.tolist(), strict=True)):
            failed[number] = len(batch.failures)
            for place, (_, error_type) in batch.failures.items():
                of_requests[first + place] = texts.setdefault(error_type, len(texts))
        in_queue = np.where(requests.has_own[of], 0, of_requests)
        self.error_type = self.of(errors, in_queue, of_requests)
        is_stay = self.of(none, no_queue, no_queue + 1)
        is_given = self.of(requests.has_tokens, no_queue, requests.has_tokens[of])
        total = np.bincount(of, requests.tokens, len(ended)).astype(np.int64)
        of_batch, of_request = requests.padding()
        chained = itertools.chain.from_iterable
        phases = (batch.phases or itertools.repeat("", len(batch.contexts)) for batch in ended)
        phase = np.array([texts.setdefault(text, len(texts)) for text in chained(phases)], np.uint32)
        is_step = np.array([batch.phases is not None for batch in ended])
        is_padded = is_given * self.of(~is_step, no_queue, ~is_step[of])
        cache = np.array([batch.cache_usage for batch in ended])
        columns: list[tuple[str, AttributeType, Array, Array]] = [
            (_SIZE, _INT64, size := self.of(requests.sizes, no_queue, requests.sizes[of]), size),
            (_MODEL, _NAME, name := self.of(model, model[of], model[of]), name),
            (_FAILED, _INT64, count := self.of(failed, no_queue, no_queue), count),
            (_POSITION, _INT64, self.of(none, no_queue, requests.position), is_stay),
            (_SHARE, _DOUBLE, self.of(none, no_queue, requests.shares()), is_stay),
            (_TOKENS, _INT64, self.of(total, no_queue, requests.tokens), is_given),
            (_PADDING, _DOUBLE, self.of(of_batch, no_queue, of_request), is_padded),
            (PHASE_NAME, _NAME, name := self.of(none, no_queue, phase), name),
            (_CACHE, _DOUBLE, self.of(cache, no_queue, no_queue), self.of(is_step, no_queue, no_queue)),
            (_ERROR_TYPE, _NAME, self.error_type, self.error_type),
            # Waits that overlap: no thread's time, which tables of self times add up.
            (_ASYNC, _BOOL, is_request := self.of(none, no_queue + 1, no_queue + 1), is_request),
        ]
        return (AttributeColumn.where(*column) for column in columns if column[-1].any())


def _ids(trace_ids: Sequence[int]) -> Array:
    return np.frombuffer(b"".join([each.to_bytes(16, "big") for each in trace_ids]), np.uint8).reshape(-1, 16)


def _links(requests: _Requests, own: Sequence[SpanContext], batches: Array, stays: Array, queues: int) -> Array:
    """Links from each batch to the spans of its requests, each once, and from each time in a batch to it."""
    of_stay = np.searchsorted(batches, requests.of[stays])
    order = np.lexsort((requests.span_id[stays], of_stay))
    ids, row = requests.span_id[stays][order], of_stay[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (ids[1:] != ids[:-1]) | (row[1:] != row[:-1])
    chosen = np.sort(order[is_new])
    links = np.empty(len(chosen) + len(stays), LINK)
    links["row"] = np.concatenate((of_stay[chosen], len(own) + queues + np.arange(len(stays))))
    own_ids = np.array([each.span_id for each in own], np.uint64)
    links["span_id"] = np.concatenate((requests.span_id[stays[chosen]], own_ids[of_stay]))
    traces = _ids([*(each.trace_id for each in own), *requests.trace_ids])
    links["trace_id"] = traces[np.concatenate((len(own) + stays[chosen], of_stay))]
    return links


# ---- Whole requests to continuous batching ----

_TYPES = {str: _NAME, bool: _BOOL, int: _INT64, float: _DOUBLE}


def _whole_requests(ended: Sequence[EndedRequest]) -> SpanTable:
    """The spans of at least one request. Costs some microseconds per request."""
    texts, rows = {"": 0}, len(ended)
    names = [texts.setdefault(request.name, len(texts)) for request in ended]
    columns: dict[tuple[str, type], tuple[list[int], list[Any]]] = {}
    for row, request in enumerate(ended):
        attributes = {**request.generation.attributes(), _PREEMPTIONS: request.preemptions or None}
        attributes[_ERROR_TYPE] = request.generation.error_type or None
        for key, value in attributes.items():
            if value is not None:
                at, values = columns.setdefault((key, type(value)), ([], []))
                at.append(row)
                values.append(texts.setdefault(value, len(texts)) if isinstance(value, str) else value)
    states = [request.own.trace_state for request in ended]
    remote = np.array([request.parent.is_remote for request in ended], np.uint8)
    return SpanTable(
        name=np.array(names, np.uint32),
        start=np.array([request.begin for request in ended], np.int64),
        end=np.array([request.end for request in ended], np.int64),
        trace=np.arange(rows, dtype=np.uint32),
        trace_ids=_ids([request.own.trace_id for request in ended]),
        span_id=np.array([request.own.span_id for request in ended], np.uint64),
        parent_span_id=np.array([request.parent.span_id for request in ended], np.uint64),
        error=np.array([bool(request.generation.error_type) for request in ended], np.uint8),
        row=np.full(rows, -1),
        step=np.full(rows, -1),
        links=np.empty(0, LINK),
        attributes=tuple(
            AttributeColumn(key, _TYPES[kind], np.array(values, _TYPES[kind].dtype), np.array(at, np.uint32))
            for (key, kind), (at, values) in columns.items()
        ),
        names=Names.of(list(texts)),
        trace_states=tuple(state.to_header() if state else "" for state in states) if any(states) else (),
        parent_is_remote=remote if remote.any() else None,
    )
