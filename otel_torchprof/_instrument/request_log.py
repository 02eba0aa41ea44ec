"""The batches of requests that have ended, until a drain takes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._model.request_spans import EndedBatch, request_spans
from otel_torchprof._process import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._export.provider import Provider
    from otel_torchprof._model.request_spans import EndedRequest, RequestSpans
    from otel_torchprof._model.span_table import Array
    from otel_torchprof._model.step_spans import Trace

_MOST = 100_000
"""Most spans that wait for a drain, some 40 MB; the oldest batches of more are dropped."""


class RequestLog:
    """Takes batches from any thread, in a microsecond each.

    Args:
        provider: gives ids, and samples batches of requests without spans.
        span_ended: notes the end of a span that was current.
    """

    def __init__(self, provider: Provider, span_ended: Callable[[int], None]) -> None:
        self._provider = provider
        self.new_span_id, self.span_ended = provider.new_span_id, span_ended
        self._ended: deque[EndedBatch | EndedRequest] = deque()
        self._waiting = 0
        """Number of their spans, about."""
        self._lock = threads.RLock()  # a signal handler may end a request
        self.dropped = 0
        """Number of dropped spans."""

    def new_trace(self, name: str) -> Trace:
        """Asks the sampler about a span that would be the root of a trace."""
        return self._provider.new_trace(name, -1, None)

    def add(self, ended: EndedBatch | EndedRequest) -> None:
        """Takes a batch, or a request, that has ended."""
        with self._lock:
            self._ended.append(ended)
            self._waiting += _spans_of(ended)
            while self._waiting > _MOST and len(self._ended) > 1:
                self.dropped += (spans := _spans_of(self._ended.popleft()))
                self._waiting -= spans

    @property
    def is_due(self) -> bool:
        """Whether a quarter of the possible spans wait."""
        return self._waiting > _MOST // 4

    def take(self, watermark: int) -> RequestSpans | None:
        """Returns the spans of batches that ended up to a time, Unix ns, up to which events were drained; None for none.

        One thread at a time.
        """
        taken: list[EndedBatch | EndedRequest] = []
        with self._lock:
            while self._ended and self._ended[0].end <= watermark:
                taken.append(self._ended.popleft())
                self._waiting -= _spans_of(taken[-1])
        return request_spans(taken, self._new_span_ids) if taken else None

    def _new_span_ids(self, count: int) -> Array:
        return np.array([self.new_span_id() for _ in range(count)], np.uint64)


def _spans_of(ended: EndedBatch | EndedRequest) -> int:
    return 1 + len(ended.contexts) if isinstance(ended, EndedBatch) else 1
