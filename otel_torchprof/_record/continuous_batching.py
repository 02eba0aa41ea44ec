"""Continuous batching of transformers: each step of its engine is a batch of the requests that it serves.

A request is known by the object with its state, from the call that makes it, on the thread and in the context of the caller. Untested with
its asynchronous mode, which needs CUDA graphs: there a step ends when its work is queued.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace

from otel_torchprof._columns.generation import TEXT_COMPLETION, Generation
from otel_torchprof._model.request_spans import EndedRequest
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._process.wrapped_calls import WrappedCalls

from . import generations
from .batches import Ticket, add, batch, child_context, error_type_of
from .compiled_code import leave_uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._model.request_spans import EndedBatch
    from otel_torchprof._process.wrapped_calls import Wrapper

_PACKAGE = "transformers.generation.continuous_batching"
_WARMUP = "__warmup_"
_PREFILL, _DECODE = "prefill", "decode"
_log = LimitedLog()


class _Request:
    """A request to the engine."""

    def __init__(self) -> None:
        self.put_ns = now_ns()
        self.parent = trace.get_current_span().get_span_context()
        self._context: trace.SpanContext | None = None
        self._ticket: Ticket | None = None
        self.model, self.is_streamed = "", False
        self.first_ns, self.input_tokens, self.tokens, self.preemptions = 0, 0, 0, 0
        self.was_served = False
        self.sequences = 1
        """Number of sequences that have not ended."""

    @property
    def context(self) -> trace.SpanContext:
        """Its own span, which begins with its first step."""
        if self._context is None:
            self._context = child_context(self.parent, f"{TEXT_COMPLETION} {self.model}")
        return self._context

    @property
    def ticket(self) -> Ticket:
        """Its ticket for the next step."""
        if self._ticket is None:
            self._ticket = Ticket(self.context, self.put_ns)
        return self._ticket

    def stepped(self, model: str, state: Any) -> Ticket:
        """Returns the ticket for a step that begins."""
        if not self.was_served:  # a state after a preemption has the generated tokens in its prompt
            self.model, self.input_tokens = model, len(state.initial_tokens)
            self.is_streamed = bool(state.streaming)
        self.was_served = True
        return self.ticket

    def wait_again(self) -> None:
        """Notes that it is back in the queue, if it was in a step before."""
        if self.was_served:
            self.preemptions += 1
            self._ticket = Ticket(self.context, now_ns())

    def token(self, *, is_last: bool) -> None:
        """Notes a generated token."""
        self.first_ns = self.first_ns or now_ns()
        self.tokens += 1
        self.sequences -= is_last
        if is_last and self.sequences == 0:
            self.end("")

    def end(self, error_type: str) -> None:
        """Ends its span; ``error_type``: empty unless it failed."""
        if self.put_ns < 0:
            return
        if error_type:
            self.ticket.fail(error_type)
        end, put_ns, self.put_ns = now_ns(), self.put_ns, -1
        generation = Generation(
            model=self.model,
            batch_size=None,
            input_tokens=self.input_tokens,
            choices=None,
            output_tokens=self.tokens,
            new_tokens=self.tokens,
            is_streamed=self.is_streamed,
            duration=(end - put_ns) / 1e9,
            first_token=(self.first_ns - put_ns) / 1e9 if self.first_ns else None,
            error_type=error_type,
        )
        generations.shared.note(0, generation)
        if self.context.trace_flags & 1:
            name = f"{TEXT_COMPLETION} {self.model}"
            add(EndedRequest(put_ns, end, self.context, self.parent, name, generation, self.preemptions))


class _RequestsByState:
    """The requests of the process by their state objects, of which a request may have several, and which it does not keep alive."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[weakref.ref[Any], _Request]] = {}

    def note(self, state: Any, request: _Request) -> None:
        """Notes the request of a state."""
        key = id(state)
        self._requests[key] = weakref.ref(state, lambda reference: self._forget(key, reference)), request

    def get(self, state: Any) -> _Request | None:
        """The request of a state; None if it is not known."""
        known = self._requests.get(id(state))
        return known[1] if known is not None and known[0]() is state else None

    def clear(self) -> None:
        """Forgets all."""
        self._requests.clear()

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self._requests.get(key)
        if known is not None and known[0] is reference:
            self._requests.pop(key, None)


_known = _RequestsByState()


class _Step(batch):
    """A step of the engine."""

    def __init__(self, processor: Any, model: Any, states: list[Any]) -> None:
        name = generations.name_of(model)
        tickets, counts, self._phases = [], [], dict[Ticket, str]()
        for future in states:
            request, state = _known.get(future.state), future.state
            ticket = Ticket(trace.INVALID_SPAN_CONTEXT, -1) if request is None else request.stepped(name, state)
            self._phases[ticket] = _DECODE if state.generated_tokens else _PREFILL
            tickets.append(ticket)
            counts.append(future.query_length)
        self._cache_usage = 1.0 - float(processor.cache.compute_free_capacity())
        super().__init__(tickets, tokens=counts, model=name)

    def ended(self, end: int, kind: type[BaseException] | None) -> EndedBatch:
        phases = [self._phases[ticket] for ticket in self.tickets]
        return super().ended(end, kind)._replace(phases=phases, cache_usage=self._cache_usage)


# ---- What is wrapped ----


class _EngineCall(NamedTuple):
    """A method of the engine."""

    module: str
    path: str
    note: Callable[[tuple[Any, ...], Any], None] | None
    """Called after it with its positional arguments and its result. None: it is a step, and a batch."""


def _guarded(note: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of ours, whose errors the program does not notice."""
    try:
        return note(*arguments)
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("nothing is known of a request to continuous batching: %s: %s", type(error).__name__, error)
        return None


def _made(arguments: tuple[Any, ...], _result: Any) -> None:
    (state,) = arguments
    if not state.request_id.startswith(_WARMUP):
        _known.note(state, _Request())


def _copied(arguments: tuple[Any, ...], result: Any) -> None:
    """A request that is preempted without its cache gets another state."""
    if (request := _known.get(arguments[0])) is not None:
        _known.note(result, request)


def _forked(arguments: tuple[Any, ...], result: Any) -> None:
    """A further sequence of a request."""
    if (request := _known.get(arguments[0])) is not None:
        request.sequences += 1
        _known.note(result, request)


def _waits(arguments: tuple[Any, ...], _result: Any) -> None:
    if (request := _known.get(arguments[1])) is not None:
        request.wait_again()


def _generated(arguments: tuple[Any, ...], result: Any) -> None:
    if (request := _known.get(arguments[0])) is not None:
        request.token(is_last=bool(result))


def _failed(arguments: tuple[Any, ...], _result: Any) -> None:
    if (request := _known.get(arguments[1])) is not None:
        request.end(error_type_of(arguments[2]))


def _cancelled(_arguments: tuple[Any, ...], result: Any) -> None:
    for state in result:
        if (request := _known.get(state)) is not None:
            request.end("cancelled")


_CALLS = (
    _EngineCall(f"{_PACKAGE}.requests", "RequestState.__post_init__", _made),
    _EngineCall(f"{_PACKAGE}.requests", "RequestState.create_equivalent_initial_request", _copied),
    _EngineCall(f"{_PACKAGE}.requests", "RequestState.fork", _forked),
    _EngineCall(f"{_PACKAGE}.requests", "RequestState.update_and_check_completion", _generated),
    _EngineCall(f"{_PACKAGE}.scheduler", "Scheduler.add_waiting_request", _waits),
    _EngineCall(f"{_PACKAGE}.scheduler", "Scheduler.clear_cancelled_requests", _cancelled),
    _EngineCall(f"{_PACKAGE}.continuous_api", "OutputRouter.fail_and_deliver", _failed),
    _EngineCall(f"{_PACKAGE}.continuous_api", "ContinuousBatchProcessor._generation_step", None),
)


def _step_of(arguments: tuple[Any, ...]) -> batch:
    processor, model = arguments
    inputs = processor.inputs_and_outputs
    if hasattr(inputs, "io_pairs"):
        inputs = inputs.io_pairs[inputs.current_pair]
    return _Step(processor, model, list(inputs.requests_in_batch)).__enter__()


def _wrapper(call: _EngineCall, function: Callable[..., Any]) -> Wrapper:
    is_on = True

    def retire() -> None:
        nonlocal is_on
        is_on = False

    @functools.wraps(function)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        if is_on and call.note is not None:
            _guarded(call.note, (*arguments, *keywords.values()), result)
        return result

    @functools.wraps(function)
    def step(*arguments: Any, **keywords: Any) -> Any:
        running = _guarded(_step_of, (*arguments, *keywords.values())) if is_on else None
        kind = None
        try:
            return function(*arguments, **keywords)
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            if running is not None:
                _guarded(running.__exit__, kind, None, None)

    return step if call.note is None else noted, retire


leave_uncompiled(__name__)

shared = WrappedCalls(_CALLS, _wrapper)
"""The wrapped methods of the process."""


def after_fork_in_child() -> None:
    """Forgets the requests, which the parent serves."""
    shared.after_fork_in_child()
    _known.clear()
    _log.after_fork_in_child()
