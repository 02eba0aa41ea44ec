"""Requests that a model serves in batches: when each was put in and taken, and its share of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_torchprof._model.request_spans import BATCH_NAME, EndedBatch, EndedRequest
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import process_changes, threads

from .compiled_code import leave_uncompiled

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable

    from typing_extensions import Self

    from otel_torchprof._model.step_spans import Trace


class Sink(Protocol):
    """A recording that takes spans of requests and batches. Its methods are for any thread."""

    def new_trace(self, name: str) -> Trace:
        """Asks the sampler about a span that would be the root of a trace."""

    def new_span_id(self) -> int:
        """Returns a new id."""

    def add(self, ended: EndedBatch | EndedRequest) -> None:
        """Takes a batch, or a request, that has ended."""

    def span_ended(self, span_id: int) -> None:
        """Notes that the span of a batch ends: later events are not inside it."""


_sinks: list[Sink] = []
_MOST_TOKENS = 1 << 40
"""Larger counts are taken as this, so that sums fit into 64 bits."""
_lock = threads.RLock()
"""Held while tickets change their state. Reentrant: a signal handler may end a request."""


def follow(sink: Sink) -> None:
    """Passes spans to a recording, from now on."""
    _sinks.append(sink)


def leave(sink: Sink) -> None:
    """Passes no more spans to a recording, not those of batches that run either; repeated calls have no effect."""
    if sink in _sinks:
        _sinks.remove(sink)


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.RLock()
    _sinks.clear()


process_changes.at_fork(process_changes.Order.STATE, in_child=_after_fork_in_child)


def error_type_of(reason: BaseException | type[BaseException] | str) -> str:
    """The class of an exception as on other spans: qualified, except builtins; a text as it is."""
    if isinstance(reason, str):
        return reason
    kind = reason if isinstance(reason, type) else type(reason)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Ticket:
    """A request that waits for a batch, made by :func:`enqueue`. Thread-safe; can be pickled, so queues between processes carry it.

    Examples:
        >>> ticket = otp.enqueue()
        >>> ticket.fail("client_disconnected")
        >>> ticket.failed
        'client_disconnected'
    """

    failed: str | None = None
    """Why the request has failed; None unless it has. A worker can leave such requests out."""
    _failed_ns = 0

    def __init__(self, span_context: trace.SpanContext, put_ns: int) -> None:
        self.span_context = span_context
        """The span of the request; an invalid context if there was none."""
        self._put_ns = put_ns

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Its copy in another process, to which its span is remote."""
        self.__dict__.update(state)
        there = self.span_context
        self.span_context = trace.SpanContext(there.trace_id, there.span_id, True, there.trace_flags, there.trace_state)

    def fail(self, reason: BaseException | type[BaseException] | str) -> None:
        """Ends the request's span in the queue or in its batch, as an error. Costs some microseconds.

        For a client that has left, a timeout, or an exception that concerns one request. Batches that begin later leave the request
        out. Further calls have no effect.

        Args:
            reason: an exception, or a short text of few different values, such as ``client_disconnected``: the attribute
                ``error.type``.
        """
        now, error_type = now_ns(), error_type_of(reason)
        with _lock:
            if self.failed is not None:
                return
            self._failed_ns, self.failed = now, error_type
            put_ns = self.take()
        if put_ns >= 0 and self.span_context.trace_flags & 1:
            add(
                EndedBatch(
                    put_ns, now, None, trace.INVALID_SPAN_CONTEXT, [self.span_context], [put_ns], {}, None, error_type
                )
            )

    def take(self) -> int:
        """Takes the request out of its queue; returns when it was put in, Unix ns, -1 if unknown or if it was taken before."""
        put_ns, self._put_ns = self._put_ns, -1
        return put_ns

    @property
    def failure(self) -> tuple[int, str]:
        """Time, Unix ns, and reason of the failure."""
        return self._failed_ns, self.failed or ""


def add(ended: EndedBatch | EndedRequest) -> None:
    """Passes what has ended to all recordings."""
    for sink in tuple(_sinks):
        sink.add(ended)


def enqueue() -> Ticket:
    """Notes that the current request waits for a batch, from now on. Costs 1.5 microseconds.

    Call it where the request is put into a queue, with the request's span current, and give the ticket to
    :class:`batch` together with the others. Works while torch is not instrumented, too. Thread-safe.

    Returns:
        A ticket for one batch or several; for another time in a queue, call ``enqueue`` again.

    Examples:
        >>> ticket = otp.enqueue()
        >>> with otp.batch([ticket]):
        ...     y = torch.ones(3) + 1
    """
    return Ticket(trace.get_current_span().get_span_context(), now_ns())


def _ticket(request: Any) -> Ticket:
    if isinstance(request, Ticket):
        return request
    if isinstance(request, otel_context.Context):
        request = trace.get_current_span(request)
    if isinstance(request, trace.Span):
        request = request.get_span_context()
    if isinstance(request, trace.SpanContext):
        return Ticket(request, -1)
    raise TypeError(
        f"batch() takes tickets of enqueue(), spans, span contexts and contexts, not {request!r}: pass one of these per request"
    )


class batch:  # noqa: N801 - used like a function, as record_function is
    """Runs a block as one batch that serves several requests.

    The block is a span ``torch.batch``, with its modules and operators below it and links to the requests. In the trace of each
    request, below its span, are ``torch.request.queue``, from :func:`enqueue` until the block begins, and
    ``torch.request.batch``, until it ends, with size, position, share of the time, and a link to the batch.

    The batch is below the current span, unless that has ended or is one of several requests; else it is the root of a trace. It
    is recorded if any of its requests or the current span is sampled; without any span, the provider's sampler decides. Records
    nothing while torch is not instrumented, with ``detail="metrics"``, and for no requests. An exception in the block is an error
    of the batch and of each request that has not failed before.

    For one ``with`` statement, in a thread or an asyncio task. Batches may be nested. Costs some microseconds per request.

    Args:
        requests: tickets of :func:`enqueue`, or spans, span contexts or contexts, which have no time in a queue. One that occurs
            twice counts once. Tickets that have failed are left out.
        tokens: for each request, the number of its tokens without padding; shares are then by tokens. Default: unknown.
        model: name of the model, as attribute ``gen_ai.request.model``. Default: none.

    Raises:
        TypeError: a request is of another type.
        ValueError: not as many tokens as requests.
        RuntimeError: the object was used before.

    Examples:
        >>> with otp.batch([otp.enqueue(), otp.enqueue()], tokens=[7, 12], model="tiny") as serving:
        ...     y = torch.ones(2, 12) + 1
        >>> serving.size
        2
    """

    def __init__(
        self, requests: Iterable[Any], *, tokens: Iterable[int] | None = None, model: str | None = None
    ) -> None:
        self._given = list(requests)
        counts = None if tokens is None else [min(max(int(count), 0), _MOST_TOKENS) for count in tokens]
        if counts is not None and len(counts) != len(self._given):
            raise ValueError(
                f"batch() got {len(counts)} counts of tokens for {len(self._given)} requests: pass one per request"
            )
        known: dict[int, Ticket] = {}
        self._tickets = [known.get(id(each)) or known.setdefault(id(each), _ticket(each)) for each in self._given]
        self._known, self._counts, self._model = known, counts, "" if model is None else str(model)
        self._tokens: dict[Ticket, int] = dict.fromkeys(self._tickets, 0)
        """Each request once."""
        for ticket, count in zip(self._tickets, counts or (), strict=False):
            self._tokens[ticket] += count
        self._put: list[int] = []
        self._begin = 0
        self._sinks: tuple[Sink, ...] = ()
        self._token: Any = None
        self._was_used = False
        self._own = self._parent = trace.INVALID_SPAN_CONTEXT

    @property
    def size(self) -> int:
        """Number of requests in the batch, each once; those that failed before it are left out when it begins."""
        return len(self._tokens)

    def fail(self, request: Any, reason: BaseException | type[BaseException] | str) -> None:
        """Ends one request before the others, as an error; ``reason``: as for :meth:`Ticket.fail`. Unknown requests are ignored."""
        if (ticket := self._known.get(id(request))) is not None:
            ticket.fail(reason)

    def __enter__(self) -> Self:
        begin = now_ns()
        with _lock:
            if self._was_used:
                raise RuntimeError("batch() is for one with statement: make another one for the next")
            self._was_used, self._begin = True, begin
            self._tokens = {ticket: count for ticket, count in self._tokens.items() if ticket.failed is None}
            self._put = [ticket.take() for ticket in self._tokens]
        self._sinks = tuple(_sinks) if self._tokens else ()
        if self._sinks:
            self._own = self._span_context(self._sinks[-1])
            self._token = otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(self._own)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _where: types.TracebackType | None
    ) -> None:
        end = now_ns()
        if self._token is None:
            return
        token, self._token = self._token, None
        otel_context.detach(token)
        # Not one that began later, as in a forked child: it has not seen the batch begin.
        if sinks := [sink for sink in self._sinks if sink in _sinks and self._own.trace_flags & 1]:
            ended = self.ended(end, kind)
            for sink in sinks:
                sink.span_ended(self._own.span_id)
                sink.add(ended)

    @property
    def tickets(self) -> Iterable[Ticket]:
        """The requests in the batch."""
        return self._tokens

    def ended(self, end: int, kind: type[BaseException] | None) -> EndedBatch:
        """The batch after its end, Unix ns; ``kind``: of the exception that has left it."""
        return EndedBatch(
            self._begin,
            max(end, self._begin),
            self._own,
            self._parent,
            [ticket.span_context for ticket in self._tokens],
            self._put,
            {place: ticket.failure for place, ticket in enumerate(self._tokens) if ticket.failed is not None},
            None if self._counts is None else list(self._tokens.values()),
            "" if kind is None else error_type_of(kind),
            self._model,
        )

    def _span_context(self, sink: Sink) -> trace.SpanContext:
        """The batch's own span, whose flags say whether it is recorded."""
        contexts, span = [ticket.span_context for ticket in self._tokens], trace.get_current_span()
        current, is_sampled = span.get_span_context(), any(context.trace_flags & 1 for context in contexts)
        # A task that a request's task began has that request's span as its current one, for all requests after it, too.
        is_inherited = getattr(span, "end_time", None) is not None or (len(contexts) > 1 and current in contexts)
        if current.is_valid and not is_inherited and (current.trace_flags & 1 or not is_sampled):
            self._parent = current
            return _context(current.trace_id, sink.new_span_id(), current.trace_flags, current.trace_state)
        of_sampler = sink.new_trace(BATCH_NAME)
        has_spans = any(context.is_valid for context in contexts)
        return _context(of_sampler.trace_id, sink.new_span_id(), is_sampled or (of_sampler.exported and not has_spans))


def _context(trace_id: int, span_id: int, flags: int, state: trace.TraceState | None = None) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=trace.TraceFlags(flags), trace_state=state)


def child_context(parent: trace.SpanContext, name: str) -> trace.SpanContext:
    """A new span below another one; without that, the root of a trace. Its flags say whether it is recorded."""
    if not _sinks:
        return trace.INVALID_SPAN_CONTEXT
    sink = _sinks[-1]
    if parent.is_valid:
        return _context(parent.trace_id, sink.new_span_id(), parent.trace_flags, parent.trace_state)
    of_sampler = sink.new_trace(name)
    return _context(of_sampler.trace_id, sink.new_span_id(), of_sampler.exported)


leave_uncompiled(__name__)
